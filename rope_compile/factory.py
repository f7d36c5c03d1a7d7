"""`get_rope` and the process-wide registry behind it: one live module per config and device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rope_compile.config import RopeConfig
from rope_compile.module import RotaryEmbedding
from rope_compile.table import RopeTable, canonical_device

Key = tuple[RopeConfig, torch.device]


class Registry:
    """Modules by config and device, and storage that captured graphs may still read.

    References are strong: a reserved table stays reserved for whoever asks next.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._modules: dict[Key, RotaryEmbedding] = {}
        self._pinned: dict[int, Tensor] = {}

    def fetch(self, config: RopeConfig, device: torch.device) -> RotaryEmbedding:
        """The live module of this key; built once, whatever the number of threads that ask."""
        module = self._modules.get((config, device))
        if module is not None and self._loss(module, device) is None:
            return module
        with self._lock:
            module = self._modules.get((config, device))
            reason = None if module is None else self._loss(module, device)
            if module is not None and reason is None:
                return module
            if reason:
                warnings.warn(
                    f"get_rope discards a dead entry for {config} on {device}: {reason}; a new "
                    "one is built, owners of the old one must fetch it again",
                    stacklevel=3,
                )
            capacity = 0 if module is None else module.capacity
            fresh = RotaryEmbedding(config, device, capacity)
            fresh._shared = True
            self._modules[config, device] = fresh
            return fresh

    @staticmethod
    def _loss(module: RotaryEmbedding, device: torch.device) -> str | None:
        """Why an entry must not be handed out: what killed it, "" where it was materialised."""
        table = module.table
        if table.device == device:
            return table.dead()
        # Built for meta and moved to a real device since: no longer an entry of meta construction.
        return "" if device.type == "meta" else f"its table is on {table.device}"

    def modules(self) -> list[RotaryEmbedding]:
        """Every module that is alive."""
        with self._lock:
            return [m for (_, d), m in self._modules.items() if self._loss(m, d) is None]

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """Keep storage alive until `unpin`: a captured graph holds addresses, not references."""
        with self._lock:
            self._pinned.update((id(tensor), tensor) for tensor in tensors)

    def unpin(self, tensors: Iterable[Tensor]) -> None:
        """Undo `pin`."""
        with self._lock:
            for tensor in tensors:
                self._pinned.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget every entry and pin; modules that owners hold go on working."""
        with self._lock:
            self._modules.clear()
            self._pinned.clear()


registry = Registry()


def live_tables() -> list[RopeTable]:
    """Every table that the registry would hand out, on real devices."""
    tables = [table for module in registry.modules() for table in module._tables()]
    return [table for table in tables if table.device.type != "meta"]


def get_rope(config: RopeConfig, device: torch.device | str | int | None = None) -> RotaryEmbedding:
    """The process-wide shared module for a configuration and a device; live, thread-safe.

    Equal configurations give the same object while it lives. A dead one (moved to meta, freed, made
    of fake tensors) is discarded with a warning that names it and what killed it, and a new one is
    built with at least its rows. Under ``with torch.device("meta")`` the layers of a model share a
    meta module, which is never handed out for a real device.

    Call it where a model is built. Inside compiled code it breaks the graph (and raises under
    ``fullgraph=True``): a table is never made from traced tensors.

    Args:
        config: which rotation.
        device: where; None means the default device.

    Raises:
        TypeError: config is no RopeConfig. RuntimeError: a module would have to be built while the
            current CUDA stream captures.
    """
    if not isinstance(config, RopeConfig):
        raise TypeError(
            f"config must be a RopeConfig, got {type(config).__name__}; "
            "see RopeConfig.from_transformers"
        )
    if torch.compiler.is_compiling():
        return _fetch_outside_the_graph(config, device)
    return registry.fetch(config, canonical_device(device))


def _fetch(config: RopeConfig, device: torch.device | str | int | None) -> RotaryEmbedding:
    return registry.fetch(config, canonical_device(device))


# Tables are never built from traced or fake tensors: Dynamo breaks the graph and runs this eagerly.
_fetch_outside_the_graph: Callable[..., RotaryEmbedding] = torch.compiler.disable(_fetch)
