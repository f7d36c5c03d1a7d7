"""Several processes: DTensor, tensor parallel, FSDP2, context parallel; values equal one process.

Every check named ``on_ranks_...`` runs in all processes of a gloo group on the CPU at once. Each
process computes the whole with plain tensors too, and compares.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, get_rope
from rope_compile.axes import (
    context_parallel_positions,
    packed_context_parallel_positions,
    positions_from_cu_seqlens,
)
from rope_compile.factory import registry

from support import generator, randn, run_child

ANSWER_TIMEOUT_S = 90
WIDTH = 16


# ---------------------------------------------------------------------------- groups of processes


def _serve(rank: int, ranks: int, meeting_point: str, pipe) -> None:
    """One process of a group: run what the test sends, answer with None or a traceback."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks
    )
    for name, arguments in iter(pipe.recv, None):
        registry.clear()
        torch.manual_seed(0)
        try:
            globals()[name](*arguments)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Group:
    """Processes that run checks together, started when first needed; none outlives ``close``."""

    def __init__(self, ranks: int, folder) -> None:
        self.ranks, self._folder, self._starts = ranks, folder, 0
        self._processes, self._pipes = [], []

    def run(self, check: Callable[..., None], *arguments) -> None:
        """Run a function of this module in all processes; raise what any of them raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check.__name__, arguments))
        end, errors = time.monotonic() + ANSWER_TIMEOUT_S, []
        waiting = dict(zip(self._pipes, range(self.ranks), strict=True))
        while waiting and (ready := wait(waiting, max(end - time.monotonic(), 0))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = "the process ended"
                if answer is not None:
                    errors.append(f"rank {rank}: {answer}")
                    # The others may wait for it in vain.
                    end = min(end, time.monotonic() + 5)
        errors += [f"rank {rank}: no answer" for rank in waiting.values()]
        if waiting or not all(process.is_alive() for process in self._processes):
            self._kill()
        assert not errors, "\n".join(errors)

    def _start(self) -> None:
        spawn = torch.multiprocessing.get_context("spawn")
        self._starts += 1
        meeting_point = str(self._folder / f"{self.ranks}_{self._starts}")
        for rank in range(self.ranks):
            ours, theirs = spawn.Pipe()
            arguments = (rank, self.ranks, meeting_point, theirs)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(timeout=30)
        self._processes, self._pipes = [], []

    def close(self) -> None:
        """End all processes; each must end by itself, with status 0."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=30)
        codes = [process.exitcode for process in self._processes]
        self._kill()
        assert set(codes) <= {0}, codes


