"""Maps from rotary lanes to position axes (multimodal, 2-D, 3-D), and the positions that go with
them.

Positions come axis first, ``[A, ...]``, in the order time, height, width unless a class says
otherwise. A map names the axis of each lane; the lane's angle is that axis's position times the
lane's frequency. Only `AxialAxes` changes the frequencies too. A map whose lanes do not realise its
sections is refused, never rescaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from rope_compile.checks import (
    device_of,
    flag,
    integers,
    making_on,
    readable,
    shown,
    size,
    tensor,
    whole,
)

Style = Literal["half", "interleaved", "half_blocks", "interleaved_to_half"]
"""How lane i of R/2 finds its two channels, counted from ``rotary_offset``.

* ``half`` (GPT-NeoX): ``(i, i + R/2)``. ``interleaved`` (GPT-J): ``(2i, 2i + 1)``.
* ``half_blocks``: half style inside each axis's own block of ``2 * lanes`` channels (Gemma-4
  vision, Allegro).
* ``interleaved_to_half``: reads ``(2i, 2i + 1)``, writes ``(i, i + R/2)`` (DeepSeek-V3 in
  transformers).
"""

AxialOrder = Literal["blocks", "alternating"]
AxialFrequencies = Literal["own", "global"]


def _widths(name: str, values: object) -> tuple[int, ...]:
    widths = integers(name, values, "non-empty list of integers")
    if not widths:
        raise TypeError(f"{name} must be a non-empty list of integers, got {values!r}")
    if min(widths) < 0 or sum(widths) == 0:
        raise ValueError(f"{name} must not be negative nor all zero, got {widths}")
    return widths


@dataclass(frozen=True)
class Axes:
    """What every map offers."""

    @property
    def num_axes(self) -> int:
        """Rows of the positions tensor."""
        return len(self.lanes_per_axis())

    def lanes_per_axis(self) -> tuple[int, ...]:
        """Lanes that axis 0, 1, ... must get."""
        raise NotImplementedError

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        """The axis of each of the ``rotary_dim / 2`` lanes (``rotary_dim`` entries for full-width
        maps)."""
        raise NotImplementedError

    def inv_freq(self, frequencies: Callable[[int], Tensor], rotary_dim: int) -> Tensor:
        """``[rotary_dim / 2]``; ``frequencies(width)`` gives the ``width / 2`` frequencies with
        that denominator."""
        return frequencies(rotary_dim)

    def check(self, rotary_dim: int, style: str) -> None:
        """Raise ValueError when the lanes cannot be shared out as asked, or the style does not fit
        the map."""
        name, wanted = type(self).__name__, self.lanes_per_axis()
        if sum(wanted) != rotary_dim // 2:
            raise ValueError(
                f"{name} must share out rotary_dim / 2 = {rotary_dim // 2} lanes, got {wanted}, "
                f"which sum to {sum(wanted)}"
            )
        if not wanted[-1]:
            raise ValueError(
                f"{name} must give its last axis a lane, got {wanted}: a call could not tell how "
                "many axes its positions have"
            )
        lanes = self.lane_axes(rotary_dim)
        placed = Counter(lanes)
        counts = tuple(
            placed[axis] * rotary_dim // (2 * len(lanes)) for axis in range(self.num_axes)
        )
        if counts != wanted:
            raise ValueError(
                f"{name} must place {wanted} lanes, got {counts}: this map cannot realise its "
                "sections"
            )
        if style == "half_blocks" and not self._in_blocks:
            raise ValueError(
                f"style 'half_blocks' must be used with AxialAxes in blocks and axis order, got "
                f"{self}"
            )

    @property
    def _in_blocks(self) -> bool:
        return False


@dataclass(frozen=True)
class SectionAxes(Axes):
    """A map given by ``sections``: lanes per axis, in the axis order of the class, summing to
    ``rotary_dim / 2``."""

    sections: tuple[int, ...]

    def __post_init__(self) -> None:
        name, allowed = type(self).__name__, self._section_counts()
        object.__setattr__(self, "sections", _widths(f"{name}.sections", self.sections))
        if len(self.sections) not in allowed:
            raise ValueError(
                f"{name} must have {' or '.join(map(str, allowed))} sections, got {self.sections}"
            )

    def _section_counts(self) -> tuple[int, ...]:
        return (3,)

    def lanes_per_axis(self) -> tuple[int, ...]:
        return self.sections


@dataclass(frozen=True)
class ChunkedAxes(SectionAxes):
    """Contiguous blocks of lanes, one an axis (Qwen2-VL ``(16, 24, 24)``; GLM-4V ``(8, 12, 12)``,
    interleaved style)."""

    def _section_counts(self) -> tuple[int, ...]:
        return (2, 3, 4)

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        return tuple(axis for axis, lanes in enumerate(self.sections) for _ in range(lanes))


@dataclass(frozen=True)
class InterleavedAxes(SectionAxes):
    """Lanes go T, H, W, T, H, W, ... until H or W is used up, then T (Qwen3-VL ``(24, 20,
    20)``)."""

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(rotary_dim // 2))


@dataclass(frozen=True)
class GlmAxes(SectionAxes):
    """Round robin that steps over used-up axes: lane i starts at axis ``i % 3`` (GLM, in SGLang's
    fused kernel)."""

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        left = list(self.sections)
        lanes = []
        for lane in range(sum(self.sections)):
            axis = next(a % 3 for a in range(lane, lane + 3) if left[a % 3])
            left[axis] -= 1
            lanes.append(axis)
        return tuple(lanes)


@dataclass(frozen=True)
class PanguAxes(SectionAxes):
    """openPangu: greedily the axis with the smallest share placed, not twice the same one in a row
    where avoidable.

    With three sections one T lane is kept back for the end.
    """

    def _section_counts(self) -> tuple[int, ...]:
        return (2, 3)

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        wanted = list(self.sections)
        tail = (0,) if len(wanted) == 3 and wanted[0] else ()
        if tail:
            wanted[0] -= 1
        placed = [0] * len(wanted)
        lanes: list[int] = []
        while len(lanes) < sum(wanted):
            open_axes = [axis for axis, total in enumerate(wanted) if placed[axis] < total]
            fresh = [axis for axis in open_axes if not lanes or axis != lanes[-1]] or open_axes
            axis = min(fresh, key=lambda a: (Fraction(placed[a], wanted[a]), a))
            placed[axis] += 1
            lanes.append(axis)
        return (*lanes, *tail)


def _alternating(height: int, width: int, time: int) -> tuple[int, ...]:
    return tuple(1 + lane % 2 for lane in range(height + width)) + (0,) * time


@dataclass(frozen=True)
class ErnieAxes(SectionAxes):
    """Ernie 4.5 VL: sections are ``(h, w, t)``; lanes go H, W, H, W, ..., then all of T. Positions
    are T, H, W.

    transformers reaches the same angles with a permuted ``inv_freq`` buffer; here frequencies stay
    in lane order.
    """

    def lanes_per_axis(self) -> tuple[int, ...]:
        height, width, time = self.sections
        return time, height, width

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        return _alternating(*self.sections)


@dataclass(frozen=True)
class BailingAxes(SectionAxes):
    """Bailing / Ming video RoPE: as `ErnieAxes` with sections ``(t, h, w)``; h and w positions may
    be negative."""

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        time, height, width = self.sections
        return _alternating(height, width, time)


@dataclass(frozen=True)
class XdropeAxes(SectionAxes):
    """HunYuan-VL's four axes (P, W, H, T), half style.

    Args:
        full_width: True is transformers' form: blocks of ``2 * section`` over the R *channels*, so
            that the two channels of one pair may follow different axes; ``lane_axes`` then has R
            entries, low halves first. It is no rotation and has no inverse. False is the legacy
            chunked form over the R/2 lanes.
    """

    full_width: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("XdropeAxes.full_width", self.full_width)

    def _section_counts(self) -> tuple[int, ...]:
        return (4,)

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        copies = 2 if self.full_width else 1
        return tuple(
            axis for axis, lanes in enumerate(self.sections) for _ in range(copies * lanes)
        )

    def check(self, rotary_dim: int, style: str) -> None:
        super().check(rotary_dim, style)
        if self.full_width and style != "half":
            raise ValueError(f"style must be 'half' for XdropeAxes in full width, got {style!r}")


@dataclass(frozen=True)
class AxialAxes(Axes):
    """Each axis rotates its own ``dims[axis]`` channels' worth of lanes (vision towers, FLUX, Wan).

    Args:
        dims: rotary widths of axis 0, 1, ..., even, summing to ``rotary_dim``.
        order: ``blocks`` (one axis after the other over the lanes) or ``alternating`` (lane by lane
            in turn, which needs equal widths; Kimi-K2.5).
        axis_order: the sequence in which the axes take blocks or turns; ``(1, 0)`` puts W before H
            (Step-3.7).
        frequencies: ``own`` uses denominator ``dims[axis]`` for each axis; ``global`` deals out the
            frequencies of the whole width in turn, H the even and W the odd ones (Pixtral), which
            needs equal widths.

    Style ``half_blocks`` needs ``blocks`` in natural axis order.
    """

    dims: tuple[int, ...]
    order: AxialOrder = field(default="blocks", kw_only=True)
    axis_order: tuple[int, ...] | None = field(default=None, kw_only=True)
    frequencies: AxialFrequencies = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        dims = _widths("AxialAxes.dims", self.dims)
        turns = tuple(range(len(dims)))
        if self.axis_order is not None:
            turns = integers("AxialAxes.axis_order", self.axis_order, "list of integers or None")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "axis_order", turns)
        if any(width % 2 for width in dims):
            raise ValueError(f"AxialAxes.dims must be even, got {dims}")
        if sorted(turns) != list(range(len(dims))):
            raise ValueError(
                f"AxialAxes.axis_order must name each of the {len(dims)} axes once, got {turns}"
            )
        for name, allowed in (
            ("order", get_args(AxialOrder)),
            ("frequencies", get_args(AxialFrequencies)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"AxialAxes.{name} must be one of {list(allowed)}, got {getattr(self, name)!r}"
                )
        if len(set(dims)) > 1 and (self.order == "alternating" or self.frequencies == "global"):
            raise ValueError(
                f"AxialAxes.dims must be equal for {self.order!r} order and {self.frequencies!r} "
                f"frequencies, got {dims}"
            )

    def lanes_per_axis(self) -> tuple[int, ...]:
        return tuple(width // 2 for width in self.dims)

    @property
    def _turns(self) -> tuple[int, ...]:
        return self.axis_order or ()

    @property
    def _in_blocks(self) -> bool:
        return self.order == "blocks" and list(self._turns) == sorted(self._turns)

    def lane_axes(self, rotary_dim: int) -> tuple[int, ...]:
        if self.order == "alternating":
            return self._turns * (self.dims[0] // 2)
        return tuple(axis for axis in self._turns for _ in range(self.dims[axis] // 2))

    def inv_freq(self, frequencies: Callable[[int], Tensor], rotary_dim: int) -> Tensor:
        if self.frequencies == "global":
            shared = frequencies(rotary_dim)
            if self.order == "alternating":
                return shared  # lane by lane in turn is the order they already have
            return torch.cat([shared[turn :: len(self.dims)] for turn in range(len(self.dims))])
        parts = [frequencies(self.dims[axis]) for axis in self._turns]
        return (
            torch.stack(parts, dim=-1).flatten()
            if self.order == "alternating"
            else torch.cat(parts)
        )


def centred_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """``-(n - n//2) .. n//2 - 1``, int64 ``[length]`` (Qwen-Image's ``scale_rope``, Bailing's h and
    w)."""
    return torch.arange(length // 2 - length, length // 2, dtype=torch.int64, device=device)


def llama4_vision_positions(grid: int, device: torch.device | str | None = None) -> Tensor:
    """x and y of Llama-4's vision tower, int64 ``[2, grid**2 + 1]``, for ``AxialAxes((D//2,
    D//2))``, interleaved.

    Patches count from 1 in both directions; the class token comes last, at 0, which is the
    identity.
    """
    patches = torch.arange(grid * grid, dtype=torch.int64, device=device)
    x, y = patches % grid + 1, patches // grid + 1
    return torch.nn.functional.pad(torch.stack((x, y)), (0, 1))


def qwen_image_positions(
    frames: int, height: int, width: int, text_tokens: int, *, centred: bool = True,
    first_frame: int = 0, device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """t, h, w of Qwen-Image, int64 ``[3, frames*height*width + text_tokens]``, image tokens first.

    Args:
        centred: the ``scale_rope`` of the checkpoint: h and w are `centred_positions`.

    Text continues after the larger image extent, at the same position on all three axes.
    """
    plain = torch.arange(max(frames, height, width), dtype=torch.int64, device=device)
    rows, columns = (
        centred_positions(n, device) if centred else plain[:n] for n in (height, width)
    )
    image = torch.stack(
        torch.meshgrid(plain[:frames] + first_frame, rows, columns, indexing="ij")
    ).flatten(1)
    start = max(height // 2, width // 2) if centred else max(height, width)
    text = torch.arange(start, start + text_tokens, dtype=torch.int64, device=device)
    return torch.cat((image, text.expand(3, -1)), dim=1)


def _segments(boundaries: Tensor, tokens: Tensor) -> Tensor:
    """Index of the sequence that each token is in; tokens past the end count as the last one's."""
    last = boundaries.shape[0] - 2
    return torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True).clamp(max=last)


