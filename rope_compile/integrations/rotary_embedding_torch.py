"""Signatures of ``rotary_embedding_torch`` (lucidrains).

Interleaved pairs; angles ``[..., rotary_dim]`` in radians, each twice in a row, which are read at
half width. cos and sin are taken in float32 (float64 angles in float64, rounded to float32).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.integrations._rows import rotate_rows
from rope_compile.integrations._tables import from_halves
from rope_compile.scaling import DefaultScaling, LinearScaling

__all__ = ["RotaryEmbedding", "apply_rotary_emb"]


def apply_rotary_emb(
    freqs: Tensor,
    t: Tensor,
    start_index: int = 0,
    scale: float | Tensor = 1.0,
    seq_dim: int = -2,
    freqs_seq_dim: int | None = None,
) -> Tensor:
    """``apply_rotary_emb``: the angles come first.

    Args:
        freqs: angles that broadcast to ``t[..., :rotary_dim]``, such as ``[seq, rotary_dim]`` for
            ``[batch, heads, seq, head_dim]`` or ``[height, width, rotary_dim]`` for
            ``[..., height, width, head_dim]``.
        t: any layout with head_dim last.
        start_index: first rotated channel.
        scale: multiplied into cos and sin; a tensor as the angles that are used (xPos), each
            value twice in a row.
        seq_dim: the sequence in t; the last ``t.shape[seq_dim]`` angles are used where
            ``freqs_seq_dim`` is given, or freqs has two dimensions, or t three.
        freqs_seq_dim: the sequence in freqs.

    Returns:
        A fresh tensor of t's shape and dtype.

    Raises:
        ValueError: shapes that do not fit, or angles that require grad (learned ones are not
        offered).
    """
    if freqs_seq_dim is None and (freqs.dim() == 2 or t.dim() == 3):
        freqs_seq_dim = 0
    if freqs_seq_dim is not None:  # the scale is for the angles that remain, and never cut
        length = freqs.shape[freqs_seq_dim]
        first = max(length - t.shape[seq_dim], 0)
        freqs = freqs.narrow(freqs_seq_dim, first, length - first)
    rows = from_halves(*_halve(freqs, scale))
    return rotate_rows(
        t, None, rows, "interleaved", _shared_dim(t, rows), rotary_offset=start_index
    )[0]


def _halve(freqs: Tensor, scale: float | Tensor) -> list[Tensor]:
    """cos and sin of every other angle, times the scale."""
    half = freqs[..., ::2].to(torch.promote_types(freqs.dtype, torch.float32))
    if isinstance(scale, Tensor) and scale.dim():
        scale = scale[..., ::2]
    cos, sin = half.cos() * scale, half.sin() * scale
    return [cos, sin]


def _shared_dim(t: Tensor, rows: Tensor) -> int:
    """A dimension of t whose entries share rows, the innermost one; the last if there is none."""
    for dim in range(2, t.dim() + 1):
        if dim > rows.dim() or rows.shape[-dim] == 1:
            return -dim
    return -2


class RotaryEmbedding(nn.Module):
    """``RotaryEmbedding`` with language frequencies, on the shared table of `get_rope`.

    Every position is right, in particular ``offset`` past ``cache_max_seq_len``; ``forward`` and
    the others assign nothing.

    Args:
        dim: rotated channels, the first ones of head_dim.
        custom_freqs: None; see Raises.
        freqs_for: ``"lang"``, or ``"pixel"`` for `get_axial_freqs` alone.
        theta: base.
        max_freq: of ``"pixel"``.
        num_freqs: of ``"constant"``, which is not offered.
        learned_freq: False; see Raises.
        use_xpos: False; see Raises.
        xpos_scale_base: of xPos.
        interpolate_factor: positions are divided by it.
        theta_rescale_factor: theta is multiplied by it to the power ``dim / (dim - 2)`` (NTK).
        seq_before_head_dim: ``[batch, seq, heads, head_dim]`` by default instead of
            ``[batch, heads, seq, head_dim]``.
        cache_if_possible: not needed, there is always a table.
        cache_max_seq_len: rows of the table.

    Raises:
        NotImplementedError: custom, constant or learned frequencies, or xPos; `apply_rotary_emb`
        takes any angles that do not require grad.
    """

    def __init__(
        self,
        dim: int,
        custom_freqs: Tensor | None = None,
        freqs_for: Literal["lang", "pixel"] = "lang",
        theta: float = 10000,
        max_freq: float = 10,
        num_freqs: int = 1,
        learned_freq: bool = False,
        use_xpos: bool = False,
        xpos_scale_base: int = 512,
        interpolate_factor: float = 1.0,
        theta_rescale_factor: float = 1.0,
        seq_before_head_dim: bool = False,
        cache_if_possible: bool = True,
        cache_max_seq_len: int = 8192,
    ) -> None:
        super().__init__()
        for name, bad in (
            ("custom_freqs must be None", custom_freqs is not None),
            ("freqs_for must be 'lang' or 'pixel'", freqs_for not in ("lang", "pixel")),
            ("learned_freq must be False", learned_freq),
            ("use_xpos must be False", use_xpos),
        ):
            if bad:
                raise NotImplementedError(
                    f"{name}, got another value; hand such angles to apply_rotary_emb"
                )
        self.freqs_for, self.max_freq = freqs_for, max_freq
        self.interpolate_factor = interpolate_factor
        self.default_seq_dim = -3 if seq_before_head_dim else -2
        if theta_rescale_factor != 1:
            theta = theta * theta_rescale_factor ** (dim / (dim - 2))
        self.rope = get_rope(
            RopeConfig(
                head_dim=dim,
                max_position=cache_max_seq_len,
                base=theta,
                style="interleaved",
                scaling=LinearScaling(factor=interpolate_factor)
                if interpolate_factor != 1
                else DefaultScaling(),
            )
        )

    def rotate_queries_or_keys(
        self,
        t: Tensor,
        seq_dim: int | None = None,
        offset: int = 0,
        scale: float | Tensor | None = None,
    ) -> Tensor:
        """Rotate ``t``, whose first token is at ``offset``.

        Args:
            t: ``[..., heads, seq, head_dim]`` or ``[..., seq, head_dim]``; for ``seq_dim`` -3
                ``[..., seq, heads, head_dim]``.
            seq_dim: -2 or -3 (or that counted from the front); None means the default of the
                module.
            offset: position of the first token.
            scale: multiplies the result's rotated channels; a tensor broadcasts to them.
        """
        if scale is not None:
            return self._rotate_scaled(t, seq_dim, offset, scale)
        sequence = self.default_seq_dim if seq_dim is None else seq_dim
        sequence = sequence - t.dim() if sequence >= 0 else sequence
        if sequence not in (-2, -3) or t.dim() < -sequence:
            raise ValueError(f"seq_dim must be -2 or -3 of t, got {seq_dim} for {tuple(t.shape)}")
        self._check_language()
        positions = torch.arange(t.shape[sequence], device=t.device) + offset
        rotated: Tensor
        if sequence == -3:
            rotated = self.rope(positions, t)[0]
        elif t.dim() == 2:
            rotated = self.rope(positions, t.unsqueeze(-2))[0].squeeze(-2)
        else:
            rotated = self.rope(positions, t.transpose(-2, -3))[0].transpose(-2, -3)
        return rotated

    def _rotate_scaled(
        self, t: Tensor, seq_dim: int | None, offset: int, scale: float | Tensor
    ) -> Tensor:
        """In float32 or wider, rounded once, after the scale."""
        wide = t.to(torch.promote_types(t.dtype, torch.float32))
        rotated = self.rotate_queries_or_keys(wide, seq_dim, offset)
        width = self.rope.config.rotary_dim
        parts = rotated[..., :width] * scale, rotated[..., width:]
        return torch.cat(parts, dim=-1).to(t.dtype)

    def rotate_queries_with_cached_keys(
        self, q: Tensor, k: Tensor, seq_dim: int | None = None, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Rotate the last queries of a sequence and all its keys.

        The first query is at ``k_len - q_len + offset``, the first key at 0.

        Raises:
            ValueError: more queries than keys.
        """
        sequence = self.default_seq_dim if seq_dim is None else seq_dim
        start = k.shape[sequence] - q.shape[sequence]
        if start < 0:
            raise ValueError(
                f"q must not be longer than k, got {q.shape[sequence]} and {k.shape[sequence]}"
            )
        return (
            self.rotate_queries_or_keys(q, seq_dim, start + offset),
            self.rotate_queries_or_keys(k, seq_dim),
        )

    def forward(self, t: Tensor) -> Tensor:
        """Angles ``[..., dim]`` of the positions ``t`` (divided by ``interpolate_factor`` already,
        as in the package), each twice in a row."""
        return (t[..., None].to(torch.float32) * self._freqs(t.device)).repeat_interleave(2, -1)

    def get_axial_freqs(
        self, *dims: int, offsets: tuple[float, ...] | Tensor | None = None
    ) -> Tensor:
        """Angles ``[*dims, len(dims) * dim]`` of a grid, for `apply_rotary_emb`.

        Positions count from 0 (``"pixel"``: from -1 to 1), plus the offset of each axis.

        Raises:
            ValueError: not one offset for each axis.
        """
        if offsets is not None and len(offsets) != len(dims):
            raise ValueError(f"offsets must have {len(dims)} entries, got {len(offsets)}")
        device = self.rope.device
        axes = []
        for axis, size in enumerate(dims):
            if self.freqs_for == "pixel":
                positions = torch.linspace(-1, 1, size, device=device)
            else:
                positions = torch.arange(size, device=device)
            if offsets is not None:
                positions = positions + offsets[axis]
            shape = [1] * len(dims)
            shape[axis] = size
            axes.append(self.forward(positions).reshape(*shape, -1).expand(*dims, -1))
        return torch.cat(axes, dim=-1)

    def _freqs(self, device: torch.device) -> Tensor:
        """float32 ``[dim / 2]`` on ``device``, before interpolation."""
        if self.freqs_for == "pixel":
            half = self.rope.config.rotary_dim // 2
            return torch.linspace(1.0, self.max_freq / 2, half, device=device) * math.pi
        return self.rope.inv_freq.to(device) * self.interpolate_factor

    def _check_language(self) -> None:
        if self.freqs_for != "lang":
            raise ValueError(
                f"freqs_for must be 'lang' to rotate by position, got {self.freqs_for!r}; use "
                "get_axial_freqs and apply_rotary_emb"
            )
