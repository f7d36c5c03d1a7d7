"""vLLM's signatures against its formulas, in float64, and against the calls that mix them up."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import rope_compile as rc
from rope_compile.integrations import vllm

from peer_formulas import assert_rotated, plain_rotate
from serving_formulas import assert_calls_rotate, frequencies, packed_qkv, rows, table
from support import randn

PLACES = [0, 5, 127, 128, 1000, 131071, 2**31 - 1, -1, -777, 64, 3]


def places(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(PLACES, dtype=dtype)


def make(head_size: int = 24, max_position: int = 128, **overrides: object) -> vllm.RotaryEmbedding:
    return vllm.get_rope(head_size, max_position, **overrides)  # type: ignore[arg-type]


# ---- modules


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("width", [24, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_rotates_flat_and_headed_tensors(neox: bool, width: int, dtype: torch.dtype):
    parameters = {"rope_type": "default", "rope_theta": 500.0, "rope_dim": width}
    module = make(is_neox_style=neox, rope_parameters=parameters)
    x = randn(11, 5, 24, dtype=dtype)
    cos, sin = rows(places(), frequencies(width, 500.0))
    for positions in (places(), places(torch.int32)):
        assert_calls_rotate(module, x, positions, cos, sin, interleaved=not neox)


def test_every_variant_of_forward_is_the_same():
    module, x = make(), randn(11, 48)
    expected, _ = module(places(), x)
    for name in ("native", "cuda", "hip", "xpu", "cpu"):
        q, k = getattr(module, f"forward_{name}")(places(), x, x)
        assert torch.equal(q, expected)
        assert torch.equal(k, expected)
        assert getattr(module, f"forward_{name}")(places(), x)[1] is None


def test_slices_of_a_packed_projection_and_batches():
    module, packed = make(), packed_qkv(11, 5, 3, 24)
    before = packed.base.clone()
    q, k = module(places(), packed.q, packed.k)
    cos, sin = rows(places(), frequencies(24, 10000))
    assert torch.equal(packed.base, before)
    assert_rotated(q, packed.q, cos, sin)
    assert_rotated(k, packed.k, cos, sin)
    positions = torch.stack((places(), places() + 7))
    x = randn(2, 11, 5, 24)
    for flat in (False, True):
        q, _ = module(positions, x.flatten(2) if flat else x)
        assert_rotated(q.view(x.shape), x, *rows(positions, frequencies(24, 10000)))


def test_offsets_of_older_versions_are_added():
    positions, x = places(), randn(11, 48)
    q, _ = make()(positions, x, None, positions % 5)
    assert torch.equal(q, make()(positions + positions % 5, x)[0])
    assert torch.equal(positions, places())


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
def test_forward_static_reads_the_table_it_is_given(table_dtype: torch.dtype):
    f = frequencies(8, 500.0)
    cache, positions = table(128, f).to(table_dtype), torch.arange(11) * 11
    cos, sin = (half[positions][:, None] for half in cache.float().chunk(2, -1))
    for neox in (True, False):
        assert_calls_rotate(
            lambda at, q, k, neox=neox: vllm.RotaryEmbedding.forward_static(
                at, q, k, 24, 8, cache, neox
            ),
            randn(11, 5, 24), positions, cos, sin, interleaved=not neox,
        )  # fmt: skip
    with pytest.raises(
        ValueError, match="rotary_dim must be the width of cos_sin_cache, 8, got 24"
    ):
        vllm.RotaryEmbedding.forward_static(positions, randn(11, 24), None, 24, 24, cache, True)


def test_attributes_and_init_cache():
    module = vllm.RotaryEmbedding(24, 8, 1000, 500.0, True, torch.bfloat16)
    assert (module.head_size, module.rotary_dim, module.max_position_embeddings) == (24, 8, 1000)
    assert (module.base, module.is_neox_style, module.dtype) == (500.0, True, torch.bfloat16)
    assert torch.equal(module.cos_sin_cache[:1000], table(1000, frequencies(8, 500.0)))
    cos, sin = module.get_cos_sin(77)
    assert torch.equal(torch.cat((cos, sin), -1), table(77, frequencies(8, 500.0)))
    without = vllm.RotaryEmbedding(24, 8, 1000, 500.0, True, torch.bfloat16, init_cache=False)
    assert without.cos_sin_cache.shape[0] == 128
    x = randn(11, 48)
    assert torch.equal(without(places(), x)[0], module(places(), x)[0])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rotary_emb(neox: bool, dtype: torch.dtype):
    cos, sin = (half.squeeze(1) for half in rows(torch.arange(7) * 90, frequencies(16, 500.0)))
    module = vllm.ApplyRotaryEmb(False, neox)
    assert (module.enforce_enable, module.enable_fp32_compute) == (False, False)
    for x in (
        randn(7, 3, 16, dtype=dtype),
        randn(2, 7, 3, 16, dtype=dtype),
        randn(2, 3, 7, 24, dtype=dtype).transpose(1, 2),  # channels beyond the table stay
    ):
        given = x.clone()
        for function in (module, module.forward_native, module.forward_cuda):
            y = function(x, cos.float(), sin.float())
            assert_rotated(y, x, cos.float()[:, None], sin.float()[:, None], interleaved=not neox)
        static = vllm.ApplyRotaryEmb.forward_static(x, cos.float(), sin.float(), neox, True)
        assert torch.equal(static, y)
        assert torch.equal(x, given)
    # The table in the dtype of the model, as vLLM hands it over, one for each sequence.
    cos, sin = cos.expand(2, 7, 8).to(dtype), sin.expand(2, 7, 8).to(dtype)
    x = randn(2, 7, 3, 16, dtype=dtype)
    y = vllm.ApplyRotaryEmb(is_neox_style=neox, enable_fp32_compute=True)(x, cos, sin)
    assert_rotated(y, x, cos[:, :, None].float(), sin[:, :, None].float(), interleaved=not neox)
    assert not torch.allclose(y, module(x, sin, cos), atol=1e-2), "cos and sin are not exchanged"


# ---- factories


def test_equal_arguments_give_one_object_over_the_shared_table():
    parameters = {"rope_type": "linear", "factor": 4, "rope_theta": 10000}
    module = make(rope_parameters=parameters)
    again = {"factor": 4.0, "rope_theta": 10000.0, "rope_type": "linear"}
    assert make(rope_parameters=again) is module
    assert parameters == {"rope_type": "linear", "factor": 4, "rope_theta": 10000}
    assert module.rope is rc.get_rope(module.rope.config)
    assert module.cos_sin_cache.shape[0] == 512
    assert make(rope_parameters=parameters, dtype=torch.float16).rope is module.rope
    old = vllm.get_rope_v0(24, 24, 128, 10000, True, {"type": "linear", "factor": 4})
    assert old is module
    assert make() is make(rope_parameters={"rope_type": "default"})
    assert make() is not make(rope_parameters={"rope_theta": 5e5})


def test_a_dead_table_is_replaced():
    parameters, x = {"rope_theta": 777.0}, randn(11, 48)
    module = make(rope_parameters=parameters)
    before = module(places(), x)[0]
    module.cos_sin_cache.untyped_storage().resize_(0)
    with pytest.warns(UserWarning, match="discards a dead entry"):
        fresh = make(rope_parameters=parameters)
    assert fresh is not module
    assert torch.equal(fresh(places(), x)[0], before)


def test_the_partial_factor_multiplies_head_size():
    module = make(32, rope_parameters={"partial_rotary_factor": 0.25})
    assert module.rotary_dim == 8
    assert vllm.get_rope_v0(32, 16, 128, 1e4, partial_rotary_factor=0.5).rope is module.rope


F0 = frequencies(128, 1e4).double()
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 512,
    "max_position_embeddings": 1024,
}
M = math.sqrt(1 + math.log(2) / math.log(512))
# served length, dictionary -> frequencies by lane, magnitude
SCALED = {
    "ntk": (1024, {"rope_type": "ntk", "factor": 8}, {0: 0.968030897, 63: F0[63] / 8}, 1.0),
    "ntk mixed": (
        1024,
        {"rope_type": "ntk", "factor": 8.0, "mixed_b": 0.625},
        {0: 0.85679601, 31: 0.00299860038},
        1.0,
    ),
    "dynamic": (
        8192,
        {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 4096},
        {i: 30527.7367488 ** (-i / 64) for i in (1, 32, 63)},
        1.0,
    ),
    "alpha": (1024, {"rope_type": "dynamic", "alpha": 1000.0}, {1: 0.776034363}, 1.0),
    "yarn": (1024, YARN, {0: 1.0, 63: F0[63] / 40}, 1.368887945),
    "yarn given": (1024, YARN | {"attention_factor": 1.5}, {63: F0[63] / 40}, 1.5),
    "unscaled yarn": (1024, YARN | {"apply_yarn_scaling": False}, {63: F0[63] / 40}, 1.0),
    "deepseek": (
        1024,
        YARN | {"rope_type": "deepseek_yarn", "mscale": 0.707},
        {63: F0[63] / 40},
        1.260803777,
    ),
    "longrope": (1024, LONGROPE, {1: F0[1] / 2}, M),
    "longrope, short": (512, LONGROPE, {1: F0[1]}, M),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaling_types(name: str):
    length, parameters, lanes, magnitude = SCALED[name]
    module = make(128, length, rope_parameters=parameters)
    for lane, expected in lanes.items():
        assert float(module.rope.inv_freq[lane]) == pytest.approx(float(expected), rel=1e-6)
    assert module.rope.config.attention_scaling == pytest.approx(magnitude, rel=1e-7)
    x = randn(11, 2, 128)
    cos, sin = rows(places(), module.rope.inv_freq, magnitude)
    assert_rotated(module(places(), x)[0], x, cos, sin, scale=magnitude)


def test_dynamic_of_vllm_is_not_that_of_sglang():
    with pytest.warns(UserWarning, match="max_trained_position"):
        plain = make(128, 8192, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert torch.equal(plain.rope.inv_freq, frequencies(128, 1e4))


def test_heads_that_rotate_their_last_channels():
    parameters = {"rope_type": "default", "rope_dim": 8, "is_deepseek_v4": True}
    x = randn(11, 2, 24)
    q, _ = make(rope_parameters=parameters)(places(), x)
    assert_rotated(q, x, *rows(places(), frequencies(8, 1e4)), first=16)


def test_unknown_keys_and_older_argument_orders_are_errors():
    with pytest.raises(ValueError, match=r"rope_parameters has unknown keys \['facter'\]"):
        make(rope_parameters={"rope_type": "linear", "factor": 2, "facter": 3})
    with pytest.raises(ValueError, match="must have 'original_max_position_embeddings'"):
        make(rope_parameters={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(TypeError, match="call get_rope_v0"):
        vllm.get_rope(128, 128, 8192, 10000)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="dual chunk attention"):
        make(dual_chunk_attention_config={"chunk_size": 8})
    with pytest.raises(NotImplementedError, match="dual chunk attention"):
        vllm.get_rope_v0(24, 24, 128, 1e4, dual_chunk_attention_config={"chunk_size": 8})


# ---- several axes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("yarn", [False, True])
def test_positions_of_three_axes(interleaved: bool, yarn: bool):
    sections = [4, 2, 2] if interleaved else [2, 3, 3]
    lanes = (0, 1, 2, 0, 1, 2, 0, 0) if interleaved else (0, 0, 1, 1, 1, 2, 2, 2)
    parameters = {
        "rope_type": "default", "rope_theta": 500.0, "mrope_section": sections,
        "mrope_interleaved": interleaved,
    }  # fmt: skip
    if yarn:
        extra = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        parameters |= extra
    module = make(16, 128, rope_parameters=parameters)
    assert isinstance(module, vllm.MRotaryEmbedding)
    assert module.cos_sin_cache.shape[0] == 512
    m = 0.1 * math.log(4) + 1 if yarn else 1.0
    direct = vllm.MRotaryEmbedding(
        16, 16, 64 if yarn else 128, 500.0, True, torch.float32, sections, interleaved,
        scaling_factor=4.0 if yarn else None,
    )  # fmt: skip
    positions = torch.stack((places(), places() - 5, places() * 0 + 90))
    x = randn(11, 3 * 16)
    cos, sin = rows(positions, module.rope.inv_freq, m, lanes)
    for rope in (module, direct):
        q, k = rope(positions, x, x)
        assert k is not None
        assert torch.equal(q, k)
        assert_rotated(q.view(11, 3, 16), x.view(11, 3, 16), cos, sin, scale=m)
    if not yarn:
        text, _ = module(places(), x)
        plain = make(16, 128, rope_parameters={"rope_theta": 500.0})
        assert torch.equal(text, plain(places(), x)[0])


def test_more_or_fewer_rows_for_the_positions_of_videos():
    parameters = {"mrope_section": [2, 3, 3]}
    module = make(16, 128, rope_parameters=parameters, mrope_positions_factor=2)
    assert module.cos_sin_cache.shape[0] == 256
    assert module.max_position_embeddings == 128
    assert make(16, 128, rope_parameters={}, mrope_positions_factor=2).cos_sin_cache.shape[0] == 128
    with pytest.raises(ValueError, match="mrope_positions_factor"):
        make(16, 128, rope_parameters=parameters, mrope_positions_factor=0)


# ---- operator


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "inverse"), [(0, False), (5, False), (16, True)])
def test_the_operator_writes_query_and_key_and_nothing_else(
    neox: bool, dtype: torch.dtype, table_dtype: torch.dtype, first: int, inverse: bool
):
    cache = table(128, frequencies(8, 500.0)).to(table_dtype)
    positions = torch.arange(11, dtype=torch.int32) * 11
    cos, sin = (half[positions][:, None] for half in cache.float().chunk(2, -1))
    packed = packed_qkv(11, 5, 2, 24, dtype)
    before = packed.base.clone()
    query, key = packed.base[:, :120], packed.k  # flat and headed
    extra = (first, inverse) if first else ()
    assert vllm.rotary_embedding(positions, query, key, 24, cache, neox, *extra) is None
    packed.assert_only_rotated(
        before, cos, -sin if inverse else sin, interleaved=not neox, first=first
    )


def test_the_operator_without_key_on_batches_and_outside_the_table():
    f = frequencies(24, 500.0)
    x, positions = randn(2, 3, 48), torch.tensor([[0, 127, 128], [-1, 2**31 - 1, 5]])
    q = x.clone()
    vllm.rotary_embedding(positions, q, None, 24, table(128, f), True)
    assert_rotated(q.view(2, 3, 2, 24), x.view(2, 3, 2, 24), *rows(positions.clamp(0, 127), f))


def test_arguments_of_the_operator_in_another_order_are_errors():
    cache, positions, x = table(128, frequencies(24, 500.0)), torch.arange(11), randn(11, 24)
    with pytest.raises(TypeError, match="positions must be an int32 or int64 tensor"):
        vllm.rotary_embedding(x, positions, None, 24, cache, True)
    with pytest.raises(ValueError, match=r"query must be .* got \(11, 24\)"):
        vllm.rotary_embedding(positions, x, None, 7, cache, True)
    with pytest.raises(RuntimeError, match="must not require grad"):
        vllm.rotary_embedding(positions, x.requires_grad_() * 1, None, 24, cache, True)


# ---- compiled


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_are_equal_bit_for_bit():
    module, x, positions = make(), randn(11, 48), places()
    cache, apply = table(128, frequencies(24, 10000)), vllm.ApplyRotaryEmb()

    def call(positions: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        q, k = module(positions, x, x)
        vllm.rotary_embedding(positions, y, None, 24, cache.bfloat16(), True, 0, True)
        cos, sin = cache[:11].chunk(2, -1)
        return q, k, y, apply(x.view(11, 2, 24), cos, sin)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        compiled(positions, x, x.clone()), call(positions, x, x.clone()), strict=True
    ):
        assert torch.equal(actual, expected)


# ---- registration


class CustomOp(nn.Module):
    """As vLLM's: the class of an instance is looked up by name, its forward by platform."""

    registered: dict[str, type[nn.Module]]
    platform = "cuda"

    def __new__(cls, *args: object, **kwargs: object) -> CustomOp:
        return super().__new__(cls.registered.get(cls.__name__, cls))  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = getattr(self, f"forward_{self.platform}")

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._forward_method(*args, **kwargs)

    @classmethod
    def register_oot(cls, decorated: type | None = None, name: str | None = None) -> object:
        def decorator(kind: type[nn.Module]) -> type[nn.Module]:
            assert name is not None
            assert name not in CustomOp.registered, f"Duplicate op name: {name}"
            CustomOp.registered[name] = kind
            return kind

        return decorator if decorated is None else decorator(decorated)


