"""CUDA graphs, as far as a machine without a GPU shows: what may happen during a capture, what a
captured graph may still read afterwards, and which inputs of compiled code are read in place.

``mode="reduce-overhead"`` copies every input into memory of its own at every replay, but for those
that Inductor is told are static. A table is never to be copied, and never to be read where it was.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.decorators import mark_static_address
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import remove_unaligned_input_idxs

import rope_compile as rc
from rope_compile.factory import registry
from rope_compile.table import RopeTable, mark_static

from support import randn, run_child

ROWS = 256
LONG = rc.CapturePlan(max_position=1000, margin=0)
SHORT = rc.CapturePlan(max_position=ROWS, margin=0)


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def config(**fields) -> rc.RopeConfig:
    return rc.RopeConfig(head_dim=16, max_position=ROWS, **fields)


def some_q(tokens: int = 5, seed: int = 0) -> Tensor:
    return randn(tokens, 3, 16, seed=seed)


class Model(nn.Module):
    """The usual owner: an attribute of a layer."""

    def __init__(self, rope: rc.RotaryEmbedding) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, positions: Tensor, q: Tensor) -> Tensor:
        return self.rope(positions, q * 2)[0]


def with_tables(positions: Tensor, q: Tensor, cache: Tensor, inv_freq: Tensor) -> Tensor:
    """The operator level: the table is an argument like any other."""
    return rc.apply_rope(q * 2, None, positions, cache, inv_freq=inv_freq)[0]


# ---------------------------------------------------------------------------------- static inputs


class Graphs(list[tuple[bool, ...]]):
    """For each compiled graph, whether its table and its frequencies are static inputs."""

    def compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def inner(graph: fx.GraphModule, _inputs: object, **options: object) -> object:
            placeholders = graph.graph.find_nodes(op="placeholder")
            static = [placeholders[i] for i in options["static_input_idxs"]]
            (call,) = (node for node in graph.graph.nodes if "rope_compile" in str(node.target))
            _, _, positions, cache, inv_freq = call.args[:5]
            assert positions not in static
            self.append((cache in static, inv_freq in static))
            return make_boxed_func(graph)

        def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> object:
            return compile_fx(graph, inputs, inner_compile=inner)

        return torch.no_grad()(torch.compile(function, backend=backend, fullgraph=True))


@pytest.fixture
def graphs(fresh_compiler: None) -> Graphs:
    return Graphs()


SHARED = config(base=77.0)


def call_global(positions: Tensor, q: Tensor) -> Tensor:
    return GLOBAL_ROPE(positions, q * 2)[0]


def call_get_rope(positions: Tensor, q: Tensor) -> Tensor:
    return rc.get_rope(SHARED, "cpu")(positions, q * 2)[0]


def closure(rope: rc.RotaryEmbedding) -> Callable[..., Tensor]:
    return lambda positions, q: rope(positions, q * 2)[0]


def reads_buffers(rope: rc.RotaryEmbedding) -> Callable[..., Tensor]:
    return lambda positions, q: with_tables(positions, q, rope.cos_sin_cache, rope.inv_freq)


GLOBAL_ROPE = rc.RotaryEmbedding(config(), "cpu")
# Every way for a model to reach its rope.
REACHED: dict[str, Callable[[rc.RotaryEmbedding], Callable[..., Tensor]]] = {
    "submodule": Model,
    "list": lambda rope: Model(nn.ModuleList([rope])[0]),
    "closure": closure,
    "global": lambda _rope: call_global,
    "get_rope": lambda _rope: call_get_rope,
    "buffers": reads_buffers,
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", REACHED)
def test_the_table_of_a_module_is_a_static_input(graphs: Graphs, name: str, pinned: bool) -> None:
    """However the module is reached: CUDA graphs read the table in place."""
    rope = rc.get_rope(config(), "cpu")
    if pinned:
        rc.prepare_for_capture([rope, GLOBAL_ROPE, rc.get_rope(SHARED, "cpu")], SHORT)
    graphs.compile(REACHED[name](rope))(torch.arange(5), some_q())
    assert graphs == [(True, True)]


def test_a_table_among_the_arguments_is_copied(graphs: Graphs) -> None:
    """Wrong twin, and the reason for what follows: nobody said that this table stays."""
    rope = rc.get_rope(config(), "cpu")
    graphs.compile(with_tables)(torch.arange(5), some_q(), rope.cos_sin_cache, rope.inv_freq)
    assert graphs == [(False, False)]


def test_a_temporary_beside_a_pinned_table_is_copied(graphs: Graphs) -> None:
    """Wrong twin: the mark is on the tensor, so a table made on the way has none."""
    rope = rc.get_rope(config(), "cpu")
    rc.prepare_for_capture(rope, SHORT)
    cache = rope.cos_sin_cache.clone()
    graphs.compile(with_tables)(torch.arange(5), some_q(), cache, rope.inv_freq)
    assert graphs == [(False, True)]


@contextlib.contextmanager
def prepared(rope: rc.RotaryEmbedding) -> Iterator[None]:
    rc.prepare_for_capture(rope, SHORT)
    yield


@pytest.mark.parametrize(
    "marking",
    [prepared, rc.capture_guard, lambda _rope: rc.capture_guard()],
    ids=["prepare_for_capture", "capture_guard", "capture_guard_of_all"],
)
def test_a_pinned_table_among_the_arguments_is_static(graphs: Graphs, marking) -> None:
    """The hook and the guard mark what they pin, before the first compiled call inside."""
    rope = rc.get_rope(config(), "cpu")
    arguments = torch.arange(5), some_q(), rope.cos_sin_cache, rope.inv_freq
    with marking(rope):
        result = graphs.compile(with_tables)(*arguments)
    assert graphs == [(True, True)]
    assert torch.equal(result, with_tables(*arguments))


def test_a_table_built_inside_the_guard_is_static(graphs: Graphs) -> None:
    with rc.capture_guard():
        rope = rc.get_rope(config(), "cpu")
        arguments = torch.arange(5), some_q(), rope.cos_sin_cache, rope.inv_freq
        graphs.compile(with_tables)(*arguments)
    assert graphs == [(True, True)]


def test_the_mark_is_that_of_dynamo() -> None:
    """Ours is set without importing Dynamo, so it must be what the public function sets."""
    theirs, ours, plain = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    mark_static_address(theirs, guard=True)
    mark_static(ours)
    assert ours.__dict__ == theirs.__dict__ != plain.__dict__


def test_marking_imports_no_compiler() -> None:
    code = """
