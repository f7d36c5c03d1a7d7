"""The peers' rotation written once in float64 from its formula, and comparisons with it.

It knows tables only, as cos and sin of each pair, and shares no line with the package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support import assert_near_oracle, randn

__all__ = ["angles", "assert_gradients", "assert_rotated", "larger_of_pairs", "plain_rotate"]


def angles(*shape: int, seed: int = 7) -> tuple[Tensor, Tensor]:
    """float32 cos and sin of arbitrary angles, no two rows alike."""
    drawn = randn(*shape, seed=seed, dtype=torch.float64) * 3
    return drawn.cos().float(), drawn.sin().float()


def _pairs(half: int, interleaved: bool, first: int) -> tuple[Tensor, Tensor]:
    lanes = torch.arange(half)
    if interleaved:
        return first + 2 * lanes, first + 2 * lanes + 1
    return first + lanes, first + half + lanes


def plain_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, first: int = 0
) -> Tensor:
    """float64; cos and sin ``[..., R/2]`` broadcast to x; differentiable in x."""
    low, high = _pairs(cos.shape[-1], interleaved, first)
    x, cos, sin = x.double(), cos.double(), sin.double()
    a, b = x[..., low], x[..., high]
    return x.index_copy(-1, low, a * cos - b * sin).index_copy(-1, high, b * cos + a * sin)


def larger_of_pairs(x: Tensor, half: int, interleaved: bool, first: int = 0) -> Tensor:
    """Per channel the larger input of its pair, which bounds its rounding error."""
    low, high = _pairs(half, interleaved, first)
    size = x.detach().double().abs()
    larger = torch.maximum(size[..., low], size[..., high])
    return size.index_copy(-1, low, larger).index_copy(-1, high, larger)


def assert_rotated(
    actual: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    first: int = 0,
    scale: float = 1.0,
) -> None:
    """``actual`` is x rotated, in x's dtype, to within the documented rounding.

    ``scale`` is the largest magnitude of a pair of cos and sin.
    """
    expected = plain_rotate(x, cos, sin, interleaved=interleaved, first=first).detach()
    assert actual.shape == x.shape
    assert actual.dtype == x.dtype
    larger = scale * larger_of_pairs(x, cos.shape[-1], interleaved, first)
    assert_near_oracle(actual.detach(), expected, larger)
    # The checker would see a table that is read the other way round.
    swapped = plain_rotate(x, sin, cos, interleaved=interleaved, first=first)
    assert x.numel() == 0 or not torch.allclose(swapped.detach(), expected, atol=1e-2)


def assert_gradients(
    function: Callable[..., object], plain: Callable[..., object], *inputs: Tensor
) -> None:
    """Gradients of ``function`` equal those of autograd through ``plain``; the incoming ones stay.

    Both get fresh copies, and may return a tensor or a tuple.
    """
    results = []
    for f in (function, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = f(*(leaf * 1 for leaf in leaves))  # no leaf is rewritten in place
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)  # type: ignore[call-overload]
        incoming = [
            randn(*y.shape, seed=90 + i, dtype=torch.float64).to(y.dtype)
            for i, y in enumerate(outputs)
        ]
        before = [g.clone() for g in incoming]
        results.append(torch.autograd.grad(outputs, leaves, incoming))
        for g, old in zip(incoming, before, strict=True):
            torch.testing.assert_close(g, old, rtol=0, atol=0)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)
