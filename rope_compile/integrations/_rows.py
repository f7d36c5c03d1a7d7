"""Rows of cos and sin applied where other packages have them: gathered, broadcast, heads anywhere.

Tables handed over by a call bring no frequencies with them, so a position outside such a table can
only take the nearest row. Nothing is read out of range, and nothing on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_compile.axes import Style
from rope_compile.functional import apply_rope
from rope_compile.integrations._tables import of_tokens

__all__ = ["both", "check_positions", "rotate_rows", "rows_at", "style_of"]


def style_of(interleaved: bool) -> Style:
    """The style that a flag ``interleaved`` (or ``not is_neox``) means."""
    return "interleaved" if interleaved else "half"


def both(rotated: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """What a rotation returns where k was given."""
    q, k = rotated
    assert k is not None
    return q, k


def check_positions(name: str, positions: Tensor) -> None:
    """Raise TypeError unless ``positions`` is an integer tensor; bytes would act as a mask."""
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")


def rows_at(values: Tensor, positions: Tensor, name: str = "positions") -> Tensor:
    """``values [rows, width]`` at each position, the nearest row for one outside.

    Returns:
        ``[*positions.shape, width]``.

    Raises:
        TypeError: ``name`` is not int32 or int64. ValueError: there are positions and no rows.
    """
    check_positions(name, positions)
    if values.shape[0] == 0 and positions.numel():
        raise ValueError(f"cos and sin must have at least one row, got {tuple(values.shape)}")
    return values[positions.clamp(0, values.shape[0] - 1)]


def rotate_rows(
    q: Tensor,
    k: Tensor | None,
    rows: Tensor,
    style: Style,
    heads: int,
    *,
    rotary_offset: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by rows that broadcast to them, in one launch.

    Args:
        q: any layout with head_dim last; ``heads`` is its head dimension.
        k: as q with its own head count, or None.
        rows: ``[..., rotary_dim]`` as of ``_tables``, broadcast to ``q.shape[:-1]``. Of size 1 in
            the head dimension they serve all heads; otherwise each head has its own.

    Returns:
        Fresh tensors of the shapes and dtypes of q and k, the head dimension where it was.

    Raises:
        ValueError: rows do not broadcast to q.
    """
    if rows.dim() > q.dim():
        raise ValueError(
            f"cos and sin must broadcast to {tuple(q.shape[:-1])}, got {tuple(rows.shape[:-1])}"
        )
    heads %= q.dim()
    rows = rows[(None,) * (q.dim() - rows.dim())]
    table, positions = of_tokens(rows)
    if rows.shape[heads] == 1:
        moved = [None if x is None else x.movedim(heads, -2) for x in (q, k)]
        positions = positions.squeeze(heads)
    else:  # every head is a token of its own
        moved = [None if x is None else x.unsqueeze(-2) for x in (q, k)]
    assert moved[0] is not None
    rotated = apply_rope(
        moved[0], moved[1], positions, table, style=style, rotary_offset=rotary_offset
    )
    if rows.shape[heads] == 1:
        q_out, k_out = (None if x is None else x.movedim(-2, heads) for x in rotated)
    else:
        q_out, k_out = (None if x is None else x.squeeze(-2) for x in rotated)
    assert q_out is not None
    return q_out, k_out
