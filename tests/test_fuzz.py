"""Any call is right: drawn shapes, memory layouts, dtypes, styles, axis maps and positions.

Every buffer that a kernel may touch lies inside a larger one: of NaN for floats, of positions far
away for integers. Rows and lanes of the table that no position names are NaN too, and so are the
frequencies where no position is outside of the table. What is read beside its place shows as a
wrong number, what is written there as a changed bit.

See ``profiles.py`` for the long search.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rope_compile as rc
from rope_compile import axes as axis_maps
from rope_compile import ops
from rope_compile.axes import Axes

from oracle import assert_near_oracle, oracle_rotate, oracle_table
from profiles import SCALE, examples, one_thread, refutes
from support import generator, run_child

STYLES = ("half", "interleaved", "half_blocks", "interleaved_to_half")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FAR = 2**30 + 12345  # what integers in guard bands say
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --------------------------------------------------------------------------------- axis maps


def alternating(pairs: int, tail: int) -> list[int]:
    return [(1, 2)[lane % 2] for lane in range(pairs)] + [0] * tail


def pangu_lanes(sections: tuple[int, ...]) -> list[int]:
    """The least served axis next, the first of equals, no axis twice in a row if avoidable."""
    left = list(sections)
    kept = min(1, left[0]) if len(left) == 3 else 0
    left[0] -= kept
    wanted = tuple(left)
    lanes: list[int] = []
    while any(left):
        order = sorted(
            (axis for axis in range(len(left)) if left[axis]),
            key=lambda axis: (
                axis == (lanes or [None])[-1],
                Fraction(wanted[axis] - left[axis], wanted[axis]),
                axis,
            ),
        )
        lanes.append(order[0])
        left[order[0]] -= 1
    return lanes + [0] * kept


def glm_lanes(sections: tuple[int, ...]) -> list[int]:
    left, lanes = list(sections), []
    while any(left):
        axis = len(lanes) % 3
        while not left[axis]:
            axis = (axis + 1) % 3
        left[axis] -= 1
        lanes.append(axis)
    return lanes


def masked_lanes(sections: tuple[int, ...]) -> list[int]:
    lanes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        lanes[axis : 3 * sections[axis] : 3] = axis
    return lanes.tolist()


def blocks(sizes: Sequence[int], order: Iterable[int] | None = None) -> list[int]:
    turns = range(len(sizes)) if order is None else order
    return [axis for axis in turns for _ in range(sizes[axis])]


def lanes_of(axes: Axes) -> tuple[int, ...]:
    """The axis of each lane, written again from the rules of the models."""
    if isinstance(axes, axis_maps.AxialAxes):
        sizes = [width // 2 for width in axes.dims]
        turns = axes.axis_order or tuple(range(len(sizes)))
        lanes = list(turns) * sizes[0] if axes.order == "alternating" else blocks(sizes, turns)
        return tuple(lanes)
    sections = axes.sections
    if isinstance(axes, axis_maps.XdropeAxes):
        return tuple(blocks([n * (2 if axes.full_width else 1) for n in sections]))
    rules: dict[type, Callable[[tuple[int, ...]], list[int]]] = {
        axis_maps.ChunkedAxes: blocks,
        axis_maps.InterleavedAxes: masked_lanes,
        axis_maps.GlmAxes: glm_lanes,
        axis_maps.PanguAxes: pangu_lanes,
        axis_maps.ErnieAxes: lambda s: alternating(s[0] + s[1], s[2]),
        axis_maps.BailingAxes: lambda s: alternating(s[1] + s[2], s[0]),
    }
    return tuple(rules[type(axes)](sections))


@st.composite
def shares(draw: st.DrawFn, total: int, parts: int) -> tuple[int, ...]:
    """``total`` cut into ``parts`` numbers, the last of them not 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total - 1), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


