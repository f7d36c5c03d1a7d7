"""torch.compile, export and autocast around the operator: one graph, no break, bit-identical."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import rope_compile as rc
from rope_compile import RotaryEmbedding, apply_rope, apply_rope_, factory, get_rope
from rope_compile.ops import rope_op

from oracle import oracle_table
from support import randn

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 16
ROWS = 128
INV_FREQ = (1.0 / 1e4 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)).float()
TABLE = oracle_table(ROWS, INV_FREQ)

# ------------------------------------------------------------------------------- how many graphs

LENGTHS = (7, 8, 16, 100, 128, 1000, 4096)
BATCHES = (5, 2, 3, 8)  # 5 first: equal to no other size, so no two dimensions share a symbol

# What one compiled function costs in graphs, measured on torch 2.13 and 2.14, and repeated in the
# README: (layout, how it is told that sizes vary) -> (while all sizes are 2 or more, once some are
# 1, once the sequence is empty).
#
# The differences are Dynamo's own. Sizes 0 and 1 are specialised unless marked unbacked, batch and
# sequence in combination; the default starts static and makes one dimension at a time dynamic. An
# empty sequence behind a batch has strides like no other, so it is a graph of its own in any case.
GRAPHS = {
    ("[T, H, D]", "mark_unbacked"): (1, 1, 1),
    ("[T, H, D]", "mark_dynamic"): (1, 2, 3),
    ("[T, H, D]", "dynamic=True"): (1, 2, 3),
    ("[T, H, D]", "default"): (2, 3, 4),
    ("[B, T, H, D]", "mark_unbacked"): (1, 1, 2),
    ("[B, T, H, D]", "mark_dynamic"): (1, 4, 5),
    ("[B, T, H, D]", "dynamic=True"): (1, 4, 5),
    ("[B, T, H, D]", "default"): (3, 6, 7),
}

# Graphs that a change adds once a function is compiled. Going back adds none.
CHANGES = {
    "another token count": 0,
    "reserve() within the capacity": 0,
    "rebuild_()": 0,
    "reserve() past the capacity": 1,
    "reserve() past the capacity again": 1,
    "another base": 0,  # the table is an input of the graph
    "another scaling": 0,
    "another magnitude": 1,  # a constant of the graph, like the rest
    "another style": 1,
    "partial rotation": 1,
    "multi-axis positions": 1,
    "another dtype": 1,
    "another device": 1,
    "inverse": 1,
    "no k": 1,
}

MARKS: dict[str, Callable[[Tensor, int], None]] = {
    "mark_unbacked": torch._dynamo.decorators.mark_unbacked,
    "mark_dynamic": torch._dynamo.mark_dynamic,
}

YARN = rc.YarnScaling(factor=4.0, original_max_position=64)
LLAMA3 = rc.Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
LONG = {
    "short_factor": (1.0,) * (WIDTH // 2),
    "long_factor": (2.0,) * (WIDTH // 2),
    "original_max_position": 64,
    "factor": 4.0,
}
DRAWN = randn(max(BATCHES) * max(LENGTHS) * 3 * WIDTH)
AXES = rc.ChunkedAxes((2, 3, 3))
CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "ntk": {"scaling": rc.NtkScaling(factor=4.0)},
    "ntk_mixed": {"scaling": rc.NtkScaling(factor=4.0, mixed_b=0.5)},
    "ntk_alpha": {"scaling": rc.NtkAlphaScaling(alpha=100.0)},
    "dynamic": {
        "scaling": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    },
    "yarn": {"scaling": YARN},
    "deepseek_yarn": {
        "scaling": rc.DeepseekYarnScaling(factor=40.0, original_max_position=64, mscale=0.7)
    },
    "llama3": {"scaling": LLAMA3},
    "longrope": {"scaling": rc.LongRopeScaling(policy="static", **LONG)},
    "proportional": {"scaling": rc.ProportionalScaling(partial_rotary_factor=0.5)},
    "interleaved": {"style": "interleaved"},
    "partial": {"rotary_dim": 8, "rotary_offset": 8},
    "multi_axis": {"axes": AXES},
}


def config(rows: int = ROWS, **fields: object) -> rc.RopeConfig:
    return rc.RopeConfig(head_dim=WIDTH, max_position=rows, **fields)


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    factory.registry.clear()
    yield
    factory.registry.clear()


def make(
    tokens: int,
    batch: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    axes: int | None = None,
):
    """q, k and positions, some of them outside any table; head counts equal no token count."""
    shape = (tokens,) if batch is None else (batch, tokens)
    positions = torch.arange(tokens) * 37 - 11
    if axes:
        positions = torch.stack([positions + 5 * axis for axis in range(axes)])
    q, k = ((*shape, heads, WIDTH) for heads in (3, 2))
    return drawn(q).to(dtype, copy=True), drawn(k).to(dtype, copy=True), positions


def drawn(shape: tuple[int, ...]) -> Tensor:
    """A view of numbers drawn once: a sweep makes hundreds of large tensors."""
    return DRAWN[: math.prod(shape)].view(shape)


def rotate(q, k, positions):
    return apply_rope(q, k, positions, TABLE, inv_freq=INV_FREQ)


def call(rope, q, k, positions, **options):
    return rope(positions, q, k, **options)


def call_in_place(rope, q, k, positions, **options):
    """On copies, so that arguments serve again; inside a graph the copy is an ordinary node."""
    q, k = q.clone(), k.clone()
    rope.apply_(positions, q, k, **options)
    return q, k


def inverse(function: Callable) -> Callable:
    return functools.partial(function, inverse=True)


class Compiled:
    """A compiled function; every result is compared with eager's, and the graphs are counted."""

    def __init__(self, function: Callable, how: str = "default", backend: str = "aot_eager"):
        torch.compiler.reset()
        self.function, self.how = function, how
        self.counter = CompileCounterWithBackend(backend)
        dynamic = True if how == "dynamic=True" else None
        self.compiled = torch.compile(
            function, fullgraph=True, backend=self.counter, dynamic=dynamic
        )

    def __call__(self, *arguments, **options) -> int:
        """Graphs so far, this call's included."""
        expected = self.function(*arguments, **options)
        if self.how in MARKS:
            q, k, positions = arguments[-3:]
            for x in (q, q if k is None else k):
                for dim in range(q.dim() - 2):
                    MARKS[self.how](x, dim)
            MARKS[self.how](positions, positions.dim() - 1)
        outs = self.compiled(*arguments, **options)
        for out, wanted in zip(outs, expected, strict=True):
            assert type(out) is type(wanted)
            if wanted is not None and wanted.device.type != "meta":
                assert torch.equal(out, wanted)
        return self.counter.frame_count