import sys, rope_compile as rc
rope = rc.get_rope(rc.RopeConfig(head_dim=16, max_position=8), "cpu")
rc.prepare_for_capture(rope, rc.CapturePlan(max_position=500))
with rc.capture_guard(rope), rc.capture_guard():
    pass
assert "torch._dynamo" not in sys.modules
"""
    run_child("-c", code)


@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
def test_tables_lie_on_16_byte_boundaries(rotary_dim: int) -> None:
    """Inductor copies static inputs that do not. Wrong twin: a table that starts in between."""
    table = RopeTable(rc.RopeConfig(head_dim=16, rotary_dim=rotary_dim, max_position=8), "cpu")
    table.reserve(1000)
    tensors = [table.cos_sin_cache, table.inv_freq, torch.zeros(9)[1:]]
    assert list(remove_unaligned_input_idxs(tensors, (0, 1, 2))) == [0, 1]


# ----------------------------------------------------------------------------- a table that moved


def poison(tensor: Tensor) -> None:
    """Whoever reads this memory from now on shows it."""
    tensor.fill_(float("nan"))


def replace(rope: rc.RotaryEmbedding, how: str) -> None:
    """Move the table; the old storage stays where it was, poisoned."""
    old = rope.cos_sin_cache
    if how == "lost":  # storage freed, then reserved again: the same shape elsewhere
        rope.table._buffers["cos_sin_cache"] = torch.empty(0)
        assert rope.reserve(rope.capacity)
        assert rope.cos_sin_cache.shape == old.shape
    else:
        assert rope.reserve(2 * rope.capacity)
    assert rope.cos_sin_cache.data_ptr() != old.data_ptr()
    poison(old)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", ["grown", "lost"])
@pytest.mark.parametrize("name", ["submodule", "closure", "buffers"])
def test_a_moved_table_is_never_read_where_it_was(
    graphs: Graphs, name: str, how: str, pinned: bool
) -> None:
    """New storage is static as well; the code reads the table through the module at every call.

    Rows that moved without another shape need no new code: Inductor's CUDA graphs compare the
    addresses of static inputs, and record again.
    """
    rope = rc.RotaryEmbedding(config(), "cpu")
    if pinned:
        rc.prepare_for_capture(rope, SHORT)
    function = REACHED[name](rope)
    compiled = graphs.compile(function)
    positions, q = torch.tensor([0, 1, 255, 256, 400]), some_q()
    before = compiled(positions, q)
    replace(rope, how)
    assert torch.equal(compiled(positions, q), before)
    assert {*graphs} == {(True, True)}
    assert len(graphs) == (2 if how == "grown" else 1)


@pytest.mark.parametrize("how", ["grown", "lost"])
def test_a_moved_table_among_the_arguments_is_seen(graphs: Graphs, how: str) -> None:
    """Code that got a pinned table as an argument is compiled again for the new one."""
    rope = rc.RotaryEmbedding(config(), "cpu")
    rc.prepare_for_capture(rope, SHORT)
    compiled = graphs.compile(with_tables)
    positions, q = torch.tensor([0, 1, 255, 256, 400]), some_q()
    before = compiled(positions, q, rope.cos_sin_cache, rope.inv_freq)
    replace(rope, how)
    after = compiled(positions, q, rope.cos_sin_cache, rope.inv_freq)
    assert torch.equal(after, before)
    assert graphs == [(True, True)] * 2


def test_an_unmarked_address_in_code_would_be_stale() -> None:
    """Wrong twin: what holds the address only, as a captured graph does, reads the poison."""
    rope = rc.RotaryEmbedding(config(), "cpu")
    rc.prepare_for_capture(rope, SHORT)
    captured = Captured(rope.cos_sin_cache)
    replace(rope, "grown")
    assert captured.replay().isnan().all()


def test_rebuild_keeps_the_address_and_the_code(graphs: Graphs) -> None:
    """After lost contents: the same memory, refilled, and nothing compiles again."""
    rope = rc.RotaryEmbedding(config(), "cpu")
    rc.prepare_for_capture(rope, SHORT)
    compiled = graphs.compile(Model(rope))
    positions, q = torch.arange(5), some_q()
    before, address = compiled(positions, q), rope.cos_sin_cache.data_ptr()
    captured = Captured(rope.cos_sin_cache)
    poison(rope.cos_sin_cache)
    poison(rope.inv_freq)
    assert compiled(positions, q).isnan().any()
    rope.rebuild_()
    assert rope.cos_sin_cache.data_ptr() == address
    assert torch.equal(compiled(positions, q), before)
    assert torch.equal(captured.replay(), rope.cos_sin_cache)
    assert len(graphs) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_layers_compiled_one_by_one_share_their_code(graphs: Graphs, shared: bool) -> None:
    """Also where each has a pinned table of its own: no guard ties the code to one of them."""
    made = [
        rc.get_rope(config(), "cpu") if shared else rc.RotaryEmbedding(config(), "cpu")
        for _ in range(3)
    ]
    rc.prepare_for_capture(made, SHORT)
    compiled = graphs.compile(lambda layer, positions, q: layer(positions, q))
    for rope in made:
        compiled(Model(rope), torch.arange(5), some_q())
    assert graphs == [(True, True)]


# ------------------------------------------------------------------------------- while capturing


class Captured:
    """A captured graph: it knows an address, and keeps nothing alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.address, self.shape = tensor.data_ptr(), tuple(tensor.shape)

    def replay(self) -> Tensor:
        rows, width = self.shape
        memory = (ctypes.c_float * (rows * width)).from_address(self.address)
        return torch.frombuffer(bytearray(memory), dtype=torch.float32).view(rows, width)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager]:
    """CUDA as it answers while the current stream records a graph."""
    state = {"on": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])

    @contextlib.contextmanager
    def recording() -> Iterator[None]:
        state["on"] = True
        try:
            yield
        finally:
            state["on"] = False

    return recording


