"""Every scaling type: golden values, transformers' own functions, global state, bad numbers."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch

from rope_compile.config import RopeConfig
from rope_compile.scaling import (
    DeepseekYarnScaling,
    DefaultScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkAlphaScaling,
    NtkScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
    llama4_query_scale,
    magnitude,
    mistral_query_scale,
    yarn_range,
)

SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 4.0, 8.0)
LLAMA3_MIDDLE = [
    0.0021665707635,
    0.0013718935678,
    8.5675141292e-4,
    5.2484616099e-4,
    3.1269375038e-4,
    1.7850781277e-4,
]


def make(scaling: Scaling | None = None, *, width: int = 128, base: float = 1e4, rows: int = 4096):
    return RopeConfig(
        head_dim=width, max_position=rows, base=base, scaling=scaling or DefaultScaling()
    )


def check_lanes(config: RopeConfig, expected: dict[int, float], length: int | None = None) -> None:
    """float64 within the printed digits, float32 within rtol 1e-6 of them."""
    for dtype, rtol in ((torch.float64, 1e-8), (torch.float32, 1e-6)):
        found = config.inv_freq(dtype, length=length)
        assert found.dtype == dtype
        assert found.device.type == "cpu"
        for lane, value in expected.items():
            assert found[lane].item() == pytest.approx(value, rel=rtol), (dtype, lane)


def effective_base(config: RopeConfig, length: int | None = None) -> float:
    return config.inv_freq(torch.float64, length=length)[1].item() ** (-config.rotary_dim / 2)


def yarn(**changes: object) -> YarnScaling:
    return YarnScaling(**({"factor": 40, "original_max_position": 4096} | changes))


def deepseek(**changes: object) -> DeepseekYarnScaling:
    return DeepseekYarnScaling(**({"factor": 40, "original_max_position": 4096} | changes))


def llama3(**changes: object) -> Llama3Scaling:
    numbers = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    return Llama3Scaling(**(numbers | {"original_max_position": 8192} | changes))


def longrope(policy: str = "by_length", **changes: object) -> LongRopeScaling:
    fields = {"short_factor": SHORT, "long_factor": LONG, "original_max_position": 4096}
    return LongRopeScaling(**(fields | {"factor": 32, "policy": policy} | changes))


def dynamic(policy: str = "by_length", **changes: object) -> DynamicScaling:
    return DynamicScaling(
        **({"factor": 2, "original_max_position": 2048, "policy": policy} | changes)
    )


# ---- golden values


def test_golden_3_default():
    check_lanes(make(), {1: 0.865964323, 16: 0.1, 31: 0.0115478198, 32: 0.01, 63: 1.15478198e-4})


def test_golden_6_linear():
    check_lanes(make(LinearScaling(factor=4)), {0: 0.25, 1: 0.216491081, 63: 2.88695496e-5})
    assert LinearScaling(factor=4) == LinearScaling(factor=4.0)
    assert hash(LinearScaling(factor=4)) == hash(LinearScaling(factor=4.0))


def test_golden_7_ntk():
    config = make(NtkScaling(factor=8))
    check_lanes(config, {0: 0.968030897, 1: 0.811481154, 31: 0.00408277086, 63: 1.44347748e-5})
    for dtype in (torch.float32, torch.float64):  # the last lane is exactly f0 / s
        assert config.inv_freq(dtype)[63] == make().inv_freq(dtype)[63] / 8


def test_golden_8_ntk_mixed():
    config = make(NtkScaling(factor=8, mixed_b=0.625))
    expected = {0: 0.85679601, 1: 0.682311756, 31: 0.00299860038, 63: 1.44347748e-5}
    check_lanes(config, expected)
    assert math.log(8) / 64**0.625 == pytest.approx(0.154555417, rel=1e-8)
    for dtype in (torch.float32, torch.float64):
        assert config.inv_freq(dtype)[63] == make().inv_freq(dtype)[63] / 8


@pytest.mark.parametrize("mixed_b", [None, 0.625])
def test_ntk_equals_the_uncollected_formula(mixed_b):
    """vLLM's own way of writing it, in float64."""
    found = make(NtkScaling(factor=8, mixed_b=mixed_b)).inv_freq(torch.float64)
    lanes = torch.arange(64, dtype=torch.float64)
    if mixed_b is None:
        expected = (1e4 * 8) ** (-2 * lanes / 128) / 8 ** (2 / 128)
    else:
        step = math.log(8) / 64**mixed_b
        expected = 1e4 ** (-2 * lanes / 128) / torch.exp(step * (lanes + 1) ** mixed_b)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("length", "last"),
    [
        (1, 1.15478198469e-4),
        (2048, 1.15478198469e-4),
        (4096, 3.84927328230e-5),
        (8192, 1.64968854956e-5),
    ],
)
def test_golden_9_dynamic_by_length(length, last):
    config = make(dynamic())
    assert config.inv_freq(torch.float64, length=length)[63].item() == pytest.approx(
        last, rel=1e-11
    )
    check_lanes(config, {63: last}, length)
    check_lanes(config.with_length(length), {63: last})