def count_graphs(compiled: Compiled, layout: str) -> tuple[int, ...]:
    """As a row of ``GRAPHS``."""
    batches = BATCHES if "B" in layout else (None,)
    several = [(n, batch) for batch in batches for n in LENGTHS]
    ones = [(1, batch) for batch in batches]
    if "B" in layout:
        ones += [(n, 1) for n in (*LENGTHS, 1)]
    return tuple(
        max(compiled(*make(*size)) for size in sizes)
        for sizes in (several, ones, [(0, batches[0])])
    )


@pytest.mark.parametrize(("layout", "how"), GRAPHS)
def test_graphs_for_every_token_count_and_batch(layout: str, how: str) -> None:
    """The functional form and the module make the same number, with equal results."""
    rope = get_rope(config(), "cpu")
    for function, backend in ((rotate, "aot_eager"), (functools.partial(call, rope), "eager")):
        assert count_graphs(Compiled(function, how, backend), layout) == GRAPHS[layout, how]


def test_mark_unbacked_gives_one_graph_for_every_token_count() -> None:
    """Whichever length comes first, 0 and 1 included."""
    lengths = (7, 13, 29, 1, 2, 0, 131)
    for first in (7, 1, 0):
        compiled = Compiled(rotate, "mark_unbacked")
        assert {compiled(*make(n)) for n in (first, *lengths)} == {1}


def test_a_shape_read_in_python_recompiles() -> None:
    """Wrong twin: a branch on the token count is seen by the counter."""

    def branching(q, k, positions):
        return rotate(q, k, positions) if q.shape[0] < 10 else rotate(q * 1, k, positions)

    compiled = Compiled(branching, "mark_dynamic")
    assert [compiled(*make(n)) for n in (7, 13)] == [1, 2]


