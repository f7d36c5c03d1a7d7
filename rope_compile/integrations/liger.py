"""Signatures of ``liger_kernel.transformers``' rotary functions.

Liger's kernels overwrite the caller's q and k where ``transpose(1, 2)`` of them is contiguous (and
always do for Llama-4). Here the inputs are never changed; fresh tensors come back.

The tables are full width and read at half width: in these functions both channels of a pair always
hold the same value, which is what Liger's own kernels assume.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rope_compile.functional import apply_rope
from rope_compile.integrations._rows import both, rotate_rows
from rope_compile.integrations._tables import from_complex, from_full_width, from_halves, of_tokens

__all__ = [
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
]


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Half style, one table row for each token.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: as q with its own head count.
        cos: ``[1 or batch, seq, rotary_dim]`` or ``[seq, rotary_dim]``, gathered already.
        sin: as cos.
        position_ids: not needed, cos and sin are gathered.
        unsqueeze_dim: the head dimension of q and k: 1, or 2 for ``[batch, seq, heads, head_dim]``,
            as in transformers (Liger takes 1 for every value).
        rotary_dim: rotated channels, the first ones; None means the width of cos. Given, cos and
            sin may be half as wide, and only their first ``rotary_dim / 2`` columns are read.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_heads(q, unsqueeze_dim)
    width = cos.shape[-1] if rotary_dim is None else rotary_dim
    if width % 2 or not 0 <= width <= min(q.shape[-1], 2 * cos.shape[-1]):
        raise ValueError(
            f"rotary_dim must be even, at most head_dim = {q.shape[-1]} and twice the width of "
            f"cos, {cos.shape[-1]}, got {width}"
        )
    rows = from_halves(cos[..., : width // 2], sin[..., : width // 2])
    rows = rows.unsqueeze(-2 if unsqueeze_dim == 2 else -3)
    return both(rotate_rows(q, k, rows, "half", unsqueeze_dim))


def liger_rotary_pos_emb_gpt_oss(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`liger_rotary_pos_emb` for gpt-oss, whose cos and sin are ``[1 or batch, seq, head_dim /
    2]``."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Half style for vision towers: q, k ``[seq, heads, head_dim]``, cos, sin ``[seq,
    rotary_dim]``."""
    if q.dim() != 3:
        raise ValueError(f"q must be [seq, heads, head_dim], got {tuple(q.shape)}")
    rows = from_full_width(cos, sin, "half").unsqueeze(-2)
    return both(rotate_rows(q, k, rows, "half", -2))


def liger_multimodal_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Multimodal RoPE of Qwen2-VL: contiguous sections of lanes, one an axis.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: as q with its own head count.
        cos: ``[axes, 1 or batch, seq, rotary_dim]``, one table for each of time, height, width.
        sin: as cos.
        mrope_section: lanes of each axis, summing to ``rotary_dim / 2``.
        unsqueeze_dim: the head dimension of q and k, as of `liger_rotary_pos_emb`.

    Raises:
        ValueError: sections or shapes that do not fit.
    """
    _check_heads(q, unsqueeze_dim)
    if len(mrope_section) != cos.shape[0] or 2 * sum(mrope_section) != cos.shape[-1]:
        raise ValueError(
            f"mrope_section must share out {cos.shape[-1] // 2} lanes among {cos.shape[0]} axes, "
            f"got {list(mrope_section)} for cos of shape {tuple(cos.shape)}"
        )
    lanes = tuple(axis for axis, count in enumerate(mrope_section) for _ in range(count))
    table, positions = of_tokens(from_full_width(cos, sin, "half"))
    rotated = apply_rope(
        q.movedim(unsqueeze_dim, -2), k.movedim(unsqueeze_dim, -2), positions, table, axes=lanes
    )
    q_out, k_out = both(rotated)
    return q_out.movedim(-2, unsqueeze_dim), k_out.movedim(-2, unsqueeze_dim)


def liger_llama4_text_rotary_pos_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor
) -> tuple[Tensor, Tensor]:
    """Llama-4 text: interleaved style, complex rows.

    Args:
        xq: ``[batch, seq, heads, head_dim]``.
        xk: as xq with its own head count.
        freqs_cis: complex ``[1 or batch, seq, head_dim / 2]`` (or without the first dimension), or
            real with cos and sin side by side in the last. More rows than ``seq`` are fine. A batch
            of them is read as one (Liger takes the first entry for all).

    Raises:
        ValueError: shapes that do not fit.
    """
    return _rotate_llama4(xq, xk, _llama4_rows(freqs_cis))


def liger_llama4_vision_rotary_pos_emb(
    query: Tensor, key: Tensor, freqs_ci: Tensor
) -> tuple[Tensor, Tensor]:
    """Llama-4 vision: as the text form, with rows ``[patches, 1, head_dim / 2]`` for all
    images."""
    return _rotate_llama4(query, key, _llama4_rows(freqs_ci).flatten(0, -2))


def _llama4_rows(freqs: Tensor) -> Tensor:
    if freqs.is_complex():
        return from_complex(freqs)
    return from_halves(*freqs.chunk(2, dim=-1))


def _rotate_llama4(q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"freqs_cis must be complex [..., {q.shape[-1] // 2}], or real with cos and sin side "
            f"by side, got rows of {rows.shape[-1]} columns for head_dim {q.shape[-1]}; a complex "
            "buffer that was cast to a real dtype has lost its sines"
        )
    if rows.shape[-2] > 1:
        rows = rows[..., : q.shape[1], :]
    return both(rotate_rows(q, k, rows.unsqueeze(-2), "interleaved", 2))


def _check_heads(q: Tensor, unsqueeze_dim: int) -> None:
    if q.dim() != 4 or unsqueeze_dim not in (1, 2):
        raise ValueError(
            "q must have four dimensions and its heads in dimension 1 or 2, got "
            f"{tuple(q.shape)} and unsqueeze_dim {unsqueeze_dim}"
        )