def test_golden_9_dynamic_bases_and_order():
    """Fault H2: the value depends on the length alone, in any order of calls."""
    config = make(dynamic(), rows=2048)
    assert effective_base(config, 4096) == pytest.approx(30527.7367488067, rel=1e-11)
    assert effective_base(config, 8192) == pytest.approx(72195.8600865, rel=1e-11)
    first, _, again = (config.inv_freq(length=n) for n in (1024, 8192, 1024))
    assert torch.equal(first, again)
    assert config.inv_freq(torch.float64)[63].item() == pytest.approx(
        1.1547819846894582e-4, rel=1e-13
    )
    assert config.inv_freq(torch.float64, length=4096)[63].item() == pytest.approx(
        3.849273282298194e-5, rel=1e-13
    )
    assert config.inv_freq(torch.float64, length=8192)[63].item() == pytest.approx(
        1.649688549556369e-5, rel=1e-13
    )
    assert make(dynamic(), rows=8192).inv_freq().equal(config.inv_freq(length=8192))


@pytest.mark.parametrize(
    "scaling",
    [
        dynamic("static_factor", original_max_position=8192),
        dynamic("static_factor", original_max_position=17),
        dynamic("static_factor", original_max_position=None),
        dynamic("static_max", original_max_position=8192, max_trained_position=4096),
    ],
)
def test_golden_10_dynamic_static(scaling):
    config = make(scaling)
    assert effective_base(config) == pytest.approx(30527.7367488, rel=1e-11)
    check_lanes(config, {1: 0.850994291, 32: 0.00572338151})
    assert config.inv_freq(length=99999).equal(config.inv_freq())


@pytest.mark.parametrize("factor", [2, 8.0])
def test_golden_11_static_max_without_trained_length(factor):
    with pytest.warns(UserWarning, match="ignores factor .* this is the unscaled rotation"):
        config = make(dynamic("static_max", factor=factor))
    assert config.inv_freq().equal(make().inv_freq())


def test_golden_12_alpha():
    config = make(NtkAlphaScaling(alpha=1000))
    assert effective_base(config) == pytest.approx(11158839.9251, rel=1e-10)
    check_lanes(config, {1: 0.776034363, 32: 2.99357729e-4, 63: 1.15478198e-7})
    assert config.inv_freq(length=10**6).equal(config.inv_freq())  # no growth rule (fault H2)


def test_golden_13_yarn():
    config = make(yarn(factor=4, original_max_position=32768), base=1e6)
    assert yarn_range(128, 1e6, 32768) == (23, 40)
    assert config.attention_scaling == pytest.approx(1.138629436, rel=1e-9)
    expected = {1: 0.805842188, 23: 0.00697830585, 24: 0.00537532149, 32: 6.02941176e-4}
    check_lanes(config, expected | {40: 4.44569853e-5, 48: 7.90569415e-6, 63: 3.1023444e-7})
    plain = make(base=1e6).inv_freq()
    assert config.inv_freq()[:24].equal(plain[:24])
    torch.testing.assert_close(config.inv_freq()[40:], plain[40:] / 4, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("truncate", "span", "lanes"),
    [
        (
            False,
            (8.092779115512402, 17.39802450158856),
            {9: 0.0317056962, 12: 0.00679495949, 16: 4.56483919e-4, 17: 1.29318701e-4}
            | {31: 3.02351143e-7},
        ),
        (
            True,
            (8, 18),
            {9: 0.0316207523, 12: 0.00701571391, 16: 5.80947502e-4, 17: 2.27947796e-4},
        ),
    ],
    ids=["14-gpt-oss", "15-truncated"],
)
def test_golden_14_15_yarn_truncate(truncate, span, lanes):
    """Also fault H3."""
    scaling = yarn(factor=32, truncate=truncate)
    config = make(scaling, width=64, base=150000)
    assert yarn_range(64, 150000, 4096, truncate=truncate) == pytest.approx(span, rel=1e-15)
    assert config.attention_scaling == pytest.approx(1.346573590, rel=1e-9)
    check_lanes(config, lanes)


