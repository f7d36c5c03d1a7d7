"""``integrations.fla`` and ``integrations.quack``: flash-attn's core in their argument orders."""

from __future__ import annotations

import pytest
import torch

from rope_compile.integrations import fla, flash_attn, quack

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import randn, run_child

B, S, H, D, ROWS = 2, 5, 3, 16, 13


def rows(table, positions):
    return tuple(part[positions].unsqueeze(-2) for part in table)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 3])
def test_fla(inplace, interleaved, half):
    table, x, offsets = angles(ROWS, half), randn(B, S, H, D), torch.tensor([2, 7])
    given = x.clone()
    out = fla.rotary_embedding(given, *table, interleaved, inplace, offsets)
    positions = torch.arange(S) + offsets[:, None]
    assert_rotated(out, x, *rows(table, positions), interleaved=interleaved)
    assert (out.data_ptr() == given.data_ptr()) == inplace


def test_fla_packed_sequences_come_in_a_batch_of_one():
    table, x = angles(ROWS, 8), randn(1, 9, H, D)
    cu_seqlens = torch.tensor([0, 4, 4, 9])
    out = fla.rotary_embedding(x, *table, False, False, torch.tensor([1, 5, 0]), cu_seqlens, None)
    positions = torch.tensor([1, 2, 3, 4, 0, 1, 2, 3, 4])
    assert_rotated(out, x, *rows(table, positions))
    with pytest.raises(ValueError, match="leading batch of 1"):
        fla.rotary_embedding(x.expand(2, -1, -1, -1), *table, cu_seqlens=cu_seqlens)


def test_fla_left_padding_takes_row_0():
    """Theirs skips those tokens; ours rotates them as position 0, which no table row leaves."""
    cos, sin = angles(ROWS, 8)
    cos[0], sin[0] = 1, 0  # as every table of positions has it
    x = randn(B, S, H, D)
    out = fla.rotary_embedding(x, cos, sin, seqlen_offsets=torch.tensor([-3, 0]))
    positions = (torch.arange(S) + torch.tensor([[-3], [0]])).clamp(min=0)
    assert_rotated(out, x, *rows((cos, sin), positions))
    torch.testing.assert_close(out[0, :4], x[0, :4], rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("conjugate", [False, True])
def test_quack(inplace, conjugate):
    table, x = angles(ROWS, 8), randn(B, S, H, D, dtype=torch.bfloat16)
    offsets = torch.tensor([2, 7], dtype=torch.int32)
    given = x.clone()
    out = quack.apply_rotary(given, *table, offsets, None, None, True, inplace, conjugate)
    cos, sin = rows(table, torch.arange(S) + offsets[:, None])
    assert_rotated(out, x, cos, -sin if conjugate else sin, interleaved=True)
    assert (out.data_ptr() == given.data_ptr()) == inplace
    if not conjugate:
        same = quack.apply_rotary_emb(x.clone(), *table, True, inplace, offsets)
        torch.testing.assert_close(same, out, rtol=0, atol=0)


def test_quack_packed_without_offsets():
    table, x = angles(ROWS, 8), randn(9, H, D)
    out = quack.apply_rotary(x, *table, None, torch.tensor([0, 4, 4, 9], dtype=torch.int32), 5)
    assert_rotated(out, x, *rows(table, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])))


def test_the_three_order_their_arguments_differently():
    table, x, offsets = angles(ROWS, 8), randn(B, S, H, D), torch.tensor([2, 7])
    expected = flash_attn.apply_rotary_emb(x, *table, True, False, offsets)
    torch.testing.assert_close(fla.rotary_embedding(x, *table, True, False, offsets), expected)
    torch.testing.assert_close(quack.apply_rotary(x, *table, offsets, interleaved=True), expected)
    # The order of quack's kernel handed to fla: the offsets are then a flag, and no offsets.
    with pytest.raises(RuntimeError, match="ambiguous"):
        fla.rotary_embedding(x, *table, offsets)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients(inplace):
    table = angles(ROWS, 3)
    offsets = torch.tensor([2, 7])
    at = rows(table, torch.arange(S) + offsets[:, None])
    for function in (
        lambda x: fla.rotary_embedding(x, *table, True, inplace, offsets),
        lambda x: quack.apply_rotary(x, *table, offsets, None, None, True, inplace),
    ):
        assert_gradients(
            function, lambda x: plain_rotate(x, *at, interleaved=True), randn(B, S, H, D)
        )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    table, x, offsets = angles(ROWS, 8), randn(B, S, H, D), torch.tensor([2, 7])

    def model(x):
        y = fla.rotary_embedding(x, *table, True, False, offsets)
        return quack.apply_rotary(y, *table, offsets)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_adapters_import_neither_their_peer_nor_triton():
    names = [
        "diffusers", "fla", "flash_attn", "liger", "quack", "rotary_embedding_torch",
        "torch_nn", "torchtitan", "torchtune", "transformer_engine", "unsloth",
    ]  # fmt: skip
    peers = [*names, "liger_kernel", "triton", "einops", "transformers"]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module('rope_compile.integrations.' + name)\n"
        f"print(sorted(set({peers!r}) & set(sys.modules)))"
    )
    assert run_child("-c", code).strip() == "[]"
