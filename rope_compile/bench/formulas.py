"""The rotation as model files write it: what the operator is compared with.

cos and sin come gathered for the positions, in the model's dtype, and broadcast over heads. The
test suite compares the first two with transformers' own functions bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_compile.demo.decoder import rotate_half

__all__ = ["half", "half_apart", "interleaved", "interleaved_apart", "join_half", "stack_pairs"]


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's and, where cos is narrower than a head, Phi-3's ``apply_rotary_pos_emb``."""
    return _half(q, cos, sin), _half(k, cos, sin)


def _half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    rotated, rest = x[..., :width], x[..., width:]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, rest), dim=-1)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-J's formula, with cos and sin expanded to pairs beforehand."""
    return _interleaved(q, cos, sin), _interleaved(k, cos, sin)


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return x * cos + _rotate_every_two(x) * sin
    rotated, rest = x[..., :width], x[..., width:]
    return torch.cat((rotated * cos + _rotate_every_two(rotated) * sin, rest), dim=-1)


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def half_apart(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Both halves, and what passes through, as tensors of their own: no ``cat`` anywhere.

    cos and sin are half as wide as in `half`.
    """
    lanes = cos.shape[-1]
    results: list[Tensor] = []
    for x in (q, k):
        low, high, rest = x.split((lanes, lanes, x.shape[-1] - 2 * lanes), dim=-1)
        results += (low * cos - high * sin, high * cos + low * sin, rest.clone())
    return tuple(results)


def interleaved_apart(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As `half_apart`, for pairs of neighbours: even and odd channels apart."""
    width = 2 * cos.shape[-1]
    results: list[Tensor] = []
    for x in (q, k):
        even, odd, rest = x[..., 0:width:2], x[..., 1:width:2], x[..., width:]
        results += (even * cos - odd * sin, odd * cos + even * sin, rest.clone())
    return tuple(results)


def join_half(low: Tensor, high: Tensor, rest: Tensor) -> Tensor:
    """The head that `half_apart` took apart."""
    return torch.cat((low, high, rest), dim=-1)


def stack_pairs(even: Tensor, odd: Tensor, rest: Tensor) -> Tensor:
    """The head that `interleaved_apart` took apart."""
    return torch.cat((torch.stack((even, odd), dim=-1).flatten(-2), rest), dim=-1)
