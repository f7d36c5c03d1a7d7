"""The operators ``rope_compile::rope`` and ``rope_``: schema, checks, fake, autograd, vmap.

torch only: importing this module registers both operators on every machine, with or without a GPU
or Triton. ``rope`` returns fresh contiguous tensors; ``rope_`` writes its inputs and returns
nothing.

NOTE [Why define/impl] ``torch.library.custom_op`` costs about 20 us a call more than
``Library.define`` + ``impl`` and hides the launch from Inductor.

NOTE [Sizes under compilation] Inlined code is launched for q's token count, so k and positions must
have it, or memory behind them would be read. Where a size is symbolic nothing branches on it:
`torch._check` states the equality, which costs a guard (or a run-time assertion for an unbacked
size) and no graph. One graph serves every token count, 0 and 1 included.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import (  # see _lower_for_inductor
    FunctionalTensor,
    FunctionalTensorMode,
)
from torch.autograd import forward_ad

from rope_compile.kernels import cpu, native, reference

STYLES = ("half", "interleaved", "half_blocks", "interleaved_to_half")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)

LIB = torch.library.Library("rope_compile", "DEF")
_REST = (
    "Tensor positions, Tensor cos_sin_cache, Tensor? inv_freq, int[] axes, str style, "
    "int rotary_offset, float attention_scaling, bool inverse"
)
# flexible_layout: the kernels take any strides, so Inductor need not copy to restore traced ones.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
LIB.define(f"rope(Tensor q, Tensor? k, {_REST}) -> (Tensor, Tensor?)", tags=_TAGS)
LIB.define(f"rope_(Tensor(a!) q, Tensor(b!)? k, {_REST}) -> ()", tags=_TAGS)

# The same in plain torch, for CPU tensors: where no native kernel can be had, for the rare calls it
# does not take, and to compare it with. Behind rope and rope_ only: no gradients, no fakes.
LIB.define(f"rope_torch(Tensor q, Tensor? k, {_REST}) -> (Tensor, Tensor?)")
LIB.define(f"rope_torch_(Tensor(a!) q, Tensor(b!)? k, {_REST}) -> ()")

rope_op = torch.ops.rope_compile.rope.default
rope_inplace_op = torch.ops.rope_compile.rope_.default


# ---------------------------------------------------------------------------------------- checks


def _differ(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True when both sizes are plain ints and differ; symbolic ones are made to be equal.

    See NOTE [Sizes under compilation].
    """
    if type(a) is int and type(b) is int:
        return a != b
    torch._check(
        a == b,
        lambda: f"k and positions must have the token dimensions of q, got sizes {a} and {b}",
    )
    return False


