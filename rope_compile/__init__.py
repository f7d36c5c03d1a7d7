"""Rotary position embedding that ``torch.compile``, CUDA graphs and autograd can see through.

>>> import torch, rope_compile as rc
>>> rope = rc.get_rope(rc.RopeConfig(head_dim=128, max_position=8192, base=500_000.0))
>>> q, k = rope(torch.arange(77), torch.randn(1, 77, 32, 128), torch.randn(1, 77, 8, 128))

Importing registers the operators and does nothing else: no Triton, no CUDA, no patching.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from rope_compile.axes import (
    AxialAxes,
    BailingAxes,
    ChunkedAxes,
    ErnieAxes,
    GlmAxes,
    InterleavedAxes,
    PanguAxes,
    XdropeAxes,
)
from rope_compile.capture import CapturePlan, capture_guard, prepare_for_capture
from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.functional import apply_rope, apply_rope_, debug
from rope_compile.module import RotaryEmbedding
from rope_compile.scaling import (
    DeepseekYarnScaling,
    DefaultScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkAlphaScaling,
    NtkScaling,
    ProportionalScaling,
    YarnScaling,
)

__version__ = "0.1.0"

__all__ = [
    "AxialAxes",
    "BailingAxes",
    "CapturePlan",
    "ChunkedAxes",
    "DeepseekYarnScaling",
    "DefaultScaling",
    "DynamicScaling",
    "ErnieAxes",
    "GlmAxes",
    "InterleavedAxes",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NtkAlphaScaling",
    "NtkScaling",
    "PanguAxes",
    "ProportionalScaling",
    "RopeConfig",
    "RotaryEmbedding",
    "XdropeAxes",
    "YarnScaling",
    "apply_rope",
    "apply_rope_",
    "capture_guard",
    "debug",
    "get_rope",
    "integrations",
    "prepare_for_capture",
]


def __getattr__(name: str) -> ModuleType:
    # Adapters load on first use: none of their frameworks is needed to import this package.
    if name == "integrations":
        return importlib.import_module("rope_compile.integrations")
    raise AttributeError(f"module 'rope_compile' has no attribute {name!r}")
