"""The Triton kernel and its launcher: every direction, style and layout, in place and out of place.

One launch rotates q and k. A program owns a run of tokens of one sequence and a group of heads; its
lanes are the flattened (token, lane) pairs, so that widths which are no power of two waste at most
a
few lanes. It loads the table row of each token once and walks its heads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

HALF, INTERLEAVED, HALF_BLOCKS = 0, 1, 2
PAIRINGS = {"half": HALF, "interleaved": INTERLEAVED, "half_blocks": HALF_BLOCKS}

# Axis of each lane, as one compile-time integer: 4 bits a lane, 7 lanes a word, so that a word
# stays
# a positive int32. The kernel unpacks it with shifts; no lookup in memory, nothing to keep alive.
MAX_AXES = 16  # 4 bits


@triton.jit
def axis_of_lane(lane, AXES: tl.constexpr, LANES: tl.constexpr):
    """Unpack the axis of each lane from AXES, 4 bits a lane and 7 lanes a word."""
    axis = lane * 0
    for word in tl.static_range((LANES + 6) // 7):
        bits = lane * 0 + ((AXES >> (word * 28)) & 0xFFFFFFF)
        axis = tl.where(lane // 7 == word, (bits >> (lane % 7 * 4)) & 15, axis)
    return axis


@triton.jit
def float64(value: tl.constexpr):
    """A float64 constant: a bare literal may pass through float32 on its way into the program."""
    return tl.full([], value, tl.float64)


@triton.jit
def mod_two_pi(x, n):
    """``x - n * 2 pi`` for float64 x below 2^40 and n its nearest number of turns.

    2 pi in pieces of 15 bits: every product and difference but the last ones is exact, with or
    without fused multiply-adds (Cody and Waite's reduction).
    """
    x = x - n * float64(6.282958984375)
    x = x - n * float64(0.0002263188362121582)
    x = x - n * float64(3.968352757510729e-09)
    x = x - n * float64(2.1560878082915735e-14)
    return x - n * float64(3.3334971674083515e-19)


@triton.jit
def cos_sin_float64(angle):
    """cos and sin of any float64 angle below 2^63 in magnitude, within 1e-12.

    libdevice's float64 versions keep a table in local memory and need 168 registers here, which
    would halve the number of programs in flight also where the table serves every position.
    """
    turns = float64(0.15915494309189535)  # 1 / (2 pi)
    # angle = high * 2^40 + low exactly; 2^40 mod 2 pi comes in two pieces, the first of 29 bits.
    # Rounded to nearest, so that a small angle stays whole, negative ones too.
    high = tl.floor(angle * float64(9.094947017729282e-13) + float64(0.5))
    low = angle - high * float64(1099511627776.0)
    carried = high * float64(3.5593426898121834)
    r = mod_two_pi(low, tl.floor(low * turns + float64(0.5)))
    r += mod_two_pi(carried, tl.floor(carried * turns + float64(0.5)))
    r += high * float64(6.445614934443391e-09)
    # Nearest quarter turn, then the Taylor series on [-pi/4, pi/4].
    quarter = tl.floor(r * float64(0.6366197723675814) + float64(0.5))
    r = (r - quarter * float64(1.5707963267941523)) - quarter * float64(7.443547480486623e-13)
    z = r * r
    s = float64(1.605904383682161e-10)  # 1 / 13!
    s = s * z - float64(2.505210838544172e-08)
    s = s * z + float64(2.7557319223985893e-06)
    s = s * z - float64(0.0001984126984126984)
    s = s * z + float64(0.008333333333333333)
    s = s * z - float64(0.16666666666666666)
    s = r + r * z * s
    c = float64(2.08767569878681e-09)  # 1 / 12!
    c = c * z - float64(2.755731922398589e-07)
    c = c * z + float64(2.48015873015873e-05)
    c = c * z - float64(0.001388888888888889)
    c = c * z + float64(0.041666666666666664)
    c = c * z - float64(0.5)
    c = float64(1.0) + z * c
    quadrant = quarter.to(tl.int32) & 3
    swapped = (quadrant & 1) == 1
    cos = tl.where(swapped, s, c)
    sin = tl.where(swapped, c, s)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = tl.where(quadrant >= 2, -sin, sin)
    return cos, sin


@triton.jit
def cos_sin(
    token_offset, axis, lane, in_tile, any_outside,
    positions_ptr, cos_sin_cache_ptr, inv_freq_ptr,
    stride_positions_axis, stride_cache_row, rows, attention_scaling,
    MULTI_AXIS: tl.constexpr, LANES: tl.constexpr, HAS_INV_FREQ: tl.constexpr,
    EXACT_PHASE: tl.constexpr,
):  # fmt: skip
    """float32 cos and sin of each lane: read inside the table, computed outside it."""
    pointer = positions_ptr + token_offset
    if MULTI_AXIS:
        pointer += axis.to(tl.int64) * stride_positions_axis
    # A masked lane takes position 0; nothing it computes is stored.
    position = tl.load(pointer, mask=in_tile, other=0).to(tl.int64)
    outside = (position < 0) | (position >= rows)
    if HAS_INV_FREQ:
        readable = in_tile & (outside == 0)
    else:
        # Nothing to compute from: the nearest row. No position is ever read out of bounds.
        position = tl.minimum(tl.maximum(position, 0), rows.to(tl.int64) - 1)
        readable = in_tile
    row_ptr = cos_sin_cache_ptr + position * stride_cache_row + lane
    # Lanes that read no row are overwritten below or never stored.
    cos = tl.load(row_ptr, mask=readable, other=0.0)
    sin = tl.load(row_ptr + LANES, mask=readable, other=0.0)
    if HAS_INV_FREQ:  # noqa: SIM102 (the outer test is decided at compile time)
        # Uniform in the program: programs inside the table skip the trigonometry.
        if any_outside:
            inv_freq = tl.load(inv_freq_ptr + lane, mask=in_tile, other=0.0)
            # float64 holds the product of an integer and a float32 exactly up to 2^29; one rounding
            # to float32 then gives the phase the table was built from.
            phase = position.to(tl.float64) * inv_freq.to(tl.float64)
            if not EXACT_PHASE:
                phase = phase.to(tl.float32).to(tl.float64)
            magnitude = tl.full([], attention_scaling, tl.float32).to(tl.float64)
            computed_cos, computed_sin = cos_sin_float64(phase)
            cos = tl.where(outside, (computed_cos * magnitude).to(tl.float32), cos)
            sin = tl.where(outside, (computed_sin * magnitude).to(tl.float32), sin)
    return cos, sin


@triton.jit
def load_pair(x_ptr, token_base, low, high, in_tile, wide_base, wide_column, in_wide,
              PAIRING: tl.constexpr, BLOCK: tl.constexpr, STRIDE_D: tl.constexpr):  # fmt: skip
    """Both channels of every pair. Interleaved pairs come as one contiguous load, then a split."""
    if PAIRING == 1:
        x = tl.load(x_ptr + wide_base + wide_column * STRIDE_D, mask=in_wide, other=0.0)
        return tl.split(tl.reshape(x, [BLOCK, 2]))
    x_low = tl.load(x_ptr + token_base + low * STRIDE_D, mask=in_tile, other=0.0)
    x_high = tl.load(x_ptr + token_base + high * STRIDE_D, mask=in_tile, other=0.0)
    return x_low, x_high


@triton.jit
def store_pair(out_ptr, y_low, y_high, token_base, low, high, in_tile, wide_base, wide_column,
in_wide,
               PAIRING: tl.constexpr, STRIDE_D: tl.constexpr):  # fmt: skip
    element = out_ptr.dtype.element_ty
    if PAIRING == 1:
        y = tl.interleave(y_low.to(element), y_high.to(element))
        tl.store(out_ptr + wide_base + wide_column * STRIDE_D, y, mask=in_wide)
    else:
        tl.store(out_ptr + token_base + low * STRIDE_D, y_low.to(element), mask=in_tile)
        tl.store(out_ptr + token_base + high * STRIDE_D, y_high.to(element), mask=in_tile)


@triton.jit
def rotate_heads(
    x_ptr, out_ptr, group, batch, seq_start, seq, cos_low, sin_low, cos_high, sin_high, low, high,
    stride_x_batch, stride_x_seq, stride_x_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_D: tl.constexpr,
    ALIGN: tl.constexpr, IN_PLACE: tl.constexpr, LANES: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PASS_BLOCK: tl.constexpr, READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one group of one tensor for TOKENS tokens from ``seq_start``."""
    # Strides come divided by ALIGN: multiplied here they are provably divisible, which keeps
    # 16-byte
    # accesses with one binary for all strides. int64 before the first product that can pass 2^31.
    x_batch = stride_x_batch.to(tl.int64) * ALIGN
    x_seq = stride_x_seq.to(tl.int64) * ALIGN
    x_head = stride_x_head.to(tl.int64) * ALIGN
    if IN_PLACE:
        out_seq = x_seq
        out_head = x_head
        out_start = batch * x_batch + seq_start * out_seq
        OUT_STRIDE_D: tl.constexpr = STRIDE_D
    else:
        # Functional outputs are contiguous.
        out_seq = tl.full([], HEADS * HEAD_DIM, tl.int64)
        out_head = tl.full([], HEAD_DIM, tl.int64)
        out_start = (batch * seq.to(tl.int64) + seq_start) * (HEADS * HEAD_DIM)
        OUT_STRIDE_D: tl.constexpr = 1
    x_start = batch * x_batch + seq_start * x_seq

    index = tl.arange(0, BLOCK)
    token = index // LANES
    in_tile = (index < TOKENS * LANES) & (seq_start + token < seq)
    wide = tl.arange(0, 2 * BLOCK)
    wide_token = wide // (2 * LANES)
    wide_column = wide % (2 * LANES)
    in_wide = (wide < 2 * TOKENS * LANES) & (seq_start + wide_token < seq)

    for head_in_group in range(GROUP):
        head = group * GROUP + head_in_group
        if head < HEADS:
            x_head_ptr = x_ptr + (x_start + head * x_head)
            out_head_ptr = out_ptr + (out_start + head * out_head)
            x_low, x_high = load_pair(
                x_head_ptr + OFFSET * STRIDE_D, token * x_seq, low, high, in_tile,
                wide_token * x_seq, wide_column, in_wide, READ, BLOCK, STRIDE_D,
            )  # fmt: skip
            # float32 before any arithmetic (float64 for float64), one rounding at the store. The
            # fused multiply-add is explicit, so that no compiler flag decides about the rounding.
            if x_ptr.dtype.element_ty == tl.float64:
                x_low = x_low.to(tl.float64)
                x_high = x_high.to(tl.float64)
            else:
                x_low = x_low.to(tl.float32)
                x_high = x_high.to(tl.float32)
            if INVERSE:
                y_low = tl.fma(x_low, cos_low, x_high * sin_high)
                y_high = tl.fma(x_high, cos_high, -(x_low * sin_low))
            else:
                y_low = tl.fma(x_low, cos_low, -(x_high * sin_low))
                y_high = tl.fma(x_high, cos_high, x_low * sin_high)
            store_pair(
                out_head_ptr + OFFSET * OUT_STRIDE_D, y_low, y_high, token * out_seq, low, high,
                in_tile, wide_token * out_seq, wide_column, in_wide, WRITTEN, OUT_STRIDE_D,
            )  # fmt: skip
            if (not IN_PLACE) and HEAD_DIM > 2 * LANES:
                PASS: tl.constexpr = HEAD_DIM - 2 * LANES
                for start in range(0, TOKENS * PASS, PASS_BLOCK):
                    rest = start + tl.arange(0, PASS_BLOCK)
                    rest_token = rest // PASS
                    column = rest % PASS
                    column = tl.where(column < OFFSET, column, column + 2 * LANES)
                    in_rest = (rest_token < TOKENS) & (seq_start + rest_token < seq)
                    kept = tl.load(
                        x_head_ptr + rest_token * x_seq + column * STRIDE_D, mask=in_rest, other=0.0
                    )
                    tl.store(out_head_ptr + rest_token * out_seq + column, kept, mask=in_rest)


RUNTIME_INTS = (
    "seq", "rows",
    "stride_q_batch", "stride_q_seq", "stride_q_head",
    "stride_k_batch", "stride_k_seq", "stride_k_head",
    "stride_positions_axis", "stride_positions_batch", "stride_positions_seq", "stride_cache_row",
)  # fmt: skip


# Unspecialised: a length of 1, of a multiple of 16 or of anything else runs one binary.
@triton.jit(do_not_specialize=RUNTIME_INTS)
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, positions_ptr, cos_sin_cache_ptr, inv_freq_ptr,
    seq, rows,
    stride_q_batch, stride_q_seq, stride_q_head,
    stride_k_batch, stride_k_seq, stride_k_head,
    stride_positions_axis, stride_positions_batch, stride_positions_seq, stride_cache_row,
    attention_scaling,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_HEAD_DIM: tl.constexpr, K_HEAD_DIM: tl.constexpr,
    Q_STRIDE_D: tl.constexpr, K_STRIDE_D: tl.constexpr,
    ALIGN: tl.constexpr, CACHE_ALIGN: tl.constexpr, IN_PLACE: tl.constexpr,
    LANES: tl.constexpr, OFFSET: tl.constexpr,
    READ: tl.constexpr, WRITTEN: tl.constexpr, INVERSE: tl.constexpr,
    AXIS_COUNT: tl.constexpr, AXES: tl.constexpr, HIGH_AXES: tl.constexpr, FULL_WIDTH: tl.constexpr,
    BLOCK_STARTS: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr, EXACT_PHASE: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, TOKENS_POW2: tl.constexpr, BLOCK: tl.constexpr,
    PASS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate q and k; grid ``(batch * ceil(seq / TOKENS), groups of q + groups of k)``."""
    blocks = tl.cdiv(seq, TOKENS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    seq_start = (tl.program_id(0) % blocks) * TOKENS
    group = tl.program_id(1)

    index = tl.arange(0, BLOCK)
    token = index // LANES
    lane = index % LANES
    in_tile = (index < TOKENS * LANES) & (seq_start + token < seq)

    positions_start = batch * stride_positions_batch
    # One lane a token, so that the test needs no exchange through shared memory.
    checked = seq_start + tl.arange(0, TOKENS_POW2)
    in_checked = (tl.arange(0, TOKENS_POW2) < TOKENS) & (checked < seq)
    any_outside = 0
    if HAS_INV_FREQ:
        for axis in tl.static_range(AXIS_COUNT):
            offset = positions_start + checked.to(tl.int64) * stride_positions_seq
            offset += axis * stride_positions_axis.to(tl.int64)
            position = tl.load(positions_ptr + offset, mask=in_checked, other=0).to(tl.int64)
            outside = in_checked & ((position < 0) | (position >= rows))
            any_outside |= tl.max(outside.to(tl.int32), axis=0)

    token_offset = positions_start + (seq_start + token).to(tl.int64) * stride_positions_seq
    axis_low = axis_of_lane(lane, AXES, LANES)
    cache_row = stride_cache_row.to(tl.int64) * CACHE_ALIGN
    cos_low, sin_low = cos_sin(
        token_offset, axis_low, lane, in_tile, any_outside, positions_ptr, cos_sin_cache_ptr,
        inv_freq_ptr, stride_positions_axis, cache_row, rows, attention_scaling,
        AXIS_COUNT > 1, LANES, HAS_INV_FREQ, EXACT_PHASE,
    )  # fmt: skip
    if FULL_WIDTH:
        axis_high = axis_of_lane(lane, HIGH_AXES, LANES)
        cos_high, sin_high = cos_sin(
            token_offset, axis_high, lane, in_tile, any_outside, positions_ptr, cos_sin_cache_ptr,
            inv_freq_ptr, stride_positions_axis, cache_row, rows, attention_scaling,
            AXIS_COUNT > 1, LANES, HAS_INV_FREQ, EXACT_PHASE,
        )  # fmt: skip
    else:
        cos_high, sin_high = cos_low, sin_low

    # Channels of each pair, relative to the first rotated one.
    low = lane
    high = lane + LANES
    if READ == 2:
        for axis in tl.static_range(AXIS_COUNT):
            START: tl.constexpr = (BLOCK_STARTS >> (axis * 12)) & 0xFFF
            STOP: tl.constexpr = (BLOCK_STARTS >> (axis * 12 + 12)) & 0xFFF
            inside = (lane >= START) & (lane < STOP)
            low = tl.where(inside, lane + START, low)
            high = tl.where(inside, lane + STOP, high)

    Q_GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    # Uniform in the program: the group says which tensor it belongs to.
    if group < Q_GROUPS:
        rotate_heads(
            q_ptr, q_out_ptr, group, batch, seq_start, seq, cos_low, sin_low, cos_high, sin_high,
            low, high, stride_q_batch, stride_q_seq, stride_q_head,
            Q_HEADS, GROUP, Q_HEAD_DIM, Q_STRIDE_D, ALIGN, IN_PLACE, LANES, OFFSET, TOKENS, BLOCK,
            PASS_BLOCK, READ, WRITTEN, INVERSE,
        )  # fmt: skip
    else:
        if K_HEADS > 0:
            rotate_heads(
                k_ptr, k_out_ptr, group - Q_GROUPS, batch, seq_start, seq, cos_low, sin_low,
                cos_high,
                sin_high, low, high, stride_k_batch, stride_k_seq, stride_k_head,
                K_HEADS, GROUP, K_HEAD_DIM, K_STRIDE_D, ALIGN, IN_PLACE, LANES, OFFSET, TOKENS,
                BLOCK,
                PASS_BLOCK, READ, WRITTEN, INVERSE,
            )  # fmt: skip


# ------------------------------------------------------------------------------------- launcher


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile(lanes: int, tokens: object, itemsize: int, interleaved: bool) -> dict[str, int]:
    """Block size, warps and heads a program. A fixed table: nothing is tuned at run time.

    A thread owns as many neighbouring lanes as make each of its accesses to q and k 16 bytes: 8 for
    a 16-bit dtype in half style, where both halves are loaded apart; half as many where a pair is
    contiguous. More lanes a thread would cost registers, and for interleaved pairs an exchange
    through shared memory between the layouts of x and of the table row. Prefill: 4 warps, groups of
    8 heads share the table row. Decode cannot fill such a tile: one warp, few heads, many programs.
    """
    few = isinstance(tokens, int) and tokens <= 64
    warps = 1 if few else 4
    lanes_per_thread = max(1, 16 // itemsize // (2 if interleaved else 1))
    block = max(32 * warps * lanes_per_thread, next_power_of_two(lanes))
    # At most 32 tokens: the out-of-table test then stays within one warp.
    tokens_per_program = min(block // lanes, 4 if few else 32)
    block = max(32 * lanes_per_thread, next_power_of_two(tokens_per_program * lanes))
    warps = max(1, min(8, block // (32 * lanes_per_thread)))
    return {
        "BLOCK": block,
        "PASS_BLOCK": 32 * warps * (16 // itemsize),
        "TOKENS": tokens_per_program,
        "TOKENS_POW2": next_power_of_two(tokens_per_program),
        "GROUP": 4 if few else 8,
        "num_warps": warps,
    }


@functools.lru_cache(maxsize=256)
def pack_axes(axes: tuple[int, ...]) -> int:
    """Axis of each lane as one integer; unpacked by axis_of_lane."""
    if axes and max(axes) >= MAX_AXES:
        raise ValueError(f"axes must be below {MAX_AXES}, got {max(axes)}")
    return sum(axis << (4 * lane) for lane, axis in enumerate(axes))


@functools.lru_cache(maxsize=256)
def pack_block_starts(axes: tuple[int, ...]) -> int:
    """First lane of every axis and the lane count, 12 bits each."""
    starts = [sum(a < axis for a in axes) for axis in range(max(axes, default=0) + 2)]
    return sum(start << (12 * axis) for axis, start in enumerate(starts))


def _divisible(n: object, by: int) -> bool:
    """Whether ``n`` is provably a multiple: an int, or a symbol known to be without a guard."""
    if isinstance(n, int):
        return n % by == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(n % by == 0)  # type: ignore[operator]


def _alignment(tensors: Sequence[torch.Tensor], by: int) -> int:
    strides = [s for x in tensors for s in x.stride()[:-1]]
    return by if all(_divisible(s, by) for s in strides) else 1


def launch_arguments(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    inv_freq: torch.Tensor | None,
    axes: Sequence[int],
    style: str,
    rotary_offset: int,
    attention_scaling: float,
    inverse: bool,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Grid and keyword arguments of one launch; tensors ``[batch, seq, heads, head_dim]``."""
    q_out, q = pairs[0]
    k_out, k = pairs[-1] if len(pairs) > 1 else (q_out, q)
    batch, seq = q.shape[:2]
    # Heads and widths are compiled in: plain numbers before tile and alignment follow from them.
    q_heads, q_head_dim, k_head_dim = int(q.shape[2]), int(q.shape[3]), int(k.shape[3])
    k_heads = int(k.shape[2]) if len(pairs) > 1 else 0
    lanes = int(cos_sin_cache.shape[1]) // 2
    in_place = q_out is q
    if cos_sin_cache.stride(1) != 1:
        cos_sin_cache = cos_sin_cache.contiguous()
    if inv_freq is not None and inv_freq.stride(0) != 1:
        inv_freq = inv_freq.contiguous()
    swap = isinstance(seq, int) and seq == 1  # decode: the batch is the long side
    order = (1, 0) if swap else (0, 1)
    if swap:
        batch, seq = seq, batch
    tokens = batch * seq if isinstance(batch, int) and isinstance(seq, int) else None
    align = _alignment([q, k], 8)
    cache_align = 4 if _divisible(cos_sin_cache.stride(0), 4) else 1
    read, written = (style, style)
    if style == "interleaved_to_half":
        read, written = ("half", "interleaved") if inverse else ("interleaved", "half")
    interleaved = INTERLEAVED in (PAIRINGS[read], PAIRINGS[written])
    shape = tile(lanes, tokens, q.element_size(), interleaved)
    lane_axes = tuple(axes)
    has_axes = bool(lane_axes)
    groups = -(-q_heads // shape["GROUP"]) + -(-k_heads // shape["GROUP"])
    at = positions.stride()[int(has_axes) :]

    def strides(x: torch.Tensor) -> list[object]:
        return [x.stride(d) // align for d in (*order, 2)]

    arguments: dict[str, object] = {
        "q_ptr": q, "k_ptr": k, "q_out_ptr": q_out, "k_out_ptr": k_out,
        "positions_ptr": positions, "cos_sin_cache_ptr": cos_sin_cache,
        "inv_freq_ptr": cos_sin_cache if inv_freq is None else inv_freq,
        "seq": seq, "rows": cos_sin_cache.shape[0],
        **dict(zip(RUNTIME_INTS[2:8], strides(q) + strides(k), strict=True)),
        "stride_positions_axis": positions.stride(0) if has_axes else 0,
        "stride_positions_batch": at[order[0]], "stride_positions_seq": at[order[1]],
        "stride_cache_row": cos_sin_cache.stride(0) // cache_align,
        "attention_scaling": attention_scaling,
        "Q_HEADS": q_heads, "K_HEADS": k_heads,
        "Q_HEAD_DIM": q_head_dim, "K_HEAD_DIM": k_head_dim,
        "Q_STRIDE_D": q.stride(3), "K_STRIDE_D": k.stride(3),
        "ALIGN": align, "CACHE_ALIGN": cache_align, "IN_PLACE": in_place,
        "LANES": lanes, "OFFSET": rotary_offset,
        "READ": PAIRINGS[read], "WRITTEN": PAIRINGS[written], "INVERSE": inverse,
        "AXIS_COUNT": max(lane_axes) + 1 if has_axes else 1,
        "AXES": pack_axes(lane_axes[:lanes]) if has_axes else 0,
        "HIGH_AXES": pack_axes(lane_axes[lanes:]) if has_axes else 0,
        "FULL_WIDTH": has_axes and len(lane_axes) > lanes,
        "BLOCK_STARTS": pack_block_starts(lane_axes[:lanes]) if style == "half_blocks" else 0,
        "HAS_INV_FREQ": inv_freq is not None,
        "EXACT_PHASE": inv_freq is not None and inv_freq.dtype == torch.float64,
        **shape,
    }  # fmt: skip
    blocks = (seq + shape["TOKENS"] - 1) // shape["TOKENS"]
    return (batch * blocks, groups), arguments


def launch(kernel, pairs, positions, *rest) -> None:
    """Launch on the tensors' device; ``kernel`` is raw in eager code, wrapped while tracing."""
    grid, arguments = launch_arguments(pairs, positions, *rest)
    device = pairs[0][1].device
    # Triton launches on the current device, which need not be the tensors' (triton #2441).
    guard = torch.cuda.device(device) if device.type == "cuda" and not _tracing(kernel) else None
    with guard or contextlib.nullcontext():
        kernel[grid](**arguments)


def _tracing(kernel) -> bool:
    return not isinstance(kernel, triton.runtime.KernelInterface)
