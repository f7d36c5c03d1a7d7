"""Value numbers: every expression that a channel may hold, once, and rows of them.

See NOTE [Value numbers] in the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

NARROW = (torch.float16, torch.bfloat16)

Row = tuple[int, ...]  # numbers of channels: 2 * expression, + 1 where it is negated
Rows = tuple[Row, ...]  # of the last two dimensions
ZERO, ONE = 0, 2
Product = tuple[int, int, int]  # two expressions and a sign
Products = tuple[Product, Product]
T = TypeVar("T")


class Expressions:
    """Every expression once: its index is its value number. The sign is kept apart.

    Products, casts and moves are odd functions, bit for bit, so a sign travels to the outside of
    an expression and ``(-a) * b`` meets ``-(a * b)``.
    """

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = [("zero",), ("constant", 1.0)]
        self.sums: dict[int, Products] = {}  # what may be a channel of a rotation
        self._index: dict[tuple[Any, ...], int] = {self.all[ONE >> 1]: ONE >> 1}
        self._atoms: dict[tuple[int, int], int] = {}

    def number(self, expression: tuple[Any, ...]) -> int:
        index = self._index.get(expression)
        if index is None:
            index = self._index[expression] = len(self.all)
            self.all.append(expression)
            products = self._products(*expression)
            if products:
                self.sums[index] = products
        return 2 * index

    def atoms(self, key: int, count: int) -> Row:
        """Channels of which nothing is known but whose they are."""
        start = self._atoms.get((key, count))
        if start is None:
            start = self._atoms[key, count] = len(self.all)
            self.all.extend(("atom", key, i) for i in range(count))
        return tuple(range(2 * start, 2 * (start + count), 2))

    def constant(self, value: float) -> int:
        if value == 0:
            return ZERO
        return self.number(("constant", abs(value))) | (value < 0)

    def odd(self, kind: str, key: object, number: int) -> int:
        """An odd function of one channel: the sign goes to the outside, zero stays zero."""
        if number >> 1 == ZERO:
            return ZERO
        return self.number((kind, key, number >> 1)) | (number & 1)

    def multiply(self, a: int, b: int) -> int:
        sign, x, y = (a ^ b) & 1, a >> 1, b >> 1
        if ONE >> 1 in (x, y):
            return (b if x == ONE >> 1 else a) & ~1 | sign
        return self.number(("mul", x, y) if x < y else ("mul", y, x)) | sign

    def add(self, a: int, b: int) -> int:
        if a >> 1 == ZERO or b >> 1 == ZERO:
            return b if a >> 1 == ZERO else a
        if a & b & 1:
            return self.add(a ^ 1, b ^ 1) ^ 1
        return self.number(("add", a, b) if a < b else ("add", b, a))

    def _products(self, kind: str, *of: Any) -> Products | None:
        """A sum of two products; that it, or they, are rounded to 16 bits is looked through."""
        if kind == "cast" and _narrows(of[0]):
            return self.sums.get(of[1])
        if kind != "add":
            return None
        found = []
        for term in of:
            product = self.all[term >> 1]
            if product[0] == "cast" and _narrows(product[1]):
                product = self.all[product[2]]
            if product[0] != "mul":
                return None
            found.append((product[1], product[2], term & 1))
        return (found[0], found[1])


def _narrows(cast: tuple[torch.dtype, torch.dtype]) -> bool:
    return cast[0] in NARROW and cast[1] == torch.float32


class Value(NamedTuple):
    """What is known of a tensor: its channels, and its last two dimensions where one holds pairs.

    A complex tensor has ``pairs`` alone, those of its ``view_as_real``.
    """

    row: Row | None = None
    pairs: Rows | None = None


Result = Value | list[Value] | None


def stretch(seq: tuple[T, ...], size: int) -> tuple[T, ...] | None:
    return seq if len(seq) == size else seq * size if len(seq) == 1 else None


def leveled(rows: Sequence[Row]) -> list[Row] | None:
    """Rows broadcast to one width."""
    width = max(map(len, rows))
    return all_known(stretch(row, width) for row in rows)


def all_known(items: Iterable[T | None]) -> list[T] | None:
    """The items, if none is missing."""
    found = list(items)
    present = [item for item in found if item is not None]
    return present if len(present) == len(found) else None


def transposed(pairs: Rows) -> Rows:
    return tuple(zip(*pairs, strict=True))
