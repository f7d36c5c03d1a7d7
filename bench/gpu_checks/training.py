"""Providers that differentiate, and those of the layout that transformers' attention has in memory.

The forward pass that is differentiated rotates back, so that its gradient is the rotation that
every other provider computes and is compared with float64 by the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.bench import formulas
from rope_compile.bench.case import Case, Pair
from rope_compile.bench.peers import heads_first, liger_function, tokens_first
from rope_compile.bench.providers import OURS, Provider
from rope_compile.bench.shapes import OUT_FRESH
from rope_compile.bench.timers import Prepared

__all__ = ["bhsd_providers", "compiled_formulas", "gradient_providers"]

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Formula = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class _Derivative:
    """Backward passes over one recorded forward pass, or both passes every time (``full``)."""

    def __init__(self, case: Case, rotate_back: Rotate, incoming: Pair, *, full: bool) -> None:
        self.leaves = tuple(x.clone().requires_grad_() for x in case.contiguous)
        self._rotate_back, self._incoming, self._full = rotate_back, incoming, full
        self._recorded: tuple[Tensor, ...] | None = None

    def call(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            if self._full:
                return self._gradients(self._rotate_back(*self.leaves), keep=False)
            if self._recorded is None:  # on the stream that is captured later
                self._recorded = self._rotate_back(*self.leaves)
            return self._gradients(self._recorded, keep=True)

    def result(self) -> Pair:
        with torch.enable_grad():
            q, k = self._gradients(self._rotate_back(*self.leaves), keep=False)
        return q, k

    def _gradients(self, outputs: tuple[Tensor, ...], *, keep: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, self.leaves, self._incoming, retain_graph=keep)


def compiled_formulas() -> dict[str, Formula]:
    """The formula of half style as two compiled peers; kept, each is compiled once."""
    options = {"combo_kernels": True}
    return {
        "hf_compiled": torch.compile(formulas.half, dynamic=True),
        "hf_compiled_combo": torch.compile(formulas.half, dynamic=True, options=options),
    }


def gradient_providers(compiled: Mapping[str, Formula], *, full: bool) -> list[Provider]:
    """Ours, the formula of half style, eager and as given, and Liger."""
    found = {
        OURS: functools.partial(_ours, full=full),
        "liger": functools.partial(_liger, full=full),
    }
    for name, formula in {"hf_eager": formulas.half, **compiled}.items():
        found[name] = functools.partial(_formula, full=full, formula=formula)
    return [
        Provider(
            name,
            OUT_FRESH,
            "ours" if name == OURS else "peer",
            prepare,
            steps=1 if name == OURS else 4,
        )
        for name, prepare in found.items()
    ]


def _ours(case: Case, *, full: bool) -> Prepared:
    def rotate_back(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        q, k_out = case.rope(case.positions, q, k, inverse=True)
        assert k_out is not None
        return q, k_out

    derivative = _Derivative(case, rotate_back, case.contiguous, full=full)
    return Prepared(derivative.call, derivative.result)


def _formula(case: Case, *, full: bool, formula: Formula) -> Prepared:
    cos, sin = (x[None, None] for x in case.cos_sin(full=True))
    sin = -sin

    def rotate_back(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return formula(heads_first(q), heads_first(k), cos, sin)

    q, k = case.contiguous
    incoming = heads_first(q), heads_first(k)
    derivative = _Derivative(case, rotate_back, incoming, full=full)
    return Prepared(derivative.call, derivative.result)


def _liger(case: Case, *, full: bool) -> Prepared:
    """It rotates the incoming gradients where they lie, so it gets copies, and turns them on."""
    function = liger_function()
    cos, sin = (x[None] for x in case.cos_sin(full=True))
    sin = -sin

    def rotate_back(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return function.apply(heads_first(q), heads_first(k), cos, sin)

    def derivative() -> _Derivative:
        q, k = (x.clone() for x in case.contiguous)
        return _Derivative(case, rotate_back, (heads_first(q), heads_first(k)), full=full)

    return Prepared(derivative().call, lambda: derivative().result())


def bhsd_providers() -> list[Provider]:
    """Forward on tensors that lie in memory as ``[1, heads, tokens, head_dim]``."""
    return [
        Provider(OURS, OUT_FRESH, "ours", _ours_bhsd, steps=1),
        Provider("hf_eager", OUT_FRESH, "peer", _formula_bhsd),
        Provider("liger", OUT_FRESH, "peer", _liger_bhsd),
    ]


def _lying_heads_first(case: Case) -> Pair:
    q, k = (heads_first(x).contiguous() for x in case.contiguous)
    return q, k


def _ours_bhsd(case: Case) -> Prepared:
    q, k = _lying_heads_first(case)
    rope, config = case.rope, case.cell.shape.config
    call = functools.partial(
        rc.apply_rope, q.transpose(1, 2), k.transpose(1, 2), case.positions, rope.cos_sin_cache,
        inv_freq=rope.inv_freq, style=config.style, axes=config.axes,
    )  # fmt: skip
    return Prepared(call, lambda: tuple(x[0] for x in call()))


def _formula_bhsd(case: Case) -> Prepared:
    q, k = _lying_heads_first(case)
    cos, sin = (x[None, None] for x in case.cos_sin(full=True))
    call = functools.partial(formulas.half, q, k, cos, sin)
    return Prepared(call, lambda: tokens_first(call()))


def _liger_bhsd(case: Case) -> Prepared:
    function = liger_function()
    cos, sin = (x[None] for x in case.cos_sin(full=True))
    q, k = _lying_heads_first(case)

    def result() -> Pair:
        return tokens_first(function.apply(q.clone(), k.clone(), cos, sin))

    return Prepared(lambda: function.apply(q, k, cos, sin), result)
