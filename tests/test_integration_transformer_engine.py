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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_context_parallel_dense(ranks, tensor_format):
    """The rank's tokens are chunk ``rank`` and chunk ``2 * ranks - 1 - rank`` of the whole."""
    t = randn(B, S, H, D)
    given = t if tensor_format == "bshd" else t.transpose(0, 1)
    for rank in range(ranks):
        out = te.apply_rotary_pos_emb(given, freqs_of(), tensor_format, cp_size=ranks, cp_rank=rank)
        chunks = torch.arange(S * ranks).chunk(2 * ranks)
        positions = torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))
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
        positions = []
        for length in boundaries.diff().tolist():
            chunks = torch.arange(length).chunk(2 * ranks) if length else [torch.arange(0)] * 4
            positions += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        assert_rotated(out, t, *rows_at(torch.cat(positions)))


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_qkv(tensor_format, shared, interleaved):
    groups, per_group = 2, 3
    widths = [per_group * D, D, D]
    lead = (7,) if tensor_format == "thd" else (S, B)
    qkv = randn(*lead, groups, sum(widths))
    q_freqs = freqs_of(interleaved)
    k_freqs = q_freqs if shared else freqs_of(interleaved).flip(0)
    cu_seqlens = torch.tensor([0, 3, 7]) if tensor_format == "thd" else None
    q, k, v = te.apply_fused_qkv_rotary_pos_emb(
        qkv, q_freqs, k_freqs, widths, tensor_format, None, interleaved, cu_seqlens
    )
    if tensor_format == "thd":
        positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    elif tensor_format == "sbhd":
        positions = torch.arange(S)[:, None]
    else:
        positions = torch.arange(B)[None]
    assert q.shape == (*lead, groups * per_group, D)
    q_in, k_in, v_in = qkv.split(widths, dim=-1)
    assert_rotated(q, q_in.reshape(q.shape), *rows_at(positions), interleaved=interleaved)
    k_positions = positions if shared else ROWS - 1 - positions
    assert_rotated(k, k_in, *rows_at(k_positions), interleaved=interleaved)
    torch.testing.assert_close(v, v_in, rtol=0, atol=0)


def test_fused_qkv_with_start_positions():
    qkv, starts = randn(S, B, 2, 3 * D), torch.tensor([5, 2])
    freqs = freqs_of()
    q, _, _ = te.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [D, D, D], "sbhd", starts)
    positions = torch.arange(S)[:, None] + starts
    assert_rotated(q, qkv[..., :D], *rows_at(positions))


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
