"""Signatures of AITER's rotary embedding: ``aiter.rotary_embedding`` and ``aiter.ops.rope``.

    from rope_compile.integrations.aiter import get_rope, rope_fwd

Argument order, layouts and in-place behaviour are AITER's, numbers are ours. AITER itself is not
imported. Common to the ``rope_*`` functions:

* x and y are ``[seq, batch, heads, head_dim]``, or ``[tokens, heads, head_dim]`` where the name has
  ``thd``; any strides, y with its own head count.
* ``freqs`` are angles, ``cos`` and ``sin`` their cosines and sines, ``[rows, 1, 1, width]`` of any
  float dtype. The width is ``rotary_dim / 2`` with ``reuse_freqs_front_part``; without, it is
  ``rotary_dim``, and both channels of a pair must hold the same value, which is not checked.
* ``rotate_style`` 0 pairs ``(i, i + rotary_dim / 2)`` (GPT-NeoX), 1 ``(2i, 2i + 1)`` (GPT-J).
* ``nope_first`` rotates the last ``rotary_dim`` channels instead of the first.
* ``transpose_output`` returns ``[seq, batch, heads, head_dim]`` laid out batch first in memory.
* ``_bwd`` takes gradients of the outputs and returns those of the inputs. The ``_fwd`` functions
  are differentiable too, to any order.
* A position outside ``cos`` and ``sin`` takes the nearest row: only `get_rope`'s module knows the
  frequencies.

They raise ValueError for shapes, devices and ranges, TypeError for dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rope_compile.axes import Style, positions_from_cu_seqlens
from rope_compile.functional import apply_rope, apply_rope_
from rope_compile.integrations._rows import both, rows_at, style_of
from rope_compile.integrations._serving import (
    PeerRotaryEmbedding,
    add_offsets,
    plain_config,
    refuse_dual_chunk,
    sglang_config,
    shared,
)
from rope_compile.integrations._tables import from_angles, from_halves, of_tokens

__all__ = [
    "RotaryEmbedding",
    "get_rope",
    "rope_2c_bwd",
    "rope_2c_fwd",
    "rope_2c_fwd_inplace",
    "rope_bwd",
    "rope_cached_2c_bwd",
    "rope_cached_2c_fwd",
    "rope_cached_2c_fwd_inplace",
    "rope_cached_bwd",
    "rope_cached_fwd",
    "rope_cached_fwd_inplace",
    "rope_cached_positions_2c_fwd",
    "rope_cached_positions_2c_fwd_inplace",
    "rope_cached_positions_fwd",
    "rope_cached_positions_fwd_inplace",
    "rope_cached_positions_offsets_2c_fwd",
    "rope_cached_positions_offsets_2c_fwd_inplace",
    "rope_cached_positions_offsets_fwd",
    "rope_cached_positions_offsets_fwd_inplace",
    "rope_fwd",
    "rope_fwd_inplace",
    "rope_thd_bwd",
    "rope_thd_fwd",
    "rope_thd_fwd_inplace",
]

# ---- factory


class RotaryEmbedding(PeerRotaryEmbedding):
    """AITER's ``RotaryEmbedding`` without scaling; `get_rope` makes the scaled ones.

    Args:
        head_size, rotary_dim: channels of a head, and how many of them rotate.
        max_position_embeddings: rows of the table. Positions beyond are right too.
        base: theta.
        is_neox_style: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.
        dtype: kept as an attribute; the table is float32.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = plain_config(head_size, rotary_dim, max_position_embeddings, base, is_neox_style)
        super().__init__(config, max_position_embeddings, dtype)

    @property
    def cos_cache(self) -> Tensor:
        """float32 ``[rows, 1, 1, rotary_dim / 2]``, a view of the live shared table."""
        return self.cos_sin_cache[:, None, None, : self.rotary_dim // 2]

    @property
    def sin_cache(self) -> Tensor:
        """float32 ``[rows, 1, 1, rotary_dim / 2]``, a view of the live shared table."""
        return self.cos_sin_cache[:, None, None, self.rotary_dim // 2 :]

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        is_nope_first: bool = False,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Rotated query and key; the query alone, no tuple, where there is no key.

        Fresh tensors in the shapes that came. AITER writes its inputs and returns them; callers use
        what is returned.

        Args:
            positions: ``[tokens]`` or ``[batch, seq]`` (``[3, tokens]`` with axes), int32 or int64,
                any value.
            query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``, any strides.
            key: as query with its own head count, or None.
            offsets: added to the positions, which are not changed.
            is_nope_first: rotate the last ``rotary_dim`` channels.
        """
        first = self.head_size - self.rotary_dim if is_nope_first else 0
        q, k = self._rotate(positions, query, key, offsets, first)
        return q if k is None else (q, k)

    forward_native = forward_hip = forward_triton = forward


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    dual_chunk_attention_config: Mapping[str, object] | None = None,
) -> RotaryEmbedding:
    """AITER's ``get_rope``: arguments and dictionary as SGLang's, shared and live.

    See `rope_compile.integrations.sglang.get_rope`.
    """
    refuse_dual_chunk(dual_chunk_attention_config)
    config = sglang_config(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling,
        partial_rotary_factor,
    )  # fmt: skip
    return shared(RotaryEmbedding, config, max_position, dtype)


# ---- functions


class _Rows(NamedTuple):
    """A table in our form, and where in it each token looks."""

    table: Tensor
    positions: Tensor  # broadcasts to the token dimensions
    style: Style
    nope_first: bool


def _lanes(values: Tensor, style: Style, reuse_freqs_front_part: bool) -> Tensor:
    """``[rows, 1, 1, width]`` or ``[rows, width]`` to ``[rows, rotary_dim / 2]``."""
    values = values.reshape(values.shape[0], values.shape[-1])
    if reuse_freqs_front_part:
        return values
    return values[:, ::2] if style == "interleaved" else values[:, : values.shape[1] // 2]


def _style(rotate_style: int) -> Style:
    if rotate_style not in (0, 1):
        raise ValueError(f"rotate_style must be 0 (GPT-NeoX) or 1 (GPT-J), got {rotate_style!r}")
    return style_of(rotate_style == 1)


def _in_sequence(x: Tensor, table: Tensor) -> Tensor:
    """Positions ``[seq, 1]`` of ``x [seq, batch, heads, head_dim]``, for which there are rows."""
    tokens, rows = x.shape[0], table.shape[0]
    if type(tokens) is int and type(rows) is int and rows < tokens:
        raise ValueError(f"freqs must have a row for each of {tokens} tokens, got {rows} rows")
    return torch.arange(tokens, device=x.device).unsqueeze(1)


def _of_freqs(
    x: Tensor, freqs: Tensor, rotate_style: int, reuse_freqs_front_part: bool, nope_first: bool
) -> _Rows:
    style = _style(rotate_style)
    table = from_angles(_lanes(freqs, style, reuse_freqs_front_part))
    return _Rows(table, _in_sequence(x, table), style, nope_first)


def _of_cached(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> _Rows:
    style = _style(rotate_style)
    # Rows that no token reads are not worth a copy.
    halves = (_lanes(half, style, reuse_freqs_front_part)[: x.shape[0]] for half in (cos, sin))
    table = from_halves(*halves)
    return _Rows(table, _in_sequence(x, table), style, nope_first)


def _of_positions(
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    offsets: Tensor | None,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> _Rows:
    style = _style(rotate_style)
    at = add_offsets(positions, offsets)
    halves = (rows_at(_lanes(half, style, reuse_freqs_front_part), at) for half in (cos, sin))
    return _Rows(*of_tokens(from_halves(*halves)), style, nope_first)


def _of_packed(
    x: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> _Rows:
    style = _style(rotate_style)
    table = from_angles(_lanes(freqs, style, reuse_freqs_front_part))
    positions = positions_from_cu_seqlens(cu_seqlens, x.shape[0])
    return _Rows(table, positions, style, nope_first)


def _first(x: Tensor, y: Tensor | None, rows: _Rows) -> int:
    if not rows.nope_first:
        return 0
    if y is not None and y.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"input_x and input_y must have one head_dim with nope_first, got {x.shape[-1]} and "
            f"{y.shape[-1]}"
        )
    return x.shape[-1] - rows.table.shape[1]


def _rotate_pair(
    x: Tensor,
    y: Tensor | None,
    rows: _Rows,
    *,
    inverse: bool = False,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor | None]:
    positions, first = rows.positions, _first(x, y, rows)
    if transpose_output:
        x, y, positions = x.transpose(0, 1), _transposed(y), positions.transpose(0, 1)
    x, y = apply_rope(
        x, y, positions, rows.table, style=rows.style, rotary_offset=first, inverse=inverse
    )
    return (x.transpose(0, 1), _transposed(y)) if transpose_output else (x, y)


def _transposed(y: Tensor | None) -> Tensor | None:
    return None if y is None else y.transpose(0, 1)


def _rotate(
    x: Tensor, rows: _Rows, *, inverse: bool = False, transpose_output: bool = False
) -> Tensor:
    return _rotate_pair(x, None, rows, inverse=inverse, transpose_output=transpose_output)[0]


def _rotate_two(
    x: Tensor, y: Tensor, rows: _Rows, *, inverse: bool = False, transpose_output: bool = False
) -> tuple[Tensor, Tensor]:
    return both(_rotate_pair(x, y, rows, inverse=inverse, transpose_output=transpose_output))


def _rotate_(x: Tensor, y: Tensor | None, rows: _Rows) -> None:
    apply_rope_(
        x, y, rows.positions, rows.table, style=rows.style, rotary_offset=_first(x, y, rows)
    )


def rope_fwd(
    input: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """Rotate token s by the angles ``freqs[s]``."""
    rows = _of_freqs(input, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate(input, rows, transpose_output=transpose_output)


def rope_fwd_inplace(
    input: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_fwd` in place."""
    _rotate_(input, None, _of_freqs(input, freqs, rotate_style, reuse_freqs_front_part, nope_first))


def rope_bwd(
    output_grads: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """The gradient of :func:`rope_fwd`: the transpose of the rotation."""
    rows = _of_freqs(output_grads, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate(output_grads, rows, inverse=True, transpose_output=transpose_output)


def rope_2c_fwd(
    input_x: Tensor,
    input_y: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rope_fwd` of two tensors in one launch."""
    rows = _of_freqs(input_x, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate_two(input_x, input_y, rows, transpose_output=transpose_output)


def rope_2c_fwd_inplace(
    input_x: Tensor,
    input_y: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_2c_fwd` in place."""
    rows = _of_freqs(input_x, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    _rotate_(input_x, input_y, rows)


def rope_2c_bwd(
    output_grads_x: Tensor,
    output_grads_y: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`rope_2c_fwd`."""
    rows = _of_freqs(output_grads_x, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate_two(
        output_grads_x, output_grads_y, rows, inverse=True, transpose_output=transpose_output
    )


def rope_cached_fwd(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """Rotate token s by row s of ``cos`` and ``sin``."""
    rows = _of_cached(input, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate(input, rows, transpose_output=transpose_output)


def rope_cached_fwd_inplace(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_fwd` in place."""
    rows = _of_cached(input, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    _rotate_(input, None, rows)


def rope_cached_bwd(
    output_grads: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """The gradient of :func:`rope_cached_fwd`."""
    rows = _of_cached(output_grads, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate(output_grads, rows, inverse=True, transpose_output=transpose_output)


def rope_cached_2c_fwd(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rope_cached_fwd` of two tensors in one launch."""
    rows = _of_cached(input_x, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate_two(input_x, input_y, rows, transpose_output=transpose_output)


def rope_cached_2c_fwd_inplace(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_2c_fwd` in place."""
    rows = _of_cached(input_x, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    _rotate_(input_x, input_y, rows)


def rope_cached_2c_bwd(
    output_grads_x: Tensor,
    output_grads_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`rope_cached_2c_fwd`."""
    rows = _of_cached(output_grads_x, cos, sin, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate_two(
        output_grads_x, output_grads_y, rows, inverse=True, transpose_output=transpose_output
    )


def rope_cached_positions_fwd(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """Rotate each token by its row: ``positions [seq, batch]``, int32 or int64."""
    rows = _of_positions(
        cos, sin, positions, None, rotate_style, reuse_freqs_front_part, nope_first
    )
    return _rotate(input, rows, transpose_output=transpose_output)


def rope_cached_positions_fwd_inplace(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_positions_fwd` in place."""
    rows = _of_positions(
        cos, sin, positions, None, rotate_style, reuse_freqs_front_part, nope_first
    )
    _rotate_(input, None, rows)


def rope_cached_positions_2c_fwd(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rope_cached_positions_fwd` of two tensors in one launch."""
    rows = _of_positions(
        cos, sin, positions, None, rotate_style, reuse_freqs_front_part, nope_first
    )
    return _rotate_two(input_x, input_y, rows, transpose_output=transpose_output)


def rope_cached_positions_2c_fwd_inplace(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_positions_2c_fwd` in place."""
    rows = _of_positions(
        cos, sin, positions, None, rotate_style, reuse_freqs_front_part, nope_first
    )
    _rotate_(input_x, input_y, rows)


def rope_cached_positions_offsets_fwd(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    offsets: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> Tensor:
    """:func:`rope_cached_positions_fwd` at ``positions + offsets``, both ``[seq, batch]``."""
    rows = _of_positions(
        cos, sin, positions, offsets, rotate_style, reuse_freqs_front_part, nope_first
    )
    return _rotate(input, rows, transpose_output=transpose_output)


def rope_cached_positions_offsets_fwd_inplace(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    offsets: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_positions_offsets_fwd` in place."""
    rows = _of_positions(
        cos, sin, positions, offsets, rotate_style, reuse_freqs_front_part, nope_first
    )
    _rotate_(input, None, rows)


def rope_cached_positions_offsets_2c_fwd(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    offsets: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
    transpose_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rope_cached_positions_offsets_fwd` of two tensors in one launch."""
    rows = _of_positions(
        cos, sin, positions, offsets, rotate_style, reuse_freqs_front_part, nope_first
    )
    return _rotate_two(input_x, input_y, rows, transpose_output=transpose_output)


def rope_cached_positions_offsets_2c_fwd_inplace(
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    offsets: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_cached_positions_offsets_2c_fwd` in place."""
    rows = _of_positions(
        cos, sin, positions, offsets, rotate_style, reuse_freqs_front_part, nope_first
    )
    _rotate_(input_x, input_y, rows)


def rope_thd_fwd(
    input: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> Tensor:
    """Rotate packed sequences, ``cu_seqlens [sequences + 1]``; each counts its tokens from row 0.

    A sequence longer than ``freqs`` has rows takes the last row from there on.
    """
    rows = _of_packed(input, cu_seqlens, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    return _rotate(input, rows)


def rope_thd_fwd_inplace(
    input: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """:func:`rope_thd_fwd` in place."""
    rows = _of_packed(input, cu_seqlens, freqs, rotate_style, reuse_freqs_front_part, nope_first)
    _rotate_(input, None, rows)


def rope_thd_bwd(
    output_grads: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> Tensor:
    """The gradient of :func:`rope_thd_fwd`."""
    rows = _of_packed(
        output_grads, cu_seqlens, freqs, rotate_style, reuse_freqs_front_part, nope_first
    )
    return _rotate(output_grads, rows, inverse=True)