class Theirs(CustomOp):
    def __init__(
        self,
        head_size,
        rotary_dim,
        max_position_embeddings,
        base,
        is_neox_style,
        dtype,
        *rest,
        **more,
    ) -> None:
        super().__init__()
        cache = table(max_position_embeddings, frequencies(rotary_dim, base))
        self.register_buffer("cos_sin_cache", cache.to(dtype), persistent=False)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> object:
        return "theirs"

    forward_cuda = forward_cpu = forward_oot = forward_native


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    names = ("vllm", "model_executor", "custom_op", "layers", "rotary_embedding")
    package, executor, custom_op, layers, module = map(ModuleType, names)
    CustomOp.registered = {}
    custom_op.CustomOp = CustomOp  # type: ignore[attr-defined]
    for name in ("RotaryEmbedding", "MRotaryEmbedding", "Llama3RotaryEmbedding"):
        setattr(module, name, type(name, (Theirs,), {}))
    for name, value in {
        "vllm": package,
        "vllm.model_executor": executor,
        "vllm.model_executor.custom_op": custom_op,
        "vllm.model_executor.layers": layers,
        "vllm.model_executor.layers.rotary_embedding": module,
    }.items():
        monkeypatch.setitem(sys.modules, name, value)
    vllm.register.cache_clear()
    yield module
    vllm.register.cache_clear()


