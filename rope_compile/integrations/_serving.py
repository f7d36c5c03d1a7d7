"""What the adapters of the serving packages share.

Their calls put positions first, may hold all heads of a token in one dimension, and read a table
whose rows are cos then sin, as ours. Their factories take a RoPE dictionary and share what they
build.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rope_compile.axes import Axes
from rope_compile.checks import channels, count, dictionary, integer, positive, shown
from rope_compile.checks import flag as check_flag
from rope_compile.config import Dialect, RopeConfig
from rope_compile.factory import get_rope
from rope_compile.functional import apply_rope, apply_rope_, rotate
from rope_compile.integrations._rows import check_positions, rows_at, style_of
from rope_compile.integrations._tables import of_tokens
from rope_compile.module import RotaryEmbedding
from rope_compile.scaling import (
    DeepseekYarnScaling,
    DefaultScaling,
    DynamicScaling,
    LinearScaling,
    Scaling,
    YarnScaling,
)

__all__ = [
    "PeerRotaryEmbedding",
    "add_offsets",
    "narrowed",
    "peer_config",
    "plain_config",
    "refuse_dual_chunk",
    "rotate_flat",
    "rotate_flat_",
    "sglang_config",
    "shared",
    "split_heads",
]

# ---- calls


def split_heads(name: str, x: Tensor, lead: int, head_size: int) -> Tensor:
    """x as ``[*tokens, heads, head_size]``, whose token dimensions are ``lead``; always a view.

    Raises:
        ValueError: x is neither that nor ``[*tokens, heads * head_size]``.
    """
    width = x.shape[-1] if x.dim() else 0
    if x.dim() == lead + 2 and width == head_size:
        return x
    if x.dim() == lead + 1 and width % head_size == 0:
        return x.view(*x.shape[:-1], width // head_size, head_size)
    raise ValueError(
        f"{name} must be [*tokens, heads, {head_size}] or [*tokens, heads * {head_size}] with the "
        f"{lead} token dimensions of positions, got {tuple(x.shape)}"
    )


def add_offsets(positions: Tensor, offsets: Tensor | None) -> Tensor:
    """``positions + offsets`` in int64; positions stay as they are."""
    check_positions("positions", positions)
    if offsets is None:
        return positions
    check_positions("offsets", offsets)
    return positions.to(torch.int64) + offsets


def _in_our_terms(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The first four arguments of ``apply_rope``, from one of their calls."""
    check_positions("positions", positions)
    lead = positions.dim()
    q = split_heads("query", query, lead, head_size)
    k = None if key is None else split_heads("key", key, lead, head_size)
    if cos_sin_cache.dtype in (torch.float16, torch.bfloat16):
        # Only the rows that the tokens need, not a copy of the whole table at every call.
        cos_sin_cache, positions = of_tokens(rows_at(cos_sin_cache, positions).float())
    return q, k, positions, cos_sin_cache