@pytest.fixture(scope="module", params=[2, 4], ids=["2ranks", "4ranks"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    group = Group(request.param, tmp_path_factory.mktemp("gloo"))
    yield group
    group.close()


@pytest.fixture(autouse=True)
def _empty_registry():
    registry.clear()
    yield
    registry.clear()


def on_ranks_fail_on_one() -> None:
    assert dist.get_rank() != 1, "rank one"


def test_an_exception_on_one_rank_reaches_the_test(group: Group) -> None:
    """The twin of every test below."""
    with pytest.raises(AssertionError, match="rank one"):
        group.run(on_ranks_fail_on_one)


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


@contextlib.contextmanager
def no_communication() -> Iterator[None]:
    """Nothing is sent inside; call ``forward`` there, for its module hooks fail with gradients."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as seen:
        yield
    assert seen.get_total_counts() == 0, seen.get_comm_counts()


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- DTensor

# Name -> dimensions of [batch, seq, heads, head_dim] that each mesh dimension shards, of q and k.
LAYOUTS = {
    "replicated": ([None], [None]),
    "batch": ([0], [0]),
    "sequence": ([1], [1]),
    "heads": ([2], [2]),
    "few_kv_heads": ([2], [None]),  # fewer than ranks: every rank has them all
    "other_tokens_of_k": ([0], [None]),
    "batch_and_heads": ([0, 2], [0, 2]),
    "sequence_and_batch": ([1, 0], [1, 0]),
    "sequence_twice": ([1, 1], [1, 1]),
}
# Name -> shape of positions for 3 sequences of 7 tokens; two position axes where it begins with 2.
POSITIONS = {
    "one_sequence": (7,),
    "each_sequence": (3, 7),
    "one_row": (1, 7),
    "one_column": (3, 1),
    "axes": (2, 3, 7),
    "axes_of_one_sequence": (2, 7),
    "text_only_axes": (7,),
}


def config(**fields) -> RopeConfig:
    return RopeConfig(head_dim=WIDTH, max_position=256, **fields)


def rope_for(form: str) -> RotaryEmbedding:
    axes = rc.ChunkedAxes((3, 5)) if "axes" in form else None
    return get_rope(config(axes=axes), "cpu")


def placements(dims: list[int | None]):
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def mesh_for(dims: list[int | None]) -> DeviceMesh:
    return mesh(dist.get_world_size() // 2, 2) if len(dims) == 2 else mesh()


def spread(x: Tensor, dims: list[int | None], on: DeviceMesh | None = None):
    """The DTensor of a tensor that every rank has; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    on = on or mesh_for(dims)
    return distribute_tensor(x.detach(), on, placements(dims), src_data_rank=None)


def spread_positions(positions: Tensor, dims: list[int | None]):
    """Positions ``[..., seq]`` sharded as q's tokens are, where they have the dimension."""
    missing = 2 - positions.dim()
    own = [
        None if d is None or d > 1 or d < missing or positions.shape[d - missing] == 1 else d
        for d in dims
    ]
    return spread(positions, [None if d is None else d - missing for d in own], mesh_for(dims))


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and their gradients. No size is a multiple of the number of ranks but q's heads."""
    return tuple(
        randn(3, 7, heads, WIDTH, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 3, 4, 3))
    )


def drawn_positions(form: str) -> Tensor:
    """Inside the table, behind it, and negative."""
    positions = torch.randint(0, 256, POSITIONS[form], generator=generator(5))
    positions.view(-1)[[0, -1]] = torch.tensor([-3, 131071])
    return positions


def check_dtensor(form: str, layout: str, how: str) -> None:
    rope, (q_dims, k_dims) = rope_for(form), LAYOUTS[layout]
    positions = drawn_positions(form)
    q, k, *weights = drawn()
    q.requires_grad_()
    k.requires_grad_()
    expected = rope(positions, q, k)
    grads = torch.autograd.grad(expected, (q, k), weights)
    if how == "replicated":
        positions = spread(positions, [None] * len(q_dims), mesh_for(q_dims))
    elif how == "sharded":
        positions = spread_positions(positions, q_dims)
    xs = [spread(x, dims) for x, dims in ((q, q_dims), (k, k_dims))]
    cotangents = [spread(w, dims) for w, dims in zip(weights, (q_dims, k_dims), strict=True)]
    rows = {"inv_freq": rope.inv_freq, "axes": rope.config.lane_axes or None}
    written = [x.clone() for x in xs]
    with no_communication():
        plain = rope.forward(positions, *xs)
        function = rc.apply_rope(*xs, positions, rope.cos_sin_cache, **rows)
        rope.apply_(positions, *written)
        recorded = rope.forward(positions, *(x.requires_grad_() for x in xs))
        found = torch.autograd.grad(recorded, xs, cotangents)
    for outs in (plain, function, written, recorded):
        for out, x, right in zip(outs, xs, expected, strict=True):
            assert (out.placements, out.shape) == (x.placements, x.shape)
            assert out.stride() == right.stride()
            assert outs is written or out.to_local().is_contiguous()
            same(out.full_tensor(), right)
    for grad, x, right in zip(found, xs, grads, strict=True):
        assert grad.placements == x.placements
        same(grad.full_tensor(), right)


def on_ranks_dtensor(layout: str) -> None:
    for form in POSITIONS:
        check_dtensor(form, layout, "plain")
        check_dtensor(form, layout, "replicated")
        if "axes" not in form and layout != "other_tokens_of_k":
            check_dtensor(form, layout, "sharded")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtensors_equal_one_process(group: Group, layout: str) -> None:
    """Values, gradients and in place, bit for bit, placements kept, nothing sent."""
    group.run(on_ranks_dtensor, layout)


def on_ranks_gradients() -> None:
    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    q, _, weight, _ = drawn(torch.float64)
    for dims in ([0], [1], [2], [0, 2]):
        spread_q = spread(q, dims).requires_grad_()
        whole_q = q.clone().requires_grad_()
        own = spread_positions(positions, dims)
        with no_communication():
            # A sum gives a replicated gradient, which is cut where the positions were.
            rope.forward(own, spread_q)[0].sum().backward()
        rope(positions, whole_q)[0].sum().backward()
        same(spread_q.grad.full_tensor(), whole_q.grad)
        seconds = []
        for x, w, p in ((spread_q, spread(weight, dims), own), (whole_q, weight, positions)):
            out = rope(p, x)[0]
            (first,) = torch.autograd.grad(out.pow(3), x, w, create_graph=True)
            seconds += torch.autograd.grad(first, x, w)
        same(seconds[0].full_tensor(), seconds[1])


def test_replicated_and_second_gradients(group: Group) -> None:
    group.run(on_ranks_gradients)


def on_ranks_partial() -> None:
    """The rotation of a sum is the sum of rotations: nothing need be reduced first."""
    from torch.distributed.tensor import DTensor, Partial

    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    ranks = dist.get_world_size()
    terms = [randn(3, 7, 4, WIDTH, seed=i, dtype=torch.float64) for i in range(ranks)]
    for kind, whole in (("sum", sum(terms)), ("avg", sum(terms) / ranks)):
        x = DTensor.from_local(terms[dist.get_rank()].clone(), mesh(), [Partial(kind)])
        with no_communication():
            out, _ = rope.forward(positions, x)
            rope.apply_(positions, x)
        assert out.placements == x.placements == (Partial(kind),)
        expected, _ = rope(positions, whole)
        for rotated in (out, x):
            torch.testing.assert_close(rotated.full_tensor(), expected, rtol=0, atol=1e-14)


def test_partial_sums_stay_partial(group: Group) -> None:
    group.run(on_ranks_partial)


def on_ranks_in_place_through_views() -> None:
    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    packed = randn(3, 7, 10, WIDTH, seed=1)
    for dims in ([0], [1]):
        x, whole = spread(packed, dims).clone(), packed.clone()
        before = x._version
        with no_communication():
            rope.apply_(positions, x[:, :, :4], x[:, :, 4:7])
        rope.apply_(positions, whole[:, :, :4], whole[:, :, 4:7])
        same(x.full_tensor(), whole)
        assert x._version > before
        local = x.to_local()
        before = x._version, local._version
        rope.apply_(positions, x)
        assert x._version > before[0]
        assert local._version > before[1]
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="must not require grad"):
            rope.apply_(positions, x)


