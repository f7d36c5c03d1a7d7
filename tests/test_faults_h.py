"""Fault group H: scaling formulas, and how configurations are read.

The labels are those of test_faults_index.py. The golden numbers were computed in float64.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from test_faults_index import assert_right

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding
from rope_compile.scaling import yarn_range

from support import randn

ORIGINAL = "original_max_position_embeddings"


def frequencies(made: RopeConfig, length: int | None = None) -> torch.Tensor:
    return made.inv_freq(torch.float64, length)


def near(value: float, digits: float = 1e-9) -> object:
    return pytest.approx(value, rel=digits)


# --------------------------------------------------------------------------------------------- H1

SHORT, LONG = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 4.0, 8.0)
SETS = {
    "short": [1.0, 0.0909090909, 0.00833333333, 7.69230769e-4],
    "long": [1.0, 0.05, 0.0025, 1.25e-4],
}


def longrope(max_position: int, policy: str = "static", **fields: object) -> RopeConfig:
    scaling = rc.LongRopeScaling(
        short_factor=SHORT, long_factor=LONG, original_max_position=4096, policy=policy,
        **{"factor": 32.0, **fields},
    )  # fmt: skip
    return RopeConfig(head_dim=8, max_position=max_position, scaling=scaling)


@pytest.mark.parametrize(("length", "chosen"), [(4095, "short"), (4096, "short"), (4097, "long")])
def test_h1_long_is_what_exceeds_the_original_length(length: int, chosen: str) -> None:
    """Wrong rule for short and long factors, unslothai/unsloth PR #10681: the boundary."""
    static, by_length = longrope(length), longrope(131072, "by_length")
    for found in (
        frequencies(static), frequencies(by_length, length),
        frequencies(by_length.with_length(length)),
    ):  # fmt: skip
        assert found.tolist() == near(SETS[chosen], 1e-8)
    assert RotaryEmbedding(static, "cpu").inv_freq.tolist() == near(SETS[chosen], 1e-6)


def test_h1_no_call_changes_the_chosen_set() -> None:
    """One long request switches the whole batch, vllm-project/vllm PR #4298: it is fixed."""
    for length in (4096, 4097):
        rope = RotaryEmbedding(longrope(length), "cpu")
        before = rope.inv_freq.clone()
        for positions in (torch.tensor([0, 9]), torch.tensor([5000, 131071])):
            q = randn(2, 2, 8)
            assert_right(rope(positions, q), (q, None), positions, rope.config)
        rope.reserve(8192)  # allocated rows are no length: ggml-org/llama.cpp #24823
        assert torch.equal(rope.inv_freq, before)


def test_h1_chunks_of_a_long_prompt_use_one_set() -> None:
    """Chunked prefill mixes both sets, trymirai/uzu PR #604: 5511 tokens in chunks of 1024."""
    rope = RotaryEmbedding(longrope(131072), "cpu")
    prompt = randn(5511, 1, 8)
    whole = rope(torch.arange(5511), prompt)[0]
    for start in range(0, 5511, 1024):
        chunk = prompt[start : start + 1024]
        out = rope(torch.arange(start, start + len(chunk)), chunk)[0]
        assert torch.equal(out, whole[start : start + len(chunk)])
    assert_right((whole,), (prompt,), torch.arange(5511), rope.config)


