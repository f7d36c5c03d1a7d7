"""Signatures of ``diffusers``: ``apply_rotary_emb`` in its forms, and the tables of FLUX, Wan and
Qwen-Image.

cos and sin come at full width and are read at half width: both channels of a pair hold the same
value, as every table of diffusers does. Angles of the tables here are float64 (float32 on devices
without it), as in diffusers for FLUX and Wan; there Qwen-Image rounds them to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rope_compile.axes import AxialAxes, qwen_image_positions
from rope_compile.config import RopeConfig
from rope_compile.integrations._rows import rotate_rows, style_of
from rope_compile.integrations._tables import from_complex, from_full_width

__all__ = [
    "FluxPosEmbed",
    "QwenEmbedRope",
    "WanRotaryPosEmbed",
    "apply_rotary_emb",
    "apply_rotary_emb_qwen",
    "apply_rotary_emb_wan",
    "get_1d_rotary_pos_embed",
]

RealOrComplex = Tensor | tuple[Tensor, Tensor]
Grid = tuple[int, int, int]


def apply_rotary_emb(
    x: Tensor,
    freqs_cis: RealOrComplex,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """``diffusers.models.embeddings.apply_rotary_emb``.

    Args:
        x: ``[batch, heads, seq, head_dim]``, or ``[batch, seq, heads, head_dim]`` for
            ``sequence_dim`` 1 and for the complex form.
        freqs_cis: ``(cos, sin)``, each ``[seq, rotary_dim]``; with ``use_real=False`` complex
            ``[1 or batch, seq, rotary_dim / 2]``, interleaved.
        use_real_unbind_dim: -1 for interleaved pairs (FLUX, CogVideoX, Hunyuan-DiT), -2 for pairs
            ``(i, i + rotary_dim / 2)`` (Stable Audio, OmniGen, CogView4, Cosmos).

    Returns:
        A fresh tensor of x's shape and dtype.

    Raises:
        ValueError: an option or a shape that does not fit. TypeError: the other form of freqs_cis.
    """
    if not use_real:
        return _apply_complex(x, freqs_cis)
    if isinstance(freqs_cis, Tensor):
        raise TypeError("freqs_cis must be (cos, sin) with use_real=True, got one tensor")
    if sequence_dim not in (1, 2) or use_real_unbind_dim not in (-1, -2):
        raise ValueError(
            "sequence_dim must be 1 or 2 and use_real_unbind_dim -1 or -2, got "
            f"{sequence_dim} and {use_real_unbind_dim}"
        )
    style = style_of(use_real_unbind_dim == -1)
    rows = from_full_width(*freqs_cis, style)
    heads = 3 - sequence_dim
    return rotate_rows(x, None, rows.unsqueeze(-2) if heads == 2 else rows, style, heads)[0]


def apply_rotary_emb_qwen(
    x: Tensor,
    freqs_cis: RealOrComplex,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
) -> Tensor:
    """``apply_rotary_emb_qwen`` of Qwen-Image.

    Args:
        x: with ``use_real=False``, which the model uses, ``[batch, seq, heads, head_dim]``; else
            ``[batch, heads, seq, head_dim]``.
        freqs_cis: complex ``[seq, head_dim / 2]``, else as of `apply_rotary_emb`.
    """
    return apply_rotary_emb(x, freqs_cis, use_real, use_real_unbind_dim)


def apply_rotary_emb_wan(hidden_states: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """The function inside Wan's attention processor.

    Args:
        hidden_states: ``[batch, seq, heads, head_dim]``.
        freqs_cos: ``[1, seq, 1, head_dim]``, as of `WanRotaryPosEmbed`.
        freqs_sin: as freqs_cos.
    """
    rows = from_full_width(freqs_cos, freqs_sin, "interleaved")
    return rotate_rows(hidden_states, None, rows, "interleaved", 2)[0]


def get_1d_rotary_pos_embed(
    dim: int,
    pos: Tensor | Sequence[float] | int,
    theta: float = 10000.0,
    use_real: bool = False,
    linear_factor: float = 1.0,
    ntk_factor: float = 1.0,
    repeat_interleave_real: bool = True,
    freqs_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """``diffusers.models.embeddings.get_1d_rotary_pos_embed``.

    Frequencies ``1 / (theta * ntk_factor) ** (2i / dim) / linear_factor``.

    Args:
        dim: rotary_dim, even.
        pos: positions ``[seq]``, a tensor, an array or a list; an int counts from 0.
        use_real: return float32 cos and sin at full width instead of complex numbers.
        repeat_interleave_real: each value twice in a row; else the halves side by side.
        freqs_dtype: float32 or float64, of the angles.

    Returns:
        Complex ``[seq, dim / 2]`` (complex128 for float64), or ``(cos, sin)``, each ``[seq, dim]``.

    Raises:
        ValueError: an odd dim.
    """
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    positions = torch.arange(pos) if isinstance(pos, int) else torch.as_tensor(pos)
    steps = torch.arange(0, dim, 2, dtype=freqs_dtype, device=positions.device)
    frequencies = 1.0 / (theta * ntk_factor) ** (steps / dim) / linear_factor
    angles = positions[:, None] * frequencies
    if not use_real:
        return torch.polar(torch.ones_like(angles), angles)
    if repeat_interleave_real:
        return _interleaved_pair(angles)
    return angles.cos().float().repeat(1, 2), angles.sin().float().repeat(1, 2)


class FluxPosEmbed(nn.Module):
    """``FluxPosEmbed``: rows of cos and sin for position ids of several axes.

    Args:
        theta: base.
        axes_dim: widths of the axes, ``(16, 56, 56)`` in FLUX.
    """

    def __init__(self, theta: float, axes_dim: Sequence[int]) -> None:
        super().__init__()
        self.theta, self.axes_dim = theta, tuple(axes_dim)
        self._angles = _AxialAngles(theta, self.axes_dim)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """float32 ``(cos, sin)``, each ``[seq, sum(axes_dim)]``, of ``ids [seq, axes]``."""
        angles = self._angles(ids.float().unbind(-1))
        return _interleaved_pair(angles)


class WanRotaryPosEmbed(nn.Module):
    """``WanRotaryPosEmbed``: rows of cos and sin for a grid of video patches.

    Args:
        attention_head_dim: head_dim; height and width get ``2 * (head_dim // 6)`` channels each,
            time the rest.
        patch_size: ``(frames, height, width)`` of a patch.
        max_seq_len: not needed, nothing is tabulated: any grid is right.
        theta: base.
    """

    def __init__(
        self,
        attention_head_dim: int,
        patch_size: Grid,
        max_seq_len: int,
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.attention_head_dim, self.patch_size = attention_head_dim, patch_size
        self.max_seq_len = max_seq_len
        side = 2 * (attention_head_dim // 6)
        self._angles = _AxialAngles(theta, (attention_head_dim - 2 * side, side, side))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """float32 ``(cos, sin)``, each ``[1, patches, 1, head_dim]``.

        Args:
            hidden_states: ``[batch, channels, frames, height, width]``; only its shape and device
                are read.
        """
        sizes = [
            size // patch
            for size, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True)
        ]
        ranges = [torch.arange(size, device=hidden_states.device) for size in sizes]
        grid = [axis.flatten() for axis in torch.meshgrid(*ranges, indexing="ij")]
        cos, sin = _interleaved_pair(self._angles(grid))
        return cos[None, :, None], sin[None, :, None]


class QwenEmbedRope(nn.Module):
    """``QwenEmbedRope``: complex rows for images and text.

    Args:
        theta: base.
        axes_dim: widths of frame, height and width, ``(16, 56, 56)`` in Qwen-Image.
        scale_rope: height and width are centred on 0.
    """

    def __init__(self, theta: float, axes_dim: Sequence[int], scale_rope: bool = False) -> None:
        super().__init__()
        self.theta, self.axes_dim, self.scale_rope = theta, tuple(axes_dim), scale_rope
        self._angles = _AxialAngles(theta, self.axes_dim)

    def forward(
        self,
        video_fhw: Grid | Sequence[Grid] | Sequence[Sequence[Grid]],
        device: torch.device | str | None = None,
        max_txt_seq_len: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """complex64 rows ``[image tokens, R / 2]`` and ``[text tokens, R / 2]``.

        Args:
            video_fhw: ``(frames, height, width)``, or a list whose first entry is that or a list of
                several images, the n-th of which starts at frame n. Further entries, one for each
                sample, must be equal to the first.
            device: of the result; None means the default device.
            max_txt_seq_len: text length, the longest of the batch.

        Raises:
            ValueError: samples that differ, or no text length.
        """
        if max_txt_seq_len is None:
            raise ValueError("max_txt_seq_len must be given, got None")
        images = _images(video_fhw)
        parts = [
            qwen_image_positions(
                *image, text_tokens=0, centred=self.scale_rope, first_frame=index, device=device
            )
            for index, image in enumerate(images)
        ]
        extents = [size for _, *sides in images for size in sides]
        start = max(size // 2 if self.scale_rope else size for size in extents)
        text = torch.arange(start, start + int(max_txt_seq_len), device=parts[0].device)
        both = (self._angles(torch.cat(parts, dim=1)), self._angles(text.expand(3, -1)))
        image_rows, text_rows = (
            torch.complex(angles.cos().float(), angles.sin().float()) for angles in both
        )
        return image_rows, text_rows


def _images(video_fhw: Grid | Sequence[Grid] | Sequence[Sequence[Grid]]) -> list[Grid]:
    """The images of one sample."""
    first = video_fhw
    if isinstance(video_fhw, list):
        first = video_fhw[0]
        if any(sample != first for sample in video_fhw):
            raise ValueError(f"video_fhw must be the same for all samples, got {video_fhw}")
    return list(first) if isinstance(first, list) else [first]  # type: ignore[list-item]


class _AxialAngles:
    """Angles of several axes side by side, each with denominators of its own."""

    def __init__(self, theta: float, axes_dim: tuple[int, ...]) -> None:
        # Here and not in a call: Dynamo cannot trace the validation of a config.
        width = sum(axes_dim)
        config = RopeConfig(
            head_dim=width, max_position=1, base=theta, style="interleaved",
            axes=AxialAxes(axes_dim),
        )  # fmt: skip
        self._axes_dim = axes_dim
        self._inv_freq = config.inv_freq(torch.float64)

    def __call__(self, positions: Sequence[Tensor] | Tensor) -> Tensor:
        """``[seq, width / 2]`` of one tensor ``[seq]`` for each axis."""
        if len(positions) != len(self._axes_dim):
            raise ValueError(
                f"positions must have {len(self._axes_dim)} axes, got {len(positions)}"
            )
        device = positions[0].device
        dtype = torch.float32 if device.type in ("mps", "npu") else torch.float64
        frequencies = self._inv_freq.to(dtype).to(device)
        parts = frequencies.split([width // 2 for width in self._axes_dim])
        angles = [
            axis[:, None].to(dtype) * part for axis, part in zip(positions, parts, strict=True)
        ]
        return torch.cat(angles, dim=-1)


def _interleaved_pair(angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos().float(), angles.sin().float()
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def _apply_complex(x: Tensor, freqs_cis: RealOrComplex) -> Tensor:
    if not isinstance(freqs_cis, Tensor):
        got = type(freqs_cis).__name__
        raise TypeError(f"freqs_cis must be a complex tensor with use_real=False, got {got}")
    return rotate_rows(x, None, from_complex(freqs_cis).unsqueeze(-2), "interleaved", 2)[0]