# --------------------------------------------------------------------------- what a change costs


@torch._dynamo.config.patch(recompile_limit=len(CHANGES))  # of torch's, for one function: 8
def test_graphs_for_every_change() -> None:
    """Each change, then back to the start: how many graphs the two add, results equal to eager."""
    compiled = Compiled(call, "mark_unbacked")
    rope = RotaryEmbedding(config(), "cpu", capacity=1024)
    tensors = functools.partial(make, batch=5)
    assert compiled(rope, *tensors(7)) == 1

    measured = {}

    def measure(change: str, other=rope, **options) -> None:
        before = compiled.counter.frame_count
        arguments = options.pop("tensors", tensors(11))
        during = compiled(other, *arguments, **options)
        assert compiled(rope, *tensors(7)) == during, f"back from {change}"
        assert compiled(other, *arguments, **options) == during, f"{change} once more"
        measured[change] = during - before

    measure("another token count")
    rope.reserve(1000)
    measure("reserve() within the capacity")
    rope.cos_sin_cache.zero_()
    rope.rebuild_()
    measure("rebuild_()")
    rope.reserve(1025)
    measure("reserve() past the capacity")
    rope.reserve(2000)
    measure("reserve() past the capacity again")

    def like(**fields: object) -> RotaryEmbedding:
        return RotaryEmbedding(config(**fields), "cpu", capacity=rope.capacity)

    measure("another base", like(base=5e5))
    measure("another scaling", like(scaling=LLAMA3))
    measure("another magnitude", like(scaling=YARN))
    measure("another style", like(style="interleaved"))
    measure("partial rotation", like(rotary_dim=8))
    measure("multi-axis positions", like(axes=AXES), tensors=tensors(11, axes=3))
    measure("another dtype", tensors=tensors(11, dtype=torch.bfloat16))
    on_meta = tuple(x.to("meta") for x in tensors(11))
    # The only other device of a CPU build. A shared module keeps the table of each.
    both = get_rope(config(rope.capacity), "cpu").to("meta")
    measure("another device", both, tensors=on_meta)
    measure("inverse", inverse=True)
    q, _, positions = tensors(11)
    measure("no k", tensors=(q, None, positions))
    assert measured == CHANGES


def test_reserve_before_the_first_call_costs_nothing() -> None:
    """What prepare_for_capture does: one graph then serves every position it made room for."""
    rope = get_rope(config(), "cpu")
    rc.prepare_for_capture(rope, rc.CapturePlan(max_position=4096, margin=0))
    compiled = Compiled(call, "mark_unbacked")
    for start in (0, 100, 3000, 4090, 10**6, -5):
        q, k, positions = make(7)
        rope.reserve(max(0, min(start, 4096)))
        assert compiled(rope, q, k, positions + start) == 1


class GrowsInForward(nn.Module):
    """Wrong twin: the table follows the tokens seen, as rotary modules of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", TABLE[:8])

    def forward(self, positions, q, k):
        if q.shape[-3] > self.cache.shape[0]:
            self.cache = TABLE[: q.shape[-3]]
        return apply_rope(q, k, positions, self.cache, inv_freq=INV_FREQ)


class CastsInForward(nn.Module):
    """Wrong twin: frequencies are converted to q's dtype, and kept so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", TABLE)

    def forward(self, positions, q, k):
        self.cache = self.cache.to(q.dtype)
        return apply_rope(q, k, positions, self.cache.float(), inv_freq=INV_FREQ)


def test_a_table_that_changes_in_forward_recompiles() -> None:
    """The counter sees growth at every length, and a dtype switched there and back."""

    def graphs(rope: nn.Module, *calls) -> list[int]:
        compiled = Compiled(call)  # called past its comparison, for which eager code would grow
        return [
            (compiled.compiled(rope, *tensors), compiled.counter.frame_count)[1]
            for tensors in calls
        ]

    assert graphs(GrowsInForward(), *map(make, (7, 8, 16, 32, 64))) == [1, 2, 3, 4, 5]
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    assert graphs(CastsInForward(), *(make(7, dtype=dtype) for dtype in dtypes)) == [1, 2, 3]


# ------------------------------------------------------------------------ a process after warm-up

