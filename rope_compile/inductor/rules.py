"""What each operator does to the channels of its arguments.

One rule for each operator; elementwise ones share theirs. An operator without a rule gives a tensor
of which nothing is known.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rope_compile.inductor.arithmetic import elementwise, in_dtype
from rope_compile.inductor.expressions import (
    ZERO,
    Result,
    Row,
    Rows,
    Value,
    all_known,
    leveled,
    stretch,
    transposed,
)
from rope_compile.inductor.nodes import (
    dtype_of,
    is_complex,
    is_pointwise,
    is_small,
    real_shape_of,
    shape_of,
)
from rope_compile.inductor.reader import Reader, Rule

aten, prims = torch.ops.aten, torch.ops.prims

_RULES: dict[Any, Rule] = {}


def _rule(*targets: object) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def rule_of(node: Node) -> Rule | None:
    """The rule for the operator of a node."""
    return _RULES.get(node.target) or (elementwise if is_pointwise(node) else None)


def keeps_value(node: Node) -> bool:
    """Whether a node is its argument again, in other memory or seen in another way."""
    return _RULES.get(node.target) is _same


def _from_end(x: Node, dim: int) -> int:
    """A dimension counted from the last one of the real shape: -1 are the channels."""
    rank = len(shape_of(x))
    return dim % max(rank, 1) - rank - is_complex(x)


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _first(node: Node) -> Node | None:
    x = node.args[0] if node.args else None
    return x if isinstance(x, Node) and isinstance(x.meta.get("val"), Tensor) else None


def _along(
    r: Reader, node: Node, x: Node, at: int, move: Callable[[Any], Any], key: object
) -> Value:
    """Move channels where ``at`` is a dimension that holds them; else the rest has moved."""
    row, pairs = r.value(x)
    if at == -1:
        pairs = tuple(move(part) for part in pairs) if pairs else None
        return Value(move(row) if row else None, pairs)
    row = r.moved(key, row)
    return Value(row, pairs and move(pairs) if at == -2 else r.moved_pairs(key, pairs))


@_rule(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
    aten.view_as_real.default, aten.view_as_complex.default, aten.resolve_conj.default,
)  # fmt: skip
def _same(r: Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or is_complex(x) == is_complex(node):
        return r.value(x)
    return Value(None, r.value(x).pairs)


@_rule(aten._conj.default)
def _conjugate(r: Reader, node: Node) -> Result:
    pairs = r.value(node.args[0]).pairs
    return Value(None, pairs and tuple((real, imag ^ 1) for real, imag in pairs))


@_rule(operator.getitem)
def _item(r: Reader, node: Node) -> Result:
    source: Any = node.args[0]
    parts = r.values.get(source)
    index: Any = node.args[1]
    return parts[index] if isinstance(parts, list) else None


@_rule(aten.slice.Tensor)
def _slice(r: Reader, node: Node) -> Result:
    x = _first(node)
    at = None if x is None else _from_end(x, _argument(node, 1, 0))
    bounds = slice(*(_argument(node, i, None) for i in (2, 3, 4)))
    if x is None or at is None or (at >= -2 and not _is_plain(bounds)):
        return None
    return _along(r, node, x, at, lambda part: part[bounds], r.move_key(node))


def _is_plain(bounds: slice) -> bool:
    return all(n is None or type(n) is int for n in (bounds.start, bounds.stop, bounds.step))


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(r: Reader, node: Node) -> Result:
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
def _select(r: Reader, node: Node) -> Result:
    x = _first(node)
    dim, index = node.args[1], node.args[2]
    if x is None or is_complex(x) or not isinstance(dim, int):
        return None
    return _selected(r, x, _from_end(x, dim), index, r.move_key(node))


@_rule(aten.unbind.int)
def _unbind(r: Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or is_complex(x):
        return None
    at, key = _from_end(x, _argument(node, 1, 0)), r.move_key(node)
    return [_selected(r, x, at, i, (key, i)) for i in range(len(node.meta["val"]))]


def _selected(r: Reader, x: Node, at: int, index: Any, key: object) -> Value:
    row, pairs = r.value(x)
    if at >= -2 and type(index) is not int:
        return Value()
    if at == -1:
        return Value(tuple(part[index] for part in pairs) if pairs else None)
    if at == -2 and pairs:
        return Value(pairs[index])
    return Value(r.moved(key, row), r.moved_pairs(key, pairs) if at < -2 else None)


@_rule(aten.flip.default)
def _flip(r: Reader, node: Node) -> Result:
    x, dims = _first(node), node.args[1]
    if x is None or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    at = _from_end(x, dims[0])  # type: ignore[arg-type]
    return _along(r, node, x, at, operator.itemgetter(slice(None, None, -1)), r.move_key(node))


@_rule(aten.cat.default)
def _cat(r: Reader, node: Node) -> Result:
    parts: Any = node.args[0]
    if any(
        len(shape_of(part)) != len(shape_of(node)) or dtype_of(part) != dtype_of(node)
        for part in parts
    ):
        return None
    at = _from_end(node, _argument(node, 1, 0))
    key = ("cat", at, str([shape_of(part) for part in parts]))
    rows = all_known(r.value(part).row for part in parts)
    pairs = all_known(r.value(part).pairs for part in parts)
    row = None
    if rows:
        row = sum(rows, ()) if at == -1 else _stacked(r, key, rows)
    return Value(row, _cat_pairs(r, at, key, pairs) if pairs else None)


def _cat_pairs(r: Reader, at: int, key: object, pairs: list[Rows]) -> Rows | None:
    if at == -2:
        return sum(pairs, ())
    if len({len(part) for part in pairs}) != 1:
        return None
    lines = zip(*pairs, strict=True)
    if at == -1:
        return tuple(sum(line, ()) for line in lines)
    return tuple(_stacked(r, key, line) for line in lines)


def _stacked(r: Reader, key: object, rows: Sequence[Row]) -> Row:
    """Channels of tensors that were joined along another dimension."""
    return tuple(
        r.expressions.number(("stacked", key, *column)) if any(n >> 1 for n in column) else ZERO
        for column in zip(*rows, strict=True)
    )


@_rule(aten.unsqueeze.default)
def _unsqueeze(r: Reader, node: Node) -> Result:
    x, dim = _first(node), node.args[1]
    if x is None or not isinstance(dim, int):
        return None
    row, pairs = r.value(x)
    at, key = _from_end(node, dim), r.move_key(node)
    if at == -1:
        return Value(None, tuple((number,) for number in row) if row and shape_of(x) else None)
    if at == -2:
        return Value(r.moved(key, row), (row,) if row else None)
    return Value(r.moved(key, row), r.moved_pairs(key, pairs))


@_rule(aten.permute.default)
def _permute(r: Reader, node: Node) -> Result:
    x, dims = _first(node), node.args[1]
    if x is None or not isinstance(dims, list | tuple):
        return None
    order = [_from_end(x, dim) for dim in dims]  # type: ignore[arg-type]
    order = [*order, -1] if is_complex(x) else order
    (row, pairs), key = r.value(x), r.move_key(node)
    if order[-2:] == [-1, -2]:
        turned = transposed(pairs) if pairs else None
        alone = order[:-2] == list(range(-len(order), -2))
        return Value(None, turned if alone else r.moved_pairs(key, turned))
    row = r.moved(key, row) if order[-1:] == [-1] else None
    return Value(row, r.moved_pairs(key, pairs) if order[-2:] == [-2, -1] else None)


@_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(r: Reader, node: Node) -> Result:
    x = _first(node)
    if x is None or is_complex(x) != is_complex(node):
        return None
    return _reshaped(r, x, node, r.move_key(node))


@_rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(r: Reader, node: Node) -> Result:
    return _view(r, node)


def _reshaped(r: Reader, x: Node, node: Node, key: object) -> Result:
    (row, pairs), old, new = r.value(x), real_shape_of(x), real_shape_of(node)
    if not old or not new:
        return None
    if old == new:
        return Value(row, pairs)
    if pairs and is_small(old[-2:]) and old[-2] * old[-1] == new[-1]:
        flat = tuple(itertools.chain(*pairs))
        return Value(flat if old[:-2] == new[:-1] else r.moved(key, flat))
    if row and len(new) > 1 and is_small(new[-2:]) and new[-2] * new[-1] == old[-1]:
        moved = row if old[:-1] == new[:-2] else r.moved(key, row)
        return Value(None, _in_lines(moved, new[-1]) if moved else None)
    same_row = type(new[-1]) is int and old[-1] == new[-1]
    same_pairs = same_row and old[-2:] == new[-2:]
    return Value(
        r.moved(key, row) if same_row else None,
        r.moved_pairs(key, pairs) if same_pairs else None,
    )


def _in_lines(row: Row, width: int) -> Rows | None:
    """``[n * width]`` seen as ``[n, width]``, where one of the two is 1 or 2."""
    lines = tuple(row[i : i + width] for i in range(0, len(row), width))
    return lines if min(width, len(lines)) <= 2 else None


@_rule(aten.expand.default)
def _expand(r: Reader, node: Node) -> Result:
    """Broadcasting does the same, so channels keep their numbers."""
    x = _first(node)
    shape = real_shape_of(node)
    if x is None or not shape_of(x) or not is_small(shape[-1:]):
        return None
    row, pairs = r.value(x)
    lines = all_known(stretch(line, shape[-1]) for line in pairs or ()) if pairs else None
    return Value(
        stretch(row, shape[-1]) if row else None,
        stretch(tuple(lines), shape[-2]) if lines and is_small(shape[-2:]) else None,
    )


@_rule(aten.repeat.default)
def _repeat(r: Reader, node: Node) -> Result:
    """All channels again after the last one; the other dimensions as in any move."""
    x: Any = _first(node)
    times: Any = node.args[1]
    row = r.value(x).row if x is not None and shape_of(x) else None
    if row is None or is_complex(x) or not is_small(shape_of(node)[-1:]):
        return None
    *others, again = times
    alike = len(times) == len(shape_of(x)) and all(n == 1 for n in others)
    row = row if alike else r.moved(r.move_key(node), row)
    return Value(row * again) if row else None


@_rule(aten.embedding.default, aten.index_select.default, aten.index.Tensor)
def _gather(r: Reader, node: Node) -> Result:
    """Rows picked by an index: the channels stay what they are."""
    x = _first(node)
    if x is None or not shape_of(x) or not _leaves_channels(x, node):
        return None
    return Value(r.moved(r.move_key(node), r.value(x).row))


def _leaves_channels(x: Node, node: Node) -> bool:
    rank, which = len(shape_of(x)), node.args[1]
    if node.target is aten.index_select.default:
        return isinstance(which, int) and which % rank != rank - 1
    if node.target is aten.index.Tensor:
        return isinstance(which, list | tuple) and len(which) < rank
    return node.target is aten.embedding.default


@_rule(
    aten.full.default, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default,
    aten.full_like.default,
)  # fmt: skip
def _zeros(r: Reader, node: Node) -> Result:
    filled = "full" in str(node.target)
    shape = real_shape_of(node)
    if (filled and node.args[1] != 0) or not shape or not is_small(shape[-1:]):
        return None
    row = (ZERO,) * shape[-1]
    pair = len(shape) > 1 and is_small(shape[-2:]) and shape[-1] == 2
    return Value(None if is_complex(node) else row, (row,) * shape[-2] if pair else None)


@_rule(aten.slice_scatter.default)
def _slice_scatter(r: Reader, node: Node) -> Result:
    x, part = node.args[:2]
    if not isinstance(part, Node) or dtype_of(part) != dtype_of(node):
        return None
    bounds = slice(*(_argument(node, i, None) for i in (3, 4, 5)))
    return _scattered(r, node, r.value(x).row, r.value(part).row, _argument(node, 2, 0), bounds)


@_rule(aten.slice_backward.default)
def _slice_backward(r: Reader, node: Node) -> Result:
    dim, *bounds = node.args[2:]
    zeros = _zeros_like(node)
    return _scattered(r, node, zeros, r.value(node.args[0]).row, dim, slice(*bounds))


def _zeros_like(node: Node) -> Row | None:
    shape = shape_of(node)
    return (ZERO,) * shape[-1] if is_small(shape[-1:]) else None


def _scattered(
    r: Reader, node: Node, row: Row | None, part: Row | None, dim: Any, bounds: slice
) -> Result:
    if row is None or part is None or _from_end(node, dim) != -1 or not _is_plain(bounds):
        return None
    new = list(row)
    if len(new[bounds]) != len(part):
        return None
    new[bounds] = part
    return Value(tuple(new))


@_rule(aten.select_scatter.default)
def _select_scatter(r: Reader, node: Node) -> Result:
    x, part, dim, index = node.args
    if not isinstance(part, Node) or dtype_of(part) != dtype_of(node):
        return None
    return _put(r, node, r.value(x).pairs, r.value(part).row, dim, index)


@_rule(aten.select_backward.default)
def _select_backward(r: Reader, node: Node) -> Result:
    grad, _sizes, dim, index = node.args
    part, shape = r.value(grad).row, shape_of(node)
    pairs = ((ZERO,) * shape[-1],) * shape[-2] if is_small(shape[-2:]) else None
    return _put(r, node, pairs, part, dim, index)


def _put(r: Reader, node: Node, pairs: Rows | None, part: Row | None, dim: Any, i: Any) -> Result:
    """One of the two channels of every pair replaced."""
    at = _from_end(node, dim)
    if pairs is None or part is None or at < -2 or type(i) is not int:
        return None
    lines = [list(line) for line in (transposed(pairs) if at == -1 else pairs)]
    lines[i] = list(part)
    new = tuple(map(tuple, lines))
    return Value(None, transposed(new) if at == -1 else new)


@_rule(aten.constant_pad_nd.default)
def _pad(r: Reader, node: Node) -> Result:
    row = r.value(node.args[0]).row
    widths: Any = node.args[1]
    if row is None or _argument(node, 2, 0) != 0:
        return None
    if len(widths) != 2 or not all(type(n) is int and n >= 0 for n in widths):
        return None
    left, right = widths
    return Value((ZERO,) * left + row + (ZERO,) * right)


@_rule(prims.convert_element_type.default, aten._to_copy.default)
def _convert(r: Reader, node: Node) -> Result:
    return in_dtype(r, node, node.args[0])


@_rule(aten.copy.default)
def _copy(r: Reader, node: Node) -> Result:
    """The second argument, in the dtype of the first."""
    return in_dtype(r, node, node.args[1])


@_rule(aten.complex.default)
def _complex(r: Reader, node: Node) -> Result:
    parts = all_known(r.value(x).row for x in node.args)
    level = leveled(parts) if parts else None
    return Value(None, transposed(tuple(level)) if level else None)
