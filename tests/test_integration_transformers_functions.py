"""transformers' functions under their own names: signatures, numbers, dtypes, traps."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl

from rope_compile.integrations import transformers as ours

from support import randn

B, S, D = 2, 7, 16
THEIRS = {
    "apply_rotary_pos_emb": modeling_llama.apply_rotary_pos_emb,
    "apply_rotary_pos_emb_interleave": modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
    "apply_rotary_pos_emb_vision": modeling_qwen2_vl.apply_rotary_pos_emb_vision,
}


def plain(name: str):
    """transformers' function, without what a decorator has made of it."""
    return inspect.unwrap(THEIRS[name])


def arguments(name: str, unsqueeze_dim: int = 1, dtype=torch.float32, table=torch.float32):
    """q and k as views that are not contiguous, cos and sin ``cat(freqs, freqs)``."""
    lead = (S,) if name.endswith("vision") else (B, S)
    q, k = (randn(*lead, heads, 2 * D, seed=heads, dtype=dtype)[..., ::2] for heads in (4, 2))
    if unsqueeze_dim == 1 and len(lead) == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = 3 * randn(*lead, D // 2, seed=9)
    both = torch.cat((angles, angles), -1)
    return q, k, both.cos().to(table), both.sin().to(table)


def options(name: str, unsqueeze_dim: int) -> dict[str, int]:
    return {} if name.endswith("vision") else {"unsqueeze_dim": unsqueeze_dim}


@pytest.mark.parametrize("name", THEIRS)
def test_signature(name: str) -> None:
    found, wanted = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(ours, name), plain(name))
    )
    assert found == wanted


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", THEIRS)
def test_numbers_and_dtypes(name: str, dtype, table, unsqueeze_dim: int) -> None:
    """float64 of what was given, rounded once; dtypes as transformers gives them."""
    args = arguments(name, unsqueeze_dim, dtype, table)
    before = [x.clone() for x in args]
    outs = getattr(ours, name)(*args, **options(name, unsqueeze_dim))
    theirs = plain(name)(*args, **options(name, unsqueeze_dim))
    # The vision function casts to float32 by name; in float64 it is the plain one.
    exact_name = "apply_rotary_pos_emb" if name.endswith("vision") else name
    at = {"unsqueeze_dim": -2} if name.endswith("vision") else options(name, unsqueeze_dim)
    exact = plain(exact_name)(*(x.double() for x in args), **at)
    for out, peer, expected in zip(outs, theirs, exact, strict=True):
        assert out.dtype == peer.dtype
        assert out.shape == peer.shape
        step = max(torch.finfo(out.dtype).eps, 1e-6)
        assert ((out.double() - expected).abs() <= step * expected.abs() + 2e-6).all()
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))


@pytest.mark.parametrize("name", THEIRS)
def test_gradients(name: str) -> None:
    found = []
    for function in (getattr(ours, name), plain(name)):
        q, k, cos, sin = arguments(name)
        q, k = (x.detach().requires_grad_() for x in (q, k))
        loss = sum(x.pow(3).sum() for x in function(q, k, cos, sin))
        found.append(torch.autograd.grad(loss, (q, k)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", THEIRS)
def test_compiled_whole(name: str) -> None:
    args = arguments(name)
    compiled = torch.compile(getattr(ours, name), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*args), getattr(ours, name)(*args), strict=True):
        assert torch.equal(a, b)


def test_traps() -> None:
    """Exchanged cos and sin are another rotation; position_ids are not read; halves may differ."""
    q, k, cos, sin = arguments("apply_rotary_pos_emb")
    right = ours.apply_rotary_pos_emb(q, k, cos, sin)[0]
    assert not torch.allclose(ours.apply_rotary_pos_emb(q, k, sin, cos)[0], right)
    interleave = ours.apply_rotary_pos_emb_interleave
    ids = torch.full((B, S), 10**6)
    assert torch.equal(interleave(q, k, cos, sin, ids)[0], interleave(q, k, cos, sin)[0])
    cos = cos + torch.arange(D) / D
    for a, b in zip(
        ours.apply_rotary_pos_emb(q, k, cos, sin),
        plain("apply_rotary_pos_emb")(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cos must have the width of q, 16, got 8"):
        ours.apply_rotary_pos_emb(q, k, cos[..., :8], sin[..., :8])


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_halves_given_apart(conj: bool, in_place: bool) -> None:
    """The hub's kernel: out may be the input."""
    x = randn(B, S, 4, D)
    x1, x2 = x.chunk(2, -1)
    angles = 3 * randn(S, 1, D // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    turn = -sin if conj else sin
    expected = torch.cat((x1 * cos - x2 * turn, x2 * cos + x1 * turn), -1)
    out = x if in_place else torch.full_like(x, float("nan"))
    assert ours.apply_rotary(x1, x2, cos, sin, *out.chunk(2, -1), conj) is None
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


TYPES: dict[str, dict[str, object]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64, "factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def test_types_are_those_of_transformers() -> None:
    assert set(TYPES) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("length", [None, 32, 1000])
@pytest.mark.parametrize("kind", TYPES)
def test_frequencies_by_type(kind: str, length: int | None) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **TYPES[kind]},
    )  # fmt: skip
    inv_freq, factor = ours.rope_init(config, "cpu", length)
    expected, wanted = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    assert isinstance(inv_freq, Tensor)
    assert torch.equal(inv_freq, expected)
    assert factor == pytest.approx(wanted, rel=1e-12)


def test_a_layer_without_rope_has_no_frequencies() -> None:
    parameters = {"full": {"rope_theta": 1e4, "rope_type": "default"}, "none": None}
    config = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 128,
              "rope_parameters": parameters, "layer_types": ["full", "none"]}  # fmt: skip
    with pytest.raises(ValueError, match="layer_type must be one with RoPE, got 'none'"):
        ours.rope_init(config, layer_type="none")
