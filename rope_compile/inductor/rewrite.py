"""Decides which rotations of a graph become calls of the operator, and which two share a call."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch.fx import Node

from rope_compile.inductor.nodes import (
    dtype_of,
    fake_mode_of,
    is_one,
    shape_of,
    sizes_of,
)
from rope_compile.inductor.reader import Reader
from rope_compile.inductor.rotations import Recogniser, Refused, Rotation
from rope_compile.inductor.rules import keeps_value, rule_of
from rope_compile.inductor.strides import settle, strides_of
from rope_compile.inductor.widening import widened
from rope_compile.inductor.writer import Call, Slice, Writer, build_rows, rotate

_log = logging.getLogger("rope_compile.inductor")


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
class Options:
    trust_full_width: bool = False


def replace_rotations(graph: fx.Graph, options: Options) -> list[Record]:
    """Replace what is a rotation in ``graph``; what was done, and what was refused."""
    try:
        reader = Reader(graph, rule_of)
        found, refused = _find_rotations(graph, reader, options)
    except Exception as error:  # nothing is changed yet, and a model compiles without us
        why = f"the graph could not be read, please report it: {type(error).__name__}: {error}"
        _log.warning(why, exc_info=error)
        return [Record(False, (), reason=why)]
    needed, chosen = _outermost(reader, graph, found)
    records = [
        Record(False, (sizes_of(node),), backward=node in reader.backward, reason=reason)
        for node, reason in refused.items()
        if node in needed
    ]
    if not chosen:
        return records
    mode = next(x for x in map(fake_mode_of, graph.nodes) if x is not None)
    writer = Writer(graph, mode)
    changed: dict[Node, Any] = {}
    calls = _Calls(writer)
    for group in _groups(reader, chosen):
        records.append(_record(reader, group))
        for rotation, new in zip(group, calls.write(group), strict=True):
            old = rotation.node.meta["val"]
            if strides_of(new.meta["val"]) != strides_of(old):
                changed[new] = old
            rotation.node.replace_all_uses_with(new)
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    settle(writer, changed)
    graph.lint()
    return records


def _find_rotations(
    graph: fx.Graph, reader: Reader, options: Options
) -> tuple[dict[Node, Rotation], dict[Node, str]]:
    found: dict[Node, Rotation] = {}
    refused: dict[Node, str] = {}
    recogniser = Recogniser(reader, options.trust_full_width)
    for node in graph.nodes:
        if node not in reader.understood or keeps_value(node):
            continue
        try:
            rotation = recogniser.recognise(node)
        except Refused as refusal:
            refused[node] = str(refusal)
        else:
            if rotation is not None:
                found[node] = rotation
    return found, refused


def _outermost(
    r: Reader, graph: fx.Graph, found: dict[Node, Rotation]
) -> tuple[set[Node], list[Rotation]]:
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


def _running(graph: fx.Graph, found: dict[Node, Rotation]) -> tuple[set[Node], list[Rotation]]:
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
            needed.update((rotation.source, *(part.node for part in rotation.parts)))
    return needed, chosen[::-1]


def _groups(r: Reader, chosen: list[Rotation]) -> list[list[Rotation]]:
    """q and k together: two with one table, neither made from the other.

    Those that have their rotated channels at one offset find one another first.
    """
    rotated = {rotation.node for rotation in chosen}
    groups = {rotation.node: [rotation] for rotation in chosen}
    for fit in (_lie_alike, _one_may_widen):
        for first, second in itertools.combinations(chosen, 2):
            alone = [groups.get(x.node) for x in (first, second)] == [[first], [second]]
            if alone and fit(first, second) and not _depends(r, second, first, rotated):
                groups[first.node] += groups.pop(second.node)
    return list(groups.values())


def _lie_alike(first: Rotation, second: Rotation) -> bool:
    same = first.joins == second.joins and first.rotary_offset == second.rotary_offset
    return same and _common_heads([first, second]) is not None


def _one_may_widen(first: Rotation, second: Rotation) -> bool:
    """Whether the one with fewer channels before the rotated ones is a single head.

    It then costs next to nothing to rotate it with as many as the other has; see `widening`. For
    many heads that would be more memory to move than a call of their own.
    """
    if first.joins != second.joins or first.rotary_offset == second.rotary_offset:
        return False
    heads = _common_heads([first, second])
    narrow = min(first, second, key=lambda x: x.rotary_offset)
    return heads is not None and is_one(shape_of(narrow.node)[heads])


def _depends(r: Reader, second: Rotation, first: Rotation, rotated: set[Node]) -> bool:
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


def _common_heads(group: list[Rotation]) -> int | None:
    """The dimension that is the heads for all: every other one has the same size."""
    for heads in group[0].heads:
        tokens = {
            tuple(str(n) for i, n in enumerate(shape_of(x.node)[:-1]) if i != heads) for x in group
        }
        if len(tokens) == 1 and all(heads in x.heads for x in group):
            return heads
    return None


class _Calls:
    """Writes the calls of the operator; rotations with the same cos and sin share a table."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._tables: dict[object, list[Node]] = {}

    def write(self, group: list[Rotation]) -> list[Node]:
        """One call for one or two rotations, and what each of them gives."""
        heads = _common_heads(group)
        assert heads is not None  # one alone always has one; two were asked
        first, last = group[0], group[-1]
        offset = max(x.rotary_offset for x in group)
        sources, slices = zip(*(self._read(x, offset, last.node) for x in group), strict=True)
        call = Call(
            style=first.style,
            rotary_offset=offset,
            inverse=first.inverse,
            heads=heads,
            one_axis=bool(V.aot_compilation),
            full_width=len(first.parts) > 2,
            slices=slices,
            dtypes=tuple(dtype_of(x.node) for x in group),
        )
        table = self._table(first, heads)
        return self.writer.write(rotate, (*table, *sources), last.node, call=call)

    def _table(self, rotation: Rotation, heads: int) -> list[Node]:
        node, parts = rotation.node, rotation.parts
        drop = heads - (len(shape_of(node)) - 1 - len(parts[0].lead))
        key = (parts, drop)
        if key not in self._tables:
            self._tables[key] = self.writer.write(
                build_rows,
                [part.node for part in parts],
                node,
                hows=tuple(part.how for part in parts),
                drop=drop,
            )
        return self._tables[key]

    def _read(self, x: Rotation, offset: int, at: Node) -> tuple[Node, Slice]:
        """Which channels of which node to rotate at ``offset``."""
        source, start, before = x.source, x.start, offset - x.rotary_offset
        if start < before and not x.flat:
            wider = widened(self.writer, source, before - start, at)
            if wider is not None:
                source, start = wider, before
        return source, Slice(x.flat, start, shape_of(x.node)[-1], before)


def _record(r: Reader, group: list[Rotation]) -> Record:
    first = group[0]
    return Record(
        True,
        tuple(sizes_of(x.node) for x in group),
        first.style,
        first.rotary_dim,
        first.inverse,
        first.node in r.backward,
    )
