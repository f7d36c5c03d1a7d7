"""The serving packages' rotation from its formulas, and packed tensors to write in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oracle import oracle_rows
from peer_formulas import assert_rotated
from support import randn

__all__ = ["Packed", "assert_calls_rotate", "frequencies", "packed_qkv", "rows", "table"]


def frequencies(width: int, base: float) -> Tensor:
    """``1 / base^(2i / width)``, float32, as every peer writes it."""
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def rows(
    positions: Tensor, inv_freq: Tensor, m: float = 1.0, lane_axes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[*tokens, 1, lanes]``, of each token, for all of its heads."""
    pair = oracle_rows(positions, inv_freq, attention_scaling=m, lane_axes=lane_axes)
    cos, sin = (torch.from_numpy(row).unsqueeze(-2) for row in pair)
    return cos, sin


def table(length: int, inv_freq: Tensor) -> Tensor:
    """``[length, width]``, cos half then sin half, as a peer keeps it."""
    cos, sin = rows(torch.arange(length), inv_freq)
    return torch.cat((cos, sin), dim=-1).squeeze(-2).float()


class Packed(NamedTuple):
    """q, k and v as slices of one projection, which tells whether anything else was written."""

    base: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def assert_only_rotated(
        self, before: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, first: int = 0
    ) -> None:
        """q and k are the rotated ones of ``before`` (a clone of base), v is as it was."""
        old = split(before, self.q.shape[1], self.k.shape[1], self.q.shape[2])
        for new, x in ((self.q, old.q), (self.k, old.k)):
            assert_rotated(new, x, cos, sin, interleaved=interleaved, first=first)
        assert torch.equal(self.v, old.v)


def split(base: Tensor, heads: int, kv_heads: int, head_dim: int) -> Packed:
    flat = base[:, :-3]  # three columns of something else: an odd stride
    q, k, v = (
        part.unflatten(-1, (-1, head_dim))
        for part in flat.split([n * head_dim for n in (heads, kv_heads, kv_heads)], dim=-1)
    )
    return Packed(base, q, k, v)


def packed_qkv(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Packed:
    """Slices ``[tokens, heads, head_dim]`` whose neighbours must stay as they are."""
    base = randn(tokens, (heads + 2 * kv_heads) * head_dim + 3, seed=3, dtype=dtype)
    packed = split(base, heads, kv_heads, head_dim)
    assert not packed.q.is_contiguous()
    return packed


def assert_calls_rotate(
    call: object, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> None:
    """``call(positions, q, k)`` rotates flat and headed ones, into fresh tensors.

    Args:
        x: ``[tokens, heads, head_dim]``; two heads less are the k.
    """
    assert callable(call)
    k = x[:, 2:]
    for q_in, k_in in ((x, k), (x.flatten(1), k.flatten(1)), (x, k.flatten(1)), (x, None)):
        given = [None if t is None else t.clone() for t in (q_in, k_in)]
        q_out, k_out = call(positions, q_in, k_in)
        assert torch.equal(q_in, given[0])
        assert q_out.shape == q_in.shape
        assert q_out.data_ptr() != q_in.data_ptr()
        assert_rotated(q_out.view(x.shape), x, cos, sin, interleaved=interleaved)
        if k_in is None:
            assert k_out is None
        else:
            assert torch.equal(k_in, given[1])
            assert k_out.shape == k_in.shape
            assert_rotated(k_out.view(k.shape), k, cos, sin, interleaved=interleaved)
