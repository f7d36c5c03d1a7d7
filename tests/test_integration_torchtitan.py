"""``integrations.torchtitan``: the module in both formats and three scalings, its form for three
axes, and its functions."""

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
from support import assert_near_oracle, generator, oracle_rotate, randn

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


@pytest.mark.parametrize("backend", ["complex", "cos_sin"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_without_a_batch_at_positions(backend, dtype):
    module = tt.RoPE(tt.RoPE.Config(dim=D, max_seq_len=64, backend=backend))
    q, k = qk(torch.bfloat16)
    q, k = q[0], k[0].transpose(0, 1).contiguous().transpose(0, 1)
    positions = torch.tensor([3, 63, 64, 9000, -2], dtype=dtype)
    style = "interleaved" if backend == "complex" else "half"
    for out, x in zip(module(q, k, positions), (q, k), strict=True):
        assert_near_oracle(out, *oracle_rotate(x, positions, module.rope.inv_freq, style=style))


# Lanes of time, height, width in turn, until height and width are used up.
MROPE = ([4, 2, 2], (0, 1, 2, 0, 1, 2, 0, 0))


def mrope(section: list[int] = MROPE[0]) -> tt.MRoPE:
    return tt.MRoPE(tt.MRoPE.Config(dim=D, max_seq_len=64, mrope_section=section))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [(S,), (B, S), (3,), (B, 3), (3, 3), (0,)], ids=str)
def test_three_axes(tokens, dtype):
    """The axis of positions is the last; of three tokens nothing but the values tells it."""
    module = mrope()
    q = randn(*tokens, HQ, D, dtype=dtype)
    k = randn(*tokens, HK, 2 * D, seed=1, dtype=dtype)[..., ::2]
    positions = torch.randint(-9, 99, (*tokens, 3), generator=generator(), dtype=torch.int32)
    lanes = MROPE[1]
    for out, x in zip(module(q, k, positions), (q, k), strict=True):
        exact = oracle_rotate(
            x, positions.movedim(-1, 0), module.rope.inv_freq, style="half", lane_axes=lanes
        )
        assert_near_oracle(out, *exact)
    if tokens[-1] == 3:  # the checker tells the axis from the tokens
        wrong, _ = oracle_rotate(
            q, positions.transpose(-1, -2).movedim(-1, 0), module.rope.inv_freq, lane_axes=lanes
        )
        assert not torch.allclose(module(q, k, positions)[0].double(), wrong, atol=0.1)


@pytest.mark.parametrize("given", [None, torch.arange(S) * 7, torch.arange(B * S).view(B, S)])
def test_text_of_three_axes_is_that_of_one(given):
    """Also for three tokens, whose positions look like the axes of one."""
    plain = tt.CosSinRoPE(tt.RoPE.Config(dim=D, max_seq_len=64))
    torch.testing.assert_close(mrope()(*qk(), given), plain(*qk(), given), rtol=0, atol=0)
    q, k = randn(3, 3, HQ, D), randn(3, 3, HK, D, seed=1)
    text = torch.tensor([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
    torch.testing.assert_close(mrope()(q, k, text), plain(q, k, text), rtol=0, atol=0)


def test_mrope_config():
    assert tt.MRoPE.Config(dim=128, max_seq_len=8).mrope_section == [24, 20, 20]
    module = tt.MRoPE(tt.MRoPE.Config(dim=128, max_seq_len=8, theta=5e6))
    config = module.rope.config
    assert config.axes == rc.InterleavedAxes((24, 20, 20))
    assert (config.style, config.base) == ("half", 5e6)
    assert module.cache.shape == (128, 256)

    class Config:  # torchtitan's own, or anything with these fields
        dim, max_seq_len, theta, scaling, mrope_section = D, 64, 10000.0, "none", MROPE[0]

    assert tt.MRoPE(Config()).rope is mrope().rope


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


def test_gradients_of_three_axes():
    module, positions = mrope(), torch.randint(0, 64, (B, S, 3), generator=generator())
    lanes = torch.tensor(MROPE[1])
    at = positions[..., lanes].double() * module.rope.inv_freq.double()
    rows = at.cos().unsqueeze(-2), at.sin().unsqueeze(-2)
    assert_gradients(
        lambda q, k: module(q, k, positions),
        lambda q, k: [plain_rotate(x, *rows) for x in (q, k)],
        *qk(),
    )


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

    axes, three = mrope(), torch.stack((positions, positions + 1, positions * 3), dim=-1)

    def model(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = module(q, k, positions)
        q, k = axes(*axes(q, k, three), positions)
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
            # older torchtitan's order of three-axis positions
            lambda q, k, c: mrope()(q, k, torch.zeros(3, B, S, dtype=torch.int64)),
            ValueError,
            "positions must be [*tokens, 3], the axis last, or [*tokens], got (3, 2, 5)",
        ),
        (lambda q, k, c: mrope()(q, k, torch.ones(B, S, 3)), TypeError, "positions must be int"),
        (lambda q, k, c: mrope([4, 4]), ValueError, "must have 3 sections, got (4, 4)"),
        (lambda q, k, c: mrope([4, 4, 4]), ValueError, "must share out rotary_dim / 2 = 8 lanes"),
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
