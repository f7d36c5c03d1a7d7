"""`RopeConfig` itself, and its translation from dictionaries and transformers configs."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rope_compile.axes import (
    AxialAxes,
    BailingAxes,
    ChunkedAxes,
    ErnieAxes,
    GlmAxes,
    InterleavedAxes,
    PanguAxes,
    XdropeAxes,
)
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
    YarnScaling,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1, 1.1, 1.2, 1.3],
    "long_factor": [1, 2, 4, 8],
    "original_max_position_embeddings": 4096,
}
MODEL = {
    "model_type": "llama",
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}


def translate(rope, **given) -> RopeConfig:
    given = {"head_dim": 128, "max_position": 131072, "base": 5e5} | given
    return RopeConfig.from_dict(rope, **given)


def model(**changes) -> dict[str, object]:
    return MODEL | changes


# ---- RopeConfig


def test_defaults():
    config = RopeConfig(head_dim=128, max_position=4096)
    assert config.rotary_dim == 128
    assert (config.rotary_offset, config.base, config.style) == (0, 10000.0, "half")
    assert (config.scaling, config.axes) == (DefaultScaling(), None)
    assert config.phase_dtype == torch.float32
    assert (config.lane_axes, config.num_axes) == ((), 0)
    assert config.attention_scaling == config.softmax_scale_factor == 1.0


def test_required_and_keyword_only():
    with pytest.raises(TypeError, match=r"missing .* 'max_position'"):
        RopeConfig(head_dim=128)
    with pytest.raises(TypeError, match="positional"):
        RopeConfig(128, 4096)


def test_equal_spellings_are_one_key():
    """The registry's key: 10000 is 10000.0 is "10000" is a NumPy scalar is a 0-d tensor."""
    numbers = [500000, 5e5, "500000.0", np.float64(5e5), np.int32(500000), torch.tensor(5e5)]
    configs = {
        RopeConfig(
            head_dim=width,
            max_position=rows,
            base=base,
            scaling=LinearScaling(factor=factor),
            rotary_dim=rotary,
        )
        for width, rows, base, factor, rotary in itertools.product(
            (64, np.int64(64)), (128, torch.tensor(128)), numbers, (4, "4"), (None, 64)
        )
    }
    assert len(configs) == 1
    assert len({RopeConfig(head_dim=64, max_position=128, base=b) for b in (1e4, 2e4)}) == 2


def test_frozen():
    config = RopeConfig(head_dim=128, max_position=4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.base = 1.0
    assert dataclasses.replace(config, base=5e5).base == 5e5


def test_rotary_width_zero():
    config = RopeConfig(head_dim=64, rotary_dim=0, max_position=8)
    assert config.inv_freq().shape == (0,)
    assert config.inv_freq(torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"head_dim": 0}, ValueError, "head_dim must be a positive integer, got 0"),
        ({"head_dim": 64.5}, ValueError, r"head_dim must be an integer, got 64\.5"),
        ({"head_dim": None}, TypeError, "head_dim must be a number, got None"),
        ({"max_position": -1}, ValueError, "max_position must be a positive integer, got -1"),
        ({"base": 0}, ValueError, "base must be positive, got 0"),
        ({"base": float("nan")}, ValueError, "base must be finite, got nan"),
        (
            {"rotary_dim": 33},
            ValueError,
            r"rotary_dim must be even and between 0 and head_dim \(64\)",
        ),
        ({"rotary_dim": 66}, ValueError, r"rotary_dim must be even .* got 66"),
        ({"rotary_dim": -2}, ValueError, r"rotary_dim must be even .* got -2"),
        (
            {"rotary_dim": 32, "rotary_offset": 33},
            ValueError,
            r"rotary_offset must be between 0 and head_dim - rotary_dim \(32\), got 33",
        ),
        ({"rotary_offset": -1}, ValueError, "rotary_offset must be between"),
        (
            {"style": "neox"},
            ValueError,
            r"style must be one of \['half', 'interleaved', .* got 'neox'",
        ),
        ({"style": "half_blocks"}, ValueError, "must be used with AxialAxes, got axes=None"),
        (
            {"scaling": None},
            TypeError,
            r"scaling must be a Scaling such as DefaultScaling\(\), got None",
        ),
        ({"scaling": {"factor": 2}}, TypeError, "scaling must be a Scaling"),
        ({"axes": (8, 12, 12)}, TypeError, r"axes must be an Axes such as .* got \(8, 12, 12\)"),
        (
            {"phase_dtype": torch.bfloat16},
            TypeError,
            r"phase_dtype must be torch\.float32 or torch\.float64, got torch\.bfloat16",
        ),
    ],
)
def test_construction_errors(changes, error, sentence):
    with pytest.raises(error, match=sentence):
        RopeConfig(**({"head_dim": 64, "max_position": 8} | changes))


def test_inv_freq_dtype_error():
    with pytest.raises(TypeError, match=r"dtype must be .* got torch\.float16"):
        RopeConfig(head_dim=64, max_position=8).inv_freq(torch.float16)
    with pytest.raises(ValueError, match="scaling must have a by_length policy, got Default"):
        RopeConfig(head_dim=64, max_position=8).with_length(5)


