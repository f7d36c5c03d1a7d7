"""Fault group C: graph breaks, recompiles, and compiled results that differ from eager ones.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from test_faults_index import BACKENDS, TRITON, assert_right, rest_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, apply_rope
from rope_compile.kernels import triton_rope
from rope_compile.ops import rope_op

from support import randn, run_child, ulp_distance

compiles = pytest.mark.usefixtures("fresh_compiler")

LONG = {
    "short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8, "original_max_position": 64,
    "factor": 4.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "dynamic": {
        "scaling": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    },
    "yarn": {"scaling": rc.YarnScaling(factor=4.0, original_max_position=64)},
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        )
    },
    "longrope": {"scaling": rc.LongRopeScaling(policy="static", **LONG)},
    "longrope_by_length": {"scaling": rc.LongRopeScaling(policy="by_length", length=64, **LONG)},
    "mrope": {"axes": rc.ChunkedAxes((2, 3, 3))},
    "mrope_interleaved": {"axes": rc.InterleavedAxes((4, 2, 2))},
}


def config(rows: int = 128, **fields: object) -> RopeConfig:
    return RopeConfig(head_dim=16, max_position=rows, **fields)


class Layer(nn.Module):
    """A projection, its slices rotated, and work behind it."""

    def __init__(self, made: RopeConfig) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(made, "cpu")
        self.weight = nn.Parameter(randn(16, 96, seed=3))

    def forward(self, positions: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x @ self.weight).view(-1, 6, 16).split([3, 2, 1], 1)
        q, k = self.rope(positions, q, k)
        return q.relu(), k, v


def positions_for(made: RopeConfig, tokens: int) -> Tensor:
    positions = torch.arange(tokens) * 37 - 11
    return positions.expand(made.num_axes, -1) if made.num_axes else positions


# --------------------------------------------------------------------------------------------- C1


@compiles
@pytest.mark.parametrize("name", CONFIGS)
def test_c1_a_layer_is_one_graph(name: str) -> None:
    """A cache update or decision in forward breaks the graph, huggingface/transformers #35716."""
    made = config(**CONFIGS[name])
    found = torch._dynamo.explain(Layer(made))(positions_for(made, 7), randn(7, 16))
    assert (found.graph_count, found.graph_break_count, found.break_reasons) == (1, 0, [])


@compiles
def test_c1_a_choice_by_token_is_one_graph() -> None:
    """A cache update or decision in forward breaks the graph, huggingface/transformers #35716."""
    rope = rc.RopeSelector([RotaryEmbedding(config(base=base), "cpu") for base in (1e4, 5e5)])

    def forward(positions: Tensor, q: Tensor, selector: Tensor) -> Tensor:
        return rope(positions, q, selector=selector)[0].relu()

    arguments = torch.arange(7) * 37 - 11, randn(7, 3, 16), torch.arange(7) % 2
    found = torch._dynamo.explain(forward)(*arguments)
    assert (found.graph_count, found.graph_break_count, found.break_reasons) == (1, 0, [])


@compiles
def test_c1_a_decision_in_forward_would_be_counted() -> None:
    """Wrong twin of huggingface/transformers #35716: the longest position chooses the factors."""
    short, long = (RotaryEmbedding(config(base=base), "cpu") for base in (1e4, 5e5))

    def forward(positions, q):
        return (long if positions.max() > 64 else short)(positions, q)[0]

    found = torch._dynamo.explain(forward)(torch.arange(7), randn(7, 2, 16))
    assert found.graph_break_count > 0


# --------------------------------------------------------------------------------------------- C3

COUNTS = (5, 7, 16, 1, 0, 33)


def frames(function, arguments, **options: object) -> int:
    """Graphs that a function costs over these calls, each equal to eager."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for given in arguments:
        out, expected = compiled(*given), function(*given)
        assert torch.equal(out[0], expected[0])
    return counter.frame_count


def of_tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(count) * 37 - 11, randn(count, 3, 16, seed=1), randn(count, 2, 16, seed=2)


@compiles
@pytest.mark.parametrize(("dynamic", "most"), [(True, 3), (None, 4)])
@pytest.mark.parametrize("name", ["default", "yarn", "mrope"])
def test_c3_token_counts_cost_few_graphs(name: str, dynamic: bool | None, most: int) -> None:
    """Guards on Python ints or tensor identity, meta-pytorch/torchtune PR #1663."""
    made = config(**CONFIGS[name])
    rope = RotaryEmbedding(made, "cpu")
    calls = [(positions_for(made, n), *of_tokens(n)[1:]) for n in COUNTS]
    assert frames(rope, calls, dynamic=dynamic) == most


