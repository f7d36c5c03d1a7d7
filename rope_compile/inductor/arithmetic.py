"""What elementwise operators compute: sums, products, casts and functions of single elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rope_compile.inductor.expressions import (
    Result,
    Row,
    Rows,
    Value,
    all_known,
    leveled,
    stretch,
)
from rope_compile.inductor.nodes import dtype_of, is_complex, shape_of
from rope_compile.inductor.reader import Reader

aten = torch.ops.aten


def in_dtype(r: Reader, node: Node, x: Any) -> Result:
    """``x`` in the dtype of ``node``."""
    if is_complex(x) or is_complex(node) or shape_of(x) != shape_of(node):
        return None
    row, pairs = r.value(x)
    return Value(
        cast(r, node, x, row) if row else None, _cast_pairs(r, node, x, pairs) if pairs else None
    )


def cast(r: Reader, node: Node, x: Node, row: Row) -> Row:
    """A row in the dtype of ``node``."""
    target, source = dtype_of(node), dtype_of(x)
    if target == source:
        return row
    return tuple(r.expressions.odd("cast", (target, source), number) for number in row)


def _cast_pairs(r: Reader, node: Node, x: Node, pairs: Rows) -> Rows:
    return tuple(cast(r, node, x, line) for line in pairs)


def elementwise(r: Reader, node: Node) -> Result:
    """Any function of single elements, with broadcasting."""
    operands = [x for x in node.args if isinstance(x, Node)]
    listed = any(isinstance(x, list | tuple) for x in node.args)
    if not operands or listed or any(isinstance(x, Node) for x in node.kwargs.values()):
        return None
    if any(is_complex(x) for x in (*operands, node)):
        return _complex_arithmetic(r, node)
    rows = all_known(_operand(r, node, x) for x in node.args)
    level = leveled(rows) if rows else None
    return Value(_combined(r, node, level) if level else None, _elementwise_pairs(r, node))


def _operand(r: Reader, node: Node, x: object) -> Row | None:
    """The channels of an argument; operands of arithmetic in the dtype of the result."""
    if isinstance(x, Node):
        row = r.value(x).row
        if row is None and not isinstance(x.meta.get("val"), Tensor):
            return (r.expressions.number(("scalar", r.keys[x])),)
        return cast(r, node, x, row) if row and node.target in _ARITHMETIC else row
    if isinstance(x, int | float) and node.target in _ARITHMETIC:
        return (r.expressions.constant(float(x)),)
    return (r.expressions.number(("argument", r.plain(x))),)


def _elementwise_pairs(r: Reader, node: Node) -> Rows | None:
    """The same on two dimensions; an operand with one is the same for all before it."""
    found = all_known(_operand_pairs(r, node, x) for x in node.args)
    if not found or not any(r.value(x).pairs for x in node.args):
        return None
    size = max(map(len, found))
    stretched = all_known(stretch(part, size) for part in found)
    lines = all_known(leveled(line) for line in zip(*stretched, strict=True)) if stretched else None
    if not lines or min(size, len(lines[0][0])) > 2:
        return None
    return tuple(_combined(r, node, line) for line in lines)


def _operand_pairs(r: Reader, node: Node, x: object) -> Rows | None:
    pairs = r.value(x).pairs
    if isinstance(x, Node) and pairs:
        return _cast_pairs(r, node, x, pairs) if node.target in _ARITHMETIC else pairs
    row = _operand(r, node, x)
    return (row,) if row and not (isinstance(x, Node) and len(shape_of(x)) > 1) else None


_MULTIPLY = {aten.mul.Tensor, aten.mul.Scalar}
_ADD = {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar}
_ARITHMETIC = _MULTIPLY | _ADD | {aten.addcmul.default}


def _combined(r: Reader, node: Node, rows: Sequence[Row]) -> Row:
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


def _complex_arithmetic(r: Reader, node: Node) -> Result:
    """The product of two complex numbers, written out."""
    parts = all_known(r.value(x).pairs for x in node.args)
    both = all(isinstance(x, Node) and is_complex(x) for x in node.args)
    if node.target not in _MULTIPLY or not parts or not both:
        return None
    size = max(map(len, parts))
    lines = all_known(stretch(part, size) for part in parts)
    if not lines:
        return None
    multiply, add = r.expressions.multiply, r.expressions.add
    product = [
        (add(multiply(a, c), multiply(b, d) ^ 1), add(multiply(a, d), multiply(b, c)))
        for (a, b), (c, d) in zip(*lines, strict=True)
    ]
    return Value(None, tuple(product))
