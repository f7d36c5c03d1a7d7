"""Signatures of ``transformer_engine.pytorch.attention.rope``.

``freqs`` are angles in radians ``[rows, 1, 1, rotary_dim]``, full width, read at half width: both
channels of a pair hold the same angle, as ``RotaryPositionEmbedding`` there builds them. cos and
sin are taken in float32 and never rounded to the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from rope_compile.axes import (
    context_parallel_positions,
    packed_context_parallel_positions,
    positions_from_cu_seqlens,
)
from rope_compile.functional import apply_rope
from rope_compile.integrations._rows import check_positions, rows_at, style_of
from rope_compile.integrations._tables import from_angles, of_tokens

__all__ = ["apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]

TensorFormat = Literal["sbhd", "bshd", "thd"]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: TensorFormat = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``apply_rotary_pos_emb``: one tensor, angles instead of a table.

    Args:
        t: ``[seq, batch, heads, head_dim]``, ``[batch, seq, heads, head_dim]`` or ``[tokens, heads,
            head_dim]``, as ``tensor_format`` says.
        freqs: angles ``[rows, 1, 1, rotary_dim]``, ``rotary_dim <= head_dim``.
        start_positions: int ``[batch]``, the position of the first token of each sequence. One that
            leads past the rows takes the last row.
        interleaved: pairs ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``.
        fused: both values do the same.
        cu_seqlens: int ``[batch + 1]``, needed for ``thd``; with ``cp_size`` those of the whole
            padded batch, each length a multiple of ``2 * cp_size``.
        cp_size: ranks of context parallelism; t then holds the zig-zag tokens of one of them.
        cp_rank: which.

    Returns:
        A fresh contiguous tensor of t's shape and dtype.

    Raises:
        ValueError: shapes that do not fit, fewer rows than positions, or ``start_positions`` with
            ``cp_size`` above 1.
    """
    positions = _positions(
        t, tensor_format, freqs, start_positions, cu_seqlens, cp_size, cp_rank
    )  # fmt: skip
    table, tokens = _table(freqs, positions, interleaved)
    return apply_rope(t, None, tokens, table, style=style_of(interleaved))[0]


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: TensorFormat = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k out of a packed projection: one launch where both have the same angles.

    Args:
        qkv: ``[seq, batch, groups, sum(qkv_split_arg_list)]`` (``bshd``: batch first; ``thd``:
            ``[tokens, groups, ...]``): for each group its q heads, then one k and one v head.
        q_freqs: angles for q, as of `apply_rotary_pos_emb`; others as there.
        k_freqs: angles for k; the same tensor makes it one launch.
        qkv_split_arg_list: widths of q, k and v; that of k is the head_dim, which divides that
            of q.

    Returns:
        q ``[seq, batch, heads, head_dim]``, k and v ``[seq, batch, groups, head_dim]``. q and k are
        fresh; v is a view of ``qkv``.

    Raises:
        ValueError: shapes that do not fit, else as `apply_rotary_pos_emb`.
    """
    widths = list(qkv_split_arg_list)
    if len(widths) != 3 or sum(widths) != qkv.shape[-1] or widths[0] % max(widths[1], 1):
        raise ValueError(
            "qkv_split_arg_list must be the widths of q (a multiple of that of k), k and v, which "
            f"sum to {qkv.shape[-1]}, got {widths}"
        )
    q, k, v = qkv.split(widths, dim=-1)
    *tokens, groups, head_dim = k.shape
    # One token dimension and a dimension of groups: any number of q heads beside one k head.
    q = q.reshape(-1, groups, widths[0] // head_dim, head_dim)
    k = k.reshape(-1, groups, 1, head_dim)
    style = style_of(interleaved)

    def rows(freqs: Tensor) -> tuple[Tensor, Tensor]:
        positions = _positions(
            qkv, tensor_format, freqs, start_positions, cu_seqlens, cp_size, cp_rank
        )
        table, at = _table(freqs, positions, interleaved)
        return table, at.expand(tokens).reshape(-1, 1)

    table, at = rows(q_freqs)
    if k_freqs is q_freqs:
        q_out, k_out = apply_rope(q, k, at, table, style=style)
    else:
        q_out, _ = apply_rope(q, None, at, table, style=style)
        table, at = rows(k_freqs)
        k_out, _ = apply_rope(k, None, at, table, style=style)
    assert k_out is not None  # k was given
    return q_out.reshape(*tokens, -1, head_dim), k_out.reshape(*tokens, groups, head_dim), v


def _table(freqs: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """A table of the rows at ``positions``, and the positions to read it by."""
    half = freqs.shape[-1] // 2
    angles = freqs[:, 0, 0, ::2] if interleaved else freqs[:, 0, 0, :half]
    return of_tokens(from_angles(rows_at(angles, positions)))


def _positions(
    t: Tensor,
    tensor_format: str,
    freqs: Tensor,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Positions that broadcast to the token dimensions of t."""
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[3] % 2:
        raise ValueError(f"freqs must be angles [rows, 1, 1, rotary_dim], got {tuple(freqs.shape)}")
    if tensor_format not in get_args(TensorFormat):
        raise ValueError(
            f"tensor_format must be one of {list(get_args(TensorFormat))}, got {tensor_format!r}"
        )
    if start_positions is not None:
        check_positions("start_positions", start_positions)
        if cp_size > 1:
            raise ValueError(f"start_positions must be None with cp_size {cp_size}, got some")
    if tensor_format == "thd":
        return _packed_positions(t.shape[0], start_positions, cu_seqlens, cp_size, cp_rank)
    length = t.shape[0 if tensor_format == "sbhd" else 1]
    if length * cp_size > freqs.shape[0]:
        raise ValueError(
            f"freqs must have a row for each of {length * cp_size} positions, got "
            f"{tuple(freqs.shape)}; build it longer"
        )
    if cp_size > 1:
        positions = context_parallel_positions(
            length * cp_size, rank=cp_rank, ranks=cp_size, device=t.device
        )
    else:
        positions = torch.arange(length, device=t.device)
    if start_positions is not None:
        positions = positions + start_positions[:, None]  # [batch, seq]
        return positions if tensor_format == "bshd" else positions.T
    return positions if tensor_format == "bshd" else positions[:, None]


def _packed_positions(
    tokens: int,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given with tensor_format 'thd', got None")
    if cp_size == 1:
        return positions_from_cu_seqlens(cu_seqlens, tokens, starts=start_positions)
    return packed_context_parallel_positions(
        cu_seqlens, tokens * cp_size, rank=cp_rank, ranks=cp_size
    )[1]
