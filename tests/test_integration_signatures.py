"""What every adapter has in common: its peer's signatures, and tables in the dtype of a model."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import Tensor

from rope_compile.integrations import (
    aiter,
    diffusers,
    fla,
    flash_attn,
    liger,
    quack,
    torch_nn,
    unsloth,
)

from peer_formulas import angles, assert_rotated
from support import randn

# -------------------------------------------------------------------- signatures

GET_ROPE = (
    "get_rope(head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, "
    "dtype=None, partial_rotary_factor=1.0, dual_chunk_attention_config=None)"
)
AITER_FLAGS = "rotate_style, reuse_freqs_front_part, nope_first"

# The peers' own, as released. Ours may add trailing arguments that have defaults.
SIGNATURES = {
    "sglang": [
        GET_ROPE,
        "get_rope_wrapper(head_size, rotary_dim, max_position, base, is_neox_style=True, "
        "rope_scaling=None, dtype=None, partial_rotary_factor=1.0, device=None)",
        "get_rope_cpu(head_size, rotary_dim, max_position, base, is_neox_style=True, "
        "rope_scaling=None, dtype=None, partial_rotary_factor=1.0, device=None)",
        "RotaryEmbedding(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, "
        "dtype, position_start=0)",
        "RotaryEmbedding.forward(positions, query, key, offsets=None, "
        "fused_set_kv_buffer_arg=None)",
        "RotaryEmbedding._ensure_cos_sin_cache_length(needed_max_pos)",
        "RotaryEmbedding.get_cos_sin(seqlen)",
        "RotaryEmbedding.get_cos_sin_with_position(positions)",
        "RotaryEmbedding.cos_sin_cache_as(dtype)",
        "MRotaryEmbedding(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, "
        "dtype, mrope_section=None, mrope_interleaved=False, mrope_interleaved_glm=False)",
        "apply_rope_with_cos_sin_cache_inplace(q, k, cos_sin_cache, positions, *, is_neox, "
        "rope_dim=0, fused_args=None)",
        "apply_rope_inplace(q, k, cos_sin_cache, positions, *, is_neox, rope_dim=0)",
        "apply_rope_inplace_with_kvcache(q, k, v, k_cache, v_cache, cos_sin_cache, positions, "
        "out_loc, *, is_neox, rope_dim=0)",
        "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox=True)",
        "get_rotary_pos_embed(rope_sizes, hidden_size, heads_num, rope_dim_list, rope_theta, "
        "theta_rescale_factor=1.0, interpolation_factor=1.0, shard_dim=0, dtype=float32, "
        "start_frame=0, device=None)",
    ],
    "vllm": [
        "get_rope(head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None, "
        "dual_chunk_attention_config=None, mrope_positions_factor=4)",
        GET_ROPE.replace("get_rope", "get_rope_v0"),  # of older vLLMs and their forks
        "RotaryEmbedding(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, "
        "dtype, init_cache=True)",
        "RotaryEmbedding.forward(positions, query, key=None)",
        "RotaryEmbedding.forward_native(positions, query, key=None)",
        "RotaryEmbedding.forward_cuda(positions, query, key=None)",
        "RotaryEmbedding.forward_hip(positions, query, key=None)",
        "RotaryEmbedding.forward_xpu(positions, query, key=None)",
        "RotaryEmbedding.forward_cpu(positions, query, key=None)",
        "RotaryEmbedding.forward_static(positions, query, key, head_size, rotary_dim, "
        "cos_sin_cache, is_neox_style)",
        "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, "
        "rope_dim_offset=0, inverse=False)",
        "ApplyRotaryEmb(enforce_enable=False, is_neox_style=True, enable_fp32_compute=False)",
        "ApplyRotaryEmb.forward(x, cos, sin)",
    ],
    "flashinfer": [
        *(
            f"apply_rope_with_cos_sin_cache{suffix}(positions, query, key, head_size, "
            "cos_sin_cache, is_neox=True)"
            for suffix in ("", "_inplace")
        ),
        *(
            f"apply_rope{name}(q, k, {where}, rotary_dim=None, interleave=False, rope_scale=1, "
            "rope_theta=1e4)"
            for name, where in (
                ("", "indptr, offsets"),
                ("_inplace", "indptr, offsets"),
                ("_pos_ids", "pos_ids"),
                ("_pos_ids_inplace", "pos_ids"),
            )
        ),
        *(
            f"apply_llama31_rope{name}(q, k, {where}, rotary_dim=None, interleave=False, "
            "rope_scale=8, rope_theta=5e5, low_freq_factor=1, high_freq_factor=4, "
            "old_context_len=8192)"
            for name, where in (
                ("", "indptr, offsets"),
                ("_inplace", "indptr, offsets"),
                ("_pos_ids", "pos_ids"),
                ("_pos_ids_inplace", "pos_ids"),
            )
        ),
    ],
    "liger": [
        "liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1)",
        "liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1)",
        "liger_rotary_pos_emb_vision(q, k, cos, sin)",
        "liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis)",
        "liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci)",
    ],
    "flash_attn": [
        "apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
        "cu_seqlens=None, max_seqlen=None)",
        "apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, "
        "seqlen_offsets=0, num_heads_q=None)",
        "apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)",
        "apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, "
        "interleaved=False, inplace=False, conjugate=False)",
    ],
    "fla": [
        "rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
        "cu_seqlens=None, chunk_indices=None)",
    ],
    "quack": [
        "apply_rotary(x, cos, sin, seqlen_offsets=None, cu_seqlens=None, max_seqlen=None, "
        "interleaved=False, inplace=False, conjugate=False)",
    ],
    "transformer_engine": [
        "apply_rotary_pos_emb(t, freqs, tensor_format='sbhd', start_positions=None, "
        "interleaved=False, fused=False, cu_seqlens=None, cp_size=1, cp_rank=0)",
        "apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, qkv_split_arg_list, "
        "tensor_format='sbhd', start_positions=None, interleaved=False, cu_seqlens=None, "
        "cp_size=1, cp_rank=0)",
    ],
    "aiter": [
        GET_ROPE,
        f"rope_fwd(input, freqs, {AITER_FLAGS}, transpose_output=False)",
        f"rope_fwd_inplace(input, freqs, {AITER_FLAGS})",
        f"rope_bwd(output_grads, freqs, {AITER_FLAGS}, transpose_output=False)",
        f"rope_2c_fwd(input_x, input_y, freqs, {AITER_FLAGS}, transpose_output=False)",
        f"rope_2c_fwd_inplace(input_x, input_y, freqs, {AITER_FLAGS})",
        f"rope_2c_bwd(output_grads_x, output_grads_y, freqs, {AITER_FLAGS}, "
        "transpose_output=False)",
        f"rope_cached_2c_bwd(output_grads_x, output_grads_y, cos, sin, {AITER_FLAGS}, "
        "transpose_output=False)",
        "rope_cached_positions_offsets_2c_fwd_inplace(input_x, input_y, cos, sin, positions, "
        f"offsets, {AITER_FLAGS})",
        f"rope_thd_fwd(input, cu_seqlens, freqs, {AITER_FLAGS})",
    ],
    "torchtitan": [
        "RoPE(config)",
        "RoPE.forward(query, key, positions=None)",
        "MRoPE(config)",
        "MRoPE.forward(query, key, positions=None)",
    ],
    "torchtune": [
        "RotaryPositionalEmbeddings(dim, max_seq_len=4096, base=10000)",
        "RotaryPositionalEmbeddings.forward(x, *, input_pos=None)",
    ],
    "unsloth": ["fast_rope_embedding(Q, K, cos, sin, rope_embedding_indices=None)"],
    "rotary_embedding_torch": [
        "apply_rotary_emb(freqs, t, start_index=0, scale=1., seq_dim=-2, freqs_seq_dim=None)",
        "RotaryEmbedding.rotate_queries_or_keys(t, seq_dim=None, offset=0, scale=None)",
    ],
    "diffusers": [
        "apply_rotary_emb(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2)",
    ],
    "torch_nn": [
        "rotary_embedding(x, cos, sin, position_ids=None, *, interleaved=False)",
        "RotaryEmbedding(dim, max_seq_len=2048, base=10000)",
    ],
}

# Required there; here None stands for the default dtype, which changes no number.
OPTIONAL_DTYPE = {
    ("sglang", "RotaryEmbedding"),
    ("sglang", "MRotaryEmbedding"),
    ("vllm", "RotaryEmbedding"),
}


def signature_of(text: str) -> tuple[str, inspect.Signature]:
    """Name and signature of ``name(arguments)``."""
    name, arguments = text.removesuffix(")").split("(", 1)
    function = eval(f"lambda {arguments}: None", {"float32": torch.float32})
    return name, inspect.signature(function)


def assert_fits(
    actual: inspect.Signature, wanted: inspect.Signature, *, optional: tuple[str, ...] = ()
) -> None:
    """Every call that ``wanted`` takes means the same to ``actual``: equal names, kinds, order,
    defaults; more arguments only behind them and with defaults; ``optional`` ones may have None."""
    ours = [p for p in actual.parameters.values() if p.name != "self"]
    theirs = list(wanted.parameters.values())
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    for mine, other in zip(ours, theirs, strict=False):
        if mine.name in optional and other.default is other.empty and mine.default is None:
            continue
        assert isinstance(mine.default, bool) == isinstance(other.default, bool), mine
        assert mine.default == other.default, mine
    for added in ours[len(theirs) :]:
        assert added.default is not added.empty, f"{added} has no default"


@pytest.mark.parametrize(
    ("package", "text"),
    [(package, text) for package, texts in SIGNATURES.items() for text in texts],
    ids=lambda value: value.split("(")[0],
)
def test_signature(package: str, text: str):
    name, wanted = signature_of(text)
    found: object = importlib.import_module(f"rope_compile.integrations.{package}")
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    optional = ("dtype",) if (package, name) in OPTIONAL_DTYPE else ()
    assert_fits(inspect.signature(found), wanted, optional=optional)


WANTED = "f(a, b, flag=False, n=0, *, mode, dtype)"


@pytest.mark.parametrize(
    "twin",
    [
        "f(a, b, flag=False, n=0, *, mode, dtype)",
        "f(a, b, flag=False, n=0.0, *, mode, dtype=None)",
        "f(self, a, b, flag=False, n=0, *, mode, dtype, device=None)",
    ],
)
def test_the_comparison_accepts(twin: str):
    assert_fits(signature_of(twin)[1], signature_of(WANTED)[1], optional=("dtype",))


@pytest.mark.parametrize(
    "twin",
    [
        "f(b, a, flag=False, n=0, *, mode, dtype)",  # another order
        "f(a, q, flag=False, n=0, *, mode, dtype)",  # another name
        "f(a, b, flag=True, n=0, *, mode, dtype)",  # another default
        "f(a, b, flag=0, n=0, *, mode, dtype)",  # equal, of another type
        "f(a, b, flag=False, n=False, *, mode, dtype)",
        "f(a, b=None, flag=False, n=0, *, mode, dtype)",  # one where there is none
        "f(a, b, flag, n, *, mode, dtype)",  # none where there is one
        "f(a, b, flag=False, *, n=0, mode, dtype)",  # another kind
        "f(a, b, /, flag=False, n=0, *, mode, dtype)",
        "f(a, b, flag=False, n=0, mode=None, *, dtype)",
        "f(a, b, flag=False, n=0, *, mode)",  # one missing
        "f(a, b, flag=False, n=0, extra=None, *, mode, dtype)",  # one in between
        "f(a, b, flag=False, n=0, *, mode, dtype, extra)",  # one more to give
        "f(a, b, flag=False, n=0, *, mode=None, dtype)",  # None where it is not allowed
        "f(a, b, flag=False, n=0, *, mode, dtype=0)",  # something else than None
        "f(*args, **kwargs)",
    ],
)
def test_the_comparison_refuses(twin: str):
    with pytest.raises(AssertionError):
        assert_fits(signature_of(twin)[1], signature_of(WANTED)[1], optional=("dtype",))


# -------------------------------------------------------------------- tables in a model's dtype

B, S, H, D = 2, 5, 3, 16


def both_halves(table: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [torch.cat((part, part), dim=-1) for part in table]


def twice(table: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [part.repeat_interleave(2, -1) for part in table]


def heads_second(function, x: Tensor, *arguments: object, **options: object) -> Tensor:
    """``function(q, k, ...)`` of ``[batch, heads, seq, head_dim]``, whose results agree."""
    q, k = function(x.transpose(1, 2), x.transpose(1, 2), *arguments, **options)
    assert torch.equal(q, k)
    return q.transpose(1, 2)


def cached(name: str, x: Tensor, table: tuple[Tensor, Tensor], style: int, *at: Tensor) -> Tensor:
    """AITER's ``[seq, batch, heads, head_dim]``; a form of two tensors gives equal ones."""
    spread = [part[:, None, None] for part in table]
    turned = x.transpose(0, 1)
    two = [turned, turned.clone()] if "_2c_" in name else [turned]
    out = getattr(aiter, name)(*two, *spread, *at, style, True, False)
    out = out if isinstance(out, tuple) else (out,)
    assert all(torch.equal(y, out[0]) for y in out)
    return out[0].transpose(0, 1)