def test_in_place_writes_through_views_and_tells_autograd(group: Group) -> None:
    """Slices of a packed DTensor are written where they are; what was saved of it notices."""
    group.run(on_ranks_in_place_through_views)


def on_ranks_axes_and_styles() -> None:
    positions = drawn_positions("axes")
    q, k, *_ = drawn(torch.bfloat16)
    cases = {
        "half": {"rotary_dim": 8, "rotary_offset": 8},
        "interleaved": {"scaling": rc.YarnScaling(factor=4.0, original_max_position=64)},
        "half_blocks": {"axes": rc.AxialAxes((8, 8))},
        "interleaved_to_half": {},
    }
    for style, fields in cases.items():
        rope = RotaryEmbedding(config(style=style, **fields), "cpu")
        at = positions if "axes" in fields else positions[0]
        with no_communication():
            outs = rope.forward(at, spread(q, [0]), spread(k, [0]), inverse=True)
        for out, right in zip(outs, rope(at, q, k, inverse=True), strict=True):
            same(out.full_tensor(), right)


def test_every_style_in_bfloat16(group: Group) -> None:
    group.run(on_ranks_axes_and_styles)


def on_ranks_outside_the_mesh() -> None:
    """A rank that is not part of a mesh takes part in the call, and holds nothing."""
    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    q, k, *_ = drawn()
    part = DeviceMesh("cpu", [0])
    outs = rope(positions, spread(q, [0], part), spread(k, [0], part))
    rope.apply_(positions, spread(q, [0], part))
    for out, right in zip(outs, rope(positions, q, k), strict=True):
        assert out.shape == right.shape
        if dist.get_rank() == 0:
            same(out.to_local(), right)
        else:
            assert out.to_local().numel() == 0


