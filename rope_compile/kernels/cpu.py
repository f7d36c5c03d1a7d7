"""CPU path: the reference, applied to blocks of tokens that stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rope_compile.kernels.reference import rope_into

# Elements of q and k in one block: with their temporaries about 4 MB, a few second-level caches of
# current x86 servers, and still below the size (32 MB) above which glibc maps fresh pages for every
# temporary. Smaller blocks pay more for calls than they gain in cache.
ELEMENTS_PER_BLOCK = 2**18


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
    tokens = max(1, ELEMENTS_PER_BLOCK // sum(x.shape[2] * x.shape[3] for _, x in pairs))
    seq_step = min(seq, tokens)
    batch_step = max(1, tokens // seq_step)
    if batch <= batch_step and seq <= seq_step:
        rope_into(
            pairs, positions, cos_sin_cache, inv_freq, axes, style, rotary_offset,
            attention_scaling, inverse,
        )  # fmt: skip
        return
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
