"""What can be counted and does not wobble: launches, memory, graphs, copies in generated code."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.profiler import ProfilerActivity, profile

import rope_compile as rc
from rope_compile.bench import formulas
from rope_compile.bench.case import Case
from rope_compile.bench.matrix import describe
from rope_compile.bench.providers import OURS
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_FRESH, SHAPES, Cell

__all__ = ["SWEEP_BATCHES", "SWEEP_TOKENS", "count_rows", "forced_recompiles", "memory_events"]

SWEEP_TOKENS = (1, 7, 8, 16, 100, 128, 1000, 4096)
SWEEP_BATCHES = (1, 2, 3, 8)


def count_rows(device: torch.device, *, tokens: int = 1024) -> list[Row]:
    """Every count, on L8 in float32."""
    cell = Cell(
        SHAPES["L8"], "float32", tokens, torch.get_num_threads() if device.type == "cpu" else 0
    )
    case = Case(cell, device)
    base = replace(describe(cell), provider=OURS, unit="count")
    return [
        *_launch_rows(case, base),
        *_allocation_rows(case, base),
        *_peak_rows(case, replace(base, metric="peak_memory", unit="byte", mode="full")),
        *_graph_rows(case, base),
        *_recompile_rows(device, replace(base, metric="recompiles", tokens=None)),
    ]


# ------------------------------------------------------------------------------ launches and memory


def _profiled(call: Callable[[], object], device: torch.device) -> list[object]:
    """Raw events of one call; the first call, before, has whatever is done only once."""
    call()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes two lines for each use otherwise
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities, profile_memory=True) as recorded:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    # Public events leave out what no operator is charged with; the raw ones (torch 2.11 to 2.14)
    # have every allocation, those made inside C++ operators included.
    return list(recorded.profiler.kineto_results.events())


def memory_events(call: Callable[[], object], device: torch.device) -> list[int]:
    """Bytes of each allocation (positive) and release (negative) during one call, in order."""
    found = [
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in _profiled(call, device)
        if event.name() == "[memory]"  # type: ignore[attr-defined]
        and event.device_type() == getattr(torch.autograd.DeviceType, device.type.upper())  # type: ignore[attr-defined]
    ]
    return [size for _, size in sorted(found, key=lambda event: event[0])]


def _forms(case: Case) -> dict[str, Callable[[], object]]:
    q, k = case.copy()
    return {
        IN_PLACE: functools.partial(case.rope.apply_, case.positions, q, k),
        OUT_FRESH: functools.partial(case.rope, case.positions, case.q, case.k),
    }


def _launch_rows(case: Case, base: Row) -> list[Row]:
    base = replace(base, metric="launches")
    if case.device.type != "cuda":
        return [replace(base, note="not counted: a CPU has no launches")]
    rows = []
    for form, call in _forms(case).items():
        events = _profiled(call, case.device)
        kernels = [
            event
            for event in events
            if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
            and not event.name().startswith(("Mem", "[memory]"))  # type: ignore[attr-defined]
        ]
        rows.append(replace(base, form=form, y_50=float(len(kernels))))
    return rows


def _allocation_rows(case: Case, base: Row) -> list[Row]:
    return [
        replace(
            base,
            metric="allocations",
            form=form,
            y_50=float(sum(size > 0 for size in memory_events(call, case.device))),
        )
        for form, call in _forms(case).items()
    ]


def _peak(step: Callable[[], object], device: torch.device) -> float:
    """Largest number of bytes alive at once; the step allocates everything that it counts."""
    alive = peak = 0
    for size in memory_events(step, device):
        alive += size
        peak = max(peak, alive)
    return float(peak)


def _peak_rows(case: Case, base: Row) -> list[Row]:
    """Forward and backward with everything counted: inputs, incoming gradients, results.

    In place both passes write where they read, without autograd; the others keep their outputs
    alive, as a model does whose next layer needs them.
    """
    rope, positions = case.rope, case.positions
    cos, sin = (x[:, None] for x in case.cos_sin(full=True))

    def fresh(requires_grad: bool) -> list[Tensor]:
        return [
            torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=requires_grad)
            for x in (case.q, case.k)
        ]

    def in_place() -> None:
        q, k = fresh(False)
        rope.apply_(positions, q, k)
        q_grad, k_grad = fresh(False)
        rope.apply_(positions, q_grad, k_grad, inverse=True)

    def with_autograd(rotate: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> None:
        q, k = fresh(True)
        results = rotate(q, k)
        torch.autograd.backward(results, fresh(False))

    steps: dict[tuple[str, str], Callable[[], object]] = {
        ("hf_eager", OUT_FRESH): lambda: with_autograd(lambda q, k: formulas.half(q, k, cos, sin)),
        (OURS, IN_PLACE): in_place,
        (OURS, OUT_FRESH): lambda: with_autograd(lambda q, k: rope(positions, q, k)),
    }
    peaks = {key: _peak(step, case.device) for key, step in steps.items()}
    reference = peaks["hf_eager", OUT_FRESH]
    return [
        replace(
            base,
            provider=provider,
            form=form,
            y_50=peak,
            ratio_to="hf_eager",
            ratio=reference / peak,
        )
        for (provider, form), peak in peaks.items()
    ]


# ---------------------------------------------------------------------------------------- graphs


def _graph_rows(case: Case, base: Row) -> list[Row]:
    """Graph breaks, and the kernels that Inductor writes around one call of the module."""

    def rotate(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        rotated: tuple[Tensor, Tensor | None] = case.rope(positions, q, k)
        return rotated

    inputs = (case.positions, case.q, case.k)
    torch.compiler.reset()
    explained = torch._dynamo.explain(rotate)(*inputs)
    torch.compiler.reset()
    metrics.reset()
    base = replace(base, form=OUT_FRESH)
    breaks = replace(base, metric="graph_breaks", y_50=float(explained.graph_break_count))
    copies = replace(base, metric="copies", note="kernels in Inductor's output besides ours")
    try:
        torch.compile(rotate)(*inputs)
        copies = replace(copies, y_50=float(metrics.generated_kernel_count))
    except Exception as error:  # no C++ compiler, for one
        copies = replace(copies, note=f"not counted: {type(error).__name__}")
    finally:
        torch.compiler.reset()
    return [breaks, copies]


def forced_recompiles(batches: Sequence[int], tokens: Sequence[int]) -> int:
    """Graphs beyond the first that torch's specialisation of size 1 alone asks for."""
    return len({(b == 1, t == 1) for b in batches for t in tokens}) - 1


