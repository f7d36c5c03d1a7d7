"""``rope`` and ``rope_`` on DTensors: every rank rotates the part it holds, and nothing is sent.

A rotation moves nothing between tokens, heads or ranks, so batch, sequence and heads may be sharded
in any combination; only a sharded head_dim would tear pairs apart. ``functional`` imports this
module when it meets the first DTensor: ``import rope_compile`` need not pay for DTensor, which
takes seconds to import. Import it yourself before you call the bare operators on DTensors.

NOTE [Ranks and compile caches] Which slice of the positions a rank needs is a constant of its
graph. torch keys compiled DTensor code without the rank (pytorch #188390; later torch adds the
device, which tells GPUs of one machine apart, and no CPUs), so a rank can load what another one
compiled, and be wrong without a word: on torch 2.13, ``q * p`` with q sharded and p replicated is.
The rank is therefore made to show in every graph with this operator, in a slice that keeps all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rope_compile.ops import LIB, check_arguments, check_writable, rope_inplace_op, rope_op

# For each mesh dimension, the token dimension of q (or k) that it splits.
Splits = tuple[int | None, ...]


def keyed_by_rank(table: Tensor) -> Tensor:
    """All rows of a table; see NOTE [Ranks and compile caches]."""
    if torch.compiler.is_compiling():
        return table[: 2**40 + torch.distributed.get_rank()]
    return table


def rotate_parts(
    cls: type, func: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: object
) -> tuple[Tensor | None, ...] | None:
    """What the operators do when an argument is a DTensor.

    q and k are DTensors on one mesh. positions are a DTensor there, or a plain tensor: the whole
    one, equal on every rank. Tables are plain or replicated.

    Returns:
        DTensors of the placements of q and k; None in place. A replicated q or k whose positions
        are sharded comes back sharded like them.

    Raises:
        ValueError: what cannot be done without communication. Else as the operators.
    """
    q, k, positions, cos_sin_cache, inv_freq, axes, *more = args
    in_place = func is rope_inplace_op
    _check_kinds(q, k, positions)
    # Of the whole: the parts do not show that positions were cut already.
    check_arguments(q, k, positions, cos_sin_cache, inv_freq, axes, *more[:2])
    rest = (
        _whole_table("cos_sin_cache", cos_sin_cache),
        _whole_table("inv_freq", inv_freq),
        axes,
        *more,
    )
    xs = [q] if k is None else [q, k]
    if not in_place:
        xs = [_follow(name, x, positions, axes) for name, x in zip("qk", xs, strict=False)]
    splits = [_splits(name, x) for name, x in zip("qk", xs, strict=False)]
    # Not to_local(): it would record a view where grad mode is on, and this is below autograd.
    parts = [x._local_tensor for x in xs]
    if q.device_mesh.get_coordinate() is None:  # a rank outside the mesh holds nothing
        rotated = parts
    elif len(set(splits)) == 1:
        own = _own_positions(positions, xs[0], splits[0], axes)
        rotated = func(parts[0], parts[1] if k is not None else None, own, *rest)
    else:  # other tokens of q than of k, as their gradients may have
        owns = [
            _own_positions(positions, x, split, axes) for x, split in zip(xs, splits, strict=True)
        ]
        if in_place:
            check_writable(*parts)  # both, before the first is written
        results = [func(x, None, own, *rest) for x, own in zip(parts, owns, strict=True)]
        rotated = parts if in_place else [out for out, _ in results]
    if in_place:
        # The operator does so for the DTensors; what to_local() gave out shares these instead.
        torch.autograd.graph.increment_version(parts)
        return None
    outs = [_like(out, x) for out, x in zip(rotated, xs, strict=False)]
    return (*outs, None)[:2]


def _check_kinds(q: Tensor, k: Tensor | None, positions: Tensor) -> None:
    if not isinstance(q, DTensor) or not (k is None or isinstance(k, DTensor)):
        plain = "k" if isinstance(q, DTensor) else "q"
        raise ValueError(
            f"{plain} must be a DTensor where another argument is one, got a plain tensor; make it "
            "one with DTensor.from_local or distribute_tensor"
        )
    for name, x in (("k", k), ("positions", positions)):
        if isinstance(x, DTensor) and x.device_mesh != q.device_mesh:
            raise ValueError(
                f"{name} must be on the mesh of q, {q.device_mesh}, got {x.device_mesh}; "
                "redistribute it first"
            )


def _whole_table(name: str, table: Tensor | None) -> Tensor | None:
    if not isinstance(table, DTensor):
        return table
    if not all(isinstance(placement, Replicate) for placement in table.placements):
        raise ValueError(
            f"{name} must be a plain or replicated tensor, got placements {table.placements}; "
            "every rank reads all of it"
        )
    return table._local_tensor


def _splits(name: str, x: DTensor) -> Splits:
    """How the tokens of x are split; None for heads, replicas and sums."""
    lead = x.dim() - 2
    splits: list[int | None] = []
    for placement in x.placements:
        # A sum of rotations is the rotation of the sum: what is yet to be reduced may be rotated.
        linear = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
        if isinstance(placement, Replicate) or linear or getattr(placement, "dim", None) == lead:
            splits.append(None)
        elif type(placement) is Shard and placement.dim < lead:
            splits.append(placement.dim)
        else:
            raise ValueError(
                f"{name} must be sharded over batch, sequence or heads, replicated or a partial "
                f"sum, got {placement} for {name} of {tuple(x.shape)}; redistribute it first"
            )
    return tuple(splits)


def _follow(name: str, x: DTensor, positions: Tensor, axes: Sequence[int]) -> DTensor:
    """x, its replicas cut where the positions are cut.

    The gradient of a sharded output is replicated where a sum or a mean came next.
    """
    if not isinstance(positions, DTensor):
        return x
    placements = list(x.placements)
    for i, placement in enumerate(positions.placements):
        if (
            type(placement) is Shard
            and placement.dim >= _first_token_dim(positions, axes)
            and isinstance(placements[i], Replicate)
        ):
            placements[i] = Shard(placement.dim + x.dim() - 2 - positions.dim())
    if not _cuts(name, x.placements, placements):
        return x
    return x.redistribute(x.device_mesh, placements)


def _own_positions(positions: Tensor, x: DTensor, splits: Splits, axes: Sequence[int]) -> Tensor:
    """The positions of the tokens that this rank has of x."""
    missing = x.dim() - 2 - positions.dim()
    wanted: list[Placement] = []
    for token_dim in splits:
        dim = -1 if token_dim is None else token_dim - missing
        # See NOTE [Sizes under compilation] in ops.py: a symbolic size is taken to be that of x.
        there = dim >= _first_token_dim(positions, axes)
        broadcast = there and type(positions.shape[dim]) is int and positions.shape[dim] == 1
        wanted.append(Shard(dim) if there and not broadcast else Replicate())
    given: Sequence[Placement] = [Replicate()] * len(wanted)
    part = positions
    if isinstance(positions, DTensor):
        given, part = positions.placements, positions._local_tensor
    mesh = x.device_mesh
    coordinate = mesh.get_coordinate() or (0,) * mesh.ndim
    for i in _cuts("positions", given, wanted):
        dim = wanted[i].dim  # type: ignore[attr-defined]
        # The chunks of DTensor, which are those of torch.chunk; redistribute() takes 0.4 ms.
        size = part.shape[dim]
        chunk = -(-size // mesh.size(i))
        start = torch.sym_min(chunk * coordinate[i], size)
        part = part.narrow(dim, start, torch.sym_min(chunk, size - start))
    return part


def _first_token_dim(positions: Tensor, axes: Sequence[int]) -> int:
    return 1 if axes and positions.dim() > 1 else 0


def _cuts(name: str, given: Sequence[Placement], wanted: Sequence[Placement]) -> list[int]:
    """Mesh dimensions over which replicas must be cut; nothing else can be had without sending."""
    cuts, cut = [], set()
    for i, (own, new) in enumerate(zip(given, wanted, strict=True)):
        if isinstance(own, Replicate) and isinstance(new, Shard):
            cuts.append(i)
            cut.add(new.dim)
        elif own != new or (isinstance(own, Shard) and own.dim in cut):  # or in another order
            raise ValueError(
                f"{name} must be replicated, or placed as {tuple(wanted)}, to be rotated without "
                f"communication, got {tuple(given)}; redistribute it first"
            )
    return cuts


def _like(part: Tensor, x: DTensor) -> DTensor:
    """A fresh contiguous DTensor of the shape and placements of x."""
    stride = [1] * x.dim()
    for dim in range(x.dim() - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(x.shape[dim + 1], 1)
    return DTensor.from_local(
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=tuple(stride)
    )


for _op in (rope_op, rope_inplace_op):
    torch.library.register_torch_dispatch(_op, DTensor, rotate_parts, lib=LIB)
