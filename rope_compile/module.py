"""`RotaryEmbedding`: the module that model code calls, and the devices its tables live on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rope_compile.config import RopeConfig
from rope_compile.functional import rotate, rotate_
from rope_compile.table import RopeTable, canonical_device, device_probe

# Buffers that rotary modules of other libraries saved; a checkpoint that has them still loads.
LEGACY_KEYS = (
    "inv_freq",
    "original_inv_freq",
    "cos_cached",
    "sin_cached",
    "cos_sin_cache",
    "freqs_cis",
)


class RotaryEmbedding(nn.Module):
    """Rotates q and k by their positions; reads a `RopeTable`, never changes it in ``forward``.

    One module may serve several owners: `rope_compile.get_rope` hands out the same one for the same
    configuration and device. So a cast never reaches a table, and a move adds a table on the new
    device to a shared module (or moves a module that was built directly): what one owner does
    changes nobody else's results. After meta construction, ``to_empty()`` and ``.to(device)``
    end with right values. ``state_dict`` has no entries; a copy or a pickle is a module of its own.

    Args:
        config: which rotation.
        device: where; None means the default device, which ``with torch.device("meta")`` sets.
        capacity: rows beyond ``config.max_position`` to start with.
    """

    tables: nn.ModuleDict
    _home: RopeTable

    def __init__(
        self,
        config: RopeConfig,
        device: torch.device | str | int | None = None,
        capacity: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(config, RopeConfig):
            raise TypeError(f"config must be a RopeConfig, got {type(config).__name__}")
        self.config = config
        self._shared = False
        self._lock = threading.RLock()
        # Plain attributes of the module: torch.compile takes them as constants with a guard. A
        # float could become a symbol that is read on the host at every call; a string cannot.
        self._lane_axes = config.lane_axes
        self._style = config.style
        self._rotary_offset = config.rotary_offset
        self._attention_scaling = repr(float(config.attention_scaling))
        self.tables = nn.ModuleDict()
        self._settle(RopeTable(config, device, capacity))

    def forward(
        self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k; see `rope_compile.apply_rope` for shapes, dtypes and errors.

        Args:
            positions: ``[tokens]``, ``[seq]`` or ``[batch, seq]`` (``[axes, ...]`` with axes),
                int32 or int64, any value.
            q: ``[..., heads, head_dim]``.
            k: As q with its own head count, or None.
            inverse: Rotate back (the transpose): undoes a rotation of magnitude 1, else gives
                ``attention_scaling ** 2`` times what it was.

        Returns:
            Fresh contiguous tensors; None for an absent k.
        """
        cos_sin_cache, inv_freq = self._rows_for(q)
        return rotate(
            q, k, positions, cos_sin_cache, inv_freq, self._lane_axes, self._style,
            self._rotary_offset, float(self._attention_scaling), inverse,
        )  # fmt: skip

    def apply_(
        self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse: bool = False
    ) -> None:
        """:meth:`forward` in place: writes q and k; see `rope_compile.apply_rope_`."""
        cos_sin_cache, inv_freq = self._rows_for(q)
        rotate_(
            q, k, positions, cos_sin_cache, inv_freq, self._lane_axes, self._style,
            self._rotary_offset, float(self._attention_scaling), inverse,
        )  # fmt: skip

    def reserve(self, rows: int) -> bool:
        """Make ``capacity`` at least ``rows``, on every device; see `RopeTable.reserve`."""
        grown = [table.reserve(rows) for table in self._tables()]
        return any(grown)

    def rebuild_(self) -> None:
        """Refill every table where it is; see `RopeTable.rebuild_`."""
        for table in self._tables():
            table.rebuild_()

    @property
    def table(self) -> RopeTable:
        """The table on this module's own device."""
        return self._home

    @property
    def device(self) -> torch.device:
        """The device this module was built for or moved to."""
        return self.table.device

    @property
    def capacity(self) -> int:
        """Rows of the table, a multiple of 128. Positions beyond it are right all the same."""
        return self.table.capacity

    @property
    def cos_sin_cache(self) -> Tensor:
        """float32 ``[capacity, rotary_dim]``, cos half then sin half, times the magnitude."""
        return self.table.cos_sin_cache

    @property
    def inv_freq(self) -> Tensor:
        """``[rotary_dim / 2]``, of ``config.phase_dtype``."""
        return self.table.inv_freq

    def table_on(self, device: torch.device) -> RopeTable | None:
        """The table on a device, or None."""
        for table in self._tables():
            if table.device == device:
                return table
        return None

    def _tables(self) -> list[RopeTable]:
        return list(self.tables.values())  # type: ignore[arg-type]

    def _rows_for(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The table and the frequencies on q's device."""
        if not isinstance(q, Tensor):
            raise TypeError(f"q must be a tensor, got {type(q).__name__}")
        table: RopeTable | None = self._home
        if q.device != table.device:  # type: ignore[union-attr]
            table = self.table_on(q.device)
        if table is None:
            devices = ", ".join(str(table.device) for table in self._tables())
            raise ValueError(
                f"q must be on a device that this module has a table for ({devices}), got "
                f"{q.device}; call .to('{q.device}') on the module before the first call"
            )
        # Past nn.Module.__getattr__, five calls of which cost as much as a third of the operator.
        buffers = table._buffers
        return buffers["cos_sin_cache"], buffers["inv_freq"]  # type: ignore[return-value]

    def _settle(self, table: RopeTable) -> None:
        """Hold ``table``, and make it this module's own."""
        self.tables[_key(table.device)] = table
        # A plain attribute: it is registered once already, under its device.
        self.__dict__["_home"] = table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Follow a move to another device; casts and everything else leave the tables alone."""
        with self._lock:
            target = canonical_device(self._target(fn))
            home = self.table
            if target == home.device and home.dead() is None:
                return self
            table = self.table_on(target)
            if table is None or table.dead() is not None:
                table = RopeTable(self.config, target, home.capacity)
            if not self._shared:
                self._settle(table)
                for key in [key for key, other in self.tables.items() if other is not table]:
                    del self.tables[key]
            elif target == home.device or home.device.type == "meta":
                self._settle(table)
            else:
                self.tables[_key(target)] = table
        return self

    def _target(self, fn: Callable[[Tensor], Tensor]) -> torch.device:
        """The device that ``fn`` of ``nn.Module._apply`` moves a tensor of this module to."""
        try:
            return fn(device_probe(self.device)).device
        except NotImplementedError:
            if self.device.type != "meta":
                raise
            # A meta tensor has no data to copy; our rows need none, they are computed.
            return fn(device_probe(torch.device("cpu"))).device

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        legacy = {prefix + key for key in LEGACY_KEYS}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in legacy]

    def __reduce__(self) -> tuple[object, ...]:
        others = [table for table in self._tables() if table is not self._home]
        probes = [device_probe(table.device) for table in (self._home, *others)]
        return _restore, (self.config, probes, self.capacity, self.training)

    def extra_repr(self) -> str:
        config = self.config
        axes = "" if config.axes is None else f", axes={config.axes}"
        return (
            f"head_dim={config.head_dim}, style={config.style!r}, "
            f"scaling={type(config.scaling).__name__}{axes}, shared={self._shared}"
        )


def _key(device: torch.device) -> str:
    # Not the bare type: "cpu" and "cuda" are methods of a module.
    return f"on_{device}".replace(":", "_")


def _restore(
    config: RopeConfig, probes: list[Tensor], capacity: int, training: bool
) -> RotaryEmbedding:
    home, *others = dict.fromkeys(probe.device for probe in probes)
    rope = RotaryEmbedding(config, home, capacity).train(training)
    for device in others:
        rope.tables[_key(device)] = RopeTable(config, device, capacity)
    return rope
