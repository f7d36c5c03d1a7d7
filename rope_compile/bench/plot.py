"""One picture of a run: share of the copy bandwidth against the number of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rope_compile.bench.providers import OURS, Missing
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_FRESH

__all__ = ["draw", "require"]

# (provider, form) -> what is written beside its line, and its colour. Ours are the strong ones.
_LINES = {
    (OURS, IN_PLACE): ("rope_compile, in place", "#c2410c"),
    (OURS, OUT_FRESH): ("rope_compile, fresh outputs", "#f59e0b"),
    ("hf_compiled_apart", OUT_FRESH): ("compiled, halves apart", "#64748b"),
    ("hf_compiled", OUT_FRESH): ("formula, compiled", "#2563eb"),
    ("hf_eager", OUT_FRESH): ("formula, eager", "#111827"),
}


def require() -> Any:  # noqa: ANN401  # matplotlib is optional, so its types are too
    """matplotlib's ``Figure`` class.

    Raises:
        Missing: matplotlib is not installed.
    """
    try:
        # The Agg backend draws into files and needs no display; pyplot would pick another.
        importlib.import_module("matplotlib.backends.backend_agg")
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise Missing("a plot needs matplotlib; pip install matplotlib") from None


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: one panel for each shape (across) and dtype (down), most threads of the run.

    Raises:
        Missing: matplotlib is not installed. ValueError: there is nothing to draw.
    """
    figure_class = require()
    found = [row for row in rows if row.share_of_copy is not None and row.kernel == "rope"]
    if not found:
        raise ValueError("the rows must hold shares of copy to be drawn, got none")
    threads = max(row.threads or 0 for row in found)
    found = [row for row in found if (row.threads or 0) == threads]
    shapes = list(dict.fromkeys(row.shape for row in found))
    dtypes = list(dict.fromkeys(row.dtype for row in found))
    # Room at the right of each panel for the names of the lines.
    figure = figure_class(figsize=(6.4 * len(shapes), 3.8 * len(dtypes) + 0.8), dpi=130)
    panels = figure.subplots(len(dtypes), len(shapes), squeeze=False)
    for line, dtype in enumerate(dtypes):
        for column, shape in enumerate(shapes):
            own = [row for row in found if (row.shape, row.dtype) == (shape, dtype)]
            if own:
                _panel(panels[line][column], own, f"{shape}, {dtype}")
            else:
                panels[line][column].set_axis_off()
    first = found[0]
    where = f", {threads:g} thread{'s' * (threads > 1)}" if threads else ""
    about = f"{first.device}{where}, torch {first.torch}"
    figure.suptitle(f"Rotating q and k: share of the bandwidth of a copy\n{about}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, format="png")


def _panel(axes: Any, rows: Sequence[Row], title: str) -> None:  # noqa: ANN401
    axes.set_title(title, loc="left")
    ends = []
    for (provider, form), (label, colour) in _LINES.items():
        points = sorted(
            {
                (row.tokens, row.share_of_copy)
                for row in rows
                if (row.provider, row.form) == (provider, form)
                and row.tokens is not None
                and row.share_of_copy is not None
            }
        )
        if not points:
            continue
        strong = provider == OURS
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            linewidth=2.4 if strong else 1.4,
            marker="o",
            markersize=4 if strong else 3,
        )
        ends.append((points[-1][1], points[-1][0], label, colour))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of copy_'s bandwidth")
    axes.set_ylim(0, max(1.08, axes.get_ylim()[1]))  # the line of the copy is always in sight
    axes.axhline(1.0, color="#9ca3af", linewidth=1, linestyle="--", zorder=0)
    axes.annotate(
        "copy_", (0.01, 1.0), xycoords=("axes fraction", "data"), color="#6b7280", va="bottom"
    )
    ticks = _apart(sorted({row.tokens for row in rows if row.tokens}))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _write_names(axes, ends)


def _apart(tokens: Sequence[float]) -> list[float]:
    """From the largest down, those at least a factor of 4 apart, so that their labels have room."""
    kept: list[float] = []
    for value in sorted(tokens, reverse=True):
        if not kept or 4 * value <= kept[-1]:
            kept.append(value)
    return kept[::-1]


def _write_names(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:  # noqa: ANN401
    """Names at the right end of the lines, pushed apart where two would overlap."""
    least_gap = axes.get_ylim()[1] * 0.065
    height = float("-inf")
    for share, tokens, label, colour in sorted(ends):
        height = max(share, height + least_gap)
        axes.annotate(
            f" {label}", (tokens, height), color=colour, va="center", annotation_clip=False
        )
