"""Rows as text: tables for a terminal, a block for a README, and the summary of the targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rope_compile.bench.load import BUSY_CORES
from rope_compile.bench.providers import OURS
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_EXISTING, OUT_FRESH, SHAPES
from rope_compile.bench.targets import Target, verdicts

__all__ = ["as_dict", "as_markdown", "as_text", "duration"]

_FORM_ORDER = (IN_PLACE, OUT_EXISTING, OUT_FRESH)
_FORM_WORDS = {
    IN_PLACE: "in place",
    OUT_EXISTING: "existing memory",
    OUT_FRESH: "fresh outputs",
    "": "",
}


def duration(microseconds: float) -> str:
    """Three digits and a unit."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e-3), (float("inf"), "s", 1e-6)):
        if microseconds < limit:
            value = microseconds * scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError("every finite time is below one of the limits")


def as_dict(
    rows: Sequence[Row], targets: Sequence[Target], load: tuple[str, str] | None
) -> dict[str, object]:
    """The same for a program; a row leaves out the columns that do not apply."""
    return {
        "rows": [
            {name: value for name, value in asdict(row).items() if value not in ("", None)}
            for row in rows
        ],
        "targets": [
            {**asdict(target), "verdict": target.verdict, "measured": target.measured}
            for target in targets
        ],
        "load": load,
        "warnings": _warning(rows),
    }


def _others(row: Row) -> float:
    """Cores that other processes used while the row was timed."""
    for part in row.note.split("; "):
        if part.startswith("others used "):
            return float(part.split()[2])
    return 0.0


# ---------------------------------------------------------------------------------------- terminal


def as_text(rows: Sequence[Row], load: tuple[str, str] | None = None, seconds: float = 0.0) -> str:
    """Everything that a run measured, for a person.

    Args:
        rows: of one run.
        load: load averages before and after, where the run was just made.
        seconds: how long it took.
    """
    lines = [*_header(rows, load, seconds), ""]
    for block in _blocks(rows):
        lines += [*_block_table(block), ""]
    for title, found in (
        ("host time of one call at one token, L8", _host(rows)),
        ("tax of an operator", [row for row in rows if row.kernel == "op_tax"]),
        ("counts, L8 float32", [row for row in rows if row.unit in ("count", "byte")]),
        ("the rest", [row for row in rows if row.mode == "setup"]),
    ):
        if found:
            lines += [title, *_table([_plain(row) for row in found]), ""]
    lines += _fallback_lines(rows)
    lines += _target_lines(verdicts(rows))
    return "\n".join([*lines, *_warning(rows)])


def _header(rows: Sequence[Row], load: tuple[str, str] | None, seconds: float) -> list[str]:
    first = rows[0]
    lines = [
        f"rope_compile {first.version} on {first.device}; torch {first.torch}"
        + (f", triton {first.triton}" if first.triton else ""),
        f"run {first.run_id}, {first.timestamp}",
        "median time of one call that rotates q and k; x: speed-up over the compiled formula of "
        "transformers (hf_compiled);",
        "%: share of the bandwidth of copy_ of q and k. Both are medians of ratios within a round.",
        "Outputs under 32 MB get memory in use before anyway: only larger ones have a line for it.",
    ]
    if load is not None:
        lines.append(
            f"load of the machine before: {load[0]}, after: {load[1]}; took {seconds:.0f} s"
        )
    return [*lines, *_warning(rows)]


def _warning(rows: Sequence[Row]) -> list[str]:
    cells = {(r.shape, r.dtype, r.tokens, r.threads): _others(r) for r in rows if _others(r)}
    busy = {cell: cores for cell, cores in cells.items() if cores >= BUSY_CORES}
    if not busy:
        return []
    return [
        f"DISCARD THIS RUN: in {len(busy)} of {len(cells)} cells other processes took up to "
        f"{max(busy.values()):.1f} cores; its numbers mean nothing"
    ]