def by_token(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of sequences one after the other, and the set that each one's length selects."""
    selector = torch.cat([torch.full((n,), n > 4096) for n in lengths])
    return torch.cat([torch.arange(n) for n in lengths]), selector


def both_sets() -> rc.RopeSelector:
    by_length = longrope(131072, "by_length")
    return rc.RopeSelector([rc.get_rope(by_length.with_length(n), "cpu") for n in (4096, 131072)])


@pytest.mark.parametrize("lengths", [(10, 5000), (5000, 10), (4095, 4096, 4097)])
def test_h1_sequences_of_one_batch_keep_their_own_set(lengths: tuple[int, ...]) -> None:
    """One long request switches the whole batch, vllm-project/vllm PR #4298: each as if alone."""
    rope = both_sets()
    positions, selector = by_token(lengths)
    q, k = randn(len(positions), 2, 8), randn(len(positions), 1, 8, seed=1)
    outs = rope(positions, q, k, selector=selector)
    start = 0
    for length in lengths:
        part = slice(start, start := start + length)
        solo = RotaryEmbedding(longrope(131072, "by_length").with_length(length), "cpu")
        alone = solo(positions[part], q[part], k[part])
        assert solo.inv_freq.tolist() == near(SETS["long" if length > 4096 else "short"], 1e-6)
        for out, expected, x in zip(outs, alone, (q, k), strict=True):
            assert torch.equal(out[part], expected)
            assert_right((out[part],), (x[part],), positions[part], solo.config)


def test_h1_no_position_reads_the_rows_of_the_other_set() -> None:
    """Rows of both sets in one table, NVIDIA/TensorRT-LLM PR #6353: past its own rows too."""
    rope = both_sets()
    far = [rope.ropes[0].capacity, 131072 + 4096, 2 * 131072, 2**31 - 1, -1]
    positions, q = torch.tensor(far), randn(len(far), 2, 8)
    for number, member in enumerate(rope.ropes):
        out, _ = rope(positions, q, selector=torch.full((len(far),), number))
        assert torch.equal(out, member(positions, q)[0])
        assert_right((out,), (q,), positions, member.config)


def test_h1_chunks_of_a_sequence_in_a_batch_use_its_set() -> None:
    """Chunked prefill mixes both sets, trymirai/uzu PR #604: 5511 tokens beside a short prompt."""
    rope, long = both_sets(), RotaryEmbedding(longrope(131072), "cpu")
    prompt, other = randn(5511, 1, 8), randn(3, 1, 8, seed=1)
    whole = long(torch.arange(5511), prompt)[0]
    for start in range(0, 5511, 1024):
        chunk = prompt[start : start + 1024]
        positions = torch.cat((torch.arange(start, start + len(chunk)), torch.arange(3)))
        selector = torch.arange(len(positions)) < len(chunk)
        out = rope(positions, torch.cat((chunk, other)), selector=selector)[0]
        assert torch.equal(out[: len(chunk)], whole[start : start + len(chunk)])


def test_h1_the_choice_is_never_made_in_forward() -> None:
    """One long request switches the whole batch, vllm-project/vllm PR #4298: no silent rule."""
    rope = both_sets()
    with pytest.raises(TypeError, match="selector"):
        rope(torch.arange(5000), randn(5000, 1, 8))
    with pytest.raises(ValueError, match="got 'per_sequence'; for a choice by sequence give"):
        longrope(131072, "per_sequence")


@pytest.mark.parametrize(("dialect", "served"), [("transformers", 4096), ("vllm", 131072)])
def test_h1_rows_are_the_longest_length(dialect: str, served: int) -> None:
    """Too few rows, and an invalid access, NVIDIA/TensorRT-LLM PR #6353: rows of what is served."""
    rope = {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG),
            ORIGINAL: 4096}  # fmt: skip
    made = RopeConfig.from_dict(
        rope, head_dim=8, max_position=served, base=1e4, model_max_position=131072, dialect=dialect
    )
    assert RotaryEmbedding(made, "cpu").capacity >= max(4096, served)


def test_h1_magnitudes() -> None:
    """Factors without their magnitude, lablup/mlxcel #1358: golden, and what overrides it."""
    assert longrope(131072).attention_scaling == near(1.1902380714, 1e-10)
    assert longrope(131072, factor=None, attention_factor=1.5).attention_scaling == 1.5
    both = {"short_mscale": 1.1, "long_mscale": 1.3, "attention_factor": 1.5}
    assert longrope(4096, **both).attention_scaling == 1.1
    assert longrope(4097, **both).attention_scaling == 1.3


def test_h1_the_wrong_set_would_be_found() -> None:
    """Wrong twin of ggml-org/llama.cpp PR #24875: short factors at 4097."""
    assert frequencies(longrope(4096)).tolist() != near(SETS["long"], 1e-2)
    positions, q = torch.tensor([4096]), randn(1, 2, 8)
    out = RotaryEmbedding(longrope(4096), "cpu")(positions, q)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), positions, longrope(4097))


# --------------------------------------------------------------------------------------------- H2

LAST_LANE = {
    1024: 1.1547819846894582e-4, 2048: 1.1547819846894582e-4, 4096: 3.849273282298194e-5,
    8192: 1.649688549556369e-5,
}  # fmt: skip


def dynamic(max_position: int = 2048, **fields: object) -> RopeConfig:
    scaling = {"factor": 2.0, "policy": "by_length", "original_max_position": 2048, **fields}
    return RopeConfig(head_dim=128, max_position=max_position, scaling=rc.DynamicScaling(**scaling))


