"""What a node of a graph says of its own value: shape, dtype, strides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node

MAX_CHANNELS = 512  # wider last dimensions are not heads


def shape_of(node: Node) -> tuple[Any, ...]:
    val = node.meta.get("val")
    return tuple(val.shape) if isinstance(val, Tensor) else ()


def real_shape_of(node: Node) -> tuple[Any, ...]:
    """The shape, as ``view_as_real`` shows it."""
    shape = shape_of(node)
    return (*shape, 2) if is_complex(node) else shape


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def is_complex(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_complex()


def is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def is_small(sizes: Iterable[Any]) -> bool:
    total = 1
    for size in sizes:
        if type(size) is not int:
            return False
        total *= size
    return 0 < total <= MAX_CHANNELS


def is_pointwise(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def sizes_of(node: Node) -> tuple[int | str, ...]:
    return tuple(size if type(size) is int else str(size) for size in shape_of(node))


def fake_mode_of(node: Node) -> FakeTensorMode | None:
    val = node.meta.get("val")
    return val.fake_mode if isinstance(val, FakeTensor) else None