def test_a_rank_outside_the_mesh(group: Group) -> None:
    group.run(on_ranks_outside_the_mesh)


def on_ranks_errors() -> None:
    from torch.distributed.tensor import DTensor, Partial

    import rope_compile.distributed  # noqa: F401, a plain q does not bring it in

    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    q, k, *_ = drawn()
    table, ranks = rope.cos_sin_cache, dist.get_world_size()
    grid = init_device_mesh("cpu", (1, ranks))
    largest = DTensor.from_local(q, mesh(), [Partial("max")])
    two = spread(positions, [0, None])
    rows = spread(table, [0])
    cases = [
        (positions, spread(q, [3]), None, "q must be sharded over batch, sequence or heads"),
        (positions, spread(q, [2]), spread(k, [3]), r"or a partial sum, got S\w*\(.*3\) for k of"),
        (positions, largest, None, r"got P\w*\(max\) for q of \(3, 7, 4, 16\); redistribute it"),
        (positions, spread(q, [0]), k, "k must be a DTensor where another argument is one, got a"),
        (positions, q, spread(k, [0]), "q must be a DTensor where another argument is one, got a"),
        (spread(positions, [0]), q, k, "q must be a DTensor where another argument is one, got a"),
        (positions, spread(q, [0]), spread(k, [None, 0], grid), "k must be on the mesh of q, "),
        (two, spread(q, [0]), None, "positions must be on the mesh of q, "),
        (spread(positions, [1]), spread(q, [0]), None, "positions must be replicated, or placed"),
        (spread(positions, [0]), spread(q, [2]), None, "positions must be replicated, or placed"),
        (positions[:, :3], spread(q, [1]), None, "positions must broadcast to q.shape"),
        (positions.float(), spread(q, [1]), None, "positions must be int32 or int64"),
    ]
    for at, x, y, sentence in cases:
        for call in (rope.forward, rope.apply_):
            with pytest.raises((ValueError, TypeError), match=sentence), no_communication():
                call(at, x, y)
    with pytest.raises(ValueError, match="cos_sin_cache must be a plain or replicated tensor, got"):
        rc.apply_rope(spread(q, [0]), None, positions, rows)
    # What may follow its positions when a result is returned may not when it is written.
    same(rope(spread(positions, [0]), spread(q, [None]))[0].full_tensor(), rope(positions, q)[0])
    with pytest.raises(ValueError, match="positions must be replicated, or placed as"):
        rope.apply_(spread(positions, [0]), spread(q, [None]))
    if ranks == 4:  # cut by the other mesh dimension first: not the slices of q
        with pytest.raises(ValueError, match="positions must be replicated, or placed as"):
            rope(spread(positions, [None, 1]), spread(q, [1, 1]))