@st.composite
def axis_classes(draw: st.DrawFn, half: int, style: str) -> Axes:
    """A map of `rope_compile.axes` for ``half`` lanes; every class can come."""
    if style == "half_blocks":
        parts = draw(st.integers(1, min(4, half)))
        return axis_maps.AxialAxes(tuple(2 * n for n in draw(shares(half, parts))))
    kind = draw(st.sampled_from(CLASSES if half > 2 else CLASSES[:-3]))
    if kind is axis_maps.AxialAxes:
        parts = draw(st.sampled_from([n for n in (1, 2, 3, 4) if half % n == 0]))
        return kind(
            (2 * half // parts,) * parts,
            order=draw(st.sampled_from(["blocks", "alternating"])),
            axis_order=tuple(draw(st.permutations(range(parts)))),
        )
    if kind is axis_maps.InterleavedAxes:
        height, width = (draw(st.integers(1, len(range(a, half, 3)))) for a in (1, 2))
        return kind((half - height - width, height, width))
    if kind in (axis_maps.ErnieAxes, axis_maps.BailingAxes):
        moving = draw(st.integers(2, half))
        height, width, time = (moving + 1) // 2, moving // 2, half - moving
        ernie = kind is axis_maps.ErnieAxes
        return kind((height, width, time) if ernie else (time, height, width))
    if kind is axis_maps.XdropeAxes:
        return kind(draw(shares(half, 4)), full_width=style == "half" and draw(st.booleans()))
    counts = {axis_maps.ChunkedAxes: (2, 3, 4), axis_maps.PanguAxes: (2, 3)}.get(kind, (3,))
    return kind(draw(shares(half, draw(st.sampled_from(counts)))))


CLASSES = (
    axis_maps.ChunkedAxes,
    axis_maps.GlmAxes,
    axis_maps.PanguAxes,
    axis_maps.XdropeAxes,
    axis_maps.AxialAxes,
    axis_maps.InterleavedAxes,
    axis_maps.ErnieAxes,
    axis_maps.BailingAxes,
)


def lane_lists(half: int, style: str) -> st.SearchStrategy[tuple[int, ...]]:
    """One axis for each lane, or, in half style, for each channel."""

    def lanes(count: int, seed: int) -> tuple[int, ...]:
        chosen = random.Random(seed).choices(range(seed % 7 + 1), k=count)
        return tuple(sorted(chosen) if style == "half_blocks" else chosen)

    counts = st.sampled_from([half, 2 * half] if style == "half" else [half])
    return st.builds(lanes, counts, st.integers(0, 2**16))


# ------------------------------------------------------------------------------------ memory


def bits(x: Tensor) -> Tensor:
    """A copy that tells every NaN and both zeros apart."""
    return x.detach().clone().contiguous().view(INTEGER[x.element_size()])


class Placed(NamedTuple):
    """A tensor, the one-dimensional buffer around it, and the buffer's bits before the call."""

    view: Tensor
    buffer: Tensor
    before: Tensor

    def inside(self, *views: Tensor) -> Tensor:
        """Which elements of the buffer belong to the views."""
        mask = torch.zeros(self.buffer.shape, dtype=torch.bool)
        for view in views:
            if view.numel():
                mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        return mask

    def assert_unchanged(self, *written: Tensor) -> None:
        """No bit changed, outside of the views that were to be written."""
        changed = bits(self.buffer) != self.before
        assert not (changed & ~self.inside(*written)).any(), "memory was written beside its place"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its buffer: by dimension, gaps before and after it, and its steps."""

    order: tuple[int, ...]  # dimensions, from the outermost to the innermost
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: tuple[int, ...]
    expanded: tuple[bool, ...]  # of one element, repeated with stride 0
    offset: int

    def place(self, shape: Sequence[int], fill: float, dtype: torch.dtype, draw) -> Placed:
        """A tensor of this shape; ``draw(*shape)`` gives its values."""
        core = [1 if wide else n for n, wide in zip(shape, self.expanded, strict=True)]
        spans = [s * (n - 1) + 1 if n else 0 for n, s in zip(core, self.step, strict=True)]
        sizes = [sum(parts) for parts in zip(self.before, spans, self.after, strict=True)]
        buffer = torch.full((self.offset + math.prod(sizes) + 7,), fill, dtype=dtype)
        whole = buffer[self.offset : self.offset + math.prod(sizes)]
        whole = whole.view([sizes[dim] for dim in self.order])
        whole = whole.permute([self.order.index(dim) for dim in range(len(sizes))])
        cut = [slice(b, b + n, s) for b, n, s in zip(self.before, spans, self.step, strict=True)]
        view = whole[tuple(cut)]
        view.copy_(draw(*core))
        return Placed(view.expand(tuple(shape)), buffer, bits(buffer))

    def refuses_writes(self, shape: Sequence[int]) -> bool:
        """Whether two elements share memory."""
        return 0 not in shape and any(
            wide and n > 1 for wide, n in zip(self.expanded, shape, strict=True)
        )


def layouts(dims: int, expand: bool = True) -> st.SearchStrategy[Layout]:
    """Contiguous, or drawn from one number: a draw for each field would take longer than a call."""
    return (st.just(0) | st.integers(1, 2**16)).map(lambda seed: layout(seed, dims, expand))


def layout(seed: int, dims: int, expand: bool) -> Layout:
    """Layout number ``seed``; number 0 is contiguous."""
    none = (0,) * dims
    if not seed:
        return Layout(tuple(range(dims)), none, none, (1,) * dims, (False,) * dims, 8)
    chosen = random.Random(seed)

    def each(*choices: int) -> tuple[int, ...]:
        return tuple(chosen.choices(choices, k=dims))

    return Layout(
        tuple(chosen.sample(range(dims), k=dims)),
        before=each(0, 0, 1, 3, 8),
        after=each(0, 0, 1, 5, 8),
        step=each(1, 1, 1, 2, 3),
        expanded=tuple(n == 1 for n in each(0, 0, 0, 0, 0, 0, 1)) if expand else (False,) * dims,
        offset=chosen.choice([0, 8, 1, 5, 16]),
    )


# ------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """All of one call but its random numbers, which follow from ``seed``."""

    lead: tuple[int, ...]
    heads: tuple[int, int | None]  # k is absent where its number is None
    head_dims: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    layouts: tuple[Layout, Layout]
    gap: int | None  # heads between q and k in one projection; None: each has its own memory
    half: int
    rotary_offset: int
    style: str
    axes: Axes | tuple[int, ...] | None
    positions_shape: tuple[int, ...]
    positions_layout: Layout
    positions_dtype: torch.dtype
    positions: tuple[int, ...]  # the values that occur
    rows: int
    table_layout: Layout
    phase_dtype: torch.dtype | None  # None: no frequencies are given
    frequencies_layout: Layout
    base: float
    still_lanes: bool
    attention_scaling: float
    inverse: bool
    exponent: int  # of two: the size of q and k
    in_place: bool
    seed: int

    @property
    def lanes(self) -> tuple[int, ...]:
        """The axis of each lane or channel; empty without axes."""
        if self.axes is None:
            return ()
        return lanes_of(self.axes) if isinstance(self.axes, Axes) else self.axes

    def build(self) -> Arguments:
        places = self._positions()
        inv_freq = self._frequencies()
        given, table = self._table(places.view, inv_freq)
        q, k, parts = self._inputs()
        return Arguments(self, q, k, parts, places, table, given, inv_freq)

    def _positions(self) -> Placed:
        chosen = random.Random(self.seed)

        def draw(*shape: int) -> Tensor:
            values = [chosen.choice(self.positions) for _ in range(math.prod(shape))]
            return torch.tensor(values, dtype=self.positions_dtype).view(shape)

        return self.positions_layout.place(self.positions_shape, FAR, self.positions_dtype, draw)

    def _frequencies(self) -> Tensor:
        dtype = self.phase_dtype or torch.float32
        lanes = torch.arange(self.half, dtype=torch.float64)
        inv_freq = (1.0 / self.base ** (lanes / max(self.half, 1))).to(dtype)
        if self.still_lanes:
            inv_freq[torch.rand(self.half, generator=generator(self.seed)) < 0.3] = 0
        return inv_freq

    def _table(self, places: Tensor, inv_freq: Tensor) -> tuple[Placed | None, Placed]:
        """Frequencies and table as given: NaN wherever this call needs no number."""
        named, outside = self._named(places)
        rows = oracle_table(self.rows, inv_freq, self.attention_scaling)
        rows[~named] = math.nan
        width = 2 * self.half
        table = self.table_layout.place(
            (self.rows, width), math.nan, torch.float32, lambda *shape: rows.view(shape)
        )
        if self.phase_dtype is None:
            return None, table
        needed = inv_freq if outside else torch.full_like(inv_freq, math.nan)
        given = self.frequencies_layout.place(
            (self.half,), math.nan, self.phase_dtype, lambda *shape: needed.view(shape)
        )
        return given, table

    def _named(self, places: Tensor) -> tuple[Tensor, bool]:
        """Which numbers of the table are named, and whether a position lies outside."""
        named = torch.zeros(self.rows, 2 * self.half, dtype=torch.bool)
        outside = False
        lanes = self.lanes or (0,) * self.half
        planes = places.unsqueeze(0) if places.dim() < 2 or not self.lanes else places
        for i, axis in enumerate(lanes):
            at = planes[axis % len(planes)].flatten().tolist()
            for position in set(at):
                inside = 0 <= position < self.rows
                outside |= not inside
                if inside or (self.phase_dtype is None and self.rows):
                    row = min(max(position, 0), self.rows - 1)
                    named[row, [i % self.half, i % self.half + self.half]] = True
        return named, outside

    def _inputs(self) -> tuple[Tensor, Tensor | None, list[tuple[Placed, list[Tensor]]]]:
        seeds = generator(self.seed)

        def draw(dtype: torch.dtype):
            def values(*shape: int) -> Tensor:
                drawn = torch.randn(*shape, generator=seeds, dtype=torch.float64)
                return (drawn * 2.0**self.exponent).to(dtype)

            return values

        def place(i: int, heads: int) -> Placed:
            shape = (*self.lead, heads, self.head_dims[i])
            return self.layouts[i].place(shape, math.nan, self.dtypes[i], draw(self.dtypes[i]))

        q_heads, k_heads = self.heads
        if k_heads is None:
            q = place(0, q_heads)
            return q.view, None, [(q, [q.view])]
        if self.gap is not None:
            both = place(0, q_heads + max(self.gap, 0) + k_heads)
            start = both.view.shape[-2] - k_heads
            if self.shares_memory:
                start -= 1
            q_view = both.view[..., :q_heads, :]
            k_view = both.view[..., start : start + k_heads, :]
            return q_view, k_view, [(both, [q_view, k_view])]
        q, k = place(0, q_heads), place(1, k_heads)
        return q.view, k.view, [(q, [q.view]), (k, [k.view])]

    @property
    def shares_memory(self) -> bool:
        """Whether the last head of q is the first one of k."""
        return self.gap == -1 and None not in self.heads and min(self.heads) > 0

    @property
    def refusal(self) -> str | None:
        """What an in-place call says where it cannot be right."""
        if not self.in_place:
            return None
        if self.style == "interleaved_to_half":
            return "style 'interleaved_to_half' moves channels and cannot be applied in place"
        for i, name in enumerate(("q", "k")):
            heads, layout = self.heads[i], self.layouts[i if self.gap is None else 0]
            shape = (*self.lead, heads, self.head_dims[i])
            if heads is not None and layout.refuses_writes(shape):
                return f"{name} must not overlap itself to be rotated in place"
        if self.shares_memory and 0 not in self.lead:
            return "q and k must not share memory to be rotated in place"
        return None


@dataclass(frozen=True)
class Arguments:
    """The tensors of one call."""

    call: Call
    q: Tensor
    k: Tensor | None
    parts: list[tuple[Placed, list[Tensor]]]  # the buffers of q and k, and what may be written
    positions: Placed
    table: Placed
    inv_freq: Placed | None
    frequencies: Tensor  # without NaN, as the table was built

    @property
    def operator(self) -> tuple[object, ...]:
        """In the order of the schema."""
        call = self.call
        return (
            self.q, self.k, self.positions.view, self.table.view,
            None if self.inv_freq is None else self.inv_freq.view,
            list(call.lanes), call.style, call.rotary_offset, call.attention_scaling, call.inverse,
        )  # fmt: skip

    def expected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rotated x in float64, and what its error is measured by."""
        call, places = self.call, self.positions.view
        if call.phase_dtype is None and call.rows:
            places = places.clamp(0, call.rows - 1)
        if call.lanes and places.dim() < 2:  # the same position on every axis
            places = places.unsqueeze(0)
        if not call.half:
            return x.double(), x.double().abs()
        missing = len(call.lead) + bool(call.lanes) - places.dim()
        for _ in range(missing):
            places = places.unsqueeze(int(bool(call.lanes)))
        rotated, larger = oracle_rotate(
            x, places, self.frequencies, style=call.style, rotary_offset=call.rotary_offset,
            attention_scaling=call.attention_scaling, inverse=call.inverse, lane_axes=call.lanes,
        )  # fmt: skip
        return rotated, larger * max(1.0, call.attention_scaling)

    def passed(self, x: Tensor) -> list[Tensor]:
        """The channels of x that no rotation touches."""
        start = self.call.rotary_offset
        return [x[..., :start], x[..., start + 2 * self.call.half :]]


HALVES = st.sampled_from([1, 2, 3, 4, 8, 5, 16, 20, 32, 33, 48, 64, 96, 0])
HEADS = st.sampled_from([1, 2, 3, 1, 8, 5, 3, 2, 0])
ROWS = st.sampled_from([128, 1, 2, 127, 129, 300, 0])


@st.composite
def leads(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    """Token dimensions: any number of them, few tokens in all, now and then none."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 17]), max_size=4))
    while math.prod(sizes) > most:
        sizes.remove(max(sizes))
    if sizes and draw(st.integers(0, 9)) == 9:
        sizes[draw(st.integers(0, len(sizes) - 1))] = 0
    return tuple(sizes)


@st.composite
def places(draw: st.DrawFn, rows: int, dtype: torch.dtype) -> tuple[int, ...]:
    """A few positions: inside, at both ends, and anywhere the dtype reaches."""
    limits = torch.iinfo(dtype)
    edges = [0, 1, -1, rows - 1, rows, 2 * rows, 2**24 + 1, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        edges += [2**31, 2**32 + 7, 2**40, 2**53, -(2**62), limits.max, limits.min]
    inside = st.integers(0, max(rows - 1, 0))
    value = inside | st.sampled_from(edges) | st.integers(limits.min, limits.max)
    if draw(st.integers(0, 3)) == 0:
        value = inside
    return tuple(draw(st.lists(value, min_size=1, max_size=6)))


@st.composite
def position_shapes(
    draw: st.DrawFn, lead: tuple[int, ...], axes: Axes | tuple[int, ...] | None
) -> tuple[int, ...]:
    """What broadcasts to the token dimensions, axes first: ``[T]``, ``[S]``, ``[B, S]``, ..."""
    kept = draw(st.integers(0, len(lead)))
    shape = [draw(st.sampled_from([n, n, n, 1])) for n in lead[len(lead) - kept :]]
    if axes is None or (kept == 1 and draw(st.booleans())):
        return tuple(shape)
    if kept == 0:
        return ()  # rank 1 would be one position a token
    count = len(axes.lanes_per_axis()) if isinstance(axes, Axes) else max(axes) + 1
    return (draw(st.sampled_from([count, count, 1])), *shape)


@st.composite
def calls(draw: st.DrawFn, most_tokens: int = 90, **fixed: object) -> Call:
    """Any call that is allowed; ``fixed`` fields have one value."""

    def pick(name: str, strategy: st.SearchStrategy):
        return fixed[name] if name in fixed else draw(strategy)

    lead = pick("lead", leads(most_tokens))
    half = pick("half", HALVES)
    style = pick("style", st.sampled_from(STYLES if half else STYLES[:2]))
    axes = None
    if half:
        kinds = st.one_of(axis_classes(half, style), lane_lists(half, style))
        axes = pick("axes", kinds if style == "half_blocks" else st.none() | kinds)
    offset = draw(st.sampled_from([0, 0, 1, 3, 8, 16]))
    extra = draw(st.sampled_from([0, 0, 1, 7, 16, 64]))
    q_width = offset + 2 * half + extra
    q_dtype = pick("dtype", st.sampled_from(DTYPES))
    gap = draw(st.sampled_from([None, None, 0, 2, -1]))
    k_heads = pick("k_heads", st.none() | HEADS)
    if gap is not None:
        k_width, k_dtype = q_width, q_dtype
    else:
        k_width = max(q_width + draw(st.sampled_from([0, 0, 1, 8])), 1)
        k_dtype = pick("dtype", st.sampled_from((q_dtype, *DTYPES)))
    rows = pick("rows", ROWS)
    positions_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    shape = draw(position_shapes(lead, axes))
    phases = [torch.float32, torch.float64] * 2 + [None] * (rows > 0 or half == 0)
    dims = len(lead) + 2
    return Call(
        lead=lead,
        heads=(draw(HEADS), k_heads),
        head_dims=(max(q_width, 1), max(k_width, 1)),
        dtypes=(q_dtype, k_dtype),
        layouts=(
            draw(layouts(dims, expand=gap is None)),
            draw(layouts(dims)),
        ),
        gap=gap,
        half=half,
        rotary_offset=offset,
        style=style,
        axes=axes,
        positions_shape=shape,
        positions_layout=draw(layouts(len(shape))),
        positions_dtype=positions_dtype,
        positions=pick("positions", places(rows, positions_dtype)),
        rows=rows,
        table_layout=draw(layouts(2, expand=False)),
        phase_dtype=pick("phase_dtype", st.sampled_from(phases)),
        frequencies_layout=draw(layouts(1, expand=False)),
        base=draw(st.sampled_from([1e4, 5e5, 1e6, 10.0])),
        still_lanes=draw(st.booleans()),
        attention_scaling=pick(
            "attention_scaling", st.sampled_from([1.0, 1.1386294361119891, 0.5, 3.0, 8.0])
        ),
        inverse=pick("inverse", st.booleans()),
        exponent=draw(st.sampled_from([0, 0, -12, 6])),
        in_place=pick("in_place", st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


# ---------------------------------------------------------------------------------- the check


class Backend(NamedTuple):
    """Two callables with the arguments of the schema."""

    functional: Callable[..., tuple[Tensor, Tensor | None]]
    in_place: Callable[..., None]


def by_keyword(function: Callable[..., object]) -> Callable[..., object]:
    """A public function under the arguments of the schema; maps go in as they came."""

    def run(q, k, positions, table, inv_freq, axes, style, offset, scaling, inverse):
        return function(
            q, k, positions, table, inv_freq=inv_freq, axes=axes or None, style=style,
            rotary_offset=offset, attention_scaling=scaling, inverse=inverse,
        )  # fmt: skip

    return run


RIGHT = Backend(by_keyword(rc.apply_rope), by_keyword(rc.apply_rope_))
PLAIN = Backend(torch.ops.rope_compile.rope_torch, torch.ops.rope_compile.rope_torch_)


def assert_right(call: Call, backend: Backend, near=assert_near_oracle) -> None:
    """Values near the oracle, other channels bit for bit, and no other memory touched."""
    made = call.build()
    arguments = list(made.operator)
    if backend is RIGHT and isinstance(call.axes, Axes):
        arguments[5] = call.axes  # the public functions take the map itself
    inputs = [None if x is None else x.clone() for x in (made.q, made.k)]
    if call.refusal is not None:
        with pytest.raises(ValueError, match=re.escape(call.refusal)):
            backend.in_place(*arguments)
        outputs, written = inputs, False
    elif call.in_place:
        assert backend.in_place(*arguments) is None
        outputs, written = (made.q, made.k), True
    else:
        outputs, written = backend.functional(*arguments), False
        assert_fresh(made, outputs)
    for placed, views in made.parts:
        placed.assert_unchanged(*(views if written else ()))
    for placed in (made.positions, made.table, made.inv_freq):
        if placed is not None:
            placed.assert_unchanged()
    if call.refusal is not None:
        return
    for x, y in zip(inputs, outputs, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_values(made, x, y, near)


def assert_fresh(made: Arguments, outputs: Sequence[Tensor | None]) -> None:
    """Contiguous, and no memory of an input, nor of one another."""
    there = [y for y in outputs if y is not None]
    storages = {x.untyped_storage().data_ptr() for placed, _ in made.parts for x in (placed.view,)}
    for y in there:
        assert y.is_contiguous()
        if y.numel():
            assert y.untyped_storage().data_ptr() not in storages
            storages.add(y.untyped_storage().data_ptr())


def assert_values(made: Arguments, x: Tensor, y: Tensor, near=assert_near_oracle) -> None:
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    near(y, *made.expected(x))
    for before, after in zip(made.passed(x), made.passed(y), strict=True):
        assert torch.equal(bits(before), bits(after))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_the_native_kernel_is_what_cpu_tensors_get() -> None:
    """Else the first of the two searches below would repeat the second."""
    there, reason = ops.native_cpu_kernel()
    if not there:
        pytest.skip(f"needs the native CPU kernel: {reason}")
    assert torch.ops.rope_compile.rope_native is not None


@examples(450)
@given(calls())
def test_any_call_is_right(call: Call) -> None:
    """The public functions: the native kernel, and plain torch for what that does not take."""
    assert_right(call, RIGHT)


@examples(300)
@given(calls())
def test_any_call_is_right_in_plain_torch(call: Call) -> None:
    assert_right(call, PLAIN)


# --------------------------------------------------------------- what the search has found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("width", [3, 16])
def test_one_token_without_token_dimensions_takes_no_list_of_positions(width: int, device) -> None:
    """``[heads, head_dim]`` with axes: a position a token is one number, whatever head_dim is."""
    q, positions = torch.zeros(2, 16, device=device), torch.zeros(width, dtype=torch.int64)
    table = torch.zeros(128, 16, device=device)
    with pytest.raises(ValueError, match=r"positions must .*q.shape\[:-2\] = \(\), got \("):
        rc.apply_rope(q, None, positions.to(device), table, axes=[0, 1] * 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rc.ChunkedAxes((5, 3, 0)),
        lambda: rc.ErnieAxes((0, 0, 8)),
        lambda: rc.GlmAxes((8, 0, 0)),
        lambda: rc.AxialAxes((16, 0)),
    ],
)
def test_an_axis_without_lanes_is_refused_or_has_its_row_of_positions(make) -> None:
    """A config says ``num_axes`` rows; a call with that many works."""
    try:
        rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=16, max_position=128, axes=make()), "cpu")
    except ValueError:
        return
    positions, q = torch.arange(4).expand(rope.config.num_axes, 4), torch.ones(4, 2, 16)
    assert torch.equal(rope(positions, q)[0], rope(torch.arange(4), q)[0])


# ------------------------------------------------------------------------------- wrong twins


def twin(change: Callable[..., None]) -> Backend:
    """The plain kernel, after which ``change(outs, *arguments)`` does something wrong."""

    def functional(*arguments):
        outs = PLAIN.functional(*arguments)
        change(outs, *arguments)
        return outs

    def in_place(*arguments):
        PLAIN.in_place(*arguments)
        change(arguments[:2], *arguments)

    return Backend(functional, in_place)


def rebuilt(change: Callable[[list], None]) -> Backend:
    """The plain kernel, called with other arguments: ``change`` edits their list."""

    def edited(arguments: tuple) -> list:
        edits = list(arguments)
        change(edits)
        return edits

    return Backend(
        lambda *arguments: PLAIN.functional(*edited(arguments)),
        lambda *arguments: PLAIN.in_place(*edited(arguments)),
    )


def sign_below_zero(arguments: list) -> None:
    """cos and sin of |p|: the rotation of a negative position goes the wrong way."""
    arguments[2] = arguments[2].abs()


def clamp_outside(arguments: list) -> None:
    """Positions outside take the nearest row although there are frequencies."""
    if arguments[3].shape[0]:
        arguments[2] = arguments[2].clamp(0, arguments[3].shape[0] - 1)


def narrow_positions(arguments: list) -> None:
    arguments[2] = arguments[2].to(torch.int32)


def low_precision_rows(arguments: list) -> None:
    arguments[3] = arguments[3].to(torch.bfloat16).float()


def forget_magnitude(arguments: list) -> None:
    """Computed rows without the attention scaling that table rows have."""
    arguments[8] = 1.0


def inverse_of_everything(arguments: list) -> None:
    arguments[9] = False


def one_element_past(outs, q, *rest) -> None:
    """A store behind the last channel of the last head."""
    x = outs[0]
    if x.numel():
        end = x.storage_offset() + sum(
            (n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)
        )
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        if end + 1 < len(memory):
            memory[end + 1] = 0


def strides_of_q(outs, q, k, *rest) -> None:
    """k read with the head stride of q."""
    if (
        k is not None
        and outs[1] is not k
        and k.dim() == 3
        and k.numel()
        and q.stride() != k.stride()
    ):
        reach = k.storage_offset() + sum(
            (n - 1) * s for n, s in zip(k.shape, q.stride(), strict=True)
        )
        if reach < k.untyped_storage().nbytes() // k.element_size():
            moved = k.as_strided(k.shape, q.stride(), k.storage_offset())
            outs[1].copy_(PLAIN.functional(q, moved, *rest)[1])


def write_an_input(outs, q, *rest) -> None:
    if q.numel():
        rest[1].zero_()


def write_the_rest(outs, q, k, positions, table, inv_freq, axes, style, offset, *rest) -> None:
    """Channels in front of the rotated ones lose the sign of their zeros, or a bit."""
    outs[0][..., :offset] *= 1 + 2**-6


def alias_of_an_input(*arguments) -> tuple[Tensor, Tensor | None]:
    q, k = arguments[:2]
    if arguments[3].shape[1] == 0:
        return q, k
    return PLAIN.functional(*arguments)


TWINS = {
    "sign_below_zero": rebuilt(sign_below_zero),
    "clamp_outside": rebuilt(clamp_outside),
    "narrow_positions": rebuilt(narrow_positions),
    "low_precision_rows": rebuilt(low_precision_rows),
    "forget_magnitude": rebuilt(forget_magnitude),
    "inverse_of_everything": rebuilt(inverse_of_everything),
    "one_element_past": twin(one_element_past),
    "strides_of_q": twin(strides_of_q),
    "write_an_input": twin(write_an_input),
    "write_the_rest": twin(write_the_rest),
    "alias_of_an_input": Backend(alias_of_an_input, PLAIN.in_place),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_kernel_would_be_found(name: str) -> None:
    """Within the budget of CI, by the same check over the same calls."""
    refutes(lambda call: assert_right(call, TWINS[name]), calls(), number=300)


def test_a_wrong_lane_rule_would_be_found() -> None:
    """Wrong twin: lanes in another order than the class says."""

    def check(call: Call) -> None:
        if isinstance(call.axes, Axes) and len(set(call.lanes)) > 1:
            wrong = replace(call, axes=call.lanes[::-1], in_place=False)
            made = wrong.build()
            right = list(made.operator)
            right[5] = list(call.axes.lane_axes(2 * call.half))
            assert_values(made, made.q, PLAIN.functional(*right)[0])

    refutes(check, calls(attention_scaling=1.0), number=300)


# ------------------------------------------------------------------- the Triton interpreter


def near_truncated(actual: Tensor, expected: Tensor, larger: Tensor) -> None:
    """As the oracle's bound, but the interpreter truncates where it stores bfloat16."""
    if actual.dtype == torch.bfloat16:
        larger = larger + expected.abs() * 2**-7 / 1e-6
    assert_near_oracle(actual, expected, larger)


@pytest.mark.interpret
@examples(25)
@given(calls(most_tokens=10))
def test_any_call_is_right_in_the_interpreter(call: Call) -> None:
    assert_right(call, TRITON, near_truncated)


def run_triton(views, at, *rest) -> None:
    from rope_compile.kernels import triton_rope

    triton_rope.launch(triton_rope.rope_kernel, views, at, *rest)


TRITON = Backend(*ops._make_pair(run_triton))


def test_the_search_passes_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests of this file that are marked ``interpret``, in a process of their own.

    Triton reads TRITON_INTERPRET when a kernel is defined.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs a process without TRITON_INTERPRET=1: this one is interpreted")
    output = run_child(
        *("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "interpret"),
        str(Path(__file__)),
        TRITON_INTERPRET="1",
        timeout_s=600 * SCALE,
    )
    closing = output.strip().splitlines()[-1]
    assert re.search(r"[1-9]\d* passed", closing), output
    assert not re.search(r"skipped|xfailed|xpassed|failed", closing), output
    with capsys.disabled():
        sys.stdout.write(f"\ninterpreter search: {closing}\n")
