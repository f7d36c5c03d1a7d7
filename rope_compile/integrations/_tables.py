"""Table forms of other packages, brought into ours.

Ours is float32 ``[rows, rotary_dim]``, cos half then sin half, and rows are read by position.
Others hand over cos and sin apart, at full width, as angles or as complex numbers, and often
already gathered: one row for each token. Gathered rows are a table whose row ``n`` belongs to token
``n``.

Nothing here reads a value on the host, so all of it compiles and captures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_compile.axes import Style
from rope_compile.selector import of_tokens

__all__ = ["from_angles", "from_complex", "from_full_width", "from_halves", "of_tokens"]


def _check_pair(cos: Tensor, sin: Tensor) -> None:
    for name, x in (("cos", cos), ("sin", sin)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {got}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} must not require grad, got one that does: only q and k are "
                "differentiable; detach it, or keep the plain formula for learned angles"
            )
    if cos.shape != sin.shape or cos.device != sin.device:
        raise ValueError(
            "cos and sin must agree in shape and device, got "
            f"{tuple(cos.shape)} on {cos.device} and {tuple(sin.shape)} on {sin.device}"
        )


def from_halves(cos: Tensor, sin: Tensor) -> Tensor:
    """``[..., rotary_dim / 2]`` each, to rows ``[..., rotary_dim]``.

    Raises:
        TypeError, ValueError: not two floating-point tensors of one shape and device, or one that
            requires grad.
    """
    _check_pair(cos, sin)
    return torch.cat((cos, sin), dim=-1).to(torch.float32)


def from_full_width(cos: Tensor, sin: Tensor, style: Style) -> Tensor:
    """``[..., rotary_dim]`` each, where both channels of a pair hold the same value, to rows.

    That they do is the caller's to know; the values are not compared. ``style`` says which channels
    are a pair: ``"half"`` i and i + rotary_dim/2, ``"interleaved"`` 2i and 2i + 1.
    """
    _check_pair(cos, sin)
    if cos.shape[-1] % 2:
        raise ValueError(f"cos must have an even width, got {tuple(cos.shape)}")
    if style == "interleaved":
        return from_halves(cos[..., ::2], sin[..., ::2])
    half = cos.shape[-1] // 2
    return from_halves(cos[..., :half], sin[..., :half])


def from_angles(angles: Tensor) -> Tensor:
    """Angles ``[..., rotary_dim / 2]`` in radians, to rows ``[..., rotary_dim]``."""
    angles = angles.to(torch.promote_types(angles.dtype, torch.float32))
    return from_halves(angles.cos(), angles.sin())


def from_complex(freqs_cis: Tensor) -> Tensor:
    """Complex ``cos + i sin``, ``[..., rotary_dim / 2]``, to rows ``[..., rotary_dim]``."""
    if not freqs_cis.is_complex():
        raise TypeError(f"freqs_cis must be complex, got {freqs_cis.dtype}")
    return from_halves(freqs_cis.real, freqs_cis.imag)