AT = torch.arange(S)[:, None].expand(S, B)
# Name -> x [B, S, H, D] rotated by rows 0 to S - 1 of a table of halves [S, D / 2].
FORMS = {
    "flash_attn": lambda x, t: flash_attn.apply_rotary_emb(x, *t),
    "flash_attn packed": lambda x, t: flash_attn.apply_rotary_emb_kv_(
        torch.stack((x, x), dim=2), *t
    )[:, :, 0],
    "fla": lambda x, t: fla.rotary_embedding(x, *t),
    "quack": lambda x, t: quack.apply_rotary(x, *t),
    "liger": lambda x, t: heads_second(
        liger.liger_rotary_pos_emb, x, *(part[None] for part in both_halves(t))
    ),
    "liger multimodal": lambda x, t: heads_second(
        liger.liger_multimodal_rotary_pos_emb,
        x,
        *(part.expand(3, 1, S, D) for part in both_halves(t)),
        [4, 2, 2],
    ),
    "liger gpt-oss": lambda x, t: heads_second(
        liger.liger_rotary_pos_emb_gpt_oss, x, *(part[None] for part in t)
    ),
    "unsloth": lambda x, t: heads_second(unsloth.fast_rope_embedding, x, *both_halves(t)),
    "unsloth at positions": lambda x, t: heads_second(
        unsloth.fast_rope_embedding, x, *both_halves(t), AT.T
    ),
    "aiter": lambda x, t: cached("rope_cached_fwd", x, t, 0),
    "aiter two": lambda x, t: cached("rope_cached_2c_fwd", x, t, 0),
    "aiter at positions": lambda x, t: cached("rope_cached_positions_2c_fwd", x, t, 0, AT),
    "aiter with offsets": lambda x, t: cached(
        "rope_cached_positions_offsets_fwd", x, t, 0, AT, AT * 0
    ),
    "diffusers halves": lambda x, t: diffusers.apply_rotary_emb(x, both_halves(t), True, -2, 1),
    "torch_nn": lambda x, t: torch_nn.rotary_embedding(x.transpose(1, 2), *t).transpose(1, 2),
    "torch_nn at positions": lambda x, t: torch_nn.rotary_embedding(
        x.transpose(1, 2), *t, AT.T
    ).transpose(1, 2),
}
INTERLEAVED = {
    "flash_attn": lambda x, t: flash_attn.apply_rotary_emb(x, *t, True),
    "fla": lambda x, t: fla.rotary_embedding(x, *t, True),
    "quack": lambda x, t: quack.apply_rotary_emb(x, *t, True),
    "aiter": lambda x, t: cached("rope_cached_fwd", x, t, 1),
    "diffusers": lambda x, t: diffusers.apply_rotary_emb(x, twice(t), True, -1, 1),
    "diffusers wan": lambda x, t: diffusers.apply_rotary_emb_wan(
        x, *(part[None, :, None] for part in twice(t))
    ),
    "torch_nn": lambda x, t: torch_nn.rotary_embedding(
        x.transpose(1, 2), *t, interleaved=True
    ).transpose(1, 2),
}


@pytest.mark.parametrize(
    ("form", "interleaved"),
    [(f, False) for f in FORMS.values()] + [(f, True) for f in INTERLEAVED.values()],
    ids=[*FORMS, *(f"{name} interleaved" for name in INTERLEAVED)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("same", [True, False])
def test_tables_in_a_models_dtype(form, interleaved: bool, dtype: torch.dtype, same: bool):
    """The rounded rows are used as they are: no other rounding than that of the result."""
    exact = angles(S, D // 2)
    table = tuple(part.to(dtype) for part in exact)
    x = randn(B, S, H, D, dtype=dtype if same else torch.float32)
    out = form(x, table)
    rows = [part.unsqueeze(1) for part in table]
    # A rounded pair has a magnitude a little off 1.
    assert_rotated(out, x, *rows, interleaved=interleaved, scale=1.01)
    if not same:  # the checker sees a table that was not rounded
        with pytest.raises(AssertionError, match="beyond the bound"):
            assert_rotated(
                out, x, *(part.unsqueeze(1) for part in exact), interleaved=interleaved, scale=1.01
            )
