"""Fault group B: what breaks, freezes or moves a captured graph.

The labels are those of test_faults_index.py. A CPU shows the causes: host reads, state, addresses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from test_faults_index import assert_right, rest_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, ops, table
from rope_compile.factory import registry
from rope_compile.kernels import reference
from rope_compile.ops import rope_op

from support import NoHostReads, randn

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LONG = {
    "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_max_position": 64,
    "factor": 4.0,
}  # fmt: skip
DYNAMIC = {"factor": 2.0, "original_max_position": 64}
CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "ntk": {"scaling": rc.NtkScaling(factor=4.0, mixed_b=0.5)},
    "alpha": {"scaling": rc.NtkAlphaScaling(alpha=100.0)},
    "dynamic": {"scaling": rc.DynamicScaling(policy="by_length", **DYNAMIC)},
    "dynamic_static": {"scaling": rc.DynamicScaling(factor=2.0, policy="static_factor")},
    "yarn": {"scaling": rc.YarnScaling(factor=4.0, original_max_position=64)},
    "deepseek_yarn": {
        "scaling": rc.DeepseekYarnScaling(factor=4.0, original_max_position=64, mscale=0.7)
    },
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        )
    },
    "longrope": {"scaling": rc.LongRopeScaling(policy="by_length", **LONG)},
    "longrope_static": {"scaling": rc.LongRopeScaling(policy="static", **LONG)},
    "proportional": {"scaling": rc.ProportionalScaling(partial_rotary_factor=0.5)},
    "multi_axis": {"axes": rc.ChunkedAxes((1, 1, 2)), "style": "interleaved"},
}


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def config(rows: int = 128, **fields: object) -> RopeConfig:
    return RopeConfig(head_dim=8, max_position=rows, **fields)


def inputs(rope: RotaryEmbedding, tokens: int = 7, step: int = 37) -> tuple[Tensor, ...]:
    """Positions in and outside the table, q and k."""
    positions = torch.arange(tokens) * step - 11
    if rope.config.num_axes:
        positions = torch.stack([positions + axis for axis in range(rope.config.num_axes)])
    return positions, randn(tokens, 3, 8, seed=1), randn(tokens, 2, 8, seed=2)


def selecting() -> tuple[rc.RopeSelector, Tensor]:
    """Two rotations, and which one each of seven tokens has."""
    ropes = [RotaryEmbedding(config(base=base), "cpu") for base in (1e4, 5e5)]
    return rc.RopeSelector(ropes), torch.arange(7) % 2


def assert_selected(outs, given, positions: Tensor, rope: rc.RopeSelector, chosen: Tensor) -> None:
    for number, part in enumerate(rope.ropes):
        here = chosen == number
        picked = ([x[here] for x in xs] for xs in (outs, given))
        assert_right(*picked, positions[here], part.config)


def branching(rope: RotaryEmbedding) -> Callable[..., object]:
    """The reported cause: the longest position is compared with a Python number."""

    def forward(positions, q, k):
        if positions.max() + 1 > rope.config.max_position:
            return rope(positions * 1, q, k)
        return rope(positions, q, k)

    return forward


# --------------------------------------------------------------------------------------------- B1


@pytest.mark.parametrize("name", CONFIGS)
def test_b1_forward_has_no_branch_on_a_value(name: str) -> None:
    """Host sync inside forward kills capture, vllm-project/vllm #57890: fullgraph, every type."""
    rope = RotaryEmbedding(config(**CONFIGS[name]), "cpu")
    compiled = torch.compile(rope, fullgraph=True, backend="eager")
    for step in (1, 37):  # inside the table, then far outside it
        positions, q, k = inputs(rope, step=step)
        assert_right(compiled(positions, q, k), (q, k), positions, rope.config)


@pytest.mark.parametrize("name", CONFIGS)
def test_b1_forward_reads_no_value_on_the_host(name: str) -> None:
    """Host sync inside forward kills capture, vllm-project/vllm PR #58064: it is refused."""
    rope = RotaryEmbedding(config(**CONFIGS[name]), "cpu")
    for step in (1, 37):
        positions, q, k = inputs(rope, step=step)
        with NoHostReads():
            outs = rope(positions, q, k)
            rope.apply_(positions, q.clone(), k.clone())
        assert_right(outs, (q, k), positions, rope.config)


