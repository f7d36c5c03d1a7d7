"""`rope-compile bench`: this package and its peers, side by side, in common rounds.

`run` makes the rows, `report` shows them, `targets` judges them. Every module can be used alone:
`shapes` has the models, `providers` and `peers` the contenders, `protocol` the rounds and ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import rope_compile as rc
from rope_compile.bench import plot, report, rows, shapes, targets
from rope_compile.bench.children import existing_rows, fallback_rows, gets_fresh_pages
from rope_compile.bench.counts import count_rows
from rope_compile.bench.host import CALLS, QUICK_CALLS, host_rows, op_tax_rows
from rope_compile.bench.load import load_average
from rope_compile.bench.matrix import Block, blocks, run_block
from rope_compile.bench.peers import PEERS
from rope_compile.bench.providers import OURS, Missing
from rope_compile.bench.rest import setup_rows
from rope_compile.bench.rows import Row, Run
from rope_compile.bench.shapes import DTYPES, SHAPES, Cell
from rope_compile.demo.progress import Progress

__all__ = [
    "STAGES",
    "Missing",
    "Options",
    "Outcome",
    "Row",
    "check",
    "plot",
    "report",
    "rows",
    "run",
    "stage_count",
    "stored",
    "targets",
]

STAGES = ("matrix", "existing", "host", "counts", "fallback", "rest")
_TITLES = {
    "existing": "outputs in existing memory, in a process of its own",
    "host": "host time of a call",
    "counts": "counts",
    "fallback": "without a C++ compiler, in a process of its own",
    "rest": "tables, look-ups, import",
}
_QUICK_ROUNDS = 10
# The fallback is plain torch: three sizes show it, and larger ones only take longer.
_FALLBACK_TOKENS = (1, 512, 4096)


@dataclass(frozen=True)
class Options:
    """What to run; an empty tuple means the default of that dimension.

    Attributes:
        peers: names out of `PEERS`; empty for all, ``("none",)`` for none.
        rounds: rounds of every cell; None decides by how long a call takes.
    """

    device: str = "cpu"
    quick: bool = False
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    stages: tuple[str, ...] = STAGES
    rounds: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The rows of a run, and the load of the machine before and after it; None from a file."""

    rows: list[Row]
    load: tuple[str, str] | None
    seconds: float
    wrong: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 if this package's own result was wrong somewhere; a lost race is no failure."""
        return 1 if self.wrong else 0


