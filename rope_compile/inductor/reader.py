"""Reads a graph in order and gives every node its value.

What an operator does to values is not said here: the rules come from outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from rope_compile.inductor.expressions import Expressions, Result, Row, Rows, Value
from rope_compile.inductor.nodes import is_small, real_shape_of, shape_of


class Reader:
    """Gives every node of a graph its value, in order; ``rule_of`` knows what operators do."""

    def __init__(self, graph: fx.Graph, rule_of: Callable[[Node], Rule | None]) -> None:
        self.expressions = Expressions()
        self.values: dict[Node, Result] = {}
        self.keys: dict[Node, int] = {}  # equal for two nodes that compute the same
        self.place: dict[Node, int] = {}
        self.understood: set[Node] = set()
        self.given: set[int] = set()  # keys of what comes into the graph
        self.backward: set[Node] = set()
        self._key_of: dict[object, int] = {}
        self._rule_of = rule_of
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
            rule = self._rule_of(node)
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

    def _completed(self, node: Node, value: Value | None) -> Value | None:
        """``value`` with atoms for what is not known."""
        val = node.meta.get("val")
        if not isinstance(val, Tensor):
            return None
        row, pairs = value or (None, None)
        shape, key = real_shape_of(node), self.keys[node]
        if row is None and not val.is_complex() and is_small(shape[-1:]):
            row = self.expressions.atoms(key, shape[-1] if shape else 1)
        if pairs is None and len(shape) > 1 and is_small(shape[-2:]) and shape[-1] == 2:
            atoms = iter(self.expressions.atoms(key, 2 * shape[-2]))
            pairs = tuple(zip(atoms, atoms, strict=True))
        return Value(row, pairs)

    def value(self, node: Any) -> Value:
        value = self.values.get(node) if isinstance(node, Node) else None
        return value if isinstance(value, Value) else Value()

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
        shape = map(str, shape_of(source) if isinstance(source, Node) else ())
        return (node.target, self.plain(node.args[1:]), tuple(shape), str(shape_of(node)))

    def is_given(self, row: Row) -> bool:
        """Whether channels come into the graph from outside, each for itself.

        They may be moved, cast, or put through functions of one element, such as the cosine.
        """
        return all(kind == "atom" and of[0] in self.given for kind, *of in map(self._stripped, row))

    def _stripped(self, number: int) -> tuple[Any, ...]:
        kind, *of = expression = self.expressions.all[number >> 1]
        if kind in ("move", "cast"):
            return self._stripped(2 * of[1])
        if isinstance(kind, torch._ops.OpOverload) and len(of) == 2:
            return self._stripped(of[1])
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


Rule = Callable[[Reader, Node], Result]
