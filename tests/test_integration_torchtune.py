"""``integrations.torchtune``: one tensor, interleaved, on the shared table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import rope_compile as rc
from rope_compile.integrations import torchtune as tu

from peer_formulas import assert_gradients, assert_rotated, plain_rotate
from support import assert_near_oracle, oracle_rotate, oracle_table, randn

B, S, H, D = 2, 5, 3, 16


@pytest.mark.parametrize("input_pos", [None, "one", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(input_pos, dtype):
    module = tu.RotaryPositionalEmbeddings(D, 64, base=500_000)
    x = randn(B, H, S, D, dtype=dtype).transpose(1, 2)
    positions = torch.arange(S)
    if input_pos is not None:
        positions = torch.tensor([[3, 1, 4, 1, 9000], [2, 7, 1, 8, 2]], dtype=torch.int32)
        positions = positions[0] if input_pos == "one" else positions
    out = module(x, input_pos=None if input_pos is None else positions)
    f = 500_000.0 ** -(np.arange(0, D, 2) / D)
    np.testing.assert_allclose(module.rope.inv_freq.numpy(), f, rtol=1e-6)
    expected = oracle_rotate(x, positions.expand(B, S), module.rope.inv_freq, style="interleaved")
    assert_near_oracle(out, *expected)


def test_cache_has_torchtunes_form():
    """``[rows, dim / 2, 2]``: what its own forward would gather rotates as the module does."""
    module, x = tu.RotaryPositionalEmbeddings(D, 70), randn(B, S, H, D)
    assert module.cache.shape == (128, D // 2, 2)
    assert module.cache.dtype == torch.float32
    table = oracle_table(128, module.rope.inv_freq).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(module.cache, table, rtol=0, atol=1e-7)
    cos, sin = module.cache[:S, None].unbind(-1)
    assert_rotated(module(x), x, cos, sin, interleaved=True)
    before = module(x)
    module.cache.zero_()  # a copy
    torch.testing.assert_close(module(x), before, rtol=0, atol=0)


def test_input_pos_is_a_keyword():
    module = tu.RotaryPositionalEmbeddings(D, 64)
    with pytest.raises(TypeError, match="positional"):
        module(randn(B, S, H, D), torch.arange(S))


def test_llama3():
    module = tu.Llama3ScaledRoPE(D, 64, 10_000, 8, 1, 4, 64)
    f = 10_000.0 ** -(np.arange(0, D, 2) / D)
    wave = 2 * math.pi / f
    smooth = (64 / wave - 1) / (4 - 1)
    blend = (1 - smooth) * f / 8 + smooth * f
    exact = np.where(wave > 64, f / 8, np.where(wave < 16, f, blend))
    np.testing.assert_allclose(module.rope.inv_freq.numpy(), exact, rtol=1e-6)
    x = randn(B, S, H, D)
    positions = torch.arange(S).expand(B, S)
    expected = oracle_rotate(x, positions, module.rope.inv_freq, style="interleaved")
    assert_near_oracle(module(x), *expected)
    default = tu.Llama3ScaledRoPE(128)
    assert default.rope.config.scaling == rc.Llama3Scaling(
        factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=8192
    )
    assert (
        default.rope.config.base == 10_000
    )  # torchtune's default; Llama-3.1 itself passes 500_000


def test_rope_init_after_meta_construction():
    """What recipes do: build on meta, then call rope_init under the target device."""
    with torch.device("meta"):
        module = tu.RotaryPositionalEmbeddings(D, 64, 333)
    assert module.rope.device.type == "meta"
    with torch.device("cpu"):
        module.rope_init()
    assert module.rope is tu.RotaryPositionalEmbeddings(D, 64, 333).rope
    assert not module.state_dict()
    before = module.rope
    module.reset_parameters()
    assert module.rope is before


def test_gradients():
    module = tu.RotaryPositionalEmbeddings(D, 64)
    cos, sin = module.rope.cos_sin_cache[:S, None].chunk(2, dim=-1)
    assert_gradients(
        module, lambda x: plain_rotate(x, cos, sin, interleaved=True), randn(B, S, H, D)
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    module = tu.Llama3ScaledRoPE(D, 64)
    positions, x = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]), randn(B, S, H, D)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    torch.testing.assert_close(
        compiled(x, input_pos=positions), module(x, input_pos=positions), rtol=0, atol=0
    )
