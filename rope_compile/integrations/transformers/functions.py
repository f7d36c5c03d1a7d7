"""transformers' own functions, for model code that is written by hand: change the import.

::

    from rope_compile.integrations.transformers import apply_rotary_pos_emb

Arguments, layouts and dtypes of the results are those of transformers 5; numbers are ours, with one
operator call for q and k. cos and sin may differ between the two halves of a head (HunYuan-VL).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_compile.config import RopeConfig
from rope_compile.integrations import _tables
from rope_compile.integrations._rows import rotate_rows
from rope_compile.integrations.transformers.forms import Form, rotate

__all__ = [
    "apply_rotary",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleave",
    "apply_rotary_pos_emb_vision",
    "rope_init",
]

_PLAIN = Form("half", "full", heads="argument", keeps_dtype=False)
# Of an interleaved pair the function reads the first half of cos: [a, b, ..., a, b, ...].
_INTERLEAVED = Form("interleaved_to_half", "first_half", heads="argument", keeps_dtype=False)
_VISION = Form("half", "full", heads=-2)


def _pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, form: Form
) -> tuple[Tensor, Tensor]:
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"cos must have the width of q, {q.shape[-1]}, got {cos.shape[-1]}; rotate a slice of "
            "the channels"
        )
    head = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.dim() - 1
    rotated_q, rotated_k = rotate([q, k], cos, sin, head, form)
    return rotated_q, rotated_k


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``modeling_llama.apply_rotary_pos_emb``: channel i is paired with i + head_dim/2.

    Args:
        q: ``[batch, heads, seq, head_dim]`` with ``unsqueeze_dim=1``, ``[batch, seq, heads,
            head_dim]`` with 2.
        k: as q with its own head count.
        cos, sin: ``[1 or batch, seq, head_dim]``.
        unsqueeze_dim: where cos meets the heads of q.

    Returns:
        New tensors, of the dtype that q (or k) and cos promote to.

    Raises:
        ValueError: cos is narrower than q, or shapes that do not fit.
    """
    return _pair(q, k, cos, sin, unsqueeze_dim, _PLAIN)


def apply_rotary_pos_emb_interleave(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """``modeling_deepseek_v3.apply_rotary_pos_emb_interleave``: pairs 2i, 2i + 1 are read, and
    written as halves.

    Args:
        position_ids: not read, as there. Others as in :func:`apply_rotary_pos_emb`.
    """
    return _pair(q, k, cos, sin, unsqueeze_dim, _INTERLEAVED)


def apply_rotary_pos_emb_vision(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """``modeling_qwen2_vl.apply_rotary_pos_emb_vision``: computed in float32, in q's dtype.

    Args:
        q: ``[seq, heads, head_dim]``. k: as q.
        cos, sin: ``[seq, head_dim]``.
    """
    rotated_q, rotated_k = rotate([q, k], cos, sin, -2, _VISION)
    return rotated_q, rotated_k


def apply_rotary(
    x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool
) -> None:
    """``apply_rotary`` of the hub's rotary kernel: two halves given apart, results into two more.

    Args:
        x1, x2: low and high channels of the pairs, ``[..., seq, heads, rotary_dim / 2]``.
        cos, sin: ``[seq, 1, rotary_dim / 2]``, or ``[batch, seq, 1, rotary_dim / 2]``.
        out1, out2: written; may be x1 and x2.
        conj: rotate back.
    """
    rows = _tables.from_halves(cos, -sin if conj else sin)
    rotated, _ = rotate_rows(torch.cat((x1, x2), dim=-1), None, rows, "half", -2)
    half = x1.shape[-1]
    out1.copy_(rotated[..., :half])
    out2.copy_(rotated[..., half:])


def rope_init(
    config: object,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Tensor, float]:
    """What ``ROPE_INIT_FUNCTIONS[rope_type]`` gives: ``(inv_freq, attention_factor)``.

    One function for every type: the configuration names its own.

    Args:
        config: a transformers configuration.
        device: of the frequencies; None means the CPU.
        seq_len: the length for types that follow it (dynamic, longrope); others ignore it.
        layer_type: of configurations with a RoPE for each.

    Returns:
        float32 ``[rotary_dim / 2]``, and the magnitude of cos and sin.

    Raises:
        ValueError: as `RopeConfig.from_transformers`, or the layer type has no RoPE.
    """
    found = RopeConfig.from_transformers(config, layer_type=layer_type)
    if found is None:
        raise ValueError(f"layer_type must be one with RoPE, got {layer_type!r}")
    if found.scaling.by_length:
        found = found.with_length(seq_len or 1)  # without a length they begin with the short one
    return found.inv_freq().to(device or "cpu"), found.attention_scaling