@pytest.mark.parametrize("order", [(1024, 8192, 1024), (8192, 4096, 2048, 8192)])
def test_h2_frequencies_depend_on_the_length_alone(order) -> None:
    """Dynamic NTK is never reset, huggingface/transformers PR #46624: golden, in any order."""
    made = dynamic()
    for length in order:
        assert frequencies(made, length)[-1].item() == near(LAST_LANE[length], 1e-12)
        assert frequencies(made.with_length(length))[-1].item() == near(LAST_LANE[length], 1e-12)
    found = frequencies(made, 4096)
    assert found[1].item() ** -64 == near(30527.7367488067, 1e-9)
    first, _, again = (made.inv_freq(length=length) for length in (1024, 8192, 1024))
    assert torch.equal(first, again)


@pytest.mark.parametrize("length", sorted(LAST_LANE))
def test_h2_no_forward_and_no_growth_changes_them(length: int) -> None:
    """Dynamic NTK made static by accident, vllm-project/vllm #5093: static by the served length."""
    rope = RotaryEmbedding(dynamic(length), "cpu")
    before = rope.inv_freq.clone()
    assert before[-1].item() == near(LAST_LANE[length], 1e-6)
    for start in (0, 9000, 100):
        positions, q = torch.arange(start, start + 3), randn(3, 1, 128)
        assert_right(rope(positions, q), (q, None), positions, rope.config)
        rope.reserve(length + start)
        assert torch.equal(rope.inv_freq, before)


def test_h2_alpha_never_passes_through_the_growth_rule() -> None:
    """A fixed alpha table overwritten, huggingface/transformers PR #48960: whatever the length."""
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    made = RopeConfig.from_dict(rope, head_dim=128, max_position=2048, base=1e4)
    longer = RopeConfig.from_dict(rope, head_dim=128, max_position=262144, base=1e4)
    assert isinstance(made.scaling, rc.NtkAlphaScaling)
    assert made.growth == "S"
    for length in (None, 100, 8192, 262144):
        assert torch.equal(made.inv_freq(length=length), longer.inv_freq())
    assert frequencies(made)[-1].item() == near(1.15478198e-7, 1e-8)


def test_h2_a_memory_of_the_longest_length_would_be_found() -> None:
    """Wrong twin of huggingface/transformers PR #27227: what was scaled once stays scaled."""
    longest, found = 0, []
    for length in (1024, 8192, 1024):
        longest = max(longest, length)
        found.append(frequencies(dynamic(), longest)[-1].item())
    assert found[0] == near(LAST_LANE[1024])
    assert found[2] != near(LAST_LANE[1024])


# --------------------------------------------------------------------------------------------- H3

GPT_OSS = {"rotary_dim": 64, "base": 150000.0, "original_max_position": 4096}
YARN_LANES = {
    False: ((8.092779115512402, 17.39802450158856), 3.1705696185e-2, 1.2931870125e-4),
    True: ((8, 18), 3.1620752275e-2, 2.2794779580e-4),
}


@pytest.mark.parametrize("truncate", YARN_LANES)
def test_h3_the_correction_range_is_rounded_only_when_asked(truncate: bool) -> None:
    """YaRN range rounded when it must not be, vllm-project/vllm #27722: gpt-oss, both ways."""
    span, ninth, seventeenth = YARN_LANES[truncate]
    assert yarn_range(**GPT_OSS, truncate=truncate) == near(span, 1e-14)
    rope = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": truncate}  # fmt: skip
    made = RopeConfig.from_dict(rope, head_dim=64, max_position=131072, base=150000)
    found = frequencies(made)
    assert (found[9].item(), found[17].item()) == near((ninth, seventeenth))
    default = {key: value for key, value in rope.items() if key != "truncate"}
    omitted = RopeConfig.from_dict(default, head_dim=64, max_position=131072, base=150000)
    assert (omitted == made) is truncate
    q, positions = randn(3, 2, 64), torch.tensor([1, 5000, 131071])
    rope_module = RotaryEmbedding(RopeConfig(
        head_dim=64, max_position=128, base=150000, scaling=made.scaling), "cpu")  # fmt: skip
    assert_right(rope_module(positions, q), (q, None), positions, made)