def test_b1_a_choice_by_token_reads_no_value_on_the_host() -> None:
    """Host sync inside forward kills capture, vllm-project/vllm PR #58064: the selector's too."""
    rope, chosen = selecting()
    compiled = torch.compile(rope, fullgraph=True, backend="eager")
    for step in (1, 37):
        positions, q, k = inputs(rope.ropes[0], step=step)
        with NoHostReads():
            outs = rope(positions, q, k, selector=chosen)
            rope.apply_(positions, q.clone(), k.clone(), selector=chosen)
        assert_selected(outs, (q, k), positions, rope, chosen)
        outs = compiled(positions, q, k, selector=1 - chosen)
        assert_selected(outs, (q, k), positions, rope, 1 - chosen)
    with pytest.raises(AssertionError):  # the twin: the other choice
        assert_selected(outs, (q, k), positions, rope, chosen)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_b1_fake_tensors_are_enough_for_forward(name: str, device: str) -> None:
    """Host sync inside forward, vllm-project/vllm #57890: there is no value that could be read."""
    rope = RotaryEmbedding(config(**CONFIGS[name]), "cpu")
    functional, _ = ops._make_pair(reference.rope_into)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs(rope))
        positions, q, k = tensors
        cache, inv_freq, *rest = rest_of(rope)
        rows = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (cache, inv_freq))
        body = rope_op if device == "cpu" else functional  # a GPU's, without Triton
        out = body(q, k, positions, *rows, *rest)[0]
    assert out.shape == q.shape
    assert out.device.type == device


def test_b1_a_branch_on_the_longest_position_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm #57890: caught by each of the three nets."""
    rope = RotaryEmbedding(config(), "cpu")
    wrong, tensors = branching(rope), inputs(rope)
    with pytest.raises((Unsupported, UserError)):
        torch.compile(wrong, fullgraph=True, backend="eager")(*tensors)
    with NoHostReads(), pytest.raises(AssertionError, match="host read"):
        wrong(*tensors)
    with FakeTensorMode() as mode, pytest.raises(Exception, match="local_scalar_dense"):
        wrong(*(mode.from_tensor(x) for x in tensors))


# --------------------------------------------------------------------------------------------- B2


def snapshot(rope: nn.Module) -> tuple[object, ...]:
    """Attributes by identity, containers by content too, buffers by address and version, of a
    module and its parts."""
    attributes = {
        (name, key): (id(value), repr(value) if isinstance(value, dict | list | set) else "")
        for name, part in rope.named_modules()
        for key, value in vars(part).items()
    }
    buffers = {
        name: (id(x), x.data_ptr(), x._version, x.dtype, tuple(x.shape))
        for name, x in rope.named_buffers()
    }
    return attributes, buffers


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope", "multi_axis"])
def test_b2_a_hundred_forwards_leave_no_state(name: str) -> None:
    """Python state frozen at capture, vllm-project/vllm PR #35348: forward stores nothing."""
    rope = RotaryEmbedding(config(**CONFIGS[name]), "cpu")
    before = snapshot(rope)
    for i in range(100):
        positions, q, k = inputs(rope, tokens=7 * i % 31, step=i)
        rope(positions, q, k)
        rope.apply_(positions, q, k)
    assert snapshot(rope) == before


def test_b2_a_choice_by_token_leaves_no_state() -> None:
    """Python state frozen at capture, vllm-project/vllm PR #35348: nor does the selector store."""
    rope, chosen = selecting()
    before = snapshot(rope)
    for step in range(20):
        positions, q, k = inputs(rope.ropes[0], step=step)
        rope(positions, q, k, selector=chosen)
        rope.apply_(positions, q, k, selector=chosen)
    assert snapshot(rope) == before


