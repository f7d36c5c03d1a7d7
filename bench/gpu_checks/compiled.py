"""Stage "compile": the operators under opcheck and Inductor; launches, copies and host waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

import rope_compile as rc
from bench.gpu_checks.numbers import expect_equal
from bench.gpu_checks.registry import Check, Context, register
from bench.gpu_checks.variants import ROWS, Variant, edge_positions
from rope_compile.demo.promises import HostReads

CHECKS: list[Check] = []

TOKENS = (7, 64, 1, 1000)
_CONFIG = rc.RopeConfig(head_dim=64, max_position=ROWS)


def _inputs(context: Context, tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Positions inside and outside the table, q and k."""
    at = edge_positions().repeat(tokens // 37 + 1)[:tokens].to(context.device)
    return at, *Variant().inputs(context.device, tokens, seed)


@register(CHECKS, "compile.opcheck")
def opcheck_both(context: Context) -> None:
    """torch.library.opcheck passes for rope and rope_, all four utilities."""
    operators = torch.ops.rope_compile
    for variant in (Variant(dtype=torch.float32), Variant("interleaved", 80, 32, 16)):
        q, k = variant.inputs(context.device, 5)
        rest = (
            torch.tensor([0, ROWS - 1, ROWS, -1, 2**31 - 1], device=context.device),
            variant.rows.to(context.device), variant.inv_freq().to(context.device), [],
            variant.style, variant.offset, variant.scaling, False,
        )  # fmt: skip
        with context.case(f"rope, {variant}"):
            opcheck(operators.rope.default, (q.clone(), k.clone(), *rest))
        with context.case(f"rope with gradients, {variant}"):
            leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
            opcheck(operators.rope.default, (*leaves, *rest))
        with context.case(f"rope_, {variant}"):
            opcheck(operators.rope_.default, (q.clone(), k.clone(), *rest))


@register(CHECKS, "compile.equals_eager")
def equals_eager(context: Context) -> None:
    """torch.compile gives the bits of eager mode, for every token count, gradients included."""
    rope = rc.get_rope(_CONFIG, context.device)
    torch.compiler.reset()
    compiled = torch.compile(rope, fullgraph=True, dynamic=True)
    for tokens in TOKENS:
        with context.case(f"{tokens} tokens"), torch.no_grad():
            at, q, k = _inputs(context, tokens)
            expect_equal(context, f"{tokens} tokens", compiled(at, q, k), rope(at, q, k))
    with context.case("gradients"):
        at, q, k = _inputs(context, 64)
        incoming = _inputs(context, 64, seed=2)[1:]
        leaves = q.requires_grad_(), k.requires_grad_()
        found, wanted = (
            torch.autograd.grad(call(at, *leaves), leaves, incoming) for call in (compiled, rope)
        )
        expect_equal(context, "gradients", found, wanted)

    def in_place(at: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rope.apply_(at, q, k)
        return q, k

    def packed(at: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, _ = qkv.split([3, 2, 2], dim=1)
        return rope(at, q, k)

    with context.case("in place"), torch.no_grad():
        at, q, k = _inputs(context, 64)
        wanted = rope(at, q, k)
        expect_equal(context, "in place", torch.compile(in_place)(at, q, k), wanted)
    with context.case("slices of a packed projection"), torch.no_grad():
        at, q, k = _inputs(context, 64)
        qkv = torch.cat((q, k, k), dim=1)
        found = torch.compile(packed, fullgraph=True)(at, qkv)
        expect_equal(context, "packed", found, rope(at, q, k))


def device_events(call: Callable[[], object], device: torch.device) -> list[str]:
    """Names of the kernels, copies and fills that one call puts on the device."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize(device)
    return [
        event.name
        for event in recorded.events()
        # The profiler mirrors the names of compiled regions on the device's line.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


@register(CHECKS, "compile.one_launch", rehearse=False)
def one_launch(context: Context) -> None:
    """One kernel for q and k, and no copy or fill, in every form, forward and backward."""
    rope = rc.get_rope(_CONFIG, context.device)
    at, q, k = _inputs(context, 64)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    with torch.enable_grad():
        results = rope(at, *leaves)
    calls: dict[str, Callable[[], object]] = {
        "functional": lambda: rope(at, q, k),
        "in place": lambda: rope.apply_(at, q, k),
        "inverse": lambda: rope(at, q, k, inverse=True),
        "compiled": lambda: compiled(at, q, k),
        "backward": lambda: torch.autograd.grad(results, leaves, (q, k), retain_graph=True),
    }
    for name, call in calls.items():
        with context.case(name), torch.no_grad():
            call()
            names = device_events(call, context.device)
            if len(names) != 1 or "rope" not in names[0]:
                context.fail(name, f"the device ran {names or 'nothing'}")


@contextlib.contextmanager
def syncs_forbidden(context: Context) -> Iterator[None]:
    """Any wait of the host for the device raises; on a CPU, any read of a value around an op."""
    if not context.gpu:
        with HostReads() as watched:
            yield
        if watched.found:
            raise RuntimeError(f"the host reads {watched.found[0]}")
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@register(CHECKS, "compile.no_sync")
def no_sync(context: Context) -> None:
    """No public call waits for the device, wherever its positions lie."""
    rope = rc.get_rope(_CONFIG, context.device)
    table, inv_freq = rope.cos_sin_cache, rope.inv_freq
    at, q, k = _inputs(context, 64)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    compiled = torch.compile(rope, fullgraph=True, dynamic=True)

    def train() -> None:
        with torch.enable_grad():
            results = rope(at, *leaves)
            torch.autograd.grad(results, leaves, (q, k))

    calls: dict[str, Callable[[], object]] = {
        "apply_rope": lambda: rc.apply_rope(q, k, at, table, inv_freq=inv_freq),
        "apply_rope_": lambda: rc.apply_rope_(q, k, at, table, inv_freq=inv_freq),
        "table only": lambda: rc.apply_rope(q, k, at, table),
        "module": lambda: rope(at, q, k),
        "apply_": lambda: rope.apply_(at, q, k),
        "q alone": lambda: rope(at, q),
        "get_rope": lambda: rc.get_rope(_CONFIG, context.device),
        "reserve within the capacity": lambda: rope.reserve(ROWS),
        "forward and backward": train,
    }
    if context.gpu:  # the mode that watches a CPU would change what is compiled
        calls["compiled"] = lambda: compiled(at, q, k)
    for name, call in calls.items():
        with context.case(name), torch.no_grad():
            call()  # builds and loads, which may wait
            context.synchronize()
            with syncs_forbidden(context):
                call()
    if context.gpu:
        with context.case("the net holds"):
            try:
                with syncs_forbidden(context):
                    q.sum().item()
            except RuntimeError:
                return
            context.fail("the net holds", "a read of a value was not refused")


@register(CHECKS, "compile.interleaved_axes")
def interleaved_axes(context: Context) -> None:
    """Positions of three axes, alternating over the lanes, compiled as in eager mode."""
    axes = rc.InterleavedAxes((24, 20, 20))
    rope = rc.get_rope(rc.RopeConfig(head_dim=128, max_position=ROWS, axes=axes), context.device)
    torch.compiler.reset()
    compiled = torch.compile(rope, fullgraph=True)
    with context.case("(24, 20, 20)"), torch.no_grad():
        q, k = Variant(head_dim=128).inputs(context.device, 37)
        at = torch.stack([edge_positions().roll(5 * axis) for axis in range(3)]).to(context.device)
        expect_equal(context, "(24, 20, 20)", compiled(at, q, k), rope(at, q, k))


@register(CHECKS, "compile.shape_padding")
def shape_padding(context: Context) -> None:
    """Intermediate results that Inductor pads for its matrix products are read by their strides."""
    rope = rc.get_rope(_CONFIG, context.device)

    def project(at: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k = (x @ w).unflatten(-1, (5, 64)).split([3, 2], dim=1)
        return rope(at, q, k)

    x, w = (torch.randn(size, device=context.device) for size in ((37, 67), (67, 320)))
    at = edge_positions().to(context.device)
    torch.compiler.reset()
    with context.case("a product of odd size"), torch.no_grad():
        with torch._inductor.config.patch(shape_padding=True, force_shape_pad=True):
            found = torch.compile(project, fullgraph=True)(at, x, w)
        for name, a, b in zip(("q", "k"), found, project(at, x, w), strict=True):
            # Products of other tilings differ in their last bits; a wrong stride in everything.
            if not torch.allclose(a, b, rtol=1e-2, atol=1e-2):
                context.fail("a product of odd size", f"{name} differs")


@register(CHECKS, "compile.package", rehearse=False, seconds=40)
def package(context: Context) -> None:
    """An AOTInductor package gives the bits of eager mode at three token counts."""

    class Rotation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = rc.get_rope(_CONFIG, context.device)

        def forward(self, at: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.rope(at, q, k)

    model, tokens = Rotation(), torch.export.Dim("tokens", min=2, max=4096)
    with context.case("build"), torch.no_grad():
        sizes = ({0: tokens},) * 3
        program = torch.export.export(model, _inputs(context, 64), dynamic_shapes=sizes)
        run = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
        for count in (3, 17, 1000):
            with context.case(f"{count} tokens"):
                inputs = _inputs(context, count)
                expect_equal(context, f"{count} tokens", run(*inputs), model(*inputs))
