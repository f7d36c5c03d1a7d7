"""What is timed: this package in its forms, the ceilings, and a place for peers.

Every provider computes the same rotation of the same values, from tensors in the layout that suits
it best. A conversion into that layout is a row of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

import rope_compile as rc
from rope_compile.bench.case import Case, Pair
from rope_compile.bench.shapes import IN_PLACE, OUT_EXISTING, OUT_FRESH, Cell
from rope_compile.bench.timers import Prepared

__all__ = ["NATIVE", "OURS", "Missing", "Provider", "Role", "ceilings", "kernel_in_use", "ours"]

Role = Literal["ours", "peer", "conversion", "ceiling", "noise"]
OURS = "rope_compile"
NATIVE = "native C++"


class Missing(Exception):
    """This provider cannot run here; the text says why."""


@dataclass(frozen=True)
class Provider:
    """One row of the table.

    Attributes:
        name: stable across releases; the CSV has it.
        form: where the result goes.
        role: what it is in the comparison.
        prepare: makes it ready for a case; raises `Missing`.
        rotated: whether the result is the rotation (or the input, for a copy).
        steps: roundings of the dtype that its arithmetic may differ from float64 by.
    """

    name: str
    form: str
    role: Role
    prepare: Callable[[Case], Prepared]
    rotated: bool = True
    steps: int = 4

    @property
    def key(self) -> str:
        return f"{self.name} {self.form}"


def ours() -> list[Provider]:
    """The public calls in their forms, and the first of them once more: that is the noise."""
    return [
        Provider(OURS, IN_PLACE, "ours", _in_place, steps=1),
        Provider(OURS, OUT_FRESH, "ours", _fresh, steps=1),
        Provider(f"{OURS}_module", OUT_FRESH, "ours", _module, steps=1),
        Provider(f"{OURS}_again", IN_PLACE, "noise", _in_place, steps=1),
    ]


def kernel_in_use(device: torch.device) -> str:
    """Which implementation answers calls on a device."""
    if device.type == "cuda":
        return "Triton"
    # The library registers this operator when it is loaded; see kernels/native.py.
    return NATIVE if hasattr(torch.ops.rope_compile, "rope_native") else "plain torch in blocks"


def _in_place(case: Case) -> Prepared:
    """Rotates the same memory again and again: norms stay, so no value becomes denormal."""
    q, k = case.copy()
    rope, config = case.rope, case.cell.shape.config
    call = functools.partial(
        rc.apply_rope_,
        q,
        k,
        case.positions,
        rope.cos_sin_cache,
        inv_freq=rope.inv_freq,
        style=config.style,
        axes=config.axes,
    )

    def result() -> Pair:
        call()
        return q, k

    return Prepared(call, result)


def _fresh(case: Case) -> Prepared:
    rope, config = case.rope, case.cell.shape.config
    call: Callable[[], Pair] = functools.partial(
        rc.apply_rope,
        case.q,
        case.k,
        case.positions,
        rope.cos_sin_cache,
        inv_freq=rope.inv_freq,
        style=config.style,
        axes=config.axes,
    )  # type: ignore[assignment]  # k is given, so both results are tensors

    def result() -> Pair:
        poison = case.poisoned()
        del poison  # whatever memory the outputs get now holds no rotation of an earlier call
        return call()

    return Prepared(call, result)


def _module(case: Case) -> Prepared:
    call = functools.partial(case.rope, case.positions, case.q, case.k)
    return Prepared(call, call)


def ceilings(cell: Cell, device: torch.device) -> list[Provider]:
    """What memory can do, with as many bytes of q and k."""
    found = [
        Provider("copy", OUT_EXISTING, "ceiling", _copy, rotated=False),
        Provider("clone", OUT_FRESH, "ceiling", _clone, rotated=False),
    ]
    if cell.dtype == "float32":  # 16-bit multiplication converts, and is no ceiling
        found.append(Provider("multiply", IN_PLACE, "ceiling", _multiply, rotated=False))
    if device.type == "cuda":
        compiled = torch.compile(_copy_pair, dynamic=True)
        prepare = functools.partial(_copy, copy=compiled)
        found.append(Provider("copy_triton", OUT_EXISTING, "ceiling", prepare, rotated=False))
    return found


def _copy_pair(to: Pair, source: Pair) -> None:
    for a, b in zip(to, source, strict=True):
        a.copy_(b)


def _copy(case: Case, copy: Callable[[Pair, Pair], None] = _copy_pair) -> Prepared:
    to = case.poisoned()
    call = functools.partial(copy, to, case.contiguous)

    def result() -> Pair:
        call()
        return to

    return Prepared(call, result)


def _clone(case: Case) -> Prepared:
    q, k = case.contiguous

    def call() -> Pair:
        return q.clone(), k.clone()

    return Prepared(call, call)


def _multiply(case: Case) -> Prepared:
    q, k = (x.clone() for x in case.contiguous)

    def call() -> Pair:
        return q.mul_(1.0), k.mul_(1.0)

    return Prepared(call, call)
