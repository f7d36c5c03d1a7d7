"""CPU path: the reference, applied to blocks of tokens that stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rope_compile.kernels.reference import rope_into

# 64 tokens of 40 heads of 128 float32 channels are 1.3 MB with their temporaries: the size of one
# core's second-level cache on current x86 servers. Eager code over whole tensors leaves it and
# faults in fresh pages for every temporary.
TOKENS_PER_BLOCK = 64


def rope_into_by_blocks(
    pairs: Sequence[tuple[Tensor, Tensor]],
    positions: Tensor,
    cos_sin_cache: Tensor,
    inv_freq: Tensor | None,
    axes: Sequence[int],
    style: str,
    rotary_offset: int,
    attention_scaling: float,
    inverse: bool,
) -> None:
    """``rope_into`` for ``[batch, seq, heads, head_dim]``, positions ``[(A,) batch, seq]``."""
    batch, seq = pairs[0][1].shape[:2]
    seq_step = max(1, min(seq, TOKENS_PER_BLOCK))
    batch_step = max(1, TOKENS_PER_BLOCK // seq_step)
    for b in range(0, batch, batch_step):
        for s in range(0, seq, seq_step):
            block = (slice(b, b + batch_step), slice(s, s + seq_step))
            views = [(out, x, x[block]) for out, x in pairs]
            rope_into(
                # In place, out and x stay one object: the pass-through channels are not written.
                [(view if out is x else out[block], view) for out, x, view in views],
                positions[(..., *block)],
                cos_sin_cache,
                inv_freq,
                axes,
                style,
                rotary_offset,
                attention_scaling,
                inverse,
            )