WARM_UPS = {
    "mark_unbacked": [(7, 5)],
    "mark_dynamic": [(7, 5), (1, 5), (7, 1), (1, 1)],
    "default": [(7, 5), (8, 5), (8, 3), (1, 5), (7, 1), (1, 1)],
}
FORMS = {
    "functional": call,
    "in place": call_in_place,
    "inverse": inverse(call),
    "in place, inverse": inverse(call_in_place),
}


@pytest.mark.parametrize("how", WARM_UPS)
def test_nothing_recompiles_after_warm_up(how: str) -> None:
    """Dynamo itself refuses: every form, over a sweep of lengths and batches."""
    rope = get_rope(config(), "cpu")
    compiled = {}
    for form, function in FORMS.items():
        one = Compiled(functools.partial(function, rope), how, backend="eager")
        for size in WARM_UPS[how]:
            one(*make(*size))
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in (1, 2, 3, 8):
                for tokens in (1, *LENGTHS):
                    one(*make(tokens, batch))
        compiled[form] = one.counter.frame_count
    graphs = GRAPHS["[B, T, H, D]", how][1]
    assert compiled == dict.fromkeys(FORMS, graphs)


def test_a_recompile_after_warm_up_would_be_refused() -> None:
    """Wrong twin: a Python number that changes with the length."""

    def scaled(q, k, positions):
        return rotate(q / int(q.shape[0] > 50), k, positions)

    compiled = Compiled(scaled, "mark_dynamic", backend="eager")
    compiled(*make(100))
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="fail_on_recompile"),
    ):
        compiled(*make(7))


class Decoder(nn.Module):
    """Layers of several kinds, their modules shared with every other model of this process."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.ropes = nn.ModuleList(get_rope(config(**CONFIGS[name]), "cpu") for name in names)

    def forward(self, positions, q, k):
        for rope in self.ropes:
            at = positions.expand(3, -1) if rope.config.num_axes else positions
            q, k = rope(at, q, k)
        return q, k


def test_models_and_configs_in_one_process() -> None:
    """One graph for each model, whatever its layers; none when another model was called between."""
    models = [
        Decoder("default", "llama3", "default"),
        Decoder("yarn", "partial", "multi_axis"),
        Decoder("interleaved", "longrope"),
    ]
    compiled = [torch.compile(model, fullgraph=True, backend="aot_eager") for model in models]
    torch.compiler.reset()
    counters.clear()
    for tokens in (7, 13, 1, 0, 100):
        for model, fast in zip(models, compiled, strict=True):
            q, k, positions = make(tokens)
            expected = model(positions, q, k)
            for x in (q, k, positions):
                torch._dynamo.decorators.mark_unbacked(x, 0)
            for out, wanted in zip(fast(positions, q, k), expected, strict=True):
                assert torch.equal(out, wanted)
    assert counters["stats"]["unique_graphs"] == len(models)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", CONFIGS)
def test_explain_counts_no_graph_break(name: str) -> None:
    """For every scaling type, style and axis map, functional, in place and back again."""
    rope = get_rope(config(**CONFIGS[name]), "cpu")
    tensors = make(7, axes=rope.config.num_axes)

    def everything(q, k, positions):
        q, k = call(rope, q, k, positions)
        q, k = call_in_place(rope, q, k, positions)
        return call(rope, q, None, positions, inverse=True)[0], k

    found = torch._dynamo.explain(everything)(*tensors)
    assert (found.graph_count, found.graph_break_count, found.break_reasons) == (1, 0, [])
    assert not counters["graph_break"]


def test_explain_would_count_a_graph_break() -> None:
    """Wrong twin: a value is printed in the middle."""

    def breaking(q, k, positions):
        q, k = rotate(q, k, positions)
        torch._dynamo.graph_break()
        return rotate(q, k, positions)

    found = torch._dynamo.explain(breaking)(*make(7))
    assert (found.graph_count, found.graph_break_count) == (2, 1)


# ------------------------------------------------------------------------------ what the graph is


def test_the_graph_holds_the_operator_itself() -> None:
    found = []

    def backend(graph, _inputs):
        found.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph

    torch.compile(rotate, fullgraph=True, backend=backend)(*make(5))
    assert found.count(rope_op) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_inductor_equals_eager_bit_for_bit(dtype) -> None:
    q, k, positions = make(77)
    q, k = q.to(dtype), k.to(dtype)
    for out, expected in zip(
        torch.compile(rotate, fullgraph=True)(q, k, positions), rotate(q, k, positions), strict=True
    ):
        assert out.dtype == dtype
        assert torch.equal(out, expected)


def test_inductor_hands_over_other_layouts() -> None:
    """Transposed and padded intermediates: the kernel reads strides at run time."""
    weight = randn(48, 48, seed=3)

    def block(x, positions):
        qkv = (x @ weight).t().contiguous().t().view(-1, 3, 16)
        q, k, v = qkv.split([1, 1, 1], 1)
        q, k = rotate(q, k, positions)
        return q.relu(), k, v

    x, positions = randn(7, 48), torch.arange(7) * 50
    for out, expected in zip(
        torch.compile(block, fullgraph=True)(x, positions), block(x, positions), strict=True
    ):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_training_step_under_compile() -> None:
    """Gradients equal eager's bit for bit, k absent or not."""
    q, k, positions = make(11)
    for given in ((q, k), (q, None)):
        grads = []
        for function in (rotate, torch.compile(rotate, fullgraph=True)):
            leaves = [x.clone().requires_grad_() for x in given if x is not None]
            outs = function(leaves[0], leaves[1] if len(leaves) > 1 else None, positions)
            sum((out * out.detach().cos()).sum() for out in outs if out is not None).backward()
            grads.append([leaf.grad for leaf in leaves])
        for eager, compiled in zip(*grads, strict=True):
            assert torch.equal(eager, compiled)