def test_what_is_not_local_is_named(group: Group) -> None:
    group.run(on_ranks_errors)


def on_ranks_wrong_rule() -> None:
    from torch.distributed.tensor import DTensor

    from rope_compile.distributed import rotate_parts

    def gathering(cls, func, types, args, kwargs):
        whole = args[0].redistribute(args[0].device_mesh, placements([None]))
        out, _ = rotate_parts(cls, rope, types, (whole, *args[1:]), kwargs)
        return out.redistribute(args[0].device_mesh, args[0].placements)

    rope = torch.ops.rope_compile.rope.default
    with torch.library._scoped_library("rope_compile_gathering", "FRAGMENT") as lib:
        schema = str(rope._schema).split("rope(")[1]
        lib.define(f"rope({schema.split(' -> ')[0]} -> Tensor")
        torch.library.register_torch_dispatch(
            "rope_compile_gathering::rope", DTensor, gathering, lib=lib
        )
        q, positions = spread(drawn()[0], [1]), drawn_positions("each_sequence")
        table = rope_for("each_sequence").cos_sin_cache
        arguments = (q, None, positions, table, None, [], "half", 0, 1.0, False)
        with pytest.raises(AssertionError, match="gather"), no_communication():
            out = torch.ops.rope_compile_gathering.rope(*arguments)
        same(out.full_tensor(), rope(drawn()[0], *arguments[1:])[0])


def test_a_rule_that_redistributes_would_be_found(group: Group) -> None:
    """Wrong twin: right values, by way of the whole tensor on every rank."""
    group.run(on_ranks_wrong_rule)


def on_ranks_distribute_module() -> None:
    """It makes replicated DTensors of all buffers, of tables too."""
    from torch.distributed.tensor import distribute_module

    rope, positions = RotaryEmbedding(config(), "cpu"), drawn_positions("each_sequence")
    q, *_ = drawn()
    expected, _ = rope(positions, q)
    distribute_module(rope, mesh())
    assert "DTensor" in rope.table.dead()
    same(rope(positions, spread(q, [0]))[0].full_tensor(), expected)
    assert rope.reserve(rope.capacity)  # a dead table is replaced by a live one
    same(rope(positions, q)[0], expected)
    same(rope(positions, spread(q, [0]))[0].full_tensor(), expected)


def test_distribute_module_over_a_rope(group: Group) -> None:
    group.run(on_ranks_distribute_module)


# --------------------------------------------------------------------------------------- compiled