def _recompile_rows(device: torch.device, base: Row) -> list[Row]:
    """Graphs beyond the first over the sweep, as torch.compile does it and with sizes marked."""
    rope = rc.get_rope(rc.RopeConfig(head_dim=16, max_position=4096), device)
    dynamic = [n for n in SWEEP_TOKENS if n > 1], [n for n in SWEEP_BATCHES if n > 1]
    sweeps = {
        "default": (SWEEP_TOKENS, SWEEP_BATCHES, None),
        "mark_dynamic": (*dynamic, torch._dynamo.mark_dynamic),
        "mark_unbacked": (
            SWEEP_TOKENS,
            SWEEP_BATCHES,
            torch._dynamo.decorators.mark_unbacked,
        ),
    }
    return [
        replace(
            base,
            form=OUT_FRESH,
            x=float(len(tokens) * len(batches)),
            y_50=float(_graphs(rope, tokens, batches, mark) - 1),
            note=f"{name}; size 1 alone forces {0 if mark else forced_recompiles(batches, tokens)}",
        )
        for name, (tokens, batches, mark) in sweeps.items()
    ]


def _graphs(
    rope: rc.RotaryEmbedding,
    tokens: Sequence[int],
    batches: Sequence[int],
    mark: Callable[[Tensor, int], None] | None,
) -> int:
    """Graphs that torch.compile makes of the module over a sweep of sizes."""
    count = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal count
        count += 1
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(rope, backend=counting, fullgraph=True)
    device = rope.cos_sin_cache.device
    for b in batches:
        for t in tokens:
            positions = torch.arange(t, device=device).expand(b, t).contiguous()
            q, k = (torch.zeros(b, t, heads, 16, device=device) for heads in (3, 2))
            if mark is not None:
                for x in (positions, q, k):
                    mark(x, 0)
                    mark(x, 1)
            compiled(positions, q, k)
    torch.compiler.reset()
    return count
