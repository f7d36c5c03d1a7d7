"""Signatures of torchtune's rotary modules.

The tables are the shared ones of `rope_compile.get_rope` (``.rope``), right for every position, so
nothing has to be built again for a longer sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rope_compile.config import RopeConfig
from rope_compile.factory import get_rope
from rope_compile.scaling import DefaultScaling, Llama3Scaling, Scaling

__all__ = ["Llama3ScaledRoPE", "RotaryPositionalEmbeddings"]


class RotaryPositionalEmbeddings(nn.Module):
    """``torchtune.modules.RotaryPositionalEmbeddings``: interleaved pairs.

    Args:
        dim: head_dim.
        max_seq_len: rows of the table.
        base: theta.
        scaling: an addition to torchtune's arguments: any class of `rope_compile.scaling`.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 4096,
        base: float = 10_000,
        *,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.max_seq_len, self.base = dim, max_seq_len, base
        self._config = RopeConfig(
            head_dim=dim,
            max_position=max_seq_len,
            base=base,
            style="interleaved",
            scaling=DefaultScaling() if scaling is None else scaling,
        )
        self.rope_init()

    @property
    def cache(self) -> Tensor:
        """The table as torchtune has it, a copy: float32 ``[rows, dim / 2, 2]``, cos and sin of
        each pair."""
        return torch.stack(self.rope.cos_sin_cache.chunk(2, dim=-1), dim=-1)

    def rope_init(self) -> None:
        """Fetch the table for the present default device; recipes call it after meta
        construction."""
        self.rope = get_rope(self._config)

    def reset_parameters(self) -> None:
        """`rope_init`, under the name that FSDP calls."""
        self.rope_init()

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate ``x [batch, seq, heads, head_dim]``.

        Args:
            input_pos: int positions ``[batch, seq]`` or ``[seq]``, any value; None counts from 0.
        """
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        return self.rope(input_pos, x)[0]  # type: ignore[no-any-return]


class Llama3ScaledRoPE(RotaryPositionalEmbeddings):
    """``torchtune.models.llama3_1.Llama3ScaledRoPE``: Llama-3.1's frequencies.

    Args:
        dim: head_dim; ``max_seq_len`` and ``base`` as above.
        scale_factor: what long wavelengths are multiplied by.
        low_freq_factor: ``old_context_len / low_freq_factor`` is the shortest long wavelength.
        high_freq_factor: ``old_context_len / high_freq_factor`` is the longest short one.
        old_context_len: the pretraining length.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 4096,
        base: float = 10_000,
        scale_factor: float = 8,
        low_freq_factor: float = 1,
        high_freq_factor: float = 4,
        old_context_len: int = 8192,
    ) -> None:
        scaling = Llama3Scaling(
            factor=scale_factor,
            low_freq_factor=low_freq_factor,
            high_freq_factor=high_freq_factor,
            original_max_position=old_context_len,
        )
        super().__init__(dim, max_seq_len, base, scaling=scaling)
