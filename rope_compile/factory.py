"""`get_rope` and the process-wide registry behind it: one live module per config and device.

NOTE [Compiled get_rope] Inside a compiled function the registry is asked while tracing, by a
function whose result Dynamo takes for a constant: the number of a slot. The traced code then reads
that slot itself, so the module has a source that Dynamo can guard on, and no graph breaks. The
config must come from outside the function: Dynamo cannot trace its validation, and breaks there.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec

import torch
from torch import Tensor

from rope_compile.config import RopeConfig
from rope_compile.module import RotaryEmbedding
from rope_compile.table import RopeTable, canonical_device

P = ParamSpec("P")
Key = tuple[RopeConfig, torch.device]
_META = torch.device("meta")


class Registry:
    """Modules by config and device, and storage that captured graphs may still read.

    References are strong: a reserved table stays reserved for whoever asks next.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers: dict[Key, int] = {}
        self.slots: dict[int, RotaryEmbedding] = {}
        # Built for meta and materialised while a real entry existed: alive with their models.
        self._released: weakref.WeakSet[RotaryEmbedding] = weakref.WeakSet()
        self._pinned: dict[int, Tensor] = {}
        self._guards: dict[int, list[RopeTable]] = {}

    def fetch(self, config: RopeConfig, device: torch.device) -> tuple[int, RotaryEmbedding]:
        """The live module of this key and its slot; built once, however many threads ask."""
        key = (config, device)
        number = self._numbers.get(key, -1)
        module = self.slots.get(number)
        # Without the lock: a hit never waits for a table that another thread is filling.
        if module is not None and module.device == device and module.table.dead() is None:
            return number, module
        with self._lock:
            reason = self._renew(key)
            number = self._numbers[key]
            module = self.slots[number]
        if reason is not None:
            warnings.warn(
                f"get_rope discards a dead entry for {config} on {device}: {reason}; a new one is "
                "built, owners of the old one must fetch it again",
                stacklevel=3,
            )
        return number, module

    def _renew(self, key: Key) -> str | None:
        """Leave a live module in the slot of ``key``; what killed the one before, if any was."""
        config, device = key
        self._release_materialised(config)
        module = self.slots.get(self._numbers.get(key, -1))
        reason = None if module is None else module.table.dead()
        if module is None or reason is not None:
            fresh = RotaryEmbedding(config, device, 0 if module is None else module.capacity)
            fresh._shared = True
            self._adopt(key, fresh)
        return reason

    def _adopt(self, key: Key, module: RotaryEmbedding) -> None:
        for table in module._tables():
            for held in self._guards.values():
                table.freeze()
                held.append(table)
        number = self._numbers.get(key, len(self._numbers))
        self.slots[number] = module
        self._numbers[key] = number

    def _release_materialised(self, config: RopeConfig) -> None:
        """What was built for meta and lives elsewhere now is no entry of meta construction."""
        number = self._numbers.get((config, _META), -1)
        module = self.slots.get(number)
        if module is None or module.device == _META:
            return
        del self.slots[number]
        key = (config, module.device)
        if self.slots.get(self._numbers.get(key, -1)) is None:
            self._adopt(key, module)
        else:
            self._released.add(module)

    def modules(self) -> list[RotaryEmbedding]:
        """Every module that is alive."""
        with self._lock:
            found = [*self.slots.values(), *self._released]
        return [module for module in found if module.table.dead() is None]

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """No table that is live here, or built inside, grows inside; all their storage is kept."""
        with self._lock:
            held = live_tables()
            for table in held:
                table.freeze()
            self._guards[id(held)] = held
        try:
            yield
        finally:
            with self._lock:
                del self._guards[id(held)]
                for table in held:
                    table.thaw()
                    if table.device != _META:
                        self.pin(table.pin())

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """Keep storage alive for good: a captured graph holds addresses, not references."""
        with self._lock:
            self._pinned.update((id(tensor), tensor) for tensor in tensors)

    def clear(self) -> None:
        """Forget every entry and pin; modules that owners hold go on working."""
        with self._lock:
            self._numbers.clear()
            self.slots.clear()
            self._released.clear()
            self._pinned.clear()


registry = Registry()


def live_tables() -> list[RopeTable]:
    """Every table that the registry would hand out, on real devices."""
    tables = [table for module in registry.modules() for table in module._tables()]
    return [table for table in tables if table.device != _META and table.dead() is None]


def constant_for_dynamo(function: Callable[P, int]) -> Callable[P, int]:
    """Decorator: traced code takes the result for a constant. See NOTE [Compiled get_rope].

    Sets what torch.compiler.assume_constant_result sets (torch 2.11 to 2.14). That itself imports
    all of Dynamo and Triton, 1.5 s that `import rope_compile` need not take. The compiled tests of
    tests/test_factory.py fail when the mark moves.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_dynamo
def slot_number(config: RopeConfig, device: torch.device | str | int | None) -> int:
    """The registry's slot of a live module."""
    return registry.fetch(config, canonical_device(device))[0]


def get_rope(config: RopeConfig, device: torch.device | str | int | None = None) -> RotaryEmbedding:
    """The process-wide shared module for a configuration and a device; live, thread-safe.

    Equal configurations give the same object while it lives. A dead one (moved to meta, freed, made
    of fake tensors) is discarded with a warning that names it and what killed it, and a new one is
    built with at least its rows. Under ``with torch.device("meta")`` the layers of a model share a
    meta module, which is never handed out for a real device.

    Inside a compiled function it works too, in one graph for a config that comes from outside the
    function; the table is ordinary all the same, never made of traced tensors.

    Args:
        config: which rotation.
        device: where; None means the default device.

    Raises:
        TypeError: config is no RopeConfig, or device no device. ValueError: this machine has no
            such device. RuntimeError: a module would have to be built while the current CUDA stream
            captures.
    """
    if not isinstance(config, RopeConfig):
        raise TypeError(
            f"config must be a RopeConfig, got {type(config).__name__}; "
            "see RopeConfig.from_transformers"
        )
    if torch.compiler.is_compiling():
        return registry.slots[slot_number(config, device)]
    return registry.fetch(config, canonical_device(device))[1]