def positions_from_cu_seqlens(
    cu_seqlens: Tensor, total: int, *, starts: Tensor | None = None
) -> Tensor:
    """Positions of packed sequences: each counts from 0, or from its own start. No host read.

    Args:
        cu_seqlens: int32 or int64 ``[sequences + 1]``, from 0; empty sequences are fine.
        total: tokens in the packed tensor; the ones after ``cu_seqlens[-1]`` are padding and count
            on.
        starts: int32 or int64 ``[sequences]``, the position of each first token (tokens already in
            the cache).

    Returns:
        int64 ``[total]`` on the device of ``cu_seqlens``.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape or device; for a tensor on the
        CPU also ``cu_seqlens`` that do not start at 0 or decrease, and a smaller ``total``.
    """
    size("total", total)
    _check_boundaries(cu_seqlens)
    if starts is not None:
        _check_starts(starts, cu_seqlens)
    last = _last_boundary(cu_seqlens)
    if last is not None and total < last:
        raise ValueError(
            f"total must be at least cu_seqlens[-1] = {last}, got {total}; it counts the tokens "
            "of every sequence"
        )
    boundaries = cu_seqlens.to(torch.int64)
    tokens = torch.arange(total, dtype=torch.int64, device=cu_seqlens.device)
    segments = _segments(boundaries, tokens)
    positions = tokens - boundaries[segments]
    return positions if starts is None else positions + starts.to(torch.int64)[segments]


