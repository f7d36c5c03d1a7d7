"""Signatures of vLLM's rotary embedding: its factories, its modules, its operator.

    from rope_compile.integrations.vllm import get_rope      # instead of vllm.model_executor...

Argument order, layouts and table form are vLLM's (``vllm.model_executor.layers.rotary_embedding``
and ``vllm._custom_ops``); numbers are ours. vLLM is imported by `register` alone.

Differences that a caller can see:

* ``forward`` and its variants return fresh tensors on every device, where vLLM's CUDA path writes
  its inputs and returns them. Callers use what is returned. `rotary_embedding` does write.
* Unknown or missing keys of ``rope_parameters`` are errors.
* Tables are float32 whatever ``dtype`` says; it is kept as an attribute.
* A ``longrope`` module selects its factor set by ``max_position``, the served length. A server with
  a smaller limit passes that, and the model's own number as ``max_position_embeddings`` inside
  ``rope_parameters``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rope_compile.axes import ChunkedAxes, InterleavedAxes, SectionAxes
from rope_compile.checks import count, dictionary
from rope_compile.config import RopeConfig
from rope_compile.integrations._rows import rotate_rows, style_of
from rope_compile.integrations._serving import (
    PeerRotaryEmbedding,
    narrowed,
    peer_config,
    plain_config,
    refuse_dual_chunk,
    rotate_flat,
    rotate_flat_,
    shared,
)
from rope_compile.integrations._tables import from_halves
from rope_compile.scaling import YarnScaling

__all__ = [
    "ApplyRotaryEmb",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "get_rope",
    "get_rope_v0",
    "register",
    "rotary_embedding",
]

# ---- modules


class RotaryEmbedding(PeerRotaryEmbedding):
    """vLLM's ``RotaryEmbedding`` without scaling; `get_rope` makes the scaled ones.

    Args:
        head_size, rotary_dim: channels of a head, and how many of them rotate.
        max_position_embeddings: rows of the table. Positions beyond are right too.
        base: theta.
        is_neox_style: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.
        dtype: kept as an attribute.
        init_cache: False starts with the smallest table; ``rope.reserve`` makes it larger.

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
        init_cache: bool = True,
    ) -> None:
        rows = max_position_embeddings if init_cache else 1
        config = plain_config(head_size, rotary_dim, rows, base, is_neox_style)
        super().__init__(config, max_position_embeddings, dtype)

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated query and key, fresh, in the shapes that came.

        Args:
            positions: ``[tokens]`` or ``[batch, seq]`` (``[3, tokens]`` with axes), int32 or int64,
                any value.
            query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``, any strides.
            key: as query with its own head count, or None.
            offsets: added to the positions, which are not changed; of older vLLMs.
        """
        return self._rotate(positions, query, key, offsets)

    forward_native = forward_cuda = forward_hip = forward_xpu = forward_cpu = forward

    @staticmethod
    def forward_static(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: Tensor,
        is_neox_style: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As forward, by a table that is handed over; outside it the nearest row counts.

        Args:
            rotary_dim: the width of the table.
            cos_sin_cache: ``[rows, rotary_dim]``, cos half then sin half; float32, float16,
                bfloat16.
        """
        if rotary_dim != cos_sin_cache.shape[-1]:
            raise ValueError(
                f"rotary_dim must be the width of cos_sin_cache, {cos_sin_cache.shape[-1]}, got "
                f"{rotary_dim}"
            )
        return rotate_flat(positions, query, key, head_size, cos_sin_cache, is_neox_style)


