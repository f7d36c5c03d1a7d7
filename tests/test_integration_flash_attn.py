"""``integrations.flash_attn``: signatures, layouts, in-place writes, gradients."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rope_compile as rc
from rope_compile.integrations import flash_attn as fa

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import assert_guard_intact, assert_near_oracle, guarded, oracle_rotate, randn

B, S, H, D, ROWS = 2, 5, 3, 16, 13


def at(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[*positions, 1, R/2]``, for ``[..., heads, head_dim]``."""
    cos, sin = table
    return cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)


def positions_of(offsets: int | Tensor) -> Tensor:
    positions = torch.arange(S)
    return positions + offsets[:, None] if isinstance(offsets, Tensor) else positions + offsets


OFFSETS = [0, 4, torch.tensor([3, 8]), torch.tensor([7, 0], dtype=torch.int32)]


@pytest.mark.parametrize("offsets", OFFSETS, ids=["none", "int", "int64", "int32"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 3])  # the whole head, and six channels of it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(offsets, inplace, interleaved, half, dtype):
    table = angles(ROWS, half)
    x = randn(B, S, H, D, dtype=dtype)
    given = x.clone()
    out = fa.apply_rotary_emb(given, *table, interleaved, inplace, offsets)
    assert_rotated(out, x, *at(table, positions_of(offsets)), interleaved=interleaved)
    assert (out.data_ptr() == given.data_ptr()) == inplace
    torch.testing.assert_close(given, out if inplace else x, rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strided_input_is_read_and_written_through_its_strides(inplace, dtype):
    table = angles(ROWS, 4)
    x = randn(B, H, S, D, dtype=dtype)
    view, buffer = guarded(x)
    given = view.transpose(1, 2)
    assert not given.is_contiguous()
    out = fa.apply_rotary_emb(given, *table, inplace=inplace)
    assert_rotated(out, x.transpose(1, 2), *at(table, torch.arange(S)))
    assert_guard_intact(view, buffer)
    if not inplace:
        torch.testing.assert_close(view, x, rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([1, 5, 0, 2])], ids=["0", "2", "tensor"])
def test_packed_sequences_some_of_them_empty(offsets, inplace):
    boundaries = [0, 3, 3, 8, 9]
    starts = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 4
    positions = torch.cat(
        [
            torch.arange(end - begin) + start
            for begin, end, start in zip(boundaries, boundaries[1:], starts, strict=False)
        ]
    )
    table = angles(ROWS, 8)
    x = randn(9, H, D)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    out = fa.apply_rotary_emb(
        x.clone(), *table, inplace=inplace, seqlen_offsets=offsets, cu_seqlens=cu_seqlens,
        max_seqlen=5,
    )  # fmt: skip
    assert_rotated(out, x, *at(table, positions))


def test_no_tokens():
    table = angles(ROWS, 8)
    assert fa.apply_rotary_emb(randn(B, 0, H, D), *table).shape == (B, 0, H, D)
    x = randn(0, H, D)
    assert fa.apply_rotary_emb(x, *table, cu_seqlens=torch.tensor([0, 0])).shape == x.shape


def test_the_two_functions_order_their_arguments_differently():
    """interleaved, inplace, offsets in the layer; offsets, ..., interleaved, ... in the kernel."""
    table, x = angles(ROWS, 8), randn(B, S, H, D)
    rows = at(table, torch.arange(S) + 4)
    layer = fa.apply_rotary_emb(x, *table, True, False, 4, None, None)
    kernel = fa.apply_rotary(x, *table, 4, None, None, True, False, False)
    assert_rotated(layer, x, *rows, interleaved=True)
    torch.testing.assert_close(layer, kernel, rtol=0, atol=0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        fa.apply_rotary_emb(x, *table, 4, False, 0, True)
    # One order handed to the other function, where both accept it, is seen in the numbers.
    assert not torch.allclose(
        fa.apply_rotary(x, *table, True), fa.apply_rotary_emb(x, *table, True)
    )
    assert fa.apply_rotary_emb_func is fa.apply_rotary_emb


@pytest.mark.parametrize("interleaved", [False, True])
def test_conjugate_rotates_back(interleaved):
    table, x = angles(ROWS, 8), randn(B, S, H, D)
    forward = fa.apply_rotary(x, *table, 2, interleaved=interleaved)
    back = fa.apply_rotary(forward, *table, 2, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)
    cos, sin = at(table, torch.arange(S) + 2)
    conjugate = fa.apply_rotary(
        x.clone(), *table, 2, None, None, interleaved, inplace=True, conjugate=True
    )
    assert_rotated(conjugate, x, cos, -sin, interleaved=interleaved)


def packed(layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor], dict]:
    """A projection, its (q, k, v) views, and the keyword that explains it."""
    if layout == "three":
        qkv = randn(B, S, 3, H, D, dtype=dtype)
        return qkv, list(qkv.unbind(2)), {}
    qkv = randn(B, S, 4 + 2 * 2, D, dtype=dtype)
    return qkv, list(qkv.split((4, 2, 2), dim=2)), {"num_heads_q": 4}


