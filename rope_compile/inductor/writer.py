"""Writes the table and the calls of the operator into a graph, as functions of tensors."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from rope_compile.ops import rope_op


def _picked(x: Tensor, how: tuple[Any, ...]) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    if how[0] == "select":
        return x.select(how[1], how[2])
    return torch.ops.aten.slice.Tensor(x, -1, *how[1:])  # type: ignore[no-any-return]


def build_rows(
    *found: Tensor, hows: tuple[tuple[Any, ...], ...], drop: int
) -> tuple[Tensor, Tensor]:
    """The table, one row for each token, and the positions to read it by.

    ``found`` holds cos and sin. Where the channels of a pair may differ it holds those of the low
    and those of the high ones, the table one row for each, and the positions two axes.
    ``drop`` is the dimension of the heads, of size 1, or negative where there is none.
    """
    picked = [_picked(x, how) for x, how in zip(found, hows, strict=True)]
    rows = torch.cat(picked[:2], -1)
    *tokens, width = rows.shape
    tokens = [size for i, size in enumerate(tokens) if i != drop]
    if len(picked) > 2:
        rows = torch.stack((rows, torch.cat(picked[2:], -1)))
        tokens = [2, *tokens]
    rows = rows.to(torch.float32)
    table = rows.reshape(-1, width).clone(memory_format=torch.contiguous_format)
    count = table.shape[0]
    if free_unbacked_symbols(count):  # may turn out to be no row, which rope refuses
        table = torch.nn.functional.pad(table, (0, 0, 0, 1))
    return _written(table, table.shape), _written(torch.arange(count, device=rows.device), tokens)


def _written(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x.view(shape)`` of memory that is written once.

    Inductor computes what other views show again for each launch that reads it, so once or twice a
    layer. as_strided has its input written (torch 2.13; the tests count the buffers).
    """
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return x.as_strided(shape, steps[-2::-1])


class Slice(NamedTuple):
    """Channels of one tensor that a call gives back, and how many before them it needs."""

    flat: bool  # counted over the last two dimensions
    start: int
    width: int
    before: int


class Call(NamedTuple):
    """The static arguments of :func:`rotate`."""

    style: str
    rotary_offset: int
    inverse: bool
    heads: int
    one_axis: bool
    full_width: bool  # low and high channels follow an axis of their own
    slices: tuple[Slice, ...]  # of q, and of k
    dtypes: tuple[torch.dtype, ...]


def rotate(
    table: Tensor, positions: Tensor, *sources: Tensor, call: Call
) -> tuple[Tensor | None, ...]:
    """One call for one or two tensors, between the layout of a model and that of the operator."""
    given = [
        _channels(x, part).to(torch.promote_types(x.dtype, dtype)).movedim(call.heads, -2)
        for x, part, dtype in zip(sources, call.slices, call.dtypes, strict=True)
    ]
    half = table.shape[1] // 2
    axes: tuple[int, ...] = ()
    if call.full_width:
        # With a token dimension in any case: positions of one dimension serve every axis.
        axes, positions = (0,) * half + (1,) * half, positions.unsqueeze(1)
        given = [x.unsqueeze(0) for x in given]
    elif call.one_axis:
        axes, positions = (0,) * half, positions.unsqueeze(0)
    rotated = rope_op(
        given[0], given[1] if len(given) > 1 else None, positions, table, None, axes, call.style,
        call.rotary_offset, 1.0, call.inverse,
    )  # fmt: skip
    if call.full_width:
        rotated = [None if x is None else x.squeeze(0) for x in rotated]
    return tuple(
        _narrowed(x, part.before, part.width).movedim(-2, call.heads).to(dtype)
        for x, part, dtype in zip(rotated, call.slices, call.dtypes, strict=False)
    )


def _channels(x: Tensor, part: Slice) -> Tensor:
    x = x.flatten(-2) if part.flat else x
    if part.start >= part.before:
        return _narrowed(x, part.start - part.before, part.before + part.width)
    return torch.nn.functional.pad(_narrowed(x, part.start, part.width), (part.before, 0))


def _narrowed(x: Tensor, start: int, width: int) -> Tensor:
    return x if x.shape[-1] == width else x.narrow(-1, start, width)


# Where a node belongs: which line of the model, forward or backward, saved or computed again.
_INHERITED = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "seq_nr",
    "partitioner_tag", "autograd_backward", "recompute", "ac_graph_id", "custom",
)  # fmt: skip


class Writer:
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
        inherited = _inherited(before)
        with self.graph.inserting_before(before):
            for node in traced.graph.nodes:
                if node.op == "call_function":
                    copies[node] = self.graph.node_copy(node, copies.__getitem__)
                    val = {"val": node.meta["val"]} if "val" in node.meta else {}
                    copies[node].meta = val | inherited
        (output,) = traced.graph.find_nodes(op="output")
        return [copies[x] for x in output.args[0]]

    def put(self, target: Any, args: tuple[Any, ...], before: Node) -> Node:
        """One node, put before ``before``."""
        with self.graph.inserting_before(before), self.mode:
            node = self.graph.call_function(target, args)
            val = target(*fx.map_arg(args, lambda x: x.meta["val"]))
        node.meta = {"val": val} | _inherited(before)
        return node


def _inherited(node: Node) -> dict[str, Any]:
    return {name: node.meta[name] for name in _INHERITED if name in node.meta}


def _layout(node: Node) -> tuple[object, ...]:
    val = node.meta["val"]
    return (str(tuple(val.shape)), str(val.stride()), val.dtype, val.device)