def enter(guard: contextlib.AbstractContextManager[None]) -> None:
    with guard:
        pass


POSITIONS = torch.tensor([0, 255, 256, -1, 2**40])
ALLOWED: dict[str, Callable[[rc.RotaryEmbedding], object]] = {
    "rotate": lambda rope: rope(POSITIONS, some_q()),
    "rotate in place": lambda rope: rope.apply_(POSITIONS, some_q()),
    "rotate by a table": lambda rope: with_tables(
        POSITIONS, some_q(), rope.cos_sin_cache, rope.inv_freq
    ),
    "reserve within": lambda rope: rope.reserve(ROWS),
    "get_rope again": lambda rope: rc.get_rope(config(), "cpu"),
    "prepare within": lambda rope: rc.prepare_for_capture(rope, SHORT),
    "guard": lambda rope: enter(rc.capture_guard(rope)),
    "guard of all": lambda _rope: enter(rc.capture_guard()),
    "stay": lambda rope: rope.to("cpu"),
    "cast": lambda rope: rope.half(),
}
REFUSED: dict[str, tuple[Callable[[rc.RotaryEmbedding], object], str]] = {
    "reserve beyond": (lambda rope: rope.reserve(ROWS + 1), "grow to 384 rows"),
    "prepare beyond": (lambda rope: rc.prepare_for_capture(rope, LONG), "grow to 1024 rows"),
    "prepare all beyond": (lambda _rope: rc.prepare_for_capture(None, LONG), "grow to 1024 rows"),
    "rebuild": (lambda rope: rope.rebuild_(), "be refilled"),
    "build": (lambda _rope: rc.RotaryEmbedding(config(), "cpu"), "be built"),
    "get_rope first": (lambda _rope: rc.get_rope(config(base=5.0), "cpu"), "be built"),
    "copy": (copy.deepcopy, "be built"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_while_capturing(capturing, name: str) -> None:
    """What neither allocates rows nor writes them."""
    rope = rc.get_rope(config(), "cpu")
    address = rope.cos_sin_cache.data_ptr()
    with capturing():
        ALLOWED[name](rope)
    assert (rope.capacity, rope.cos_sin_cache.data_ptr()) == (ROWS, address)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_capturing(capturing, name: str) -> None:
    """It would record an allocation or a fill into the graph; refused before anything changed."""
    rope = rc.get_rope(config(), "cpu")
    address, rows = rope.cos_sin_cache.data_ptr(), rope.cos_sin_cache.clone()
    action, what = REFUSED[name]
    with capturing(), pytest.raises(RuntimeError) as refusal:
        action(rope)
    assert re.search(
        rf"must not {what} while the current CUDA stream captures a graph.*before compile and",
        str(refusal.value),
    )
    assert (rope.capacity, rope.cos_sin_cache.data_ptr()) == (ROWS, address)
    assert torch.equal(rope.cos_sin_cache, rows)
    action(rope)  # and afterwards it works


def test_cuda_is_not_asked_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question itself starts CUDA, which nobody may do who only builds a table."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    rc.RotaryEmbedding(config(), "cpu").reserve(1000)


@pytest.mark.parametrize("pin", ["prepare_for_capture", "capture_guard"])
def test_a_graph_outlives_growth_and_model(capturing, pin: str) -> None:
    """The pinned rows are still those that the capture saw, at the address that it knows."""
    rope = rc.RotaryEmbedding(config(), "cpu")
    if pin == "prepare_for_capture":
        rc.prepare_for_capture(rope, SHORT)
    with capturing(), rc.capture_guard(rope):
        captured = Captured(rope.cos_sin_cache)
    rows = rope.cos_sin_cache.clone()
    rope.reserve(4096)
    del rope
    gc.collect()
    # Memory of the size that a freed table would have left, overwritten.
    for _ in range(64):
        poison(torch.empty_like(rows))
    assert torch.equal(captured.replay(), rows)


# ----------------------------------------------------------------------------------- padded rows

# What the padded slots of a static buffer may hold: stale, made up, or never written.
TAILS: dict[str, Callable[[int], Tensor]] = {
    "negative": lambda n: torch.full((n,), -1),
    "smallest": lambda n: torch.full((n,), -(2**63)),
    "2**62": lambda n: torch.full((n,), 2**62),
    "stale": lambda n: torch.arange(n) * 1000,
    "uninitialised": lambda n: torch.empty(n, dtype=torch.int64).random_(-(2**63), None),
}
LIVE, SLOTS = 5, 16


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_live_rows_do_not_see_the_padded_ones(
    tail: str, dtype: torch.dtype, compiled: bool
) -> None:
    """Positions and values of padded rows may be anything: bit for bit the result without them."""
    rope = rc.get_rope(config(), "cpu")
    live, q = POSITIONS[:LIVE], some_q(SLOTS).to(dtype)
    expected = rope(live, q[:LIVE])[0]
    positions = torch.cat([live, TAILS[tail](SLOTS - LIVE)])
    q[LIVE:] = float("nan")
    function = torch.compile(rope, fullgraph=True) if compiled else rope
    assert torch.equal(function(positions, q)[0][:LIVE], expected)
    by_torch = torch.ops.rope_compile.rope_torch(
        q, None, positions, rope.cos_sin_cache, rope.inv_freq, (), "half", 0, 1.0, False
    )[0]
    assert torch.equal(by_torch[:LIVE], expected)
    rope.apply_(positions, q)
    assert torch.equal(q[:LIVE], expected)


@pytest.mark.parametrize("tail", TAILS)
def test_live_rows_of_several_axes_do_not_see_the_padded_ones(tail: str) -> None:
    rope = rc.get_rope(config(axes=rc.ChunkedAxes((2, 3, 3))), "cpu")
    live, q = POSITIONS[:LIVE] * torch.tensor([[1], [2], [3]]), some_q(SLOTS)
    expected = rope(live, q[:LIVE])[0]
    filler = TAILS[tail](SLOTS - LIVE).expand(3, -1)
    assert torch.equal(rope(torch.cat([live, filler], 1), q)[0][:LIVE], expected)


def test_a_stale_live_position_is_seen() -> None:
    """Wrong twin: one more live row than there are fresh positions."""
    rope, q = rc.get_rope(config(), "cpu"), some_q(SLOTS)
    positions = torch.cat([POSITIONS, TAILS["stale"](SLOTS - LIVE)])
    fresh = positions.index_fill(0, torch.tensor([LIVE]), 9)
    assert not torch.equal(rope(positions, q)[0][: LIVE + 1], rope(fresh, q)[0][: LIVE + 1])


@pytest.mark.usefixtures("fresh_compiler")
def test_buffers_changed_in_place_serve_the_next_replay() -> None:
    """A replay is the same code on the same memory: other positions, other values, fewer rows."""
    rope = rc.get_rope(config(), "cpu")
    rc.prepare_for_capture(rope, LONG)
    step = torch.compile(rope, fullgraph=True)
    positions, q = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, 3, 16)
    with rc.capture_guard(rope):
        step(positions, q)
    for seed, live in enumerate((16, 9, 1)):
        positions[:live] = torch.arange(live) + 100 * seed
        q[:live] = some_q(live, seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = step(positions, q)[0]
        assert torch.equal(out[:live], rope(positions[:live], q[:live])[0])
