"""The Triton kernel and its launcher: every direction, style and layout, in place and out of place.

One launch rotates q and k. A program owns a run of tokens of one sequence and some heads. A thread
owns a vector: VECTOR neighbouring lanes of one token, as many as make an access to q or k 16 bytes.
Vectors are numbered through (token, first lane), so that widths which are no power of two leave at
most a few threads idle. A program reads the table row of each token once and walks its heads.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rope_compile.kernels.reference import block_bounds, pairings

HALF, INTERLEAVED, HALF_BLOCKS = 0, 1, 2
PAIRINGS = {"half": HALF, "interleaved": INTERLEAVED, "half_blocks": HALF_BLOCKS}

MAX_AXES = 16  # 4 bits a lane; see pack_axes


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
def axes_of_vector(vector, AXES: tl.constexpr, PER_TOKEN: tl.constexpr, VECTOR: tl.constexpr):
    """The axes of a vector's lanes, 4 bits each, from the compile-time integer AXES.

    The map is part of the code: no lookup in memory, nothing to keep alive.
    """
    axes = vector * 0
    for i in tl.static_range(PER_TOKEN):
        # Bit 31 becomes the sign: a larger literal would make all of this 64 bits wide.
        bits = (((AXES >> (i * 4 * VECTOR)) & ((1 << (4 * VECTOR)) - 1)) ^ 2147483648) - 2147483648
        axes = tl.where(vector == i, bits, axes)
    return axes


@triton.jit
def load_position(token_ptr, axis, in_tile, stride_positions_axis):
    """int64 positions on one axis."""
    # A masked token takes position 0; nothing computed from it is stored.
    position = tl.load(token_ptr + axis * stride_positions_axis, mask=in_tile, other=0)
    return position.to(tl.int64)


@triton.jit
def read_row(
    token_ptr, axis, lane, in_tile, cos_sin_cache_ptr,
    stride_positions_axis, stride_cache_row, rows, LANES: tl.constexpr,
):  # fmt: skip
    """float32 cos and sin from the row nearest to a position: nothing is read out of bounds."""
    position = load_position(token_ptr, axis, in_tile, stride_positions_axis)
    row = tl.minimum(tl.maximum(position, 0), tl.cast(rows, tl.int64) - 1)
    row_ptr = cos_sin_cache_ptr + row * stride_cache_row + lane
    # Masked: tokens past the end, of which nothing is stored, and an empty table (row -1), where
    # every angle is computed.
    readable = in_tile & (row >= 0)
    cos = tl.load(row_ptr, mask=readable, other=0.0, eviction_policy="evict_last")
    sin = tl.load(row_ptr + LANES, mask=readable, other=0.0, eviction_policy="evict_last")
    return cos, sin


@triton.jit
def read_cos_sin(
    token_ptr, axes, lane, in_tile, cos_sin_cache_ptr,
    stride_positions_axis, stride_cache_row, rows,
    AXIS_COUNT: tl.constexpr, AXIS_PER_VECTOR: tl.constexpr, VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """float32 cos and sin of each lane from the row nearest to its position."""
    if AXIS_PER_VECTOR:
        axis = (axes & 15).to(tl.int64)
        cos, sin = read_row(
            token_ptr, axis, lane, in_tile, cos_sin_cache_ptr,
            stride_positions_axis, stride_cache_row, rows, LANES,
        )  # fmt: skip
    else:
        # The whole vector from the row of every axis, and a choice by lane. Where axes alternate,
        # 32 bytes hold lanes of all of them, so that lane by lane no fewer bytes would move, in 4
        # bytes an access.
        axis_of_lane = (axes >> (tl.arange(0, VECTOR)[None, :] * 4)) & 15
        cos, sin = read_row(
            token_ptr, tl.full([], 0, tl.int64), lane, in_tile, cos_sin_cache_ptr,
            stride_positions_axis, stride_cache_row, rows, LANES,
        )  # fmt: skip
        for i in tl.static_range(1, AXIS_COUNT):
            other_cos, other_sin = read_row(
                token_ptr, tl.full([], i, tl.int64), lane, in_tile, cos_sin_cache_ptr,
                stride_positions_axis, stride_cache_row, rows, LANES,
            )  # fmt: skip
            cos = tl.where(axis_of_lane == i, other_cos, cos)
            sin = tl.where(axis_of_lane == i, other_sin, sin)
    return cos, sin


@triton.jit
def compute_outside(
    cos, sin, axes, trips, token_ptr, inv_freq_ptr, first, in_tile,
    stride_positions_axis, rows, attention_scaling,
    VECTOR: tl.constexpr, EXACT_PHASE: tl.constexpr,
):  # fmt: skip
    """Replace cos and sin of the lanes whose position lies outside the table by computed ones.

    One lane of a vector in each of ``trips`` trips. All of them at once would take 72 registers
    where this takes 56 (sm_90, bfloat16, interleaved_to_half), and every program has to reserve
    them, inside the table too.
    """
    lane_bit = 1 << tl.arange(0, VECTOR)[None, :]
    # A bit that moves, not a comparison with i, for which LLVM would peel trips off the loop: the
    # trigonometry then stood there three times (Triton 3.6: 80 registers, and spills).
    bit = 1
    for i in range(trips):
        axis = ((axes >> (i * 4)) & 15).to(tl.int64)
        position = load_position(token_ptr, axis, in_tile, stride_positions_axis)
        inv_freq = tl.load(inv_freq_ptr + first + i, mask=in_tile, other=0.0)
        # float64 holds the product of an integer and a float32 exactly up to 2^29; one rounding
        # to float32 then gives the phase the table was built from.
        phase = position.to(tl.float64) * inv_freq.to(tl.float64)
        if not EXACT_PHASE:
            phase = phase.to(tl.float32).to(tl.float64)
        magnitude = tl.full([], attention_scaling, tl.float32).to(tl.float64)
        computed_cos, computed_sin = cos_sin_float64(phase)
        chosen = ((position < 0) | (position >= rows)) & ((lane_bit & bit) != 0)
        bit = bit * 2
        cos = tl.where(chosen, (computed_cos * magnitude).to(tl.float32), cos)
        sin = tl.where(chosen, (computed_sin * magnitude).to(tl.float32), sin)
    return cos, sin


@triton.jit
def load_once(x_ptr, in_tile):
    """q and k are read once: their lines leave the cache before the table's, which are shared."""
    # Masked elements are never stored.
    return tl.load(x_ptr, mask=in_tile, other=0.0, eviction_policy="evict_first")