class MRotaryEmbedding(RotaryEmbedding):
    """vLLM's ``MRotaryEmbedding``: positions ``[3, tokens]`` (T, H, W), or ``[tokens]`` for text.

    Args:
        mrope_section: lanes of T, H and W, summing to ``rotary_dim / 2``; None for one axis.
        mrope_interleaved: lanes go T, H, W, T, H, W, ... instead of in blocks.
        scaling_factor: YaRN's, with the keywords after it; ``max_position_embeddings`` is then the
            original length.
        mrope_positions_factor: so many times the rows, for the positions of long videos.
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
        *,
        scaling_factor: float | None = None,
        extrapolation_factor: float = 1.0,
        attn_factor: float = 1.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        mrope_positions_factor: int = 4,
    ) -> None:
        kind = InterleavedAxes if mrope_interleaved else ChunkedAxes
        scaling = None
        if scaling_factor is not None:
            scaling = YarnScaling(
                factor=scaling_factor,
                original_max_position=max_position_embeddings,
                extrapolation_factor=extrapolation_factor,
                attn_factor=attn_factor,
                beta_fast=beta_fast,
                beta_slow=beta_slow,
                truncate=truncate,
            )
        axes = None if mrope_section is None else kind(tuple(mrope_section))
        rows = count("max_position_embeddings", max_position_embeddings)
        rows *= count("mrope_positions_factor", mrope_positions_factor)
        config = plain_config(head_size, rotary_dim, rows, base, is_neox_style, axes, scaling)
        PeerRotaryEmbedding.__init__(self, config, max_position_embeddings, dtype)


class ApplyRotaryEmb(nn.Module):
    """vLLM's ``ApplyRotaryEmb``: rotation by cos and sin that are already gathered.

    Args:
        enforce_enable: kept as an attribute; there is one implementation, always on.
        is_neox_style: pairs ``(i, i + R/2)``, otherwise ``(2i, 2i + 1)``.
        enable_fp32_compute: kept as an attribute; arithmetic is always float32.
    """

    def __init__(
        self,
        enforce_enable: bool = False,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> None:
        super().__init__()
        self.enforce_enable = enforce_enable
        self.is_neox_style = is_neox_style
        self.enable_fp32_compute = enable_fp32_compute

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Fresh, in the dtype of x.

        Args:
            x: ``[seq, heads, head_size]`` or ``[batch, seq, heads, head_size]``, any strides.
            cos, sin: ``[seq, R/2]`` or ``[batch, seq, R/2]``; channels from R on stay as they are.
        """
        return self.forward_static(x, cos, sin, self.is_neox_style, self.enable_fp32_compute)

    forward_native = forward_cuda = forward_hip = forward_xpu = forward_cpu = forward

    @staticmethod
    def forward_static(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> Tensor:
        """As :meth:`forward`; float32 arithmetic with or without ``enable_fp32_compute``."""
        rows = from_halves(cos, sin).unsqueeze(-2)
        return rotate_rows(x, None, rows, style_of(not is_neox_style), -2)[0]

    def extra_repr(self) -> str:
        return f"is_neox_style={self.is_neox_style}, enable_fp32_compute={self.enable_fp32_compute}"


# ---- factories


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: Mapping[str, object] | None = None,
    mrope_positions_factor: int = 4,
) -> RotaryEmbedding:
    """vLLM's ``get_rope``: shared and live.

    The same object for equal arguments while it lives (dictionary order, lists or tuples, ints or
    floats make no difference), over the table of `rope_compile.get_rope`; a dead table is replaced.
    On the default device.

    Args:
        head_size: channels of a head; ``partial_rotary_factor`` inside ``rope_parameters``
            multiplies it, ``rope_dim`` there overrides it.
        max_position: the served length.
        rope_parameters: the RoPE dictionary in vLLM's sense, theta inside (10000 without):
            ``dynamic`` scales by ``max_trained_positions``, ``longrope`` is static.
        dual_chunk_attention_config: not implemented yet.
        mrope_positions_factor: with axes the table has so many times the rows.

    Raises:
        ValueError: unknown or missing keys, values out of range or that disagree. TypeError: a
        value of a wrong type, or the argument order of older vLLMs, which `get_rope_v0` has.
        NotImplementedError: dual chunk attention, FoPE, lists of factors.
    """
    if not isinstance(is_neox_style, bool):
        raise TypeError(
            f"is_neox_style must be True or False, got {is_neox_style!r}; for the arguments "
            "(head_size, rotary_dim, max_position, base, ...) of older vLLMs call get_rope_v0"
        )
    refuse_dual_chunk(dual_chunk_attention_config)
    rope = dictionary("rope_parameters", rope_parameters)
    config = peer_config(
        rope,
        head_size=head_size,
        rotary_dim=None,
        max_position=max_position,
        base=10000.0 if rope.get("rope_theta") is None else None,
        is_neox_style=is_neox_style,
        dialect="vllm",
        name="rope_parameters",
    )
    return _shared(config, max_position, dtype, mrope_positions_factor)


