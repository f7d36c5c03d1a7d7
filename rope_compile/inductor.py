"""An Inductor pass that finds hand-written rotary embedding and puts the operator in its place.

>>> import rope_compile as rc
>>> rc.inductor.enable()
>>> compiled = torch.compile(model)  # nothing in the model changes
>>> ...
>>> rc.inductor.report()  # what was replaced at each compilation, and what was not, and why

Models write the rotation in many ways: ``rotate_half``, split halves, even and odd channels,
complex numbers, a rotated part beside a copied one. No list of patterns holds them all, so the pass
reads what a graph *computes*, not how it is written.

NOTE [Value numbers] Every tensor is seen as a row of channels, its last dimension, and every
channel gets a number that stands for the expression it holds. Equal numbers are equal values: the
two halves of ``cat((f, f), -1).cos()`` have the same ones. What only moves channels (slices, cat,
views as pairs, complex views) moves numbers; elementwise functions make new ones. A rotation is
then a row whose channels are ``x[i] * c +- x[j] * s`` with the channels i, j of one tensor in pairs
and the signs of a rotation (RoFormer, arXiv 2104.09864); its gradient is one too, with the signs
swapped.

The table of the operator is built from the cos and sin of the graph itself, one row for each token,
once for all layers that share them, so nothing is assumed about frequencies or positions. What is
not understood is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch._inductor.config as inductor_config  # the names used below: see `_SLOTS`
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import rope_compile.ops
from rope_compile.ops import rope_op

__all__ = ["Record", "disable", "enable", "report"]

aten, prims = torch.ops.aten, torch.ops.prims
_log = logging.getLogger(__name__)

MAX_CHANNELS = 512  # wider last dimensions are not heads
_NARROW = (torch.float16, torch.bfloat16)


# ------------------------------------------------------------------------------------- expressions

Row = tuple[int, ...]  # numbers of channels: 2 * expression, + 1 where it is negated
Rows = tuple[Row, ...]  # of the last two dimensions
ZERO, ONE = 0, 2
Product = tuple[int, int, int]  # two expressions and a sign
Products = tuple[Product, Product]
T = TypeVar("T")


class _Expressions:
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
    return cast[0] in _NARROW and cast[1] == torch.float32


class _Value(NamedTuple):
    """What is known of a tensor: its channels, and its last two dimensions where one holds pairs.

    A complex tensor has ``pairs`` alone, those of its ``view_as_real``.
    """

    row: Row | None = None
    pairs: Rows | None = None


Result = _Value | list[_Value] | None


def _stretch(seq: tuple[T, ...], size: int) -> tuple[T, ...] | None:
    return seq if len(seq) == size else seq * size if len(seq) == 1 else None


def _level(rows: Sequence[Row]) -> list[Row] | None:
    """Rows broadcast to one width."""
    width = max(map(len, rows))
    return _all(_stretch(row, width) for row in rows)


def _all(items: Iterable[T | None]) -> list[T] | None:
    """The items, if none is missing."""
    found = list(items)
    present = [item for item in found if item is not None]
    return present if len(present) == len(found) else None


def _transposed(pairs: Rows) -> Rows:
    return tuple(zip(*pairs, strict=True))


# --------------------------------------------------------------------------------- reading a graph


class _Reader:
    """Gives every node of a graph its value, in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.expressions = _Expressions()
        self.values: dict[Node, Result] = {}
        self.keys: dict[Node, int] = {}  # equal for two nodes that compute the same
        self.place: dict[Node, int] = {}
        self.understood: set[Node] = set()
        self.given: set[int] = set()  # keys of what comes into the graph
        self.backward: set[Node] = set()
        self.tables: dict[object, tuple[_Part, _Part]] = {}  # one for all layers that share it
        self._key_of: dict[object, int] = {}
        for node in graph.nodes:
            self._read(node)

    def _read(self, node: Node) -> None:
        self.place[node] = len(self.place)
        self.keys[node] = self._key(node)
        if (node.op == "placeholder" and str(node.target).startswith("tangents")) or any(
            x in self.backward for x in node.all_input_nodes
        ):
            self.backward.add(node)
        if node.op in ("placeholder", "get_attr"):
            self.given.add(self.keys[node])
        value: Result = None
        if node.op == "call_function":
            rule = _RULES.get(node.target) or (_elementwise if _is_pointwise(node) else None)
            value = rule(self, node) if rule else None
        if value is not None:
            self.understood.add(node)
        self.values[node] = value if isinstance(value, list) else self._completed(node, value)

    def _key(self, node: Node) -> int:
        target = node.target
        pure = node.op == "call_function" and (
            target is operator.getitem
            or (
                isinstance(target, torch._ops.OpOverload)
                and target.namespace in ("aten", "prims")
                and not target._schema.is_mutable
                and torch.Tag.nondeterministic_seeded not in target.tags
            )
        )
        key = (target, self.plain(node.args), self.plain(node.kwargs)) if pure else node
        return self._key_of.setdefault(key, len(self._key_of))

    def plain(self, argument: Any) -> object:
        """An argument as something to compare and to hash."""
        if isinstance(argument, Node):
            return ("node", self.keys[argument])
        if isinstance(argument, list | tuple):
            return tuple(map(self.plain, argument))
        if isinstance(argument, dict):
            return tuple((name, self.plain(value)) for name, value in argument.items())
        return (type(argument), str(argument))

    def _completed(self, node: Node, value: _Value | None) -> _Value | None:
        """``value`` with atoms for what is not known."""
        val = node.meta.get("val")
        if not isinstance(val, Tensor):
            return None
        row, pairs = value or (None, None)
        shape, key = _real_shape(node), self.keys[node]
        if row is None and not val.is_complex() and _is_small(shape[-1:]):
            row = self.expressions.atoms(key, shape[-1] if shape else 1)
        if pairs is None and len(shape) > 1 and _is_small(shape[-2:]) and shape[-1] == 2:
            atoms = iter(self.expressions.atoms(key, 2 * shape[-2]))
            pairs = tuple(zip(atoms, atoms, strict=True))
        return _Value(row, pairs)

    def value(self, node: Any) -> _Value:
        value = self.values.get(node) if isinstance(node, Node) else None
        return value if isinstance(value, _Value) else _Value()

    def moved(self, key: object, row: Row | None) -> Row | None:
        """Channels of a tensor whose other dimensions were moved, selected or indexed."""
        if row is None:
            return None
        return tuple(self.expressions.odd("move", key, number) for number in row)

    def moved_pairs(self, key: object, pairs: Rows | None) -> Rows | None:
        if pairs is None:
            return None
        key = ("pairs", key)
        return tuple(tuple(self.expressions.odd("move", key, n) for n in row) for row in pairs)

    def move_key(self, node: Node) -> object:
        """What a node does to the dimensions before the channels of its first argument."""
        source = node.args[0]
        shape = map(str, _shape(source) if isinstance(source, Node) else ())
        return (node.target, self.plain(node.args[1:]), tuple(shape), str(_shape(node)))

    def is_given(self, row: Row) -> bool:
        """Whether channels come into the graph from outside, and are only moved or cast in it."""
        return all(kind == "atom" and of[0] in self.given for kind, *of in map(self._stripped, row))

    def _stripped(self, number: int) -> tuple[Any, ...]:
        expression = self.expressions.all[number >> 1]
        while expression[0] in ("move", "cast") and len(expression) == 3:
            expression = self.expressions.all[expression[2]]
        return expression

    def sources(self, node: Node) -> list[Node]:
        """The nodes a node is made of by ways that are understood, and where those start."""
        found: dict[Node, None] = {}
        todo = list(node.all_input_nodes)
        while todo and len(found) < 512:
            source = todo.pop()
            if source not in found:
                found[source] = None
                todo += source.all_input_nodes if source in self.understood else []
        return sorted(found, key=self.place.__getitem__)


