"""Signatures of SGLang's rotary embedding: its factory, its modules, its kernels.

    from rope_compile.integrations.sglang import get_rope    # instead of sglang.srt.layers...

Argument order, layouts and table form are SGLang's (``sglang.srt.layers.rotary_embedding``,
``sglang.kernels.ops.attention.rope`` and the diffusion copy in ``sglang.multimodal_gen``); numbers
are ours. SGLang itself is not imported.

Differences that a caller can see:

* ``forward`` returns fresh tensors on every device, where SGLang's CUDA path writes its inputs and
  returns them. Callers use what is returned. The functions named ``inplace`` do write.
* Unknown or missing keys of ``rope_scaling`` are errors, and so are sections that do not sum to
  ``rotary_dim / 2``.
* ``get_cos_sin_with_position`` returns what SGLang leaves in attributes of the module.
* A ``longrope`` module has one factor set, that of the served length ``max_position``; SGLang
  chooses by the positions of each batch.
* ``dtype`` is kept as an attribute and changes no number: tables are float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rope_compile.axes import ChunkedAxes, GlmAxes, InterleavedAxes, SectionAxes
from rope_compile.config import RopeConfig
from rope_compile.functional import apply_rope_
from rope_compile.integrations._rows import check_positions, style_of
from rope_compile.integrations._serving import (
    PeerRotaryEmbedding,
    plain_config,
    refuse_dual_chunk,
    rotate_flat_,
    sglang_config,
    shared,
)
from rope_compile.scaling import DefaultScaling, NtkAlphaScaling

__all__ = [
    "FusedSetKVBufferArg",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "apply_rope_inplace",
    "apply_rope_inplace_with_kvcache",
    "apply_rope_with_cos_sin_cache_inplace",
    "get_rope",
    "get_rope_cpu",
    "get_rope_wrapper",
    "get_rotary_pos_embed",
    "rotary_embedding",
]


@dataclass
class FusedSetKVBufferArg:
    """Where a rotated k and its v go; any object with these attributes serves as well.

    Attributes:
        value: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``.
        k_buffer, v_buffer: ``[slots, heads * head_size]`` or ``[slots, heads, head_size]``.
        cache_loc: ``[tokens]``, int32 or int64, the slot of each token; no slot twice.
    """

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    cache_loc: Tensor


def _store(buffer: Tensor, slots: Tensor, rows: Tensor) -> None:
    check_positions("out_loc", slots)
    rows = rows.reshape(rows.shape[0], *buffer.shape[1:]).to(buffer.dtype)
    buffer.index_copy_(0, slots.to(torch.int64), rows)


# ---- modules


class RotaryEmbedding(PeerRotaryEmbedding):
    """SGLang's ``RotaryEmbedding`` without scaling; `get_rope` makes the scaled ones.

    Args:
        head_size, rotary_dim: channels of a head, and how many of them rotate.
        max_position_embeddings: rows of the table. Positions beyond are right too.
        base: theta.
        is_neox_style: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.
        dtype: kept as an attribute.
        position_start: only 0. Tables that start elsewhere serve negative positions in SGLang; here
            every position is right, so pass them as they are.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
        position_start: int = 0,
    ) -> None:
        if position_start:
            raise ValueError(
                f"position_start must be 0, got {position_start}: negative positions are right "
                "without a shifted table, pass them as they are"
            )
        config = plain_config(head_size, rotary_dim, max_position_embeddings, base, is_neox_style)
        super().__init__(config, max_position_embeddings, dtype)

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: FusedSetKVBufferArg | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated query and key, fresh, in the shapes that came.

        Args:
            positions: ``[tokens]`` or ``[batch, seq]`` (``[3, tokens]`` with axes), int32 or int64,
                any value.
            query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``, any strides.
            key: as query with its own head count, or None.
            offsets: added to the positions, which are not changed.
            fused_set_kv_buffer_arg: stores the rotated key and its value too; needs a key.
        """
        q, k = self._rotate(positions, query, key, offsets)
        if fused_set_kv_buffer_arg is not None:
            if k is None:
                raise ValueError("key must be given with fused_set_kv_buffer_arg, got None")
            slots = fused_set_kv_buffer_arg.cache_loc
            _store(fused_set_kv_buffer_arg.k_buffer, slots, k)
            _store(fused_set_kv_buffer_arg.v_buffer, slots, fused_set_kv_buffer_arg.value)
        return q, k

    forward_native = forward_cuda = forward_cpu = forward_hip = forward_xpu = forward

    def _ensure_cos_sin_cache_length(self, needed_max_pos: int) -> None:
        """Rows for positions up to and including ``needed_max_pos``, before capture and compile.

        As ``rope.reserve``; it speeds positions up and is needed for none.
        """
        self.rope.reserve(needed_max_pos + 1)

    def get_cos_sin_with_position(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token at full width, ``[tokens, 1, 1, rotary_dim]``, float32.

        Args:
            positions: ``[tokens]``, or ``[axes, tokens]`` with axes; any value.

        SGLang leaves the two in attributes of the module; a module that others share returns them.
        """
        check_positions("positions", positions)
        # The rotation of (1, 0) in every pair is (cos, sin).
        unit = positions.new_zeros(positions.shape[-1], 1, self.head_size, dtype=torch.float32)
        self._pairs_of(unit)[0].fill_(1)
        rotated, _ = self.rope(positions, unit)
        cos, sin = (half.repeat(1, 1, 2)[:, None] for half in self._pairs_of(rotated))
        return cos, sin

    def _pairs_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second channel of every pair."""
        lanes = x.narrow(-1, self.rope.config.rotary_offset, self.rotary_dim)
        first, second = (
            lanes.chunk(2, dim=-1) if self.is_neox_style else (lanes[..., ::2], lanes[..., 1::2])
        )
        return first, second

    def cos_sin_cache_as(self, dtype: torch.dtype) -> Tensor:
        """The table in another dtype: a copy, except for float32. The shared one never changes."""
        return self.cos_sin_cache.to(dtype)


class MRotaryEmbedding(RotaryEmbedding):
    """SGLang's ``MRotaryEmbedding``: positions ``[3, tokens]`` (T, H, W), or ``[tokens]`` for text.

    Args:
        mrope_section: lanes of T, H and W, summing to ``rotary_dim / 2``; None for one axis.
        mrope_interleaved: lanes go T, H, W, T, H, W, ... instead of in blocks.
        mrope_interleaved_glm: GLM's round robin, which steps over used-up axes.
        others: as `RotaryEmbedding`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        mrope_interleaved_glm: bool = False,
    ) -> None:
        kind: type[SectionAxes] = InterleavedAxes if mrope_interleaved else ChunkedAxes
        kind = GlmAxes if mrope_interleaved_glm else kind
        axes = None if mrope_section is None else kind(tuple(mrope_section))
        config = plain_config(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, axes
        )
        PeerRotaryEmbedding.__init__(self, config, max_position_embeddings, dtype)

    @property
    def mrope_section(self) -> list[int] | None:
        """Lanes of each axis, as given."""
        axes = self.rope.config.axes
        return list(axes.sections) if isinstance(axes, SectionAxes) else None