def test_h3_the_other_rounding_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm PR #28244: results of the one are none of the other."""
    rounded, exact = (
        RopeConfig(
            head_dim=64, max_position=128, base=150000.0,
            scaling=rc.YarnScaling(factor=32.0, original_max_position=4096, truncate=truncate),
        )
        for truncate in (True, False)
    )  # fmt: skip
    positions, q = torch.arange(100), randn(100, 1, 64)
    out = RotaryEmbedding(rounded, "cpu")(positions, q)
    assert_right(out, (q, None), positions, rounded)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), positions, exact)


# --------------------------------------------------------------------------------------------- H4


def yarn(factor: float, **entries: object) -> RopeConfig:
    rope = {"rope_type": "yarn", "factor": factor, ORIGINAL: 4096, **entries}
    return RopeConfig.from_dict(rope, head_dim=64, max_position=4096, base=1e4)


@pytest.mark.parametrize(
    ("factor", "entries", "value"),
    [
        (16, {}, 1.2772588722239782),
        (16, {"mscale": 1, "mscale_all_dim": 1}, 1.0),
        (40, {"mscale": 1, "mscale_all_dim": 0.8}, 1.0569662567531275),
        (64, {"attention_factor": 1.0}, 1.0),
        (64, {"attention_factor": None}, 1.4158883083359672),
        (64, {}, 1.4158883083359672),
        (1, {}, 1.0),
        (0.5, {}, 1.0),
    ],
)
def test_h4_magnitudes(factor: float, entries: dict[str, object], value: float) -> None:
    """attention_factor dropped, PrimeIntellect-ai/prime-rl PR #2802: golden, and in the table."""
    made = yarn(factor, **entries)
    assert made.attention_scaling == near(value, 1e-15)
    row = RotaryEmbedding(made, "cpu").cos_sin_cache[0]
    assert row[:32].unique().tolist() == near([value], 1e-7)


def test_h4_zero_is_no_absent_factor() -> None:
    """0 and None treated alike, ml-explore/mlx-lm PR #1507: None means none, 0 is refused."""
    assert yarn(64, attention_factor=None) == yarn(64)
    with pytest.raises(ValueError, match="attention_factor must be positive, got 0"):
        yarn(64, attention_factor=0)


@pytest.mark.parametrize(
    ("pair", "softmax"), [((1, 1), 1.873854207), ((0.707, 0.707), 1.589626165)]
)
def test_h4_the_softmax_factor_is_exposed(pair: tuple[float, float], softmax: float) -> None:
    """1.0 taken for a regression, turboderp-org/exllamav3 #259: the rest is the attention's."""
    made = yarn(40, mscale=pair[0], mscale_all_dim=pair[1])
    assert made.attention_scaling == 1.0
    assert made.softmax_scale_factor == near(softmax)
    assert yarn(40).softmax_scale_factor == 1.0


def test_h4_attn_factor_multiplies_and_attention_factor_replaces() -> None:
    """attention_factor dropped, vllm-project/vllm #48621; attn_factor is no other name of it."""
    inferred = yarn(64).attention_scaling
    for value in (1.0, 0.5, 2.0):
        assert yarn(64, attention_factor=value).attention_scaling == value
        assert yarn(64, attn_factor=value).attention_scaling == near(value * inferred, 1e-15)
    with pytest.raises(ValueError, match="must not have both 'attention_factor' and 'attn_factor'"):
        yarn(64, attention_factor=1.0, attn_factor=1.0)


def test_h4_a_wrong_magnitude_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm PR #48623: the magnitude left out of the table."""
    positions, q = torch.tensor([3]), randn(1, 2, 64)
    out = RotaryEmbedding(yarn(64, attention_factor=1.0), "cpu")(positions, q)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), positions, yarn(64))


# --------------------------------------------------------------------------------------------- H5

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192,
}  # fmt: skip
BLENDED = [
    2.1665707635e-3, 1.3718935678e-3, 8.5675141292e-4, 5.2484616099e-4, 3.1269375038e-4,
    1.7850781277e-4,
]  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("container", ["from_dict", "rope_scaling", "rope_parameters"])
def test_h5_llama3_is_computed_and_returned(container: str, spelling: str) -> None:
    """llama3 scaling computed but not returned, huggingface/transformers PR #32330: golden."""
    rope = {spelling: "llama3", **LLAMA3}
    if container == "from_dict":
        made = RopeConfig.from_dict(rope, head_dim=128, max_position=131072, base=5e5)
    else:
        made = RopeConfig.from_transformers(
            {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 131072,
             "rope_theta": 5e5, container: rope}
        )  # fmt: skip
    plain = frequencies(RopeConfig(head_dim=128, max_position=1, base=5e5))
    found = frequencies(made)
    assert torch.equal(found[:29], plain[:29])
    assert found[29:35].tolist() == near(BLENDED)
    assert torch.equal(found[35:], plain[35:] / 8)
    assert found[-1].item() == near(3.0689259889e-7)
    assert plain[-1].item() == near(2.4551407911e-6)