def test_in_place_on_packed_qkv_under_compile() -> None:
    def in_place(packed, positions):
        q, k, _v = packed.split([3, 2, 1], 1)
        apply_rope_(q, k, positions, TABLE, inv_freq=INV_FREQ)
        return packed.sum()

    packed, positions = randn(7, 6, 16), torch.arange(7) * 60
    eager, compiled = packed.clone(), packed.clone()
    in_place(eager, positions)
    torch.compile(in_place, fullgraph=True)(compiled, positions)
    assert torch.equal(eager, compiled)
    assert torch.equal(eager[:, 5:], packed[:, 5:])
    assert not torch.equal(eager[:, :5], packed[:, :5])


def test_functional_form_mutates_no_placeholder() -> None:
    """Mutated inputs make Inductor drop CUDA graphs."""
    graphs = []

    def compiler(graph, _inputs):
        graphs.append(graph)
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    with torch.no_grad():
        torch.compile(rotate, fullgraph=True, backend=backend)(*make(5))
    (graph,) = graphs
    names = [str(n.target) for n in graph.graph.nodes]
    assert not [name for name in names if "copy_" in name or "clone" in name]
    assert len([name for name in names if "rope_compile.rope" in name]) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_tokens(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", TABLE)
            self.register_buffer("inv_freq", INV_FREQ)

        def forward(self, q, k, positions):
            return apply_rope(q, k, positions, self.table, inv_freq=self.inv_freq)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(
        Layer(), make(5), dynamic_shapes=({0: tokens},) * 3, strict=strict
    )
    assert any(node.target is rope_op for node in exported.graph.nodes)
    for size in (2, 3, 17, 4096):
        for out, expected in zip(exported.module()(*make(size)), rotate(*make(size)), strict=True):
            assert torch.equal(out, expected)


def test_autocast_and_inference_mode_change_nothing_under_compile() -> None:
    arguments = make(9)
    expected = rotate(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = torch.compile(rotate, fullgraph=True)(*arguments)
    with torch.inference_mode():
        inference = torch.compile(rotate, fullgraph=True)(*arguments)
    for outs in (autocast, inference):
        for out, wanted in zip(outs, expected, strict=True):
            assert out.dtype == torch.float32
            assert torch.equal(out, wanted)


def test_bad_input_is_named_while_compiling_too() -> None:
    q, k, positions = make(5)
    with pytest.raises(Exception, match="positions must be int32 or int64"):
        torch.compile(rotate, fullgraph=True)(q, k, positions.float())
    with pytest.raises(Exception, match="must be on one device"):
        torch.compile(lambda q: apply_rope(q, None, positions, TABLE.to("meta")), fullgraph=True)(q)
