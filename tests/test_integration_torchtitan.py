"""``integrations.torchtitan``: the module in both formats and three scalings, and its functions."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.integrations import torchtitan as tt

from peer_formulas import angles, assert_gradients, assert_rotated, plain_rotate
from support import assert_near_oracle, oracle_rotate, randn

B, S, HQ, HK, D = 2, 5, 4, 3, 16


def qk(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return randn(B, S, HQ, D, dtype=dtype), randn(B, S, HK, D, seed=1, dtype=dtype)


def exact_frequencies(name: str) -> np.ndarray:
    """float64 frequencies of the configs below, from torchtitan's formulas."""
    f = 10000.0 ** -(np.arange(0, D, 2) / D)
    if name == "none":
        return f
    if name == "llama":
        factor, low, high, old = 8.0, 1.0, 4.0, 64
        wave = 2 * math.pi / f
        smooth = (old / wave - low) / (high - low)
        blend = (1 - smooth) * f / factor + smooth * f
        return np.where(wave > old / low, f / factor, np.where(wave < old / high, f, blend))
    fast, slow = 32.0, 1.0

    def lane(rotations: float) -> float:
        return D * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(10000))

    low, high = lane(fast), lane(slow)
    if name == "yarn":
        low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    return f / 40 * ramp + f * (1 - ramp)


CONFIGS = {
    "none": {},
    "llama": {"scaling": "llama", "original_max_position_embeddings": 64},
    "yarn": {"scaling": "yarn", "rope_factor": 40.0},
    "yarn_cos_sin": {  # gpt-oss
        "scaling": "yarn", "rope_factor": 40.0, "backend": "cos_sin", "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module(name, dtype):
    options = {"dim": D, "max_seq_len": 64, **CONFIGS[name]}
    module = tt.RoPE(tt.RoPE.Config(**options))
    np.testing.assert_allclose(module.rope.inv_freq.numpy(), exact_frequencies(name), rtol=1e-6)
    assert module.rope.config.attention_scaling == 1
    style = "half" if name == "yarn_cos_sin" else "interleaved"
    q, k = qk(dtype)
    positions = torch.tensor([[3, 1, 4, 1, 9000], [2, 7, 1, 8, 2]])
    for given, at in ((None, torch.arange(S).expand(B, S)), (positions, positions)):
        outs = module(q, k, given)
        for out, x in zip(outs, (q, k), strict=True):
            assert_near_oracle(out, *oracle_rotate(x, at, module.rope.inv_freq, style=style))


def test_tokens_without_a_batch_and_positions_of_one_batch():
    module = tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=64))
    q, k = qk()
    q_out, k_out = module(q[0], k[0])
    torch.testing.assert_close((q_out, k_out), tuple(x[0] for x in module(q, k)))
    positions = torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(module(q, k, positions), module(q, k, positions.expand(B, S)))


def test_classes_fix_the_format():
    """The newer torchtitan has one class a format, and its configs name none."""

    class Config:  # torchtitan's own, or anything with these fields
        dim, max_seq_len, theta, scaling = D, 64, 10000.0, "none"

    assert tt.ComplexRoPE(Config()).rope.config.style == "interleaved"
    assert tt.CosSinRoPE(Config()).rope.config.style == "half"
    assert tt.CosSinRoPE(Config()).rope is rc.get_rope(rc.RopeConfig(head_dim=D, max_position=64))


@pytest.mark.parametrize("backend", ["complex", "cos_sin"])
def test_cache_feeds_the_functions(backend):
    """What older torchtitan does: take the module's cache, and hand it to the function."""
    module = tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=64, backend=backend))
    q, k = qk()
    positions = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    cache = module.cache[:64]
    assert cache.shape == ((64, D // 2) if backend == "complex" else (64, 2 * D))
    apply = tt.apply_rotary_emb_complex if backend == "complex" else tt.apply_rotary_emb_cos_sin
    for given in (None, positions):
        expected = module(q, k, given)
        torch.testing.assert_close(apply(q, k, cache, given), expected, rtol=0, atol=0)
        rows = cache[:S] if given is None else cache[given]
        rows = rows[None, :, None] if given is None else rows[:, :, None]
        torch.testing.assert_close(module.apply_rotary_emb(q, k, rows), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [None, "one", "each"])
def test_functions(dtype, positions):
    cos, sin = angles(9, D // 2)
    q, k = qk(dtype)
    at = torch.arange(S)[None]
    given = None
    if positions is not None:
        given = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 100]])[: 1 if positions == "one" else B]
        at = given.clamp(max=8)
    rows = cos[at].unsqueeze(2), sin[at].unsqueeze(2)
    freqs_cis = torch.complex(cos, sin)
    for out, x in zip(tt.apply_rotary_emb_complex(q, k, freqs_cis, given), (q, k), strict=True):
        assert_rotated(out, x, *rows, interleaved=True)
    single = tt.apply_rotary_emb_single_complex(q, freqs_cis, given)
    assert_rotated(single, q, *rows, interleaved=True)
    cache = torch.cat((cos, cos, sin, sin), dim=-1)
    for out, x in zip(tt.apply_rotary_emb_cos_sin(q, k, cache, given), (q, k), strict=True):
        assert_rotated(out, x, *rows)


def test_gradients():
    module = tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=64))
    cos, sin = module.rope.cos_sin_cache[:S, None].chunk(2, dim=-1)
    assert_gradients(
        module, lambda q, k: [plain_rotate(x, cos, sin, interleaved=True) for x in (q, k)], *qk()
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    module = tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=64))
    cache, positions = module.cache, torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])

    def model(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = module(q, k, positions)
        return tt.apply_rotary_emb_complex(q, k, cache, positions)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qk()), model(*qk()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k, c: tt.apply_rotary_emb_complex(q, k, c[:3]), ValueError, "5 tokens, got 3"),
        (
            lambda q, k, c: tt.apply_rotary_emb_complex(q, k, c, torch.ones(1, S)),
            TypeError,
            "positions must be an int32 or int64 tensor",
        ),
        (
            lambda q, k, c: tt.RoPE(
                tt.RoPE.Config(dim=D, max_seq_len=8, scaling="llama", backend="cos_sin")
            ),
            NotImplementedError,
            "'llama'",
        ),
        (
            # older torchtitan's gpt-oss config
            lambda q, k, c: tt.RoPE(
                tt.RoPE.Config(
                    dim=D, max_seq_len=8, scaling="yarn", rope_factor=32, beta_fast=1, beta_slow=32
                )
            ),
            ValueError,
            "beta_fast must be at least beta_slow",
        ),
        (
            lambda q, k, c: tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=8, scaling="ntk")),
            ValueError,
            "config.scaling must be",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(*qk(), torch.complex(*angles(9, D // 2)))
