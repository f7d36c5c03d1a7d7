"""Public functions over the operators, for custom tables; validation lives in ``ops``."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rope_compile.axes import Axes, Style
from rope_compile.checks import flag, shown, tensor
from rope_compile.ops import STYLES, rope_inplace_op, rope_op

# What calling the two operators calls; a tenth of a call at one token. Compilers know the operators
# alone. The attribute is private (torch 2.11 to 2.14): without it this module fails to import.
_rope, _rope_inplace = rope_op._op, rope_inplace_op._op

# What an argument of a type that the schema of the operators refuses must be.
_MUST_BE = {
    "q": "a tensor",
    "k": "a tensor or None",
    "positions": "a tensor",
    "cos_sin_cache": "a tensor",
    "inv_freq": "a tensor or None",
    "axes": "an Axes, one axis for each lane, or None",
    "style": f"one of {STYLES}",
    "rotary_offset": "an int",
    "attention_scaling": "a number",
    "inverse": "True or False",
}


class _Debug:
    """The switch behind :func:`debug`; off unless ``ROPE_COMPILE_DEBUG`` is set to other than 0."""

    enabled = os.environ.get("ROPE_COMPILE_DEBUG", "0") not in ("", "0")


def debug(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Switch the host-side bounds check on (or off) in this process, from this call on.

    With the check on, eager calls read the positions on the host and raise ``ValueError`` for the
    first one outside the table. It never runs while compiling or capturing. Use the result as a
    context manager to restore the previous setting on exit::

        rc.debug()            # on, until rc.debug(False)
        with rc.debug():      # on inside only
            ...
    """
    before, _Debug.enabled = _Debug.enabled, flag("enabled", enabled)

    @contextlib.contextmanager
    def restoring() -> Iterator[None]:
        try:
            yield
        finally:
            _Debug.enabled = before

    return restoring()


def _check_bounds(positions: Tensor, cos_sin_cache: Tensor) -> None:
    """Raise for a position outside the table; silent where reading the values is not possible."""
    if type(positions) is not Tensor or positions.device.type == "meta" or not positions.numel():
        return
    if positions.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    low, high = (int(p) for p in torch.aminmax(positions))
    rows = cos_sin_cache.shape[0]
    if low < 0 or high >= rows:
        raise ValueError(
            f"positions must lie inside the table of {rows} rows while the debug check is on, got "
            f"{low if low < 0 else high}; call reserve({max(high, 0) + 1}) before "
            "capture or compile, "
            "or switch the check off: positions outside the table are computed, not read"
        )