def on_ranks_compiled() -> None:
    rope, positions = rope_for("each_sequence"), drawn_positions("each_sequence")
    torch.compiler.reset()

    def block(at: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return rope(at, x * 2.0, y)

    def write(at: Tensor, x: Tensor) -> Tensor:
        x = x * 2.0
        rope.apply_(at, x)
        return x

    q, k, *weights = drawn()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for dims in ([0], [1], [2], [0, 2]):
        xs = [spread(x, dims).requires_grad_() for x in (q, k)]
        whole = [x.clone().requires_grad_() for x in (q, k)]
        outs, expected = compiled(positions, *xs), block(positions, *whole)
        cotangents = [spread(w, dims) for w in weights]
        grads = torch.autograd.grad(outs, xs, cotangents)
        for found, right in zip(
            (*outs, *grads),
            (*expected, *torch.autograd.grad(expected, whole, weights)),
            strict=True,
        ):
            same(found.full_tensor(), right)
    written = torch.compile(write, fullgraph=True, backend="aot_eager")
    same(written(positions, spread(q, [1])).full_tensor(), write(positions, q))


@pytest.mark.parametrize("group", [2], indirect=True, ids=["2ranks"])
def test_compiled_to_one_graph(group: Group) -> None:
    """Forward, backward and in place."""
    group.run(on_ranks_compiled)


def on_ranks_shared_cache(folder: str) -> None:
    from torch._dynamo.utils import counters

    from rope_compile import distributed

    def compile_in_turn(positions: Tensor, q: Tensor) -> tuple[Tensor, bool]:
        rope = rope_for("each_sequence")
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                torch.compiler.reset()
                counters.clear()
                out, _ = torch.compile(rope, fullgraph=True)(positions, q)
            dist.barrier()
        return out, bool(counters["aot_autograd"]["autograd_cache_hit"])

    previous = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    key = distributed.keyed_by_rank
    try:
        positions = torch.arange(8).expand(3, 8)
        whole = randn(3, 8, 4, WIDTH)
        out, hit = compile_in_turn(positions, spread(whole, [1]))
        assert not hit
        same(out.full_tensor(), rope_for("each_sequence")(positions, whole)[0])
        # Wrong twin: without the rank in the graph the second rank loads what the first compiled.
        # Once this fails, torch tells ranks apart itself (#188390): then delete keyed_by_rank.
        distributed.keyed_by_rank = lambda table: table
        out, hit = compile_in_turn(positions, spread(whole, [1]))
        assert hit == (dist.get_rank() > 0)
        mine = rope_for("each_sequence")(positions, whole)[0].chunk(dist.get_world_size(), 1)
        assert torch.equal(out.to_local(), mine[dist.get_rank()]) == (not hit)
    finally:
        distributed.keyed_by_rank = key
        torch.compiler.reset()
        if previous is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = previous


@pytest.mark.parametrize("group", [2], indirect=True, ids=["2ranks"])
def test_ranks_that_share_a_compile_cache(group: Group, tmp_path) -> None:
    """Each compiles its own slice of the positions, and loads nobody else's."""
    group.run(on_ranks_shared_cache, str(tmp_path))


LAZY = """
import sys, torch, rope_compile as rc
rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=16, max_position=128), "cpu")
q, positions = torch.randn(4, 2, 16), torch.arange(4)
expected, _ = rope(positions, q)
with torch.no_grad():
    rope(positions, torch.nn.Parameter(q))
    rope.apply_(positions, torch.nn.Parameter(q.clone()))
assert "torch.distributed.tensor" not in sys.modules
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1
)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
x = distribute_tensor(q, init_device_mesh("cpu", (1,)), [Shard(0)])
assert "rope_compile.distributed" not in sys.modules
out, _ = torch.compile(rope, fullgraph=True, backend="aot_eager")(positions, x)
assert torch.equal(out.full_tensor(), expected)
op = torch.ops.rope_compile.rope(
    x, None, positions, rope.cos_sin_cache, rope.inv_freq, [], "half", 0, 1.0, False
)
assert torch.equal(op[0].full_tensor(), expected)
torch.distributed.destroy_process_group()
"""


def test_dtensor_is_imported_with_the_first_one(tmp_path) -> None:
    """Not before, for it takes seconds; also where the first call of all is a compiled one."""
    run_child("-c", LAZY, str(tmp_path / "meeting_point"))


# ------------------------------------------------------------------------- models in many processes


class Attention(nn.Module):
    """Grouped-query attention that takes its number of heads from the projections it is given."""

    def __init__(self, rope: RotaryEmbedding, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        size = heads * WIDTH
        self.q = nn.Linear(size, size, bias=False, dtype=torch.float64)
        self.k = nn.Linear(size, kv_heads * WIDTH, bias=False, dtype=torch.float64)
        self.v = nn.Linear(size, kv_heads * WIDTH, bias=False, dtype=torch.float64)
        self.o = nn.Linear(size, size, bias=False, dtype=torch.float64)
        self.rope = rope

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (project(x).view(*x.shape[:2], -1, WIDTH) for project in (self.q, self.k, self.v))
        q, k = self.rope(positions, q, k)
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(get_rope(config())) for _ in range(layers))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, positions)
        return x


