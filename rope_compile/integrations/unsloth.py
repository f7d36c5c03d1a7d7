"""Signature of ``unsloth.kernels.rope_embedding``."""

from __future__ import annotations

from torch import Tensor

from rope_compile.integrations._rows import both, rotate_rows, rows_at
from rope_compile.integrations._tables import from_full_width

__all__ = ["fast_rope_embedding"]


def fast_rope_embedding(
    Q: Tensor,
    K: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_embedding_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``fast_rope_embedding``, half style. Unsloth may overwrite Q and K; here they are unchanged.

    Args:
        Q: ``[batch, heads, seq, head_dim]``.
        K: as Q with its own head count.
        cos: ``[rows, head_dim]``, with any leading dimensions of size 1. Read at half width: both
            channels of a pair hold the same value, as unsloth's kernels assume.
        sin: as cos.
        rope_embedding_indices: int positions of the tokens, ``batch * seq`` of them; None counts
            from 0. One outside the table takes the nearest row.

    Raises:
        ValueError: shapes that do not fit, among them tables that differ between the sequences of a
        batch. TypeError: indices that are no integers.
    """
    if Q.dim() != 4:
        raise ValueError(f"Q must be [batch, heads, seq, head_dim], got {tuple(Q.shape)}")
    cos, sin = _rows("cos", cos), _rows("sin", sin)
    batch, _, seq, _ = Q.shape
    if rope_embedding_indices is None:
        if cos.shape[0] < seq:
            raise ValueError(f"cos must have a row for each of {seq} tokens, got {cos.shape[0]}")
        cos, sin = cos[:seq], sin[:seq]
    else:
        tokens = rope_embedding_indices.reshape(batch, 1, seq)
        cos, sin = (rows_at(x, tokens, "rope_embedding_indices") for x in (cos, sin))
    return both(rotate_rows(Q, K, from_full_width(cos, sin, "half"), "half", 1))


def _rows(name: str, table: Tensor) -> Tensor:
    if table.dim() < 2 or any(size != 1 for size in table.shape[:-2]):
        raise ValueError(
            f"{name} must be [rows, head_dim] with leading dimensions of 1, got "
            f"{tuple(table.shape)}; one table serves every sequence, rope_embedding_indices say "
            "which rows"
        )
    return table.reshape(table.shape[-2:])