def context_parallel_positions(
    length: int, *, rank: int, ranks: int, device: torch.device | str | None = None
) -> Tensor:
    """Zig-zag tokens of one rank: of ``2 * ranks`` chunks it holds number ``rank`` and number
    ``2*ranks - 1 - rank``.

    Returns:
        int64 ``[length / ranks]``, both the indices into the whole sequence and the positions.

    Raises:
        TypeError: a wrong type. ValueError: a number out of range, or no such device.
    """
    size("length", length)
    _check_rank(rank, ranks)
    if length % (2 * ranks):
        raise ValueError(
            f"length must be divisible by 2 * ranks = {2 * ranks}, got {length}; pad the sequence"
        )
    where = None if device is None else device_of(device)
    with making_on(where):
        own = torch.arange(length // ranks, dtype=torch.int64, device=where)
    return _zigzag(own, length // (2 * ranks), rank, ranks)


def packed_context_parallel_positions(
    cu_seqlens: Tensor, total: int, *, rank: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """Zig-zag tokens of one rank when every packed sequence is dealt out by itself. No host read.

    Args:
        cu_seqlens: int32 or int64 ``[sequences + 1]`` of the whole packed batch, ``cu_seqlens[-1]
            == total``; each length a multiple of ``2 * ranks``. Both are checked for a tensor on
            the CPU only.
        total: tokens in the whole batch.

    Returns:
        ``(tokens, positions)``, int64 ``[total / ranks]`` each: indices into the packed batch, and
        positions inside each sequence. Rotate with the second; the first are right only for tables
        of one row a packed token.

    Raises:
        TypeError, ValueError: as `positions_from_cu_seqlens` and `context_parallel_positions`.
    """
    size("total", total)
    _check_rank(rank, ranks)
    _check_boundaries(cu_seqlens)
    if total % (2 * ranks):
        raise ValueError(
            f"total must be divisible by 2 * ranks = {2 * ranks}, got {total}; pad the sequences"
        )
    last = _last_boundary(cu_seqlens)
    if last is not None and total != last:
        raise ValueError(
            f"total must be cu_seqlens[-1] = {last}, got {total}; padding must be a sequence too"
        )
    if last is not None and (cu_seqlens % (2 * ranks)).any():
        raise ValueError(
            f"every sequence length must be divisible by 2 * ranks = {2 * ranks}, got "
            f"{shown(cu_seqlens.diff().tolist())}; pad the sequences"
        )
    boundaries = cu_seqlens.to(torch.int64)
    own = torch.arange(total // ranks, dtype=torch.int64, device=boundaries.device)
    segments = _segments(boundaries // ranks, own)
    starts = boundaries[segments]
    chunk = (boundaries[segments + 1] - starts) // (2 * ranks)
    positions = _zigzag(own - starts // ranks, chunk, rank, ranks)
    return starts + positions, positions


def _zigzag(own: Tensor, chunk: Tensor | int, rank: int, ranks: int) -> Tensor:
    first = own + rank * chunk
    second = (
        own + (2 * ranks - 2 - rank) * chunk
    )  # its own chunk 1 is chunk 2*ranks - 1 - rank of the whole
    return torch.where(own < chunk, first, second)


def _check_rank(rank: int, ranks: int) -> None:
    whole("rank", rank)
    whole("ranks", ranks)
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..ranks - 1, got rank {rank} of {ranks} ranks")


def _check_integers(name: str, x: object, kind: str = "an int32 or int64 tensor") -> None:
    dtype = tensor(name, x, kind).dtype
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {dtype}")


def _check_boundaries(cu_seqlens: Tensor) -> None:
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            "cu_seqlens must be [sequences + 1] with a sequence or more, got "
            f"{tuple(cu_seqlens.shape)}"
        )


def _last_boundary(cu_seqlens: Tensor) -> int | None:
    """The last one, and all of them checked, where reading waits for nothing; else None."""
    if not readable(cu_seqlens):
        return None
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens must start at 0 and never decrease, got {shown(cu_seqlens.tolist())}"
        )
    return int(cu_seqlens[-1])


def _check_starts(starts: Tensor, cu_seqlens: Tensor) -> None:
    _check_integers("starts", starts, "an int32 or int64 tensor or None")
    if starts.shape != (cu_seqlens.shape[0] - 1,):
        raise ValueError(
            f"starts must have one entry a sequence, {(cu_seqlens.shape[0] - 1,)}, got "
            f"{tuple(starts.shape)}"
        )
    if starts.device != cu_seqlens.device:
        raise ValueError(
            f"starts must be on the device of cu_seqlens, {cu_seqlens.device}, got {starts.device}"
        )