def test_h5_small_heads_blend_three_lanes() -> None:
    """llama3 scaling dropped, unslothai/unsloth PR #6197: dim 64 and factor 32."""
    rope = {"rope_type": "llama3", **LLAMA3, "factor": 32.0}
    made = RopeConfig.from_dict(rope, head_dim=64, max_position=131072, base=5e5)
    plain = frequencies(RopeConfig(head_dim=64, max_position=1, base=5e5))
    found = frequencies(made)
    assert torch.equal(found[:15], plain[:15])
    assert found[15:18].tolist() == near([1.2905479282e-3, 4.2955679656e-4, 9.7082878026e-5])
    assert torch.equal(found[18:], plain[18:] / 32)
    assert found[-1].item() == near(9.4183067254e-8)


@pytest.mark.parametrize("missing", LLAMA3)
def test_h5_a_missing_key_is_named(missing: str) -> None:
    """A key misread and plain RoPE instead, lablup/mlxcel #1355: an error that names it."""
    rope = {"rope_type": "llama3", **{k: v for k, v in LLAMA3.items() if k != missing}}
    with pytest.raises(ValueError, match=f"must have '{missing}' for rope_type 'llama3'"):
        RopeConfig.from_dict(rope, head_dim=128, max_position=8192, base=5e5)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "llama4", **LLAMA3}, "must have a rope_type of .*got 'llama4'"),
        ({"rope_type": "llama3", **LLAMA3, "facter": 8.0}, r"unknown keys \['facter'\]"),
        ({"rope_type": "llama3", "type": "yarn", **LLAMA3}, "must have one type"),
        ({**LLAMA3}, "has unknown keys"),
    ],
)
def test_h5_an_unknown_type_is_never_plain(rope: dict[str, object], words: str) -> None:
    """An unknown type becomes plain RoPE, NeuraLegion/shainet PR #111: an error that names it."""
    with pytest.raises(ValueError, match=words):
        RopeConfig.from_dict(rope, head_dim=128, max_position=8192, base=5e5)


def test_h5_plain_frequencies_would_be_found() -> None:
    """Wrong twin of huggingface/transformers PR #32330: the scaled result is thrown away."""
    plain = frequencies(RopeConfig(head_dim=128, max_position=1, base=5e5))
    assert plain[29:35].tolist() != near(BLENDED, 1e-2)


# --------------------------------------------------------------------------------------------- H6

THETAS = {
    "top-level only": (5e5, None),
    "nested only": (None, 5e5),
    "both equal": (5e5, "500000.0"),
    "both different": (1e4, 5e5),
    "neither": (None, None),
}
CONTAINERS = ("rope_scaling", "rope_parameters", "per layer type")


def with_thetas(container: str, outside: object, inside: object) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "llama3", **LLAMA3}
    rope |= {} if inside is None else {"rope_theta": inside}
    config: dict[str, object] = {
        "model_type": "mistral", "head_dim": 128, "max_position_embeddings": 131072,
    }  # fmt: skip
    config |= {} if outside is None else {"rope_theta": outside}
    if container != "per layer type":
        return config | {container: rope}
    layers = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}
    return config | {"rope_parameters": layers, "layer_types": list(layers)}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("where", THETAS)
def test_h6_theta_is_found_or_missed_by_name(where: str, container: str) -> None:
    """rope_theta lost in the v4 to v5 move, deepspeedai/DeepSpeed PR #8341: the whole matrix."""
    config = with_thetas(container, *THETAS[where])
    untouched = copy.deepcopy(config)
    layer = "full_attention" if container == "per layer type" else None
    if where == "neither":
        with pytest.raises(ValueError, match="must have 'rope_theta'"):
            RopeConfig.from_transformers(config, layer)
    elif where == "both different" and layer is None:
        with pytest.raises(ValueError, match="rope_theta must have one value, got 500000 in"):
            RopeConfig.from_transformers(config, layer)
    else:  # beside layer types the top level is the fallback of those without a theta
        made = RopeConfig.from_transformers(config, layer)
        assert (made.base, type(made.base)) == (5e5, float)
        assert isinstance(made.scaling, rc.Llama3Scaling)
    assert config == untouched


