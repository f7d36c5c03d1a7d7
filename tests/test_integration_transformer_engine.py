"""``integrations.transformer_engine``: angles instead of tables, three layouts, zig-zag ranks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from rope_compile.integrations import transformer_engine as te

from peer_formulas import assert_gradients, assert_rotated, plain_rotate
from support import randn

B, S, H, D, ROWS, HALF = 2, 4, 3, 16, 12, 5


def freqs_of(interleaved: bool = False, rows: int = ROWS, half: int = HALF) -> Tensor:
    """Angles ``[rows, 1, 1, 2 * half]``, both channels of a pair alike."""
    drawn = randn(rows, half, seed=7) * 3
    wide = drawn.repeat_interleave(2, -1) if interleaved else torch.cat((drawn, drawn), -1)
    return wide[:, None, None]


def rows_at(positions: Tensor, *, half: int = HALF, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = (randn(rows, half, seed=7) * 3).double()[positions].unsqueeze(-2)
    return drawn.cos(), drawn.sin()


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("starts", [None, torch.tensor([6, 1], dtype=torch.int32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(tensor_format, interleaved, starts, dtype):
    t = randn(B, S, H, D, dtype=dtype)
    given = t if tensor_format == "bshd" else t.transpose(0, 1)
    out = te.apply_rotary_pos_emb(given, freqs_of(interleaved), tensor_format, starts, interleaved)
    assert out.is_contiguous()
    positions = torch.arange(S).expand(B, S)
    if starts is not None:
        positions = positions + starts[:, None]
    out = out if tensor_format == "bshd" else out.transpose(0, 1)
    assert_rotated(out, t, *rows_at(positions), interleaved=interleaved)


def test_the_format_decides_which_dimension_counts():
    t = randn(S, S, H, D)
    freqs = freqs_of()
    first = te.apply_rotary_pos_emb(t, freqs)  # sbhd by default
    assert_rotated(first, t, *(x.unsqueeze(1) for x in rows_at(torch.arange(S))))
    assert not torch.allclose(first, te.apply_rotary_pos_emb(t, freqs, "bshd"), atol=0.1)
    torch.testing.assert_close(first, te.apply_rotary_pos_emb(t, freqs, fused=True), rtol=0, atol=0)
    with pytest.raises(ValueError, match="freqs must be angles"):
        te.apply_rotary_pos_emb(freqs, t)


@pytest.mark.parametrize("starts", [None, torch.tensor([2, 9, 0, 4])])
def test_packed_sequences_some_of_them_empty(starts):
    boundaries = [0, 3, 3, 8, 9]
    begin = [0] * 4 if starts is None else starts.tolist()
    positions = torch.cat(
        [
            torch.arange(boundaries[i + 1] - boundaries[i]) + begin[i]
            for i in range(4)
        ]
    )  # fmt: skip
    t = randn(9, H, D)
    out = te.apply_rotary_pos_emb(
        t, freqs_of(), "thd", starts, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32)
    )
    assert_rotated(out, t, *rows_at(positions))


def zig_zag(length: int, rank: int, ranks: int) -> Tensor:
    """Positions of a rank: chunk ``rank`` and chunk ``2 * ranks - 1 - rank`` of the whole."""
    size = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(size) + size * chunk for chunk in (rank, last)])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_context_parallel_dense(ranks, tensor_format):
    t = randn(B, S, H, D)
    given = t if tensor_format == "bshd" else t.transpose(0, 1)
    for rank in range(ranks):
        out = te.apply_rotary_pos_emb(given, freqs_of(), tensor_format, cp_size=ranks, cp_rank=rank)
        positions = zig_zag(S * ranks, rank, ranks)
        out = out if tensor_format == "bshd" else out.transpose(0, 1)
        assert_rotated(out, t, *rows_at(positions))


def test_context_parallel_packed():
    """Every sequence is dealt out by itself; ``cu_seqlens`` are those of the whole batch."""
    boundaries = torch.tensor([0, 4, 4, 12])
    ranks = 2
    t = randn(6, H, D)
    for rank in range(ranks):
        out = te.apply_rotary_pos_emb(
            t, freqs_of(), "thd", cu_seqlens=boundaries, cp_size=ranks, cp_rank=rank
        )
        positions = [zig_zag(length, rank, ranks) for length in boundaries.diff().tolist()]
        assert_rotated(out, t, *rows_at(torch.cat(positions)))


def assert_qkv_rotated(outs, qkv, positions, k_positions=None, *, interleaved=False):
    """q ``[..., heads, D]`` at positions, k at its own, v as it was."""
    groups = qkv.shape[-2]
    q_in, k_in, v_in = qkv.split([qkv.shape[-1] - 2 * D, D, D], dim=-1)
    q, k, v = outs
    assert q.shape == (*qkv.shape[:-2], groups * (qkv.shape[-1] // D - 2), D)
    assert_rotated(q, q_in.reshape(q.shape), *rows_at(positions), interleaved=interleaved)
    k_positions = positions if k_positions is None else k_positions
    assert_rotated(k, k_in, *rows_at(k_positions), interleaved=interleaved)
    assert torch.equal(v, v_in)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_qkv(tensor_format, shared, interleaved, dtype):
    groups, per_group = 2, 3
    widths = [per_group * D, D, D]
    lead = (7,) if tensor_format == "thd" else (S, B)
    qkv = randn(*lead, groups, sum(widths), dtype=dtype)
    q_freqs = freqs_of(interleaved)
    k_freqs = q_freqs if shared else freqs_of(interleaved).flip(0)
    cu_seqlens = torch.tensor([0, 3, 7]) if tensor_format == "thd" else None
    outs = te.apply_fused_qkv_rotary_pos_emb(
        qkv, q_freqs, k_freqs, widths, tensor_format, None, interleaved, cu_seqlens
    )
    if tensor_format == "thd":
        positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    elif tensor_format == "sbhd":
        positions = torch.arange(S)[:, None]
    else:
        positions = torch.arange(B)[None]
    k_positions = positions if shared else ROWS - 1 - positions
    assert_qkv_rotated(outs, qkv, positions, k_positions, interleaved=interleaved)


def flipped(shared: bool) -> tuple[Tensor, Tensor]:
    """Angles of q and k: one tensor, or those of k in the other order of rows."""
    freqs = freqs_of()
    return freqs, freqs if shared else freqs.flip(0)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_qkv_with_start_positions(tensor_format, shared, dtype):
    starts, cu_seqlens = torch.tensor([5, 2], dtype=torch.int32), None
    lead, positions = (S, B), torch.arange(S)[:, None] + starts
    if tensor_format == "bshd":
        lead, positions = (B, S), positions.T
    elif tensor_format == "thd":
        cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        lead, positions = (7,), torch.tensor([5, 6, 7, 2, 3, 4, 5])
    # As a model has it: the projection's slice, not contiguous.
    qkv = randn(*lead, 2, 4 * D + 3, dtype=dtype)[..., : 4 * D]
    outs = te.apply_fused_qkv_rotary_pos_emb(
        qkv, *flipped(shared), [2 * D, D, D], tensor_format, starts, cu_seqlens=cu_seqlens
    )
    assert_qkv_rotated(outs, qkv, positions, positions if shared else ROWS - 1 - positions)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_qkv_of_context_parallel_ranks(tensor_format, shared, dtype):
    ranks, cu_seqlens, lengths = 2, None, [2 * S]
    lead = {"sbhd": (S, B), "bshd": (B, S), "thd": (6,)}[tensor_format]
    if tensor_format == "thd":
        cu_seqlens, lengths = torch.tensor([0, 4, 4, 12]), [4, 0, 8]
    qkv = randn(*lead, 2, 4 * D, dtype=dtype)
    for rank in range(ranks):
        outs = te.apply_fused_qkv_rotary_pos_emb(
            qkv, *flipped(shared), [2 * D, D, D], tensor_format, None, False, cu_seqlens, ranks,
            rank,
        )  # fmt: skip
        positions, others = (
            torch.cat([zig_zag(length, which, ranks) for length in lengths])
            for which in (rank, 1 - rank)
        )
        if tensor_format == "sbhd":
            positions, others = positions[:, None], others[:, None]
        assert_qkv_rotated(outs, qkv, positions, positions if shared else ROWS - 1 - positions)
        with pytest.raises(AssertionError, match="beyond the bound"):  # the checker tells the ranks
            assert_qkv_rotated(outs, qkv, others)


def test_start_positions_past_the_rows_take_the_last():
    t = randn(B, S, H, D)
    out = te.apply_rotary_pos_emb(t, freqs_of(), "bshd", torch.tensor([ROWS - 2, 2**40]))
    positions = torch.tensor([[10, 11, 11, 11], [11] * 4])
    assert_rotated(out, t, *rows_at(positions))


def test_gradients():
    freqs, cu_seqlens = freqs_of(), torch.tensor([0, 3, 7])
    rows = rows_at(torch.arange(S))
    assert_gradients(
        lambda t: te.apply_rotary_pos_emb(t, freqs, "bshd"),
        lambda t: plain_rotate(t, *rows),
        randn(B, S, H, D),
    )
    packed_rows = rows_at(torch.tensor([0, 1, 2, 0, 1, 2, 3]))

    def plain(qkv: Tensor) -> list[Tensor]:
        q, k, v = qkv.split([2 * D, D, D], dim=-1)
        return [
            plain_rotate(q.reshape(7, -1, D), *packed_rows),
            plain_rotate(k, *packed_rows),
            v.double(),
        ]

    assert_gradients(
        lambda qkv: te.apply_fused_qkv_rotary_pos_emb(
            qkv, freqs, freqs, [2 * D, D, D], "thd", cu_seqlens=cu_seqlens
        ),
        plain,
        randn(7, 2, 4 * D),
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    freqs, starts = freqs_of(), torch.tensor([5, 2])

    def model(t: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        t = te.apply_rotary_pos_emb(t, freqs, start_positions=starts)
        return (t, *te.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [2 * D, D, D]))

    inputs = randn(S, B, H, D), randn(S, B, 2, 4 * D)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t, f: te.apply_rotary_pos_emb(t, f[:3]), ValueError, "each of 4 positions"),
        (lambda t, f: te.apply_rotary_pos_emb(t, f, cp_size=4), ValueError, "each of 16"),
        (lambda t, f: te.apply_rotary_pos_emb(t, f[:, 0, 0]), ValueError, "[rows, 1, 1, rotary"),
        (lambda t, f: te.apply_rotary_pos_emb(t, f, "hbsd"), ValueError, "tensor_format must be"),
        (lambda t, f: te.apply_rotary_pos_emb(t[0], f, "thd"), ValueError, "cu_seqlens must be"),
        (
            lambda t, f: te.apply_rotary_pos_emb(t, f, "sbhd", torch.ones(B)),
            TypeError,
            "start_positions must be an int32 or int64",
        ),
        (
            lambda t, f: te.apply_rotary_pos_emb(t, f, "sbhd", torch.arange(B), cp_size=2),
            ValueError,
            "start_positions must be None with cp_size 2",
        ),
        (
            lambda t, f: te.apply_fused_qkv_rotary_pos_emb(t, f, f, [10, 4, 2]),
            ValueError,
            "sum to 16, got [10, 4, 2]",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(randn(S, B, H, D), freqs_of())
