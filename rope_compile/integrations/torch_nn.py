"""Signatures proposed for ``torch.nn`` (pytorch PR #187286, open when this was written)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.integrations._rows import rotate_rows, rows_at, style_of
from rope_compile.integrations._tables import from_halves

__all__ = ["RotaryEmbedding", "rotary_embedding"]


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """``torch.nn.functional.rotary_embedding`` of the pull request.

    Args:
        x: ``[batch, heads, seq, head_dim]``.
        cos: ``[rows, head_dim / 2]`` with ``position_ids``, else anything that broadcasts to
            ``[batch, heads, seq, head_dim / 2]``.
        sin: as cos.
        position_ids: int ``[batch, seq]`` rows of cos and sin; one outside takes the nearest row.
        interleaved: pairs ``(2i, 2i + 1)`` instead of ``(i, i + head_dim / 2)``.

    Raises:
        ValueError: shapes that do not fit. TypeError: a dtype.
    """
    if x.dim() != 4 or 2 * cos.shape[-1] != x.shape[-1]:
        raise ValueError(
            "x must be [batch, heads, seq, head_dim] and cos half as wide, got "
            f"{tuple(x.shape)} and {tuple(cos.shape)}"
        )
    if position_ids is not None:
        if cos.dim() != 2:
            raise ValueError(
                f"cos must be [rows, head_dim / 2] with position_ids, got {tuple(cos.shape)}"
            )
        tokens = position_ids.unsqueeze(-2)  # the same for every head
        cos, sin = (rows_at(part, tokens, "position_ids") for part in (cos, sin))
    return rotate_rows(x, None, from_halves(cos, sin), style_of(interleaved), 1)[0]


class RotaryEmbedding(nn.Module):
    """``torch.nn.RotaryEmbedding(dim, max_seq_len=2048, base=10000)`` of the pull request.

    The table is the shared one of `rope_compile.get_rope` (``.rope``), right for every position.

    Args:
        dim: head_dim.
        max_seq_len: rows of the table.
        base: theta.
        interleaved: as of `rotary_embedding`.
        device: of the table; None means the default device.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 2048,
        base: float = 10000,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rope = get_rope(
            RopeConfig(
                head_dim=dim, max_position=max_seq_len, base=base, style=style_of(interleaved)
            ),
            device,
        )

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Rotate ``x [batch, heads, seq, dim]`` at ``position_ids [batch, seq]``, or 0, 1, 2, ...

        Any int32 or int64 position is right.
        """
        if position_ids is None:
            position_ids = torch.arange(x.shape[-2], device=x.device)
        rotated, _ = self.rope(position_ids, x.transpose(1, 2))
        return rotated.transpose(1, 2)  # type: ignore[no-any-return]