@pytest.mark.parametrize("theta", [500000, 5e5, "500000.0", "5e5", torch.tensor(5e5)])
@pytest.mark.parametrize("inside", [False, True])
def test_h6_every_spelling_of_theta_is_the_number(theta: object, inside: bool) -> None:
    """A theta that is a string, InternLM/lmdeploy PR #4303: read as a float, wherever it stands."""
    thetas = (None, theta) if inside else (theta, None)
    made = RopeConfig.from_transformers(with_thetas("rope_scaling", *thetas))
    assert made.base == 5e5


def test_h6_a_class_default_loses() -> None:
    """A v4 default of 10000 overwrites 500000, vllm-project/vllm PR #42624: it loses."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    rope = {"rope_type": "llama3", **LLAMA3, "rope_theta": 5e5}
    config = transformers.LlamaConfig(rope_parameters=rope)
    assert RopeConfig.from_transformers(config).base == 5e5
    config.rope_theta = config.default_theta
    assert RopeConfig.from_transformers(config).base == 5e5
    config.rope_theta = 1e6  # no default: somebody meant it
    with pytest.raises(ValueError, match="rope_theta must have one value"):
        RopeConfig.from_transformers(config)


def test_h6_a_theta_of_10000_would_be_found() -> None:
    """Wrong twin of sgl-project/sglang PR #14745: the default instead of the model's own."""
    lost, right = (RopeConfig(head_dim=128, max_position=128, base=base) for base in (1e4, 5e5))
    positions, q = torch.tensor([100]), randn(1, 2, 128)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(RotaryEmbedding(lost, "cpu")(positions, q), (q, None), positions, right)


# --------------------------------------------------------------------------------------------- H9

PER_LAYER = {
    "full_attention": {
        "rope_type": "yarn", "factor": 4.0, ORIGINAL: 4096, "rope_theta": 1e6, "truncate": False,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
LAYERED = {
    "model_type": "gemma3_text", "head_dim": 64, "max_position_embeddings": 128,
    "rope_parameters": PER_LAYER, "layer_types": list(PER_LAYER),
}  # fmt: skip


@pytest.mark.parametrize("order", list(itertools.permutations(PER_LAYER)))
def test_h9_every_layer_type_has_its_own_rotation(order) -> None:
    """Scaling on layers that must not have it, vllm-project/vllm PR #29111: each by its oracle."""
    yarn_scaling = rc.YarnScaling(factor=4.0, original_max_position=4096, truncate=False)
    expected = {
        "full_attention": RopeConfig(head_dim=64, max_position=128, base=1e6, scaling=yarn_scaling),
        "sliding_attention": RopeConfig(head_dim=64, max_position=128, base=1e4),
    }
    positions, q = torch.tensor([0, 5, 127, 5000]), randn(4, 2, 64)
    for layer in (*order, *order):
        made = RopeConfig.from_transformers(LAYERED, layer)
        assert made == expected[layer]
        out = rc.get_rope(made, "cpu")(positions, q)
        assert_right(out, (q, None), positions, expected[layer])
    assert math.isclose(expected["full_attention"].attention_scaling, 1.138629436, rel_tol=1e-9)


@pytest.mark.parametrize("layer", ["chunked_attention", None, "full", ""])
def test_h9_a_missing_layer_type_is_named(layer: str | None) -> None:
    """Per-layer base but global scaling, allenai/OLMo-core PR #366: nothing is guessed."""
    with pytest.raises(ValueError, match=rf"layer_type must be one of .* got {layer!r}"):
        RopeConfig.from_transformers(LAYERED, layer)


def test_h9_scaling_on_every_layer_would_be_found() -> None:
    """Wrong twin of antonellof/ferrox PR #65: the sliding layers get the full ones' scaling."""
    sliding = RopeConfig.from_transformers(LAYERED, "sliding_attention")
    full = RopeConfig.from_transformers(LAYERED, "full_attention")
    wrong = RopeConfig(head_dim=64, max_position=128, base=1e4, scaling=full.scaling)
    positions, q = torch.tensor([5]), randn(1, 2, 64)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(RotaryEmbedding(wrong, "cpu")(positions, q), (q, None), positions, sliding)