# ---- types of FEATURES 4.2


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (None, DefaultScaling()),
        ({}, DefaultScaling()),
        ({"rope_type": "default"}, DefaultScaling()),
        ({"type": "linear", "factor": 4}, LinearScaling(factor=4)),
        ({"rope_type": "ntk", "factor": 8}, NtkScaling(factor=8)),
        ({"rope_type": "ntk", "factor": 8, "mixed_b": 0.6}, NtkScaling(factor=8, mixed_b=0.6)),
        (
            {"rope_type": "dynamic", "factor": 2},
            DynamicScaling(factor=2, policy="by_length", original_max_position=131072),
        ),
        (
            {"rope_type": "dynamic", "factor": 2, "alpha": None, "max_position_embeddings": 8192},
            DynamicScaling(factor=2, policy="by_length", original_max_position=8192),
        ),
        ({"rope_type": "dynamic", "alpha": 1000}, NtkAlphaScaling(alpha=1000)),
        (
            {"type": "dynamic", "alpha": 1000, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
            | {"mscale": 1.0, "mscale_all_dim": 1.0},
            NtkAlphaScaling(alpha=1000),
        ),
        (LLAMA3, Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4,
                               original_max_position=8192)),
        (YARN, YarnScaling(factor=40, original_max_position=4096)),
        (
            YARN | {"truncate": False, "beta_fast": 30, "beta_slow": None, "attn_factor": 2}
            | {"extrapolation_factor": 0.5, "attention_factor": None},
            YarnScaling(factor=40, original_max_position=4096, truncate=False, beta_fast=30,
                        attn_factor=2, extrapolation_factor=0.5),
        ),
        (
            YARN | {"rope_type": "deepseek_yarn", "mscale": 0.707, "mscale_all_dim": 0},
            DeepseekYarnScaling(factor=40, original_max_position=4096, mscale=0.707),
        ),
        (
            YARN | {"rope_type": "deepseek_yarn", "attention_factor": 1.0},
            DeepseekYarnScaling(factor=40, original_max_position=4096, attention_factor=1),
        ),
        (
            YARN | {"rope_type": "deepseek_llama_scaling", "mscale_all_dim": 1.0},
            DeepseekYarnScaling(factor=40, original_max_position=4096, mscale_all_dim=1,
                                attention_factor=1),
        ),
        (
            {"factor": 16, "original_max_position_embeddings": 8192, "beta": 32.0, "alpha": 2.0}
            | {"apply_scale": False},
            DeepseekYarnScaling(factor=16, original_max_position=8192, beta_slow=2,
                                mscale_all_dim=1, softmax_scale=False),
        ),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2},
            ProportionalScaling(partial_rotary_factor=0.25, factor=2),
        ),
    ],
)  # fmt: skip
def test_types(rope, scaling):
    config = translate(rope)
    assert config.scaling == scaling
    assert (config.base, config.axes, config.rotary_dim) == (5e5, None, 128)
    assert translate((rope or {}) | {"rope_theta": "500000"}, base=None) == config


@pytest.mark.parametrize(
    ("dialect", "policy", "trained"),
    [
        ("transformers", "by_length", None),
        ("sglang", "static_factor", None),
        ("vllm", "static_max", 4096),
    ],
)
def test_dynamic_per_dialect(dialect, policy, trained):
    rope = {"rope_type": "dynamic", "factor": 2.0}
    if trained:
        rope["max_trained_positions"] = trained
    scaling = translate(rope, dialect=dialect, model_max_position=8192).scaling
    original = None if policy == "static_factor" else 8192
    assert scaling == DynamicScaling(
        factor=2, policy=policy, original_max_position=original, max_trained_position=trained
    )


def test_dynamic_vllm_without_trained_length_warns():
    with pytest.warns(UserWarning, match="unscaled rotation"):
        translate({"rope_type": "dynamic", "factor": 2.0}, dialect="vllm")


@pytest.mark.parametrize(
    ("dialect", "policy", "factor"),
    [("transformers", "by_length", 16), ("sglang", "by_length", 32), ("vllm", "static", 32)],
)
def test_longrope_per_dialect(dialect, policy, factor):
    for name in ("longrope", "su"):
        rope = LONGROPE | {"rope_type": name, "factor": 16}
        scaling = translate(rope, head_dim=8, dialect=dialect).scaling
        assert isinstance(scaling, LongRopeScaling)
        assert (scaling.policy, scaling.factor) == (policy, factor)
        assert scaling.long_factor == (1.0, 2.0, 4.0, 8.0)


def test_longrope_old_spelling_and_null_factor():
    expected = translate(LONGROPE, head_dim=8)
    assert expected.scaling.factor == 32  # M / original
    assert expected.attention_scaling == pytest.approx(1.1902380714, rel=1e-10)
    for changes in ({"rope_type": "yarn"}, {"rope_type": "su"}, {"type": "su"}, {"factor": None}):
        assert translate(LONGROPE | changes, head_dim=8) == expected


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, 1.368887945),
        ({"attn_factor": 2}, 2 * 1.368887945),
        ({"mscale": 1, "mscale_all_dim": 0.8}, 1.056966257),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 1.260803777),
        ({"mscale_all_dim": 1}, 1.368887945),
    ],
)
def test_golden_21_sglang_yarn(given, value):
    config = translate(YARN | given, dialect="sglang")
    assert config.attention_scaling == pytest.approx(value, rel=1e-9)
    with pytest.warns(UserWarning, match="yarn ignores attention_factor"):
        ignoring = translate(YARN | {"attention_factor": 7}, dialect="sglang")
    assert ignoring.attention_scaling == pytest.approx(1.368887945, rel=1e-9)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, 1.368887945),
        ({"mscale": 1, "mscale_all_dim": 0.8}, 1.056966257),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 1.368887945),
        ({"mscale": 0, "mscale_all_dim": 0.7}, 1.368887945),
        ({"mscale_all_dim": 1}, 1.368887945),
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": None}, 1.368887945),
        ({"attn_factor": 2}, 2 * 1.368887945),
        ({"apply_yarn_scaling": False}, 1.0),
        ({"apply_yarn_scaling": False, "attn_factor": 2}, 2.0),
        ({"apply_yarn_scaling": True}, 1.368887945),
    ],
)
def test_golden_21_yarn(given, value):
    """Also fault H4 and the trap that a zero mscale counts as absent for yarn."""
    for dialect in ("transformers", "vllm"):
        found = translate(YARN | given, dialect=dialect).attention_scaling
        assert found == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("factor", "value"), [(4, 1.097040605), (8, 1.145560908)])
