"""Signatures of ``flashinfer.rope``.

    from rope_compile.integrations import flashinfer    # flashinfer.apply_rope(q, k, indptr, ...)

Argument order, layouts and in-place behaviour are flashinfer's, numbers are ours. flashinfer itself
is not imported. float32 and float64 q and k are taken too, where flashinfer wants float16 or
bfloat16; tables must be float32, as there.

The functions that take ``rope_theta`` instead of a table read the shared one of
`rope_compile.get_rope` for their parameters, which is built at the first call with 8192 rows.
Positions beyond are right and slower; ``rope_compile.prepare_for_capture(None, plan)`` gives it,
and every other shared table, more rows. The first call of its parameters must not be captured.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rope_compile.axes import positions_from_cu_seqlens
from rope_compile.config import RopeConfig
from rope_compile.factory import constant_for_dynamo, get_rope, registry, slot_number
from rope_compile.integrations._rows import style_of
from rope_compile.integrations._serving import rotate_flat, rotate_flat_
from rope_compile.module import RotaryEmbedding
from rope_compile.scaling import DefaultScaling, LinearScaling, Llama3Scaling, Scaling

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]

ROWS = 8192


@functools.cache
def _config(
    rotary_dim: int, interleave: bool, rope_scale: float, rope_theta: float, *llama31: float
) -> RopeConfig:
    """``llama31`` is empty, or low_freq_factor, high_freq_factor, old_context_len."""
    scaling: Scaling = DefaultScaling() if rope_scale == 1 else LinearScaling(factor=rope_scale)
    if llama31:
        low, high, original = llama31
        scaling = Llama3Scaling(
            factor=rope_scale,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=int(original),
        )
    return RopeConfig(
        head_dim=rotary_dim,  # heads may be wider: what counts is what rotates
        max_position=ROWS,
        base=rope_theta,
        style=style_of(interleave),
        scaling=scaling,
    )


@constant_for_dynamo
def _slot(device: torch.device, *parameters: float) -> int:
    return slot_number(_config(*parameters), device)


def _constant(value: float) -> float:
    """The same number. Where Dynamo made a symbol of it, a member of a set becomes its value, with
    a guard: compiled code is for one table, whatever ``dynamic`` says."""
    (value,) = {value}
    return value


def _rope(
    q: Tensor,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    *llama31: float,
) -> RotaryEmbedding:
    """The shared rope of these parameters."""
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    parameters = (width, interleave, rope_scale, rope_theta, *llama31)
    if torch.compiler.is_compiling():
        return registry.slots[_slot(q.device, *map(_constant, parameters))]
    return get_rope(_config(*parameters), q.device)


def _ragged_positions(q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    return positions_from_cu_seqlens(indptr, q.shape[0], starts=offsets)


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor | None]:
    """Rotate ragged q and k: token t of sequence b is at ``offsets[b] + t - indptr[b]``.

    Positions are computed on the device; nothing is read on the host.

    Args:
        q: ``[tokens, heads, head_dim]``, any strides.
        k: as q with its own head count, or None.
        indptr: ``[sequences + 1]``, int32 or int64, from 0 to tokens.
        offsets: ``[sequences]``, the position of each first token.
        rotary_dim: first channels that rotate; None means all.
        interleave: pairs ``(2i, 2i + 1)``, otherwise ``(i, i + rotary_dim / 2)``.
        rope_scale: divides the frequencies.
        rope_theta: base.

    Returns:
        Fresh tensors, shapes and dtypes of the inputs.

    Raises:
        ValueError: shape, device or range. TypeError: dtype.
    """
    positions = _ragged_positions(q, indptr, offsets)
    return apply_rope_pos_ids(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor | None,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """:func:`apply_rope` in place."""
    positions = _ragged_positions(q, indptr, offsets)
    apply_rope_pos_ids_inplace(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor | None,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor | None]:
    """:func:`apply_rope` at positions ``pos_ids [tokens]``, int32 or int64, any value."""
    rope = _rope(q, rotary_dim, interleave, rope_scale, rope_theta)
    return rope(pos_ids, q, k)  # type: ignore[no-any-return]


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor | None,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """:func:`apply_rope_pos_ids` in place."""
    _rope(q, rotary_dim, interleave, rope_scale, rope_theta).apply_(pos_ids, q, k)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor | None,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor | None]:
    """:func:`apply_rope` with the frequencies of Llama 3.1; see `rope_compile.Llama3Scaling`.

    Args:
        rope_scale: its factor.
        old_context_len: its original length.
        others: as :func:`apply_rope`.
    """
    return apply_llama31_rope_pos_ids(
        q, k, _ragged_positions(q, indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor | None,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """:func:`apply_llama31_rope` in place."""
    apply_llama31_rope_pos_ids_inplace(
        q, k, _ragged_positions(q, indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor | None,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor | None]:
    """:func:`apply_llama31_rope` at positions ``pos_ids [tokens]``, int32 or int64, any value."""
    rope = _rope(
        q, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len,
    )  # fmt: skip
    return rope(pos_ids, q, k)  # type: ignore[no-any-return]


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor | None,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """:func:`apply_llama31_rope_pos_ids` in place."""
    rope = _rope(
        q, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
        old_context_len,
    )  # fmt: skip
    rope.apply_(pos_ids, q, k)


def _check_table(cos_sin_cache: Tensor) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise TypeError(
            f"cos_sin_cache must be float32, got {cos_sin_cache.dtype}; build it in float32"
        )


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate flat query and key by a table that the caller hands over.

    Args:
        positions: ``[tokens]``, int32 or int64. Outside the table the nearest row counts.
        query: ``[tokens, heads * head_size]``, any strides.
        key: as query with its own head count, or None.
        cos_sin_cache: float32 ``[rows, rotary_dim]``, cos half then sin half.
        is_neox: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.

    Returns:
        Fresh tensors, shapes and dtypes of the inputs.

    Raises:
        ValueError: shape, device or range. TypeError: dtype.
    """
    _check_table(cos_sin_cache)
    return rotate_flat(positions, query, key, head_size, cos_sin_cache, is_neox)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """:func:`apply_rope_with_cos_sin_cache` in place.

    Not in the argument order of SGLang's function of the same name.
    """
    _check_table(cos_sin_cache)
    rotate_flat_(positions, query, key, head_size, cos_sin_cache, is_neox)
