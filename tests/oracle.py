"""The float64 oracle: rotary embedding written from its formulas alone, in NumPy.

It shares no line with the package, so that agreement between the two means something.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def oracle_rows(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_scaling: float = 1.0,
    lane_axes: tuple[int, ...] = (),
    round_row: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Cos and sin per token and lane, float64, ``[..., R/2]`` (``[..., R]`` for full-width axes).

    The phase is rounded to float32 exactly where ``inv_freq`` is float32; ``round_row`` rounds
    the finished row to float32, as a stored table is.
    """
    places = positions.numpy().astype(np.float64)  # exact for every int32, and to 2^53
    frequencies = inv_freq.numpy().astype(np.float64)
    if lane_axes:
        places = np.broadcast_to(places, (max(lane_axes) + 1, *places.shape[1:]))
        places = np.stack([places[axis] for axis in lane_axes], axis=-1)
        frequencies = np.tile(frequencies, len(lane_axes) // len(frequencies))
    else:
        places = places[..., None]
    phase = places * frequencies
    if inv_freq.dtype == torch.float32:
        phase = phase.astype(np.float32).astype(np.float64)
    magnitude = np.float64(np.float32(attention_scaling))
    cos, sin = np.cos(phase) * magnitude, np.sin(phase) * magnitude
    if round_row:
        cos, sin = (row.astype(np.float32).astype(np.float64) for row in (cos, sin))
    return cos, sin


def oracle_table(capacity: int, inv_freq: Tensor, attention_scaling: float = 1.0) -> Tensor:
    """The float32 table ``[capacity, R]`` that the phase rule defines."""
    rows = oracle_rows(torch.arange(capacity), inv_freq, attention_scaling=attention_scaling)
    return torch.from_numpy(np.concatenate(rows, axis=-1).astype(np.float32))


def pair_channels(style: str, half: int, lane_axes: tuple[int, ...] = ()) -> list[list[int]]:
    """Channels ``[read x, read y, write x, write y]`` of every lane, forward direction."""
    lanes = range(half)
    low, high = list(lanes), [i + half for i in lanes]
    even, odd = [2 * i for i in lanes], [2 * i + 1 for i in lanes]
    if style == "half_blocks":  # half style inside the 2 * n channels that each axis owns
        first = {axis: lane_axes.index(axis) for axis in lane_axes}
        count = {axis: lane_axes.count(axis) for axis in lane_axes}
        low = [i + first[lane_axes[i]] for i in lanes]
        high = [i + first[lane_axes[i]] + count[lane_axes[i]] for i in lanes]
    read = [even, odd] if style in ("interleaved", "interleaved_to_half") else [low, high]
    write = [even, odd] if style == "interleaved" else [low, high]
    return [*read, *write]


def oracle_rotate(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    style: str = "half",
    rotary_offset: int = 0,
    attention_scaling: float = 1.0,
    inverse: bool = False,
    lane_axes: tuple[int, ...] = (),
    round_row: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotated ``x`` in float64, and per output channel the larger input of its pair."""
    half = len(inv_freq)
    cos, sin = oracle_rows(
        positions,
        inv_freq,
        attention_scaling=attention_scaling,
        lane_axes=lane_axes,
        round_row=round_row,
    )
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
    cos_low, cos_high = (cos[..., :half], cos[..., -half:])
    sin_low, sin_high = (sin[..., :half], sin[..., -half:])
    if inverse:  # the transpose of [[cos_low, -sin_low], [sin_high, cos_high]]
        sin_low, sin_high = -sin_high, -sin_low
    pairs = pair_channels(style, half, lane_axes[:half])
    channels = np.array(pairs, dtype=np.int64) + rotary_offset
    read_x, read_y, write_x, write_y = (*channels[2:], *channels[:2]) if inverse else channels
    source = x.detach().double().numpy()
    first, second = source[..., read_x], source[..., read_y]
    out, larger = source.copy(), np.abs(source)
    out[..., write_x] = first * cos_low - second * sin_low
    out[..., write_y] = second * cos_high + first * sin_high
    larger[..., write_x] = larger[..., write_y] = np.maximum(np.abs(first), np.abs(second))
    return torch.from_numpy(out), torch.from_numpy(larger)


def assert_near_oracle(actual: Tensor, expected: Tensor, larger: Tensor) -> None:
    """1e-6 of the pair's larger input (float64: 1e-15), and 1 ulp more for the 16-bit dtypes."""
    bound = larger * (1e-15 if actual.dtype == torch.float64 else 1e-6)
    if actual.dtype in (torch.float16, torch.bfloat16):
        # Added, not the larger of both: where a pair cancels, its float32 error exceeds one ulp
        # of the tiny result.
        info = torch.finfo(actual.dtype)
        exponent = torch.frexp(expected.abs().clamp_min(info.smallest_normal)).exponent - 1
        bound = bound + info.eps * torch.exp2(exponent.double())
    assert actual.isfinite().all()
    excess = (actual.double() - expected).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 0, f"{excess.max()} beyond the bound"