@pytest.mark.parametrize("make_scaling", [yarn, deepseek])
def test_golden_16_deepseek_yarn(make_scaling):
    assert yarn_range(64, 1e4, 4096) == (10, 23)
    config = make(make_scaling(mscale=1, mscale_all_dim=1), width=64)
    expected = {11: 0.0390069266, 12: 0.0268793601, 16: 0.0055, 20: 7.90569415e-4}
    check_lanes(config, expected | {22: 1.77827941e-4, 31: 3.33380358e-6})
    assert config.attention_scaling == 1.0
    assert config.softmax_scale_factor == pytest.approx(1.873854207, rel=1e-9)
    lite = make(make_scaling(mscale=0.707, mscale_all_dim=0.707), width=64)
    assert lite.attention_scaling == 1.0
    assert lite.softmax_scale_factor == pytest.approx(1.589626165, rel=1e-9)


def test_golden_17_yarn_step():
    scaling = yarn(factor=4, beta_fast=4, beta_slow=4, truncate=False)
    low, high = yarn_range(64, 1e4, 4096, beta_fast=4, beta_slow=4, truncate=False)
    assert low == high == pytest.approx(17.696960706, rel=1e-9)
    plain = make(width=64)
    for dtype in (torch.float32, torch.float64):
        found, f0 = make(scaling, width=64).inv_freq(dtype), plain.inv_freq(dtype)
        assert found[:18].equal(f0[:18])
        assert found[18:].equal(f0[18:] / 4)


def test_golden_18_yarn_clamp():
    assert yarn_range(64, 1e4, 64) == (0, 9)
    config = make(yarn(factor=4, original_max_position=64), width=64)
    check_lanes(config, {1: 0.687403025, 8: 0.0333333333})


def test_golden_19_extrapolation_factor():
    config = make(yarn(extrapolation_factor=0.5), width=64)
    check_lanes(config, {0: 0.5125, 12: 0.0138349648, 31: 3.33380358e-6})


@pytest.mark.parametrize(
    ("factor", "value"),
    [
        (0.5, 1.0),
        (1, 1.0),
        (4, 1.138629436),
        (16, 1.277258872),
        (32, 1.346573590),
        (40, 1.368887945),
        (64, 1.415888308),
    ],
)
def test_golden_20_magnitude(factor, value):
    assert magnitude(factor) == pytest.approx(value, rel=1e-9)
    assert yarn(factor=factor).attention_scaling(1) == magnitude(factor)


@pytest.mark.parametrize(
    ("given", "yarn_value", "deepseek_value"),
    [
        ({}, 1.368887945, 1.368887945),
        ({"mscale": 1, "mscale_all_dim": 0.8}, 1.056966257, 1.056966257),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 1.368887945, 1.260803777),
        ({"mscale_all_dim": 1}, 1.368887945, 1.0),
    ],
    ids=["nothing", "both", "mscale-alone", "all-dim-alone"],
)
def test_golden_21_magnitudes(given, yarn_value, deepseek_value):
    """Fault H4. The cells of both YaRN classes; SGLang's are in test_config."""
    assert yarn(**given).attention_scaling(1) == pytest.approx(yarn_value, rel=1e-9)
    assert deepseek(**given).attention_scaling(1) == pytest.approx(deepseek_value, rel=1e-9)
    doubled = yarn(attn_factor=2, **given).attention_scaling(1)
    assert doubled == 2 * yarn(**given).attention_scaling(1)