@pytest.mark.parametrize("layout", ["three", "gqa"])
@pytest.mark.parametrize("offsets", OFFSETS[1:3], ids=["int", "tensor"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qkv_in_place(layout, offsets, interleaved):
    table = angles(ROWS, 3)
    plain, (q, k, v), keyword = packed(layout)
    view, buffer = guarded(plain)
    out = fa.apply_rotary_emb_qkv_(
        view, *table, interleaved=interleaved, seqlen_offsets=offsets, **keyword
    )
    assert out is view
    assert_guard_intact(view, buffer)
    rows = at(table, positions_of(offsets))
    sizes = [part.shape[-2] for part in (q, k, v)]
    got = out.unbind(2) if layout == "three" else out.split(sizes, dim=2)
    assert_rotated(got[0], q, *rows, interleaved=interleaved)
    assert_rotated(got[1], k, *rows, interleaved=interleaved)
    torch.testing.assert_close(got[2], v, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["three", "gqa"])
def test_qkv_with_a_table_of_its_own_for_k(layout):
    table, other = angles(ROWS, 8), angles(ROWS, 4, seed=8)
    plain, (q, k, _), keyword = packed(layout, torch.bfloat16)
    out = fa.apply_rotary_emb_qkv_(plain.clone(), *table, *other, **keyword)
    sizes = [part.shape[-2] for part in (q, k)]
    got = out.unbind(2) if layout == "three" else out.split((*sizes, sizes[1]), dim=2)
    assert_rotated(got[0], q, *at(table, torch.arange(S)))
    assert_rotated(got[1], k, *at(other, torch.arange(S)))


@pytest.mark.parametrize("offsets", OFFSETS[:3], ids=["none", "int", "tensor"])
def test_kv_in_place(offsets):
    table, kv = angles(ROWS, 8), randn(B, S, 2, H, D)
    given = kv.clone()
    out = fa.apply_rotary_emb_kv_(given, *table, True, offsets)
    assert out is given
    assert_rotated(out[:, :, 0], kv[:, :, 0], *at(table, positions_of(offsets)), interleaved=True)
    torch.testing.assert_close(out[:, :, 1], kv[:, :, 1], rtol=0, atol=0)


def plain_packed(table: tuple[Tensor, Tensor], positions: Tensor):
    def function(qkv: Tensor) -> Tensor:
        rows = at(table, positions)
        rotated = [plain_rotate(part, *rows) for part in qkv.unbind(2)[:-1]]
        return torch.stack([*rotated, qkv[:, :, -1].double()], dim=2)

    return function


@pytest.mark.parametrize("offsets", OFFSETS[1:3], ids=["int", "tensor"])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients(inplace, offsets):
    table = angles(ROWS, 3)
    rows = at(table, positions_of(offsets))
    assert_gradients(
        lambda x: fa.apply_rotary_emb(x, *table, True, inplace, offsets),
        lambda x: plain_rotate(x, *rows, interleaved=True),
        randn(B, S, H, D),
    )


@pytest.mark.parametrize("fault", ["not the inverse", "incoming overwritten"])
def test_a_wrong_backward_pass_would_be_found(fault):
    cos, sin = at(angles(ROWS, 8), torch.arange(S))

    class Twin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return plain_rotate(x, cos, sin).float()

        @staticmethod
        def backward(ctx, grad):
            if fault == "not the inverse":
                return plain_rotate(grad, cos, sin).float()
            return grad.copy_(plain_rotate(grad, cos, -sin))  # flash-attn's in-place backward

    with pytest.raises(AssertionError):
        assert_gradients(Twin.apply, lambda x: plain_rotate(x, cos, sin), randn(B, S, H, D))


def test_gradients_of_packed_projections():
    table = angles(ROWS, 8)
    function = plain_packed(table, torch.arange(S) + 2)
    assert_gradients(
        lambda qkv: fa.apply_rotary_emb_qkv_(qkv, *table, seqlen_offsets=2),
        function,
        randn(B, S, 3, H, D),
    )
    assert_gradients(
        lambda qkv: fa.apply_rotary_emb_qkv_(qkv, *table, *table, seqlen_offsets=2),
        function,
        randn(B, S, 3, H, D),
    )
    assert_gradients(
        lambda kv: fa.apply_rotary_emb_kv_(kv, *table, seqlen_offsets=2),
        function,
        randn(B, S, 2, H, D),
    )


def test_gradient_of_the_tensor_that_was_rewritten():
    """Who goes on with the projection itself, not with what was returned, is right too."""
    table, leaf, weight = angles(ROWS, 8), randn(B, S, 3, H, D), randn(B, S, 3, H, D, seed=1)

    def rewritten(x: Tensor) -> Tensor:
        fa.apply_rotary_emb_qkv_(x, *table)
        return x * weight

    assert_gradients(rewritten, lambda x: plain_packed(table, torch.arange(S))(x) * weight, leaf)


def test_second_derivatives_in_place():
    table = angles(ROWS, 2)
    x = randn(1, 2, 3, 4, dtype=torch.float64).requires_grad_()
    qkv = randn(1, 2, 3, 1, 4, dtype=torch.float64).requires_grad_()
    for function, leaf in (
        (lambda x: fa.apply_rotary_emb(x * x, *table, inplace=True), x),
        (lambda x: fa.apply_rotary_emb_qkv_(x * x, *table), qkv),
    ):
        assert torch.autograd.gradcheck(function, (leaf,))
        assert torch.autograd.gradgradcheck(function, (leaf,))


def test_a_leaf_is_rewritten_too_and_its_gradient_is_right():
    """flash-attn accepts one; what is returned has the gradient."""
    table, x = angles(ROWS, 8), randn(B, S, H, D)
    leaf = x.clone().requires_grad_()
    out = fa.apply_rotary_emb(leaf, *table, inplace=True)
    assert out.data_ptr() == leaf.data_ptr()
    rows = at(table, torch.arange(S))
    assert_rotated(out, x, *rows)
    incoming = randn(B, S, H, D, seed=3)
    (gradient,) = torch.autograd.grad(out, leaf, incoming)
    assert_rotated(gradient, incoming, rows[0], -rows[1])


def test_autograd_sees_the_write():
    """A tensor saved for another backward pass must not be used silently changed."""
    table = angles(ROWS, 8)
    x = randn(B, S, H, D).requires_grad_() * 1
    squared = (x * x).sum()
    fa.apply_rotary_emb(x, *table, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_positions_past_the_rows_take_the_last_and_read_nothing_else():
    table = angles(4, 8)
    guarded_table = tuple(guarded(part)[0] for part in table)  # NaN all around
    x = randn(B, S, H, D)
    out = fa.apply_rotary_emb(
        x[:, :3], *guarded_table, seqlen_offsets=torch.tensor([3, 2**40]), max_seqlen=None
    )
    positions = torch.tensor([[3, 3, 3], [3, 3, 3]])
    assert_rotated(out, x[:, :3], *at(table, positions))
    below = fa.apply_rotary_emb(x[:, :3], *guarded_table, seqlen_offsets=-2)
    assert_rotated(below, x[:, :3], *at(table, torch.tensor([0, 0, 0])))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, c: fa.apply_rotary_emb(x, c[:4], c[:4]), ValueError, "a row for each of 0 + 5"),
        (lambda x, c: fa.apply_rotary_emb(x, c, c, seqlen_offsets=9), ValueError, "9 + 5"),
        (lambda x, c: fa.apply_rotary_emb(x, c, c[:, :2]), ValueError, "cos and sin must agree"),
        (lambda x, c: fa.apply_rotary_emb(x, c[None], c[None]), ValueError, "cos must be [rows"),
        (lambda x, c: fa.apply_rotary_emb(x[0], c, c), ValueError, "without cu_seqlens"),
        (
            lambda x, c: fa.apply_rotary_emb(x, c, c, cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            "leading batch of 1",
        ),
        (
            lambda x, c: fa.apply_rotary_emb(x, c, c, seqlen_offsets=torch.ones(2)),
            TypeError,
            "seqlen_offsets must be an int32 or int64 tensor, got torch.float32",
        ),
        (
            lambda x, c: fa.apply_rotary_emb(x, c, c, seqlen_offsets=torch.ones(3).long()),
            ValueError,
            "positions must broadcast",
        ),
        (
            lambda x, c: fa.apply_rotary_emb(x, c[:0], c[:0], seqlen_offsets=torch.ones(2).long()),
            ValueError,
            "a row for each",
        ),
        (lambda x, c: fa.apply_rotary_emb_qkv_(x, c, c), ValueError, "with num_heads_q"),
        (
            lambda x, c: fa.apply_rotary_emb_qkv_(x, c, c, num_heads_q=2),
            ValueError,
            "an even number of the 3 heads",
        ),
        (lambda x, c: fa.apply_rotary_emb_qkv_(x, c, c, c, num_heads_q=1), ValueError, "together"),
        (lambda x, c: fa.apply_rotary_emb_kv_(x, c, c), ValueError, "kv must be"),
        (
            lambda x, c: fa.apply_rotary_emb(x.expand(7, B, S, H, D)[:, 0], c, c, inplace=True),
            ValueError,
            "overlap itself",
        ),
        (lambda x, c: fa.RotaryEmbedding(8, scale_base=512), NotImplementedError, "scale_base"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(randn(B, S, H, D), angles(ROWS, 8)[0])


# ------------------------------------------------------------------------------------- module


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 2**20, torch.tensor([3, 2040])], ids=["0", "far", "tensor"])
def test_module(interleaved, offset):
    """Right inside its rows and far outside, where flash-attn would build a longer table."""
    module = fa.RotaryEmbedding(8, base=5e5, interleaved=interleaved)
    style = "interleaved" if interleaved else "half"
    qkv = randn(B, S, 3, H, D)
    out = module(qkv.clone(), seqlen_offset=offset)
    positions = positions_of(offset)
    for index in range(2):
        expected, larger = oracle_rotate(
            qkv[:, :, index], positions.expand(B, S), module.inv_freq, style=style
        )
        assert_near_oracle(out[:, :, index], expected, larger)
    torch.testing.assert_close(out[:, :, 2], qkv[:, :, 2], rtol=0, atol=0)


def test_module_with_q_and_kv_of_other_lengths():
    module = fa.RotaryEmbedding(D)
    q, kv = randn(B, 2, 4, D), randn(B, S, 2, H, D, seed=1)
    q_out, kv_out = module(q.clone(), kv.clone(), 3, max_seqlen=9)
    for out, x, length in ((q_out, q, 2), (kv_out[:, :, 0], kv[:, :, 0], S)):
        positions = torch.arange(length).expand(B, length) + 3
        assert_near_oracle(out, *oracle_rotate(x, positions, module.inv_freq))


def test_module_shares_its_table_and_has_no_state():
    module = fa.RotaryEmbedding(D)
    assert module.rope is fa.RotaryEmbedding(D).rope
    assert module.rope is not fa.RotaryEmbedding(D, interleaved=True).rope
    assert not module.state_dict()
    before = dict(module.__dict__), module.rope.cos_sin_cache.data_ptr()
    module(randn(1, 2, 3, H, D), seqlen_offset=9000)
    assert (dict(module.__dict__), module.rope.cos_sin_cache.data_ptr()) == before


def test_module_made_on_meta_is_alive_after_to_empty():
    with torch.device("meta"):
        module = fa.RotaryEmbedding(D, base=777.0)
    module = module.to_empty(device="cpu")
    x = randn(1, S, 3, H, D)
    q = module(x.clone())[:, :, 0]
    positions = torch.arange(S).expand(1, S)
    assert_near_oracle(q, *oracle_rotate(x[:, :, 0], positions, module.inv_freq))


def test_gradients_through_the_module():
    module = fa.RotaryEmbedding(8)
    cos, sin = module.rope.cos_sin_cache.chunk(2, dim=-1)
    assert_gradients(
        lambda qkv: module(qkv, seqlen_offset=2),
        plain_packed((cos, sin), torch.arange(S) + 2),
        randn(B, S, 3, H, D),
    )


# ------------------------------------------------------------------------------------ compiled


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_serves_every_length():
    table = angles(64, 8)
    module = fa.RotaryEmbedding(D)

    def model(qkv: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        q = fa.apply_rotary_emb(qkv[:, :, 0], *table, True, False, offsets)
        return q, module(qkv * 2, seqlen_offset=offsets)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    offsets = torch.tensor([3, 50])
    for length in (5, 11, 23):
        qkv = randn(B, length, 3, H, D)
        torch._dynamo.mark_dynamic(qkv, 1)
        torch.testing.assert_close(compiled(qkv, offsets), model(qkv, offsets), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_gradients_in_place():
    table = angles(ROWS, 8)

    def model(x: Tensor) -> Tensor:
        return fa.apply_rotary_emb_qkv_(x * 2, *table, seqlen_offsets=1)

    function = plain_packed(table, torch.arange(S) + 1)
    assert_gradients(
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        lambda x: function(x * 2),
        randn(B, S, 3, H, D),
    )


def test_the_debug_switch_and_inference_mode_change_nothing():
    table, x = angles(ROWS, 8), randn(B, S, H, D)
    expected = fa.apply_rotary_emb(x, *table)
    with rc.debug():
        torch.testing.assert_close(fa.apply_rotary_emb(x, *table), expected, rtol=0, atol=0)
    with torch.inference_mode():
        out = fa.apply_rotary_emb(x.clone(), *table, inplace=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
