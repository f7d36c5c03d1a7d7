"""Sees a slice of channels together with those before it.

In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) q has its rotated channels behind
others, and k, one head for all of q's, is itself the end of a wider row. A call has one offset for
both: with as many channels before them, k's lie where q's do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from rope_compile.inductor.nodes import is_one, shape_of
from rope_compile.inductor.writer import Writer

aten = torch.ops.aten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def widened(writer: Writer, x: Any, count: int, at: Node) -> Node | None:
    """A view of ``x`` and the ``count`` channels before its own, if it is a slice of such a tensor.

    It is put before the node ``at``.
    """
    width = shape_of(x)[-1]
    whole, start = _slice_of(x)
    if whole is not None and start >= count:
        return writer.put(aten.slice.Tensor, (whole, -1, start - count, start + width), at)
    if whole is not None or not _keeps_channels(x):
        return None
    source, how = x.args
    wider = widened(writer, source, count, at)
    if x.target is aten.view.default:
        how = [*how[:-1], width + count]
    return wider and writer.put(x.target, (wider, how), at)


def _slice_of(x: Any) -> tuple[Node | None, int]:
    """What a node shows some channels of, and the first of them."""
    if x.target is aten.slice.Tensor:
        whole = x.args[0]
    elif x.target is operator.getitem and x.args[0].target in _SPLITS:
        whole = x.args[0].args[0]
    else:
        return None, 0
    part, val = x.meta["val"], whole.meta["val"]
    start = part.storage_offset() - val.storage_offset()
    # Neighbouring channels, and the whole of all other dimensions.
    first, second = (str((y.shape[:-1], y.stride())) for y in (part, val))
    same = first == second and is_one(part.stride(-1)) and type(start) is int
    return (whole, start) if same else (None, 0)


def _keeps_channels(x: Any) -> bool:
    """Whether a node shows the channels of its argument, in their order, with other dimensions."""
    if x.target is aten.permute.default:
        return x.args[1][-1] in (-1, len(x.args[1]) - 1)
    views = (aten.view.default, aten.unsqueeze.default)
    return x.target in views and shape_of(x)[-1] == shape_of(x.args[0])[-1]