def test_golden_21_telechat(factor, value):
    rope = YARN | {"rope_type": "telechat3-yarn", "factor": factor}
    assert translate(rope).attention_scaling == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("rope", "axes"),
    [
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, ChunkedAxes((16, 24, 24))),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, ChunkedAxes((16, 24, 24))),
        (YARN | {"mrope_section": [16, 24, 24]}, ChunkedAxes((16, 24, 24))),
        (
            {"type": "mrope", "rope_type": "default", "mrope_section": (16, 24, 24)},
            ChunkedAxes((16, 24, 24)),
        ),
        ({"mrope_section": [24, 20, 20], "mrope_interleaved": True}, InterleavedAxes((24, 20, 20))),
        (
            {"rope_type": "mrope", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            InterleavedAxes((24, 20, 20)),
        ),
        ({"mrope_section": [24, 20, 20], "interleaved": True}, InterleavedAxes((24, 20, 20))),
        ({"mrope_section": [24, 20, 20], "mrope_interleaved": False}, ChunkedAxes((24, 20, 20))),
        (
            {"mrope_section": [16, 24, 24], "mrope_interleaved": True}
            | {"mrope_interleaved_glm": True},
            GlmAxes((16, 24, 24)),
        ),
        ({"mrope_section": [20, 22, 22], "video_rope": True}, BailingAxes((20, 22, 22))),
        ({"type": "bailing_mrope", "mrope_section": [20, 22, 22]}, BailingAxes((20, 22, 22))),
        (
            {"type": "openpangu", "mrope_section": [16, 24, 24], "mrope_interleaved": True},
            PanguAxes((16, 24, 24)),
        ),
        (
            {"type": "xdrope", "alpha": 1000, "xdrope_section": [16, 16, 16, 16]},
            XdropeAxes((16, 16, 16, 16)),
        ),
        (
            {"type": "xdrope", "alpha": 1000, "mrope_section": [16, 16, 16, 16]}
            | {"xdrope_section": [16, 16, 16, 16]},
            XdropeAxes((16, 16, 16, 16)),
        ),
        ({"type": "mllama4"}, AxialAxes((64, 64))),
    ],
)
def test_axis_maps(rope, axes):
    config = translate(rope)
    assert config.axes == axes
    assert config == translate(dict(reversed(rope.items())))


def test_xdrope_is_the_legacy_form_in_vllm():
    rope = {"type": "xdrope", "alpha": 1000, "xdrope_section": [16, 16, 16, 16]}
    assert translate(rope, dialect="vllm").axes.full_width is False
    assert translate(rope).scaling == NtkAlphaScaling(alpha=1000)


def test_axial_needs_axes():
    with pytest.raises(ValueError, match=r"axes must be given for rope_type 'axial', got None"):
        translate({"rope_type": "axial"})
    given = translate({"rope_type": "axial"}, axes=AxialAxes((64, 64)), style="half_blocks")
    assert (given.axes, given.style) == (AxialAxes((64, 64)), "half_blocks")


# ---- traps of FEATURES 4.4


@pytest.mark.parametrize(
    "factor",
    [4, "4", 4.0, np.float32(4), np.int64(4), torch.tensor(4), torch.tensor(4.0)],
    ids=repr,
)
def test_trap_spellings_of_numbers(factor):
    assert translate(YARN | {"factor": factor}) == translate(YARN | {"factor": 4.0})
    listed = LONGROPE | {"long_factor": [factor] * 4}
    assert translate(listed, head_dim=8).scaling.long_factor == (4.0,) * 4


def test_trap_order_lists_and_tuples_do_not_matter():
    rope = LONGROPE | {"rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    given = {"head_dim": 8, "base": None}
    expected = translate(rope, **given)
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in reversed(rope.items())}
    assert translate(tuples, **given) == expected
    assert hash(translate(tuples, **given)) == hash(expected)


