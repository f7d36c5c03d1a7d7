"""The rotation in float64, written from its formulas alone, and the measures of an error.

Shares no line with the package. Everything is computed on the CPU: a device does not judge itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["beyond_bound", "cos_sin", "guarded", "rotate", "table", "touched", "ulps", "ulps_of_1"]


def cos_sin(
    positions: Tensor, inv_freq: Tensor, scaling: float, lane_axes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Rows ``[..., lanes]`` in float64, rounded to float32 as a stored table is.

    float32 frequencies: the exact product, rounded once to float32. float64: not rounded.
    """
    places = positions.double()
    frequencies = inv_freq.double()
    if lane_axes:
        if places.dim() == 1:
            places = places.expand(max(lane_axes) + 1, -1)
        places = places[list(lane_axes)].movedim(0, -1)
        frequencies = frequencies.repeat(len(lane_axes) // len(inv_freq))
    else:
        places = places[..., None]
    phase = places * frequencies
    if inv_freq.dtype == torch.float32:
        phase = phase.float().double()
    magnitude = torch.tensor(scaling, dtype=torch.float32).double()
    # Not torch.cos: the first one of a process is sometimes inaccurate (MKL's threads, torch 2.13).
    wave = torch.polar(magnitude.expand_as(phase), phase)
    return wave.real.float().double(), wave.imag.float().double()


def table(rows: int, inv_freq: Tensor, scaling: float = 1.0) -> Tensor:
    """float32 ``[rows, rotary_dim]`` on the CPU."""
    return torch.cat(cos_sin(torch.arange(rows), inv_freq, scaling, ()), dim=-1).float()


def _pairs(pairing: str, half: int, lane_axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Low and high channel of every lane."""
    lanes = torch.arange(half)
    if pairing == "interleaved":
        return 2 * lanes, 2 * lanes + 1
    if pairing == "half":
        return lanes, lanes + half
    axes = list(lane_axes[:half])
    first = torch.tensor([axes.index(axis) for axis in axes])
    count = torch.tensor([axes.count(axis) for axis in axes])
    return lanes + first, lanes + first + count


def rotate(
    x: Tensor,
    rows: tuple[Tensor, Tensor],
    *,
    style: str,
    offset: int,
    inverse: bool,
    lane_axes: Sequence[int],
    full_width: bool,
) -> tuple[Tensor, Tensor]:
    """``x [..., heads, head_dim]`` rotated by ``rows``; and each pair's larger input."""
    cos, sin = (row[..., None, :] for row in rows)
    # Rows of full-width axes have a lane for each channel: low ones first, then high ones.
    half = cos.shape[-1] // 2 if full_width else cos.shape[-1]
    cos_low, cos_high = cos[..., :half], cos[..., -half:]
    sin_low, sin_high = sin[..., :half], sin[..., -half:]
    read, written = style, style
    if style == "interleaved_to_half":
        read, written = "interleaved", "half"
    if inverse:
        read, written = written, read
        sin_low, sin_high = -sin_high, -sin_low
    a, b = (channels + offset for channels in _pairs(read, half, lane_axes))
    low, high = (channels + offset for channels in _pairs(written, half, lane_axes))
    source = x.detach().cpu().double()
    first, second = source[..., a], source[..., b]
    out, larger = source.clone(), source.abs()
    out[..., low] = first * cos_low - second * sin_low
    out[..., high] = second * cos_high + first * sin_high
    larger[..., low] = larger[..., high] = torch.maximum(first.abs(), second.abs())
    return out, larger


def beyond_bound(actual: Tensor, expected: Tensor, larger: Tensor, computed: bool = True) -> float:
    """How far an element lies beyond its bound; nothing is wrong up to 0.

    float32 1e-6 of the pair's larger input; 16-bit dtypes 1 ulp of the result more; float64 1e-15,
    and with ``computed`` a float32 step, by which a row that a kernel computes may differ.
    """
    actual = actual.detach().cpu()
    if not actual.numel():
        return 0.0
    if not bool(actual.isfinite().all()):
        return float("inf")
    relative = 1e-6
    if actual.dtype == torch.float64:
        relative = 1e-15 + (2.0**-23 if computed else 0.0)
    bound = larger * relative
    if actual.dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(actual.dtype)
        exponent = torch.frexp(expected.abs().clamp_min(info.smallest_normal)).exponent - 1
        bound = bound + info.eps * torch.exp2(exponent.double())
    return float(((actual.double() - expected).abs() - bound).max())


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in steps of the dtype; signed zeros are equal, one NaN is far away."""
    a, b = a.detach().cpu(), b.detach().cpu()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]

    def line(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).to(torch.int64)
        return torch.where(bits < 0, -(bits & torch.iinfo(integer).max), bits)

    if not a.numel():
        return 0
    if bool((a.isnan() ^ b.isnan()).any()):
        return int(torch.iinfo(torch.int64).max)
    return int((line(a) - line(b)).abs().masked_fill(a.isnan(), 0).max())


def ulps_of_1(a: Tensor, b: Tensor) -> float:
    """Largest difference in units of the float32 spacing at 1."""
    return float((a.detach().cpu().double() - b.detach().cpu().double()).abs().max()) * 2.0**23


def guarded(x: Tensor, band: int = 8) -> tuple[Tensor, Tensor]:
    """A view equal to ``x`` inside a buffer that is NaN all around it, and the buffer."""
    buffer = x.new_full([size + 2 * band for size in x.shape], float("nan"))
    view = buffer[tuple(slice(band, band + size) for size in x.shape)]
    return view.copy_(x), buffer


def touched(view: Tensor, buffer: Tensor) -> bool:
    """Whether anything outside the view was written, or the view lost values."""
    return bool(view.isnan().any()) or int((~buffer.isnan()).sum()) != view.numel()
