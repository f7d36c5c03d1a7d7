"""Reserve before capture: how many rows, the hook that reserves them, a guard around capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rope_compile.config import RopeConfig, entry_of
from rope_compile.factory import live_tables, registry
from rope_compile.table import RopeTable, round_up, row_count

Model = nn.Module | Iterable[nn.Module] | None


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """Rows that speculative decoding can reach; a pure function of static configuration.

    Target and draft get the same number whatever the order, since both lengths enter it. (A reserve
    read from a runner's pool differed between the two: sglang PR #11871.)

    Args:
        max_position: longest sequence of the target.
        draft_max_position: longest sequence of the draft.
        speculative_steps: drafting steps in flight.
        draft_tokens: tokens a step.
        margin: extra rows.
        align: the reserve is a multiple of it.

    Raises:
        TypeError: not an int. ValueError: negative, or a zero ``max_position`` or ``align``.
    """

    max_position: int
    draft_max_position: int = 0
    speculative_steps: int = 0
    draft_tokens: int = 0
    margin: int = 1024
    align: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _rows(name, getattr(self, name), least=int(name in ("max_position", "align")))

    @property
    def required_length(self) -> int:
        """``max(max_position, draft_max_position) + speculative_steps * draft_tokens + margin``."""
        longest = max(self.max_position, self.draft_max_position)
        return longest + self.speculative_steps * self.draft_tokens + self.margin

    @property
    def reserve_length(self) -> int:
        """``required_length`` rounded up to ``align``."""
        return round_up(self.required_length, self.align)

    @classmethod
    def for_models(
        cls,
        target: object,
        draft: object = None,
        *,
        speculative_steps: int = 0,
        draft_tokens: int = 0,
        margin: int = 1024,
        align: int = 128,
    ) -> CapturePlan:
        """A plan whose lengths come from the models' own configurations.

        Args:
            target: A `RopeConfig`, a transformers configuration or its dictionary, a module with
                ``.config`` or with `RotaryEmbedding` inside, or a length.
            draft: The same, or None for no draft.
            speculative_steps, draft_tokens, margin, align: as in the class.

        Raises:
            ValueError: a model names no length, or a negative one. Others as the class.
        """
        return cls(
            max_position=_rows("target", _longest("target", target), least=1),
            draft_max_position=0 if draft is None else _rows("draft", _longest("draft", draft)),
            speculative_steps=speculative_steps,
            draft_tokens=draft_tokens,
            margin=margin,
            align=align,
        )


def _rows(name: str, value: object, least: int = 0) -> int:
    rows = row_count(name, value)
    if rows < least:
        raise ValueError(f"{name} must be at least {least}, got {rows}")
    return rows


def _longest(name: str, source: object) -> int:
    """The longest sequence that a model, configuration or number stands for."""
    if isinstance(source, int) and not isinstance(source, bool):
        return source
    if isinstance(source, RopeConfig):
        return source.max_position
    lengths: list[int] = []
    if isinstance(source, nn.Module):
        lengths = [
            module.config.max_position
            for module in source.modules()
            if isinstance(module, RopeTable)
        ]
        own = getattr(source, "config", None)
        if own is not None and not isinstance(own, RopeConfig):
            lengths += _config_lengths(own)
    else:
        lengths = _config_lengths(source)
    if not lengths:
        raise ValueError(
            f"{name} must name a length (max_position_embeddings, or a RotaryEmbedding inside), "
            f"got {type(source).__name__} without one; pass the number of positions instead"
        )
    return max(lengths)


def _config_lengths(config: object) -> list[int]:
    """Of a configuration and of its text configuration."""
    text = entry_of(config, "text_config")
    names = ("max_position_embeddings", "max_position")
    found = [entry_of(one, name) for one in (config, text) for name in names]
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool)]


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """One table after the hook. ``bytes`` and ``address`` are those of ``cos_sin_cache``."""

    name: str
    device: torch.device
    rows_before: int
    rows_after: int
    bytes: int
    address: int

    @property
    def grew(self) -> bool:
        """Whether the table was reallocated."""
        return self.rows_after > self.rows_before


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What `prepare_for_capture` did; ``str()`` of it is a table for people."""

    plan: CapturePlan
    tables: tuple[TableReport, ...]

    @property
    def grew(self) -> int:
        """How many tables were reallocated."""
        return sum(table.grew for table in self.tables)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows_after for table in self.tables)

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.bytes for table in self.tables)

    def __str__(self) -> str:
        header = ("table", "device", "rows before", "rows now", "MiB", "grew")
        lines = [
            (
                table.name,
                str(table.device),
                str(table.rows_before),
                str(table.rows_after),
                f"{table.bytes / 2**20:.1f}",
                "yes" if table.grew else "no",
            )
            for table in self.tables
        ]
        widths = [max(len(row[i]) for row in [header, *lines]) for i in range(len(header))]
        rows = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [header, *lines]
        ]
        total = (
            f"{self.grew} of {len(self.tables)} tables grew to hold {self.plan.required_length} "
            f"positions; {self.bytes / 2**20:.1f} MiB in all"
        )
        return "\n".join([*rows, total])


