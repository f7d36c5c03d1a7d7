"""What must be reached, what was measured, and the verdict: read from rows and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rope_compile.bench.children import FALLBACK
from rope_compile.bench.counts import SWEEP_BATCHES, SWEEP_TOKENS, forced_recompiles
from rope_compile.bench.host import ROPE, TAX, WITH_AUTOGRAD
from rope_compile.bench.memory import FRESH_PAGES_BYTES
from rope_compile.bench.providers import OURS
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import DTYPES, IN_PLACE, OUT_EXISTING, OUT_FRESH, SHAPES

__all__ = ["Part", "Target", "verdicts"]

_FORMS = {IN_PLACE: "in place", OUT_EXISTING: "existing", OUT_FRESH: "fresh"}
# The cell that the CPU targets speak of.
_SHAPE, _TOKENS, _THREADS = "L8", 4096, 2


@dataclass(frozen=True)
class Part:
    """One number of a target; ``measured`` None means that the run has no such row.

    Parts of one label that follow each other are shown together, such as the two dtypes of a form.
    """

    label: str
    must: float
    measured: float | None
    stretch: float | None = None
    at_least: bool = True
    detail: str = ""

    def reaches(self, limit: float | None) -> bool:
        if self.measured is None or limit is None:
            return False
        return self.measured >= limit if self.at_least else self.measured <= limit


@dataclass(frozen=True)
class Target:
    """One line of the summary."""

    id: str
    goal: str
    unit: str
    parts: list[Part] = field(default_factory=list)
    reason: str = ""  # why there is no number
    limits: str = ""  # what must be reached, where the parts' own limits do not say it well

    @property
    def verdict(self) -> str:
        """``met``, ``met, stretch too``, ``MISSED``, or ``not measured``; the worst part counts."""
        measured = [part for part in self.parts if part.measured is not None]
        if not measured:
            return "not measured"
        if not all(part.reaches(part.must) for part in measured):
            return "MISSED"
        if len(measured) < len(self.parts):
            return "met, in part"
        return "met, stretch too" if all(p.reaches(p.stretch) for p in self.parts) else "met"

    @property
    def must(self) -> str:
        if self.limits or not self.parts:
            return self.limits
        sign = ">=" if self.parts[0].at_least else "<="
        values = list(dict.fromkeys(f"{part.must:g}" for part in self.parts))
        return f"{sign} {' / '.join(values)}{self.unit}"

    @property
    def measured(self) -> str:
        if self.verdict == "not measured":
            return self.reason or "no such row in this run"
        shown = []
        for label, parts in itertools.groupby(self.parts, key=lambda part: part.label):
            group = list(parts)
            values = ["-" if x.measured is None else f"{x.measured:.3g}" for x in group]
            detail = "".join(part.detail for part in group)
            shown.append(f"{label} {' / '.join(values)}{self.unit}{detail}".lstrip())
        return "; ".join(shown)


def verdicts(rows: Sequence[Row]) -> list[Target]:
    """Every target, those without a number included."""
    on_gpu = any(row.device and not row.device.startswith("cpu") for row in rows)
    cpu = [] if on_gpu else rows
    gpu = rows if on_gpu else []
    elsewhere = "no CPU in this run" if on_gpu else "no GPU"
    found = [target(cpu) for target in _CPU] + [target(rows) for target in _BOTH]
    found += [target(gpu) for target in _GPU]
    return [
        replace(x, reason=elsewhere)
        if x.verdict == "not measured" and x.id[0] == ("C" if on_gpu else "G")
        else x
        for x in found
    ]


def _times(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Rows with a number whose columns have the wanted values."""
    return [
        row
        for row in rows
        if row.y_50 is not None and all(getattr(row, name) == wanted[name] for name in wanted)
    ]


def _worst(rows: Iterable[Row], provider: str, reference: str, **wanted: object) -> Row | None:
    """The row of a provider with the smallest ratio to a reference."""
    found = _times(
        rows, kernel="rope", provider=provider, metric="time", ratio_to=reference, **wanted
    )
    return min(found, key=lambda row: row.ratio or 0.0, default=None)


def _ratio_of(row: Row | None) -> float | None:
    return None if row is None else row.ratio


def _share_of(row: Row | None) -> float | None:
    return None if row is None else row.share_of_copy


def _where(row: Row | None) -> str:
    if row is None:
        return ""
    threads = f" {row.threads:g} thr" if row.threads else ""
    form = _FORMS.get(row.form, row.form)
    return f" ({row.shape} {row.dtype} T={row.tokens or 0:g}{threads} {form})"