def test_golden_21_attention_factor_replaces():
    """Fault H4: attention_factor 1.0 at 64x is 1.0, where the inferred value would be 1.4159."""
    assert yarn(factor=64, attention_factor=1.0).attention_scaling(1) == 1.0
    assert yarn(attention_factor=1.7, mscale=1, mscale_all_dim=0.8).attention_scaling(1) == 1.7
    switched_off = deepseek(attention_factor=1.0, mscale_all_dim=1.0)
    assert switched_off.attention_scaling(1) == switched_off.softmax_scale_factor == 1.0


def test_softmax_factor_is_a_number_beside_the_table():
    """Fault H4: an equal mscale pair leaves cos and sin alone; the attention layer has the rest."""
    assert yarn().softmax_scale_factor == deepseek().softmax_scale_factor == 1.0
    assert deepseek(mscale_all_dim=1, softmax_scale=False).softmax_scale_factor == 1.0
    assert deepseek(mscale_all_dim=1, softmax_scale=False).attention_scaling(1) == 1.0
    assert DefaultScaling().softmax_scale_factor == llama3().softmax_scale_factor == 1.0


def test_golden_22_llama3():
    """Also fault H5."""
    config, plain = make(llama3(), base=5e5), make(base=5e5)
    middle = dict(zip(range(29, 35), LLAMA3_MIDDLE, strict=True))
    ends = {24: 0.0072926647372, 28: 0.0032114459948, 35: 9.556212354e-5, 63: 3.0689259889e-7}
    check_lanes(config, middle | ends)
    for dtype in (torch.float32, torch.float64):
        assert config.inv_freq(dtype)[:29].equal(plain.inv_freq(dtype)[:29])
        assert config.inv_freq(dtype)[35:].equal(plain.inv_freq(dtype)[35:] / 8)


def test_golden_23_llama3_small_heads():
    config, plain = make(llama3(factor=32), width=64, base=5e5), make(width=64, base=5e5)
    middle = {15: 0.0012905479282, 16: 4.2955679656e-4, 17: 9.7082878026e-5}
    check_lanes(config, middle | {20: 8.5702554899e-6, 31: 9.4183067254e-8})
    assert config.inv_freq()[:15].equal(plain.inv_freq()[:15])
    assert config.inv_freq()[18:].equal(plain.inv_freq()[18:] / 32)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"factor": 131072 / 4096}, 1.1902380714),
        ({"factor": 16}, 1.154700538),
        ({"factor": 1}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": 1.5, "factor": None}, 1.5),
    ],
)
def test_golden_24_longrope_magnitude(given, value):
    assert longrope(**given).attention_scaling(131072) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (4095, [1, 0.0909090909, 0.00833333333, 7.69230769e-4]),
        (4096, [1, 0.0909090909, 0.00833333333, 7.69230769e-4]),
        (4097, [1, 0.05, 0.0025, 1.25e-4]),
    ],
)
def test_golden_25_longrope_switch(length, expected):
    """Fault H1: long from original + 1 on, by the served length or the given one."""
    lanes = dict(enumerate(expected))
    check_lanes(make(longrope("static"), width=8, rows=length), lanes)
    check_lanes(make(longrope(), width=8, rows=length), lanes)
    check_lanes(make(longrope(), width=8, rows=131072), lanes, length)
    check_lanes(make(longrope(), width=8, rows=131072).with_length(length), lanes)


def test_longrope_static_ignores_the_length_of_a_call():
    """Fault H1: one prompt of 5511 tokens in chunks of 1024 sees one factor set."""
    config = make(longrope("static"), width=8, rows=5511)
    chunks = [config.inv_freq(length=n) for n in (1024, 2048, 3072, 4096, 5120, 5511)]
    assert all(chunk.equal(chunks[0]) for chunk in chunks)
    assert chunks[0][3].item() == pytest.approx(1.25e-4, rel=1e-6)


def test_longrope_mscales_override_per_set():
    scaling = longrope(short_mscale=1.1, long_mscale=1.24, attention_factor=1.5)
    assert make(scaling, width=8, rows=4096).attention_scaling == 1.1
    assert make(scaling, width=8, rows=4097).attention_scaling == 1.24
    assert make(scaling, width=8).with_length(4097).attention_scaling == 1.24