# ---- factories


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
    """SGLang's ``get_rope``, and the one of its diffusion copy: shared and live.

    The same object for equal arguments while it lives (dictionary order, lists or tuples, ints or
    floats make no difference), over the table of `rope_compile.get_rope`; a dead table is replaced.
    On the default device.

    Args:
        head_size, rotary_dim: channels of a head; a ``partial_rotary_factor`` below 1 multiplies
            ``rotary_dim``.
        max_position: the model's ``max_position_embeddings``.
        base: theta; one inside ``rope_scaling`` must be equal.
        rope_scaling: the RoPE dictionary in SGLang's sense: ``dynamic`` is the base change at
            ``factor`` itself, ``linear`` tables have ``factor`` times the rows.
        dual_chunk_attention_config: not implemented yet.

    Raises:
        ValueError: unknown or missing keys, values out of range or that disagree. TypeError: a
        value of a wrong type. NotImplementedError: dual chunk attention, FoPE, lists of factors.
    """
    refuse_dual_chunk(dual_chunk_attention_config)
    return get_rope_wrapper(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype,
        partial_rotary_factor,
    )  # fmt: skip


def get_rope_wrapper(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    """:func:`get_rope` on a device; None means the default one."""
    config = sglang_config(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling,
        partial_rotary_factor,
    )  # fmt: skip
    kind = RotaryEmbedding if config.axes is None else MRotaryEmbedding
    return shared(kind, config, max_position, dtype, device)


def get_rope_cpu(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    """:func:`get_rope` on the CPU, for every type; SGLang's knows ``deepseek_yarn`` alone."""
    return get_rope_wrapper(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype,
        partial_rotary_factor, "cpu" if device is None else device,
    )  # fmt: skip


# ---- kernels


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """Rotate q and k in place, any strides.

    Args:
        q: ``[tokens, heads, head_dim]``; ``k`` as q with its own head count.
        cos_sin_cache: float32 ``[rows, rope_dim]``, cos half then sin half.
        positions: ``[tokens]``, int32 or int64. Outside the table the nearest row counts: only a
            module knows the frequencies.
        is_neox: pairs ``(i, i + rope_dim / 2)``, otherwise ``(2i, 2i + 1)``.
        rope_dim: the width of the table, which 0 stands for.

    Raises:
        ValueError, TypeError, RuntimeError: as `rope_compile.apply_rope_`.
    """
    apply_rope_(
        q, k, positions, cos_sin_cache, rotary_dim=rope_dim or None, style=style_of(not is_neox)
    )


def apply_rope_inplace_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """:func:`apply_rope_inplace`, then the rotated k and v into slots ``out_loc`` of the caches.

    Args:
        v: ``[tokens, heads, head_dim]`` or ``[tokens, heads * head_dim]``, stored as it is.
        k_cache, v_cache: ``[slots, heads * head_dim]`` or ``[slots, heads, head_dim]``.
        out_loc: ``[tokens]``, int32 or int64; no slot twice.
        others: as :func:`apply_rope_inplace`.
    """
    apply_rope_inplace(q, k, cos_sin_cache, positions, is_neox=is_neox, rope_dim=rope_dim)
    _store(k_cache, out_loc, k)
    _store(v_cache, out_loc, v)


def apply_rope_with_cos_sin_cache_inplace(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
    fused_args: FusedSetKVBufferArg | None = None,
) -> None:
    """:func:`apply_rope_inplace`, or with ``fused_args`` :func:`apply_rope_inplace_with_kvcache`.

    Not in flashinfer's argument order, whose function has the same name.
    """
    apply_rope_inplace(q, k, cos_sin_cache, positions, is_neox=is_neox, rope_dim=rope_dim)
    if fused_args is not None:
        _store(fused_args.k_buffer, fused_args.cache_loc, k)
        _store(fused_args.v_buffer, fused_args.cache_loc, fused_args.value)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place; returns the same two tensors.

    Args:
        positions: ``[tokens]`` or ``[batch, seq]``; outside the table the nearest row counts.
        query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``, any strides.
        key: as query with its own head count, or None.
        cos_sin_cache: ``[rows, rotary_dim]``, cos half then sin half; float32, float16, bfloat16.
    """
    rotate_flat_(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


# ---- diffusion


class _Shard(NamedTuple):
    rank: int
    ranks: int


def _sequence_shard() -> _Shard:
    """This process in the sequence-parallel group of SGLang's diffusion runtime, if that runs."""
    state = sys.modules.get("sglang.multimodal_gen.runtime.distributed.parallel_state")
    if state is None:
        return _Shard(0, 1)
    group = state.get_sp_group()
    return _Shard(group.rank_in_group, group.world_size)


def _per_axis(name: str, values: float | Sequence[float]) -> tuple[float, ...]:
    given = (values,) if isinstance(values, int | float) else tuple(values)
    if len(given) not in (1, 3):
        raise ValueError(f"{name} must be a number or have 1 or 3 entries, got {values!r}")
    return given if len(given) == 3 else given * 3


def get_rotary_pos_embed(
    rope_sizes: int | Sequence[int],
    hidden_size: int,
    heads_num: int,
    rope_dim_list: Sequence[int] | None,
    rope_theta: float,
    theta_rescale_factor: float | Sequence[float] = 1.0,
    interpolation_factor: float | Sequence[float] = 1.0,
    shard_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    start_frame: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of a ``t * h * w`` grid, float32 ``[tokens, head_dim / 2]``, w fastest.

    Each axis has its own block of lanes: ``f_i = b^(-2i / R_j)``, angle ``p * interpolation * f_i``
    with ``b = theta * rescale^(R_j / (R_j - 2))`` (the diffusion copy of SGLang; its N-D class
    computes that base and does not use it, which we do not follow).

    Args:
        rope_sizes: t, h, w, or one number for all three.
        hidden_size, heads_num: give the head size.
        rope_dim_list: widths ``R_j``, summing to the head size; None for thirds of it.
        theta_rescale_factor, interpolation_factor: one number, or one an axis.
        shard_dim: the axis that sequence parallelism splits, when SGLang's runtime runs in this
            process with more than one rank.
        dtype: of the angles; float64 is exact.
        start_frame: first position of t.
        device: None means the CPU.

    Raises:
        ValueError: sizes that do not fit together.
    """
    sizes = [rope_sizes] * 3 if isinstance(rope_sizes, int) else list(rope_sizes)
    head_dim = hidden_size // heads_num
    widths = [head_dim // 3] * 3 if rope_dim_list is None else list(rope_dim_list)
    if len(sizes) != 3 or len(widths) != 3 or sum(widths) != head_dim:
        raise ValueError(
            f"rope_sizes and rope_dim_list must have 3 entries, the widths summing to the head "
            f"size {head_dim}, got {sizes} and {widths}"
        )
    starts = [start_frame, 0, 0]
    rank, ranks = _sequence_shard()
    if sizes[shard_dim] % ranks:
        raise ValueError(
            f"rope_sizes[{shard_dim}] must be divisible by the {ranks} ranks, got {sizes}"
        )
    sizes[shard_dim] //= ranks
    starts[shard_dim] += rank * sizes[shard_dim]
    rescale = _per_axis("theta_rescale_factor", theta_rescale_factor)
    interpolation = _per_axis("interpolation_factor", interpolation_factor)
    blocks = []
    for axis, (width, size, start) in enumerate(zip(widths, sizes, starts, strict=True)):
        places = torch.arange(start, start + size, dtype=torch.float64, device="cpu")
        angles = _angles(places * interpolation[axis], width, rope_theta, rescale[axis], dtype)
        rows = torch.stack((angles.cos(), angles.sin())).to(device or "cpu", torch.float32)
        along = [2, *(size if other == axis else 1 for other in range(3)), -1]
        blocks.append(rows.view(along).expand(2, *sizes, -1))
    cos, sin = torch.cat(blocks, dim=-1).flatten(1, 3)
    return cos, sin


def _angles(places: Tensor, width: int, theta: float, rescale: float, dtype: torch.dtype) -> Tensor:
    """``[positions, width / 2]``, in float64, rounded once to ``dtype``."""
    scaling = DefaultScaling() if rescale == 1 else NtkAlphaScaling(alpha=rescale)
    config = RopeConfig(head_dim=width, max_position=1, base=theta, scaling=scaling)
    return (places[:, None] * config.inv_freq(dtype).double()).to(dtype).double()
