"""Recognises rotations among the values of a graph.

A rotation is a row of channels ``x[i] * c +- x[j] * s``, with the channels of one tensor in pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from rope_compile.inductor.expressions import NARROW, Products, Row, transposed
from rope_compile.inductor.nodes import dtype_of, is_one, real_shape_of, shape_of
from rope_compile.inductor.reader import Reader

aten = torch.ops.aten


class Part(NamedTuple):
    """Where one row of numbers stands: a slice of a node's channels, or one channel of pairs."""

    node: Node
    how: tuple[Any, ...]

    @property
    def lead(self) -> tuple[Any, ...]:
        """Sizes of the dimensions before the channels."""
        shape = real_shape_of(self.node)
        return shape[:-1] if self.how[0] == "slice" else shape[:-2]

    @property
    def width(self) -> int:
        """How many numbers."""
        if self.how[0] == "slice":
            return len(range(*self.how[1:]))
        return int(real_shape_of(self.node)[-3 - self.how[1]])


@dataclass(frozen=True)
class Rotation:
    """``node`` holds channels of ``source`` from ``start`` on, some of them rotated."""

    node: Node
    source: Node
    flat: bool  # channels are counted over the last two dimensions of the source
    start: int
    style: str
    rotary_offset: int
    inverse: bool
    parts: tuple[Part, ...]  # cos and sin; of full width those of the low and of the high channels
    heads: tuple[int, ...]  # dimensions that may be the heads: cos and sin are the same along them
    what: Products  # its first channel: the same in a rotation, its cast, and a cat around it

    @property
    def rotary_dim(self) -> int:
        return 2 * self.parts[0].width

    @property
    def joins(self) -> object:
        """What two rotations must share to be one call."""
        val = self.node.meta["val"]
        table = (self.parts, val.dim(), val.device)
        return (table, self.style, self.inverse)


class Refused(Exception):
    """A rotation by its form, but not one that the operator computes."""


def _same_dtype(x: Node, node: Node) -> bool:
    val = x.meta.get("val")
    return isinstance(val, Tensor) and val.dtype == dtype_of(node)


def _channels(
    r: Reader, source: Node, node: Node
) -> Iterator[tuple[bool, dict[int, tuple[int, int]]]]:
    """Channel and sign of every expression of a node that may be what is rotated."""
    val = source.meta.get("val")
    if not isinstance(val, Tensor) or not val.dtype.is_floating_point:
        return
    lead, (row, pairs) = list(map(str, shape_of(node)[:-1])), r.value(source)
    if row and list(map(str, val.shape[:-1])) == lead:
        yield False, {number >> 1: (i, number & 1) for i, number in enumerate(row)}
    if pairs and list(map(str, val.shape[:-2])) == lead:
        numbers = enumerate(itertools.chain(*pairs))
        yield True, {number >> 1: (i, number & 1) for i, number in numbers}


Lane = dict[int, tuple[int, int]]  # channel read -> coefficient and sign


def _lane(
    r: Reader, products: Products, negated: int, channels: dict[int, tuple[int, int]]
) -> Lane | None:
    """What one channel is made of, in terms of the channels of the source."""
    lane: Lane = {}
    for a, b, sign in products:
        known_a, known_b = (_known(r, x, channels) for x in (a, b))
        if (known_a is None) == (known_b is None):
            return None
        channel, own_sign = known_a or known_b  # type: ignore[misc]
        lane[channel] = (b if known_a else a, sign ^ own_sign ^ negated)
    return lane if len(lane) == 2 else None


