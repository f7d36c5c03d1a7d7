"""Stage "graphs": captured calls, and what may happen to a table afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rope_compile as rc
from bench.gpu_checks import exact
from bench.gpu_checks.numbers import expect_equal, same_bits
from bench.gpu_checks.registry import Check, Context, register

CHECKS: list[Check] = []

Pair = tuple[Tensor, Tensor]
PLAN = rc.CapturePlan(max_position=512, speculative_steps=2, draft_tokens=3, margin=100)
TABLE_ROWS = 100_000  # several of the blocks that a device fills at a time
LARGE_ROWS = 2**18  # 128 MiB: a copy of it would show
SLOTS = 64  # tokens of a captured step, of which some are padding


class StandInGraph(TorchDispatchMode):
    """A graph of operators on the tensors that they were called with, for a machine without a GPU.

    Like a captured graph it knows memory, not names: a table that moved is not seen by a replay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., object], Any, Any, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            for old, new in zip(
                tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(old, Tensor):
                    old.copy_(new)


class Captured:
    """A call in a CUDA graph; ``outputs`` are overwritten by each replay."""

    def __init__(self, context: Context, call: Callable[[], object]) -> None:
        self.outputs: object
        if not context.gpu:
            call()
            with StandInGraph() as graph:
                self.outputs = call()
            self.replay = graph.replay
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph):
            self.outputs = call()
        self.replay = cuda_graph.replay