def test_golden_26_proportional():
    scaling = ProportionalScaling(partial_rotary_factor=0.25)
    config = make(scaling, width=512, base=1e6)
    check_lanes(config, {1: 0.947463526, 32: 0.177827941, 63: 0.0333762469, 64: 0.0, 255: 0.0})
    assert config.inv_freq().count_nonzero() == 64
    halved = make(dataclasses.replace(scaling, factor=2), width=512, base=1e6)
    assert halved.inv_freq().equal(config.inv_freq() / 2)


def test_golden_27_partial_width_is_the_denominator():
    """D=128, factor 0.25: R = 32 and the frequencies are those of a 32-wide head."""
    config = RopeConfig(head_dim=128, rotary_dim=32, max_position=64)
    assert config.inv_freq().equal(make(width=32).inv_freq())
    assert config.inv_freq()[1].item() == pytest.approx(1e4 ** (-2 / 32), rel=1e-6)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (-100, 1),
        (0, 1),
        (8190, 1),
        (8191, 1.069314718),
        (16383, 1.109861229),
        (100000, 1.256494936),
        (2**31 - 1, 1 + 0.1 * math.log(1 + 2**18)),
    ],
)
def test_golden_41_llama4_query_scale(position, value):
    for dtype in (torch.int32, torch.int64):
        found = llama4_query_scale(torch.tensor([position], dtype=dtype))
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("position", "value"), [(-3, 1), (8191, 1), (8192, 1.069314718)])
def test_golden_41_mistral_query_scale(position, value):
    found = mistral_query_scale(
        torch.tensor(position, dtype=torch.int32), beta=0.1, original_max_position=8192
    )
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(value, rel=1e-6)


# ---- growth class, lengths


