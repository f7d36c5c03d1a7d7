"""Adapters for other packages, one module each; none of them is imported before it is named."""

from __future__ import annotations

import importlib
from types import ModuleType

_ADAPTERS = ("transformers",)

__all__ = ["transformers"]


def __getattr__(name: str) -> ModuleType:
    """``rope_compile.integrations.<name>``, imported on first use (PEP 562)."""
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"rope_compile.integrations has no adapter {name!r}; it has {', '.join(_ADAPTERS)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
