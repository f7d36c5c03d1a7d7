"""``integrations.liger`` and ``integrations.unsloth``: q and k at once, heads second."""

from __future__ import annotations

import re

import pytest
import torch

from rope_compile.integrations import liger, unsloth

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import randn

B, HQ, HK, S, D = 2, 4, 3, 5, 12


def full(table):
    """Half-style tables at full width, as transformers hands them over."""
    return [torch.cat((part, part), dim=-1) for part in table]


def qk(layout: str = "bhsd", dtype: torch.dtype = torch.float32):
    """q and k ``[B, H, S, D]``, as a transposed projection or plain."""
    q, k = randn(B, S, HQ, D, dtype=dtype), randn(B, S, HK, D, seed=1, dtype=dtype)
    if layout == "bshd":
        return q, k
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q, k) if layout == "bhsd" else (q.contiguous(), k.contiguous())


def unchanged(function, q, k, *arguments, **options):
    """``function(q, k, ...)``, which leaves q and k alone and returns tensors of its own."""
    before = q.clone(), k.clone()
    outs = function(q, k, *arguments, **options)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    owned = {x.untyped_storage().data_ptr() for x in (q, k)}
    assert not owned & {x.untyped_storage().data_ptr() for x in outs}
    return outs


def test_the_check_for_unchanged_inputs_sees_a_write_and_a_view():
    q, k = qk()
    with pytest.raises(AssertionError):
        unchanged(lambda q, k: (q.mul_(2).clone(), k.clone()), q, k)
    with pytest.raises(AssertionError):
        unchanged(lambda q, k: (q.clone(), k.transpose(1, 2)), q, k)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("layout", ["bhsd", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [6, 2])
def test_liger(batch, layout, dtype, half):
    """Theirs overwrites q and k of the first layout; ours leaves every input alone."""
    table = angles(batch, S, half)
    q, k = qk(layout, dtype)
    q_out, k_out = unchanged(liger.liger_rotary_pos_emb, q, k, *full(table))
    rows = [part.unsqueeze(1) for part in table]
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)


def test_position_ids_are_ignored():
    """cos and sin are gathered already, whatever the fifth argument says."""
    table, (q, k) = full(angles(1, S, 6)), qk()
    expected = liger.liger_rotary_pos_emb(q, k, *table)
    for ids in (torch.arange(S).flip(0)[None], torch.full((B, S), 10**6)):
        same = liger.liger_rotary_pos_emb(q, k, *table, ids)
        torch.testing.assert_close(same, expected, rtol=0, atol=0)


def test_unsqueeze_dim_names_the_head_dimension():
    table = angles(1, S, 6)
    q, k = qk("bshd")
    q_out, k_out = liger.liger_rotary_pos_emb(q, k, *full(table), unsqueeze_dim=2)
    rows = [part.unsqueeze(2) for part in table]
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_dim_allows_tables_of_half_the_width(unsqueeze_dim):
    """gpt-oss hands over ``[B, S, D / 2]``; without the argument half the head would be rotated."""
    cos, sin = angles(1, S, 6)
    q, k = qk("bhsd" if unsqueeze_dim == 1 else "bshd")
    q_out, k_out = liger.liger_rotary_pos_emb(q, k, cos, sin, None, unsqueeze_dim, D)
    rows = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)
    if unsqueeze_dim == 1:
        same = liger.liger_rotary_pos_emb_gpt_oss(q, k, cos, sin)
        torch.testing.assert_close(same, (q_out, k_out), rtol=0, atol=0)
    partial, _ = liger.liger_rotary_pos_emb(q, k, cos[0], sin[0], None, unsqueeze_dim, 4)
    assert_rotated(partial, q, *(part[..., :2] for part in rows))


