"""Everything that only a GPU can show, in six minutes: numbers, graphs, waits, memory, speed.

    python -m bench.gpu_check [--dry] [--csv PATH] [--report PATH.md] [--only STAGE,...]

Rows are written as they are made, so that a run which is cut short leaves its head. Exit status 1
when anything is wrong, 2 for a wrong command line. Without a GPU, or with ``--dry``, the same code
runs on CPU tensors as far as it can, and every check that needs a GPU is named as not proved.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.gpu_checks import (
    compiled,
    gradients,
    graphs,
    machine,
    numbers,
    sanitizer,
    speed,
    summary,
)
from bench.gpu_checks.registry import (
    FAILED,
    NOT_PROVED,
    NOT_RUN,
    REHEARSED,
    SKIPPED,
    STAGES,
    Check,
    Context,
    Outcome,
    run_checks,
)
from rope_compile.bench import rows as bench_rows
from rope_compile.bench.rows import Row, Run

__all__ = ["CHECKS", "main"]

CHECKS: tuple[Check, ...] = tuple(
    check
    for module in (machine, numbers, gradients, compiled, graphs, sanitizer, speed, summary)
    for check in module.CHECKS
)
_WIDTH = max(len(check.name) for check in CHECKS)
_DETAIL_WIDTH = 100
_MEANING = {REHEARSED: "ran on CPU tensors only", NOT_PROVED: "needs a GPU"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__.partition("\n")[0],
        epilog=f"stages: {', '.join(STAGES)}",
    )
    parser.add_argument("--dry", action="store_true", help="run on CPU tensors, GPU or not")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="append rows to this file")
    parser.add_argument("--report", type=Path, metavar="PATH.md", help="write a report in Markdown")
    parser.add_argument("--only", default="", metavar="STAGE,...", help="these stages alone")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for all (default 6)")
    return parser


def _chosen(options: argparse.Namespace) -> list[str]:
    """The stages to run, in their order.

    Raises:
        ValueError: an argument is wrong; one sentence.
    """
    if options.minutes <= 0:
        raise ValueError(f"--minutes must be positive, got {options.minutes:g}")
    wanted = [name for name in options.only.split(",") if name]
    for name in wanted:
        if name not in STAGES:
            raise ValueError(f"--only must name stages of {', '.join(STAGES)}, got {name!r}")
    for flag, path in (("--csv", options.csv), ("--report", options.report)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{flag} must be a file in a directory that exists, got {path}")
    if options.csv is not None:
        bench_rows.check_header(options.csv)
    return [name for name in STAGES if not wanted or name in wanted]


def _line(outcome: Outcome) -> str:
    detail = outcome.detail
    if len(detail) > _DETAIL_WIDTH and outcome.status != FAILED:
        detail = detail[: _DETAIL_WIDTH - 3] + "..."
    parts = (
        outcome.check.name.ljust(_WIDTH),
        outcome.status.ljust(10),
        f"{outcome.cases:4} cases",
        f"{outcome.seconds:6.1f} s",
        detail,
    )
    return "  ".join(parts).rstrip()


def _closing(rows: Sequence[Row], outcomes: Sequence[Outcome], dry: bool) -> list[str]:
    """The targets, what is still open, and the verdict."""
    lines = [""]
    table = [("target", "", "must", "measured", "verdict")]
    table += summary.target_table(summary.judged(rows))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    unproved = summary.not_exercised(outcomes)
    for status in dict.fromkeys(outcome.status for outcome in unproved):
        names = ", ".join(x.check.name for x in unproved if x.status == status)
        title = f"not proved here ({_MEANING.get(status, status)}): "
        lines += ["", *textwrap.wrap(title + names, 100, subsequent_indent="  ")]
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    lines += ["", f"{len(outcomes)} checks, {len(failed)} failed, {len(unproved)} not proved"]
    cut = sum(outcome.status in (SKIPPED, NOT_RUN) for outcome in outcomes)
    if cut and not dry:
        lines.append(f"{cut} checks were cut off or could not run: the run is incomplete")
    lines += [f"FAILED: {x.check.name}: {x.failures[0]}" for x in failed]
    return lines


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """The tensors of a dry run are tiny: threads would only wait for each other on a busy CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the chosen stages; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        stages = _chosen(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()
    dry = options.dry or not torch.cuda.is_available()
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    facts = Run.start(device)

    def keep(made: list[Row]) -> list[Row]:
        complete = [facts.row(row) for row in made]
        if options.csv is not None:
            bench_rows.append(options.csv, complete)
        return complete

    if dry:
        why = "--dry" if options.dry else "no CUDA device"
        print(f"dry run ({why}): CPU tensors; what needs a GPU is listed at the end\n")
    context = Context(device, not dry, keep)
    shares = {name: STAGES[name] for name in stages}
    seconds = 60 * options.minutes * sum(shares.values()) / sum(STAGES.values())
    wanted = [check for check in checks if check.stage in shares]
    with _threads(1 if dry else torch.get_num_threads()):
        outcomes = run_checks(
            context, wanted, seconds, shares, lambda outcome: print(_line(outcome), flush=True)
        )
    print("\n".join(_closing(context.found, outcomes, dry)), flush=True)
    if options.report is not None:
        text = summary.markdown(context.found, outcomes, time.monotonic() - started, dry)
        options.report.write_text(text, encoding="utf-8")
    return int(any(outcome.status == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