def check_arguments(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    axes: Sequence[int],
    style: str,
    rotary_offset: int,
) -> None:
    """Raise on anything a kernel must not see. Real kernels and fakes share it.

    Raises:
        ValueError: device, shape or range. TypeError: dtype.
    """
    try:
        device = q.device
        apart = (
            positions.device != device
            or cos_sin_cache.device != device
            or (k is not None and k.device != device)
            or (inv_freq is not None and inv_freq.device != device)
        )
    except AttributeError as error:
        _raise_missing(error, q=q, positions=positions, cos_sin_cache=cos_sin_cache)
        raise
    if apart:
        _raise_devices(q, k, positions, cos_sin_cache, inv_freq)
    if q.dtype not in FLOAT_DTYPES or (k is not None and k.dtype not in FLOAT_DTYPES):
        wrong = [("q", q.dtype), ("k", None if k is None else k.dtype)]
        name, dtype = next(pair for pair in wrong if pair[1] not in FLOAT_DTYPES)
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, got {dtype}; convert it first"
        )
    if positions.dtype not in POSITION_DTYPES:
        raise TypeError(
            f"positions must be int32 or int64, got {positions.dtype}; use positions.long()"
        )
    if cos_sin_cache.dtype != torch.float32:
        raise TypeError(
            f"cos_sin_cache must be float32 whatever the dtype of q, got {cos_sin_cache.dtype}; "
            "build it in float32 and never cast it"
        )
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise ValueError(
            "cos_sin_cache must be [rows, rotary_dim] with an even rotary_dim, "
            f"got {tuple(cos_sin_cache.shape)}"
        )
    rotary_dim = cos_sin_cache.shape[1]
    half = rotary_dim // 2
    if q.dim() < 2 or (k is not None and k.dim() != q.dim()):
        raise ValueError(
            "q and k must be [..., heads, head_dim] of one rank, got "
            f"{tuple(q.shape)} and {None if k is None else tuple(k.shape)}"
        )
    for name, x in (("q", q), ("k", k)):
        if x is not None and not 0 <= rotary_offset <= x.shape[-1] - rotary_dim:
            raise ValueError(
                f"rotary_offset + rotary_dim must lie in 0..head_dim of {name}, got "
                f"{rotary_offset} + {rotary_dim} for head_dim {x.shape[-1]}"
            )
    if inv_freq is None:
        if type(cos_sin_cache.shape[0]) is int and cos_sin_cache.shape[0] == 0 and rotary_dim:
            raise ValueError(
                "cos_sin_cache must have at least one row when inv_freq is None, got "
                f"{tuple(cos_sin_cache.shape)}; pass inv_freq"
            )
    elif inv_freq.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"inv_freq must be float32 or float64 (exact phases), got {inv_freq.dtype}")
    elif inv_freq.dim() != 1 or _differ(inv_freq.shape[0], half):
        raise ValueError(
            f"inv_freq must be [rotary_dim / 2] = ({half},), got {tuple(inv_freq.shape)}"
        )
    if style not in STYLES:
        raise ValueError(f"style must be one of {STYLES}, got {style!r}")
    lead = q.dim() - 2
    if k is not None and lead:
        _check_tokens("k", k.shape[:-2], q)
    if axes:
        _check_axes(positions, axes, half, style, q)
    elif style == "half_blocks" and rotary_dim:
        raise ValueError("style 'half_blocks' needs axes, got none; use style 'half'")
    elif positions.dim() > lead:
        raise ValueError(
            f"positions must broadcast to q.shape[:-2] = {tuple(q.shape[:-2])}, "
            f"got {tuple(positions.shape)}"
        )
    else:
        _check_broadcast(positions.shape, positions, q)


def _check_tokens(name: str, sizes: Sequence[int], q: Tensor) -> None:
    for a, b in zip(sizes, q.shape, strict=False):
        if _differ(a, b):
            raise ValueError(
                f"{name} must have the token dimensions of q, {tuple(q.shape[:-2])}, "
                f"got {tuple(sizes)}"
            )


def _check_broadcast(sizes: Sequence[int], positions: Tensor, q: Tensor) -> None:
    lead = q.dim() - 2
    for i in range(1, len(sizes) + 1):
        size = sizes[-i]
        if i > lead or (not _is(size, 1) and _differ(size, q.shape[lead - i])):
            raise ValueError(
                f"positions must broadcast to q.shape[:-2] = {tuple(q.shape[:-2])}, "
                f"got {tuple(positions.shape)}"
            )


def _check_axes(positions: Tensor, axes: Sequence[int], half: int, style: str, q: Tensor) -> None:
    if len(axes) not in (half, 2 * half) or min(axes) < 0:
        raise ValueError(
            f"axes must name one axis for each of {half} lanes (or of {2 * half} channels), "
            f"got {len(axes)} entries from {min(axes)} to {max(axes)}"
        )
    if len(axes) > half and style != "half":
        raise ValueError(f"axes of full width need style 'half', got {style!r}")
    if style == "half_blocks" and list(axes) != sorted(axes):
        raise ValueError(
            f"style 'half_blocks' needs axes in contiguous ascending blocks, got {tuple(axes)}"
        )
    count = max(axes) + 1
    if positions.dim() == 1:  # one position for every axis: text only
        _check_broadcast(positions.shape, positions, q)
        return
    if positions.dim() > q.dim() - 1:
        raise ValueError(
            f"positions must be [{count}, ...] with the rest broadcasting to q.shape[:-2] = "
            f"{tuple(q.shape[:-2])}, got {tuple(positions.shape)}"
        )
    first = positions.shape[0] if positions.dim() else 1
    if not _is(first, 1) and _differ(first, count):
        raise ValueError(
            f"positions must have {count} axes (or 1 for all) first, got {tuple(positions.shape)}"
        )
    _check_broadcast(positions.shape[1:], positions, q)


def _raise_missing(error: AttributeError, **required: Tensor | None) -> None:
    """Name the tensor that is None: torch lets it pass, for a tensor that is not defined."""
    for name, x in required.items():
        if x is None:
            raise TypeError(f"{name} must be a tensor, got NoneType") from error