class Step:
    """A decode step with memory of its own: what a serving engine captures once."""

    def __init__(self, context: Context, rope: Any, heads: tuple[int, int] = (4, 2)) -> None:
        self.context, self.rope = context, rope
        self.positions = torch.zeros(SLOTS, dtype=torch.int64, device=context.device)
        self.q, self.k = (
            torch.zeros(SLOTS, n, 64, dtype=torch.bfloat16, device=context.device) for n in heads
        )
        self._generator = torch.Generator().manual_seed(len(heads))

    def load(self, live: int, first: int) -> None:
        """New values in place: ``live`` tokens from ``first`` on, then stale poisoned slots."""
        for x in (self.q, self.k):
            x.copy_(torch.randn(x.shape, generator=self._generator).to(x.dtype))
            x[live:] = float("nan")
        at = torch.full((SLOTS,), 2**62)
        at[1::2] = -1
        at[:live] = torch.arange(first, first + live)
        self.positions.copy_(at)

    def live(self, live: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.positions[:live].clone(), self.q[:live].clone(), self.k[:live].clone()

    def call(self) -> tuple[Tensor, Tensor]:
        return self.rope(self.positions, self.q, self.k)

    def call_in_place(self) -> tuple[Tensor, Tensor]:
        self.rope.apply_(self.positions, self.q, self.k)
        return self.q, self.k


def _rope(context: Context, style: str = "half") -> rc.RotaryEmbedding:
    """Not a shared one: what happens to its table here is nobody else's business."""
    return rc.RotaryEmbedding(
        rc.RopeConfig(head_dim=64, max_position=256, style=style), context.device
    )


# Steps of a decode: live tokens, first position. Fewer than captured; past the table; far past it.
_STEPS = ((SLOTS, 0), (17, 200), (1, 700), (40, 741), (33, -5), (3, 2**31 - 2))


@register(CHECKS, "graphs.replay")
def replay(context: Context) -> None:
    """Replays on new inputs, fewer live tokens and far positions equal eager calls bit for bit."""
    for style in ("half", "interleaved"):
        rope = _rope(context, style)
        rc.prepare_for_capture(rope, PLAN)
        for in_place in (False, True):
            step = Step(context, rope)
            step.load(SLOTS, 0)
            with torch.no_grad(), rc.capture_guard(rope):
                captured = Captured(context, step.call_in_place if in_place else step.call)
            for live, first in _STEPS:
                label = f"{style}, {'in place' if in_place else 'functional'}, {live} from {first}"
                with context.case(label), torch.no_grad():
                    step.load(live, first)
                    at, q, k = step.live(live)
                    captured.replay()
                    found = [x[:live].clone() for x in captured.outputs]
                    expect_equal(context, label, found, rope(at, q, k))


def _litter(context: Context, rows: int) -> list[Tensor]:
    """NaN in whatever memory a table of that size gave back."""
    nan = float("nan")
    return [torch.full((rows, 64), nan, device=context.device) for _ in range(12)]


@register(CHECKS, "graphs.growth")
def growth(context: Context) -> None:
    """After capture: no move within the reserve; refill and growth leave replays right."""
    rope = _rope(context)
    rc.prepare_for_capture(rope, PLAN)
    step = Step(context, rope)
    step.load(SLOTS, 480)
    address = rope.cos_sin_cache.data_ptr()
    with torch.no_grad(), rc.capture_guard(rope):
        wanted = [x.clone() for x in rope(step.positions, step.q, step.k)]
        captured = Captured(context, step.call)

    def expect(label: str) -> None:
        for x in captured.outputs:
            x.fill_(float("nan"))
        captured.replay()
        expect_equal(context, label, captured.outputs, wanted)

    with context.case("within the reserve"), torch.no_grad():
        if rope.reserve(PLAN.required_length) or rope.cos_sin_cache.data_ptr() != address:
            context.fail("within the reserve", "the table moved")
        expect("within the reserve")
    with context.case("refilled"), torch.no_grad():
        rope.cos_sin_cache.zero_()
        rope.rebuild_()
        if rope.cos_sin_cache.data_ptr() != address:
            context.fail("refilled", "the table moved")
        expect("refilled")
    with context.case("grown, with other memory in between"), torch.no_grad():
        if not rope.reserve(8 * PLAN.reserve_length):
            context.fail("grown", "reserve did not reallocate")
        litter = _litter(context, PLAN.reserve_length)
        expect("grown")
        del litter
        eager = rope(step.positions, step.q, step.k)
        expect_equal(context, "eager after growth", eager, wanted)


@register(CHECKS, "graphs.reserve_refused")
def reserve_refused(context: Context) -> None:
    """reserve raises inside capture_guard and while a stream captures; the table stays as it is."""
    rope = _rope(context)
    rc.prepare_for_capture(rope, PLAN)
    step = Step(context, rope)
    before = rope.cos_sin_cache.data_ptr(), rope.capacity

    def expect_refusal(label: str) -> None:
        try:
            rope.reserve(10 * PLAN.reserve_length)
        except RuntimeError:
            return
        context.fail(label, "growth was not refused")

    with context.case("capture_guard"), rc.capture_guard(rope):
        expect_refusal("guard")
    if context.gpu:
        with context.case("capture"), torch.no_grad():
            step.call()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step.call()
                expect_refusal("capture")
    if (rope.cos_sin_cache.data_ptr(), rope.capacity) != before:
        context.fail("table", "it changed all the same")


class _Model(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.rope = _rope(context)


@register(CHECKS, "graphs.outlives_model")
def outlives_model(context: Context) -> None:
    """A graph whose model is gone still reads the rows that it was captured with."""
    with context.case("the model is deleted"), torch.no_grad():
        model = _Model(context)
        rc.prepare_for_capture(model, PLAN)
        step = Step(context, model.rope)
        step.load(SLOTS, 3)
        wanted = [x.clone() for x in step.call()]
        with rc.capture_guard(model):
            captured = Captured(context, step.call)
        rows = model.rope.capacity
        step.rope = None
        del model
        gc.collect()
        if context.gpu:
            torch.cuda.empty_cache()
        litter = _litter(context, rows)
        captured.replay()
        expect_equal(context, "the model is deleted", captured.outputs, wanted)
        del litter


@register(CHECKS, "graphs.two_streams", rehearse=False)
def two_streams(context: Context) -> None:
    """Calls and replays on two streams at once do not disturb each other."""
    rope = _rope(context)
    rc.prepare_for_capture(rope, PLAN)
    streams = [torch.cuda.Stream() for _ in range(2)]
    steps = [Step(context, rope, heads) for heads in ((4, 2), (8, 1))]
    with torch.no_grad():
        for step in steps:
            step.load(SLOTS, 100)
        wanted = [[x.clone() for x in step.call()] for step in steps]
        with rc.capture_guard(rope):
            graphs = [Captured(context, step.call) for step in steps]
        torch.cuda.synchronize(context.device)
        for number in range(20):
            with context.case(f"round {number}"):
                found = []
                for stream, step, graph in zip(streams, steps, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
                        found.append(step.call())
                torch.cuda.synchronize(context.device)
                for graph, eager, right in zip(graphs, found, wanted, strict=True):
                    expect_equal(context, f"replay {number}", graph.outputs, right)
                    expect_equal(context, f"eager {number}", eager, right)


@register(CHECKS, "graphs.reduce_overhead", rehearse=False)
def reduce_overhead(context: Context) -> None:
    """mode="reduce-overhead" captures, never skips, and does not copy the table at a replay."""
    config = rc.RopeConfig(head_dim=128, max_position=LARGE_ROWS)
    rope = rc.RotaryEmbedding(config, context.device)
    table_bytes = rope.cos_sin_cache.numel() * 4
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(rope, mode="reduce-overhead", fullgraph=True)
    q, k = (torch.randn(16, n, 128, device=context.device, dtype=torch.bfloat16) for n in (8, 2))
    at = torch.arange(16, device=context.device)
    torch.cuda.synchronize(context.device)
    before = torch.cuda.memory_reserved(context.device)
    with torch.no_grad():
        for number in range(6):
            with context.case(f"step {number}"):
                torch.compiler.cudagraph_mark_step_begin()
                positions = at + 100000 * number  # past the table from the third on
                found = [x.clone() for x in compiled(positions, q, k)]
                expect_equal(context, f"step {number}", found, rope(positions, q, k))
        with context.case("a first result after a second call"):
            torch.compiler.cudagraph_mark_step_begin()
            first = compiled(at, q, k)
            compiled(at + 1, q, k)  # of the same step: the memory of the first is still taken
            expect_equal(context, "a first result after a second call", first, rope(at, q, k))
    if counters["inductor"]["cudagraph_skips"]:
        context.fail("skips", f"{counters['inductor']['cudagraph_skips']} graphs were not captured")
    grown = torch.cuda.memory_reserved(context.device) - before
    context.say(f"memory grew by {grown >> 20} MiB, the table has {table_bytes >> 20}")
    if grown >= table_bytes:
        context.fail("copies", "the table seems to have been copied into the graph's memory")
    compiled_copies(context, compiled, at, q, k, table_bytes)


def compiled_copies(
    context: Context, compiled: Callable[..., object], at: Tensor, q: Tensor, k: Tensor, limit: int
) -> None:
    """A replay copies its inputs, at most; a copied table would show in its time on the device."""
    with context.case("time of a replay"), torch.no_grad():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            start.record()
            compiled(at, q, k)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        context.say(f"fastest step {min(times):.0f} us; copying the table takes {limit / 2e6:.0f}")


_CONFIGS = {
    "default": {},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "ntk": {"scaling": rc.NtkScaling(factor=4.0)},
    "yarn": {"scaling": rc.YarnScaling(factor=4.0, original_max_position=4096)},
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=4096
        )
    },
    "exact phases": {"phase_dtype": torch.float64},
}


@register(CHECKS, "graphs.table")
def table_on_device(context: Context) -> None:
    """The device's table equals the CPU's within 1 ulp; growth equals a fresh build bit for bit."""
    worst, rows = 0.0, TABLE_ROWS if context.gpu else 3000
    for name, options in _CONFIGS.items():
        with context.case(name):
            config = rc.RopeConfig(head_dim=128, max_position=rows // 3, **options)
            grown = rc.RotaryEmbedding(config, context.device)
            grown.reserve(rows)
            fresh = rc.RotaryEmbedding(config, context.device, capacity=rows)
            if not same_bits(grown.cos_sin_cache, fresh.cos_sin_cache):
                context.fail(name, "growth differs from a fresh build")
            on_cpu = rc.RotaryEmbedding(config, "cpu", capacity=rows)
            apart = exact.ulps_of_1(fresh.cos_sin_cache, on_cpu.cos_sin_cache)
            worst = max(worst, apart)
            if apart > 1:
                context.fail(name, f"{apart:g} ulp from the CPU's table")
    context.say(f"at most {worst:g} ulp from the CPU's")
