"""Signatures of ``quack.rotary``."""

from __future__ import annotations

from torch import Tensor

from rope_compile.integrations import flash_attn

__all__ = ["apply_rotary", "apply_rotary_emb"]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``quack.rotary.apply_rotary``: offsets before the flags, and None for no offsets.

    As `rope_compile.integrations.flash_attn.apply_rotary`, with any head_dim and rotary_dim.
    """
    return flash_attn.apply_rotary(
        x, cos, sin, 0 if seqlen_offsets is None else seqlen_offsets, cu_seqlens, max_seqlen,
        interleaved, inplace, conjugate,
    )  # fmt: skip


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``quack.rotary.apply_rotary_emb``: the flags before the offsets."""
    return apply_rotary(
        x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
    )  # fmt: skip
