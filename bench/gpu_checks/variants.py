"""Calls of the operator that take a different kernel each: what is compared with float64.

Few heads and tokens, and the same ones nearly everywhere, so that checks share binaries.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import rope_compile as rc
from bench.gpu_checks import exact
from rope_compile.bench.shapes import SHAPES

__all__ = ["GROUPS", "ROWS", "Variant", "edge_positions", "speed_variants"]

ROWS = 128
TOKENS = 37  # two blocks of tokens for most widths, the last one incomplete
FAR = (2**31 - 1, -(2**31), 2**24 + 1, 131071, 2**40, -(2**40) - 1)

Pair = tuple[Tensor, Tensor]


def edge_positions(dtype: torch.dtype = torch.int64, rows: int = ROWS) -> Tensor:
    """``[TOKENS]``: both ends of the table, just outside, far outside, and inside."""
    limits = torch.iinfo(dtype)
    edges = (0, rows - 1, rows, rows + 1, 2 * rows, -1, -rows, *FAR)
    kept = [p for p in edges if limits.min <= p <= limits.max]
    return torch.tensor([*kept, *range(3, 3 + TOKENS - len(kept))], dtype=dtype)


@dataclass(frozen=True)
class Variant:
    """One way to call ``apply_rope``; what differs from the defaults is in its name.

    Attributes:
        computes: whether ``inv_freq`` is given.
        exact: float64 frequencies, whose phases are not rounded.
    """

    style: str = "half"
    head_dim: int = 64
    rotary_dim: int = 0  # 0: all of head_dim
    offset: int = 0
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (3, 2)
    inverse: bool = False
    in_place: bool = False
    computes: bool = True
    exact: bool = False
    axes: tuple[int, ...] = ()
    layout: str = "contiguous"
    positions_dtype: torch.dtype = torch.int64
    scaling: float = 1.25
    k_row: int = 0  # k has rows of this width; the layout "slices" alone knows it

    @property
    def width(self) -> int:
        return self.rotary_dim or self.head_dim

    @property
    def full_width(self) -> bool:
        return len(self.axes) > self.width // 2

    def __str__(self) -> str:
        parts = [self.style, str(self.dtype).removeprefix("torch."), f"R={self.width}"]
        parts += [f"of {self.head_dim} from {self.offset}"] if self.width < self.head_dim else []
        parts += [f"{max(self.axes) + 1} axes"] if self.axes else []
        parts += ["full width"] if self.full_width else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += ["int32"] if self.positions_dtype == torch.int32 else []
        parts += [word for word in ("in_place", "inverse", "exact") if getattr(self, word)]
        parts += [] if self.computes else ["table only"]
        return " ".join(parts)

    # ------------------------------------------------------------------------------------ inputs

    def inv_freq(self) -> Tensor:
        lanes = torch.arange(0, self.width, 2, dtype=torch.float64)
        frequencies = 1e4 ** (-lanes / self.width)
        return frequencies if self.exact else frequencies.float()

    def positions(self) -> Tensor:
        """``[TOKENS]``, or ``[axes, TOKENS]`` with other positions on every axis."""
        at = edge_positions(self.positions_dtype)
        if not self.axes:
            return at
        return torch.stack([at.roll(5 * axis) for axis in range(max(self.axes) + 1)])

    @functools.cached_property
    def rows(self) -> Tensor:
        return exact.table(ROWS, self.inv_freq(), self.scaling)

    def inputs(self, device: torch.device | str, tokens: int = TOKENS, seed: int = 1) -> Pair:
        """q and k ``[tokens, heads, head_dim]`` of normal values in the wanted layout."""
        q, k = self._empty(device, tokens)
        if q.device.type != "meta":
            generator = torch.Generator().manual_seed(seed)
            for x in (q, k):
                drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
                x.copy_(drawn.to(self.dtype))
        return q, k

    def _empty(self, device: torch.device | str, tokens: int) -> Pair:
        (q_heads, k_heads), width = self.heads, self.head_dim
        make = functools.partial(torch.empty, dtype=self.dtype, device=device)
        if self.layout == "packed":  # the q and k slices of a projection that holds v too
            packed = make(tokens, q_heads + 2 * k_heads, width)
            return packed[:, :q_heads], packed[:, q_heads : q_heads + k_heads]
        if self.layout == "BHSD":
            return tuple(make(n, tokens, width).transpose(0, 1) for n in self.heads)
        if self.layout == "strided_last":
            return tuple(make(tokens, n, 2 * width)[..., ::2] for n in self.heads)
        if self.layout == "odd":  # no stride is a multiple of 8, and the pointer is off too
            return tuple(make(tokens, n, width + 7)[..., 3 : width + 3] for n in self.heads)
        if self.layout == "slices":
            rows = make(tokens, q_heads, 3 * width), make(tokens, k_heads, self.k_row)
            return rows[0][..., -width:], rows[1][..., -width:]
        return make(tokens, q_heads, width), make(tokens, k_heads, width)

    # --------------------------------------------------------------------------------- the call

    def call(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotate through the public functions; in place on copies of the same layout."""
        operands = (positions, self.rows.to(q.device))
        options = {
            "inv_freq": self.inv_freq().to(q.device) if self.computes else None,
            "rotary_offset": self.offset,
            "style": self.style,
            "attention_scaling": self.scaling,
            "inverse": self.inverse,
            "axes": self.axes or None,
        }
        if self.in_place:
            rc.apply_rope_(q, k, *operands, **options)
            return q, k
        return rc.apply_rope(q, k, *operands, **options)

    def expected(self, x: Tensor, positions: Tensor) -> Pair:
        """The same in float64, and each pair's larger input."""
        positions = positions.detach().cpu()
        if not self.computes:
            positions = positions.clamp(0, ROWS - 1)
        rows = exact.cos_sin(positions, self.inv_freq(), self.scaling, self.axes)
        return exact.rotate(
            x,
            rows,
            style=self.style,
            offset=self.offset,
            inverse=self.inverse,
            lane_axes=self.axes,
            full_width=self.full_width,
        )

    def excess(self, result: tuple[Tensor, Tensor | None], inputs: Pair, at: Tensor) -> float:
        """How far a result is beyond its bound, 0 where it is right."""
        worst = 0.0
        for y, x in zip(result, inputs, strict=True):
            if y is None or y.shape != x.shape or y.dtype != x.dtype:
                return float("inf")
            worst = max(worst, exact.beyond_bound(y, *self.expected(x, at)))
        return worst

    def kernel_arguments(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Grid and arguments that the launcher would pass; nothing is allocated."""
        from rope_compile.kernels import triton_rope

        inputs = [x[None] for x in self.inputs("meta")]
        pairs = [
            (x if self.in_place else torch.empty(x.shape, dtype=x.dtype, device="meta"), x)
            for x in inputs
        ]
        positions = self.positions().to("meta").unsqueeze(-2)
        table = torch.empty(ROWS, self.width, device="meta")
        inv_freq = self.inv_freq().to("meta") if self.computes else None
        return triton_rope.launch_arguments(
            pairs, positions, table, inv_freq, self.axes, self.style, self.offset, self.scaling,
            self.inverse,
        )  # fmt: skip


# ---------------------------------------------------------------------------------- which variants

STYLES = ("half", "interleaved", "interleaved_to_half", "half_blocks")
WIDTHS = (64, 128, 80, 96, 32, 192)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def blocks(width: int) -> tuple[int, ...]:
    """Three axes in blocks of multiples of 4 lanes, as far as the width allows."""
    half = width // 2
    first = max(4, half // 4 // 4 * 4)
    second = max(4, half * 3 // 8 // 4 * 4)
    return (0,) * first + (1,) * second + (2,) * (half - first - second)


def alternating(width: int) -> tuple[int, ...]:
    return tuple(lane % 3 for lane in range(width // 2))


def _axes(style: str, width: int) -> tuple[int, ...]:
    return blocks(width) if style == "half_blocks" else ()


def _forms(variant: Variant) -> Iterator[Variant]:
    """Fresh and in place, except where channels move."""
    yield variant
    if variant.style != "interleaved_to_half":
        yield replace(variant, in_place=True)


def _every_width() -> Iterator[Variant]:
    for width, style in itertools.product(WIDTHS, STYLES):
        variant = Variant(style, width, axes=_axes(style, width))
        yield from _forms(variant)
        yield replace(variant, inverse=True)


def _every_dtype() -> Iterator[Variant]:
    for dtype, style in itertools.product(DTYPES[1:], STYLES):
        yield from _forms(Variant(style, 64, axes=_axes(style, 64), dtype=dtype))


def _partial() -> Iterator[Variant]:
    for head_dim, width, offset in ((80, 32, 0), (80, 32, 48), (128, 96, 0), (192, 64, 128)):
        for style in STYLES[:3]:
            yield from _forms(Variant(style, head_dim, width, offset))
    yield from _forms(Variant("half_blocks", 80, 64, 16, axes=blocks(64)))


def _table_only() -> Iterator[Variant]:
    for style in STYLES:
        yield from _forms(Variant(style, 64, axes=_axes(style, 64), computes=False))
    yield Variant("half", 64, computes=False, inverse=True, in_place=True)


def _multi_axis() -> Iterator[Variant]:
    full = tuple(channel % 4 for channel in range(64))
    for style in ("half", "interleaved"):
        yield from _forms(Variant(style, 64, axes=blocks(64)))
        yield from _forms(Variant(style, 64, axes=alternating(64)))
    yield from _forms(Variant("half", 64, axes=full))
    yield Variant("half", 64, axes=full, inverse=True)
    yield Variant("half", 64, axes=blocks(64), dtype=torch.float32)
    yield Variant("half_blocks", 64, axes=blocks(64), inverse=True, in_place=True)


def _layouts() -> Iterator[Variant]:
    for layout, style in itertools.product(
        ("packed", "BHSD", "odd", "strided_last"), ("half", "interleaved")
    ):
        yield from _forms(Variant(style, 64, layout=layout))
    yield from _forms(Variant("half", 64, layout="odd", dtype=torch.float32))


def _phases() -> Iterator[Variant]:
    for style in STYLES[:2]:
        yield from _forms(Variant(style, 64, exact=True))
    yield Variant("half", 64, exact=True, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float32):
        yield Variant("half", 64, dtype=dtype, positions_dtype=torch.int32)


# Name of a check of the numbers -> its cases, the commonest first: a late run has those.
GROUPS: dict[str, list[Variant]] = {
    "widths": list(_every_width()),
    "dtypes": list(_every_dtype()),
    "partial": list(_partial()),
    "table_only": list(_table_only()),
    "axes": list(_multi_axis()),
    "layouts": list(_layouts()),
    "phases": list(_phases()),
}


def speed_variants(names: tuple[str, ...]) -> list[Variant]:
    """The kernels that the timed shapes take, by id of the shape."""
    found = []
    for name in names:
        shape = SHAPES[name]
        variant = Variant(
            shape.style,
            shape.head_dim,
            shape.rotary_dim,
            heads=(shape.q_heads, shape.k_heads),
            axes=tuple(shape.config.lane_axes),
            layout="slices" if shape.q_row else "contiguous",
            k_row=shape.k_row,
        )
        found += list(_forms(variant))
    return found