def rotate_flat(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate by a table that the caller hands over; fresh tensors of the shapes that came.

    Args:
        positions: ``[tokens]`` or ``[batch, seq]``, int32 or int64. Outside the table the nearest
            row counts: a table says nothing about the rows that it does not have.
        query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``, any strides.
        key: as query with its own head count, or None.
        cos_sin_cache: ``[rows, rotary_dim]``, cos half then sin half; float32, float16, bfloat16.
        is_neox: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.
    """
    arguments = _in_our_terms(positions, query, key, head_size, cos_sin_cache)
    q, k = apply_rope(*arguments, style=style_of(not is_neox))
    return q.reshape(query.shape), None if k is None or key is None else k.reshape(key.shape)


def rotate_flat_(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    *,
    rotary_offset: int = 0,
    inverse: bool = False,
) -> None:
    """:func:`rotate_flat` in place, through whatever strides query and key have."""
    arguments = _in_our_terms(positions, query, key, head_size, cos_sin_cache)
    apply_rope_(
        *arguments, style=style_of(not is_neox), rotary_offset=rotary_offset, inverse=inverse
    )


# ---- modules


def peer_config(
    rope: Mapping[str, object] | None,
    *,
    head_size: int,
    rotary_dim: int | None,
    max_position: int,
    base: float | None,
    is_neox_style: bool,
    dialect: Dialect,
    partial_rotary_factor: float | None = None,
    name: str = "rope_scaling",
) -> RopeConfig:
    """`RopeConfig` of a peer's ``get_rope`` arguments; see `RopeConfig.from_dict` for what it
    raises."""
    rope, max_position = dictionary(name, rope), count("max_position", max_position)
    inside = rope.get("max_position_embeddings") is not None
    config = RopeConfig.from_dict(
        rope,
        head_dim=channels("head_size", head_size),
        rotary_dim=rotary_dim,
        max_position=max_position,
        model_max_position=None if inside else max_position,
        base=base,
        partial_rotary_factor=partial_rotary_factor,
        style=style_of(not check_flag("is_neox_style", is_neox_style)),
        dialect=dialect,
        name=name,
    )
    return dataclasses.replace(config, max_position=_rows(config))


def plain_config(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool,
    axes: Axes | None = None,
    scaling: Scaling | None = None,
) -> RopeConfig:
    """`RopeConfig` of the arguments of a peer's ``RotaryEmbedding`` class."""
    return RopeConfig(
        head_dim=channels("head_size", head_size),
        rotary_dim=rotary_dim,
        max_position=count("max_position_embeddings", max_position),
        base=base,
        style=style_of(not is_neox_style),
        axes=axes,
        scaling=DefaultScaling() if scaling is None else scaling,
    )


def sglang_config(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool,
    rope_scaling: Mapping[str, object] | None,
    partial_rotary_factor: float,
) -> RopeConfig:
    """The configuration behind SGLang's ``get_rope``, and AITER's, which has the same arguments."""
    width: int | None = rotary_dim
    share: float | None = partial_rotary_factor
    rope = dictionary("rope_scaling", rope_scaling)
    if rope.get("rope_type", rope.get("type")) == "proportional":
        # Here the narrowed width says how many lanes move; all of head_size is paired.
        moving = narrowed(rotary_dim, partial_rotary_factor)
        width, share = None, moving / channels("head_size", head_size)
    return peer_config(
        rope,
        head_size=head_size,
        rotary_dim=width,
        max_position=max_position,
        base=base,
        is_neox_style=is_neox_style,
        partial_rotary_factor=share,
        dialect="sglang",
    )


def narrowed(rotary_dim: int, partial_rotary_factor: float) -> int:
    """The width behind two arguments: a factor below 1 multiplies ``rotary_dim``."""
    share = positive("partial_rotary_factor", partial_rotary_factor)
    return int(integer("rotary_dim", rotary_dim) * min(share, 1.0))


def refuse_dual_chunk(dual_chunk_attention_config: object) -> None:
    """Raise NotImplementedError unless it is None."""
    if dual_chunk_attention_config is not None:
        raise NotImplementedError(
            "dual_chunk_attention_config must be None, got one: dual chunk attention, with its "
            "five query outputs, is not implemented yet"
        )


def _rows(config: RopeConfig) -> int:
    """As many rows as the peers' tables have: for these types more than ``max_position``."""
    scaling, rows = config.scaling, config.max_position
    if isinstance(scaling, LinearScaling) or (
        isinstance(scaling, DynamicScaling) and scaling.policy == "static_factor"
    ):
        return max(rows, math.ceil(rows * scaling.factor))
    if isinstance(scaling, YarnScaling | DeepseekYarnScaling):
        return max(rows, math.ceil(scaling.original_max_position * scaling.factor))
    return rows


class PeerRotaryEmbedding(nn.Module):
    """The attributes and the calling convention of the peers' modules, over a shared rope.

    Attributes:
        rope: the module of `rope_compile.get_rope`, which owns the table.
        head_size, rotary_dim, base, is_neox_style: of the configuration.
        max_position_embeddings, dtype: as given. No arithmetic depends on ``dtype``: tables are
            float32, and outputs have the dtype of the inputs.
    """

    rope: RotaryEmbedding

    def __init__(
        self,
        config: RopeConfig,
        max_position_embeddings: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self.dtype = _dtype(dtype)
        self.rope = get_rope(config, device)
        self.head_size = config.head_dim
        self.rotary_dim = config.rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = config.base
        self.is_neox_style = config.style == "half"
        self._has_axes = config.axes is not None

    @property
    def cos_sin_cache(self) -> Tensor:
        """float32 ``[rows, rotary_dim]``, the live shared table: never written to, nor cast."""
        return self.rope.cos_sin_cache

    def get_cos_sin(self, seqlen: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first ``seqlen`` positions, ``[seqlen, rotary_dim / 2]``, views of the
        table, which is grown if it has fewer rows."""
        self.rope.reserve(seqlen)
        cos, sin = self.cos_sin_cache[:seqlen].chunk(2, dim=-1)
        return cos, sin

    def _rotate(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        offsets: Tensor | None = None,
        rotary_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        positions = add_offsets(positions, offsets)
        lead = positions.dim() - (self._has_axes and positions.dim() > 1)
        q = split_heads("query", query, lead, self.head_size)
        k = None if key is None else split_heads("key", key, lead, self.head_size)
        q, k = self._rotate_heads(positions, q, k, rotary_offset)
        return q.reshape(query.shape), None if k is None or key is None else k.reshape(key.shape)

    def _rotate_heads(
        self, positions: Tensor, q: Tensor, k: Tensor | None, rotary_offset: int
    ) -> tuple[Tensor, Tensor | None]:
        """The rope's forward, from another first channel."""
        rope = self.rope
        if rotary_offset == 0:
            return rope(positions, q, k)  # type: ignore[no-any-return]
        cos_sin_cache, inv_freq = rope._rows_for(q)
        return rotate(
            q, k, positions, cos_sin_cache, inv_freq, rope._lane_axes, rope._style, rotary_offset,
            float(rope._attention_scaling), False,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base:g}, "
            f"is_neox_style={self.is_neox_style}"
        )


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {shown(dtype)}")
    return dtype


Peer = TypeVar("Peer", bound=PeerRotaryEmbedding)

# Weak: the registry behind get_rope keeps the tables, these keep nothing alive.
_PEERS: WeakValueDictionary[tuple[object, ...], PeerRotaryEmbedding] = WeakValueDictionary()
_LOCK = threading.Lock()


def shared(
    kind: type[Peer],
    config: RopeConfig,
    max_position_embeddings: int,
    dtype: torch.dtype | None,
    device: torch.device | str | int | None = None,
) -> Peer:
    """The ``kind`` of these arguments: one object while it lives, over the live shared rope."""
    dtype = _dtype(dtype)
    max_position_embeddings = count("max_position", max_position_embeddings)
    key = (kind, get_rope(config, device), max_position_embeddings, dtype)
    with _LOCK:
        module = _PEERS.get(key)
        if not isinstance(module, kind):
            module = kind.__new__(kind)
            PeerRotaryEmbedding.__init__(module, config, max_position_embeddings, dtype, device)
            _PEERS[key] = module
        return module