def get_rope_v0(
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
    """``get_rope`` of older vLLMs and their forks: theta and the width beside the dictionary.

    A ``partial_rotary_factor`` below 1 multiplies ``rotary_dim``; the types mean what they mean in
    :func:`get_rope`.
    """
    refuse_dual_chunk(dual_chunk_attention_config)
    config = peer_config(
        rope_scaling,
        head_size=head_size,
        rotary_dim=narrowed(rotary_dim, partial_rotary_factor),
        max_position=max_position,
        base=base,
        is_neox_style=is_neox_style,
        dialect="vllm",
    )
    return _shared(config, max_position, dtype, 4)


def _shared(
    config: RopeConfig, max_position: int, dtype: torch.dtype | None, mrope_positions_factor: int
) -> RotaryEmbedding:
    factor = count("mrope_positions_factor", mrope_positions_factor)
    if not isinstance(config.axes, SectionAxes):
        return shared(RotaryEmbedding, config, max_position, dtype)
    rows = max(config.max_position, count("max_position", max_position) * factor)
    config = dataclasses.replace(config, max_position=rows)
    return shared(MRotaryEmbedding, config, max_position, dtype)


# ---- operator


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """``vllm._custom_ops.rotary_embedding``: query and key in place, any strides.

    Args:
        positions: ``[tokens]`` or ``[batch, seq]``, int32 or int64. Outside the table the nearest
            row counts: only a module knows the frequencies.
        query: ``[*tokens, heads * head_size]`` or ``[*tokens, heads, head_size]``.
        key: as query with its own head count, or None.
        cos_sin_cache: ``[rows, rotary_dim]``, cos half then sin half; float32, float16, bfloat16.
        is_neox: pairs ``(i, i + rotary_dim / 2)``, otherwise ``(2i, 2i + 1)``.
        rope_dim_offset: first rotated channel of a head.
        inverse: rotate back (the transpose).

    Raises:
        ValueError, TypeError, RuntimeError: as `rope_compile.apply_rope_`.
    """
    rotate_flat_(
        positions, query, key, head_size, cos_sin_cache, is_neox, rotary_offset=rope_dim_offset,
        inverse=inverse,
    )  # fmt: skip


# ---- registration with vLLM


@functools.cache
def register() -> tuple[str, ...]:
    """Have vLLM build our modules wherever it builds ``RotaryEmbedding`` or ``MRotaryEmbedding``.

    Through vLLM's registry of out-of-tree operators; call it before the model is loaded, as from an
    entry point of the group ``vllm.general_plugins``. Registers once. Modules are subclasses of
    vLLM's own and keep its buffers, which other fused kernels read; they rotate with ours. Classes
    for other scaling types stay vLLM's.

    Returns:
        The names that were registered.

    Raises:
        ImportError: vLLM cannot be imported.
    """
    try:
        custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
        theirs = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    except ImportError as error:
        raise ImportError(
            f"vllm must be importable to register with it, got {error}; pip install vllm"
        ) from error
    names = ("RotaryEmbedding", "MRotaryEmbedding")
    for name, ours in zip(names, (RotaryEmbedding, MRotaryEmbedding), strict=True):
        custom_op.register_oot(name=name)(_out_of_tree(getattr(theirs, name), ours))
    return names


def _out_of_tree(theirs: type[nn.Module], ours: type[RotaryEmbedding]) -> type[nn.Module]:
    """A subclass of vLLM's class, which vLLM asks for, that rotates with one of ours."""

    def init(self: nn.Module, *args: object, **kwargs: object) -> None:
        theirs.__init__(self, *args, **kwargs)
        self.rope_compile = ours(*args, **kwargs)  # type: ignore[arg-type]

    def forward(
        self: nn.Module,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> object:
        return self.rope_compile(positions, query, key, offsets)  # type: ignore[operator]

    variants = ("native", "cuda", "hip", "xpu", "cpu", "oot")
    methods = {"__init__": init, **{f"forward_{name}": forward for name in variants}}
    return type(theirs.__name__, (theirs,), methods)
