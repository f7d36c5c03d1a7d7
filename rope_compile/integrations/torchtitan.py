"""Signatures of ``torchtitan.models.common.rope``, of its module and of its functions.

Older torchtitan calls ``apply_rotary_emb_*`` with the module's ``cache``; newer calls the module
with query and key. Both are here, and ``MRoPE`` of its Qwen vision models. Tables of the modules
are the shared ones of `rope_compile.get_rope` (``.rope``), right for every position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn

from rope_compile.axes import Axes, InterleavedAxes, Style
from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.integrations._rows import both, rotate_rows, rows_at
from rope_compile.integrations._tables import from_complex, from_full_width
from rope_compile.scaling import DefaultScaling, Llama3Scaling, Scaling, YarnScaling

__all__ = [
    "ComplexRoPE",
    "CosSinRoPE",
    "MRoPE",
    "MRoPEConfig",
    "RoPE",
    "RoPEConfig",
    "apply_rotary_emb_complex",
    "apply_rotary_emb_cos_sin",
    "apply_rotary_emb_single_complex",
]

Backend = Literal["complex", "cos_sin"]


@dataclass(kw_only=True, slots=True)
class RoPEConfig:
    """``RoPE.Config``. A config object of torchtitan's own does as well.

    ``backend="complex"`` rotates interleaved pairs, ``"cos_sin"`` pairs ``(i, i + dim / 2)``.
    ``"yarn"`` is one rotation for both, without a magnitude: torchtitan 0.3 leaves that to the
    softmax scale. ``truncate=False`` is gpt-oss's. Older torchtitan multiplied a magnitude into cos
    and sin of ``"cos_sin"``, and read ``beta_fast`` and ``beta_slow`` the other way round there,
    which is refused here.
    """

    dim: int
    max_seq_len: int
    theta: float = 10000.0
    backend: Backend = "complex"
    scaling: Literal["none", "llama", "yarn"] = "none"
    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rope_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_seq_len: int = 4096
    truncate: bool = True


class RoPE(nn.Module):
    """``RoPE(config)``; ``forward(query, key, positions=None)``.

    Args:
        config: a `RoPEConfig` (``RoPE.Config``), or torchtitan's own.

    Raises:
        ValueError: a config that names no known scaling. NotImplementedError: ``"llama"`` scaling
        with ``"cos_sin"``, as in torchtitan.
    """

    Config = RoPEConfig
    _backend: Backend | None = None  # None: what the config says

    def __init__(self, config: RoPEConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: Backend = self._backend or config.backend
        self.rope = get_rope(
            RopeConfig(
                head_dim=config.dim,
                max_position=config.max_seq_len,
                base=config.theta,
                style=_style(self.backend),
                scaling=_scaling(config, self.backend),
                axes=self._axes(config),
            )
        )

    def _axes(self, config: RoPEConfig) -> Axes | None:
        return None

    @property
    def cache(self) -> Tensor:
        """The table as torchtitan has it, a copy: complex64 ``[rows, dim / 2]``, or ``[rows, 2 *
        dim]`` with cos and sin at full width side by side."""
        cos, sin = self.rope.cos_sin_cache.chunk(2, dim=-1)
        if self.backend == "complex":
            return torch.complex(cos, sin)
        return torch.cat((cos, cos, sin, sin), dim=-1)

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key in one launch.

        Args:
            query: ``[batch, seq, heads, dim]`` or ``[tokens, heads, dim]``.
            key: as query with its own head count.
            positions: int ``[1 or batch, seq]`` or ``[seq]``, any value; None counts from 0.
        """
        if positions is None:
            positions = torch.arange(query.shape[-3], device=query.device)
        return both(self.rope(positions, query, key))

    def apply_rotary_emb(
        self, query: Tensor, key: Tensor, rope_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply rows of `cache` that broadcast to both: ``[1 or batch, seq, 1, width]``."""
        rows = _rows(rope_cache, self.backend)
        return both(rotate_rows(query, key, rows, _style(self.backend), -2))


class ComplexRoPE(RoPE):
    """`RoPE` with interleaved pairs, whatever the config says."""

    _backend = "complex"


class CosSinRoPE(RoPE):
    """`RoPE` with pairs ``(i, i + dim / 2)``, whatever the config says."""

    _backend = "cos_sin"


@dataclass(kw_only=True, slots=True)
class MRoPEConfig(RoPEConfig):
    """``MRoPE.Config``: ``mrope_section`` are the lanes of time, height and width."""

    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])


class MRoPE(CosSinRoPE):
    """`CosSinRoPE` with positions of time, height and width, which take turns over the lanes
    (Qwen3-VL, Qwen3.5).

    Raises:
        ValueError: ``mrope_section`` that is not three counts which sum to ``dim / 2``.
    """

    Config = MRoPEConfig

    def _axes(self, config: RoPEConfig) -> Axes | None:
        return InterleavedAxes(tuple(cast(MRoPEConfig, config).mrope_section))

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key in one launch.

        Args:
            query: ``[batch, seq, heads, dim]`` or ``[tokens, heads, dim]``.
            key: as query with its own head count.
            positions: int ``[1 or batch, seq, 3]`` or ``[tokens, 3]``, the axis last: one dimension
                less than query. With two less they are those of `RoPE`, the same for the three axes
                (text).

        Raises:
            ValueError: as many dimensions, and not three positions for each token.
        """
        if positions is None:
            positions = torch.arange(query.shape[-3], device=query.device)
        if positions.dim() < query.dim() - 1:
            positions = positions.unsqueeze(0)
        elif positions.shape[-1] == 3:
            positions = positions.movedim(-1, 0)
        else:
            raise ValueError(
                "positions must be [*tokens, 3], the axis last, or [*tokens], got "
                f"{tuple(positions.shape)}; move the axis of [3, *tokens] with movedim(0, -1)"
            )
        return super().forward(query, key, positions)


def apply_rotary_emb_complex(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Interleaved pairs, complex rows.

    Args:
        xq: ``[batch, seq, heads, head_dim]``.
        xk: as xq with its own head count.
        freqs_cis: complex ``[rows, head_dim / 2]``.
        positions: int ``[1 or batch, seq]``; None counts from 0. One outside the rows takes the
            nearest.

    Raises:
        ValueError: fewer rows than tokens, or shapes that do not fit. TypeError: a dtype.
    """
    return both(_apply(xq, xk, freqs_cis, positions, "complex"))


def apply_rotary_emb_single_complex(
    x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> Tensor:
    """`apply_rotary_emb_complex` for one tensor (DeepSeek-V3's MLA)."""
    return _apply(x, None, freqs_cis, positions, "complex")[0]


def apply_rotary_emb_cos_sin(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pairs ``(i, i + head_dim / 2)``, rows ``[rows, 2 * head_dim]`` of cos then sin at full width.

    Read at half width: both halves of each are equal, as `RoPE` builds them. Else as
    `apply_rotary_emb_complex`.
    """
    return both(_apply(xq, xk, rope_cache, positions, "cos_sin"))


def _apply(
    q: Tensor, k: Tensor | None, cache: Tensor, positions: Tensor | None, backend: Backend
) -> tuple[Tensor, Tensor | None]:
    seq = q.shape[-3]
    if positions is not None:
        cache = rows_at(cache, positions)
    elif cache.shape[0] < seq:
        raise ValueError(
            f"the table must have a row for each of {seq} tokens, got {cache.shape[0]}"
        )
    else:
        cache = cache[:seq]
    return rotate_rows(q, k, _rows(cache, backend).unsqueeze(-2), _style(backend), -2)


def _rows(cache: Tensor, backend: Backend) -> Tensor:
    if backend == "complex":
        return from_complex(cache)
    cos, sin = cache.chunk(2, dim=-1)
    return from_full_width(cos, sin, "half")


def _style(backend: Backend) -> Style:
    return "interleaved" if backend == "complex" else "half"


def _scaling(config: RoPEConfig, backend: Backend) -> Scaling:
    if config.scaling == "llama" and backend == "complex":
        return Llama3Scaling(
            factor=config.scaling_factor,
            low_freq_factor=config.low_freq_factor,
            high_freq_factor=config.high_freq_factor,
            original_max_position=config.original_max_position_embeddings,
        )
    if config.scaling == "llama":
        raise NotImplementedError("scaling must not be 'llama' with backend 'cos_sin', got it")
    if config.scaling not in ("none", "yarn"):
        raise ValueError(
            f"config.scaling must be 'none', 'llama' or 'yarn', got {config.scaling!r}"
        )
    if config.scaling == "yarn" and config.rope_factor > 1:
        return YarnScaling(
            factor=config.rope_factor,
            original_max_position=config.original_seq_len,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            attention_factor=1.0,
            truncate=config.truncate,
        )
    return DefaultScaling()