def _main_cell(rows: Iterable[Row], form: str, dtype: str, reference: str = "") -> Row | None:
    found = _times(
        rows,
        kernel="rope",
        provider=OURS,
        metric="time",
        form=form,
        dtype=dtype,
        shape=_SHAPE,
        tokens=_TOKENS,
        threads=_THREADS,
    )
    found = [row for row in found if not reference or row.ratio_to == reference]
    return found[0] if found else None


Limits = tuple[tuple[str, float, float], ...]  # dtype, must, stretch


def _share(id: str, goal: str, form: str, limits: Limits) -> Callable[[Sequence[Row]], Target]:
    def target(rows: Sequence[Row]) -> Target:
        parts = []
        for dtype, must, stretch in limits:
            row = _main_cell(rows, form, dtype)
            parts.append(Part("", must, _share_of(row), stretch))
        return Target(id, goal, "", parts)

    return target


def _fresh_share(rows: Sequence[Row]) -> Target:
    """Share of copy, or of clone from the size on where every allocation is of fresh pages."""
    parts = []
    for dtype, must, copy_stretch, clone_stretch in (
        ("float32", 0.75, 1.0, 1.5),
        ("bfloat16", 0.60, 0.9, 1.3),
    ):
        shape = SHAPES[_SHAPE]
        size = _TOKENS * shape.q_heads * shape.head_dim * DTYPES[dtype].itemsize
        if size < FRESH_PAGES_BYTES:
            row = _main_cell(rows, OUT_FRESH, dtype)
            parts.append(Part("of copy", must, _share_of(row), copy_stretch))
            continue
        row = _main_cell(rows, OUT_FRESH, dtype, "clone")
        share = None
        if row is not None and row.ratio is not None:
            itemsize = DTYPES[dtype].itemsize
            moved = shape.bytes(_TOKENS, itemsize, OUT_FRESH)
            share = row.ratio * moved / shape.copy_bytes(_TOKENS, itemsize)
        parts.append(Part("of clone", must, share, clone_stretch))
    return Target("C3", "share of copy or clone, fresh outputs, fp32 / bf16", "", parts)


def _speedup(id: str, reference: str, goal: str, limits: Limits) -> Callable[..., Target]:
    def target(rows: Sequence[Row]) -> Target:
        parts = []
        for form in (IN_PLACE, OUT_FRESH):
            for dtype, must, stretch in limits:
                row = _main_cell(rows, form, dtype, reference)
                parts.append(Part(_FORMS[form], must, _ratio_of(row), stretch))
        return Target(id, goal, "x", parts)

    return target


def _everywhere(
    id: str, provider: str, reference: str, goal: str, must: float, stretch: float
) -> Callable[[Sequence[Row]], Target]:
    """The worst cell and form decides."""

    def target(rows: Sequence[Row]) -> Target:
        row = _worst(rows, provider, reference)
        part = Part("worst", must, _ratio_of(row), stretch, detail=_where(row))
        return Target(id, goal, "x", [part])

    return target


def _one_call(id: str, dtypes: tuple[str, ...]) -> Callable[[Sequence[Row]], Target]:
    names = " / ".join({"float32": "fp32", "bfloat16": "bf16"}[dtype] for dtype in dtypes)

    def target(rows: Sequence[Row]) -> Target:
        parts = []
        for dtype in dtypes:
            found = _times(
                rows, metric="host_time", provider=f"{OURS}_module", dtype=dtype, kernel="rope"
            )
            ratio = found[0].ratio if found else None
            parts.append(Part("", 4.0, ratio, 6.0))
        return Target(id, f"one module call at T = 1 against HF eager, {names}", "x", parts)

    return target


_CPU: tuple[Callable[[Sequence[Row]], Target], ...] = (
    _share(
        "C1",
        "share of copy, in place, fp32 / bf16",
        IN_PLACE,
        (("float32", 0.75, 1.3), ("bfloat16", 0.60, 1.1)),
    ),
    _share(
        "C2",
        "share of copy, existing memory, fp32 / bf16",
        OUT_EXISTING,
        (("float32", 0.75, 1.0), ("bfloat16", 0.60, 0.9)),
    ),
    _fresh_share,
    _speedup(
        "C4",
        "hf_eager",
        "against HF eager, fp32 / bf16",
        (("float32", 8.0, 12.0), ("bfloat16", 8.0, 10.0)),
    ),
    _speedup(
        "C5",
        "hf_compiled",
        "against torch.compile(HF), fp32 / bf16",
        (("float32", 4.0, 5.0), ("bfloat16", 3.0, 4.0)),
    ),
    _everywhere(
        "C6", OURS, "hf_compiled_apart", "against compiled halves apart, everywhere", 1.0, 1.7
    ),
    _one_call("C7", ("float32", "bfloat16")),
    _everywhere("C8", OURS, "hf_compiled", "against torch.compile(HF), everywhere", 0.95, 1.0),
    _everywhere("C9", FALLBACK, "hf_eager", "without a compiler, against HF eager", 1.0, 1.2),
)