@compiles
def test_c3_a_table_costs_what_it_must() -> None:
    """A recreated tensor is guarded by identity, huggingface/diffusers PR #10959: table forms."""
    rows = RotaryEmbedding(config(1024), "cpu").cos_sin_cache
    at, q, k = of_tokens(7)

    def by_argument(table: Tensor) -> tuple[Tensor, Tensor | None]:
        return apply_rope(q, k, at, table)

    grown = [(rows[:size].clone(),) for size in (128, 256, 384, 512, 640)]
    assert frames(by_argument, grown) == 2
    reserved = RotaryEmbedding(config(), "cpu")
    reserved.reserve(1024)
    assert frames(reserved, [(at + start, q, k) for start in (0, 128, 512, 1023, 9999)]) == 1
    again = [(RotaryEmbedding(config(), "cpu").cos_sin_cache,) for _ in range(5)]
    assert frames(by_argument, again) == 1


@compiles
def test_c3_a_guarded_number_or_buffer_would_be_counted() -> None:
    """Wrong twins of meta-pytorch/torchtune PR #1663: a size that grows, a buffer rebound."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = RotaryEmbedding(config(1024), "cpu").cos_sin_cache
            self.size = 128

        def grow(self, size: int) -> None:
            self.size = size

        def forward(self, positions, q):
            return apply_rope(q, None, positions.clamp(max=self.size - 1), self.rows)[0]

    class Rebound(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", self.rows[:128])

        def grow(self, size: int) -> None:
            self.cache = self.rows[:size].clone()

        def forward(self, positions, q):
            return apply_rope(q, None, positions, self.cache)[0]

    for module in (Sized(), Rebound()):
        torch.compiler.reset()
        counter = CompileCounter()
        compiled = torch.compile(module, fullgraph=True, backend=counter)
        for size in (128, 256, 384, 512, 640):
            module.grow(size)
            compiled(torch.arange(7), randn(7, 3, 16))
        assert counter.frame_count == 5, type(module)


# --------------------------------------------------------------------------------------------- C4


@compiles
@pytest.mark.parametrize("strict", [False, True])
def test_c4_an_export_serves_every_token_count(strict: bool) -> None:
    """0/1 specialisation, pytorch/pytorch #135005: traced at 5 tokens, run at 2 to 4096."""
    layer = Layer(config(rotary_dim=8)).eval()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        layer, (torch.arange(5), randn(5, 16)), dynamic_shapes=({0: tokens}, {0: tokens}),
        strict=strict,
    ).module()  # fmt: skip
    for count in (2, 3, 17, 4096):
        positions, x = torch.arange(count) * 37 - 11, randn(count, 16)
        for out, expected in zip(program(positions, x), layer(positions, x), strict=True):
            assert torch.equal(out, expected)


@compiles
@pytest.mark.parametrize("order", [(1, 2, 3, 0), (0, 5, 1)])
@pytest.mark.parametrize("mark", [None, torch._dynamo.mark_dynamic])
def test_c4_the_first_token_count_fixes_nothing(order, mark) -> None:
    """Batch silently fixed to 1, pytorch/pytorch #133653: whichever count comes first."""
    rope = RotaryEmbedding(config(), "cpu")
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for count in order:
        positions, q, k = of_tokens(count)
        for x in (positions, q, k) if mark else ():
            mark(x, 0)
        assert_right(compiled(positions, q, k), (q, k), positions, rope.config)


@compiles
def test_c4_one_token_first_costs_one_more_graph() -> None:
    """Batch silently fixed to 1, pytorch/pytorch #133653: marked dynamic, then any count."""
    rope, counter = RotaryEmbedding(config(), "cpu"), CompileCounter()
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    found = []
    for count in (1, 2, 3, 17, 4096, 1):
        positions, q, k = of_tokens(count)
        for x in (positions, q, k):
            torch._dynamo.mark_dynamic(x, 0)
        assert_right(compiled(positions, q, k), (q, k), positions, rope.config)
        found.append(counter.frame_count)
    assert found == [1, 2, 2, 2, 2, 2]