@pytest.mark.parametrize(
    "config",
    [
        model(rope_theta=5e5, rope_scaling=LLAMA3),
        model(rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
        model(
            rope_parameters={"full_attention": YARN | {"rope_theta": 1e6}},
            layer_types=["full_attention"],
        ),
        model(rope_theta=5e5, original_max_position_embeddings=4096, rope_scaling=LLAMA3),
    ],
)
def test_trap_the_callers_dictionary_is_never_mutated(config):
    before = copy.deepcopy(config)
    layer = "full_attention" if "layer_types" in config else None
    assert RopeConfig.from_transformers(config, layer) is not None
    assert config == before


def test_trap_section_order():
    """[t, h, w] everywhere but Ernie, whose sections are [h, w, t]."""
    rope = {"rope_theta": 5e5, "mrope_section": [22, 22, 20]}
    ernie = RopeConfig.from_transformers(model(model_type="ernie4_5_vl_moe", rope_parameters=rope))
    assert ernie.axes == ErnieAxes((22, 22, 20))
    assert ernie.axes.lanes_per_axis() == (20, 22, 22)
    assert translate(rope).axes.lanes_per_axis() == (22, 22, 20)


def test_trap_attention_factor():
    assert translate(YARN | {"attention_factor": None}) == translate(YARN)
    for rope in (YARN, LONGROPE):
        width = 8 if rope is LONGROPE else 128
        with pytest.raises(ValueError, match="attention_factor must be positive, got 0"):
            translate(rope | {"attention_factor": 0}, head_dim=width)
    with pytest.raises(ValueError, match="must not have both 'attention_factor' and 'attn_factor'"):
        translate(YARN | {"attention_factor": 1.2, "attn_factor": 1.1})
    with pytest.raises(ValueError, match=r"attention_factor must be 1\.0 or absent"):
        translate(YARN | {"rope_type": "deepseek_yarn", "attention_factor": 1.2})


def test_trap_zero_mscale_is_a_number_for_deepseek_yarn():
    rope = YARN | {"mscale": 0.707, "mscale_all_dim": 0}
    deepseek = translate(rope | {"rope_type": "deepseek_yarn"})
    assert deepseek.attention_scaling == pytest.approx(1.260803777, rel=1e-9)
    assert translate(rope) == translate(rope | {"mscale_all_dim": None})
    zero = translate(YARN | {"rope_type": "deepseek_yarn", "mscale": 0})
    assert zero.attention_scaling == 1.0


def test_trap_null_factor_is_the_ratio_of_lengths():
    found = translate(YARN | {"factor": None}, model_max_position=16384).scaling
    assert found == YarnScaling(factor=4, original_max_position=4096)
    missing = {key: value for key, value in YARN.items() if key != "factor"}
    with pytest.raises(ValueError, match="rope_scaling must have 'factor' for rope_type 'yarn'"):
        translate(missing)


def test_golden_27_partial_factor_counts_once():
    """D=128, 0.25: R = 32; the same factor at the top level and inside is one factor."""
    outside = translate(None, partial_rotary_factor=0.25)
    assert outside.rotary_dim == 32
    assert translate({"partial_rotary_factor": 0.25}) == outside
    assert translate({"partial_rotary_factor": 0.25}, partial_rotary_factor="0.25") == outside
    assert outside.inv_freq().equal(RopeConfig(head_dim=32, max_position=8, base=5e5).inv_freq())


@pytest.mark.parametrize("given", [{"rotary_dim": 32}, {"rope": {"rope_dim": 32}}])
def test_trap_partial_factor_beside_an_explicit_width(given):
    rope, width = given.get("rope", {}), {k: v for k, v in given.items() if k != "rope"}
    assert translate(rope, **width).rotary_dim == 32
    assert translate(rope | {"partial_rotary_factor": 0.25}, **width).rotary_dim == 32
    assert translate(rope | {"partial_rotary_factor": 1.0}, **width).rotary_dim == 32
    with pytest.raises(
        ValueError, match=r"must agree with the rotary width 32 of head_dim 128, got 0.5"
    ):
        translate(rope | {"partial_rotary_factor": 0.5}, **width)


def test_trap_partial_factor_of_mla_checkpoints():
    """A stray 0.5 that describes qk_rope_head_dim is accepted and not applied to it again."""
    mla = model(
        model_type="bailing_hybrid", qk_rope_head_dim=64, qk_nope_head_dim=128, rope_theta=6e6
    )
    assert RopeConfig.from_transformers(mla).rotary_dim == 64
    found = RopeConfig.from_transformers(mla | {"partial_rotary_factor": 0.5})
    assert (found.head_dim, found.rotary_dim) == (64, 64)
    with pytest.raises(
        ValueError, match=r"must agree with the rotary width 64 of head_dim 64, got 0.3"
    ):
        RopeConfig.from_transformers(mla | {"partial_rotary_factor": 0.3})


def test_trap_partial_factor_errors():
    with pytest.raises(ValueError, match=r"must have one value, got 0.5 in rope_scaling and 0.25"):
        translate({"partial_rotary_factor": 0.5}, partial_rotary_factor=0.25)
    with pytest.raises(
        ValueError, match=r"must give an even rotary_dim, got 0\.2 \* head_dim 128 = 25"
    ):
        translate({"partial_rotary_factor": 0.2})  # 128 * 0.2 = 25
    with pytest.raises(ValueError, match=r"partial_rotary_factor must be at most 1, got 4\.0"):
        translate({"partial_rotary_factor": 4})
    with pytest.raises(ValueError, match="rotary_dim must have one value, got 64 and rope_dim 32"):
        translate({"rope_dim": 32}, rotary_dim=64)


def test_sglang_argument_multiplies_rotary_dim():
    found = translate(None, rotary_dim=64, partial_rotary_factor=0.5, dialect="sglang")
    assert (found.rotary_dim, found.head_dim) == (32, 128)
    whole = translate(None, rotary_dim=64, partial_rotary_factor=1.0, dialect="sglang")
    assert whole.rotary_dim == 64


def test_proportional_does_not_shrink():
    config = translate({"rope_type": "proportional", "partial_rotary_factor": 0.25})
    assert config.rotary_dim == 128
    assert config.inv_freq().count_nonzero() == 16


THETAS = {
    "top-level only": (5e5, None),
    "nested only": (None, 5e5),
    "both equal": (5e5, "500000.0"),
    "both different": (1e4, 5e5),
    "neither": (None, None),
}
EXPECTED = Llama3Scaling(
    factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=8192
)


@pytest.mark.parametrize("where", THETAS)
@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters", "nested"])
def test_trap_theta_matrix(where, container):
    """Fault H6. Per layer type a top-level theta is only the fallback of entries without one."""
    outside, inside = THETAS[where]
    rope = dict(LLAMA3) | ({} if inside is None else {"rope_theta": inside})
    config = model() if outside is None else model(rope_theta=outside)
    layer = None
    if container == "nested":
        layer = "full_attention"
        sliding = {"rope_type": "default", "rope_theta": 1e4}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
        config["layer_types"] = ["sliding_attention", "full_attention"]
    else:
        config[container] = rope
    if where == "neither":
        with pytest.raises(ValueError, match=r"must have 'rope_theta', or base .* got neither"):
            RopeConfig.from_transformers(config, layer)
    elif where == "both different" and layer is None:
        with pytest.raises(
            ValueError, match=r"rope_theta must have one value, got 500000 in .* 10000"
        ):
            RopeConfig.from_transformers(config, layer)
    else:
        found = RopeConfig.from_transformers(config, layer)
        assert (found.base, found.scaling) == (5e5, EXPECTED)


def test_trap_a_defaulted_top_level_theta_loses():
    """Fault H6: an object whose class default is 10000 beside an explicit 500000 inside."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    config.rope_theta = config.default_theta
    assert RopeConfig.from_transformers(config).base == 5e5
    config.rope_theta = 1e6  # no default: someone meant it
    with pytest.raises(ValueError, match="rope_theta must have one value"):
        RopeConfig.from_transformers(config)


@pytest.mark.parametrize(
    ("pair", "same"),
    [
        (("su", "longrope"), True),
        (("longrope", "su"), True),
        (("longrope", "longrope"), True),
        (("yarn", "llama3"), False),
        (("default", "yarn"), False),
    ],
)
def test_trap_two_type_keys(pair, same):
    rope = LONGROPE | {"type": pair[0], "rope_type": pair[1]}
    if same:
        assert translate(rope, head_dim=8) == translate(LONGROPE, head_dim=8)
        return
    with pytest.raises(ValueError, match="rope_scaling must have one type, got"):
        translate(rope, head_dim=8)


PER_LAYER = {
    "full_attention": YARN | {"rope_theta": 1e6, "truncate": False},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "no_rope": None,
}


def test_trap_layer_types_do_not_leak():
    """Fault H9: each layer type equals its own oracle, truncate included; None means no RoPE."""
    config = model(
        rope_parameters=PER_LAYER, layer_types=["sliding_attention", "full_attention", "no_rope"]
    )
    full = RopeConfig.from_transformers(config, "full_attention")
    yarn = YarnScaling(factor=40, original_max_position=4096, truncate=False)
    assert full == RopeConfig(head_dim=128, max_position=131072, base=1e6, scaling=yarn)
    sliding = RopeConfig.from_transformers(config, "sliding_attention")
    assert sliding == RopeConfig(head_dim=128, max_position=131072, base=1e4)
    assert RopeConfig.from_transformers(config, "no_rope") is None
    for wrong in ("chunked_attention", None):
        with pytest.raises(ValueError, match=f"layer_type must be one of .* got {wrong!r}"):
            RopeConfig.from_transformers(config, wrong)
    with pytest.raises(ValueError, match="must be flat, got an entry per layer type"):
        translate(PER_LAYER)


def test_a_flat_dictionary_serves_every_declared_layer_type():
    config = model(rope_theta=5e5, layer_types=["full_attention", "sliding_attention"])
    expected = RopeConfig.from_transformers(config)
    assert RopeConfig.from_transformers(config, "sliding_attention") == expected
    with pytest.raises(ValueError, match=r"layer_type must be one of the config's layer types"):
        RopeConfig.from_transformers(config, "linear_attention")


def test_unknown_entries_beside_layer_types_are_errors():
    config = model(rope_parameters=PER_LAYER | {"rope_type": "default", "factr": 3})
    with pytest.raises(ValueError, match=r"has unknown keys \['factr', 'no_rope'\] beside"):
        RopeConfig.from_transformers(config, "full_attention")


def test_trap_m_may_already_be_scaled():
    """Fault A6: factor never multiplies the rows, and rows never touch the frequencies."""
    for factor, kind in itertools.product((4.0, 40.0), ("yarn", "deepseek_yarn")):
        rope = YARN | {"factor": factor, "rope_type": kind}
        config = RopeConfig.from_transformers(model(rope_theta=1e6, rope_scaling=rope))
        assert config.max_position == 131072
        served = RopeConfig.from_transformers(
            model(rope_theta=1e6, rope_scaling=rope), max_position=1000
        )
        assert served.max_position == 1000
        assert served.inv_freq().equal(config.inv_freq())
    llama = RopeConfig.from_transformers(model(rope_theta=5e5, rope_scaling=LLAMA3))
    assert (llama.max_position, llama.scaling) == (131072, EXPECTED)


def test_a6_an_alias_gives_the_same_table():
    config = translate(LONGROPE, head_dim=8)
    assert translate(LONGROPE | {"rope_type": "su"}, head_dim=8) == config
    assert config.max_position == 131072


def test_the_served_length_is_not_the_models_maximum():
    """M stays in the formula when fewer or more rows are served."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    config = RopeConfig.from_transformers(
        model(rope_theta=1e4, rope_scaling=rope, max_position_embeddings=2048), max_position=8192
    )
    assert config.scaling.original_max_position == 2048
    assert config.inv_freq(torch.float64)[63].item() == pytest.approx(1.64968854956e-5, rel=1e-10)