# ------------------------------------------------------------------------------------------- both


def _op_tax(rows: Sequence[Row]) -> Target:
    """Of ``rope`` where its kernel is native, else of an operator that is registered like it."""
    for name in (ROPE, WITH_AUTOGRAD):
        found = _times(rows, provider=f"{TAX} of {name}, no grad")
        if found:
            part = Part(name, 5.0, found[0].y_50, 2.0, at_least=False)
            return Target("B1", "operator minus a Python body, no grad", " us", [part])
    return Target("B1", "operator minus a Python body, no grad", " us")


def _count(rows: Sequence[Row], metric: str, form: str = "") -> float | None:
    found = _times(rows, metric=metric, provider=OURS)
    found = [row for row in found if not form or row.form == form]
    return found[0].y_50 if found else None


def _counts(rows: Sequence[Row]) -> Target:
    wanted = (
        ("launches", 1.0, _count(rows, "launches", IN_PLACE)),
        ("launches", 1.0, _count(rows, "launches", OUT_FRESH)),
        ("allocations in place", 0.0, _count(rows, "allocations", IN_PLACE)),
        ("fresh", 2.0, _count(rows, "allocations", OUT_FRESH)),
        ("copies", 0.0, _count(rows, "copies")),
        ("graph breaks", 0.0, _count(rows, "graph_breaks")),
    )
    parts = [Part(*part, at_least=False) for part in wanted]
    # A CPU has no launches: a number that cannot exist is no missing one.
    measured = [part for part in parts if part.measured is not None]
    return Target("B2", "counts", "", measured, limits="1; 0, 2; 0; 0")


def _recompiles(rows: Sequence[Row]) -> Target:
    parts = []
    for row in _times(rows, metric="recompiles", provider=OURS):
        name = row.note.partition(";")[0]
        forced = forced_recompiles(SWEEP_BATCHES, SWEEP_TOKENS) if name == "default" else 0
        parts.append(Part(name, forced + 1.0, row.y_50, float(forced), at_least=False))
    return Target("B3", "recompiles over the T and B sweep", "", parts)


def _peak_memory(rows: Sequence[Row]) -> Target:
    parts = []
    for form, must, stretch in ((IN_PLACE, 0.40, 0.37), (OUT_FRESH, 0.75, 0.60)):
        found = _times(rows, metric="peak_memory", provider=OURS, form=form)
        share = 1 / found[0].ratio if found and found[0].ratio else None
        parts.append(Part(_FORMS[form], must, share, stretch, at_least=False))
    return Target("B4", "peak memory of forward + backward, of HF eager's", "", parts)


_BOTH: tuple[Callable[[Sequence[Row]], Target], ...] = (
    _op_tax,
    _counts,
    _recompiles,
    _peak_memory,
)


# -------------------------------------------------------------------------------------------- GPU


