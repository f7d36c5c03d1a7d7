"""``integrations.torch_nn``: the signatures proposed for torch itself."""

from __future__ import annotations

import re

import pytest
import torch

from rope_compile.integrations import torch_nn

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import assert_near_oracle, oracle_rotate, randn

B, H, S, D = 2, 3, 5, 12


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape", [(S,), (1, S), (B, 1, S), (H, S), (B, H, S), (B, H, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcast_rows(shape, interleaved, dtype):
    """Anything that broadcasts to ``[B, H, S, D / 2]``, rows of each head among it."""
    table = angles(*shape, D // 2)
    x = randn(B, S, H, D, dtype=dtype).transpose(1, 2)
    out = torch_nn.rotary_embedding(x, *table, interleaved=interleaved)
    assert_rotated(out, x, *table, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_position_ids(interleaved):
    table, x = angles(9, D // 2), randn(B, H, S, D)
    ids = torch.tensor([[3, 1, 4, 1, 5], [2, -7, 1, 8, 100]], dtype=torch.int32)
    out = torch_nn.rotary_embedding(x, *table, ids, interleaved=interleaved)
    rows = [part[ids.clamp(0, 8)].unsqueeze(1) for part in table]
    assert_rotated(out, x, *rows, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_module(interleaved):
    module = torch_nn.RotaryEmbedding(D, 64, 500, interleaved=interleaved)
    x, ids = randn(B, H, S, D), torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 9000]])
    for given, positions in ((None, torch.arange(S).expand(B, S)), (ids, ids)):
        out = module(x, given).transpose(1, 2)
        style = "interleaved" if interleaved else "half"
        expected = oracle_rotate(x.transpose(1, 2), positions, module.rope.inv_freq, style=style)
        assert_near_oracle(out, *expected)
    assert not module.state_dict()
    assert module.rope is torch_nn.RotaryEmbedding(D, 64, 500.0, interleaved=interleaved).rope


def test_gradients():
    table, per_head, ids = angles(9, D // 2), angles(H, S, D // 2), torch.tensor([[3, 1, 4, 1, 5]])
    x = randn(B, H, S, D)
    rows = [part[ids].unsqueeze(1) for part in table]
    assert_gradients(
        lambda x: torch_nn.rotary_embedding(x, *table, ids.expand(B, S)),
        lambda x: plain_rotate(x, *rows),
        x,
    )
    assert_gradients(
        lambda x: torch_nn.rotary_embedding(x, *per_head, interleaved=True),
        lambda x: plain_rotate(x, *per_head, interleaved=True),
        x,
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    table, ids = angles(9, D // 2), torch.tensor([[3, 1, 4, 1, 5]] * B)
    module = torch_nn.RotaryEmbedding(D)

    def model(x):
        return module(torch_nn.rotary_embedding(x, *table, ids), ids)

    x = randn(B, H, S, D)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, c: torch_nn.rotary_embedding(x, c[..., :2], c[..., :2]), ValueError, "half as"),
        (lambda x, c: torch_nn.rotary_embedding(x[0], c, c), ValueError, "x must be [batch"),
        (lambda x, c: torch_nn.rotary_embedding(x, c[None, None, None], c[None, None, None]),
         ValueError, "cos and sin must broadcast to (2, 3, 5)"),
        (lambda x, c: torch_nn.rotary_embedding(x, c, c), ValueError, "positions must broadcast"),
        (lambda x, c: torch_nn.rotary_embedding(x, c[None], c[None], torch.ones(B, S).long()),
         ValueError, "cos must be [rows"),
        (lambda x, c: torch_nn.rotary_embedding(x, c, c, torch.ones(B, S).bool()),
         TypeError, "position_ids must be an int32 or int64"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(randn(B, H, S, D), angles(9, D // 2)[0])