def test_b2_a_dictionary_that_is_filled_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm PR #35348: nothing is bound again, and state is kept."""

    class Filling(RotaryEmbedding):
        def forward(self, positions, q, k=None, **flags):
            self.kept[tuple(positions.shape)] = True
            return super().forward(positions, q, k, **flags)

    rope = Filling(config(), "cpu")
    rope.kept = {}
    before = snapshot(rope)
    rope(*inputs(rope, tokens=3, step=0))
    assert snapshot(rope) != before


def test_b2_no_call_takes_a_length_or_an_offset() -> None:
    """A decode offset baked in as a number, huggingface/candle #3728: positions are tensors."""
    for call in (RotaryEmbedding.forward, RotaryEmbedding.apply_):
        assert list(inspect.signature(call).parameters) == [
            "self",
            "positions",
            "q",
            "k",
            "inverse",
        ]
    for call in (rc.RopeSelector.forward, rc.RopeSelector.apply_):
        assert list(inspect.signature(call).parameters) == [
            "self", "positions", "q", "k", "selector", "inverse",
        ]  # fmt: skip
    numbers = {a.name for a in rope_op._schema.arguments if str(a.type) in ("int", "List[int]")}
    assert numbers == {"axes", "rotary_offset"}  # of the model, the same for every step


def test_b2_a_step_is_the_contents_of_its_tensors() -> None:
    """The wrong table row at every replay, tenstorrent/tt-metal PR #49889: one graph, all steps."""
    rope, counter = RotaryEmbedding(config(), "cpu"), CompileCounter()
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    slots, q = torch.zeros(4, dtype=torch.int64), randn(4, 2, 8)
    for start in (0, 1, 126, 5000, -3):
        slots.copy_(torch.arange(start, start + 4))
        assert_right(compiled(slots, q), (q, None), slots, rope.config)
    assert counter.frame_count == 1


def test_b2_state_and_offsets_would_be_found() -> None:
    """Wrong twins of vllm-project/vllm PR #35348: kept positions; an offset that is a number."""

    class Keeping(RotaryEmbedding):
        def forward(self, positions, q, k=None, *, inverse=False):
            self._positions = positions
            return super().forward(self._positions, q, k, inverse=inverse)

    rope = Keeping(config(), "cpu")
    before = snapshot(rope)
    rope(*inputs(rope))
    assert snapshot(rope) != before

    plain, counter = RotaryEmbedding(config(), "cpu"), CompileCounter()
    compiled = torch.compile(
        lambda q, start: plain(torch.arange(4) + start, q)[0],
        fullgraph=True, backend=counter, dynamic=False,
    )  # fmt: skip
    for start in (0, 1, 126):
        compiled(randn(4, 2, 8), start)
    assert counter.frame_count == 3


# --------------------------------------------------------------------------------------------- B4


@pytest.fixture
def planned() -> RotaryEmbedding:
    """33152 rows, as of a plan of 33064."""
    rope = RotaryEmbedding(config(), "cpu")
    assert rope.reserve(33064) is True
    assert rope.capacity == 33152
    return rope


def test_b4_the_address_stays_within_the_reserve(planned: RotaryEmbedding) -> None:
    """Buffer address changes after capture, huggingface/peft PR #2611: not below the capacity."""
    addresses = [x.data_ptr() for x in planned.buffers()]
    for rows in (0, 1, 128, *range(129, 33152, 1009), 33064, 33151, 33152):
        assert planned.reserve(rows) is False
    before = planned.cos_sin_cache.clone()
    for x in planned.buffers():
        x.fill_(float("nan"))
    planned.rebuild_()  # a refresh of the same size is a copy in place
    assert [x.data_ptr() for x in planned.buffers()] == addresses
    assert torch.equal(planned.cos_sin_cache, before)


