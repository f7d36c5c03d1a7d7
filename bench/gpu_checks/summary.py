"""Stage "summary": the targets, and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.gpu_checks.registry import (
    CHECK,
    FAILED,
    OK,
    STAGES,
    Check,
    Context,
    Outcome,
    register,
)
from rope_compile.bench import report as bench_report
from rope_compile.bench.providers import OURS
from rope_compile.bench.rows import Row
from rope_compile.bench.targets import Part, Target, verdicts

__all__ = [
    "CHECKS",
    "TARGET",
    "judged",
    "markdown",
    "not_exercised",
    "outcome_table",
    "target_table",
]

CHECKS: list[Check] = []

# The column ``kernel`` of the summary's rows.
TARGET = "target"
_NO_MEASUREMENT = (CHECK, TARGET, "ceiling")
# Counts do not wobble: one that is off is a fault, while a lost race is a number.
_EXACT = ("B2", "B3")


def judged(rows: Sequence[Row]) -> list[Target]:
    """The targets of a GPU and those of both devices, with what only this script measures."""
    more = {"G7": _heads_first, "G9": _of_empty_node, "B3": _binaries}
    found = []
    for target in verdicts([row for row in rows if row.kernel not in (CHECK, TARGET)]):
        if target.id in more:
            target = dataclasses.replace(target, parts=[*target.parts, more[target.id](rows)])
        if target.id == "G9":  # two units
            target = dataclasses.replace(target, unit="", limits="<= 2 us, <= 1.3 empty nodes")
        if target.id[0] in "GB":
            found.append(target)
    return found


def _ours(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [
        row
        for row in rows
        if row.kernel == "rope"
        and row.provider == OURS
        and all(getattr(row, name) == value for name, value in wanted.items())
    ]


def _heads_first(rows: Sequence[Row]) -> Part:
    ratios = [row.ratio for row in _ours(rows, ratio_to="liger", layout="BHSD") if row.ratio]
    return Part("memory heads first, worst", 1.8, min(ratios, default=None), 2.2)


def _of_empty_node(rows: Sequence[Row]) -> Part:
    shares = [1 / row.ratio for row in _ours(rows, ratio_to="empty_node") if row.ratio]
    return Part("of an empty node", 1.3, max(shares, default=None), 1.15, at_least=False)


def _binaries(rows: Sequence[Row]) -> Part:
    found = [row.y_50 for row in _ours(rows, metric="binaries") if row.y_50 is not None]
    return Part("binaries", 3.0, max(found, default=None), 3.0, at_least=False)


@register(CHECKS, "summary.targets", needs_gpu=False)
def targets(context: Context) -> None:
    """Every target has a verdict, and no count is off"""
    found = judged(context.found)
    with context.case("verdicts"):
        context.emit(
            Row(
                kernel=TARGET,
                provider=target.id,
                mode="summary",
                metric="verdict",
                unit="",
                note=f"{target.verdict}; must {target.must}; measured {target.measured}",
            )
            for target in found
        )
    for target in found:
        if target.id in _EXACT and target.verdict == "MISSED":
            context.fail(target.id, f"{target.goal}: must {target.must}, got {target.measured}")
    context.say(f"{sum(x.verdict == 'MISSED' for x in found)} of {len(found)} missed")


# ------------------------------------------------------------------------------------------ report


def not_exercised(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Checks after which nothing is known about a GPU: not run, cut off, or run on a CPU."""
    return [outcome for outcome in outcomes if outcome.status not in (OK, FAILED)]


def outcome_table(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Name, status, cases, seconds, detail."""
    return [(x.check.name, x.status, str(x.cases), f"{x.seconds:.1f}", x.detail) for x in outcomes]


def target_table(found: Sequence[Target]) -> list[tuple[str, ...]]:
    """Id, goal, must, measured, verdict."""
    return [(x.id, x.goal, x.must, x.measured, x.verdict) for x in found]


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(line)} |" for line in escaped),
    ]


def markdown(rows: Sequence[Row], outcomes: Sequence[Outcome], seconds: float, dry: bool) -> str:
    """The whole run for a reader: what failed, what was not proved, targets, every check."""
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    first = rows[0] if rows else Row()
    lines = [
        "# GPU check" + (", dry run on a CPU" if dry else ""),
        "",
        f"{first.device}; torch {first.torch}, triton {first.triton or 'not installed'}, "
        f"rope_compile {first.version}; run {first.run_id}, {first.timestamp}; {seconds:.0f} s.",
        "",
        f"{len(outcomes)} checks: {len(failed)} failed.",
        "",
    ]
    for outcome in failed:
        lines += [f"## FAILED: {outcome.check.name}", "", outcome.check.contract + ".", ""]
        lines += [f"* {text}" for text in outcome.failures]
        if outcome.failed_cases > len(outcome.failures):
            lines.append(f"* and {outcome.failed_cases - len(outcome.failures)} more")
        lines += ["", "```", outcome.trace.strip(), "```", ""] if outcome.trace else [""]
    open_ = not_exercised(outcomes)
    if open_:
        lines += ["## Not proved here", ""]
        lines += [f"* `{x.check.name}` ({x.status}): {x.check.contract}." for x in open_]
        lines.append("")
    lines += ["## Targets", ""]
    lines += _markdown_table(
        ("target", "goal", "must", "measured", "verdict"), target_table(judged(rows))
    )
    for stage in STAGES:
        own = [outcome for outcome in outcomes if outcome.check.stage == stage]
        if own:
            lines += ["", f"## Stage {stage}", ""]
            lines += _markdown_table(
                ("check", "status", "cases", "seconds", "detail"), outcome_table(own)
            )
    measured = [row for row in rows if row.kernel not in _NO_MEASUREMENT]
    if measured:
        title = "## Measurements" + (" (of a few tokens: they mean nothing)" if dry else "")
        lines += ["", title, "", "```", bench_report.as_text(measured), "```"]
    return "\n".join(lines) + "\n"