def test_trap_missing_original_length():
    """An error in a raw dictionary; an object has it filled with M, which is taken as given."""
    for rope, width in ((LLAMA3, 128), (YARN, 128), (LONGROPE, 8)):
        short = {k: v for k, v in rope.items() if not k.startswith("original")}
        with pytest.raises(ValueError, match="must have 'original_max_position_embeddings'"):
            translate(short, head_dim=width)
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    filled = transformers.LlamaConfig(
        max_position_embeddings=8192, rope_parameters={"rope_type": "yarn", "factor": 2.0}
    )
    assert RopeConfig.from_transformers(filled).scaling.original_max_position == 8192


def test_a_top_level_original_length_wins():
    config = model(rope_theta=5e5, rope_scaling=LLAMA3, original_max_position_embeddings=4096)
    assert RopeConfig.from_transformers(config).scaling.original_max_position == 4096
    plain = model(rope_theta=5e5, original_max_position_embeddings=4096)
    assert RopeConfig.from_transformers(plain).scaling == DefaultScaling()
    other = RopeConfig.from_transformers(plain | {"rope_scaling": {"type": "ntk", "factor": 2}})
    assert other.scaling == NtkScaling(factor=2)


# ---- unknown, missing and refused


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LONGROPE, {"type": "linear", "factor": 2}])
def test_every_missing_required_key_is_named(rope):
    required = set(rope) - {"rope_type", "type"}
    for key in required:
        short = {k: v for k, v in rope.items() if k != key}
        with pytest.raises(ValueError, match=f"rope_scaling must have {key!r} for rope_type"):
            translate(short, head_dim=8)


