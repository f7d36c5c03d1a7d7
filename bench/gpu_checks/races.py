"""Timing for the stage "speed": inputs, timers, and rounds as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import torch

from bench.gpu_checks.registry import Context
from rope_compile.bench import shapes
from rope_compile.bench.case import Case
from rope_compile.bench.matrix import cell_rows, describe
from rope_compile.bench.protocol import Samples, interleave, ratio, spread
from rope_compile.bench.providers import OURS, Provider
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import SHAPES, Cell
from rope_compile.bench.timers import CpuTimer, CudaGraphTimer, Prepared, Timer

__all__ = [
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


def cell_of(context: Context, shape: str, tokens: int) -> Cell:
    """A cell in bfloat16; a dry run takes a few tokens of it."""
    if context.gpu:
        return Cell(SHAPES[shape], "bfloat16", tokens, 0)
    return Cell(SHAPES[shape], "bfloat16", min(tokens, 5), torch.get_num_threads())


def timer_for(context: Context, cell: Cell, *, cold: bool) -> Timer:
    if not context.gpu:
        return CpuTimer(shortest_sample_s=20e-6)
    calls = int(_SAMPLE_S * _EXPECTED_BYTES_PER_S / cell.copy_bytes)
    calls = max(_FEWEST_CALLS, min(_MOST_CALLS, calls))
    if cold:
        return CudaGraphTimer.cold(cell.copy_bytes, context.device, calls)
    return CudaGraphTimer(1, calls, "warm")


def cases(context: Context, cell: Cell, timer: Timer) -> list[Case]:
    return [Case(cell, context.device, seed) for seed in range(timer.input_sets)]


def rounds_of(context: Context) -> int:
    return ROUNDS if context.gpu else DRY_ROUNDS


def timed(
    context: Context,
    cell: Cell,
    everybody: Sequence[Provider],
    *,
    cold: bool,
    **columns: object,
) -> None:
    """The benchmark's own table of a cell; ``columns`` replace what its rows say about themselves.

    A wrong result of ours is a failure of the check; whoever else is wrong has a row that says so.
    """
    timer = timer_for(context, cell, cold=cold)
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
