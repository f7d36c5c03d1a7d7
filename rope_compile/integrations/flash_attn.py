"""Signatures of ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``.

Layouts ``[batch, seq, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with ``cu_seqlens``; cos
and sin ``[rows, rotary_dim / 2]`` apart. "In place" writes the caller's tensor through its strides,
also while gradients are recorded.

What differs from flash-attn, and why:

* gradients are right to every order, and a backward pass never writes the incoming gradient;
* a position past the rows of cos and sin takes the last row, where flash-attn leaves the token
  unrotated without a word; `RotaryEmbedding`, which knows its frequencies, is right everywhere;
* x may have another dtype than cos and sin, and any head_dim; arithmetic is float32;
* ``max_seqlen`` is not needed, and tokens past ``cu_seqlens[-1]`` count on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rope_compile.axes import Style, positions_from_cu_seqlens
from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.functional import apply_rope, apply_rope_
from rope_compile.integrations._rows import check_positions, rows_at, style_of
from rope_compile.integrations._tables import from_halves, of_tokens

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]

# Rows that `RotaryEmbedding` starts with; it is right, if slower, beyond them.
_FIRST_ROWS = 2048

Cuts = tuple[tuple[int, int], ...]
"""Heads to rotate: (first, how many) in the head dimension, or (index, 1) of the 3 or 2 of q, k, v
in a tensor of five dimensions. One or two of them."""


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``flash_attn.ops.triton.rotary.apply_rotary``, differentiable: offsets before the flags.

    Args:
        x: ``[batch, seq, heads, head_dim]``; with ``cu_seqlens`` ``[tokens, heads, head_dim]``.
        cos: ``[rows, rotary_dim / 2]``, ``rotary_dim <= head_dim``.
        sin: as cos.
        seqlen_offsets: position of the first token, for all sequences or int ``[batch]``.
        cu_seqlens: int ``[batch + 1]``, boundaries of packed sequences; empty ones are fine.
        max_seqlen: only compared with the rows.
        inplace: write x and return it.
        conjugate: rotate back.

    Raises:
        ValueError: shapes that do not fit, or fewer rows than tokens in a sequence. TypeError: a
        dtype.
    """
    style = style_of(interleaved)
    rotation = _rotation(x, cos, sin, style, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace:
        return _rotate_parts_(x, ((0, x.shape[-2]),), rotation._replace(inverse=conjugate))
    positions, table = rotation[:2]
    return apply_rope(x, None, positions, table, style=style, inverse=conjugate)[0]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``flash_attn.layers.rotary.apply_rotary_emb``: the flags before the offsets.

    Arguments as of `apply_rotary`. In place, x is written and returned.
    """
    return apply_rotary(
        x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
    )  # fmt: skip


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a packed projection in place, v untouched; returns ``qkv``.

    Args:
        qkv: ``[batch, seq, 3, heads, head_dim]``, or ``[batch, seq, num_heads_q + 2 * num_heads_k,
            head_dim]`` with ``num_heads_q``.
        cos: ``[rows, rotary_dim / 2]``.
        sin: as cos.
        cos_k: another table for k, together with ``sin_k``.
        sin_k: as cos_k.

    Raises:
        ValueError: shapes that do not fit.
    """
    cuts = _qkv_cuts(qkv, num_heads_q)
    if (cos_k is None) != (sin_k is None):
        raise ValueError("cos_k and sin_k must be given together, got one of them")
    style = style_of(interleaved)
    if cos_k is None or sin_k is None:
        return _rotate_parts_(qkv, cuts, _rotation(qkv, cos, sin, style, seqlen_offsets))
    q_cut, k_cut = cuts
    qkv = _rotate_parts_(qkv, (q_cut,), _rotation(qkv, cos, sin, style, seqlen_offsets))
    return _rotate_parts_(qkv, (k_cut,), _rotation(qkv, cos_k, sin_k, style, seqlen_offsets))


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k of ``kv [batch, seq, 2, heads, head_dim]`` in place, v untouched; returns ``kv``."""
    cuts = _kv_cuts(kv)
    rotation = _rotation(kv, cos, sin, style_of(interleaved), seqlen_offsets)
    return _rotate_parts_(kv, cuts, rotation)


class RotaryEmbedding(nn.Module):
    """``flash_attn.layers.rotary.RotaryEmbedding``: rotates packed projections in place.

    The table is the shared one of `rope_compile.get_rope` (``.rope``). ``forward`` never grows it:
    positions beyond its rows are computed, so every length and offset is right without a look at
    the host. ``self.rope.reserve(rows)`` makes long ones as fast as short ones.

    Args:
        dim: rotated channels, at most the head_dim of what comes in.
        base: theta.
        interleaved: pairs ``(2i, 2i + 1)`` instead of ``(i, i + dim / 2)``.
        scale_base: None; xPos is not offered.
        device: of the table; None means the default device.

    Raises:
        NotImplementedError: ``scale_base`` is given.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError(
                f"scale_base must be None, got {scale_base}: xPos is not offered yet"
            )
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.rope = get_rope(
            RopeConfig(
                head_dim=dim, max_position=_FIRST_ROWS, base=base, style=style_of(interleaved)
            ),
            device,
        )

    @property
    def inv_freq(self) -> Tensor:
        """float32 ``[dim / 2]``."""
        return self.rope.inv_freq

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place: q and k of ``qkv``, or with ``kv`` all of q (the first argument) and k.

        Args:
            qkv: as of `apply_rotary_emb_qkv_`; with ``kv`` it is q ``[batch, seq, heads,
                head_dim]``.
            kv: ``[batch, seq, 2, heads, head_dim]``, of its own length.
            seqlen_offset: position of the first token, int or int ``[batch]``.
            max_seqlen: not needed, see the class.

        Returns:
            ``qkv``, or ``(q, kv)``.
        """
        if kv is None:
            return self._rotate_(qkv, _qkv_cuts(qkv, num_heads_q), seqlen_offset)
        q = self._rotate_(qkv, ((0, qkv.shape[-2]),), seqlen_offset)
        return q, self._rotate_(kv, _kv_cuts(kv), seqlen_offset)

    def _rotate_(self, x: Tensor, cuts: Cuts, seqlen_offset: int | Tensor) -> Tensor:
        table, inv_freq = self.rope._rows_for(x)
        positions = _positions(x, seqlen_offset, None)
        style = style_of(self.interleaved)
        return _rotate_parts_(x, cuts, _Rotation(positions, table, inv_freq, style))


# ------------------------------------------------------------------------- positions and rows


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``[seq]`` or ``[batch, seq]``; ``[tokens]`` of packed sequences."""
    offsets = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    if offsets is not None:
        check_positions("seqlen_offsets", offsets)
    if cu_seqlens is not None:
        packed = positions_from_cu_seqlens(cu_seqlens, x.shape[-3], starts=offsets)
        return packed if offsets is not None else packed + seqlen_offsets
    positions = torch.arange(x.shape[1], device=x.device)
    if offsets is None:
        return positions + seqlen_offsets
    if offsets.dim() != 1:
        raise ValueError(
            f"seqlen_offsets must be an int or [batch] = ({x.shape[0]},), got "
            f"{tuple(offsets.shape)}"
        )
    return positions + offsets[:, None]


class _Rotation(NamedTuple):
    """What a call rotates by; also the tail of the arguments of `_InPlace`."""

    positions: Tensor
    table: Tensor
    inv_freq: Tensor | None
    style: Style
    inverse: bool = False


def _rotation(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: Style,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> _Rotation:
    """The rows that a call needs, as a table of ours, and the positions to read it by.

    Never the whole of cos and sin: a decode step must not copy a long table.
    """
    _check_ranks(x, cos, cu_seqlens)
    start = seqlen_offsets if isinstance(seqlen_offsets, int) else 0
    length = (max_seqlen or 0) if cu_seqlens is not None else x.shape[1]
    if start + length > cos.shape[0]:
        raise ValueError(
            f"cos must have a row for each of {start} + {length} positions, got "
            f"{tuple(cos.shape)}; build it longer"
        )
    if cu_seqlens is None and isinstance(seqlen_offsets, int) and start >= 0:
        cos, sin = (part[start : start + length] for part in (cos, sin))
    else:
        positions = _positions(x, seqlen_offsets, cu_seqlens)
        cos, sin = (rows_at(part, positions) for part in (cos, sin))
    table, tokens = of_tokens(from_halves(cos, sin))
    return _Rotation(tokens, table, None, style)


def _check_ranks(x: Tensor, cos: Tensor, cu_seqlens: Tensor | None) -> None:
    if cos.dim() != 2:
        raise ValueError(f"cos must be [rows, rotary_dim / 2], got {tuple(cos.shape)}")
    if cu_seqlens is None and x.dim() < 4:
        raise ValueError(
            f"x must be [batch, seq, heads, head_dim] without cu_seqlens, got {tuple(x.shape)}"
        )
    if cu_seqlens is not None and not (x.dim() == 3 or (x.dim() == 4 and x.shape[0] == 1)):
        raise ValueError(
            "x must be [tokens, heads, head_dim], or that with a leading batch of 1, with "
            f"cu_seqlens, got {tuple(x.shape)}"
        )


# --------------------------------------------------------------------------------- in place


def _qkv_cuts(qkv: Tensor, num_heads_q: int | None) -> Cuts:
    """Where q and k are in a packed projection."""
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(
                f"qkv must be [batch, seq, 3, heads, head_dim], got {tuple(qkv.shape)}"
            )
        return (0, 1), (1, 1)
    if qkv.dim() != 4 or num_heads_q is None:
        raise ValueError(
            "qkv must be [batch, seq, 3, heads, head_dim], or [batch, seq, num_heads_q + 2 * "
            f"num_heads_k, head_dim] with num_heads_q, got {tuple(qkv.shape)} and num_heads_q "
            f"{num_heads_q}"
        )
    rest = qkv.shape[2] - num_heads_q
    if num_heads_q < 0 or rest < 0 or rest % 2:
        raise ValueError(
            f"num_heads_q must leave an even number of the {qkv.shape[2]} heads of qkv for k and "
            f"v, got {num_heads_q}"
        )
    return (0, num_heads_q), (num_heads_q, rest // 2)


def _kv_cuts(kv: Tensor) -> Cuts:
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must be [batch, seq, 2, heads, head_dim], got {tuple(kv.shape)}")
    return ((0, 1),)


def _write_parts(x: Tensor, cuts: Cuts, rotation: _Rotation) -> None:
    """Rotate the named heads of x where they are, in one launch."""
    if x.dim() == 5:
        parts = [x.select(2, index) for index, _ in cuts]
    else:
        parts = [x.narrow(-2, first, count) for first, count in cuts]
    apply_rope_(
        parts[0],
        parts[1] if len(parts) > 1 else None,
        rotation.positions,
        rotation.table,
        inv_freq=rotation.inv_freq,
        style=rotation.style,
        inverse=rotation.inverse,
    )


def _rotate_parts_(x: Tensor, cuts: Cuts, rotation: _Rotation) -> Tensor:
    """`_write_parts` that autograd knows about; returns x."""
    if x.requires_grad and torch.is_grad_enabled():
        apply: Callable[..., Tensor] = _InPlace.apply  # typed in torch 2.14, not before
        return apply(x, cuts, *rotation)
    _write_parts(x, cuts, rotation)
    return x


class _Context(Protocol):
    """What `_InPlace` uses of autograd's context."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None]
    rest: tuple[Cuts, Style, bool]

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _InPlace(torch.autograd.Function):
    """The rotation in place; its transpose is itself with ``inverse`` flipped, on a copy."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        cuts: Cuts,
        positions: Tensor,
        table: Tensor,
        inv_freq: Tensor | None,
        style: Style,
        inverse: bool,
    ) -> Tensor:
        # A leaf that requires grad cannot be marked: callers of flash-attn may pass one all the
        # same, and use what is returned.
        if not (x.is_leaf and x.requires_grad):
            ctx.mark_dirty(x)
        ctx.save_for_backward(positions, table, inv_freq)
        ctx.rest = cuts, style, inverse
        _write_parts(x, cuts, _Rotation(positions, table, inv_freq, style, inverse))
        return x

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        cuts, style, inverse = ctx.rest
        # A copy: the gradient that comes in may have other readers.
        copy = grad.clone(memory_format=torch.contiguous_format)
        rotation = _Rotation(*ctx.saved_tensors, style, not inverse)
        return (_rotate_parts_(copy, cuts, rotation), *(None,) * 6)