@pytest.mark.parametrize(
    ("rope", "error", "sentence"),
    [
        (
            YARN | {"truncated": False},
            ValueError,
            r"unknown keys \['truncated'\] for rope_type 'yarn'; did you mean 'truncate'\?",
        ),
        (
            {"facter": 2, "type": "linear"},
            ValueError,
            r"must have 'factor' .*; did you mean 'factor' by 'facter'\?",
        ),
        (
            {"mrope_sections": [16, 24, 24]},
            ValueError,
            r"unknown keys \['mrope_sections'\] .* did you mean 'mrope_section'\?",
        ),
        ({"zzz": 1}, ValueError, r"unknown keys \['zzz'\] for rope_type 'default'; known are \["),
        ({"factor": 2.0}, ValueError, r"unknown keys \['factor'\] for rope_type 'default'"),
        (
            {"rope_type": "dynamic", "factor": 2, "max_trained_positions": 9},
            ValueError,
            "unknown keys .*max_trained_positions",
        ),
        (
            {"rope_type": "llama-3", "factor": 2},
            ValueError,
            r"must have a rope_type of \[.*\], got 'llama-3'; did you mean 'llama3'\?",
        ),
        ({"rope_type": "xpos"}, ValueError, r"must have a rope_type of .* got 'xpos'"),
        ({"rope_type": 3}, TypeError, "rope_type must be a string, got 3"),
        ({"type": "linear", "factor": [2, 4]}, NotImplementedError, "factor must be one number"),
        ({"use_fope": True}, NotImplementedError, "must not have 'use_fope', which is not impl"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            NotImplementedError,
            "must not have 'dual_chunk_attention_config', which is not implemented yet",
        ),
        ({"type": "mrope"}, ValueError, "must have 'mrope_section' for the 'chunked' axis map"),
        (
            {"mrope_interleaved": True},
            ValueError,
            "must have 'mrope_section' for the 'interleaved' axis map",
        ),
        (
            {"mrope_section": [16, 24, 24], "mrope_interleaved": 1},
            TypeError,
            "mrope_interleaved must be True or False, got 1",
        ),
        (
            {"mrope_section": [16, 24, 23]},
            ValueError,
            "ChunkedAxes must share out rotary_dim / 2 = 64 lanes",
        ),
        ({"mrope_section": 64}, TypeError, "mrope_section must be a list of integers, got 64"),
        (
            {"type": "xdrope", "alpha": 2, "mrope_section": [16] * 4}
            | {"xdrope_section": [20, 12, 16, 16]},
            ValueError,
            r"mrope_section and xdrope_section must be equal, got \(16, 16, 16, 16\) and \(20,",
        ),
        (
            {"type": "bailing_mrope", "mrope_section": [20, 22, 22], "mrope_interleaved": True},
            ValueError,
            "must not have 'mrope_interleaved' for a model with the 'bailing' axis map",
        ),
        (LLAMA3 | {"factor": "eight"}, ValueError, "factor must be a number, got 'eight'"),
        (LLAMA3 | {"high_freq_factor": 0.5}, ValueError, "high_freq_factor must be at least"),
        ([("rope_type", "yarn")], TypeError, "rope_scaling must be a dictionary or None, got"),
        (
            YARN | {"max_position_embeddings": 4096},
            ValueError,
            "max_position_embeddings must have one value, got 4096 in rope_scaling and 131072",
        ),
    ],
)  # fmt: skip
def test_refused_dictionaries(rope, error, sentence):
    with pytest.raises(error, match=sentence):
        translate(rope, model_max_position=131072)


def test_refused_arguments():
    with pytest.raises(ValueError, match=r"dialect must be one of .* got 'trt'"):
        translate(None, dialect="trt")
    with pytest.raises(ValueError, match="axes must be None when rope_scaling has 'mrope_section'"):
        translate({"mrope_section": [16, 24, 24]}, axes=GlmAxes((16, 24, 24)))
    with pytest.raises(ValueError, match="my_dict must have 'rope_theta', or base must be given"):
        translate(None, base=None, name="my_dict")
    for missing in ("max_position_embeddings", "head_dim"):
        config = {k: v for k, v in model(rope_theta=1e4).items() if k != missing}
        config.pop("hidden_size")
        with pytest.raises(ValueError, match=f"config must have '{missing}', or"):
            RopeConfig.from_transformers(config)
    with pytest.raises(ValueError, match="max_position must be a positive integer, got 0"):
        RopeConfig.from_transformers(model(rope_theta=1e4), max_position=0)
    with pytest.raises(TypeError, match=r"base \(rope_theta\) must be a number, got \[10000"):
        RopeConfig.from_transformers(model(rope_theta=[1e4, 5e5]))
    with pytest.raises(TypeError, match="rope_scaling must be a dictionary or None, got 'yarn'"):
        RopeConfig.from_transformers(model(rope_theta=1e4, rope_scaling="yarn"))
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling must be equal"):
        RopeConfig.from_transformers(model(rope_parameters=YARN, rope_scaling=LLAMA3))


def test_known_metadata_is_accepted_and_not_part_of_the_key():
    assert translate(YARN | {"llama_4_scaling_beta": 0.1}) == translate(YARN)
    offset = translate({"rope_dim": 32, "is_deepseek_v4": True})
    assert (offset.rotary_dim, offset.rotary_offset) == (32, 96)
    assert translate({"use_fope": False, "rope_theta": 5e5}) == translate(None)


