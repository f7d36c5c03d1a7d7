"""The one readable definition of the rotation, and the path for a device without a kernel.

Pair ``(x, y)`` at angle ``a = position * inv_freq`` and magnitude ``m`` (RoFormer, arXiv
2104.09864)::

    x' = m * (x * cos a - y * sin a)
    y' = m * (y * cos a + x * sin a)

Inside the table ``m * cos a`` and ``m * sin a`` are read; outside it they are computed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Views of both channels of the pairs that the lanes ``start`` to ``stop`` rotate."""

    start: int
    stop: int
    low: Tensor
    high: Tensor


def block_bounds(axes: Sequence[int]) -> list[int]:
    """First lane of every axis, and the lane count: ``[0, n_0, n_0 + n_1, ...]``."""
    bounds = [0]
    for axis in range(max(axes) + 1):
        bounds.append(bounds[-1] + axes.count(axis))
    return bounds


def pair_views(x: Tensor, pairing: str, axes: Sequence[int]) -> list[Pairs]:
    """Which channels of ``x [..., 2 * half]`` form pairs, by name of the pairing."""
    half = x.shape[-1] // 2
    if pairing == "half":
        return [Pairs(0, half, *x.split(half, -1))]
    if pairing == "interleaved":
        return [Pairs(0, half, *x.unflatten(-1, (half, 2)).unbind(-1))]
    return [
        Pairs(start, stop, *x[..., 2 * start : 2 * stop].split(stop - start, -1))
        for start, stop in itertools.pairwise(block_bounds(list(axes)))
        if start < stop
    ]


def pairings(style: str, inverse: bool) -> tuple[str, str]:
    """``(read, written)`` pairing of a style; an inverse moves moved channels back."""
    if style == "interleaved_to_half":
        return ("half", "interleaved") if inverse else ("interleaved", "half")
    return style, style


def compute_cos_sin(
    positions: Tensor, inv_freq: Tensor, attention_scaling: float
) -> tuple[Tensor, Tensor]:
    """float32 cos and sin, times the magnitude, of positions that broadcast with ``inv_freq``.

    float32 frequencies: the product is rounded once to float32 (what the field's reference rounds).
    float64 frequencies: nothing is rounded before the cosine.
    """
    phase = positions.to(torch.float64) * inv_freq.to(torch.float64)
    if inv_freq.dtype == torch.float32:
        phase = phase.to(torch.float32).to(torch.float64)
    magnitude = torch.tensor(attention_scaling, dtype=torch.float32).item()
    return (phase.cos() * magnitude).to(torch.float32), (phase.sin() * magnitude).to(torch.float32)


def gather_cos_sin(
    positions: Tensor,
    lanes: Tensor | None,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    attention_scaling: float,
) -> tuple[Tensor, Tensor]:
    """float32 cos and sin ``[..., half]`` of ``positions [..., 1]``, or ``[..., half]`` by lane.

    Without ``inv_freq`` a position outside the table takes the nearest row.
    """
    rows, half = cos_sin_cache.shape[0], cos_sin_cache.shape[1] // 2
    # A CPU may look at the values; every other device would have to wait for them.
    if positions.device.type == "cpu":
        low, high = torch.aminmax(positions)
        inside = low.item() >= 0 and high.item() < rows
    else:
        inside = False
    if rows:
        row = positions if inside else positions.clamp(0, rows - 1)
        if lanes is None:
            cos, sin = torch.embedding(cos_sin_cache, row.squeeze(-1)).split(half, -1)
        else:
            cos, sin = cos_sin_cache[row, lanes], cos_sin_cache[row, lanes + half]
        if inside or inv_freq is None:
            return cos, sin
    assert inv_freq is not None  # the operator refuses an empty table without frequencies
    computed = compute_cos_sin(positions, inv_freq, attention_scaling)
    if not rows:
        return computed
    outside = (positions < 0) | (positions >= rows)
    return torch.where(outside, computed[0], cos), torch.where(outside, computed[1], sin)


class Angles(NamedTuple):
    """float32 ``[..., 1, half]``: cos and sin of the low and of the high channel of every pair.

    The two differ only in the full-width multi-axis form, where the halves of a pair follow
    different axes.
    """

    cos_low: Tensor
    sin_low: Tensor
    cos_high: Tensor
    sin_high: Tensor


def angles(
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    axes: Sequence[int],
    attention_scaling: float,
) -> Angles:
    """Angles of ``positions [...]``, or ``[A, ...]`` with one axis for each lane or channel."""
    half = cos_sin_cache.shape[1] // 2

    def of(lane_axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        lanes, by_lane = None, positions.unsqueeze(-1)
        if lane_axes:
            lanes = torch.arange(half, device=positions.device)
            # No index tensor: to upload one would wait for the device.
            planes = positions.unbind(0)
            by_lane = torch.stack([planes[axis] for axis in lane_axes], dim=-1)
        cos, sin = gather_cos_sin(by_lane, lanes, cos_sin_cache, inv_freq, attention_scaling)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    low = of(axes[:half])
    high = of(axes[half:]) if len(axes) > half else low
    return Angles(*low, *high)


def rotate_into(
    out: Tensor,
    x: Tensor,
    at: Angles,
    axes: Sequence[int],
    style: str,
    rotary_offset: int,
    inverse: bool,
) -> None:
    """Write the rotation of ``x [..., heads, head_dim]`` to ``out``, which may be ``x`` itself.

    ``inverse`` applies the transpose: for equal halves of a pair that is the rotation by -a.
    """
    half = at.cos_low.shape[-1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    source, target = x, out
    if 2 * half < x.shape[-1]:
        stop = rotary_offset + 2 * half
        source, target = x[..., rotary_offset:stop], out[..., rotary_offset:stop]
        if out is not x:
            out[..., :rotary_offset] = x[..., :rotary_offset]
            out[..., stop:] = x[..., stop:]
    read, written = pairings(style, inverse)
    for given, wanted in zip(
        pair_views(source, read, axes[:half]), pair_views(target, written, axes[:half]), strict=True
    ):
        parts = at
        if given.stop - given.start < half:
            parts = Angles(*(part[..., given.start : given.stop] for part in at))
        cos_low, sin_low, cos_high, sin_high = parts
        low, high = given.low.to(compute), given.high.to(compute)
        # Both products with sin come first, so that out may be x. Each operation rounds once.
        if inverse:
            crossed_low, crossed_high = high * sin_high, low * sin_low
        else:
            crossed_low, crossed_high = high * sin_low, low * sin_high
        if out.dtype == compute:
            new_low = torch.mul(low, cos_low, out=wanted.low)
            new_high = torch.mul(high, cos_high, out=wanted.high)
        else:
            new_low, new_high = low.mul_(cos_low), high.mul_(cos_high)
        if inverse:
            new_low += crossed_low
            new_high -= crossed_high
        else:
            new_low -= crossed_low
            new_high += crossed_high
        if out.dtype != compute:
            wanted.low.copy_(new_low)
            wanted.high.copy_(new_high)


def rope_into(
    pairs: Sequence[tuple[Tensor, Tensor]],
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    axes: Sequence[int],
    style: str,
    rotary_offset: int,
    attention_scaling: float,
    inverse: bool,
) -> None:
    """Rotate every ``(out, x)`` of ``pairs``; ``positions`` has their token dimensions."""
    at = angles(positions, cos_sin_cache, inv_freq, axes, attention_scaling)
    for out, x in pairs:
        rotate_into(out, x, at, axes, style, rotary_offset, inverse)
