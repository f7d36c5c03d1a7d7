"""Stage "numbers", second part: derivatives in every direction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

import rope_compile as rc
from bench.gpu_checks.numbers import expect_equal
from bench.gpu_checks.registry import Check, Context, register
from bench.gpu_checks.variants import ROWS, Variant, edge_positions

CHECKS: list[Check] = []


def _rope(context: Context, head_dim: int, style: str = "half") -> rc.RotaryEmbedding:
    config = rc.RopeConfig(head_dim=head_dim, max_position=ROWS, style=style)
    return rc.get_rope(config, context.device)


def _normal(context: Context, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(context.device, dtype)


@register(CHECKS, "numbers.backward")
def backward(context: Context) -> None:
    """The gradient is the inverse rotation of the incoming one, bit for bit."""
    at = edge_positions().to(context.device)
    for style in ("half", "interleaved"):
        for dtype in (torch.bfloat16, torch.float32):
            with context.case(f"{style} {dtype}"):
                rope = _rope(context, 64, style)
                q, k = (x.requires_grad_() for x in Variant(dtype=dtype).inputs(context.device))
                incoming = [x.detach() for x in Variant(dtype=dtype).inputs(context.device, seed=2)]
                found = torch.autograd.grad(rope(at, q, k), (q, k), incoming)
                with torch.no_grad():
                    wanted = rope(at, *incoming, inverse=True)
                expect_equal(context, f"{style} {dtype}", found, wanted)


@register(CHECKS, "numbers.second_order")
def second_order(context: Context) -> None:
    """gradcheck and gradgradcheck in float64, with and without k."""
    at = torch.tensor([3, ROWS + 5, -2], device=context.device)
    for style in ("half", "interleaved"):
        rope = _rope(context, 8, style)
        q, k = (
            _normal(context, 3, heads, 8, dtype=torch.float64, seed=heads).requires_grad_()
            for heads in (2, 1)
        )
        for inputs in ((q, k), (q,)):
            for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
                with context.case(f"{check.__name__} {style}, {len(inputs)} tensors"):

                    def rotate(*given: Tensor, rope=rope) -> tuple[Tensor, ...]:
                        return tuple(x for x in rope(at, *given) if x is not None)

                    check(rotate, inputs)


@register(CHECKS, "numbers.forward_mode")
def forward_mode(context: Context) -> None:
    """A tangent is rotated like the tensor that carries it, bit for bit."""
    at = edge_positions().to(context.device)
    rope = _rope(context, 64)
    for dtype in (torch.bfloat16, torch.float32):
        with context.case(str(dtype)):
            primal = Variant(dtype=dtype).inputs(context.device)
            tangent = Variant(dtype=dtype).inputs(context.device, seed=2)
            with forward_ad.dual_level():
                pairs = zip(primal, tangent, strict=True)
                dual = rope(at, *(forward_ad.make_dual(x, dx) for x, dx in pairs))
                found = [forward_ad.unpack_dual(x).tangent for x in dual]
            expect_equal(context, str(dtype), found, rope(at, *tangent))