def _matrix(rows: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row.kernel == "rope"
        and row.metric == "time"
        and row.mode == "forward"
        and row.shape
        and not row.provider.endswith("_fallback")
    ]


def _blocks(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that make one table: same shape, dtype, threads and cache state."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in _matrix(rows):
        found.setdefault((row.shape, row.dtype, row.threads, row.cache), []).append(row)
    return list(found.values())


def _block_table(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    shape = SHAPES.get(first.shape)
    threads = f", {first.threads:g} thread{'s' * (first.threads > 1)}" if first.threads else ""
    partial = "" if first.rotary_dim == first.head_dim else f", {first.rotary_dim:g} rotated"
    title = (
        f"{first.shape} ({shape.model if shape else ''}): {first.q_heads:g} + {first.k_heads:g} "
        f"heads x {first.head_dim:g}{partial}, {first.style}, {first.layout}, {first.dtype}"
        f"{threads}, {first.cache}"
    )
    sizes = sorted({row.tokens for row in rows if row.tokens is not None})
    table = [("", *(f"{f'T = {size:g}':>8} {'x':>6} {'%':>5}" for size in sizes))]
    keys = list(dict.fromkeys((row.provider, row.form) for row in rows))
    keys.sort(key=lambda key: _FORM_ORDER.index(key[1]) if key[0] == OURS else len(_FORM_ORDER))
    for provider, form in keys:
        own = [row for row in rows if (row.provider, row.form) == (provider, form)]
        cells = [_cell([row for row in own if row.tokens == size], rows) for size in sizes]
        if any(cells):
            table.append((_label(provider, form), *cells))
    without = {
        f"{_label(row.provider, row.form)}, {row.note}": None for row in rows if row.y_50 is None
    }
    return [title, *_table(table, rule=True), *without]


def _label(provider: str, form: str) -> str:
    """Peers have one form each; ours are told apart by it."""
    return f"{provider}, {_FORM_WORDS.get(form, form)}" if provider.startswith(OURS) else provider


def _cell(own: Sequence[Row], rows: Sequence[Row]) -> str:
    """Time, speed-up over the compiled formula, share of copy; empty where there is no number."""
    timed = next((row for row in own if row.y_50 is not None), None)
    if timed is None or timed.y_50 is None:
        return ""
    against = next((row for row in own if row.ratio_to == "hf_compiled"), None)
    speed = _times(against.ratio) if against is not None and against.ratio else "-"
    share = f"{timed.share_of_copy:.0%}" if timed.share_of_copy is not None else "-"
    return f"{duration(timed.y_50):>8} {speed:>6} {share:>5}"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}x"


def _host(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.metric == "host_time" and row.kernel == "rope"]


def _plain(row: Row) -> tuple[str, ...]:
    """One line of the smaller tables: what, number, comparison, note."""
    if row.mode == "setup":
        name = row.kernel
    elif row.unit in ("count", "byte"):
        name = f"{row.metric}, {_label(row.provider, row.form)}"
    else:
        name = row.provider + (f", {row.dtype}" if row.kernel == "rope" else "")
    number = "-" if row.y_50 is None else _number(row.y_50, row.unit)
    ratio = f"{_times(row.ratio)} {row.ratio_to}" if row.ratio is not None else ""
    return f"  {name}", number, ratio, row.note


def _number(value: float, unit: str) -> str:
    if unit == "us":
        return duration(value)
    return f"{value / 2**20:.1f} MiB" if unit == "byte" else f"{value:g}"


def _fallback_lines(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row.provider.endswith("_fallback") and row.y_50 is not None]
    if not found:
        return []
    table = [
        (
            f"  {row.shape} {row.dtype} T = {row.tokens or 0:g}, {_FORM_WORDS.get(row.form, '')}",
            duration(row.y_50 or 0),
            f"{_times(row.ratio or 0)} hf_eager",
        )
        for row in found
    ]
    return ["without a C++ compiler, in a process of its own", *_table(table), ""]


def _target_lines(targets: Sequence[Target]) -> list[str]:
    """One line a target; those of a device that is not there share one."""
    table = [("targets", "", "must", "verdict", "measured")]
    absent = [x for x in targets if x.reason]
    shown = [x for x in targets if not x.reason]
    table += [(f"  {x.id}", x.goal, x.must, x.verdict, x.measured) for x in shown]
    if absent:
        ids = f"  {absent[0].id} to {absent[-1].id}"
        table.append((ids, "", "", absent[0].verdict, absent[0].reason))
    return _table(table, rule=True)


def _table(rows: Sequence[tuple[str, ...]], *, rule: bool = False) -> list[str]:
    """Aligned columns; ``rule`` draws a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "-" * max(map(len, lines)))
    return lines


# ---------------------------------------------------------------------------------------- markdown

# Column of the README's table -> provider and form.
_COLUMNS = {
    "in place": (OURS, IN_PLACE),
    "existing memory": (OURS, OUT_EXISTING),
    "fresh outputs": (OURS, OUT_FRESH),
    "formula, eager": ("hf_eager", OUT_FRESH),
    "formula, compiled": ("hf_compiled", OUT_FRESH),
    "halves apart, compiled": ("hf_compiled_apart", OUT_FRESH),
    "onnxruntime": ("onnxruntime", OUT_EXISTING),
    "copy": ("copy", OUT_EXISTING),
}


def as_markdown(rows: Sequence[Row]) -> str:
    """The README's table: times, with the speed-up over the eager formula beside ours.

    One line for each shape, dtype and token count, at the largest number of threads of the run.
    """
    first = rows[0]
    threads = max((row.threads or 0 for row in _matrix(rows)), default=0)
    found = [row for row in _matrix(rows) if (row.threads or 0) == threads]
    columns = {
        title: key
        for title, key in _COLUMNS.items()
        if any((row.provider, row.form) == key and row.y_50 is not None for row in found)
    }
    lines = [
        f"| model | dtype | tokens | {' | '.join(columns)} |",
        f"|---|---|---{'|---' * len(columns)}|",
    ]
    for shape, dtype, tokens in dict.fromkeys((r.shape, r.dtype, r.tokens) for r in found):
        own = [row for row in found if (row.shape, row.dtype, row.tokens) == (shape, dtype, tokens)]
        cells = [_markdown_cell(own, *key) for key in columns.values()]
        model = SHAPES[shape].model if shape in SHAPES else shape
        lines.append(f"| {model} | {dtype} | {tokens or 0:g} | {' | '.join(cells)} |")
    where = f"{threads:g} thread{'s' * (threads > 1)}, " if threads else ""
    rounds = sorted({f"{row.rounds:g}" for row in found if row.rounds}, key=int)
    lines += [
        "",
        f"{first.device}, {where}torch {first.torch}, rope_compile {first.version}, run "
        f"{first.run_id}. Medians over {' or '.join(rounds)} rounds in which every column took "
        "part (existing memory: in a process of its own, beside a copy); in brackets the speed-up "
        "over the eager formula and the share of the bandwidth of `copy_`.",
    ]
    return "\n".join([*lines, *(["", *_warning(rows)] if _warning(rows) else [])]) + "\n"


def _markdown_cell(rows: Sequence[Row], provider: str, form: str) -> str:
    own = [row for row in rows if (row.provider, row.form) == (provider, form)]
    timed = next((row for row in own if row.y_50 is not None), None)
    if timed is None or timed.y_50 is None:
        return "-"
    cell = duration(timed.y_50)
    if provider != OURS:
        return cell
    against = next((row for row in own if row.ratio_to == "hf_eager"), None)
    extras = [_times(against.ratio)] if against is not None and against.ratio else []
    extras += [f"{timed.share_of_copy:.0%}"] if timed.share_of_copy is not None else []
    return f"{cell} ({', '.join(extras)})" if extras else cell