# ---- config.json files


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (model(model_type="llama"), None, {"base": 1e4}),  # Llama 1 and 2 have no theta
        (
            {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_positions": 2048}
            | {"rotary_dim": 64},
            None,
            {"head_dim": 256, "rotary_dim": 64, "style": "interleaved", "max_position": 2048},
        ),
        (
            model(model_type="gpt_neox", head_dim=None, rotary_pct=0.25, rotary_emb_base=2e4),
            None,
            {"rotary_dim": 32, "base": 2e4},
        ),
        (model(model_type="gpt_neox", rotary_emb_base=1e4), None, {"rotary_dim": 32}),
        (model(model_type="x", rope_pct=0.25, rope_theta=1e4), None, {"rotary_dim": 32}),
        (model(model_type="phi", rope_theta=1e4), None, {"rotary_dim": 64}),
        (model(model_type="phi", rope_theta=1e4, partial_rotary_factor=0.4, head_dim=80), None,
         {"rotary_dim": 32, "head_dim": 80}),
        (model(model_type="cohere", rope_theta=8e6), None, {"style": "interleaved", "base": 8e6}),
        (
            model(
                model_type="deepseek_v3", head_dim=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
                rope_theta=1e4,
                rope_scaling={"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "beta_fast": 32, "beta_slow": 1,
                              "original_max_position_embeddings": 4096},
            ),
            None,
            {"head_dim": 64, "style": "interleaved_to_half",
             "scaling": YarnScaling(factor=40, original_max_position=4096, mscale=1,
                                    mscale_all_dim=1)},
        ),
        (
            model(model_type="deepseek_v3", qk_rope_head_dim=64, rope_theta=1e4)
            | {"rope_interleave": False},
            None,
            {"head_dim": 64, "style": "half"},
        ),
        (
            model(model_type="gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4,
                  rope_scaling={"rope_type": "linear", "factor": 8.0}),
            "full_attention",
            {"base": 1e6, "scaling": LinearScaling(factor=8)},
        ),
        (
            model(model_type="gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4,
                  rope_scaling={"rope_type": "linear", "factor": 8.0}),
            "sliding_attention",
            {"base": 1e4, "scaling": DefaultScaling()},
        ),
        (
            model(model_type="modernbert", global_rope_theta=160000.0, local_rope_theta=1e4),
            "full_attention",
            {"base": 160000.0},
        ),
        (
            model(model_type="modernbert", global_rope_theta=160000.0, local_rope_theta=1e4),
            "sliding_attention",
            {"base": 1e4},
        ),
        (
            model(model_type="deepseek_v4", head_dim=512, qk_rope_head_dim=64, rope_theta=1e4,
                  compress_rope_theta=160000.0, rope_scaling=YARN),
            "main",
            {"base": 1e4, "rotary_dim": 64, "rotary_offset": 448, "style": "interleaved"},
        ),
        (
            model(model_type="deepseek_v4", head_dim=512, qk_rope_head_dim=64, rope_theta=1e4,
                  compress_rope_theta=160000.0, rope_scaling=YARN),
            "compress",
            {"base": 160000.0, "attention_scaling": 1.0,
             "scaling": YarnScaling(factor=40, original_max_position=4096, attention_factor=1)},
        ),
        (
            model(model_type="qwen2_vl", rope_theta=1e6,
                  rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
            None,
            {"axes": ChunkedAxes((16, 24, 24)), "base": 1e6},
        ),
        (
            {"model_type": "qwen3_vl",
             "text_config": model(model_type="qwen3_vl_text", rope_theta=5e6, rope_scaling={
                 "rope_type": "default", "mrope_section": [24, 20, 20],
                 "mrope_interleaved": True})},
            None,
            {"axes": InterleavedAxes((24, 20, 20)), "base": 5e6, "head_dim": 128},
        ),
        (
            model(model_type="glm4v_text", partial_rotary_factor=0.5, rope_theta=1e4,
                  rope_scaling={"type": "default", "mrope_section": [8, 12, 12]}),
            None,
            {"axes": ChunkedAxes((8, 12, 12)), "style": "interleaved", "rotary_dim": 64},
        ),
        (
            model(model_type="hunyuan_vl", rope_theta=1e4,
                  rope_scaling={"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32,
                                "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "xdrope_section": [16, 16, 16, 16]}),
            None,
            {"axes": XdropeAxes((16, 16, 16, 16)), "scaling": NtkAlphaScaling(alpha=1000)},
        ),
        (
            model(model_type="gemma4_text", head_dim=256, global_head_dim=512, rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                   "rope_theta": 1e6}}),
            "full_attention",
            {"head_dim": 512, "rotary_dim": 512, "base": 1e6,
             "scaling": ProportionalScaling(partial_rotary_factor=0.25)},
        ),
    ],
)  # fmt: skip
def test_config_json(config, layer, expected):
    """v4 and v5 spellings as plain dictionaries."""
    before = copy.deepcopy(config)
    found = RopeConfig.from_transformers(config, layer)
    assert {name: getattr(found, name) for name in expected} == expected
    assert config == before


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl_vision", "gemma4_vision", "pixtral", "kimi_k25_vision"]
)
def test_known_vision_towers(kind):
    config = {"model_type": kind, "hidden_size": 1280, "num_heads": 16, "rope_theta": 1e4}
    found = RopeConfig.from_transformers(config, max_position=512)
    assert isinstance(found.axes, AxialAxes)
    assert found.axes.dims == (40, 40)
    assert found.style == ("half_blocks" if kind == "gemma4_vision" else "half")
    assert found.axes.frequencies == ("global" if kind == "pixtral" else "own")


@pytest.mark.parametrize(
    "kind", ["llama4_vision_model", "siglip_vision_model", "sam2_video", "nanochat"]
)
def test_models_that_are_refused_by_name(kind):
    with pytest.raises(NotImplementedError, match=f"must not be of model_type '{kind}'"):
        RopeConfig.from_transformers(model(model_type=kind, rope_theta=1e4))


# ---- transformers' config objects


def rotate(x, cos, sin, style):
    """Naive rotation of ``[..., R]`` by angles of R/2 lanes."""
    half = x.shape[-1] // 2
    low, high = (x[..., :half], x[..., half:]) if style == "half" else (x[..., ::2], x[..., 1::2])
    pair = low * cos - high * sin, high * cos + low * sin
    return torch.stack(pair, -1).flatten(-2) if style == "interleaved" else torch.cat(pair, -1)