def _raise_devices(*tensors: Tensor | None) -> None:
    names = ("q", "k", "positions", "cos_sin_cache", "inv_freq")
    seen = ", ".join(
        f"{name} on {x.device}" for name, x in zip(names, tensors, strict=True) if x is not None
    )
    raise ValueError(
        f"all tensors must be on one device, got {seen}; move them to q's device "
        "(a table on meta was torn down or never materialised: fetch it again with get_rope)"
    )


def check_alive(**tensors: Tensor | None) -> None:
    """Refuse memory that was taken away: a storage resized to nothing still has its shape.

    Raises:
        ValueError: the tensor has elements and no bytes. TypeError: it has no storage to look at.
    """
    for name, x in tensors.items():
        if x is None:
            continue
        # Plain tensors alone: others have no memory of their own, and a symbolic size no value.
        plain = type(x) is Tensor and x.device.type != "meta" and x.numel() > 0
        if not plain:
            continue
        try:
            size = x.untyped_storage().nbytes()
        except NotImplementedError as error:
            raise TypeError(
                f"{name} must be a dense tensor, got layout {x.layout}; use to_dense()"
            ) from error
        if size == 0:
            raise ValueError(
                f"{name} must have memory, got a freed storage for shape {tuple(x.shape)}; "
                "fetch the table again with get_rope, or call rebuild_() once memory is back"
            )


def check_writable(q: Tensor, k: Tensor | None) -> None:
    """Refuse what ``rope_`` cannot write right: memory that two elements share.

    Raises:
        ValueError: q or k overlaps itself (stride-0 heads), or q overlaps k.
    """
    for name, x in (("q", q), ("k", k)):
        if x is not None and _overlaps_itself(x):
            raise ValueError(
                f"{name} must not overlap itself to be rotated in place, got strides {x.stride()} "
                f"for shape {tuple(x.shape)}; use the functional form, or {name}.contiguous()"
            )
    if k is not None and _overlap(q, k):
        raise ValueError(
            "q and k must not share memory to be rotated in place; use the functional form"
        )


def _overlaps_itself(x: Tensor) -> bool:
    if not all(type(n) is int for n in (*x.shape, *x.stride())) or x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors may share an element; exact for slices of one packed tensor."""
    if not all(type(n) is int for n in (*a.shape, *a.stride(), *b.shape, *b.stride())):
        return False
    if not a.numel() or not b.numel() or a.device.type == "meta":
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    if a.dtype != b.dtype:
        return True
    dims = list(zip(a.shape, a.stride(), b.shape, b.stride(), strict=True))
    # Token dimensions that both walk alike: compare what lies within one step of them.
    shared = [d for d in dims if d[:2] == d[2:] and d[0] > 1]
    while True:
        rest = [d for d in dims if d not in shared]
        starts = (a.storage_offset(), b.storage_offset())
        ends = (
            starts[0] + sum((n - 1) * s for n, s, _, _ in rest),
            starts[1] + sum((n - 1) * s for _, _, n, s in rest),
        )
        if starts[0] > ends[1] or starts[1] > ends[0]:
            span = max(ends) - min(starts)
            reach = span
            for n, s, _, _ in sorted(shared, key=lambda d: d[1]):
                if s <= reach:
                    break
                reach += s * (n - 1)
            else:
                return False
        if not shared:
            return True
        shared.remove(min(shared, key=lambda d: d[1]))


# --------------------------------------------------------------------------- allocation and layout


def allocate_output(x: Tensor) -> Tensor:
    """Contiguous output for any input layout; shared by the kernels and the fake."""
    return x.new_empty(x.shape)


Pairs = list[tuple[Tensor, Tensor]]  # (out, x); in place both are one object


def _each(pairs: Pairs, view: Callable[[Tensor], Tensor]) -> Pairs:
    """Apply a view to every tensor; one object stays one, which is how kernels know "in place"."""
    viewed = [(out is x, out, view(x)) for out, x in pairs]
    return [(x if same else view(out), x) for same, out, x in viewed]


def _is(size: int | torch.SymInt, value: int) -> bool:
    return type(size) is int and size == value


def _two_token_dims(pairs: Pairs, positions: Tensor, lead: int) -> list[tuple[Pairs, Tensor]]:
    """Views ``[batch, seq, heads, head_dim]`` and positions ``[..., batch, seq]``, never a copy.

    ``positions`` has all ``lead`` token dimensions last. Token dimensions beyond two become
    separate entries of the list.
    """
    while lead < 2:
        pairs, positions = _each(pairs, lambda x: x.unsqueeze(0)), positions.unsqueeze(-1 - lead)
        lead += 1
    if lead == 2:
        return [(pairs, positions)]
    return [
        entry
        for i in range(pairs[0][1].shape[0])
        for entry in _two_token_dims(
            _each(pairs, lambda x, i=i: x.select(0, i)),  # type: ignore[misc]
            positions.select(positions.dim() - lead, i),
            lead - 1,
        )
    ]


def _expand_positions(positions: Tensor, q: Tensor, axes: Sequence[int]) -> Tensor:
    """Positions ``[(A,) token dimensions of q]``: missing and size-1 dimensions expanded.

    See NOTE [Sizes under compilation]: a symbolic size is taken to be q's.
    """
    if axes and positions.dim() < 2:
        positions = positions.unsqueeze(0)
    lead = q.dim() - 2
    while positions.dim() < lead + bool(axes):
        positions = positions.unsqueeze(int(bool(axes)))
    wanted = [max(axes) + 1] if axes else []
    wanted += q.shape[:lead]
    return positions.expand(
        [n if _is(size, 1) else size for size, n in zip(positions.shape, wanted, strict=True)]
    )


def _run(kernel: Any, pairs: Pairs, positions: Tensor, *rest: Any) -> None:
    cos_sin_cache, axes = rest[0], rest[2]
    positions = _expand_positions(positions, pairs[0][1], axes)
    pairs = [(out, x) for out, x in pairs if not any(_is(n, 0) for n in x.shape)]
    if not pairs:
        return
    if cos_sin_cache.shape[1] == 0:
        for out, x in pairs:
            if out is not x:
                out.copy_(x)
        return
    for views, at in _two_token_dims(pairs, positions, pairs[0][1].dim() - 2):
        kernel(views, at, *rest)


# ---------------------------------------------------------------------------------- real kernels


@functools.cache
def _triton_module() -> Any:
    """The Triton kernel's module, or None (with one warning) where Triton cannot be imported."""
    try:
        from rope_compile.kernels import triton_rope
    except ImportError as error:
        warnings.warn(
            f"triton cannot be imported ({error}): CUDA tensors take the slow reference path; "
            "pip install triton",
            stacklevel=2,
        )
        return None
    return triton_rope