def _shape(node: Node) -> tuple[Any, ...]:
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def _real_shape(node: Node) -> tuple[Any, ...]:
    """The shape, as ``view_as_real`` shows it."""
    shape = _shape(node)
    return (*shape, 2) if _is_complex(node) else shape


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def _is_complex(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_complex()


def _is_small(sizes: Iterable[Any]) -> bool:
    total = 1
    for size in sizes:
        if type(size) is not int:
            return False
        total *= size
    return 0 < total <= MAX_CHANNELS


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


# --------------------------------------------------------------------------- what operators compute

Rule = Callable[[_Reader, Node], Result]
_RULES: dict[Any, Rule] = {}


def _rule(*targets: object) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _from_end(x: Node, dim: int) -> int:
    """A dimension counted from the last one of the real shape: -1 are the channels."""
    rank = len(_shape(x))
    return dim % max(rank, 1) - rank - _is_complex(x)


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _first(node: Node) -> Node | None:
    x = node.args[0] if node.args else None
    return x if isinstance(x, Node) and isinstance(x.meta.get("val"), Tensor) else None


def _along(
    r: _Reader, node: Node, x: Node, at: int, move: Callable[[Any], Any], key: object
) -> _Value:
    """Move channels where ``at`` is a dimension that holds them; else the rest has moved."""
    row, pairs = r.value(x)
    if at == -1:
        pairs = tuple(move(part) for part in pairs) if pairs else None
        return _Value(move(row) if row else None, pairs)
    row = r.moved(key, row)
    return _Value(row, pairs and move(pairs) if at == -2 else r.moved_pairs(key, pairs))


@_rule(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
    aten.view_as_real.default, aten.view_as_complex.default, aten.resolve_conj.default,
)  # fmt: skip
def _same(r: _Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or _is_complex(x) == _is_complex(node):
        return r.value(x)
    return _Value(None, r.value(x).pairs)


@_rule(aten._conj.default)
def _conjugate(r: _Reader, node: Node) -> Result:
    pairs = r.value(node.args[0]).pairs
    return _Value(None, pairs and tuple((real, imag ^ 1) for real, imag in pairs))


@_rule(operator.getitem)
def _item(r: _Reader, node: Node) -> Result:
    source: Any = node.args[0]
    parts = r.values.get(source)
    index: Any = node.args[1]
    return parts[index] if isinstance(parts, list) else None


@_rule(aten.slice.Tensor)
def _slice(r: _Reader, node: Node) -> Result:
    x = _first(node)
    at = None if x is None else _from_end(x, _argument(node, 1, 0))
    bounds = slice(*(_argument(node, i, None) for i in (2, 3, 4)))
    if x is None or at is None or (at >= -2 and not _is_plain(bounds)):
        return None
    return _along(r, node, x, at, lambda part: part[bounds], r.move_key(node))


def _is_plain(bounds: slice) -> bool:
    return all(n is None or type(n) is int for n in (bounds.start, bounds.stop, bounds.step))


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(r: _Reader, node: Node) -> Result:
    x = _first(node)
    if x is None:
        return None
    at, dim = _from_end(x, _argument(node, 2, 0)), _argument(node, 2, 0)
    sizes = [part.shape[dim] for part in node.meta["val"]]
    if not all(type(size) is int for size in sizes):
        return None
    stops = list(itertools.accumulate(sizes))
    return [
        _along(r, node, x, at, operator.itemgetter(slice(stop - n, stop)), (r.move_key(node), i))
        for i, (n, stop) in enumerate(zip(sizes, stops, strict=True))
    ]


@_rule(aten.select.int)
def _select(r: _Reader, node: Node) -> Result:
    x = _first(node)
    dim, index = node.args[1], node.args[2]
    if x is None or _is_complex(x) or not isinstance(dim, int):
        return None
    return _selected(r, x, _from_end(x, dim), index, r.move_key(node))


@_rule(aten.unbind.int)
def _unbind(r: _Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or _is_complex(x):
        return None
    at, key = _from_end(x, _argument(node, 1, 0)), r.move_key(node)
    return [_selected(r, x, at, i, (key, i)) for i in range(len(node.meta["val"]))]


def _selected(r: _Reader, x: Node, at: int, index: Any, key: object) -> _Value:
    row, pairs = r.value(x)
    if at >= -2 and type(index) is not int:
        return _Value()
    if at == -1:
        return _Value(tuple(part[index] for part in pairs) if pairs else None)
    if at == -2 and pairs:
        return _Value(pairs[index])
    return _Value(r.moved(key, row), r.moved_pairs(key, pairs) if at < -2 else None)


@_rule(aten.flip.default)
def _flip(r: _Reader, node: Node) -> Result:
    x, dims = _first(node), node.args[1]
    if x is None or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    at = _from_end(x, dims[0])  # type: ignore[arg-type]
    return _along(r, node, x, at, operator.itemgetter(slice(None, None, -1)), r.move_key(node))


@_rule(aten.cat.default)
def _cat(r: _Reader, node: Node) -> Result:
    parts: Any = node.args[0]
    if any(
        len(_shape(part)) != len(_shape(node)) or _dtype(part) != _dtype(node) for part in parts
    ):
        return None
    at = _from_end(node, _argument(node, 1, 0))
    key = ("cat", at, str([_shape(part) for part in parts]))
    rows = _all(r.value(part).row for part in parts)
    pairs = _all(r.value(part).pairs for part in parts)
    row = None
    if rows:
        row = sum(rows, ()) if at == -1 else _stacked(r, key, rows)
    return _Value(row, _cat_pairs(r, at, key, pairs) if pairs else None)


def _cat_pairs(r: _Reader, at: int, key: object, pairs: list[Rows]) -> Rows | None:
    if at == -2:
        return sum(pairs, ())
    if len({len(part) for part in pairs}) != 1:
        return None
    lines = zip(*pairs, strict=True)
    if at == -1:
        return tuple(sum(line, ()) for line in lines)
    return tuple(_stacked(r, key, line) for line in lines)


def _stacked(r: _Reader, key: object, rows: Sequence[Row]) -> Row:
    """Channels of tensors that were joined along another dimension."""
    return tuple(
        r.expressions.number(("move", key, *column)) if any(n >> 1 for n in column) else ZERO
        for column in zip(*rows, strict=True)
    )


@_rule(aten.unsqueeze.default)
def _unsqueeze(r: _Reader, node: Node) -> Result:
    x, dim = _first(node), node.args[1]
    if x is None or not isinstance(dim, int):
        return None
    row, pairs = r.value(x)
    at, key = _from_end(node, dim), r.move_key(node)
    if at == -1:
        return _Value(None, tuple((number,) for number in row) if row else None)
    if at == -2:
        return _Value(r.moved(key, row), (row,) if row else None)
    return _Value(r.moved(key, row), r.moved_pairs(key, pairs))


@_rule(aten.permute.default)
def _permute(r: _Reader, node: Node) -> Result:
    x, dims = _first(node), node.args[1]
    if x is None or not isinstance(dims, list | tuple):
        return None
    order = [_from_end(x, dim) for dim in dims]  # type: ignore[arg-type]
    order = [*order, -1] if _is_complex(x) else order
    (row, pairs), key = r.value(x), r.move_key(node)
    if order[-2:] == [-1, -2]:
        turned = _transposed(pairs) if pairs else None
        alone = order[:-2] == list(range(-len(order), -2))
        return _Value(None, turned if alone else r.moved_pairs(key, turned))
    row = r.moved(key, row) if order[-1:] == [-1] else None
    return _Value(row, r.moved_pairs(key, pairs) if order[-2:] == [-2, -1] else None)


@_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(r: _Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or _is_complex(x) != _is_complex(node):
        return None
    return _reshaped(r, x, node, r.move_key(node))


@_rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(r: _Reader, node: Node) -> Result:
    return _view(r, node)


def _reshaped(r: _Reader, x: Node, node: Node, key: object) -> Result:
    (row, pairs), old, new = r.value(x), _real_shape(x), _real_shape(node)
    if not old or not new:
        return None
    if old == new:
        return _Value(row, pairs)
    if pairs and _is_small(old[-2:]) and old[-2] * old[-1] == new[-1]:
        flat = tuple(itertools.chain(*pairs))
        return _Value(flat if old[:-2] == new[:-1] else r.moved(key, flat))
    if row and len(new) > 1 and _is_small(new[-2:]) and new[-2] * new[-1] == old[-1]:
        moved = row if old[:-1] == new[:-2] else r.moved(key, row)
        return _Value(None, _in_lines(moved, new[-1]) if moved else None)
    same_row = type(new[-1]) is int and old[-1] == new[-1]
    same_pairs = same_row and old[-2:] == new[-2:]
    return _Value(
        r.moved(key, row) if same_row else None,
        r.moved_pairs(key, pairs) if same_pairs else None,
    )


def _in_lines(row: Row, width: int) -> Rows | None:
    """``[n * width]`` seen as ``[n, width]``, where one of the two is 1 or 2."""
    lines = tuple(row[i : i + width] for i in range(0, len(row), width))
    return lines if min(width, len(lines)) <= 2 else None


@_rule(aten.expand.default)
def _expand(r: _Reader, node: Node) -> Result:
    """Broadcasting does the same, so channels keep their numbers."""
    x = _first(node)
    shape = _real_shape(node)
    if x is None or not _shape(x) or not _is_small(shape[-1:]):
        return None
    row, pairs = r.value(x)
    lines = _all(_stretch(line, shape[-1]) for line in pairs or ()) if pairs else None
    return _Value(
        _stretch(row, shape[-1]) if row else None,
        _stretch(tuple(lines), shape[-2]) if lines and _is_small(shape[-2:]) else None,
    )


@_rule(aten.embedding.default, aten.index_select.default, aten.index.Tensor)
def _gather(r: _Reader, node: Node) -> Result:
    """Rows picked by an index: the channels stay what they are."""
    x = _first(node)
    if x is None or not _shape(x) or not _leaves_channels(x, node):
        return None
    return _Value(r.moved(r.move_key(node), r.value(x).row))


def _leaves_channels(x: Node, node: Node) -> bool:
    rank, which = len(_shape(x)), node.args[1]
    if node.target is aten.index_select.default:
        return isinstance(which, int) and which % rank != rank - 1
    if node.target is aten.index.Tensor:
        return isinstance(which, list | tuple) and len(which) < rank
    return node.target is aten.embedding.default


@_rule(
    aten.full.default, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default,
    aten.full_like.default,
)  # fmt: skip
def _zeros(r: _Reader, node: Node) -> Result:
    filled = "full" in str(node.target)
    shape = _real_shape(node)
    if (filled and node.args[1] != 0) or not shape or not _is_small(shape[-1:]):
        return None
    row = (ZERO,) * shape[-1]
    pair = len(shape) > 1 and _is_small(shape[-2:]) and shape[-1] == 2
    return _Value(None if _is_complex(node) else row, (row,) * shape[-2] if pair else None)


@_rule(aten.slice_scatter.default)
def _slice_scatter(r: _Reader, node: Node) -> Result:
    x, part = node.args[:2]
    if not isinstance(part, Node) or _dtype(part) != _dtype(node):
        return None
    bounds = slice(*(_argument(node, i, None) for i in (3, 4, 5)))
    return _scattered(r, node, r.value(x).row, r.value(part).row, _argument(node, 2, 0), bounds)


@_rule(aten.slice_backward.default)
def _slice_backward(r: _Reader, node: Node) -> Result:
    dim, *bounds = node.args[2:]
    zeros = _zeros_like(node)
    return _scattered(r, node, zeros, r.value(node.args[0]).row, dim, slice(*bounds))


def _zeros_like(node: Node) -> Row | None:
    shape = _shape(node)
    return (ZERO,) * shape[-1] if _is_small(shape[-1:]) else None


def _scattered(
    r: _Reader, node: Node, row: Row | None, part: Row | None, dim: Any, bounds: slice
) -> Result:
    if row is None or part is None or _from_end(node, dim) != -1 or not _is_plain(bounds):
        return None
    new = list(row)
    if len(new[bounds]) != len(part):
        return None
    new[bounds] = part
    return _Value(tuple(new))


@_rule(aten.select_scatter.default)
def _select_scatter(r: _Reader, node: Node) -> Result:
    x, part, dim, index = node.args
    if not isinstance(part, Node) or _dtype(part) != _dtype(node):
        return None
    return _put(r, node, r.value(x).pairs, r.value(part).row, dim, index)


@_rule(aten.select_backward.default)
def _select_backward(r: _Reader, node: Node) -> Result:
    grad, _sizes, dim, index = node.args
    part, shape = r.value(grad).row, _shape(node)
    pairs = ((ZERO,) * shape[-1],) * shape[-2] if _is_small(shape[-2:]) else None
    return _put(r, node, pairs, part, dim, index)


def _put(r: _Reader, node: Node, pairs: Rows | None, part: Row | None, dim: Any, i: Any) -> Result:
    """One of the two channels of every pair replaced."""
    at = _from_end(node, dim)
    if pairs is None or part is None or at < -2 or type(i) is not int:
        return None
    lines = [list(line) for line in (_transposed(pairs) if at == -1 else pairs)]
    lines[i] = list(part)
    new = tuple(map(tuple, lines))
    return _Value(None, _transposed(new) if at == -1 else new)


@_rule(aten.constant_pad_nd.default)
def _pad(r: _Reader, node: Node) -> Result:
    row = r.value(node.args[0]).row
    widths: Any = node.args[1]
    if row is None or _argument(node, 2, 0) != 0:
        return None
    if len(widths) != 2 or not all(type(n) is int and n >= 0 for n in widths):
        return None
    left, right = widths
    return _Value((ZERO,) * left + row + (ZERO,) * right)


@_rule(prims.convert_element_type.default, aten._to_copy.default)
def _convert(r: _Reader, node: Node) -> Result:
    return _in_dtype(r, node, node.args[0])


@_rule(aten.copy.default)
def _copy(r: _Reader, node: Node) -> Result:
    """The second argument, in the dtype of the first."""
    return _in_dtype(r, node, node.args[1])


def _in_dtype(r: _Reader, node: Node, x: Any) -> Result:
    if _is_complex(x) or _is_complex(node) or _shape(x) != _shape(node):
        return None
    row, pairs = r.value(x)
    return _Value(
        _cast(r, node, x, row) if row else None, _cast_pairs(r, node, x, pairs) if pairs else None
    )


def _cast(r: _Reader, node: Node, x: Node, row: Row) -> Row:
    """A row in the dtype of ``node``."""
    target, source = _dtype(node), _dtype(x)
    if target == source:
        return row
    return tuple(r.expressions.odd("cast", (target, source), number) for number in row)


def _cast_pairs(r: _Reader, node: Node, x: Node, pairs: Rows) -> Rows:
    return tuple(_cast(r, node, x, line) for line in pairs)


@_rule(aten.complex.default)
def _complex(r: _Reader, node: Node) -> Result:
    parts = _all(r.value(x).row for x in node.args)
    level = _level(parts) if parts else None
    return _Value(None, _transposed(tuple(level)) if level else None)


def _elementwise(r: _Reader, node: Node) -> Result:
    """Any function of single elements, with broadcasting."""
    operands = [x for x in node.args if isinstance(x, Node)]
    listed = any(isinstance(x, list | tuple) for x in node.args)
    if not operands or listed or any(isinstance(x, Node) for x in node.kwargs.values()):
        return None
    if any(_is_complex(x) for x in (*operands, node)):
        return _complex_arithmetic(r, node)
    rows = _all(_operand(r, node, x) for x in node.args)
    level = _level(rows) if rows else None
    return _Value(_combined(r, node, level) if level else None, _elementwise_pairs(r, node))


def _operand(r: _Reader, node: Node, x: object) -> Row | None:
    """The channels of an argument; operands of arithmetic in the dtype of the result."""
    if isinstance(x, Node):
        row = r.value(x).row
        if row is None and not isinstance(x.meta.get("val"), Tensor):
            return (r.expressions.number(("scalar", r.keys[x])),)
        return _cast(r, node, x, row) if row and node.target in _ARITHMETIC else row
    if isinstance(x, int | float) and node.target in _ARITHMETIC:
        return (r.expressions.constant(float(x)),)
    return (r.expressions.number(("argument", r.plain(x))),)


def _elementwise_pairs(r: _Reader, node: Node) -> Rows | None:
    """The same on two dimensions; an operand with one is the same for all before it."""
    found = _all(_operand_pairs(r, node, x) for x in node.args)
    if not found or not any(r.value(x).pairs for x in node.args):
        return None
    size = max(map(len, found))
    stretched = _all(_stretch(part, size) for part in found)
    lines = _all(_level(line) for line in zip(*stretched, strict=True)) if stretched else None
    if not lines or min(size, len(lines[0][0])) > 2:
        return None
    return tuple(_combined(r, node, line) for line in lines)


def _operand_pairs(r: _Reader, node: Node, x: object) -> Rows | None:
    pairs = r.value(x).pairs
    if isinstance(x, Node) and pairs:
        return _cast_pairs(r, node, x, pairs) if node.target in _ARITHMETIC else pairs
    row = _operand(r, node, x)
    return (row,) if row and not (isinstance(x, Node) and len(_shape(x)) > 1) else None


_MULTIPLY = {aten.mul.Tensor, aten.mul.Scalar}
_ADD = {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar}
_ARITHMETIC = _MULTIPLY | _ADD | {aten.addcmul.default}


def _combined(r: _Reader, node: Node, rows: Sequence[Row]) -> Row:
    columns = zip(*rows, strict=True)
    target, more = node.target, r.plain(node.kwargs)
    multiply, add = r.expressions.multiply, r.expressions.add
    scaled = bool(node.kwargs) or (target in _ADD and len(rows) > 2)
    if target in _MULTIPLY:
        return tuple(map(multiply, *rows))
    if target in _ADD and not scaled:
        sign = "sub" in str(target)
        return tuple(add(a, b ^ sign) for a, b in columns)
    if target is aten.addcmul.default and not scaled:
        return tuple(add(a, multiply(b, c)) for a, b, c in columns)
    if target is aten.neg.default:
        return tuple(a ^ 1 for (a,) in columns)
    return tuple(r.expressions.number((target, more, *column)) for column in columns)


def _complex_arithmetic(r: _Reader, node: Node) -> Result:
    """The product of two complex numbers, written out."""
    parts = _all(r.value(x).pairs for x in node.args)
    both = all(isinstance(x, Node) and _is_complex(x) for x in node.args)
    if node.target not in _MULTIPLY or not parts or not both:
        return None
    size = max(map(len, parts))
    lines = _all(_stretch(part, size) for part in parts)
    if not lines:
        return None
    multiply, add = r.expressions.multiply, r.expressions.add
    product = [
        (add(multiply(a, c), multiply(b, d) ^ 1), add(multiply(a, d), multiply(b, c)))
        for (a, b), (c, d) in zip(*lines, strict=True)
    ]
    return _Value(None, tuple(product))


# ---------------------------------------------------------------------------- recognising rotations


class _Part(NamedTuple):
    """Where one row of numbers stands: a slice of a node's channels, or one channel of pairs."""

    node: Node
    how: tuple[Any, ...]

    @property
    def lead(self) -> tuple[Any, ...]:
        """Sizes of the dimensions before the channels."""
        shape = _real_shape(self.node)
        return shape[:-1] if self.how[0] == "slice" else shape[:-2]


@dataclass(frozen=True)
class _Rotation:
    """``node`` holds channels of ``source`` from ``start`` on, some of them rotated."""

    node: Node
    source: Node
    flat: bool  # channels are counted over the last two dimensions of the source
    start: int
    style: str
    rotary_offset: int
    inverse: bool
    cos: _Part
    sin: _Part
    heads: tuple[int, ...]  # dimensions that may be the heads: cos and sin are the same along them
    what: Products  # its first channel: the same in a rotation, its cast, and a cat around it

    @property
    def joins(self) -> object:
        """What two rotations must share to be one call."""
        val = self.node.meta["val"]
        table = (self.cos, self.sin, val.dim(), val.device)
        return (table, self.style, self.rotary_offset, self.inverse)


class _Refused(Exception):
    """A rotation by its form, but not one that the operator computes."""


def _recognise(r: _Reader, node: Node, trust: bool) -> _Rotation | None:
    """The rotation that a node holds.

    Raises:
        _Refused: it looks like one and cannot, or must not, be replaced.
    """
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
            cos, sin = _coefficients(r, coefficients, sources, trust)
            heads = _heads(node, cos, sin)
            _check_dtypes(node, source, cos.node, sin.node)
            return _Rotation(
                node, source, flat, start - first, style, first, inverse, cos, sin, heads,
                r.expressions.sums[row[first] >> 1],
            )  # fmt: skip
    return None


def _same_dtype(x: Node, node: Node) -> bool:
    val = x.meta.get("val")
    return isinstance(val, Tensor) and val.dtype == _dtype(node)


def _channels(
    r: _Reader, source: Node, node: Node
) -> Iterator[tuple[bool, dict[int, tuple[int, int]]]]:
    """Channel and sign of every expression of a node that may be what is rotated."""
    val = source.meta.get("val")
    if not isinstance(val, Tensor) or not val.dtype.is_floating_point:
        return
    lead, (row, pairs) = list(map(str, _shape(node)[:-1])), r.value(source)
    if row and list(map(str, val.shape[:-1])) == lead:
        yield False, {number >> 1: (i, number & 1) for i, number in enumerate(row)}
    if pairs and list(map(str, val.shape[:-2])) == lead:
        numbers = enumerate(itertools.chain(*pairs))
        yield True, {number >> 1: (i, number & 1) for i, number in numbers}


Lane = dict[int, tuple[int, int]]  # channel read -> coefficient and sign


def _lane(
    r: _Reader, products: Products, negated: int, channels: dict[int, tuple[int, int]]
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


def _known(r: _Reader, index: int, channels: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """The channel of an expression, widened to float32 or not."""
    expression = r.expressions.all[index]
    if index not in channels and expression[0] == "cast":
        target, source = expression[1]
        if target == torch.float32 and source in _NARROW:
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


def _fit(r: _Reader, lanes: list[Lane], start: int) -> tuple[str, bool, _Coefficients] | None:
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
            raise _Refused("sin has one sign on both channels of a pair: a reflection")
        for inverse in directions:
            if signs == {(0, 0, int(not inverse), int(inverse))}:
                return style, inverse, numbers
    return None


def _split_signs(
    entries: list[tuple[tuple[int, int], ...]],
) -> tuple[_Coefficients, set[tuple[int, ...]]]:
    columns = [tuple(2 * number for number, _ in column) for column in zip(*entries, strict=True)]
    return _Coefficients(*columns), {tuple(sign for _, sign in entry) for entry in entries}


def _coefficients(
    r: _Reader, found: _Coefficients, sources: list[Node], trust: bool
) -> tuple[_Part, _Part]:
    """cos and sin of the pairs, where both channels of each have the same."""
    parts = []
    for name, row, second in (
        ("cos", found.cos, found.cos_second),
        ("sin", found.sin, found.sin_second),
    ):
        part = _find(r, row, sources)
        if part is None:
            raise _Refused(f"{name} is not in one tensor")
        if row != second:
            other = _find(r, second, sources)
            if other is None or not (trust and _follows(part, other) and r.is_given(row)):
                raise _Refused(
                    f"the two channels of a pair are not known to have the same {name}; "
                    "enable(trust_full_width=True) takes the first for both"
                )
            part = min(part, other, key=lambda x: x.how)
        parts.append(part)
    return r.tables.setdefault((found.cos, found.sin), (parts[0], parts[1]))


def _follows(part: _Part, second: _Part) -> bool:
    """Whether two rows are the two halves, or the even and odd channels, of one tensor."""
    if second.node is not part.node or part.how[:-1] == second.how[:-1]:
        return False
    (kind, start, *rest), (other_kind, other, *_) = sorted((part.how, second.how))
    if kind == "select" or other_kind == "select":
        return False
    stop, step = rest
    return bool(start == 0 and other == (stop if step == 1 else 1))


def _find(r: _Reader, row: Row, sources: list[Node]) -> _Part | None:
    """The first node that holds these numbers at even distances, or as one channel of its pairs."""
    for node in sources:
        channels, pairs = r.value(node)
        if channels and row[0] in channels and _shape(node):
            place = {number: i for i, number in reversed(list(enumerate(channels)))}
            at = [place.get(number, -1) for number in row]
            step = at[1] - at[0] if len(at) > 1 else 1
            if at[0] >= 0 and step > 0 and at == list(range(at[0], at[-1] + 1, step)):
                return _Part(node, ("slice", at[0], at[-1] + 1, step))
        if pairs and node.target is not aten._conj.default:
            for dim, lines in ((-1, _transposed(pairs)), (-2, pairs)):
                if len(lines) <= 2 and row in lines:
                    return _Part(node, ("select", dim, lines.index(row)))
    return None


def _heads(node: Node, cos: _Part, sin: _Part) -> tuple[int, ...]:
    """The dimensions along which cos and sin do not change, best first."""
    lead = _shape(node)[:-1]
    if list(map(str, cos.lead)) != list(map(str, sin.lead)) or len(cos.lead) > len(lead):
        raise _Refused("cos and sin differ in shape, or have more dimensions than what is rotated")
    sizes = (1,) * (len(lead) - len(cos.lead)) + cos.lead
    shared = [i for i, size in enumerate(sizes) if _is_one(size)]
    if any(str(size) != str(lead[i]) for i, size in enumerate(sizes) if i not in shared):
        raise _Refused("cos and sin are larger than what is rotated")
    if not shared:
        raise _Refused("cos and sin have values of their own for every head")
    if any(type(size) is int and size == 0 for size in lead):
        raise _Refused("there is nothing to rotate")
    return tuple(sorted(shared, key=lambda i: (_is_one(lead[i]), -i)))


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def _check_dtypes(*nodes: Node) -> None:
    for node in nodes:
        if _dtype(node) in (torch.float64, torch.complex128):
            raise _Refused("float64 is left alone: the table would be float32")
        if _dtype(node) not in (*_NARROW, torch.float32, torch.complex64):
            raise _Refused(f"{_dtype(node)} is not a dtype of the operator")


# ------------------------------------------------------------------- what is put in place, as torch


def _picked(x: Tensor, how: tuple[Any, ...]) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    if how[0] == "select":
        return x.select(how[1], how[2])
    return torch.ops.aten.slice.Tensor(x, -1, *how[1:])  # type: ignore[no-any-return]


def _build_rows(
    cos: Tensor, sin: Tensor, cos_how: tuple[Any, ...], sin_how: tuple[Any, ...], drop: int
) -> tuple[Tensor, Tensor]:
    """The table, one row for each token, and the positions to read it by.

    ``drop`` is the dimension of the heads, of size 1, or negative where there is none.
    """
    rows = torch.cat((_picked(cos, cos_how), _picked(sin, sin_how)), -1).to(torch.float32)
    *tokens, width = rows.shape
    table = rows.reshape(-1, width).clone(memory_format=torch.contiguous_format)
    count = table.shape[0]
    if free_unbacked_symbols(count):  # may turn out to be no row, which rope refuses
        table = torch.nn.functional.pad(table, (0, 0, 0, 1))
    tokens = [size for i, size in enumerate(tokens) if i != drop]
    return _written(table, table.shape), _written(torch.arange(count, device=rows.device), tokens)


def _written(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x.view(shape)`` of memory that is written once.

    Inductor computes what other views show again for each launch that reads it, so once or twice a
    layer. as_strided has its input written (torch 2.13; the tests count the buffers).
    """
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return x.as_strided(shape, steps[-2::-1])


class _Call(NamedTuple):
    """The static arguments of :func:`_rotate`."""

    style: str
    rotary_offset: int
    inverse: bool
    heads: int
    one_axis: bool
    slices: tuple[tuple[bool, int, int], ...]  # flat, start, width of q, and of k
    dtypes: tuple[torch.dtype, ...]


def _rotate(
    table: Tensor, positions: Tensor, *sources: Tensor, call: _Call
) -> tuple[Tensor | None, ...]:
    """One call for one or two tensors, between the layout of a model and that of the operator."""
    given = []
    for x, (flat, start, width), dtype in zip(sources, call.slices, call.dtypes, strict=True):
        x = x.flatten(-2) if flat else x
        x = x.narrow(-1, start, width) if x.shape[-1] != width else x
        x = x.to(torch.promote_types(x.dtype, dtype))
        given.append(x.movedim(call.heads, -2))
    axes = (0,) * (table.shape[1] // 2) if call.one_axis else ()
    positions = positions.unsqueeze(0) if call.one_axis else positions
    rotated = rope_op(
        given[0], given[1] if len(given) > 1 else None, positions, table, None, axes, call.style,
        call.rotary_offset, 1.0, call.inverse,
    )  # fmt: skip
    return tuple(
        x.movedim(-2, call.heads).to(dtype) for x, dtype in zip(rotated, call.dtypes, strict=False)
    )


# Where a node belongs: which line of the model, forward or backward, saved or computed again.
_INHERITED = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "seq_nr",
    "partitioner_tag", "autograd_backward", "recompute", "ac_graph_id", "custom",
)  # fmt: skip


class _Writer:
    """Writes functions of tensors into a graph."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self._traced: dict[object, fx.GraphModule] = {}

    def write(
        self, function: Callable[..., Any], inputs: Sequence[Node], before: Node, **static: Any
    ) -> list[Node]:
        """The nodes of ``function(*inputs, **static)``, put before ``before``.

        Traced as AOTAutograd traces a model, so that a launch for a GPU shows here too. The layers
        of a model have the same shapes: what was traced for one serves all.
        """
        key = (function, str(static), tuple(map(_layout, inputs)))
        traced = self._traced.get(key)
        if traced is None:
            body = dispatch_functionalize(functools.partial(function, **static))
            with self.mode, torch.no_grad():
                tracer = make_fx(body, decomposition_table=select_decomp_table())
                traced = tracer(*(x.meta["val"] for x in inputs))
            self._traced[key] = traced
        copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        inherited = {name: before.meta[name] for name in _INHERITED if name in before.meta}
        with self.graph.inserting_before(before):
            for node in traced.graph.nodes:
                if node.op == "call_function":
                    copies[node] = self.graph.node_copy(node, copies.__getitem__)
                    val = {"val": node.meta["val"]} if "val" in node.meta else {}
                    copies[node].meta = val | inherited
        (output,) = traced.graph.find_nodes(op="output")
        return [copies[x] for x in output.args[0]]


def _layout(node: Node) -> tuple[object, ...]:
    val = node.meta["val"]
    return (str(tuple(val.shape)), str(val.stride()), val.dtype, val.device)


# ------------------------------------------------------------------------------ changing the graph


@dataclass(frozen=True)
class Record:
    """What the pass did with rotations of one kind; see :func:`report`."""

    replaced: bool
    shapes: tuple[tuple[int | str, ...], ...]  # of what was rotated by one call, as in the model
    style: str = ""
    rotary_dim: int = 0
    inverse: bool = False  # a rotation back, such as the gradient
    backward: bool = False  # in the backward part of a training graph
    reason: str = ""  # why it was left as it is
    count: int = field(default=1)  # how many were met

    @property
    def joined(self) -> bool:
        """Whether one call rotates two tensors, q and k."""
        return self.replaced and len(self.shapes) == 2


@dataclass(frozen=True)
class _Options:
    trust_full_width: bool = False


def _replace_rotations(graph: fx.Graph, options: _Options) -> list[Record]:
    """Replace what is a rotation in ``graph``; what was done, and what was refused."""
    reader = _Reader(graph)
    found, refused = _find_rotations(graph, reader, options)
    needed, chosen = _outermost(reader, graph, found)
    records = [
        Record(False, (_sizes(node),), backward=node in reader.backward, reason=reason)
        for node, reason in refused.items()
        if node in needed
    ]
    if not chosen:
        return records
    mode = next(x for x in map(_fake_mode, graph.nodes) if x is not None)
    writer = _Writer(graph, mode)
    changed: dict[Node, Any] = {}
    tables: dict[object, list[Node]] = {}
    for group in _groups(reader, chosen, found):
        heads = _common_heads(group)
        records.append(_record(reader, group))
        for rotation, new in zip(group, _write_call(writer, tables, group, heads), strict=True):
            old = rotation.node.meta["val"]
            if _strides(new.meta["val"]) != _strides(old):
                changed[new] = old
            rotation.node.replace_all_uses_with(new)
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    _settle(writer, changed)
    graph.lint()
    return records


def _find_rotations(
    graph: fx.Graph, reader: _Reader, options: _Options
) -> tuple[dict[Node, _Rotation], dict[Node, str]]:
    found: dict[Node, _Rotation] = {}
    refused: dict[Node, str] = {}
    for node in graph.nodes:
        if node not in reader.understood or _RULES.get(node.target) is _same:
            continue
        try:
            rotation = _recognise(reader, node, options.trust_full_width)
        except _Refused as refusal:
            refused[node] = str(refusal)
        else:
            if rotation is not None:
                found[node] = rotation
    return found, refused


def _outermost(
    r: _Reader, graph: fx.Graph, found: dict[Node, _Rotation]
) -> tuple[set[Node], list[_Rotation]]:
    """The nodes that still run, and the rotations among them, in order.

    Taken from the end: a rotation inside another one (the part that a cat puts beside the copied
    channels, the float32 result before its cast) runs only if something else uses it too. Then it
    is the one that is replaced.
    """
    needed, chosen = _running(graph, found)
    first = {rotation.what: rotation.node for rotation in reversed(chosen)}
    around = [x.node for x in chosen if first[x.what] in r.sources(x.node)]
    if around:
        return _running(graph, {x.node: x for x in chosen if x.node not in around})
    return needed, chosen


def _running(graph: fx.Graph, found: dict[Node, _Rotation]) -> tuple[set[Node], list[_Rotation]]:
    needed: set[Node] = set()
    chosen = []
    for node in reversed(graph.nodes):
        if node not in needed and not (node.op == "output" or node.is_impure()):
            continue
        needed.add(node)
        rotation = found.get(node)
        if rotation is None:
            needed.update(node.all_input_nodes)
        else:
            chosen.append(rotation)
            needed.update((rotation.source, rotation.cos.node, rotation.sin.node))
    return needed, chosen[::-1]


def _groups(
    r: _Reader, chosen: list[_Rotation], found: dict[Node, _Rotation]
) -> list[list[_Rotation]]:
    """q and k together: two with one table, neither made from the other."""
    rotated = {rotation.node for rotation in chosen}
    groups = []
    waiting = list(chosen)
    while waiting:
        first = waiting.pop(0)
        group = [first]
        for second in waiting:
            if (
                second.joins == first.joins
                and _common_heads([first, second]) is not None
                and not _depends(r, second, first, rotated)
            ):
                waiting.remove(second)
                group.append(second)
                break
        groups.append(group)
    return groups


def _depends(r: _Reader, second: _Rotation, first: _Rotation, rotated: set[Node]) -> bool:
    """Whether ``second`` is made from ``first``, or from any rotation after it.

    The latter keeps pairs from waiting for one another: a call then depends on earlier pairs alone.
    """
    todo, seen = [second.source], set()
    start = r.place[first.node]
    while todo:
        node = todo.pop()
        if node in seen or r.place[node] < start:
            continue
        if node in rotated:
            return True
        seen.add(node)
        todo += node.all_input_nodes
    return False


def _common_heads(group: list[_Rotation]) -> int | None:
    """The dimension that is the heads for all: every other one has the same size."""
    for heads in group[0].heads:
        tokens = {
            tuple(str(n) for i, n in enumerate(_shape(x.node)[:-1]) if i != heads) for x in group
        }
        if len(tokens) == 1 and all(heads in x.heads for x in group):
            return heads
    return None


def _write_call(
    writer: _Writer, tables: dict[object, list[Node]], group: list[_Rotation], heads: int | None
) -> list[Node]:
    assert heads is not None  # one alone always has one; two were asked
    first, last = group[0], group[-1]
    drop = heads - (len(_shape(first.node)) - 1 - len(first.cos.lead))
    key = (first.cos, first.sin, drop)
    if key not in tables:
        tables[key] = writer.write(
            _build_rows, (first.cos.node, first.sin.node), first.node,
            cos_how=first.cos.how, sin_how=first.sin.how, drop=drop,
        )  # fmt: skip
    call = _Call(
        style=first.style,
        rotary_offset=first.rotary_offset,
        inverse=first.inverse,
        heads=heads,
        one_axis=bool(V.aot_compilation),
        slices=tuple((x.flat, x.start, _shape(x.node)[-1]) for x in group),
        dtypes=tuple(_dtype(x.node) for x in group),
    )
    return writer.write(_rotate, (*tables[key], *(x.source for x in group)), last.node, call=call)


def _record(r: _Reader, group: list[_Rotation]) -> Record:
    first = group[0]
    how = first.cos.how
    lanes = (
        len(range(*how[1:])) if how[0] == "slice" else int(_real_shape(first.cos.node)[-3 - how[1]])
    )
    return Record(
        True,
        tuple(_sizes(x.node) for x in group),
        first.style,
        2 * lanes,
        first.inverse,
        first.node in r.backward,
    )


def _sizes(node: Node) -> tuple[int | str, ...]:
    return tuple(size if type(size) is int else str(size) for size in _shape(node))


def _fake_mode(node: Node) -> FakeTensorMode | None:
    val = node.meta.get("val")
    return val.fake_mode if isinstance(val, FakeTensor) else None


def _strides(val: Any) -> object:
    """The strides that matter, of one tensor or several."""
    if isinstance(val, Tensor):
        return [
            str(n) for n, size in zip(val.stride(), val.shape, strict=True) if not _is_one(size)
        ]
    return list(map(_strides, val)) if isinstance(val, list | tuple) else None


def _settle(writer: _Writer, changed: dict[Node, Any]) -> None:
    """Carry new strides on to the nodes that take any, and copy back to the old ones for others.

    The operator writes ``[..., heads, head_dim]``, whatever the strides of its input; elementwise
    formulas keep those. ``changed`` has the old value of every node whose strides are new.
    """
    for node in list(writer.graph.nodes):
        stale = [x for x in node.all_input_nodes if x in changed]
        if not stale:
            continue
        val = _run(writer.mode, node)
        if val is None:
            for x in stale:
                steps = changed[x].stride()
                order = sorted(range(len(steps)), key=[-step for step in steps].__getitem__)
                (copy,) = writer.write(_copied, (x,), node, order=tuple(order))
                node.replace_input_with(x, copy)
        elif "val" in node.meta and _strides(val) != _strides(node.meta["val"]):
            changed[node], node.meta["val"] = node.meta["val"], val


def _copied(x: Tensor, order: tuple[int, ...]) -> tuple[Tensor]:
    """The same in memory of this order of dimensions."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return (x.permute(order).clone(memory_format=torch.contiguous_format).permute(back),)


def _run(mode: FakeTensorMode, node: Node) -> Any:
    """What a node gives for its inputs of now; None where strides must stay as they were."""
    target: Any = node.target
    ours = isinstance(target, torch._ops.OpOverload) and (
        target.namespace in ("aten", "prims", "rope_compile")
        and not target._schema.is_mutable
        and "stride" not in str(target)
    )
    if not ours and target is not operator.getitem:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    try:
        with mode:
            return target(*args, **kwargs)
    except (RuntimeError, ValueError):  # a view that these strides do not allow
        return None


# ------------------------------------------------------------------------------------- the switch

# Where Inductor takes passes over the graph of a model before it is split into forward and
# backward. The first does the work; the second is for graphs that missed it, because somebody's own
# pass took its place. Tests fail when the names move (torch 2.11 to 2.14 have them).
_SLOTS = ("joint_custom_pre_pass", "joint_custom_post_pass")


class _State:
    """The switch behind :func:`enable`."""

    options: _Options | None = None
    records: ClassVar[Counter[Record]] = Counter()
    done: ClassVar[weakref.WeakSet[fx.Graph]] = weakref.WeakSet()  # not to be read again


class _RopePass(CustomGraphPass):
    """The pass as Inductor calls it, behind those that stood in its place before."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        if _State.options is None or graph in _State.done:
            return
        _State.done.add(graph)
        for record in _replace_rotations(graph, _State.options):
            _State.records[record] += 1
            _log.info("%s", record)

    def uuid(self) -> object | None:
        """Part of the key of compiled code; None, which forbids caching, where another has none."""
        others = []
        for other in self.before:
            if not isinstance(other, CustomGraphPass) or not other.uuid():
                return None
            others.append(other.uuid())
        return (_identity(), repr(_State.options), tuple(others))


@functools.cache
def _identity() -> str:
    """The code that decides what is put into a graph, and the versions it runs with."""
    names = ("inductor.py", "ops.py", "kernels/triton_rope.py")
    root = Path(rope_compile.ops.__file__).parent
    code = b"".join((root / name).read_bytes() for name in names)
    return f"rope_compile.inductor {torch.__version__} {hashlib.sha256(code).hexdigest()}"


def _passes(slot: str) -> tuple[Any, ...]:
    now = getattr(inductor_config, slot)
    return () if now is None else tuple(now) if isinstance(now, list | tuple) else (now,)


def _install() -> None:
    for slot in _SLOTS:
        passes = _passes(slot)
        if not any(isinstance(x, _RopePass) for x in passes):
            setattr(inductor_config, slot, _RopePass(passes))


def _remove() -> None:
    for slot in _SLOTS:
        passes = _passes(slot)
        if any(isinstance(x, _RopePass) for x in passes):
            left = [y for x in passes for y in (x.before if isinstance(x, _RopePass) else (x,))]
            setattr(inductor_config, slot, left if len(left) > 1 else left[0] if left else None)


def _set(options: _Options | None) -> None:
    _State.options = options
    if options is None:
        _remove()
    else:
        _install()


def enable(*, trust_full_width: bool = False) -> contextlib.AbstractContextManager[None]:
    """Have Inductor replace hand-written rotary embedding by the operator, from this call on.

    For every model that ``torch.compile`` hands to Inductor after it, inference and training, in
    this process. Code that is compiled already stays. q and k of one layer become one call. The
    results are those of the operator: float32 arithmetic, rounded once, from the cos and sin of the
    model. float64 is left alone, and so is all that is not known to be a rotation.

    Passes that are set in Inductor's ``joint_custom_pre_pass`` and ``joint_custom_post_pass`` keep
    running, before this one. Compiled code is cached under the identity of this pass and theirs; a
    graph that comes from a cache is not in :func:`report`.

    Use the result as a context manager to restore the previous setting on exit::

        rc.inductor.enable()            # on, until rc.inductor.disable()
        with rc.inductor.enable():      # on inside only
            compiled(x)                 # compiles here

    Args:
        trust_full_width: cos and sin that come into a graph at full width, with both channels of a
            pair, are taken to hold the same value twice. Without it the halves must be known to
            agree, as they are where the graph computes them from half the frequencies.
    """
    before = _State.options
    _set(_Options(bool(trust_full_width)))
    _State.records.clear()

    @contextlib.contextmanager
    def restoring() -> Iterator[None]:
        try:
            yield
        finally:
            _set(before)

    return restoring()


def disable() -> None:
    """Take the pass out again; passes that stood in its place are put back."""
    _set(None)


def report() -> list[Record]:
    """What was replaced since the last :func:`enable`, and what was not and why, with counts."""
    return [replace(record, count=count) for record, count in _State.records.items()]