def test_swapped_tables_give_other_numbers():
    cos, sin = full(angles(1, S, 6))
    q, k = qk()
    right, _ = liger.liger_rotary_pos_emb(q, k, cos, sin)
    wrong, _ = liger.liger_rotary_pos_emb(q, k, sin, cos)
    assert not torch.allclose(right, wrong, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_vision(dtype):
    table = angles(S, 6)
    q, k = randn(S, HQ, D, dtype=dtype), randn(S, HK, D, seed=1, dtype=dtype)
    q_out, k_out = unchanged(liger.liger_rotary_pos_emb_vision, q, k, *full(table))
    rows = [part.unsqueeze(1) for part in table]
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("layout", ["bhsd", "contiguous", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_multimodal(batch, layout, dtype):
    """Lane i of section a takes the table of axis a."""
    sections = [1, 2, 3]
    table = angles(3, batch, S, 6)
    q, k = qk(layout, dtype)
    heads = 2 if layout == "bshd" else 1
    q_out, k_out = unchanged(
        liger.liger_multimodal_rotary_pos_emb, q, k, *full(table), sections, unsqueeze_dim=heads
    )
    rows = []
    for part in table:
        t, h, w = part
        chosen = torch.cat((t[..., :1], h[..., 1:3], w[..., 3:]), dim=-1)
        rows.append(chosen.unsqueeze(heads))
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)
    other, _ = liger.liger_multimodal_rotary_pos_emb(q, k, *full(table), [3, 2, 1], heads)
    assert not torch.allclose(other, q_out, atol=0.1)


@pytest.mark.parametrize("batch", [(), (1,), (B,)], ids=str)
@pytest.mark.parametrize("complex_rows", [True, False])
@pytest.mark.parametrize("more", [0, 2])
def test_llama4_text(batch, complex_rows, more):
    """Rows of each batch entry, where theirs takes the first entry for all."""
    cos, sin = angles(*batch, S + more, 6)
    freqs = torch.complex(cos, sin) if complex_rows else torch.cat((cos, sin), dim=-1)
    q, k = qk("bshd", torch.bfloat16)
    q_out, k_out = unchanged(liger.liger_llama4_text_rotary_pos_emb, q, k, freqs)
    rows = cos[..., :S, None, :], sin[..., :S, None, :]
    assert_rotated(q_out, q, *rows, interleaved=True)
    assert_rotated(k_out, k, *rows, interleaved=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_llama4_vision(dtype):
    cos, sin = angles(S, 1, 6)
    q, k = qk("bshd", dtype)
    q_out, k_out = unchanged(
        liger.liger_llama4_vision_rotary_pos_emb, q, k, torch.complex(cos, sin)
    )
    assert_rotated(q_out, q, cos, sin, interleaved=True)
    assert_rotated(k_out, k, cos, sin, interleaved=True)


@pytest.mark.parametrize("indices", [None, "batch", "flat"])
@pytest.mark.parametrize("layout", ["bhsd", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unsloth(indices, layout, dtype):
    table = angles(9, 6)
    q, k = qk(layout, dtype)
    positions = torch.arange(S).expand(B, S)
    given = None
    if indices is not None:
        positions = torch.tensor([[3, 1, 4, 1, 5], [8, 2, 6, 5, 3]], dtype=torch.int32)
        given = positions if indices == "batch" else positions.reshape(-1)
    tables = [part[None, None] for part in full(table)]
    q_out, k_out = unchanged(unsloth.fast_rope_embedding, q, k, *tables, given)
    rows = [part[positions].unsqueeze(1) for part in table]
    assert_rotated(q_out, q, *rows)
    assert_rotated(k_out, k, *rows)


def test_unsloth_indices_outside_take_the_nearest_row():
    table, (q, k) = angles(4, 6), qk()
    indices = torch.tensor([[-1, 0, 3, 4, 2**31 - 1]] * B)
    q_out, _ = unsloth.fast_rope_embedding(q, k, *full(table), indices)
    assert_rotated(q_out, q, *(part[torch.tensor([0, 0, 3, 3, 3])] for part in table))


def test_one_token_and_no_token():
    cos, sin = full(angles(1, 1, 6))
    q, k = qk()
    for length in (1, 0):
        short_q, short_k = q[:, :, :length], k[:, :, :length]
        outs = (
            liger.liger_rotary_pos_emb(short_q, short_k, cos[:, :length], sin[:, :length]),
            unsloth.fast_rope_embedding(short_q, short_k, cos, sin),
        )
        for q_out, k_out in outs:
            assert q_out.shape == (B, HQ, length, D)
            assert k_out.shape == (B, HK, length, D)


def test_gradients():
    table = angles(1, S, 6)
    mrope = angles(3, 1, S, 6)
    rows = [part.unsqueeze(1) for part in table]
    parts = [
        torch.cat((p[0, ..., :1], p[1, ..., 1:3], p[2, ..., 3:]), -1).unsqueeze(1) for p in mrope
    ]
    freqs = torch.complex(*table)
    q, k = qk()

    def both(*rows, **style):
        return lambda q, k: [plain_rotate(x, *rows, **style) for x in (q, k)]

    assert_gradients(lambda q, k: liger.liger_rotary_pos_emb(q, k, *full(table)), both(*rows), q, k)
    assert_gradients(
        lambda q, k: liger.liger_multimodal_rotary_pos_emb(q, k, *full(mrope), [1, 2, 3]),
        both(*parts),
        q,
        k,
    )
    assert_gradients(
        lambda q, k: unsloth.fast_rope_embedding(q, k, *full(table)), both(*rows), q, k
    )
    assert_gradients(
        lambda q, k: liger.liger_llama4_text_rotary_pos_emb(q, k, freqs),
        both(*(part.unsqueeze(2) for part in table), interleaved=True),
        *qk("bshd"),
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    table, mrope, rows = angles(1, S, 6), angles(3, B, S, 6), angles(9, 6)
    indices = torch.tensor([[3, 1, 4, 1, 5], [8, 2, 6, 5, 3]])
    q, k = qk()

    def model(q, k):
        q, k = liger.liger_rotary_pos_emb(q, k, *full(table))
        q, k = liger.liger_multimodal_rotary_pos_emb(q, k, *full(mrope), [1, 2, 3])
        return unsloth.fast_rope_embedding(q, k, *full(rows), indices)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), model(q, k), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k, c: liger.liger_rotary_pos_emb(q, k, c, c, None, 3), ValueError, "dim 3"),
        (lambda q, k, c: liger.liger_rotary_pos_emb(q, k, c, c[..., :2]), ValueError, "must agree"),
        (lambda q, k, c: liger.liger_rotary_pos_emb_vision(q, k, c, c), ValueError, "[seq, heads"),
        (
            lambda q, k, c: liger.liger_multimodal_rotary_pos_emb(
                q, k, c[None], c[None], [1, 2, 3]
            ),
            ValueError,
            "6 lanes among 1 axes, got [1, 2, 3]",
        ),
        (
            # transformers doubles the sections inside its function; callers hand over the lanes
            lambda q, k, c: liger.liger_multimodal_rotary_pos_emb(
                q, k, c.expand(3, 1, S, D), c.expand(3, 1, S, D), [2, 4, 6]
            ),
            ValueError,
            "6 lanes among 3 axes",
        ),
        (
            lambda q, k, c: liger.liger_rotary_pos_emb(q, k, c, c, rotary_dim=14),
            ValueError,
            "rotary_dim must be even, at most head_dim = 12",
        ),
        (
            lambda q, k, c: liger.liger_llama4_vision_rotary_pos_emb(q, k, c[0, :, :6]),
            ValueError,
            "has lost its sines",
        ),
        (lambda q, k, c: unsloth.fast_rope_embedding(q[0], k, c, c), ValueError, "Q must be"),
        (
            lambda q, k, c: unsloth.fast_rope_embedding(q, k, c[:, :3], c),
            ValueError,
            "5 tokens, got 3",
        ),
        (
            # every sequence would get the rows of the first
            lambda q, k, c: unsloth.fast_rope_embedding(q, k, c.expand(B, S, D), c),
            ValueError,
            "cos must be [rows, head_dim] with leading dimensions of 1, got (2, 5, 12)",
        ),
        (
            lambda q, k, c: unsloth.fast_rope_embedding(q, k, c, c.expand(1, B, S, D)),
            ValueError,
            "sin must be [rows, head_dim] with leading dimensions of 1, got (1, 2, 5, 12)",
        ),
        (
            lambda q, k, c: unsloth.fast_rope_embedding(q, k, c[0, 0], c),
            ValueError,
            "cos must be [rows, head_dim] with leading dimensions of 1, got (12,)",
        ),
        (
            lambda q, k, c: unsloth.fast_rope_embedding(q, k, c, c, torch.ones(B, S).byte()),
            TypeError,
            "rope_embedding_indices must be an int32 or int64 tensor, got torch.uint8",
        ),
        (
            lambda q, k, c: liger.liger_rotary_pos_emb(q, k, c.requires_grad_(), c),
            ValueError,
            "cos must not require grad",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    q, k = qk()
    with pytest.raises(error, match=re.escape(message)):
        call(q, k, full(angles(1, S, 6))[0])