def _cuda_kernel(views: Pairs, at: Tensor, *rest: Any) -> None:
    module = _triton_module()
    if module is None:
        reference.rope_into(views, at, *rest)
    else:
        module.launch(module.rope_kernel, views, at, *rest)


def _check_call(q: Tensor, k: Tensor | None, positions: Tensor, *rest: Any) -> None:
    check_arguments(q, k, positions, *rest[:5])
    check_alive(q=q, k=k, positions=positions, cos_sin_cache=rest[0], inv_freq=rest[1])


def _make_pair(kernel: Any) -> tuple[Any, Any]:
    """Functional and in-place implementation around one kernel."""

    def functional(
        q: Tensor, k: Tensor | None, positions: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        _check_call(q, k, positions, *rest)
        q_out = allocate_output(q)
        k_out = None if k is None else allocate_output(k)
        pairs = [(q_out, q)] if k is None or k_out is None else [(q_out, q), (k_out, k)]
        _run(kernel, pairs, positions, *rest)
        return q_out, k_out

    def in_place(q: Tensor, k: Tensor | None, positions: Tensor, *rest: Any) -> None:
        _check_call(q, k, positions, *rest)
        check_in_place(rest[3])
        check_writable(q, k)
        _run(kernel, [(q, q)] if k is None else [(q, q), (k, k)], positions, *rest)

    return functional, in_place


def check_in_place(style: str) -> None:
    if style == "interleaved_to_half":
        raise ValueError(
            "style 'interleaved_to_half' moves channels and cannot be applied in place; "
            "use the functional form"
        )


for _name, _key, _kernel in (
    ("rope", "CUDA", _cuda_kernel),
    ("rope", "CompositeExplicitAutograd", reference.rope_into),
    ("rope_torch", "CPU", cpu.rope_into_by_blocks),
):
    _functional, _in_place = _make_pair(_kernel)
    LIB.impl(_name, _functional, _key)
    LIB.impl(_name + "_", _in_place, _key)


def native_cpu_kernel(retry: bool = False) -> tuple[bool, str]:
    """Whether CPU tensors run natively, and one line that says which library, or why not.

    Compiles the kernel where that has not been tried, or (``retry``) where it failed.
    """
    native.load_or_build(retry)
    return native.status()


@functools.cache
def _cpu_operators() -> tuple[Any, Any]:
    """What runs CPU tensors in a process that was started without a built library."""
    ops = torch.ops.rope_compile
    if native.load_or_build():
        return ops.rope_native.default, ops.rope_native_.default
    return ops.rope_torch.default, ops.rope_torch_.default


# A built library registers its own kernels, and a front that spares calls without gradients the
# way through Python. See NOTE [Why define/impl] for what a hop costs.
if not native.load_if_built():
    LIB.impl("rope", lambda *args: _cpu_operators()[0](*args), "CPU")
    LIB.impl("rope_", lambda *args: _cpu_operators()[1](*args), "CPU")


# ----------------------------------------------------------------------------------------- fakes


def _rope_fake(
    q: Tensor, k: Tensor | None, positions: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    check_arguments(q, k, positions, *rest[:5])
    return allocate_output(q), None if k is None else allocate_output(k)


def _rope_inplace_fake(q: Tensor, k: Tensor | None, positions: Tensor, *rest: Any) -> None:
    check_arguments(q, k, positions, *rest[:5])
    check_in_place(rest[3])
    check_writable(q, k)


torch.library.register_fake("rope_compile::rope", _rope_fake, lib=LIB)
torch.library.register_fake("rope_compile::rope_", _rope_inplace_fake, lib=LIB)


# -------------------------------------------------------------------------------------- autograd


class _Rotation(torch.autograd.Function):
    """The operator is linear in q and k, and its transpose is itself with ``inverse`` flipped.

    Both derivatives call the differentiable operator, so every order is right. Nothing of q or k
    is saved but their shapes.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, *rest: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*rest[:3])
        ctx.save_for_forward(*rest[:3])
        ctx.shape = rest[3:]
        ctx.kinds = [None if x is None else (x.shape, x.dtype) for x in (q, k)]
        with torch._C._AutoDispatchBelowAutograd():
            return rope_op(q, k, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (*_linear(ctx, grads, inverse=not ctx.shape[-1]), *(None,) * 8)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        results = _linear(ctx, tangents[:2], inverse=ctx.shape[-1])
        for i, kind in enumerate(ctx.kinds):
            if results[i] is None and kind is not None:  # torch asserts where a tangent is missing
                results[i] = ctx.saved_tensors[1].new_zeros(kind[0], dtype=kind[1])
        return tuple(results)


def _linear(ctx: Any, given: Sequence[Tensor | None], inverse: bool) -> list[Tensor | None]:
    """The operator applied to what is there of (q, k)."""
    results: list[Tensor | None] = [None, None]
    there = [i for i, x in enumerate(given) if x is not None]
    if there:
        second = given[there[1]] if len(there) > 1 else None
        rotated = rope_op(given[there[0]], second, *ctx.saved_tensors, *ctx.shape[:-1], inverse)
        for i, x in zip(there, rotated, strict=False):
            results[i] = x
    return results


def _records(q: Tensor, k: Tensor | None) -> bool:
    """Whether a derivative of this call is wanted, in reverse or in forward mode."""
    needs_grad = q.requires_grad or (k is not None and k.requires_grad)
    return (needs_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def _rope_autograd(q: Tensor, k: Tensor | None, *rest: Any) -> Any:
    if not _records(q, k):
        with torch._C._AutoDispatchBelowAutograd():
            return rope_op(q, k, *rest)
    if torch._C._are_functorch_transforms_active():
        # An autograd.Function below the operator runs with gradients off at every outer level:
        # nested transforms would lose terms without a word.
        raise NotImplementedError(
            "torch.func.grad, vjp and jvp must not reach rope_compile::rope, got such a transform; "
            "use torch.autograd (backward, grad, forward_ad), which is right to every order; "
            "torch.vmap works"
        )
    apply: Any = _Rotation.apply  # typed in torch 2.14, not before
    return apply(q, k, *rest)


LIB.impl("rope", _rope_autograd, "Autograd")


def _rope_inplace_autograd(q: Tensor, k: Tensor | None, *rest: Any) -> None:
    if _records(q, k):
        raise RuntimeError(
            "q and k must not require grad (or carry tangents) to be rotated in place while "
            "gradients are recorded; use the functional form, which has gradients of every order"
        )
    with torch._C._AutoDispatchBelowAutograd():
        rope_inplace_op(q, k, *rest)
    # A raw write does not tell autograd; without this a saved q would be used silently changed.
    torch.autograd.graph.increment_version([q] if k is None else [q, k])


LIB.impl("rope_", _rope_inplace_autograd, "Autograd")


# ------------------------------------------------------------------------------------------ vmap


def _batched(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    return x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)


def _vmap_positions(positions: Tensor, dim: int | None, axes: Sequence[int], lead: int) -> Tensor:
    """Positions with the mapped dimension as first token dimension (behind the axes)."""
    if dim is None:
        return positions
    head = 0
    positions = positions.movedim(dim, 0)
    if axes and positions.dim() > 2:
        positions, head = positions.movedim(0, 1), 1
    elif axes:
        positions, head = positions.unsqueeze(0), 1
    while positions.dim() - head < lead + 1:
        positions = positions.unsqueeze(head + 1)
    return positions


def _check_unmapped(in_dims: tuple[Any, ...]) -> None:
    if any(dim is not None for dim in in_dims[3:5]):
        raise ValueError(
            "cos_sin_cache and inv_freq must not be mapped by vmap, got in_dims "
            f"{in_dims[3:5]}; map q, k or positions"
        )


def _rope_vmap(info: Any, in_dims: tuple[Any, ...], q: Tensor, k: Tensor | None, *rest: Any) -> Any:
    _check_unmapped(in_dims)
    positions, cos_sin_cache, inv_freq, axes, *more = rest
    lead = q.dim() - 2 - (in_dims[0] is not None)
    q_mapped = _batched(q, in_dims[0], info.batch_size)
    k = _batched(k, in_dims[1], info.batch_size)
    positions = _vmap_positions(positions, in_dims[2], axes, lead)
    result = rope_op(q_mapped, k, positions, cos_sin_cache, inv_freq, axes, *more)
    return result, (0, None if k is None else 0)


def _rope_inplace_vmap(
    info: Any, in_dims: tuple[Any, ...], q: Tensor, k: Tensor | None, *rest: Any
) -> Any:
    _check_unmapped(in_dims)
    positions, cos_sin_cache, inv_freq, axes, *more = rest
    if in_dims[0] is None or (k is not None and in_dims[1] is None):
        raise ValueError(
            "q and k must both be mapped to be rotated in place under vmap, got in_dims "
            f"{in_dims[:2]}"
        )
    lead = q.dim() - 3
    q = q.movedim(in_dims[0], 0)
    k = None if k is None else k.movedim(in_dims[1], 0)
    positions = _vmap_positions(positions, in_dims[2], axes, lead)
    rope_inplace_op(q, k, positions, cos_sin_cache, inv_freq, axes, *more)
    return None, None


torch.library.register_vmap("rope_compile::rope", _rope_vmap, lib=LIB)
torch.library.register_vmap("rope_compile::rope_", _rope_inplace_vmap, lib=LIB)


# ---------------------------------------------------------------- what Inductor sees on a GPU


def _lower_for_inductor(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Show the Triton launch to AOTDispatcher for CUDA tensors; stay one opaque call otherwise.

    Inductor then writes the launch into its wrapper: no dispatcher hop, views of a packed qkv
    projection passed as views. FunctionalTensorMode is private (torch 2.11 to 2.14);
    tests/test_inductor_cuda_text.py fails when it moves.
    """
    # Another subclass comes first: a DTensor's rule finds the local tensors. torch.export keeps the
    # operator too: a launch is for this machine only.
    plain = set(types) <= {Tensor, FunctionalTensor} and not mode.export
    module = _triton_module() if plain and args[0].device.type == "cuda" else None
    if module is None:
        return mode.__torch_dispatch__(func, types, args, kwargs)

    def kernel(views: Pairs, at: Tensor, *rest: Any) -> None:
        module.launch(torch.library.wrap_triton(module.rope_kernel), views, at, *rest)

    functional, _ = _make_pair(kernel)
    with mode:
        return functional(*args, **(kwargs or {}))


# rope_ stays one opaque call: Inductor then rebuilds its views from their base and copies nothing.
# A launch that both reads and writes two slices of one tensor costs two copies of the whole.
torch.library.register_torch_dispatch(
    "rope_compile::rope", FunctionalTensorMode, _lower_for_inductor, lib=LIB
)