@triton.jit
def split_pairs(x, VECTORS: tl.constexpr, PAIRS: tl.constexpr):
    """Even and odd channels of ``x [VECTORS, 2 * PAIRS]``."""
    return tl.split(tl.reshape(x, [VECTORS, PAIRS, 2]))


@triton.jit
def side_by_side(a, b, VECTORS: tl.constexpr, WIDTH: tl.constexpr):
    """``[VECTORS, 2 * WIDTH]`` from two ``[VECTORS, WIDTH]``."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [VECTORS, 2 * WIDTH])


@triton.jit
def load_pair(
    x_ptr, low, high, first, in_tile,
    PAIRING: tl.constexpr, MOVES: tl.constexpr, STRIDE_D: tl.constexpr, VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Both channels of every pair. Interleaved pairs come contiguous and are split in registers."""
    v = tl.arange(0, VECTOR)[None, :]
    if PAIRING != 1:
        x_low = load_once(x_ptr + (low + v) * STRIDE_D, in_tile)
        x_high = load_once(x_ptr + (high + v) * STRIDE_D, in_tile)
    elif (not MOVES) or VECTOR == 1:
        wide = tl.arange(0, 2 * VECTOR)[None, :]
        x = load_once(x_ptr + (2 * first + wide) * STRIDE_D, in_tile)
        x_low, x_high = split_pairs(x, VECTORS, VECTOR)
    else:
        # The other side has pairs apart and so 16 bytes for each channel of a vector, 32 here: one
        # access of that size would be divided between two threads, and exchanged in shared memory.
        a = load_once(x_ptr + (2 * first + v) * STRIDE_D, in_tile)
        b = load_once(x_ptr + (2 * first + VECTOR + v) * STRIDE_D, in_tile)
        a_low, a_high = split_pairs(a, VECTORS, VECTOR // 2)
        b_low, b_high = split_pairs(b, VECTORS, VECTOR // 2)
        x_low = side_by_side(a_low, b_low, VECTORS, VECTOR // 2)
        x_high = side_by_side(a_high, b_high, VECTORS, VECTOR // 2)
    return x_low, x_high


@triton.jit
def store_pair(
    out_ptr, y_low, y_high, low, high, first, in_tile,
    PAIRING: tl.constexpr, MOVES: tl.constexpr, STRIDE_D: tl.constexpr, VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """The reverse of load_pair; one rounding to the output's dtype."""
    y_low = y_low.to(out_ptr.dtype.element_ty)
    y_high = y_high.to(out_ptr.dtype.element_ty)
    v = tl.arange(0, VECTOR)[None, :]
    if PAIRING != 1:
        tl.store(out_ptr + (low + v) * STRIDE_D, y_low, mask=in_tile)
        tl.store(out_ptr + (high + v) * STRIDE_D, y_high, mask=in_tile)
    elif (not MOVES) or VECTOR == 1:
        wide = tl.arange(0, 2 * VECTOR)[None, :]
        y = tl.reshape(tl.join(y_low, y_high), [VECTORS, 2 * VECTOR])
        tl.store(out_ptr + (2 * first + wide) * STRIDE_D, y, mask=in_tile)
    else:
        # As in load_pair: two accesses of one thread.
        y_low = tl.permute(tl.reshape(y_low, [VECTORS, 2, VECTOR // 2]), (0, 2, 1))
        y_high = tl.permute(tl.reshape(y_high, [VECTORS, 2, VECTOR // 2]), (0, 2, 1))
        a_low, b_low = tl.split(y_low)
        a_high, b_high = tl.split(y_high)
        a = tl.reshape(tl.join(a_low, a_high), [VECTORS, VECTOR])
        b = tl.reshape(tl.join(b_low, b_high), [VECTORS, VECTOR])
        tl.store(out_ptr + (2 * first + v) * STRIDE_D, a, mask=in_tile)
        tl.store(out_ptr + (2 * first + VECTOR + v) * STRIDE_D, b, mask=in_tile)


@triton.jit
def block_channels(vector, AXIS_COUNT: tl.constexpr, BLOCK_STARTS: tl.constexpr,
                   VECTOR: tl.constexpr):  # fmt: skip
    """First low and high channel of each vector where every axis is a block of half style.

    Counted in vectors up to the last step, so that both are provably multiples of VECTOR.
    """
    low = vector
    high = vector
    for i in tl.static_range(AXIS_COUNT):
        inside = vector >= ((BLOCK_STARTS >> (i * 12)) & 0xFFF) // VECTOR
        low = tl.where(inside, vector + ((BLOCK_STARTS >> (i * 12)) & 0xFFF) // VECTOR, low)
        high = tl.where(inside, vector + ((BLOCK_STARTS >> (i * 12 + 12)) & 0xFFF) // VECTOR, high)
    return low * VECTOR, high * VECTOR


@triton.jit
def rotate_heads(
    x_ptr, out_ptr, group, heads_per_program, batch, seq_start, seq, seq_end,
    positions_ptr, cos_sin_cache_ptr, inv_freq_ptr, rows,
    stride_x_batch, stride_x_seq, stride_x_head,
    stride_positions_axis, stride_positions_seq, stride_cache_row, attention_scaling,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_D: tl.constexpr, ALIGN: tl.constexpr,
    IN_PLACE: tl.constexpr, LANES: tl.constexpr, OFFSET: tl.constexpr,
    READ: tl.constexpr, WRITTEN: tl.constexpr, INVERSE: tl.constexpr,
    AXIS_COUNT: tl.constexpr, AXES: tl.constexpr, HIGH_AXES: tl.constexpr,
    AXIS_PER_VECTOR: tl.constexpr, FULL_WIDTH: tl.constexpr, BLOCK_STARTS: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr, EXACT_PHASE: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, TOKENS: tl.constexpr, TOKENS_POW2: tl.constexpr,
):  # fmt: skip
    """Rotate one group of heads of one tensor for TOKENS tokens from ``seq_start``."""
    # Strides come divided by ALIGN: multiplied here they are provably divisible, which keeps
    # 16-byte accesses with one binary for all strides. int64 before the first product that can
    # pass 2^31.
    x_seq = tl.cast(stride_x_seq, tl.int64) * ALIGN
    x_head = tl.cast(stride_x_head, tl.int64) * ALIGN
    x_start = batch * (tl.cast(stride_x_batch, tl.int64) * ALIGN) + seq_start * x_seq
    if IN_PLACE:
        out_seq = x_seq
        out_head = x_head
        out_start = x_start
        OUT_STRIDE_D: tl.constexpr = STRIDE_D
    else:
        # Functional outputs are contiguous.
        out_seq = tl.full([], HEADS * HEAD_DIM, tl.int64)
        out_head = tl.full([], HEAD_DIM, tl.int64)
        out_start = (batch * seq + seq_start) * (HEADS * HEAD_DIM)
        OUT_STRIDE_D: tl.constexpr = 1

    PER_TOKEN: tl.constexpr = LANES // VECTOR
    MOVES: tl.constexpr = READ != WRITTEN
    index = tl.arange(0, VECTORS)[:, None]
    token = index // PER_TOKEN
    vector = index % PER_TOKEN
    first = vector * VECTOR
    lane = first + tl.arange(0, VECTOR)[None, :]
    tokens = tl.minimum(seq_end - seq_start, TOKENS)
    in_tile = token < tokens

    # First channel of each vector's pairs, relative to the first rotated one.
    low = first
    high = first + LANES
    if READ == 2:
        low, high = block_channels(vector, AXIS_COUNT, BLOCK_STARTS, VECTOR)

    start_head = group * heads_per_program
    stop_head = tl.minimum(start_head + heads_per_program, HEADS)
    x_tile_ptr = x_ptr + (x_start + OFFSET * STRIDE_D)
    out_tile_ptr = out_ptr + (out_start + OFFSET * OUT_STRIDE_D)
    # x before positions and table: its latency then covers theirs, which come one after the other.
    x_low, x_high = load_pair(
        x_tile_ptr + start_head * x_head + token * x_seq, low, high, first, in_tile,
        READ, MOVES, STRIDE_D, VECTORS, VECTOR,
    )  # fmt: skip

    positions_start_ptr = positions_ptr + seq_start.to(tl.int64) * stride_positions_seq
    token_ptr = positions_start_ptr + token.to(tl.int64) * stride_positions_seq
    axes_low = axes_of_vector(vector, AXES, PER_TOKEN, VECTOR)
    cos_low, sin_low = read_cos_sin(
        token_ptr, axes_low, lane, in_tile, cos_sin_cache_ptr,
        stride_positions_axis, stride_cache_row, rows,
        AXIS_COUNT, AXIS_PER_VECTOR, VECTOR, LANES,
    )  # fmt: skip
    if FULL_WIDTH:
        axes_high = axes_of_vector(vector, HIGH_AXES, PER_TOKEN, VECTOR)
        cos_high, sin_high = read_cos_sin(
            token_ptr, axes_high, lane, in_tile, cos_sin_cache_ptr,
            stride_positions_axis, stride_cache_row, rows,
            AXIS_COUNT, AXIS_PER_VECTOR, VECTOR, LANES,
        )  # fmt: skip
    else:
        cos_high, sin_high = cos_low, sin_low

    if HAS_INV_FREQ:
        # One lane a token, so that the test needs no exchange through shared memory. The trips come
        # out of the reduction, where no compiler knows them, and so cannot unroll their loop.
        checked = tl.arange(0, TOKENS_POW2)
        in_checked = checked < tokens
        trips = 0
        for i in tl.static_range(AXIS_COUNT):
            position = load_position(
                positions_start_ptr + checked.to(tl.int64) * stride_positions_seq,
                tl.full([], i, tl.int64), in_checked, stride_positions_axis,
            )  # fmt: skip
            outside = in_checked & ((position < 0) | (position >= rows))
            trips = tl.maximum(trips, tl.max(tl.where(outside, VECTOR, 0), axis=0))
        # Uniform in the program: programs inside the table skip the trigonometry.
        if trips > 0:
            cos_low, sin_low = compute_outside(
                cos_low, sin_low, axes_low, trips, token_ptr, inv_freq_ptr, first, in_tile,
                stride_positions_axis, rows, attention_scaling, VECTOR, EXACT_PHASE,
            )  # fmt: skip
            if FULL_WIDTH:
                cos_high, sin_high = compute_outside(
                    cos_high, sin_high, axes_high, trips, token_ptr, inv_freq_ptr, first,
                    in_tile, stride_positions_axis, rows, attention_scaling, VECTOR, EXACT_PHASE,
                )  # fmt: skip
            else:
                cos_high, sin_high = cos_low, sin_low
            if not MOVES:
                # Read again rather than kept across the trigonometry: 8 registers. Where channels
                # move, ptxas made 8 bytes of spills of it (sm_80, sm_100).
                x_low, x_high = load_pair(
                    x_tile_ptr + start_head * x_head + token * x_seq, low, high, first, in_tile,
                    READ, MOVES, STRIDE_D, VECTORS, VECTOR,
                )  # fmt: skip

    for head in range(start_head, stop_head):
        # The next head's x is under way while this one's is rotated.
        next_low, next_high = load_pair(
            x_tile_ptr + (head + 1) * x_head + token * x_seq, low, high, first,
            token < tl.where(head + 1 < stop_head, tokens, 0),
            READ, MOVES, STRIDE_D, VECTORS, VECTOR,
        )  # fmt: skip
        # float32 before any arithmetic (float64 for float64), one rounding at the store. The
        # fused multiply-add is explicit, so that no compiler flag decides about the rounding.
        if x_ptr.dtype.element_ty == tl.float64:
            a = x_low.to(tl.float64)
            b = x_high.to(tl.float64)
        else:
            a = x_low.to(tl.float32)
            b = x_high.to(tl.float32)
        if INVERSE:
            y_low = tl.fma(a, cos_low, b * sin_high)
            y_high = tl.fma(b, cos_high, -(a * sin_low))
        else:
            y_low = tl.fma(a, cos_low, -(b * sin_low))
            y_high = tl.fma(b, cos_high, a * sin_high)
        store_pair(
            out_tile_ptr + head * out_head + token * out_seq, y_low, y_high, low, high, first,
            in_tile, WRITTEN, MOVES, OUT_STRIDE_D, VECTORS, VECTOR,
        )  # fmt: skip
        x_low = next_low
        x_high = next_high


@triton.jit
def copy_heads(
    x_ptr, out_ptr, group, heads_per_program, batch, seq_start, seq, seq_end,
    stride_x_batch, stride_x_seq, stride_x_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_D: tl.constexpr, ALIGN: tl.constexpr,
    LANES: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, PASS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the channels that pass through, of the heads and tokens that rotate_heads would take.

    In programs of their own: behind the rotation they cost it up to 8 registers.
    """
    PASS: tl.constexpr = HEAD_DIM - 2 * LANES
    x_seq = tl.cast(stride_x_seq, tl.int64) * ALIGN
    x_head = tl.cast(stride_x_head, tl.int64) * ALIGN
    x_ptr += batch * (tl.cast(stride_x_batch, tl.int64) * ALIGN) + seq_start * x_seq
    out_ptr += (batch * seq + seq_start) * (HEADS * HEAD_DIM)
    start_head = group * heads_per_program
    stop_head = tl.minimum(start_head + heads_per_program, HEADS)
    for start in range(0, (stop_head - start_head) * (TOKENS * PASS), PASS_BLOCK):
        index = start + tl.arange(0, PASS_BLOCK)
        head = start_head + index // (TOKENS * PASS)
        token = index // PASS % TOKENS
        column = index % PASS
        column = tl.where(column < OFFSET, column, column + 2 * LANES)
        in_tile = (head < stop_head) & (seq_start + token < seq_end)
        x = load_once(x_ptr + head * x_head + token * x_seq + column * STRIDE_D, in_tile)
        tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + column, x, mask=in_tile)


RUNTIME_INTS = (
    "batch_size", "seq", "rows", "heads_per_program",
    "stride_q_batch", "stride_q_seq", "stride_q_head",
    "stride_k_batch", "stride_k_seq", "stride_k_head",
    "stride_positions_axis", "stride_positions_batch", "stride_positions_seq", "stride_cache_row",
)  # fmt: skip
# A grid's second and third axis end at 65535 programs.
GRID_LIMIT = tl.constexpr(65535)


# Unspecialised: a length of 1, of a multiple of 16 or of anything else runs one binary, and so does
# a slice of a longer row of positions.
@triton.jit(do_not_specialize=(*RUNTIME_INTS, "positions_ptr"))
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, positions_ptr, cos_sin_cache_ptr, inv_freq_ptr,
    batch_size, seq, rows, heads_per_program,
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
    AXIS_COUNT: tl.constexpr, AXES: tl.constexpr, HIGH_AXES: tl.constexpr,
    AXIS_PER_VECTOR: tl.constexpr, FULL_WIDTH: tl.constexpr, BLOCK_STARTS: tl.constexpr,
    HAS_INV_FREQ: tl.constexpr, EXACT_PHASE: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, TOKENS: tl.constexpr, TOKENS_POW2: tl.constexpr,
    COPIES: tl.constexpr, PASS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate q and k; grid (groups of q + groups of k, blocks of tokens over two axes).

    Groups come first, so that the programs of one token run at one time and find its table row in
    the cache. With COPIES there are as many groups again, for the channels that pass through.
    """
    block = tl.program_id(2) * GRID_LIMIT + tl.program_id(1)
    blocks = tl.cdiv(seq, TOKENS)
    batch = (block // blocks).to(tl.int64)
    seq_start = (block % blocks) * TOKENS
    seq_end = tl.where(batch < batch_size, seq, 0)
    positions_start_ptr = positions_ptr + batch * stride_positions_batch
    # Inductor passes a number that is always 1 as a constant, which has no dtype to convert from.
    cache_row = tl.cast(stride_cache_row, tl.int64) * CACHE_ALIGN
    groups = tl.num_programs(0)
    if COPIES:
        groups = groups // 2
    group = tl.program_id(0)

    # Uniform in the program. Groups of k are counted from the end: no division.
    if group >= groups:
        if COPIES:
            group -= groups
            if group * heads_per_program < Q_HEADS:
                if Q_HEAD_DIM > 2 * LANES:
                    copy_heads(
                        q_ptr, q_out_ptr, group, heads_per_program, batch, seq_start, seq, seq_end,
                        stride_q_batch, stride_q_seq, stride_q_head,
                        Q_HEADS, Q_HEAD_DIM, Q_STRIDE_D, ALIGN, LANES, OFFSET, TOKENS, PASS_BLOCK,
                    )  # fmt: skip
            elif K_HEADS > 0 and K_HEAD_DIM > 2 * LANES:
                copy_heads(
                    k_ptr, k_out_ptr, groups - 1 - group, heads_per_program, batch, seq_start, seq,
                    seq_end, stride_k_batch, stride_k_seq, stride_k_head,
                    K_HEADS, K_HEAD_DIM, K_STRIDE_D, ALIGN, LANES, OFFSET, TOKENS, PASS_BLOCK,
                )  # fmt: skip
    elif group * heads_per_program < Q_HEADS:
        rotate_heads(
            q_ptr, q_out_ptr, group, heads_per_program, batch, seq_start, seq, seq_end,
            positions_start_ptr, cos_sin_cache_ptr, inv_freq_ptr, rows,
            stride_q_batch, stride_q_seq, stride_q_head,
            stride_positions_axis, stride_positions_seq, cache_row, attention_scaling,
            Q_HEADS, Q_HEAD_DIM, Q_STRIDE_D, ALIGN, IN_PLACE, LANES, OFFSET,
            READ, WRITTEN, INVERSE, AXIS_COUNT, AXES, HIGH_AXES, AXIS_PER_VECTOR, FULL_WIDTH,
            BLOCK_STARTS, HAS_INV_FREQ, EXACT_PHASE,
            VECTOR, VECTORS, TOKENS, TOKENS_POW2,
        )  # fmt: skip
    else:
        if K_HEADS > 0:
            rotate_heads(
                k_ptr, k_out_ptr, groups - 1 - group, heads_per_program, batch, seq_start, seq,
                seq_end,
                positions_start_ptr, cos_sin_cache_ptr, inv_freq_ptr, rows,
                stride_k_batch, stride_k_seq, stride_k_head,
                stride_positions_axis, stride_positions_seq, cache_row, attention_scaling,
                K_HEADS, K_HEAD_DIM, K_STRIDE_D, ALIGN, IN_PLACE, LANES, OFFSET,
                READ, WRITTEN, INVERSE, AXIS_COUNT, AXES, HIGH_AXES, AXIS_PER_VECTOR, FULL_WIDTH,
                BLOCK_STARTS, HAS_INV_FREQ, EXACT_PHASE,
                VECTOR, VECTORS, TOKENS, TOKENS_POW2,
            )  # fmt: skip


# ------------------------------------------------------------------------------------- launcher

# The launch table: fixed, nothing is tuned at run time, one row for all token counts.
# (bytes of an element, pairs contiguous) -> lanes of a vector: 16 bytes an access to q and k.
LANES_OF_VECTOR = {
    (2, False): 8,  # bfloat16, float16: each half of a pair has an access of its own
    (2, True): 4,  # both channels in one access
    (4, False): 4,  # float32
    (4, True): 2,
    (8, False): 2,  # float64
    (8, True): 1,
}
# 4 warps: at 64 registers a thread 8 programs fill an SM, and widths 80, 96 and 192 leave at most
# 6 % of the threads idle (2 warps: up to 25 %).
THREADS = 128
# Full-width axes have two angles a lane: at 8 lanes the table row alone would fill 32 registers (80
# in all, and spills with Triton 3.6), so 16-bit channels move in accesses of 8 bytes there.
LANES_OF_FULL_WIDTH_VECTOR = 4
# The out-of-table test then stays within one warp, without shared memory.
MAX_TOKENS = 32
# One table row serves 8 heads: its bytes are then 1/16 of theirs in bfloat16 at width 128.
MAX_HEADS = 8
# 8 programs on each of 132 SMs, all at one time. Fewer tokens than that spread over heads, one a
# program at least; with more, programs walk heads and save reads of the table.
RESIDENT_PROGRAMS = 1024


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile(
    lanes: int, itemsize: int, interleaved: bool, granule: int, warp_size: int
) -> dict[str, int]:
    """Vectors, tokens and warps of a program; a vector's lanes stay within ``granule`` lanes.

    A warp of 64 threads (AMD's wavefront) halves the warps: one vector a thread remains. With 4 of
    them a thread had half a vector, and gfx942 moved 8 bytes at a time.
    """
    vector = math.gcd(LANES_OF_VECTOR[itemsize, interleaved], lanes, granule)
    per_token = lanes // vector
    tokens = max(1, min(THREADS // per_token, MAX_TOKENS))
    vectors = next_power_of_two(tokens * per_token)
    warps = max(1, min(THREADS, vectors) // warp_size)
    return {
        "VECTOR": vector,
        "VECTORS": vectors,
        "TOKENS": tokens,
        "TOKENS_POW2": next_power_of_two(tokens),
        "PASS_BLOCK": warp_size * warps * (16 // itemsize) * 4,  # in flight: as much as two heads
        "num_warps": warps,
    }


def heads_per_program(token_blocks: int, heads: int) -> int:
    """Heads that a program walks: a number of the launch, not of the binary.

    Plain arithmetic, so that a symbolic count gives an expression and no guard.
    """
    return _max(1, _min(MAX_HEADS, token_blocks * heads // RESIDENT_PROGRAMS))


def _min(a: int, b: int) -> int:
    # torch.sym_min takes 1 us also of two plain numbers, a tenth of a launch at one token.
    return min(a, b) if type(a) is type(b) is int else torch.sym_min(a, b)


def _max(a: int, b: int) -> int:
    return max(a, b) if type(a) is type(b) is int else torch.sym_max(a, b)


def pack_axes(axes: tuple[int, ...]) -> int:
    """Axis of each lane as one integer, 4 bits each; unpacked by axes_of_vector."""
    if axes and max(axes) >= MAX_AXES:
        raise ValueError(f"axes must be below {MAX_AXES}, got {max(axes)}")
    return sum(axis << (4 * lane) for lane, axis in enumerate(axes))


def pack_block_starts(axes: tuple[int, ...]) -> int:
    """First lane of every axis and the lane count, 12 bits each."""
    return sum(start << (12 * axis) for axis, start in enumerate(block_bounds(axes)))


def shared_axes(axes: tuple[int, ...], vector: int) -> bool:
    """Whether all lanes of every vector follow one axis."""
    return all(len({*axes[first : first + vector]}) == 1 for first in range(0, len(axes), vector))


@functools.cache
def warp_size_of(device: torch.device) -> int:
    """Threads of a warp: 32, or what an AMD device says (64 on CDNA)."""
    if torch.version.hip is None:
        return 32
    return torch.cuda.get_device_properties(device).warp_size


def _divisible(numbers: Sequence[int], by: int) -> bool:
    """Whether all are provably multiples: plain, or symbols known to be without a guard."""
    if all(type(n) is int for n in numbers):
        return math.gcd(*numbers) % by == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(n % by == 0) for n in numbers)


@functools.lru_cache(maxsize=256)
def constants(
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    strides_d: tuple[int, int],
    lanes: int,
    rotary_offset: int,
    itemsize: int,
    style: str,
    inverse: bool,
    lane_axes: tuple[int, ...],
    phase: torch.dtype | None,
    warp_size: int,
) -> dict[str, int | bool]:
    """What the kernel is compiled for, apart from alignment and being in place."""
    read, written = (PAIRINGS[name] for name in pairings(style, inverse))
    full_width = len(lane_axes) > lanes
    granule = LANES_OF_FULL_WIDTH_VECTOR if full_width else lanes
    if read == HALF_BLOCKS:
        granule = math.gcd(*block_bounds(lane_axes))
    shape = tile(lanes, itemsize, read == written == INTERLEAVED, granule, warp_size)
    return {
        "Q_HEADS": heads[0], "K_HEADS": heads[1],
        "Q_HEAD_DIM": head_dims[0], "K_HEAD_DIM": head_dims[1],
        "Q_STRIDE_D": strides_d[0], "K_STRIDE_D": strides_d[1],
        "LANES": lanes, "OFFSET": rotary_offset,
        "READ": read, "WRITTEN": written, "INVERSE": inverse,
        "AXIS_COUNT": max(lane_axes, default=0) + 1,
        "AXES": pack_axes(lane_axes[:lanes]),
        "HIGH_AXES": pack_axes(lane_axes[lanes:]),
        "AXIS_PER_VECTOR": shared_axes(lane_axes, shape["VECTOR"]),
        "FULL_WIDTH": full_width,
        "BLOCK_STARTS": pack_block_starts(lane_axes) if read == HALF_BLOCKS else 0,
        "HAS_INV_FREQ": phase is not None, "EXACT_PHASE": phase == torch.float64,
        **shape,
    }  # fmt: skip


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
    warp_size: int = 32,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Grid and keyword arguments of one launch; tensors ``[batch, seq, heads, head_dim]``."""
    q_out, q = pairs[0]
    k_out, k = pairs[-1]
    batch, seq, q_heads, q_head_dim = q.shape
    k_heads, k_head_dim = k.shape[2:] if len(pairs) > 1 else (0, q_head_dim)
    if cos_sin_cache.stride(1) != 1:
        cos_sin_cache = cos_sin_cache.contiguous()
    if inv_freq is not None and inv_freq.stride(0) != 1:
        inv_freq = inv_freq.contiguous()
    q_strides, k_strides = q.stride(), k.stride()
    has_axes = bool(axes)
    at = positions.stride()[int(has_axes) :]
    order = (0, 1)
    if type(seq) is int and seq == 1:  # decode: the batch is the long side
        batch, seq = seq, batch
        order = (1, 0)
    align = 8 if _divisible(q_strides[:3] + k_strides[:3], 8) else 1
    cache_row = cos_sin_cache.stride(0)
    cache_align = 4 if _divisible((cache_row,), 4) else 1
    # Compiled in, so plain numbers; the cache of ``constants`` and Triton's key need them too.
    compiled = constants(
        (int(q_heads), int(k_heads)),
        (int(q_head_dim), int(k_head_dim)),
        (int(q_strides[3]), int(k_strides[3])),
        int(cos_sin_cache.shape[1]) // 2,
        rotary_offset,
        max(q.element_size(), k.element_size()),
        style,
        inverse,
        tuple(axes),
        None if inv_freq is None else inv_freq.dtype,
        warp_size,
    )
    token_blocks = batch * ((seq + compiled["TOKENS"] - 1) // compiled["TOKENS"])
    heads = heads_per_program(token_blocks, compiled["Q_HEADS"] + compiled["K_HEADS"])
    groups = sum((compiled[name] + heads - 1) // heads for name in ("Q_HEADS", "K_HEADS"))
    in_place = q_out is q
    # An absent k is stood in for by the table: given q twice, Inductor would compute q twice.
    absent = len(pairs) == 1
    k_pointer, k_out_pointer = (cos_sin_cache,) * 2 if absent else (k, k_out)
    copies = (
        not in_place and compiled["Q_HEAD_DIM"] + compiled["K_HEAD_DIM"] > 4 * compiled["LANES"]
    )
    limit = GRID_LIMIT.value
    arguments: dict[str, object] = {
        "q_ptr": q, "k_ptr": k_pointer, "q_out_ptr": q_out, "k_out_ptr": k_out_pointer,
        "positions_ptr": positions, "cos_sin_cache_ptr": cos_sin_cache,
        "inv_freq_ptr": cos_sin_cache if inv_freq is None else inv_freq,
        "batch_size": batch, "seq": seq, "rows": cos_sin_cache.shape[0],
        "heads_per_program": heads,
        "stride_q_batch": q_strides[order[0]] // align,
        "stride_q_seq": q_strides[order[1]] // align,
        "stride_q_head": q_strides[2] // align,
        "stride_k_batch": k_strides[order[0]] // align,
        "stride_k_seq": k_strides[order[1]] // align,
        "stride_k_head": k_strides[2] // align,
        "stride_positions_axis": positions.stride(0) if has_axes else 0,
        "stride_positions_batch": at[order[0]], "stride_positions_seq": at[order[1]],
        "stride_cache_row": cache_row // cache_align,
        "attention_scaling": attention_scaling,
        "ALIGN": align, "CACHE_ALIGN": cache_align, "IN_PLACE": in_place, "COPIES": copies,
        **compiled,
    }  # fmt: skip
    blocks = _min(token_blocks, limit), (token_blocks + limit - 1) // limit
    return (groups * (1 + copies), *blocks), arguments


def launch(kernel, pairs, positions, *rest) -> None:
    """Launch on the tensors' device; ``kernel`` is raw in eager code, wrapped while tracing."""
    device = pairs[0][1].device
    grid, arguments = launch_arguments(pairs, positions, *rest, warp_size_of(device))
    # Triton launches on the current device, which need not be the tensors' (triton #2441).
    guard = torch.cuda.device(device) if device.type == "cuda" and not _tracing(kernel) else None
    with guard or contextlib.nullcontext():
        kernel[grid](**arguments)


def _tracing(kernel) -> bool:
    return not isinstance(kernel, triton.runtime.KernelInterface)
