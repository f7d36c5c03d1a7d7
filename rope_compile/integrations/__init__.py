"""Adapters for other packages, one module each; none of them is imported before it is named."""

from __future__ import annotations

import importlib
from types import ModuleType

_ADAPTERS = (
    "aiter",
    "diffusers",
    "fla",
    "flash_attn",
    "flashinfer",
    "liger",
    "quack",
    "rotary_embedding_torch",
    "sglang",
    "torch_nn",
    "torchtitan",
    "torchtune",
    "transformer_engine",
    "transformers",
    "unsloth",
    "vllm",
)

__all__ = list(_ADAPTERS)  # the names are modules, imported when first asked for


def __getattr__(name: str) -> ModuleType:
    """``rope_compile.integrations.<name>``, imported on first use (PEP 562)."""
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"rope_compile.integrations has no adapter {name!r}; it has {', '.join(_ADAPTERS)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
