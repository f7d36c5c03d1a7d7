"""Signature of ``fla.modules.rotary`` (flash-linear-attention)."""

from __future__ import annotations

from torch import Tensor

from rope_compile.integrations.flash_attn import apply_rotary

__all__ = ["rotary_embedding"]


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """``fla.modules.rotary.rotary_embedding``.

    As `rope_compile.integrations.flash_attn.apply_rotary_emb`, with packed sequences in a batch of
    one.

    Args:
        x: ``[batch, seq, heads, head_dim]``; ``[1, tokens, heads, head_dim]`` with ``cu_seqlens``.
        cos: ``[rows, rotary_dim / 2]``.
        sin: as cos.
        inplace: write x and return it.
        seqlen_offsets: position of the first token of each sequence, int or int ``[sequences]``.
            Tokens at negative positions (left padding) take row 0, which is the identity.
        cu_seqlens: int ``[sequences + 1]``.
        chunk_indices: not needed.

    Raises:
        ValueError: shapes that do not fit. TypeError: a dtype.
    """
    return apply_rotary(
        x, cos, sin, seqlen_offsets, cu_seqlens, interleaved=interleaved, inplace=inplace
    )