def test_b4_growth_is_refused_while_compiling_and_capturing(planned, monkeypatch) -> None:
    """Reallocation under an unchanged capture, jcelerier/librediffusion PR #14: it raises."""
    address = planned.cos_sin_cache.data_ptr()
    refused: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
        "compiling": lambda patch: patch.setattr(torch.compiler, "is_compiling", lambda: True),
        "stream captures": lambda patch: patch.setattr(table, "stream_is_capturing", lambda: True),
    }
    for words, pretend in refused.items():
        with monkeypatch.context() as patch:
            pretend(patch)
            assert planned.reserve(33152) is False
            with pytest.raises(RuntimeError, match=f"must not grow to 33280 rows .*{words}"):
                planned.reserve(33153)
    with rc.capture_guard(planned), pytest.raises(RuntimeError, match="inside capture_guard"):
        planned.reserve(33153)
    assert (planned.capacity, planned.cos_sin_cache.data_ptr()) == (33152, address)


def test_b4_growth_inside_compiled_code_is_refused(planned: RotaryEmbedding) -> None:
    """A buffer swapped under static-address guards, pytorch/pytorch #156377: not from within."""

    def grow(positions, q, rows):
        planned.reserve(rows)
        return planned(positions, q)[0]

    compiled = torch.compile(grow, fullgraph=True, backend="eager")
    positions, q, _ = inputs(planned)
    compiled(positions, q, 33152)
    with pytest.raises(Unsupported, match="must not grow to 33280 rows while compiling"):
        compiled(positions, q, 33153)


class Growing(nn.Module):
    """A registered buffer that is bound to a larger tensor for every longer sequence."""

    def __init__(self, rows: Tensor, reserved: bool) -> None:
        super().__init__()
        self.rows, self.reserved = rows, reserved
        self.register_buffer("cache", rows.clone() if reserved else rows[:8])

    def grow(self, rows: int) -> None:
        if not self.reserved:
            self.cache = self.rows[:rows].clone()

    def forward(self, positions: Tensor, q: Tensor) -> Tensor:
        return rc.apply_rope(q, None, positions, self.cache)[0]


@pytest.mark.parametrize(("reserved", "frames"), [(True, 1), (False, 5)])
def test_b4_only_growth_within_the_reserve_costs_no_graph(reserved: bool, frames: int) -> None:
    """Too many re-records, pytorch/pytorch PR #129349: and the twin that rebinds."""
    rows = RotaryEmbedding(config(), "cpu").cos_sin_cache
    module, counter = Growing(rows, reserved), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for size in (8, 16, 32, 64, 128):
        module.grow(size)
        compiled(torch.arange(4), randn(4, 2, 8))
    assert counter.frame_count == frames


# --------------------------------------------------------------------------------------------- B5