def _meet(q: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Have the rules for a DTensor registered; the table to go on with.

    Here and not on import: to import DTensor takes seconds.
    """
    if type(q).__name__ != "DTensor":
        return cos_sin_cache
    from rope_compile import distributed

    return distributed.keyed_by_rank(cos_sin_cache)


def _as_one_axis(positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Positions of one axis for all lanes, and the map that says so: the same rotation.

    For exported programs, where the map must not be empty: AOTInductor hands an empty ``int[]`` of
    an operator over as None, and the call fails (pytorch #194324; torch 2.11 to 2.14).
    """
    if positions.dim() > 1:
        positions = positions.unsqueeze(0)
    return positions, (0,) * (cos_sin_cache.shape[1] // 2)


def _attend(
    q: Tensor, positions: Tensor, cos_sin_cache: Tensor, lane_axes: Sequence[int]
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """What compiling, the debug check and tensor subclasses ask for before the operator."""
    compiling = torch.compiler.is_compiling()
    if not compiling and _Debug.enabled:
        _check_bounds(positions, cos_sin_cache)
    if compiling and not lane_axes and torch.compiler.is_exporting():
        positions, lane_axes = _as_one_axis(positions, cos_sin_cache)
    if type(q) is not Tensor:
        cos_sin_cache = _meet(q, cos_sin_cache)
    return positions, cos_sin_cache, lane_axes


def _explain(error: RuntimeError, *arguments: object) -> None:
    """Raise our own sentence where an operator refused an argument of a wrong type.

    Nothing is checked before the call: torch does, and its text names the argument. The text is
    private (torch 2.11 to 2.14); tests/test_errors.py fails when it changes.
    """
    refused = re.match(r"rope_compile::rope_?\(\) Expected .* for argument '(\w+)'", str(error))
    for name, value in zip(_MUST_BE, arguments, strict=True):
        if refused and name == refused[1]:
            got = type(value).__name__ if "tensor" in _MUST_BE[name] else shown(value)
            raise TypeError(f"{name} must be {_MUST_BE[name]}, got {got}") from error
        if isinstance(value, Tensor) and value.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one; rotate its values(), by "
                "positions_from_cu_seqlens"
            ) from error


def rotate(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    lane_axes: Sequence[int],
    style: str,
    rotary_offset: int,
    attention_scaling: float,
    inverse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The operator behind the debug check; arguments as in the schema of ``rope``."""
    if inverse is not False and inverse is not True:
        flag("inverse", inverse)  # torch would take None for False, and 1.5 for True
    operator = _rope
    if torch.compiler.is_compiling() or _Debug.enabled or type(q) is not Tensor:
        operator = rope_op
        positions, cos_sin_cache, lane_axes = _attend(q, positions, cos_sin_cache, lane_axes)
    arguments = (
        q, k, positions, cos_sin_cache, inv_freq, lane_axes, style, rotary_offset,
        attention_scaling, inverse,
    )  # fmt: skip
    try:
        return operator(*arguments)  # type: ignore[no-any-return]
    except RuntimeError as error:
        _explain(error, *arguments)
        raise


def rotate_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    lane_axes: Sequence[int],
    style: str,
    rotary_offset: int,
    attention_scaling: float,
    inverse: bool,
) -> None:
    """In-place twin of :func:`rotate`."""
    if inverse is not False and inverse is not True:
        flag("inverse", inverse)
    operator = _rope_inplace
    if torch.compiler.is_compiling() or _Debug.enabled or type(q) is not Tensor:
        operator = rope_inplace_op
        positions, cos_sin_cache, lane_axes = _attend(q, positions, cos_sin_cache, lane_axes)
    arguments = (
        q, k, positions, cos_sin_cache, inv_freq, lane_axes, style, rotary_offset,
        attention_scaling, inverse,
    )  # fmt: skip
    try:
        operator(*arguments)
    except RuntimeError as error:
        _explain(error, *arguments)
        raise


def _lane_axes(
    cos_sin_cache: Tensor,
    rotary_dim: int | None,
    axes: Axes | Sequence[int] | None,
    style: Style,
) -> Sequence[int]:
    """Check what the operator cannot see (types, the stated width) and expand the axis map."""
    tensor("cos_sin_cache", cos_sin_cache, "a tensor [rows, rotary_dim]")
    if isinstance(rotary_dim, Tensor):
        raise TypeError(f"rotary_dim must be an int or None, got {shown(rotary_dim)}")
    if rotary_dim is not None and rotary_dim != cos_sin_cache.shape[-1]:
        raise ValueError(
            f"rotary_dim must be the width of cos_sin_cache, {cos_sin_cache.shape[-1]}, got "
            f"{rotary_dim}; leave it out"
        )
    if axes is None:
        return ()
    if not isinstance(axes, Axes):
        return axes
    axes.check(cos_sin_cache.shape[-1], style)
    return axes.lane_axes(cos_sin_cache.shape[-1])


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inv_freq: Tensor | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    style: Style = "half",
    attention_scaling: float = 1,  # an int: dynamic=True makes a symbol of a default of 1.0
    inverse: bool = False,
    axes: Axes | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate ``rotary_dim`` channels of q and k by position-dependent angles (arXiv 2104.09864).

    One graph for every token count, no host synchronisation, capturable, differentiable to any
    order.

    DTensors are rotated where they lie, sharded over batch, sequence or heads, without
    communication; positions are then a plain tensor, equal on every rank, or a DTensor too. See
    ``rope_compile.distributed``.

    Args:
        q: ``[..., heads, head_dim]``, float16, bfloat16, float32 or float64; any strides. A
            transformers tensor ``[batch, heads, seq, head_dim]`` comes in as ``q.transpose(1, 2)``.
        k: As q, with its own head count, or None.
        positions: ``[tokens]``, ``[seq]`` or ``[batch, seq]``, broadcast to ``q.shape[:-2]``, and
            ``[axes, ...]`` first with ``axes``; int32 or int64, any value. Outside the table the
            angle is computed from ``inv_freq``, which is slower.
        cos_sin_cache: ``[rows, rotary_dim]``, float32, on ``q.device``; cos half, then sin half.
        inv_freq: ``[rotary_dim / 2]``, float32 or float64. Without it a position outside the table
            takes the nearest row.
        rotary_dim: Only checked against the table, whose width decides.
        rotary_offset: First rotated channel.
        style: ``"half"`` pairs channel i with i + rotary_dim/2 (GPT-NeoX), ``"interleaved"`` 2i
            with 2i + 1 (GPT-J), ``"half_blocks"`` is half style inside each axis' own channels,
            ``"interleaved_to_half"`` reads interleaved pairs and writes them as halves.
        attention_scaling: Multiplied into cos and sin of positions outside the table; the table has
            it already.
        inverse: Apply the transpose: sin negated, magnitude m kept; after the rotation it gives
            ``m ** 2`` times the input.
        axes: A lane-to-axis map, or one axis for each lane, for multi-axis positions.

    Returns:
        Fresh contiguous tensors, shapes and dtypes of the inputs, and None for an absent k. float32
        arithmetic (float64 for float64), rounded once.

    Raises:
        ValueError: shape, device or range. TypeError: dtype or type.
    """
    lane_axes = _lane_axes(cos_sin_cache, rotary_dim, axes, style)
    return rotate(
        q, k, positions, cos_sin_cache, inv_freq, lane_axes, style, rotary_offset,
        attention_scaling, inverse,
    )  # fmt: skip


def apply_rope_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inv_freq: Tensor | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    style: Style = "half",
    attention_scaling: float = 1,  # an int: dynamic=True makes a symbol of a default of 1.0
    inverse: bool = False,
    axes: Axes | Sequence[int] | None = None,
) -> None:
    """:func:`apply_rope` in place: writes q and k, returns nothing.

    Slices of a packed qkv tensor are written through their strides; nothing else changes. Under
    ``torch.compile`` prefer the functional form: functionalising a mutation can cost a copy.

    Raises:
        RuntimeError: q or k requires grad while grad mode is on.
        ValueError: q or k overlaps itself (stride-0 heads) or the other one; style
            ``"interleaved_to_half"``; else as :func:`apply_rope`. TypeError: as there.
    """
    lane_axes = _lane_axes(cos_sin_cache, rotary_dim, axes, style)
    rotate_(
        q, k, positions, cos_sin_cache, inv_freq, lane_axes, style, rotary_offset,
        attention_scaling, inverse,
    )  # fmt: skip