@pytest.mark.parametrize("platform", ["cuda", "cpu", "native", "oot"])
def test_vllm_builds_our_modules_once_they_are_registered(
    fake_vllm: ModuleType, platform: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CustomOp, "platform", platform)
    arguments, x = (24, 24, 128, 500.0, True, torch.bfloat16), randn(11, 48)
    assert fake_vllm.RotaryEmbedding(*arguments)(places(), x) == "theirs"
    assert vllm.register() == ("RotaryEmbedding", "MRotaryEmbedding")
    assert vllm.register() == ("RotaryEmbedding", "MRotaryEmbedding"), "and not a second time"
    module = fake_vllm.RotaryEmbedding(*arguments)
    assert isinstance(module, fake_vllm.RotaryEmbedding)
    q, k = module(places(), x, x)
    assert_rotated(q.view(11, 2, 24), x.view(11, 2, 24), *rows(places(), frequencies(24, 500.0)))
    assert torch.equal(q, k)
    assert module.cos_sin_cache.dtype == torch.bfloat16, "other kernels of vLLM read it"
    mrope = fake_vllm.MRotaryEmbedding(*arguments, mrope_section=[4, 4, 4], mrope_interleaved=True)
    positions = places().expand(3, -1)
    assert torch.equal(mrope(positions, x)[0], q)
    assert fake_vllm.Llama3RotaryEmbedding(*arguments)(places(), x) == "theirs"


def test_registration_without_vllm_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vllm must be importable .* pip install vllm"):
        vllm.register()


def test_gradients_flow_through_forward():
    x = randn(11, 2, 24).requires_grad_()
    q, _ = make()(places(), x)
    incoming = randn(11, 2, 24, seed=2)
    (actual,) = torch.autograd.grad(q, x, incoming)
    plain = plain_rotate(x, *rows(places(), frequencies(24, 10000)))
    (expected,) = torch.autograd.grad(plain, x, incoming.double())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
