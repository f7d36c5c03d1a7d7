"""The matrix: every provider in every cell, in common rounds, as rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rope_compile.bench import providers as own
from rope_compile.bench.case import Case, Wrong
from rope_compile.bench.load import LoadMeter
from rope_compile.bench.memory import page_faults
from rope_compile.bench.peers import peers
from rope_compile.bench.protocol import Samples, interleave, ratio, spread
from rope_compile.bench.providers import OURS, Missing, Provider
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, Cell
from rope_compile.bench.timers import CpuTimer, CudaGraphTimer, Prepared, Timer

__all__ = ["REFERENCES", "Block", "blocks", "cell_rows", "describe", "run_block"]

# What our own rows are divided by, where it took part.
REFERENCES = (
    *("hf_eager", "hf_compiled", "hf_compiled_pointwise_cat", "hf_compiled_combo"),
    *("hf_compiled_apart", "rotary_embedding_torch", "onnxruntime", "liger", "clone", "multiply"),
)
# Every other row is divided by the first of these that took part.
_YARDSTICKS = ("hf_compiled", "hf_eager", "copy")

ROUNDS, ROUNDS_OF_SLOW_CALLS, SLOW_S = 30, 10, 0.1


@dataclass(frozen=True)
class Block:
    """Cells that share shape, dtype and thread count, and so the compiled peers."""

    cells: list[Cell]

    def __str__(self) -> str:
        first = self.cells[0]
        threads = f", {first.threads} thread{'s' * (first.threads > 1)}" if first.threads else ""
        return f"{first.shape.id} {first.dtype}{threads}"

    @property
    def weight(self) -> float:
        """Estimated seconds on two cores of a current server, for the remaining-time display."""
        first = self.cells[0]
        compiling = 10.0
        threads = 2 / max(1, first.threads)
        moved = sum(cell.copy_bytes * _planned_rounds(cell) for cell in self.cells)
        return compiling + 3 * len(self.cells) + threads * moved / 0.6e9


def _planned_rounds(cell: Cell) -> int:
    return ROUNDS_OF_SLOW_CALLS if cell.copy_bytes > 150e6 else ROUNDS


def blocks(cells: Sequence[Cell]) -> list[Block]:
    """The cells in blocks, in their order."""
    grouped = itertools.groupby(cells, lambda cell: (cell.shape.id, cell.dtype, cell.threads))
    return [Block(list(group)) for _, group in grouped]


def run_block(
    block: Block,
    device: torch.device,
    *,
    peer_names: tuple[str, ...] | None = None,
    rounds: int | None = None,
    after_cell: Callable[[], None] = lambda: None,
) -> Iterator[list[Row]]:
    """Rows of each cell of a block. ``peer_names`` None means all peers, () none."""
    first = block.cells[0]
    threads_before = torch.get_num_threads()
    if first.threads:
        torch.set_num_threads(first.threads)
    torch.compiler.reset()  # a compiled function keeps few variants, and each block needs its own
    try:
        with torch.no_grad():
            everybody = [*own.ours(), *own.ceilings(first, device)]
            if peer_names != ():
                everybody += peers(first, device, peer_names or ())
            for cell in block.cells:
                yield _run_cell(cell, device, everybody, rounds)
                after_cell()
    finally:
        torch.set_num_threads(threads_before)


def _run_cell(
    cell: Cell, device: torch.device, everybody: Sequence[Provider], rounds: int | None
) -> list[Row]:
    timer = _timer(cell, device)
    cases = [Case(cell, device, seed) for seed in range(timer.input_sets)]
    return cell_rows(cases, everybody, timer, rounds)


def _timer(cell: Cell, device: torch.device) -> Timer:
    if device.type == "cuda":
        return CudaGraphTimer.cold(cell.copy_bytes, device)
    return CpuTimer()


def cell_rows(
    cases: Sequence[Case],
    everybody: Sequence[Provider],
    timer: Timer,
    rounds: int | None = None,
) -> list[Row]:
    """Check everybody against float64, then time those that were right, in common rounds.

    A provider that is wrong or cannot run has a row without a number that says so.
    """
    cell, device = cases[0].cell, cases[0].device
    base = replace(describe(cell), cache=timer.cache)
    rows, runners, notes = [], {}, {}
    for provider in everybody:
        labelled = replace(base, provider=provider.name, form=provider.form)
        try:
            prepared = [provider.prepare(case) for case in cases]
            for case, one in zip(cases, prepared, strict=True):
                if one.result is not None:
                    case.check(one.result(), rotated=provider.rotated, steps=provider.steps)
        except Missing as missing:
            rows.append(replace(labelled, note=f"not run: {missing}"))
        except Wrong as wrong:
            rows.append(replace(labelled, note=f"wrong: {wrong}"))
        except Exception as error:  # whoever breaks must not end the run
            verdict = "wrong" if provider.role in ("ours", "noise") else "not run"
            first_line = str(error).strip().partition("\n")[0]
            rows.append(replace(labelled, note=f"{verdict}: {type(error).__name__}: {first_line}"))
        else:
            runners[provider.key] = provider, prepared
    samplers = {key: timer.sampler(prepared) for key, (_, prepared) in runners.items()}
    first_round: Samples = interleave(samplers, 1)
    for key, (provider, prepared) in runners.items():
        notes[key] = _note(provider, prepared[0], device)
    slowest = max(taken[0] for taken in first_round.values())
    wanted = rounds or (ROUNDS_OF_SLOW_CALLS if slowest > SLOW_S else ROUNDS)
    meter = LoadMeter()
    samples = interleave(samplers, wanted)
    others = meter.others()
    timed = [provider for provider, _ in runners.values()]
    for provider in timed:
        note = notes[provider.key]
        if others is not None:
            note = "; ".join(filter(None, (note, f"others used {others:.2f} cores")))
        rows += _timed_rows(base, cell, provider, timed, samples, note)
    return rows


def describe(cell: Cell) -> Row:
    """A row with everything that a cell says, and no number."""
    shape = cell.shape
    return Row(
        x=cell.tokens,
        shape=shape.id,
        tokens=cell.tokens,
        q_heads=shape.q_heads,
        k_heads=shape.k_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        style=shape.style,
        layout=shape.layout,
        dtype=cell.dtype,
        positions=cell.positions,
        threads=cell.threads or None,
    )


def _note(provider: Provider, prepared: Prepared, device: torch.device) -> str:
    """Which kernel ran, and what its memory cost; for our rows and the two that explain them."""
    if provider.role != "ours" and provider.name not in ("clone", "hf_eager"):
        return ""
    found = [own.kernel_in_use(device)] if provider.role == "ours" else []
    before = page_faults()
    prepared.call()
    after = page_faults()
    if device.type == "cpu" and before is not None and after is not None:
        found.append(f"{after - before} page faults")
    return "; ".join(found)


def _timed_rows(
    base: Row,
    cell: Cell,
    provider: Provider,
    timed: Sequence[Provider],
    samples: Samples,
    note: str,
) -> list[Row]:
    """The row of a provider: for ours one for each reference, for others against a yardstick."""
    own_times = samples[provider.key]
    seconds = spread(own_times)
    copies = next((samples[other.key] for other in timed if other.name == "copy"), None)
    is_copy = provider.role in ("ceiling", "conversion")
    moved = cell.copy_bytes if is_copy else cell.bytes(provider.form)
    row = replace(
        base,
        provider=provider.name,
        form=provider.form,
        y_50=seconds.median * 1e6,
        y_20=seconds.p20 * 1e6,
        y_80=seconds.p80 * 1e6,
        rounds=len(own_times),
        note="; ".join(filter(None, (note, f"minimum {seconds.minimum * 1e6:.6g} us"))),
    )
    has_bytes = provider.role != "conversion"
    if has_bytes:
        row = replace(row, bytes=moved, gb_per_s=moved / seconds.median / 1e9)
    if has_bytes and copies is not None:
        share = ratio(copies, own_times, moved / cell.copy_bytes)
        copy_rate = cell.copy_bytes / spread(copies).median / 1e9
        row = replace(row, copy_gb_per_s=copy_rate, share_of_copy=share.median)
    rows = []
    for other in _references(provider, timed):
        times = ratio(samples[other.key], own_times)
        rows.append(
            replace(
                row,
                ratio_to=other.name,
                ratio=times.median,
                ratio_low=times.low,
                ratio_high=times.high,
                note=f"{row.note}; ratio p20 {times.p20:.4g} p80 {times.p80:.4g}",
            )
        )
    return rows or [row]


def _references(provider: Provider, timed: Sequence[Provider]) -> list[Provider]:
    by_name = {other.name: other for other in timed if other.role != "ours"}
    if provider.role == "ours":
        return [by_name[name] for name in REFERENCES if name in by_name]
    if provider.role == "noise":
        return [other for other in timed if other.name == OURS and other.form == IN_PLACE]
    yardstick = next((name for name in _YARDSTICKS if name in by_name), None)
    return [] if yardstick is None else [by_name[yardstick]]