def _big(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Our forward rows of at least 100 MB, cold."""
    found = _times(
        rows, kernel="rope", provider=OURS, metric="time", mode="forward", cache="cold", **wanted
    )
    return [row for row in found if (row.bytes or 0) >= 100e6]


def _gpu_share(rows: Sequence[Row]) -> Target:
    parts = []
    for form in (IN_PLACE, OUT_FRESH):
        shares = [row.share_of_copy for row in _big(rows, form=form, shape="L8", dtype="bfloat16")]
        known = [share for share in shares if share is not None]
        parts.append(Part(_FORMS[form], 0.92, min(known, default=None), 0.97))
    return Target("G1", "share of copy, from 100 MB on", "", parts)


def _other_widths(rows: Sequence[Row]) -> Target:
    """Bandwidth of other widths and styles relative to R = 128 half style, at T = 8192."""

    def rate(shape: str) -> float | None:
        found = _times(
            rows, kernel="rope", provider=OURS, form=IN_PLACE, shape=shape, dtype="bfloat16",
            tokens=8192.0, mode="forward", cache="cold",
        )  # fmt: skip
        return found[0].gb_per_s if found else None

    full, parts = rate("L8"), []
    for shape in ("X80", "P3", "X192", "P4", "GJ", "DS", "FX", "P2"):
        must, stretch = (0.75, 0.90) if shape == "P2" else (0.95, 0.98)
        own = rate(shape)
        parts.append(Part(shape, must, own / full if own and full else None, stretch))
    return Target("G2", "other widths and styles, of R = 128 half style", "", parts)


def _against_compiled(
    id: str, goal: str, must: float, lowest: float | None, stretch: float, *arms: dict[str, object]
) -> Callable[[Sequence[Row]], Target]:
    """Geometric mean over the shapes, and the lowest of them, for each arm of a comparison.

    An arm is a choice of columns; ``equal_heads`` chooses shapes by whether q and k have as many.
    """

    def target(rows: Sequence[Row]) -> Target:
        parts = []
        for arm in arms:
            wanted = {name: value for name, value in arm.items() if name != "equal_heads"}
            found = _times(rows, kernel="rope", provider=OURS, form=OUT_FRESH, **wanted)
            ratios = [
                row.ratio
                for row in found
                if row.ratio and arm.get("equal_heads") in (None, row.q_heads == row.k_heads)
            ]
            label = " ".join(str(value) for value in wanted.values())
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
            parts.append(Part(f"{label} geomean", must, mean, stretch))
            if lowest is not None:
                parts.append(Part("lowest", lowest, min(ratios, default=None), lowest))
        return Target(id, goal, "x", parts)

    return target


def _pick(
    id: str, goal: str, must: float, stretch: float, **wanted: object
) -> Callable[[Sequence[Row]], Target]:
    """The worst of our rows with the wanted columns decides."""

    def target(rows: Sequence[Row]) -> Target:
        found = _times(rows, kernel="rope", provider=OURS, **wanted)
        worst = min(found, key=lambda row: row.ratio or 0.0, default=None)
        part = Part("worst", must, _ratio_of(worst), stretch, detail=_where(worst))
        return Target(id, goal, "x", [part])

    return target


def _decode(rows: Sequence[Row]) -> Target:
    """The slowest of few tokens, by itself and beside the node of a kernel that does nothing."""
    found = [
        row
        for row in _times(
            rows, kernel="rope", provider=OURS, metric="time", mode="forward", cache="warm",
            ratio_to="empty_node",
        )
        if (row.tokens or 0) <= 128
    ]  # fmt: skip
    slowest = max((row.y_50 or 0.0 for row in found), default=None)
    beside_empty = max((1 / row.ratio for row in found if row.ratio), default=None)
    return Target(
        "G9",
        "decode, T <= 128, one node of a CUDA graph",
        "",
        [
            Part("slowest, us", 2.0, slowest, 1.5, at_least=False),
            Part("of an empty node", 1.3, beside_empty, 1.15, at_least=False),
        ],
    )


def _liger(rows: Sequence[Row]) -> Target:
    """Liger copies tensors that lie heads first in memory; its own layout has tokens first."""
    found = _times(
        rows, kernel="rope", provider=OURS, metric="time", mode="forward", ratio_to="liger"
    )
    parts = []
    for label, heads_first, must, stretch in (
        ("heads first", True, 1.8, 2.2),
        ("its own layout", False, 1.0, 1.1),
    ):
        ratios = [row.ratio for row in found if row.ratio and (row.layout == "BHSD") is heads_first]
        parts.append(Part(label, must, min(ratios, default=None), stretch))
    return Target("G7", "against Liger", "x", parts)


_GPU: tuple[Callable[[Sequence[Row]], Target], ...] = (
    _gpu_share,
    _other_widths,
    _against_compiled(
        "G3",
        "forward against torch.compile(HF), unequal heads",
        *(1.15, 0.97, 1.25),
        {"ratio_to": "hf_compiled", "mode": "forward", "equal_heads": False},
    ),
    _against_compiled(
        "G4",
        "against combo_kernels, and equal heads",
        *(1.0, 0.95, 1.10),
        {"ratio_to": "hf_compiled_combo", "mode": "forward"},
        {"ratio_to": "hf_compiled", "mode": "forward", "equal_heads": True},
    ),
    _against_compiled(
        "G5",
        "backward, and both, against torch.compile(HF)",
        *(1.10, None, 1.20),
        {"ratio_to": "hf_compiled", "mode": "backward"},
        {"ratio_to": "hf_compiled", "mode": "full"},
    ),
    lambda rows: _pick("G6", "against HF eager, T >= 2048", 5.0, 8.0, ratio_to="hf_eager")(
        [row for row in rows if (row.tokens or 0) >= 2048]
    ),
    _liger,
    _pick("G8", "against FlashInfer, in place, T >= 8192", 1.03, 1.07, ratio_to="flashinfer"),
    _decode,
    _one_call("G10", ("bfloat16",)),
    _pick("G11", "against itself without the out-of-table path", 0.98, 1.0, ratio_to="no_branch"),
)
