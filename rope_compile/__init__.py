"""Rotary position embedding that ``torch.compile``, CUDA graphs and autograd can see through.

>>> import torch, rope_compile as rc
>>> rope = rc.get_rope(rc.RopeConfig(head_dim=64, max_position=4096))
>>> q, k = torch.randn(7, 8, 64), torch.randn(7, 2, 64)
>>> q, k = rope(torch.arange(7), q, k)

Importing registers the operators ``torch.ops.rope_compile.rope`` and ``rope_`` and does nothing
else: no Triton import, no CUDA initialisation, no patch of another library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rope_compile.axes import (
    AxialAxes,
    BailingAxes,
    ChunkedAxes,
    ErnieAxes,
    GlmAxes,
    InterleavedAxes,
    PanguAxes,
    XdropeAxes,
    context_parallel_positions,
    packed_context_parallel_positions,
    positions_from_cu_seqlens,
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
from rope_compile.selector import RopeSelector

if TYPE_CHECKING:
    from rope_compile import inductor, integrations

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
    "RopeSelector",
    "RotaryEmbedding",
    "XdropeAxes",
    "YarnScaling",
    "__version__",
    "apply_rope",
    "apply_rope_",
    "capture_guard",
    "context_parallel_positions",
    "debug",
    "get_rope",
    "inductor",
    "integrations",
    "packed_context_parallel_positions",
    "positions_from_cu_seqlens",
    "prepare_for_capture",
]

if not TYPE_CHECKING:
    # Hidden from the type checker, to which a module __getattr__ would make every name valid.
    def __getattr__(name: str) -> object:
        """Import on first use what looks for other frameworks or for the compiler."""
        if name in ("inductor", "integrations"):
            return importlib.import_module(f"rope_compile.{name}")
        raise AttributeError(f"module 'rope_compile' has no attribute {name!r}")
