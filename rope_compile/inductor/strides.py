"""Carries the strides of the operator's results through the rest of a graph.

The operator writes ``[..., heads, head_dim]``, whatever the strides of its input; elementwise
formulas keep those.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from rope_compile.inductor.nodes import is_one
from rope_compile.inductor.writer import Writer


def strides_of(val: Any) -> object:
    """The strides that matter, of one tensor or several."""
    if isinstance(val, Tensor):
        return [str(n) for n, size in zip(val.stride(), val.shape, strict=True) if not is_one(size)]
    return list(map(strides_of, val)) if isinstance(val, list | tuple) else None


def settle(writer: Writer, changed: dict[Node, Any]) -> None:
    """Carry new strides on to the nodes that take any, and copy back to the old ones for others.

    ``changed`` has the old value of every node whose strides are new.
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
        elif "val" in node.meta and strides_of(val) != strides_of(node.meta["val"]):
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