def model_inputs(batch: int = 3) -> tuple[Tensor, Tensor]:
    positions = torch.randint(-5, 300, (batch, 7), generator=generator(5))
    return randn(batch, 7, 8 * WIDTH, seed=8, dtype=torch.float64), positions


def nearly(a: Tensor, b: Tensor) -> None:
    """Equal up to another order of float64 sums."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def on_ranks_tensor_parallel(kind: str) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x, positions = model_inputs()
    model = Model()
    alone = copy.deepcopy(model)
    seen = set()

    def to_local(module: nn.Module, arguments: object, outs: tuple[Tensor, Tensor]):
        seen.update(type(out).__name__ for out in outs)
        return outs if kind == "Tensor" else tuple(out.to_local() for out in outs)

    model.layers[0].rope.register_forward_hook(to_local)
    for layer in model.layers:
        plan = {
            "q": ColwiseParallel(use_local_output=kind == "Tensor"),
            "k": ColwiseParallel(use_local_output=kind == "Tensor"),
            "v": ColwiseParallel(),
            "o": RowwiseParallel(),
        }
        parallelize_module(layer, mesh(), plan)
    out, expected = model(x, positions), alone(x, positions)
    assert seen == {kind}
    nearly(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for own, right in zip(model.parameters(), alone.parameters(), strict=True):
        nearly(own.grad.full_tensor(), right.grad)


@pytest.mark.parametrize("kind", ["Tensor", "DTensor"])
def test_tensor_parallel_attention(group: Group, kind: str) -> None:
    """Colwise q, k and v, rowwise o: heads per rank, as local tensors and as DTensors."""
    group.run(on_ranks_tensor_parallel, kind)


def on_ranks_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    alone = Model()
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    model.to_empty(device="cpu")
    rope = model.layers[0].rope
    assert rope is model.layers[1].rope
    assert (rope.device.type, rope.table.dead()) == ("cpu", None)
    fresh = RotaryEmbedding(config(), "cpu")
    same(rope.cos_sin_cache, fresh.cos_sin_cache)
    same(rope.inv_freq, fresh.inv_freq)
    for own, right in zip(model.parameters(), alone.parameters(), strict=True):
        own.to_local().data.copy_(spread(right, [0]).to_local())
    assert {name.split(".")[2] for name in model.state_dict()} == set("qkvo")
    x, positions = model_inputs(2 * dist.get_world_size())
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # its own part of the batch
    out = model(x[mine], positions[mine])
    expected = alone(x, positions)
    nearly(out, expected[mine])
    (out.square().sum() * dist.get_world_size()).backward()  # FSDP takes the mean over ranks
    expected.square().sum().backward()
    for own, right in zip(model.parameters(), alone.parameters(), strict=True):
        nearly(own.grad.full_tensor(), right.grad)
    same(rope.cos_sin_cache, fresh.cos_sin_cache)


def test_fsdp_after_meta_construction(group: Group) -> None:
    """to_empty() ends with right tables, not sharded, and training equals one process."""
    group.run(on_ranks_fsdp)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """The recomputed forward is the same one: gradients equal bit for bit."""
    model, (x, positions) = Model(), model_inputs()
    x.requires_grad_()

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        x.grad, hidden = None, x
        for layer in model.layers:
            hidden = run(layer, hidden, positions)
        hidden.square().sum().backward()
        return [tensor.grad for tensor in (x, *model.parameters())]

    plain = gradients(lambda layer, *arguments: layer(*arguments))
    recomputed = gradients(functools.partial(checkpoint, use_reentrant=reentrant))
    for a, b in zip(plain, recomputed, strict=True):
        same(a, b)


def test_stages_of_a_pipeline() -> None:
    """Stages made by deepcopy share a rope each, alive, and together equal the whole model."""
    model, (x, positions) = Model(4), model_inputs()
    stages = []
    for kept in (slice(0, 2), slice(2, 4)):
        stage = copy.deepcopy(model)
        stage.layers = stage.layers[kept]
        stages.append(stage)
    expected, hidden = model(x, positions), x
    for stage in stages:
        ropes = {layer.rope for layer in stage.layers}
        assert len(ropes) == 1
        assert ropes.isdisjoint({model.layers[0].rope})
        assert ropes.pop().table.dead() is None
        hidden = stage(hidden, positions)
    same(hidden, expected)
    assert {name.rsplit(".", 2)[-2] for name in model.state_dict()} == set("qkvo")
    assert not model.layers[0].rope.state_dict()


# --------------------------------------------------------------------------------- context parallel


def gathered(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts


@dataclasses.dataclass
class Shards:
    """Which tokens of the whole each rank has, and at which positions."""

    tokens: Tensor
    positions: Tensor


def check_context_parallel(whole_positions: Tensor, mine: Shards) -> None:
    """A rank rotates its tokens alone; put together, the shards are the rotated whole."""
    same(whole_positions[mine.tokens], mine.positions)
    rope = get_rope(config(), "cpu")
    whole = [randn(len(whole_positions), heads, WIDTH, seed=heads) for heads in (4, 2)]
    outs = rope(mine.positions, *(x[mine.tokens] for x in whole))
    order = torch.cat(gathered(mine.tokens))
    same(order.sort().values, torch.arange(len(whole_positions)))
    for out, right in zip(outs, rope(whole_positions, *whole), strict=True):
        same(out, right[mine.tokens])
        same(torch.cat(gathered(out))[order.argsort()], right)


def on_ranks_zigzag() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for length in (0, 2 * ranks, 6 * ranks, 512):  # the last one goes past the table
        own = context_parallel_positions(length, rank=rank, ranks=ranks)
        check_context_parallel(torch.arange(length), Shards(own, own))


def on_ranks_packed_zigzag(dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Empty sequences at both ends and two in a row; one longer than the table.
    lengths = torch.tensor([0, 1, 3, 0, 0, 40, 2, 0]) * 2 * ranks
    boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)
    total = int(lengths.sum())
    whole = torch.cat([torch.arange(int(n)) for n in lengths])
    same(positions_from_cu_seqlens(boundaries, total), whole)
    tokens, positions = packed_context_parallel_positions(boundaries, total, rank=rank, ranks=ranks)
    check_context_parallel(whole, Shards(tokens, positions))
    dealt = [context_parallel_positions(int(n), rank=rank, ranks=ranks) for n in lengths]
    same(positions, torch.cat(dealt))


def test_zigzag_shards_are_slices_of_the_whole(group: Group) -> None:
    group.run(on_ranks_zigzag)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_zigzag_shards_are_slices_of_the_whole(group: Group, dtype: torch.dtype) -> None:
    group.run(on_ranks_packed_zigzag, dtype)


def on_ranks_contiguous_positions_are_wrong() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = context_parallel_positions(8 * ranks, rank=rank, ranks=ranks)
    contiguous = torch.arange(8) + 8 * rank
    with pytest.raises(AssertionError):
        check_context_parallel(torch.arange(8 * ranks), Shards(tokens, contiguous))


def test_positions_of_another_split_would_be_found(group: Group) -> None:
    """Wrong twin: zig-zag tokens at positions of a contiguous split."""
    group.run(on_ranks_contiguous_positions_are_wrong)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 5, 0], [3, 0, 4]])
def test_positions_of_empty_sequences(lengths: list[int]) -> None:
    boundaries = nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    expected = [torch.arange(n) for n in lengths]
    same(positions_from_cu_seqlens(boundaries, sum(lengths)), torch.cat(expected))
    starts = torch.arange(len(lengths)) * 100
    moved = [positions + start for positions, start in zip(expected, starts, strict=True)]
    found = positions_from_cu_seqlens(boundaries, sum(lengths), starts=starts)
    same(found, torch.cat(moved))