OBJECTS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, None),
    "qwen2": ("Qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}, None),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, None),
    "gemma3 full": (
        "Gemma3Text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "full_attention",
    ),
    "gemma3 sliding": ("Gemma3Text", {}, "sliding_attention"),
    "gemma4 full": ("Gemma4Text", {}, "full_attention"),
    "gemma4 sliding": ("Gemma4Text", {}, "sliding_attention"),
    "gpt_neox": ("GPTNeoX", {}, None),
    "phi3 longrope": (
        "Phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1 + i / 50 for i in range(48)],
                "long_factor": [1 + i for i in range(48)],
            },
        },
        None,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}},
        None,
    ),
    "deepseek_v3 half": ("DeepseekV3", {"rope_interleave": False}, None),
    "deepseek_v4": ("DeepseekV4", {}, "compress"),
    "gpt_oss": ("GptOss", {}, None),
    "cohere": ("Cohere", {}, None),
    "glm4": ("Glm4", {}, None),
    "ernie4_5": ("Ernie4_5", {}, None),
    "helium": ("Helium", {}, None),
    "mistral4": ("Mistral4", {}, None),
    "modernbert": ("ModernBert", {}, "full_attention"),
    "hunyuan alpha": (
        "HunYuanDenseV1",
        {
            "head_dim": 128,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4}
            | {"factor": 1.0, "beta_fast": 32, "mscale": 1.0},
        },
        None,
    ),
    "olmo": ("Olmo", {}, None),
    "qwen3_next": ("Qwen3Next", {}, "full_attention"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_transformers_objects(name):
    """Frequencies and magnitude bit for bit, and the pairing, of the model's own rotary module."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    prefix, fields, layer = OBJECTS[name]
    if not hasattr(transformers, f"{prefix}Config"):
        pytest.skip(f"this transformers version has no {prefix}Config")
    hf_config = getattr(transformers, f"{prefix}Config")(**fields)
    before = copy.deepcopy(hf_config.to_dict())
    config = RopeConfig.from_transformers(hf_config, layer)
    assert hf_config.to_dict() == before

    path = type(hf_config).__module__.replace("configuration", "modeling")
    module = pytest.importorskip(path, reason="needs transformers")
    cls = getattr(module, f"{prefix.removesuffix('Text')}RotaryEmbedding", None)
    rotary = (cls or getattr(module, f"{prefix}RotaryEmbedding"))(hf_config)
    nested = layer if hasattr(rotary, f"{layer}_inv_freq") else None
    inv_freq = getattr(rotary, f"{nested}_inv_freq" if nested else "inv_freq")
    scaling = getattr(rotary, f"{nested}_attention_scaling" if nested else "attention_scaling")
    # Their longrope starts with the short set, whatever the model's maximum.
    assert config.inv_freq(length=1 if "longrope" in name else None).equal(inv_freq)
    assert config.attention_scaling == scaling

    positions = torch.arange(7)
    cos, sin = rotary(torch.zeros(1), positions[None], *([nested] if nested else []))
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 7, config.head_dim)
    q, k = (torch.randn(shape, generator=generator) for _ in range(2))
    to_half = config.style == "interleaved_to_half"
    apply = module.apply_rotary_pos_emb_interleave if to_half else module.apply_rotary_pos_emb
    one = prefix in ("DeepseekV4", "Gemma4Text")
    expected = apply(q, cos, sin) if one else apply(q, k, cos, sin)[0]
    start, stop = config.rotary_offset, config.rotary_offset + config.rotary_dim
    phases = positions[:, None] * inv_freq
    found = q.clone()
    found[..., start:stop] = rotate(
        q[..., start:stop], phases.cos() * scaling, phases.sin() * scaling, config.style
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    other = "half" if config.style == "interleaved" else "interleaved"
    wrong = rotate(q[..., start:stop], phases.cos(), phases.sin(), other)
    assert not torch.allclose(wrong, expected[..., start:stop], rtol=1e-2, atol=1e-2)


def test_transformers_gptj():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = RopeConfig.from_transformers(transformers.GPTJConfig())
    assert (config.head_dim, config.rotary_dim, config.base) == (256, 64, 1e4)
    module = pytest.importorskip(
        "transformers.models.gptj.modeling_gptj", reason="needs transformers"
    )
    table = module.create_sinusoidal_positions(16, 64)
    phases = torch.arange(16)[:, None] * config.inv_freq()
    torch.testing.assert_close(
        table, torch.cat((phases.sin(), phases.cos()), 1), rtol=1e-5, atol=1e-6
    )
    x = torch.randn(1, 16, 2, 64, generator=torch.Generator().manual_seed(0))
    expected = module.apply_rotary_pos_emb(x, *table[None].chunk(2, -1))
    found = rotate(x, phases.cos()[:, None], phases.sin()[:, None], config.style)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("Qwen2VL", ChunkedAxes((16, 24, 24))),
        ("Qwen2_5_VL", ChunkedAxes((16, 24, 24))),
        ("Qwen3VL", InterleavedAxes((24, 20, 20))),
        ("Ernie4_5_VLMoe", ErnieAxes((22, 22, 20))),
    ],
)
def test_transformers_multimodal_objects(name, axes):
    """Read through the text config; the sections are the model's own when the config has none."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    hf_config = getattr(transformers, f"{name}Config")()
    config = RopeConfig.from_transformers(hf_config)
    assert config.axes == axes
    assert config == RopeConfig.from_transformers(hf_config.get_text_config())


def test_transformers_glm4v():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    text = {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}
    config = RopeConfig.from_transformers(transformers.Glm4vTextConfig(rope_parameters=text))
    assert (config.rotary_dim, config.style) == (64, "interleaved")
    assert config.axes == ChunkedAxes((8, 12, 12))
    with pytest.raises(ValueError, match="must share out rotary_dim / 2 = 64 lanes"):
        RopeConfig.from_transformers(transformers.Glm4vTextConfig())  # sections of half the width


def test_transformers_v4_and_v5_spellings_agree():
    """The same checkpoint as a v4 file, a v5 file and a config object."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    v4 = model(rope_theta=5e5, rope_scaling=LLAMA3)
    v5 = model(rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    spelled = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    legacy = model(rope_theta=5e5, rope_scaling=spelled | {"type": "llama3"})
    found = {RopeConfig.from_transformers(config) for config in (v4, v5, legacy)}
    found |= {
        RopeConfig.from_transformers(transformers.LlamaConfig(**copy.deepcopy(c))) for c in (v4, v5)
    }
    assert len(found) == 1
    saved = transformers.LlamaConfig(**copy.deepcopy(v4)).to_dict()
    assert RopeConfig.from_transformers(saved) in found