def check(options: Options) -> None:
    """Raise where an option names nothing that exists.

    Raises:
        ValueError: one sentence that says which and what would be right.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must name a device of this machine, got cuda and there is none")
    known = {
        "--shapes": (options.shapes, tuple(SHAPES)),
        "--dtypes": (options.dtypes, tuple(DTYPES)),
        "--peers": (options.peers, (*PEERS, "none")),
        "--stages": (options.stages, STAGES),
    }
    for flag, (given, allowed) in known.items():
        for name in given:
            if name not in allowed:
                raise ValueError(f"{flag} must be from {', '.join(allowed)}, got {name}")
    counts = {"--tokens": options.tokens, "--threads": options.threads}
    counts["--rounds"] = () if options.rounds is None else (options.rounds,)
    for flag, numbers in counts.items():
        for number in numbers:
            if number < 1:
                raise ValueError(f"{flag} must be at least 1, got {number}")


def _cells(options: Options) -> list[Cell]:
    return shapes.cells(
        options.device,
        quick=options.quick,
        shapes=options.shapes,
        dtypes=options.dtypes,
        tokens=options.tokens,
        threads=options.threads,
    )


def stage_count(options: Options) -> int:
    """Stages that the progress display will show."""
    cells = _cells(options)
    return len(_other_stages(options, cells)) + (
        len(blocks(cells)) if "matrix" in options.stages else 0
    )


def _other_stages(options: Options, cells: list[Cell]) -> list[str]:
    """The stages after the matrix that apply here: two of them know CPUs only."""
    on_cpu = options.device == "cpu"
    applies = {"existing": on_cpu and any(map(gets_fresh_pages, cells)), "fallback": on_cpu}
    chosen = [name for name in STAGES[1:] if name in options.stages]
    return [name for name in chosen if applies.get(name, True)]


def stored(path: Path, options: Options) -> Outcome:
    """The last run of a CSV file; shapes, dtypes, tokens and threads that are given choose rows.

    Raises:
        ValueError: it is a file of something else, or nothing is left. OSError: it cannot be read.
    """
    chosen = {
        "shape": options.shapes,
        "dtype": options.dtypes,
        "tokens": options.tokens,
        "threads": options.threads,
    }
    found = [
        row
        for row in rows.last_run(rows.read(path))
        if all(getattr(row, name) in values for name, values in chosen.items() if values)
    ]
    if not found:
        raise ValueError(f"{path} must hold a run with such rows, got none")
    return Outcome(found, None, 0.0)


def run(
    options: Options,
    progress: Progress | None = None,
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> Outcome:
    """Run the stages; ``keep`` gets rows as they are made, so that a cut run leaves its head.

    Raises:
        ValueError: an option names nothing that exists.
    """
    check(options)
    progress = progress or Progress(None, stage_count(options))
    device = torch.device(options.device)
    started, before = time.monotonic(), load_average()
    run_facts = Run.start(device)
    found: list[Row] = []
    for made in _stages(options, device, progress):
        made = [run_facts.row(row) for row in made]
        keep(made)
        found += made
    wrong = [
        f"{row.provider} {row.form}, {row.shape} {row.dtype} at {row.tokens:g} tokens: {row.note}"
        for row in found
        if row.provider.startswith(OURS) and row.y_50 is None and row.metric == "time"
        and row.note.startswith("wrong")
    ]  # fmt: skip
    return Outcome(found, (before, load_average()), time.monotonic() - started, wrong)


def _stages(options: Options, device: torch.device, progress: Progress) -> Iterator[list[Row]]:
    """The rows of each stage, cell by cell."""
    cells = _cells(options)
    _warm_up(device)
    if "matrix" in options.stages:
        yield from _matrix(options, blocks(cells), device, progress)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else None)
    dtypes = tuple(dict.fromkeys(cell.dtype for cell in cells))
    calls = QUICK_CALLS if options.quick else CALLS
    for name in _other_stages(options, cells):
        progress.stage(_TITLES[name])
        if name == "existing":
            yield existing_rows([cell for cell in cells if gets_fresh_pages(cell)], rounds)
        elif name == "host":
            compiled = not options.peers or "hf_compiled" in options.peers
            for dtype in dtypes:
                yield host_rows(device, dtype, calls=calls, compiled=compiled)
            yield op_tax_rows(device, calls=calls)
        elif name == "counts":
            yield count_rows(device)
        elif name == "fallback":
            yield fallback_rows(_fallback_cells(cells), options.rounds or _QUICK_ROUNDS)
        else:
            yield setup_rows(device, quick=options.quick)


def _warm_up(device: torch.device) -> None:
    """The first call of all: a kernel that has to be built is built here, outside every clock."""
    rope = rc.get_rope(rc.RopeConfig(head_dim=64, max_position=128), device)
    rope(torch.arange(2, device=device), torch.zeros(2, 1, 64, device=device))


def _matrix(
    options: Options, planned: list[Block], device: torch.device, progress: Progress
) -> Iterator[list[Row]]:
    """The blocks one after the other, each announced with an estimate of what is left."""
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else None)
    peer_names = None if not options.peers else tuple(x for x in options.peers if x != "none")
    left, done, started = sum(block.weight for block in planned), 0.0, time.monotonic()
    for block in planned:
        pace = (time.monotonic() - started) / done if done else 1.0
        estimate = max(1, round(left * pace / 60)) if rounds is None else None
        about = f", about {estimate} min left in the matrix" if estimate else ""
        progress.stage(f"{block}{about}", len(block.cells))
        yield from run_block(
            block, device, peer_names=peer_names, rounds=rounds, after_cell=progress.advance
        )
        left, done = left - block.weight, done + block.weight


def _fallback_cells(cells: list[Cell]) -> list[Cell]:
    """The cells of the matrix at its largest thread count, without the longest."""
    threads = max(cell.threads for cell in cells)
    own = [cell for cell in cells if cell.threads == threads]
    short = [cell for cell in own if cell.tokens in _FALLBACK_TOKENS]
    return short or own
