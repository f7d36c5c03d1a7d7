"""SGLang's signatures against its formulas, in float64, and against the calls that mix them up."""

from __future__ import annotations

import copy
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.integrations import sglang

from peer_formulas import assert_rotated, plain_rotate
from serving_formulas import assert_calls_rotate, frequencies, packed_qkv, rows, table
from support import randn, run_child

# In the table, past it, far past it and before it.
PLACES = [0, 5, 127, 128, 1000, 131071, 2**31 - 1, -1, -777, 64, 3]


def places(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(PLACES, dtype=dtype)


def make(**overrides: object) -> sglang.RotaryEmbedding:
    arguments = {"head_size": 24, "rotary_dim": 24, "max_position": 128, "base": 10000}
    return sglang.get_rope(**(arguments | overrides))  # type: ignore[arg-type]


# ---- modules


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("width", [24, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_rotates_flat_and_headed_tensors(neox: bool, width: int, dtype: torch.dtype):
    module = make(rotary_dim=width, is_neox_style=neox)
    x = randn(11, 5, 24, dtype=dtype)
    cos, sin = rows(places(), frequencies(width, 10000))
    for positions in (places(), places(torch.int32)):
        assert_calls_rotate(module, x, positions, cos, sin, interleaved=not neox)


def test_the_style_makes_a_difference():
    x = randn(11, 5, 24)
    pair = [make(is_neox_style=neox)(places(), x, None)[0] for neox in (True, False)]
    assert not torch.allclose(*pair, atol=1e-2)


def test_slices_of_a_packed_projection_and_batches_are_read_where_they_lie():
    module, packed = make(), packed_qkv(11, 5, 3, 24)
    before = packed.base.clone()
    q, k = module(places(), packed.q, packed.k)
    cos, sin = rows(places(), frequencies(24, 10000))
    assert torch.equal(packed.base, before)
    assert_rotated(q, packed.q, cos, sin)
    assert_rotated(k, packed.k, cos, sin)
    positions = torch.stack((places(), places() + 7))  # [batch, seq]
    x = randn(2, 11, 5 * 24)
    q, none = module(positions, x, None)
    assert none is None
    cos, sin = rows(positions, frequencies(24, 10000))
    assert_rotated(q.view(2, 11, 5, 24), x.view(2, 11, 5, 24), cos, sin)


def test_no_tokens():
    q, k = make()(torch.zeros(0, dtype=torch.int64), randn(0, 48), randn(0, 2, 24))
    assert q.shape == (0, 48)
    assert k is not None
    assert k.shape == (0, 2, 24)


def test_offsets_are_added_and_positions_stay():
    positions, offsets = places(torch.int32), torch.arange(11, dtype=torch.int32) * 10
    given, x = positions.clone(), randn(11, 2, 24)
    q, _ = make()(positions, x, None, offsets)
    assert torch.equal(positions, given)
    # Past 2^31 - 1 too: int32 positions do not wrap.
    assert_rotated(q, x, *rows(places() + offsets, frequencies(24, 10000)))
    assert not torch.allclose(q, make()(positions, x, None)[0], atol=1e-2)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_forward_stores_the_rotated_key_and_the_value(flat: bool, dtype: torch.dtype):
    x, value, slots = randn(11, 3, 24), randn(11, 3, 24, seed=1), torch.arange(11, 0, -1)
    shape = (20, 72) if flat else (20, 3, 24)
    k_buffer, v_buffer = torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)
    argument = sglang.FusedSetKVBufferArg(value, k_buffer, v_buffer, slots.to(dtype))
    _, k = make()(places(), x, x.flatten(1) if flat else x, None, argument)
    assert k is not None
    assert torch.equal(k_buffer[slots].view(11, 3, 24), k.view(11, 3, 24))
    assert torch.equal(v_buffer[slots].view(11, 3, 24), value.bfloat16())
    assert int(k_buffer.flatten(1).any(1).sum()) == 11, "other slots stay"
    with pytest.raises(ValueError, match="key must be given"):
        make()(places(), x, None, fused_set_kv_buffer_arg=argument)


@pytest.mark.parametrize("kind", [None, "mrope"])
@pytest.mark.parametrize("name", ["native", "cuda", "cpu", "hip", "xpu"])
def test_forward_has_the_names_of_every_backend(kind: str | None, name: str):
    """Callers pick one by hand, or replace ``forward`` by it; arguments in place, all five."""
    scaling = {"rope_type": "default", "mrope_section": [4, 4, 4]} if kind else None
    module, x = make(rope_scaling=scaling), randn(11, 3, 24)
    positions = torch.stack((places(), places() + 1, places() * 0)) if kind else places()
    lanes = (0,) * 4 + (1,) * 4 + (2,) * 4 if kind else ()
    offsets = torch.arange(11)
    cos, sin = rows(positions + offsets, frequencies(24, 10000), lane_axes=lanes)
    buffers = [torch.zeros(11, 3, 24) for _ in range(2)]
    argument = sglang.FusedSetKVBufferArg(x, *buffers, torch.arange(11))
    forward = getattr(module, f"forward_{name}")
    q, k = forward(positions, x, x.flatten(1), offsets, argument)
    assert_rotated(q, x, cos, sin)
    assert torch.equal(k.view(x.shape), q)
    assert torch.equal(buffers[0], q)
    assert torch.equal(buffers[1], x)


def test_attributes():
    module = make(rotary_dim=8, dtype=torch.bfloat16, base=500)
    assert (module.head_size, module.rotary_dim, module.max_position_embeddings) == (24, 8, 128)
    assert (module.base, module.is_neox_style, module.dtype) == (500, True, torch.bfloat16)
    assert module.cos_sin_cache is module.rope.cos_sin_cache
    assert module.cos_sin_cache.dtype == torch.float32
    assert torch.equal(module.cos_sin_cache, table(128, frequencies(8, 500)))
    assert "rotary_dim=8" in repr(module)
    assert not module.state_dict()


def test_tables_of_the_helpers():
    module = make()
    expected = table(400, frequencies(24, 10000))
    cos, sin = module.get_cos_sin(77)
    assert torch.equal(torch.cat((cos, sin), -1), expected[:77])
    module._ensure_cos_sin_cache_length(256)
    assert module.cos_sin_cache.shape == (384, 24)
    cos, sin = module.get_cos_sin(400)
    assert torch.equal(torch.cat((cos, sin), -1), expected)
    assert module.cos_sin_cache_as(torch.float32) is module.cos_sin_cache
    assert torch.equal(module.cos_sin_cache_as(torch.bfloat16)[:400], expected.bfloat16())
    assert module.cos_sin_cache.dtype == torch.float32


@pytest.mark.parametrize("neox", [True, False])
def test_cos_and_sin_of_any_position(neox: bool):
    cos, sin = make(is_neox_style=neox).get_cos_sin_with_position(places())
    for actual, expected in zip((cos, sin), rows(places(), frequencies(24, 10000)), strict=True):
        assert actual.shape == (11, 1, 1, 24)
        torch.testing.assert_close(
            actual[:, 0], expected.float().repeat(1, 1, 2), rtol=0, atol=1e-7
        )


def test_errors_of_modules():
    with pytest.raises(ValueError, match="position_start must be 0, got -4"):
        sglang.RotaryEmbedding(24, 24, 128, 10000, True, torch.float32, -4)
    module, x = make(), randn(11, 2, 24)
    with pytest.raises(ValueError, match=r"query must be .* got \(11, 2, 25\)"):
        module(places(), randn(11, 2, 25), None)
    with pytest.raises(ValueError, match="key must be"):
        module(places(), x, randn(11, 25))
    with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
        module(x, places(), None)
    with pytest.raises(TypeError, match="offsets must be an int32 or int64 tensor"):
        module(places(), x, None, torch.ones(11))
    with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
        module.get_cos_sin_with_position(places().float())


# ---- factory


def test_equal_arguments_give_one_object_over_the_shared_table():
    scaling = {"rope_type": "linear", "factor": 4}
    module = make(rope_scaling=scaling)
    assert make(rope_scaling={"factor": 4.0, "rope_type": "linear"}) is module
    assert scaling == {"rope_type": "linear", "factor": 4}
    assert make(rope_scaling=scaling, base=10000.0) is module
    assert module.rope is rc.get_rope(module.rope.config)
    half = make(rope_scaling=scaling, dtype=torch.float16)
    assert half is not module
    assert half.rope is module.rope
    assert make(rope_scaling={"rope_type": "linear", "factor": 5}).rope is not module.rope
    assert sglang.get_rope_wrapper(24, 24, 128, 10000, True, scaling, device="cpu") is module
    assert sglang.get_rope_cpu(24, 24, 128, 10000, True, scaling) is module


def test_a_module_built_directly_has_the_shared_table():
    direct = sglang.RotaryEmbedding(24, 24, 128, 10000, True, torch.float32)
    assert direct is not make()
    assert direct.rope is make().rope
    assert torch.equal(
        direct(places(), randn(11, 48), None)[0], make()(places(), randn(11, 48), None)[0]
    )


def test_a_dead_table_is_replaced():
    module, x = make(base=777), randn(11, 48)
    before = module(places(), x, None)[0]
    module.cos_sin_cache.untyped_storage().resize_(0)
    with pytest.warns(UserWarning, match="discards a dead entry"):
        fresh = make(base=777)
    assert fresh is not module
    assert torch.equal(fresh(places(), x, None)[0], before)
    assert make(base=777) is fresh


def test_modules_follow_their_model_from_meta():
    with torch.device("meta"):
        module = make(base=778)
        assert module.cos_sin_cache.is_meta
        assert make(base=778) is module
    module.to_empty(device="cpu")
    x = randn(11, 48)
    assert torch.equal(module(places(), x, None)[0], make(base=778)(places(), x, None)[0])


def test_casts_and_copies_leave_the_shared_table_alone():
    module, x = make(), randn(11, 48)
    before = module(places(), x, None)[0]
    cache = module.cos_sin_cache
    assert module.half().cos_sin_cache is cache
    other = copy.deepcopy(module)
    assert other.rope is not module.rope
    assert torch.equal(other(places(), x, None)[0], before)
    assert make() is module


def test_threads_that_ask_at_once_get_one_object():
    barrier = threading.Barrier(8)

    def ask(_: int) -> sglang.RotaryEmbedding:
        barrier.wait()
        return make(base=779)

    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(ask, range(8)))
    assert len({id(module) for module in modules}) == 1


def test_a_partial_factor_multiplies_rotary_dim():
    module = make(rotary_dim=16, partial_rotary_factor=0.5)
    assert module.rotary_dim == 8
    torch.testing.assert_close(module.rope.inv_freq, frequencies(8, 10000), rtol=1e-6, atol=0)


def g(s: float, k: float) -> float:
    return 1.0 if s <= 1 else 0.1 * k * math.log(s) + 1


F0 = frequencies(128, 1e4).double()
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
# dictionary -> frequencies that are known in closed form, by lane; magnitude; rows
SCALED = {
    "default": ({"rope_type": "default"}, {1: F0[1]}, 1.0, 1024),
    "linear": ({"type": "linear", "factor": 4}, {0: 0.25, 63: F0[63] / 4}, 1.0, 4096),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        {i: 30527.7367488 ** (-i / 64) for i in (1, 32, 63)},
        1.0,
        2048,
    ),
    "alpha": (
        {"rope_type": "dynamic", "alpha": 1000.0},
        {i: 11158839.9251 ** (-i / 64) for i in (1, 32, 63)},
        1.0,
        1024,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {0: 1.0, 63: F0[63] / 8},
        1.0,
        1024,
    ),
    # SGLang reads mscale without mscale_all_dim, and multiplies attn_factor.
    "yarn": (
        YARN | {"mscale": 0.707, "attn_factor": 2},
        {0: 1.0, 63: F0[63] / 40},
        2 * g(40, 0.707),
        2560,
    ),
    "yarn pair": (
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        {63: F0[63] / 40},
        g(40, 1) / g(40, 0.8),
        2560,
    ),
    "deepseek": (
        YARN | {"rope_type": "deepseek_yarn", "mscale": 0.707},
        {63: F0[63] / 40},
        g(40, 0.707),
        2560,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
            "original_max_position_embeddings": 512,
        },
        {1: F0[1] / 2},
        math.sqrt(1 + math.log(2) / math.log(512)),
        1024,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaling_types(name: str):
    scaling, lanes, magnitude, capacity = SCALED[name]
    module = make(head_size=128, rotary_dim=128, max_position=1024, rope_scaling=scaling)
    for lane, expected in lanes.items():
        assert float(module.rope.inv_freq[lane]) == pytest.approx(float(expected), rel=1e-6)
    assert module.rope.config.attention_scaling == pytest.approx(magnitude, rel=1e-7)
    assert module.cos_sin_cache.shape[0] == capacity
    x = randn(11, 2, 128)
    cos, sin = rows(places(), module.rope.inv_freq, magnitude)
    q, _ = module(places(), x, None)
    assert_rotated(q, x, cos, sin, scale=magnitude)


def test_proportional_lanes_are_those_of_the_narrowed_width():
    scaling = {"rope_type": "proportional"}
    module = make(head_size=32, rotary_dim=32, partial_rotary_factor=0.25, rope_scaling=scaling)
    f = module.rope.inv_freq
    assert (module.rotary_dim, int((f != 0).sum())) == (32, 4)
    torch.testing.assert_close(f[:4], frequencies(32, 10000)[:4], rtol=1e-6, atol=0)


def test_unknown_and_missing_keys_are_errors():
    with pytest.raises(ValueError, match=r"unknown keys \['facter'\].*did you mean 'factor'"):
        make(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "facter": 3.0})
    with pytest.raises(ValueError, match="must have 'low_freq_factor'"):
        make(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match="did you mean 'yarn'"):
        make(rope_scaling={"rope_type": "yarm"})
    with pytest.raises(ValueError, match="rope_theta must have one value"):
        make(rope_scaling={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(NotImplementedError, match="dual chunk attention"):
        make(dual_chunk_attention_config={"chunk_size": 8})
    with pytest.raises(NotImplementedError, match="use_fope"):
        make(rope_scaling={"rope_type": "default", "use_fope": True})


def test_arguments_in_vllms_order_are_errors():
    with pytest.raises(TypeError, match="is_neox_style must be True or False"):
        sglang.get_rope(128, 8192, 128, 10000, {"rope_type": "default"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rotary_dim must be even and between 0 and head_dim"):
        sglang.get_rope(24, 8192, 24, 10000)


# ---- several axes

AXES = {
    "chunked": ({}, [0] * 2 + [1] * 3 + [2] * 3),
    "interleaved": ({"mrope_interleaved": True}, [0, 1, 2, 0, 1, 2, 0, 0]),
    "glm": ({"mrope_interleaved": True, "mrope_interleaved_glm": True}, [0, 1, 2, 0, 1, 2, 1, 2]),
}
SECTIONS = {"chunked": (2, 3, 3), "interleaved": (4, 2, 2), "glm": (2, 3, 3)}


@pytest.mark.parametrize("name", AXES)
def test_positions_of_three_axes(name: str):
    flags, lanes = AXES[name]
    scaling = {"rope_type": "default", "mrope_section": list(SECTIONS[name]), **flags}
    module = make(head_size=16, rotary_dim=16, rope_scaling=scaling)
    assert isinstance(module, sglang.MRotaryEmbedding)
    assert module.mrope_section == list(SECTIONS[name])
    direct = sglang.MRotaryEmbedding(
        16, 16, 128, 10000, True, torch.float32, SECTIONS[name], **flags
    )
    assert direct.rope is module.rope
    positions = torch.stack((places(), places() - 5, places() * 0 + 90))
    x = randn(11, 3 * 16)
    cos, sin = rows(positions, frequencies(16, 10000), lane_axes=tuple(lanes))
    q, k = module(positions, x, x)
    for y in (q, k):
        assert y is not None
        assert_rotated(y.view(11, 3, 16), x.view(11, 3, 16), cos, sin)
    text, _ = module(places(), x, None)
    assert torch.equal(text, make(head_size=16, rotary_dim=16)(places(), x, None)[0])
    at, _ = module.get_cos_sin_with_position(positions)
    torch.testing.assert_close(at[:, 0, :, :8], cos.float(), rtol=0, atol=1e-7)


def test_sections_that_do_not_sum_up_are_an_error():
    with pytest.raises(ValueError, match="must share out rotary_dim / 2 = 8 lanes"):
        sglang.MRotaryEmbedding(16, 16, 128, 10000, True, torch.float32, [4, 4, 4])


# ---- kernels


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("width", [24, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_write_q_and_k_and_nothing_else(neox: bool, width: int, dtype: torch.dtype):
    f = frequencies(width, 500.0)
    cache, positions = table(128, f), torch.arange(11, dtype=torch.int32) * 11
    cos, sin = rows(positions, f)
    for function, argument in (
        (sglang.apply_rope_inplace, {"rope_dim": width}),
        (sglang.apply_rope_with_cos_sin_cache_inplace, {}),
    ):
        packed = packed_qkv(11, 5, 2, 24, dtype)
        before = packed.base.clone()
        assert function(packed.q, packed.k, cache, positions, is_neox=neox, **argument) is None
        packed.assert_only_rotated(before, cos, sin, interleaved=not neox)


def test_positions_outside_a_table_take_its_nearest_row():
    f = frequencies(24, 500.0)
    x = randn(3, 2, 24)
    q, k = x.clone(), x.clone()
    at = torch.tensor([-1, 128, 2**31 - 1])
    sglang.apply_rope_inplace(q, k, table(128, f), at, is_neox=True)
    assert_rotated(q, x, *rows(at.clamp(0, 127), f))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_kernels_with_a_cache_store_the_rotated_key(flat: bool, fused: bool):
    f = frequencies(24, 500.0)
    cache, positions, slots = table(128, f), torch.arange(11) * 11, torch.arange(11, 0, -1)
    packed = packed_qkv(11, 5, 2, 24)
    before = packed.base.clone()
    k_cache, v_cache = (torch.zeros((20, 48) if flat else (20, 2, 24)) for _ in range(2))
    if fused:
        arguments = sglang.FusedSetKVBufferArg(packed.v, k_cache, v_cache, slots)
        sglang.apply_rope_with_cos_sin_cache_inplace(
            packed.q, packed.k, cache, positions, is_neox=True, fused_args=arguments
        )
    else:
        sglang.apply_rope_inplace_with_kvcache(
            packed.q, packed.k, packed.v, k_cache, v_cache, cache, positions, slots.int(),
            is_neox=True,
        )  # fmt: skip
    packed.assert_only_rotated(before, *rows(positions, f))
    assert torch.equal(k_cache[slots].view(11, 2, 24), packed.k)
    assert torch.equal(v_cache[slots].view(11, 2, 24), packed.v)
    assert not k_cache[0].any()


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [True, False])
def test_rotary_embedding_writes_and_returns_its_arguments(table_dtype: torch.dtype, flat: bool):
    f = frequencies(8, 500.0)
    cache, positions = table(128, f).to(table_dtype), torch.arange(11) * 11
    packed = packed_qkv(11, 5, 2, 24)
    before = packed.base.clone()
    query, key = packed.q, packed.k
    if flat:
        query, key = packed.base[:, :120], packed.base[:, 120:168]
    result = sglang.rotary_embedding(positions, query, key, 24, cache, False)
    assert result[0] is query
    assert result[1] is key
    cos, sin = (half[positions][:, None] for half in cache.float().chunk(2, -1))
    packed.assert_only_rotated(before, cos, sin, interleaved=True)
    x = randn(11, 2, 24)
    q = x.clone()
    assert sglang.rotary_embedding(positions, q, None, 24, cache) == (q, None)
    assert_rotated(q, x, cos, sin)


def test_arguments_of_kernels_in_another_order_are_errors():
    cache, positions, x = table(128, frequencies(24, 500.0)), torch.arange(11), randn(11, 2, 24)
    with pytest.raises(TypeError, match="positions must be int32 or int64"):
        sglang.apply_rope_inplace(x.clone(), x.clone(), positions, cache, is_neox=True)
    with pytest.raises((TypeError, ValueError)):  # flashinfer's order
        sglang.apply_rope_with_cos_sin_cache_inplace(positions, x, x.clone(), cache, is_neox=True)
    with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
        sglang.rotary_embedding(x, positions, None, 24, cache)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rotary_dim must be the width of cos_sin_cache, 24"):
        sglang.apply_rope_inplace(x, x.clone(), cache, positions, is_neox=True, rope_dim=12)
    with pytest.raises(TypeError, match="cos_sin_cache must be float32"):
        sglang.apply_rope_inplace(x, x.clone(), cache.double(), positions, is_neox=True)
    q, k = x.clone(), x.clone() * 2
    sglang.apply_rope_inplace(q, k, cache, positions, is_neox=True)
    assert torch.equal(q * 2, k), "q and k, not k and q"


# ---- diffusion


def grid_angles(
    sizes: list[int], starts: list[int], widths: list[int], theta: float, stretch: float
) -> Tensor:
    """float64 angles ``[tokens, lanes]``, token by token."""
    tokens = [
        (a + starts[0], b + starts[1], c + starts[2])
        for a in range(sizes[0])
        for b in range(sizes[1])
        for c in range(sizes[2])
    ]
    lanes = [
        (axis, theta ** (-2 * i / width))
        for axis, width in enumerate(widths)
        for i in range(width // 2)
    ]
    return torch.tensor(
        [[token[axis] * stretch * f for axis, f in lanes] for token in tokens], dtype=torch.float64
    )


def test_diffusion_tables():
    cos, sin = sglang.get_rotary_pos_embed((3, 4, 5), 72, 2, [12, 12, 12], 256.0)
    angles = grid_angles([3, 4, 5], [0, 0, 0], [12, 12, 12], 256.0, 1.0)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous()
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-6)
    exact = sglang.get_rotary_pos_embed(
        [2, 3, 2], 40, 1, [8, 16, 16], 1e4, interpolation_factor=0.5, start_frame=900,
        dtype=torch.float64,
    )  # fmt: skip
    angles = grid_angles([2, 3, 2], [900, 0, 0], [8, 16, 16], 1e4, 0.5)
    torch.testing.assert_close(exact[0].double(), angles.cos(), rtol=0, atol=6e-8)
    thirds = sglang.get_rotary_pos_embed(2, 24, 2, None, 100.0)
    assert thirds[0].shape == (8, 6)


def test_diffusion_rescaling_changes_the_base_of_its_axis():
    _, sin = sglang.get_rotary_pos_embed(
        (2, 2, 2),
        24,
        1,
        [8, 8, 8],
        100.0,
        theta_rescale_factor=[1.0, 3.0, 1.0],
        dtype=torch.float64,
    )
    plain = grid_angles([2, 2, 2], [0] * 3, [8] * 3, 100.0, 1.0).sin()
    other = grid_angles([2, 2, 2], [0] * 3, [8] * 3, 100.0 * 3 ** (8 / 6), 1.0).sin()
    expected = torch.cat((plain[:, :4], other[:, 4:8], plain[:, 8:]), -1)
    torch.testing.assert_close(sin.double(), expected, rtol=0, atol=6e-8)
    assert not torch.allclose(plain, other, atol=1e-3)


def test_diffusion_tables_of_a_sequence_parallel_rank(monkeypatch: pytest.MonkeyPatch):
    arguments = ((4, 3, 2), 24, 1, [8, 8, 8], 100.0)
    whole, _ = sglang.get_rotary_pos_embed(*arguments)
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    name = "sglang.multimodal_gen.runtime.distributed.parallel_state"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_sp_group=lambda: group))
    own, _ = sglang.get_rotary_pos_embed(*arguments)
    assert torch.equal(own, whole[12:])
    by_width, _ = sglang.get_rotary_pos_embed(*arguments, shard_dim=2)
    assert torch.equal(by_width, whole[1::2])
    with pytest.raises(ValueError, match=r"rope_sizes\[1\] must be divisible by the 2 ranks"):
        sglang.get_rotary_pos_embed(*arguments, shard_dim=1)


def test_diffusion_errors():
    with pytest.raises(ValueError, match="the widths summing to the head size 24"):
        sglang.get_rotary_pos_embed((2, 2, 2), 24, 1, [8, 8, 4], 100.0)
    with pytest.raises(ValueError, match="interpolation_factor must be a number or have 1 or 3"):
        sglang.get_rotary_pos_embed((2, 2, 2), 24, 1, [8, 8, 8], 100.0, 1.0, [1.0, 2.0])


# ---- compiled, and alone


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_are_equal_bit_for_bit():
    module, x, positions = make(), randn(11, 48), places()
    cache = table(128, frequencies(24, 10000))

    def call(positions: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        q, k = module(positions, x, x, positions % 3)
        sglang.rotary_embedding(positions, y, None, 24, cache)
        return q, k, y

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        compiled(positions, x, x.clone()), call(positions, x, x.clone()), strict=True
    ):
        assert torch.equal(actual, expected)


def test_gradients_flow_through_forward():
    x = randn(11, 2, 24).requires_grad_()
    q, _ = make()(places(), x, None)
    incoming = randn(11, 2, 24, seed=2)
    (actual,) = torch.autograd.grad(q, x, incoming)
    plain = plain_rotate(x, *rows(places(), frequencies(24, 10000)))
    (expected,) = torch.autograd.grad(plain, x, incoming.double())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


IMPORTS = """
import importlib, sys
for name in ("sglang", "vllm", "flashinfer", "aiter"):
    importlib.import_module("rope_compile.integrations." + name)
    assert name not in sys.modules, name
assert "triton" not in sys.modules
"""


def test_serving_adapters_import_neither_their_peers_nor_triton():
    run_child("-c", IMPORTS)