@compiles
def test_c4_a_specialised_program_would_be_refused() -> None:
    """Wrong twin of pytorch/pytorch #122307: a branch on the token count contradicts the range."""

    class Branching(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return q * 2 if q.shape[0] == 5 else q

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with pytest.raises(Exception, match=r"[Cc]onstraint"):
        torch.export.export(Branching(), (randn(5, 2),), dynamic_shapes=({0: tokens},))


# --------------------------------------------------------------------------------------------- C5

TOKENS = (1, 3, 16, 17, 62, 4096)


def launch_of(tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16):
    """Keyword arguments of one launch of the Triton kernel; nothing runs."""
    shapes = ((batch, tokens, heads, 64) for heads in (8, 2))
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    at = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
    table, inv_freq = torch.empty(128, 64, device="meta"), torch.empty(32, device="meta")
    _, arguments = triton_rope.launch_arguments(
        [(torch.empty_like(q), q), (torch.empty_like(k), k)],
        at, table, inv_freq, (), "half", 0, 1.0, False,
    )  # fmt: skip
    return arguments


def constexprs(arguments: dict[str, object]) -> dict[str, object]:
    return {name: x for name, x in arguments.items() if name.isupper()}


def specialised(kernel) -> set[str]:
    """Numbers of a launch whose classes (1, multiples of 16, other) have binaries of their own."""
    given = launch_of(7)
    numbers = {name for name in kernel.arg_names if type(given[name]) is int}
    return numbers - set(constexprs(given)) - set(kernel.do_not_specialize)


def test_c5_no_runtime_number_is_specialised() -> None:
    """Triton integer specialisation recompiles, Dao-AILab/flash-attention PR #911: none is."""
    kernel = triton_rope.rope_kernel
    assert {"seq", "batch_size"} <= set(kernel.do_not_specialize)
    assert not specialised(kernel)


def test_c5_constants_do_not_depend_on_the_token_count() -> None:
    """A constexpr cannot be un-specialised, triton-lang/triton #8273: heads and widths alone."""
    first = constexprs(launch_of(4096))
    for count in TOKENS:
        for batch in (1, 3, 16):
            assert constexprs(launch_of(count, batch)) == first


def test_c5_every_number_is_used() -> None:
    """Unused arguments are still specialised, vllm-project/vllm PR #42849: there is none."""
    source = inspect.getsource(triton_rope.rope_kernel.fn)
    body = source[source.index('"""') :]
    for name in inspect.signature(triton_rope.rope_kernel.fn).parameters:
        assert re.search(rf"\b{name}\b", body), name


def test_c5_a_specialised_kernel_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm-ascend PR #13637: the same kernel without the list."""
    import triton

    assert "seq" in specialised(triton.jit(triton_rope.rope_kernel.fn))
    assert constexprs(launch_of(4096)) != constexprs(launch_of(4096, dtype=torch.float32))


# --------------------------------------------------------------------------------------------- C6

HIDDEN = """
import sys; sys.modules['triton'] = None
import torch, rope_compile as rc
from rope_compile.ops import rope_op
for name in ('rope_compile::rope', 'rope_compile::rope_'):
    for key in ('CPU', 'Meta', 'AutogradCPU', 'CUDA'):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=4, max_position=128), 'cpu')
at, q = torch.tensor([9, 999]), torch.ones(2, 1, 4)
found = []
def backend(graph, _):
    found.extend(n.target for n in graph.graph.nodes)
    return graph
out = torch.compile(rope, fullgraph=True, backend=backend)(at, q)[0]
assert torch.equal(out, rope(at, q)[0]) and not torch.equal(out, q)
assert found.count(rope_op) == 1
assert torch.ops.rope_compile.rope(*(x.to('meta') for x in (q, q, at, rope.cos_sin_cache)),
    None, [], 'half', 0, 1.0, False)[0].shape == q.shape
print('registered')
"""


def test_c6_the_operator_is_there_without_triton() -> None:
    """Registration is a no-op and Dynamo traces on, flashinfer-ai/flashinfer #2733."""
    assert run_child("-W", "ignore", "-c", HIDDEN).strip() == "registered"


BROKEN = """
import torch
def refuse(*arguments, **options):
    raise OSError("no registration")
torch.library.Library.define = refuse
import rope_compile
"""


def test_c6_a_registration_that_fails_fails_loudly() -> None:
    """Registration is a no-op and Dynamo traces on, flashinfer-ai/flashinfer #2733: it raises."""
    with pytest.raises(AssertionError, match="OSError: no registration"):
        run_child("-W", "ignore", "-c", BROKEN)


@compiles
def test_c6_a_function_that_is_no_operator_would_be_found() -> None:
    """Wrong twin of AMD-Ecosystem/flashinfer PR #210: a decorator that registers nothing."""
    targets: list[object] = []

    def backend(graph, _inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    def registered(function):
        return function

    rope = RotaryEmbedding(config(), "cpu")

    @registered
    def plain(positions, q):
        low, high = q.chunk(2, -1)
        cos, sin = rope.cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    at, q = torch.arange(7), randn(7, 2, 16)
    torch.compile(plain, fullgraph=True, backend=backend)(at, q)
    assert rope_op not in targets
    torch.compile(rope, fullgraph=True, backend=backend)(at, q)
    assert targets.count(rope_op) == 1


# --------------------------------------------------------------------------------------------- C8

SECTIONS = rc.InterleavedAxes((24, 20, 20))


def by_slices(x: Tensor) -> Tensor:
    """The step-3 assignments between planes that were miscompiled."""
    chosen = x[0].clone()
    for axis in (1, 2):
        chosen[..., axis : 3 * 20 : 3] = x[axis][..., axis : 3 * 20 : 3]
    return chosen


def by_mask(x: Tensor) -> Tensor:
    axes = torch.tensor(SECTIONS.lane_axes(128))
    return torch.where(axes == 0, x[0], torch.where(axes == 1, x[1], x[2]))


def test_c8_the_map_is_the_slices() -> None:
    """Interleaved M-RoPE slice assignment, vllm-project/vllm PR #40680: the lanes of each axis."""
    x = randn(3, 7, 64)
    assert torch.equal(by_mask(x), by_slices(x))
    wrong = x[0].clone()
    wrong[..., 0 : 3 * 20 : 3] = x[1][..., 0 : 3 * 20 : 3]  # the twin: one lane off
    assert not torch.equal(by_mask(x), wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c8_interleaved_sections_are_right(backend) -> None:
    """Interleaved M-RoPE is miscompiled, vllm-project/vllm PR #52005: in eager mode."""
    rope = RotaryEmbedding(RopeConfig(head_dim=128, max_position=128, axes=SECTIONS), "cpu")
    at = torch.stack([torch.arange(7) * step + 1 for step in (1, 5, 37)])
    q, k = randn(7, 2, 128, seed=1), randn(7, 1, 128, seed=2)
    assert_right(backend(q, k, at, *rest_of(rope)), (q, k), at, rope.config)


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_c8_interleaved_sections_compile_to_the_same(backend: str) -> None:
    """Interleaved M-RoPE is miscompiled, vllm-project/vllm PR #52005: compiled equals eager."""
    rope = RotaryEmbedding(RopeConfig(head_dim=128, max_position=128, axes=SECTIONS), "cpu")
    compiled = torch.compile(rope, fullgraph=True, backend=backend)
    q, k = randn(7, 2, 128, seed=1), randn(7, 1, 128, seed=2)
    for shift in (0, 1):
        at = torch.stack([torch.arange(7) * step + shift for step in (1, 5, 37)])
        outs = compiled(at, q, k)
        assert_right(outs, (q, k), at, rope.config)
        assert all(torch.equal(a, b) for a, b in zip(outs, rope(at, q, k), strict=True))


# --------------------------------------------------------------------------------------------- C9


def long_input(dtype: torch.dtype, tokens: int = 4096) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens), randn(tokens, 2, 16, dtype=dtype)


@compiles
def test_c9_inductor_fuses_no_rounding_away() -> None:
    """A bf16 rounding is fused away, pytorch/torchtitan PR #2575: work around the rotation too."""
    rope = RotaryEmbedding(config(1024), "cpu")

    def block(positions, x):
        q = (x.float() * 1.1).to(x.dtype)
        return rope(positions, q)[0].float() * 0.9

    positions, x = long_input(torch.bfloat16)
    compiled = torch.compile(block, fullgraph=True)(positions, x)
    assert torch.equal(compiled, block(positions, x))
    q = (x.float() * 1.1).to(x.dtype)
    assert_right(rope(positions, q), (q, None), positions, rope.config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c9_every_backend_rounds_once(backend, dtype: torch.dtype) -> None:
    """A gap between a custom op and the native path, NVIDIA-NeMo/RL PR #2981: at most 1 ulp."""
    rope = RotaryEmbedding(config(1024), "cpu")
    triton = backend is TRITON
    positions, x = long_input(dtype, 64 if triton else 4096)
    positions = positions * 64 if triton else positions
    out = backend(x, None, positions, *rest_of(rope))
    assert_right(out, (x, None), positions, rope.config, truncated=triton)
    plain = torch.ops.rope_compile.rope_torch(x, None, positions, *rest_of(rope))[0]
    if dtype == torch.bfloat16:
        far = ulp_distance(out[0], plain) > 1
        assert ((out[0] - plain).abs()[far] <= 1e-6 * x.abs().max()).all()
    else:
        torch.testing.assert_close(out[0], plain, rtol=0, atol=1e-6)


def test_c9_a_second_rounding_would_be_found() -> None:
    """Wrong twin of pytorch/torchtitan PR #2575: cos and sin rounded to bfloat16 first."""
    rope = RotaryEmbedding(config(1024), "cpu")
    positions, x = long_input(torch.bfloat16)
    cache, *rest = rest_of(rope)
    out = rope_op(x, None, positions, cache.bfloat16().float(), *rest)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (x, None), positions, rope.config)