def traced(function: Callable[..., object], *tensors: Tensor) -> torch.fx.Graph:
    """The graph that a compiler gets from AOTAutograd, for inference."""
    graphs = []

    def keep(module: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    with torch.no_grad():
        backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
        torch.compile(function, fullgraph=True, backend=backend)(*tensors)
    (graph,) = graphs
    return graph


def mutations(graph: torch.fx.Graph) -> list[str]:
    """Nodes that write a placeholder, or copy to one at the end."""
    placeholders = {node for node in graph.nodes if node.op == "placeholder"}
    return [
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function"
        and (
            node.target is torch.ops.aten.copy_.default
            or (
                isinstance(node.target, torch._ops.OpOverload)
                and node.target._schema.is_mutable
                and placeholders & set(node.all_input_nodes)
            )
        )
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_b5_the_functional_form_mutates_no_input(name: str) -> None:
    """Mutated inputs make Inductor drop CUDA graphs, flashinfer-ai/flashinfer #403."""
    rope = RotaryEmbedding(config(**CONFIGS[name]), "cpu")
    graph = traced(rope, *inputs(rope))
    assert not mutations(graph)
    assert [n.target for n in graph.nodes if n.op == "call_function"].count(rope_op) == 1


def test_b5_a_choice_by_token_mutates_no_input() -> None:
    """Mutated inputs make Inductor drop CUDA graphs, flashinfer-ai/flashinfer #403: selector."""
    rope, chosen = selecting()

    def choose(positions, q, k, selector):
        return rope(positions, q, k, selector=selector)

    graph = traced(choose, *inputs(rope.ropes[0]), chosen)
    assert not mutations(graph)
    calls = [n.target for n in graph.nodes if n.op == "call_function"].count(rope_op)
    assert calls == len(rope.ropes) + 1  # the rows of each, and the rotation


def test_b5_a_mutated_input_would_be_found() -> None:
    """Wrong twin of flashinfer-ai/flashinfer #403: the in-place form, for those who ask for it."""
    rope = RotaryEmbedding(config(), "cpu")

    def in_place(positions, q, k):
        rope.apply_(positions, q, k)
        return q.sum()

    assert mutations(traced(in_place, *inputs(rope)))


# --------------------------------------------------------------------------------------------- B6

MADE = config(base=77.0)


def looked_up(positions: Tensor, q: Tensor) -> Tensor:
    return rc.get_rope(MADE, "cpu")(positions, q)[0]


def extraordinary(tensors: list[object]) -> list[str]:
    """What is no ordinary tensor of memory: fakes, functional wrappers, inference tensors."""
    return [
        type(x).__name__
        for x in tensors
        if type(x) is not Tensor or torch._is_functional_tensor(x) or x.is_inference()
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_b6_a_table_asked_for_in_a_graph_is_made_outside_it(backend: str) -> None:
    """cos/sin produced inside a graph and cached, NVlabs/Fast-dLLM PR #51: by a first get_rope."""
    compiled = torch.compile(looked_up, fullgraph=True, backend=backend)
    positions, q = torch.arange(7) * 37, randn(7, 2, 8)
    first = compiled(positions, q)
    kept = first.clone()
    second = compiled(positions + 1, q)
    assert torch.equal(first, kept)  # no later call overwrites an output
    (rope,) = registry.modules()
    assert not extraordinary(list(rope.buffers()))
    assert torch.equal(rope.cos_sin_cache, RotaryEmbedding(MADE, "cpu").cos_sin_cache)
    for out, at in (
        (first, positions),
        (second, positions + 1),
        (looked_up(positions, q), positions),
    ):
        assert_right((out,), (q,), at, MADE)


def test_b6_a_traced_tensor_in_a_cache_would_be_found() -> None:
    """Wrong twin of NVlabs/Fast-dLLM PR #51: a cache filled under fake and inference modes."""
    cache: list[object] = []
    for mode in (FakeTensorMode, torch.inference_mode):
        with mode():
            cache.append(torch.ones(3).cos())
    assert extraordinary(cache) == ["FakeTensor", "Tensor"]


# --------------------------------------------------------------------------------------------- B7


def buffers_of(module: nn.Module) -> list[tuple[object, ...]]:
    return [(x.dtype, x.data_ptr(), x._version, tuple(x.shape)) for x in module.buffers()]


@pytest.mark.parametrize("shared", [False, True])
def test_b7_no_dtype_is_written_back(shared: bool) -> None:
    """Table converted and assigned back in forward, vllm-project/vllm PR #33800."""
    made = config(scaling=rc.YarnScaling(factor=4.0, original_max_position=64))
    rope = rc.get_rope(made, "cpu") if shared else RotaryEmbedding(made, "cpu")
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    before = buffers_of(rope)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        positions, q, k = inputs(rope)
        q, k = q.to(dtype), k.to(dtype)
        for call in (rope, compiled):
            assert_right(call(positions, q, k), (q, k), positions, made)
            assert buffers_of(rope) == before
    assert [x.dtype for x in rope.buffers()] == [torch.float32] * 2


def test_b7_a_conversion_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm PR #33800: the buffer follows the dtype of q, and loses."""

    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", RotaryEmbedding(config(), "cpu").cos_sin_cache)

        def forward(self, positions, q):
            self.cache = self.cache.to(q.dtype)
            return rc.apply_rope(q, None, positions, self.cache.float())

    module, at, q = Converting(), torch.arange(7), randn(7, 3, 8)
    before = buffers_of(module)
    module(at, q.bfloat16())
    assert buffers_of(module) != before
    with pytest.raises(AssertionError):
        assert_right(module(at, q.half()), (q.half(), None), at, config())