def _known(r: Reader, index: int, channels: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """The channel of an expression, widened to float32 or not."""
    expression = r.expressions.all[index]
    if index not in channels and expression[0] == "cast":
        target, source = expression[1]
        if target == torch.float32 and source in NARROW:
            return channels.get(expression[2])
    return channels.get(index)


def _pairing(name: str, half: int) -> tuple[range, range]:
    if name == "half":
        return range(half), range(half, 2 * half)
    return range(0, 2 * half, 2), range(1, 2 * half, 2)


# Style, pairing read, pairing written, and which directions have it.
_LAYOUTS = (
    ("half", "half", "half", (False, True)),
    ("interleaved", "interleaved", "interleaved", (False, True)),
    ("interleaved_to_half", "interleaved", "half", (False,)),
    ("interleaved_to_half", "half", "interleaved", (True,)),
)


class _Coefficients(NamedTuple):
    """cos and sin at the first and at the second channel of every pair."""

    cos: Row
    cos_second: Row
    sin: Row
    sin_second: Row


def _fit(r: Reader, lanes: list[Lane], start: int) -> tuple[str, bool, _Coefficients] | None:
    """Style and direction of channels that pair up as a rotation's do."""
    half = len(lanes) // 2
    for style, read, written, directions in _LAYOUTS:
        pairs = list(zip(*_pairing(read, half), *_pairing(written, half), strict=True))
        entries = [
            (
                lanes[to].get(start + x), lanes[to_second].get(start + y),
                lanes[to].get(start + y), lanes[to_second].get(start + x),
            )
            for x, y, to, to_second in pairs
        ]  # fmt: skip
        if any(None in entry for entry in entries):
            continue
        numbers, signs = _split_signs(entries)  # type: ignore[arg-type]
        if signs == {(0, 0, 0, 0)}:
            raise Refused("sin has one sign on both channels of a pair: a reflection")
        for inverse in directions:
            if signs == {(0, 0, int(not inverse), int(inverse))}:
                return style, inverse, numbers
    return None


def _split_signs(
    entries: list[tuple[tuple[int, int], ...]],
) -> tuple[_Coefficients, set[tuple[int, ...]]]:
    columns = [tuple(2 * number for number, _ in column) for column in zip(*entries, strict=True)]
    return _Coefficients(*columns), {tuple(sign for _, sign in entry) for entry in entries}


def _follows(part: Part, second: Part) -> bool:
    """Whether two rows are the two halves, or the even and odd channels, of one tensor."""
    if second.node is not part.node or part.how[:-1] == second.how[:-1]:
        return False
    (kind, start, *rest), (other_kind, other, *_) = sorted((part.how, second.how))
    if kind == "select" or other_kind == "select":
        return False
    stop, step = rest
    return bool(start == 0 and other == (stop if step == 1 else 1))


def _find(r: Reader, row: Row, sources: list[Node]) -> Part | None:
    """The first node that holds these numbers at even distances, or as one channel of its pairs."""
    for node in sources:
        channels, pairs = r.value(node)
        if channels and row[0] in channels and shape_of(node):
            place = {number: i for i, number in reversed(list(enumerate(channels)))}
            at = [place.get(number, -1) for number in row]
            step = at[1] - at[0] if len(at) > 1 else 1
            if at[0] >= 0 and step > 0 and at == list(range(at[0], at[-1] + 1, step)):
                return Part(node, ("slice", at[0], at[-1] + 1, step))
        if pairs and node.target is not aten._conj.default:
            for dim, lines in ((-1, transposed(pairs)), (-2, pairs)):
                if len(lines) <= 2 and row in lines:
                    return Part(node, ("select", dim, lines.index(row)))
    return None


def _heads(node: Node, parts: tuple[Part, ...]) -> tuple[int, ...]:
    """The dimensions along which cos and sin do not change, best first."""
    lead, own = shape_of(node)[:-1], parts[0].lead
    if len({str(part.lead) for part in parts}) > 1 or len(own) > len(lead):
        raise Refused("cos and sin differ in shape, or have more dimensions than what is rotated")
    sizes = (1,) * (len(lead) - len(own)) + own
    shared = [i for i, size in enumerate(sizes) if is_one(size)]
    if any(str(size) != str(lead[i]) for i, size in enumerate(sizes) if i not in shared):
        raise Refused("cos and sin are larger than what is rotated")
    if not shared:
        raise Refused("cos and sin have values of their own for every head")
    if any(type(size) is int and size == 0 for size in lead):
        raise Refused("there is nothing to rotate")
    return tuple(sorted(shared, key=lambda i: (is_one(lead[i]), -i)))


def _check_dtypes(*nodes: Node) -> None:
    for node in nodes:
        if dtype_of(node) in (torch.float64, torch.complex128):
            raise Refused("float64 is left alone: the table would be float32")
        if dtype_of(node) not in (*NARROW, torch.float32, torch.complex64):
            raise Refused(f"{dtype_of(node)} is not a dtype of the operator")


class Recogniser:
    """Finds the rotation in a node; those with the same cos and sin have the same two parts."""

    def __init__(self, reader: Reader, trust_full_width: bool) -> None:
        self.reader = reader
        self.trust = trust_full_width
        self._tables: dict[object, tuple[Part, ...]] = {}

    def recognise(self, node: Node) -> Rotation | None:
        """The rotation that a node holds.

        Raises:
            Refused: it looks like one and cannot, or must not, be replaced.
        """
        r = self.reader
        row = r.value(node).row
        if row is None or not isinstance(node.meta.get("val"), Tensor):
            return None
        terms = [r.expressions.sums.get(number >> 1) for number in row]
        rotated = [i for i, products in enumerate(terms) if products]
        first, count = (rotated[0], len(rotated)) if rotated else (0, 0)
        if not count or count % 2 or rotated[-1] - first != count - 1:
            return None
        sources = r.sources(node)
        for source in sorted(sources, key=lambda x: not _same_dtype(x, node)):
            for flat, channels in _channels(r, source, node):
                lanes = [
                    _lane(r, products, row[i] & 1, channels)
                    for i, products in enumerate(terms)
                    if products
                ]
                if any(lane is None for lane in lanes):
                    continue
                start = min(channel for lane in lanes if lane for channel in lane)
                found = _fit(r, lanes, start)  # type: ignore[arg-type]
                passed = all(
                    terms[i] or channels.get(number >> 1) == (start - first + i, number & 1)
                    for i, number in enumerate(row)
                )
                if found is None or not passed or start < first:
                    continue
                style, inverse, coefficients = found
                parts = self._parts(coefficients, style, inverse, sources)
                heads = _heads(node, parts)
                _check_dtypes(node, source, *(part.node for part in parts))
                return Rotation(
                    node, source, flat, start - first, style, first, inverse, parts, heads,
                    r.expressions.sums[row[first] >> 1],
                )  # fmt: skip
        return None

    def _parts(
        self, found: _Coefficients, style: str, inverse: bool, sources: list[Node]
    ) -> tuple[Part, ...]:
        """Where cos and sin of the low channels stand, and of the high ones unless they agree."""
        low, high = (found.cos, found.sin), (found.cos_second, found.sin_second)
        if inverse:  # the transpose: each channel takes the sine of the other one
            low, high = (found.cos, found.sin_second), (found.cos_second, found.sin)
        parts, others = [], []
        for name, row, second in zip(("cos", "sin"), low, high, strict=True):
            part = _find(self.reader, row, sources)
            if part is None:
                raise Refused(f"{name} is not in one tensor")
            other = part if row == second else self._other(name, part, row, second, sources)
            parts.append(part)
            others.append(other)
        if low != high and self.trust:
            parts = [min(pair, key=lambda x: x.how) for pair in zip(parts, others, strict=True)]
        elif low != high:
            if style != "half":
                raise Refused(_unknown("cos and sin"))
            parts += others
        return self._tables.setdefault((low, high), tuple(parts))

    def _other(self, name: str, part: Part, row: Row, second: Row, sources: list[Node]) -> Part:
        """The second half of what comes into the graph at full width."""
        other = _find(self.reader, second, sources)
        given = all(map(self.reader.is_given, (row, second)))
        if other is None or not (given and _follows(part, other)):
            raise Refused(_unknown(name))
        return other


def _unknown(name: str) -> str:
    return (
        f"the two channels of a pair are not known to have the same {name}; "
        "enable(trust_full_width=True) takes the first for both"
    )