@pytest.mark.parametrize(
    ("scaling", "growth"),
    [
        (DefaultScaling(), "S"),
        (LinearScaling(factor=2), "S"),
        (NtkScaling(factor=2), "S"),
        (NtkAlphaScaling(alpha=2), "S"),
        (dynamic("static_factor"), "S"),
        (dynamic("static_max", max_trained_position=1024), "S"),
        (dynamic(), "U"),
        (yarn(), "S"),
        (deepseek(), "S"),
        (llama3(), "S"),
        (longrope(), "U"),
        (longrope("static"), "U"),
        (ProportionalScaling(), "S"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_growth_class(scaling, growth):
    """Class S: frequencies and magnitude are the same for every number of rows (fault A6)."""
    width = 8 if isinstance(scaling, LongRopeScaling) else 64
    few, many = make(scaling, width=width, rows=128), make(scaling, width=width, rows=131072)
    assert few.growth == growth
    same = few.inv_freq().equal(many.inv_freq())
    assert same == (growth == "S")
    if growth == "S":
        assert few.attention_scaling == many.attention_scaling
        assert few.inv_freq(length=10**6).equal(few.inv_freq())


@pytest.mark.parametrize("scaling", [dynamic(), longrope()])
@pytest.mark.parametrize("length", [100, 2048, 4096, 4097, 100000])
def test_length_may_be_a_tensor(scaling, length):
    """The same bits as for an int, and no branch on the value."""
    config = make(scaling, width=8)
    for dtype in (torch.float32, torch.float64):
        found = config.inv_freq(dtype, length=torch.tensor(length))
        assert found.equal(config.inv_freq(dtype, length=length))
    on_meta = config.inv_freq(length=torch.tensor(length, device="meta"))  # cannot be read
    assert on_meta.shape == (4,)


# ---- transformers

KINDS = {
    "linear": ({"factor": 4.0}, LinearScaling(factor=4)),
    "dynamic": ({"factor": 2.0}, dynamic(original_max_position=8192)),
    "yarn": (
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707}
        | {"mscale_all_dim": 0.8, "beta_fast": 30, "beta_slow": 2},
        yarn(mscale=0.707, mscale_all_dim=0.8, beta_fast=30, beta_slow=2),
    ),
    "yarn-truncate": (
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        yarn(factor=32, truncate=False),
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 4096},
        llama3(original_max_position=4096),
    ),
    "longrope": ({"factor": 32.0, "original_max_position_embeddings": 4096}, None),
    "proportional": (
        {"partial_rotary_factor": 0.3, "factor": 3.0},
        ProportionalScaling(partial_rotary_factor=0.3, factor=3),
    ),
}


def lists(width: int) -> dict[str, list[float]]:
    lanes = range(width // 2)
    return {
        "short_factor": [1 + 0.03 * lane for lane in lanes],
        "long_factor": [1 + 0.7 * lane for lane in lanes],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "base"), [(128, 1e6), (80, 10000), (64, 150000.0)])
@pytest.mark.parametrize("length", [None, 4096, 30000])
def test_same_bits_as_transformers(kind, width, base, length):
    """float32 frequencies and the magnitude, bit for bit, from transformers' own functions."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="needs transformers")
    parameters, scaling = KINDS[kind]
    rope_type = kind.split("-")[0]
    if rope_type == "longrope":
        parameters = parameters | lists(width)
        scaling = longrope(**lists(width))
    config = transformers.LlamaConfig(
        head_dim=width,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **parameters},
    )
    expected, factor = utils.ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=length)
    ours = make(scaling, width=width, base=base, rows=8192)
    served = length or (1 if rope_type == "longrope" else None)  # their start is the short set
    assert ours.inv_freq(length=served).equal(expected)
    assert ours.attention_scaling == factor


@pytest.mark.parametrize("kind", ["default", "alpha"])
@pytest.mark.parametrize(("width", "base"), [(128, 1e6), (80, 10000), (64, 150000.0)])
def test_same_bits_as_transformers_models(kind, width, base):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if kind == "default":
        module = pytest.importorskip(
            "transformers.models.llama.modeling_llama", reason="needs transformers"
        )
        config = transformers.LlamaConfig(head_dim=width, rope_parameters={"rope_theta": base})
        expected, _ = module.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        ours = make(width=width, base=base)
    else:
        module = pytest.importorskip(
            "transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense",
            reason="needs transformers",
        )
        parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": base}
        config = transformers.HunYuanDenseV1Config(head_dim=width, rope_parameters=parameters)
        cls = module.HunYuanDenseV1RotaryEmbedding
        expected, _ = cls.compute_ntk_alpha_rope_parameters(config)
        ours = make(NtkAlphaScaling(alpha=1000), width=width, base=base)
    assert ours.inv_freq().equal(expected)


# ---- immunity to global state

EVERY = [
    DefaultScaling(),
    LinearScaling(factor=3),
    NtkScaling(factor=3),
    NtkScaling(factor=3, mixed_b=0.7),
    NtkAlphaScaling(alpha=7),
    dynamic(),
    yarn(),
    deepseek(),
    llama3(),
    longrope(),
    ProportionalScaling(partial_rotary_factor=0.5, factor=2),
]


@pytest.mark.parametrize("scaling", EVERY, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_global_state_touches_nothing(scaling, dtype):
    """Default dtype, meta and default device, autocast, inference mode."""
    config = make(scaling, width=8, base=5e5)
    expected = config.inv_freq(dtype)
    torch.set_default_dtype(torch.float64 if dtype == torch.float32 else torch.float32)
    try:
        found = config.inv_freq(dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == dtype
    assert found.equal(expected)
    with torch.device("meta"):
        assert config.inv_freq(dtype).equal(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert config.inv_freq(dtype).equal(expected)
    with torch.inference_mode():
        found = config.inv_freq(dtype)
    assert not found.is_inference()
    assert found.equal(expected)
    assert found.is_contiguous()
    assert not found.requires_grad


def test_the_meta_check_would_notice():
    """A formula that forgets its device is caught by the test above."""

    class Careless(Scaling):
        def inv_freq(self, lanes, length):
            return 1.0 / lanes.base ** (torch.arange(0, lanes.rotary_dim, 2) / lanes.rotary_dim)

    with torch.device("meta"):
        assert make(Careless(), width=8).inv_freq().is_meta


# ---- numbers


@pytest.mark.parametrize(
    "value",
    [
        4,
        4.0,
        "4",
        "4.0",
        np.float32(4),
        np.int64(4),
        np.array(4),
        torch.tensor(4),
        torch.tensor(4.0),
    ],
    ids=repr,
)
def test_spellings_of_a_number(value):
    scaling = LinearScaling(factor=value)
    assert scaling == LinearScaling(factor=4.0)
    assert type(scaling.factor) is float
    original = yarn(factor=value, original_max_position=value).original_max_position
    assert original == 4
    assert type(original) is int


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "four", -1, 0, "0"])
def test_bad_numbers_are_named(value):
    with pytest.raises(ValueError, match=r"LinearScaling\.factor must be .*, got "):
        LinearScaling(factor=value)


@pytest.mark.parametrize("value", [True, None, [4.0], (4.0,), torch.ones(2), np.ones(1), {}, 1j])
def test_wrong_types_are_named(value):
    with pytest.raises(TypeError, match=r"LinearScaling\.factor must be a number, got "):
        LinearScaling(factor=value)


NUMBERS = [
    (NtkScaling, {"factor": 2}, "factor mixed_b"),
    (NtkAlphaScaling, {"alpha": 2}, "alpha"),
    (
        DynamicScaling,
        {"factor": 2, "policy": "static_max", "original_max_position": 8192}
        | {"max_trained_position": 4096},
        "factor original_max_position max_trained_position",
    ),
    (
        DynamicScaling,
        {"factor": 2, "policy": "by_length", "original_max_position": 8192},
        "factor original_max_position length",
    ),
    (
        YarnScaling,
        {"factor": 2, "original_max_position": 8},
        "factor original_max_position beta_fast beta_slow attention_factor attn_factor",
    ),
    (
        DeepseekYarnScaling,
        {"factor": 2, "original_max_position": 8},
        "factor original_max_position beta_fast beta_slow attn_factor",
    ),
    (
        Llama3Scaling,
        {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position": 8},
        "factor low_freq_factor high_freq_factor original_max_position",
    ),
    (
        LongRopeScaling,
        {"short_factor": SHORT, "long_factor": LONG, "original_max_position": 8}
        | {"policy": "by_length", "factor": 2},
        "original_max_position factor attention_factor short_mscale long_mscale length",
    ),
    (ProportionalScaling, {}, "factor"),
]


@pytest.mark.parametrize(
    ("cls", "fields", "name"),
    [(cls, fields, name) for cls, fields, names in NUMBERS for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -2, 0])
def test_every_number_of_every_type_is_checked(cls, fields, name, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(**fields)
        with pytest.raises(ValueError, match=rf"{cls.__name__}\.{name} must be .*got"):
            cls(**(fields | {name: value}))


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim", "extrapolation_factor"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -2])
def test_numbers_that_may_be_zero(name, value):
    for scaling in (yarn, deepseek):
        scaling(**{name: 0})
        with pytest.raises(ValueError, match=rf"\.{name} must (be finite|not be negative)"):
            scaling(**{name: value})


def test_lengths_are_integers():
    assert yarn(original_max_position=4096.0) == yarn(original_max_position=np.int32(4096))
    with pytest.raises(ValueError, match=r"original_max_position must be an integer, got 4096.5"):
        yarn(original_max_position=4096.5)


@pytest.mark.parametrize(
    ("build", "error", "sentence"),
    [
        (
            lambda: yarn(attention_factor=1.1, attn_factor=1.2),
            ValueError,
            "attention_factor and attn_factor must not both be given, got 1.1 and 1.2",
        ),
        (
            lambda: yarn(beta_fast=1, beta_slow=2),
            ValueError,
            "beta_fast must be at least beta_slow, got 1.0 and 2.0",
        ),
        (
            lambda: yarn(truncate=1),
            TypeError,
            r"YarnScaling\.truncate must be True or False, got 1",
        ),
        (
            lambda: deepseek(attention_factor=1.5),
            ValueError,
            r"attention_factor must be 1\.0 or None, got 1\.5",
        ),
        (
            lambda: llama3(high_freq_factor=0.5),
            ValueError,
            "high_freq_factor must be at least low_freq_factor, got 0.5 and 1.0",
        ),
        (
            lambda: longrope("per_sequence"),
            ValueError,
            "policy must be 'static' or 'by_length', got 'per_sequence'; for a choice by sequence",
        ),
        (
            lambda: longrope("sometimes"),
            ValueError,
            r"policy must be one of \['static', 'by_length'\], got 'sometimes'",
        ),
        (
            lambda: longrope("static", length=5),
            ValueError,
            "length must be None for policy 'static', got 5; it belongs to 'by_length'",
        ),
        (
            lambda: longrope(factor=None, short_mscale=1.1),
            ValueError,
            "LongRopeScaling must have factor .* got none of them",
        ),
        (
            lambda: longrope(short_factor=3.0),
            TypeError,
            r"short_factor must be a list of numbers, got 3\.0",
        ),
        (
            lambda: longrope(long_factor=[1, 2, 0, 4]),
            ValueError,
            r"long_factor\[2\] must be positive, got 0",
        ),
        (
            lambda: make(longrope(), width=16),
            ValueError,
            "short_factor must have rotary_dim / 2 = 8 entries, got 4",
        ),
        (
            lambda: dynamic(policy=None),
            ValueError,
            r"policy must be one of \['by_length', 'static_factor', 'static_max'\], got None",
        ),
        (
            lambda: dynamic(original_max_position=None),
            ValueError,
            "original_max_position must be given for policy 'by_length', got None",
        ),
        (
            lambda: dynamic(max_trained_position=5),
            ValueError,
            "max_trained_position must be None for policy 'by_length', got 5",
        ),
        (
            lambda: dynamic("static_max", max_trained_position=4096),
            ValueError,
            r"max_trained_position must be less than .* = 4096, got 4096",
        ),
        (
            lambda: make(dynamic(), width=2),
            ValueError,
            "rotary_dim must be at least 4 for DynamicScaling, got 2",
        ),
        (
            lambda: make(NtkAlphaScaling(alpha=2), width=2),
            ValueError,
            "rotary_dim must be at least 4 for NtkAlphaScaling, got 2",
        ),
        (
            lambda: make(yarn(), base=1.0),
            ValueError,
            r"base must be above 1 for YarnScaling, got 1\.0",
        ),
        (
            lambda: ProportionalScaling(partial_rotary_factor=1.5),
            ValueError,
            r"partial_rotary_factor must be at most 1, got 1\.5",
        ),
        (
            lambda: RopeConfig(
                head_dim=64, rotary_dim=32, max_position=8, scaling=ProportionalScaling()
            ),
            ValueError,
            r"rotary_dim must equal head_dim \(64\) for ProportionalScaling, got 32",
        ),
    ],
)
def test_error_sentences(build, error, sentence):
    with pytest.raises(error, match=sentence):
        build()


def test_policies_have_no_default():
    for cls, fields in (
        (DynamicScaling, {"factor": 2, "original_max_position": 8}),
        (LongRopeScaling, {"short_factor": SHORT, "long_factor": LONG, "factor": 2}),
    ):
        with pytest.raises(TypeError, match=r"missing .* 'policy'"):
            cls(**({"original_max_position": 8} | fields))


def test_llama3_equal_bounds_are_a_hard_switch():
    """No 0/0 at the bound, wherever it falls: lane 0's wavelength is the bound itself here."""
    scaling = llama3(low_freq_factor=1, high_freq_factor=1, original_max_position=600)
    found, plain = make(scaling).inv_freq(torch.float64), make().inv_freq(torch.float64)
    long = 2 * math.pi / plain > 600
    assert found.equal(torch.where(long, plain / 8, plain))
    assert 0 < long.sum() < 64
    exact = dataclasses.replace(scaling, original_max_position=1)
    assert make(exact, base=1e4).inv_freq().isfinite().all()


def test_equal_lists_are_equal_configs():
    """Lists, tuples, arrays and tensors of numbers in any spelling."""
    spellings = [
        list(LONG),
        LONG,
        np.array(LONG),
        torch.tensor(LONG),
        [str(v) for v in LONG],
        [torch.tensor(v) for v in LONG],
        [np.float64(v) for v in LONG],
        [int(v) for v in LONG],
    ]
    configs = {make(longrope(long_factor=spelling), width=8) for spelling in spellings}
    assert len(configs) == 1


def test_scalings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LinearScaling(factor=2).factor = 3
