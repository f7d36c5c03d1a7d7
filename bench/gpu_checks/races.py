"""Timing for the stage "speed": inputs drawn on the device, timers, and rounds as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_checks.registry import Context
from rope_compile.bench import shapes
from rope_compile.bench.case import Case, Pair
from rope_compile.bench.matrix import cell_rows, describe
from rope_compile.bench.protocol import Samples, interleave, ratio, spread
from rope_compile.bench.providers import OURS, Provider
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import SHAPES, Cell
from rope_compile.bench.timers import CpuTimer, CudaGraphTimer, Prepared, Timer

__all__ = [
    "DeviceCase",
    "OneStreamTimer",
    "cases",
    "cell_of",
    "race",
    "small_tables",
    "timed",
    "timer_for",
]

ROUNDS, DRY_ROUNDS = 30, 2
# A sample of a copy should take about this long, which makes one of the eager formula 5 to 10 times
# as long; at few tokens the number of calls is bounded instead.
_SAMPLE_S = 2e-3
_EXPECTED_BYTES_PER_S = 4e12
_MOST_CALLS, _FEWEST_CALLS = 200, 10
_DRY_ROWS = 2048


@contextlib.contextmanager
def small_tables(context: Context) -> Iterator[None]:
    """In a dry run, tables short enough to fill at once; a GPU gets those of the benchmark."""
    if context.gpu:
        yield
        return
    with mock.patch.object(shapes, "ROWS", _DRY_ROWS):
        yield


class DeviceCase(Case):
    """Inputs drawn on the device: from the host, those of 32768 tokens take seconds."""

    def _slices(self, heads: int, row: int) -> Tensor:
        size = (self.cell.tokens, heads, self.cell.shape.head_dim)
        rows = torch.empty(*size[:2], row or size[2], dtype=self.dtype, device=self.device)
        return rows[..., -size[2] :].normal_()

    def poisoned(self) -> Pair:
        nan = float("nan")
        q, k = (torch.full(x.shape, nan, dtype=x.dtype, device=x.device) for x in (self.q, self.k))
        return q, k


class OneStreamTimer(CudaGraphTimer):
    """Warms up on the stream that is captured.

    Autograd runs a backward pass on the stream of its forward pass, which must be the captured one.
    """

    def sampler(self, prepared: Sequence[Prepared]) -> Callable[[], float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for one in prepared:
                one.call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(self._calls):
                prepared[number % len(prepared)].call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1e3 / self._calls

        return sample


def cell_of(context: Context, shape: str, tokens: int) -> Cell:
    """A cell in bfloat16; a dry run takes a few tokens of it."""
    if context.gpu:
        return Cell(SHAPES[shape], "bfloat16", tokens, 0)
    return Cell(SHAPES[shape], "bfloat16", min(tokens, 5), torch.get_num_threads())


def timer_for(context: Context, cell: Cell, *, cold: bool, one_stream: bool = False) -> Timer:
    if not context.gpu:
        return CpuTimer(shortest_sample_s=20e-6)
    kind = OneStreamTimer if one_stream else CudaGraphTimer
    calls = int(_SAMPLE_S * _EXPECTED_BYTES_PER_S / cell.copy_bytes)
    calls = max(_FEWEST_CALLS, min(_MOST_CALLS, calls))
    return kind.cold(cell.copy_bytes, context.device, calls) if cold else kind(1, calls, "warm")


def cases(context: Context, cell: Cell, timer: Timer) -> list[Case]:
    kind = DeviceCase if context.gpu else Case
    return [kind(cell, context.device, seed) for seed in range(timer.input_sets)]


def rounds_of(context: Context) -> int:
    return ROUNDS if context.gpu else DRY_ROUNDS


def timed(
    context: Context,
    cell: Cell,
    everybody: Sequence[Provider],
    *,
    cold: bool,
    one_stream: bool = False,
    **columns: object,
) -> None:
    """The benchmark's own table of a cell; ``columns`` replace what its rows say about themselves.

    A wrong result of ours is a failure of the check; whoever else is wrong has a row that says so.
    """
    timer = timer_for(context, cell, cold=cold, one_stream=one_stream)
    found = cell_rows(cases(context, cell, timer), everybody, timer, rounds_of(context))
    for row in found:
        if row.provider.startswith(OURS) and row.y_50 is None:
            context.fail(f"{row.shape} {row.form} at {row.tokens:g} tokens", row.note)
    context.emit(replace(row, **columns) for row in found)


def race(
    context: Context,
    cell: Cell,
    contenders: Mapping[str, tuple[str, Sequence[Prepared]]],
    timer: Timer,
    references: Sequence[str],
    **columns: object,
) -> list[Row]:
    """Common rounds of what the benchmark's table has no place for.

    ``contenders`` maps a name to the form and the calls on each set of inputs; every one of them is
    divided by every reference, in rows of its own.
    """
    samplers = {name: timer.sampler(prepared) for name, (_, prepared) in contenders.items()}
    interleave(samplers, 1)
    samples: Samples = interleave(samplers, rounds_of(context))
    rows = []
    for name, (form, _) in contenders.items():
        seconds = spread(samples[name])
        row = replace(
            describe(cell),
            provider=name,
            form=form,
            cache=timer.cache,
            y_50=seconds.median * 1e6,
            y_20=seconds.p20 * 1e6,
            y_80=seconds.p80 * 1e6,
            rounds=float(len(samples[name])),
            note=f"minimum {seconds.minimum * 1e6:.6g} us",
        )
        if form:
            moved = cell.bytes(form)
            row = replace(row, bytes=float(moved), gb_per_s=moved / seconds.median / 1e9)
        row = replace(row, **columns)
        others = [reference for reference in references if reference != name]
        for other in others:
            times = ratio(samples[other], samples[name])
            rows.append(
                replace(
                    row,
                    ratio_to=other,
                    ratio=times.median,
                    ratio_low=times.low,
                    ratio_high=times.high,
                )
            )
        rows += [] if others else [row]
    context.emit(rows)
    return rows
