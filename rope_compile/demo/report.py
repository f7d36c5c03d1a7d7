"""The demo's result, as text a person reads and as a dictionary for ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, field

from rope_compile.demo.promises import Promise
from rope_compile.demo.timing import Timing

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Everything that a run measured."""

    title: str
    facts: dict[str, object] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every promise held."""
        return all(promise.ok for promise in self.promises)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def as_dict(self) -> dict[str, object]:
        return {
            "title": self.title,
            "ok": self.ok,
            "facts": self.facts,
            "promises": [promise.as_dict() for promise in self.promises],
            "timings": [timing.as_dict() for timing in self.timings],
            "notes": self.notes,
        }

    def as_text(self) -> str:
        lines = [self.title, ""]
        lines += _table([(f"  {name}", str(value)) for name, value in self.facts.items()])
        lines.append("")
        rows: list[tuple[str, ...]] = [("  promise", "measured", "expected", "")]
        rows += [
            (
                f"  {promise.claim}",
                promise.shown,
                promise.expected,
                "ok" if promise.ok else "BROKEN",
            )
            for promise in self.promises
        ]
        lines += _table(rows, rule=True)
        if self.timings:
            lines += [
                "",
                "time of one call that rotates q and k, microseconds (a report, no promise)",
            ]
            timing_rows: list[tuple[str, ...]] = [("  tokens", "", "median", "p20 to p80")]
            timing_rows += [
                (
                    f"  {timing.tokens}",
                    timing.name,
                    f"{timing.median_us:.1f}",
                    f"{timing.p20_us:.1f} to {timing.p80_us:.1f}",
                )
                for timing in self.timings
            ]
            lines += _table(timing_rows, rule=True)
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        broken = [promise.name for promise in self.promises if not promise.ok]
        kept = len(self.promises) - len(broken)
        verdict = f"{kept} of {len(self.promises)} promises kept"
        lines += ["", verdict + (f"; BROKEN: {', '.join(broken)}" if broken else "")]
        return "\n".join(lines)


def _table(rows: list[tuple[str, ...]], *, rule: bool = False) -> list[str]:
    """Left-aligned columns; ``rule`` draws a line under the first row."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "  " + "-" * (sum(widths) + 2 * len(widths) - 4))
    return lines