def _modules(model: object) -> list[nn.Module]:
    candidates: Iterable[object] = [model]
    # A tensor is no list of modules, and one without dimensions cannot be iterated.
    if isinstance(model, Iterable) and not isinstance(model, nn.Module | Tensor):
        candidates = model
    modules = []
    for one in candidates:
        if not isinstance(one, nn.Module):
            raise TypeError(
                f"model must be a module, several modules or None, got {type(one).__name__}"
            )
        modules.append(one)
    return modules


def _named_tables(model: Model) -> list[tuple[str, RopeTable]]:
    """Every table of a model, of several, or of the registry; each once."""
    if model is None:
        return [
            (f"head_dim={table.config.head_dim}, base={table.config.base:g}", table)
            for table in live_tables()
        ]
    models = _modules(model)
    found: dict[int, tuple[str, RopeTable]] = {}
    for i, one in enumerate(models):
        prefix = f"{i}." if len(models) > 1 else ""
        own = False
        for name, module in one.named_modules():
            if isinstance(module, RopeTable):
                own = True
                owner = name.rpartition("tables.")[0].rstrip(".") or type(one).__name__
                found.setdefault(id(module), (prefix + owner, module))
        if not own:
            raise ValueError(
                f"model must contain a RotaryEmbedding, got {type(one).__name__} without one; "
                "build it with get_rope, or patch it with rope_compile.integrations first"
            )
    return list(found.values())


def _live_tables(model: Model) -> list[tuple[str, RopeTable]]:
    """The tables that a capture may read: real, and each of them alive."""
    tables = _named_tables(model)
    real = [(name, table) for name, table in tables if table.device.type != "meta"]
    if tables and not real:
        raise ValueError(
            f"model must be on a real device, got {tables[0][0]} on meta; call to_empty() or "
            ".to(device) first"
        )
    for name, table in real:
        reason = table.dead()
        if reason is not None:
            raise RuntimeError(
                f"{name} must have a live table, got a dead one: {reason}; fetch it again with "
                f"get_rope, or call reserve({table.capacity}) on its module"
            )
    return real


def prepare_for_capture(model: Model, plan: CapturePlan) -> CaptureReport:
    """Give every table the rows a plan needs; after it no call moves or reallocates one.

    Call it once, before the first compiled call and before capture. The tables are pinned: their
    storage stays valid for captured graphs even when the model is gone, and code compiled from then
    on takes them for static (``mode="reduce-overhead"`` does not copy them at every replay), also
    where they are arguments, as of `rope_compile.apply_rope`.

    Args:
        model: A module, several modules, or None for every live table of `get_rope`.
        plan: how many rows.

    Raises:
        ValueError: a module has no table, or is on meta. RuntimeError: a table is dead, or would
            have to grow while compiling or capturing. TypeError: an argument of a wrong type.
    """
    if not isinstance(plan, CapturePlan):
        raise TypeError(f"plan must be a CapturePlan, got {type(plan).__name__}")
    reports = []
    for name, table in _live_tables(model):
        before = table.capacity
        table.reserve(plan.reserve_length)
        registry.pin(table.pin())
        cache = table.cos_sin_cache
        reports.append(
            TableReport(
                name=name,
                device=table.device,
                rows_before=before,
                rows_after=table.capacity,
                bytes=cache.numel() * cache.element_size(),
                address=cache.data_ptr(),
            )
        )
    return CaptureReport(plan=plan, tables=tuple(reports))


@contextlib.contextmanager
def capture_guard(model: Model = None) -> Iterator[None]:
    """Inside, growth of a model's tables raises; they are pinned as by `prepare_for_capture`.

    Put it around ``torch.cuda.graph(...)`` or a first compiled call. Nests; several threads may
    hold one at once.

    Args:
        model: A module, several modules, or None for every table of `get_rope`, those included that
            are built inside.

    Raises:
        RuntimeError: from ``reserve`` inside, for growth. ValueError, TypeError: as
            `prepare_for_capture`.
    """
    if model is None:
        with registry.guard():
            yield
        return
    tables = [table for _, table in _live_tables(model)]
    for table in tables:
        table.freeze()
    try:
        for table in tables:
            registry.pin(table.pin())
        yield
    finally:
        for table in tables:
            table.thaw()
