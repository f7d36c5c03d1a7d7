"""Any configuration is right or refused in one sentence that names what is wrong.

Dictionaries of every rope type, in the spellings of transformers 4 and 5, SGLang and vLLM, against
the formulas of the papers and projects in plain Python floats; then the same with one thing wrong.
See ``profiles.py`` for the long search.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_fuzz import lanes_of

from rope_compile.axes import AxialAxes
from rope_compile.config import RopeConfig
from rope_compile.scaling import LinearScaling

from profiles import examples, refutes

pytestmark = [  # where a peer's meaning is to ignore a number; tests/test_config.py has the words
    pytest.mark.filterwarnings("ignore:SGLang's yarn ignores attention_factor"),
    pytest.mark.filterwarnings("ignore:DynamicScaling.*ignores factor"),
]

LO = "original_max_position_embeddings"
TRANSFORMERS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


# ---------------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class Numbers:
    """Frequencies, magnitude, and by how much the float32 formula may miss them, relatively."""

    frequencies: list[float]
    magnitude: float = 1.0
    slack: float = 0.0


def growth_of(factor: float, k: float = 1.0) -> float:
    """YaRN's magnitude, g(s, k)."""
    return 1.0 if factor <= 1 else 0.1 * k * math.log(factor) + 1.0


@dataclass(frozen=True)
class Case:
    """A dictionary in right spelling, and all that stands beside it."""

    kind: str
    entries: dict[str, object]  # of the formula; no type, no theta
    half: int
    base: float
    model_max: int
    rows: int
    dialect: str

    def plain(self) -> list[float]:
        return [self.base ** (-i / self.half) for i in range(self.half)]

    def numbers(self) -> Numbers:
        """What the formula of this kind gives, in Python floats."""
        return FORMULAS[self.kind](self, self.entries)

    def dictionary(self) -> dict[str, object]:
        """With its type; None of the types has its theta inside yet."""
        return {**NAMES.get(self.kind, {"rope_type": self.kind}), **self.entries}

    def build(self, entries: Mapping[str, object] | None = None, **others: object) -> RopeConfig:
        """As one flat dictionary of this dialect."""
        given = self.dictionary() if entries is None else entries
        arguments = {
            "head_dim": 2 * self.half,
            "max_position": self.rows,
            "base": self.base,
            "model_max_position": self.model_max,
            "dialect": self.dialect,
            "partial_rotary_factor": None,
        }
        return RopeConfig.from_dict(given, **(arguments | others))


# How a kind is spelled where that is not its own name.
NAMES: dict[str, dict[str, object]] = {
    "plain": {},
    "ntk_alpha": {"rope_type": "dynamic"},
    "ntk_mixed": {"rope_type": "ntk"},
    "mistral_yarn": {},
    "old_longrope": {"type": "yarn"},
    "old_linear": {"type": "linear"},
    "two_names": {"type": "su", "rope_type": "longrope"},
}


def no_scaling(case: Case, given: dict) -> Numbers:
    return Numbers(case.plain())


def linear(case: Case, given: dict) -> Numbers:
    return Numbers([f / given["factor"] for f in case.plain()])


def rebased(case: Case, times: float) -> Numbers:
    """The base multiplied by ``times ** (R / (R - 2))``."""
    power = case.half / (case.half - 1)
    base = case.base * times**power
    return Numbers([base ** (-i / case.half) for i in range(case.half)])


def dynamic(case: Case, given: dict) -> Numbers:
    s, m = given["factor"], case.model_max
    ratio = max(case.rows, m) / m
    if case.dialect == "sglang":
        ratio = s
    elif case.dialect == "vllm":
        ratio = m / given.get("max_trained_positions", m)
    return rebased(case, s * ratio - (s - 1))


def ntk_alpha(case: Case, given: dict) -> Numbers:
    return rebased(case, given["alpha"])


def ntk(case: Case, given: dict) -> Numbers:
    s, mixed = given["factor"], given.get("mixed_b")
    if mixed is None:
        return Numbers(
            [(case.base * s) ** (-i / case.half) / s ** (1 / case.half) for i in range(case.half)]
        )
    a = math.log(s) / case.half**mixed
    return Numbers([f / math.exp(a * (i + 1) ** mixed) for i, f in enumerate(case.plain())])


def yarn_blend(case: Case, given: dict, fast: float, slow: float, truncate: bool) -> Numbers:
    width = 2 * case.half

    def lane(turns: float) -> float:
        return width * math.log(given[LO] / (2 * math.pi * turns)) / (2 * math.log(case.base))

    low, high = lane(fast), lane(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    s, found = factor_of(case, given), []
    for i, f in enumerate(case.plain()):
        kept = 1 - min(max((i - low) / (high - low), 0), 1)
        extrapolation = given.get("extrapolation_factor")
        kept *= 1 if extrapolation is None else extrapolation
        found.append(f / s * (1 - kept) + f * kept)
    return Numbers(found, slack=4e-7 * max(s, 1 / s) / abs(high - low) * width)


def factor_of(case: Case, given: dict) -> float:
    factor = given["factor"]
    return case.model_max / given[LO] if factor is None else factor


def yarn(case: Case, given: dict) -> Numbers:
    fast, slow = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    s, mscale, of_all = factor_of(case, given), given.get("mscale"), given.get("mscale_all_dim")
    attn = given.get("attn_factor") or 1
    m = growth_of(s)
    if mscale and of_all:
        m = growth_of(s, mscale) / growth_of(s, of_all)
    elif mscale and case.dialect == "sglang":
        m = growth_of(s, mscale)
    m *= attn
    if case.dialect != "sglang" and given.get("attention_factor"):
        m = given["attention_factor"]
    elif case.dialect != "sglang" and given.get("apply_yarn_scaling") is False:
        m = attn
    blend = yarn_blend(case, given, fast, slow, given.get("truncate") is not False)
    return replace(blend, magnitude=m)


def deepseek_yarn(case: Case, given: dict) -> Numbers:
    fast, slow = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    s, mscale = factor_of(case, given), given.get("mscale")
    m = growth_of(s, 1 if mscale is None else mscale)
    m = m / growth_of(s, given.get("mscale_all_dim") or 0) * (given.get("attn_factor") or 1)
    if case.kind == "deepseek_llama_scaling":
        m = 1
    return replace(yarn_blend(case, given, fast, slow, True), magnitude=m)


def telechat_yarn(case: Case, given: dict) -> Numbers:
    m = 0.07 * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1
    return replace(yarn_blend(case, given, 32, 1, True), magnitude=m)


def mistral_yarn(case: Case, given: dict) -> Numbers:
    return yarn_blend(case, given, given["beta"], given["alpha"], True)


def llama3(case: Case, given: dict) -> Numbers:
    s, low, high, original = (
        given[key] for key in ("factor", "low_freq_factor", "high_freq_factor", LO)
    )
    found = []
    for f in case.plain():
        turns = original * f / (2 * math.pi)  # in the original length
        if turns > high:
            found.append(f)
        elif turns < low or high == low:
            found.append(f / s if turns < low else f)
        else:
            t = (turns - low) / (high - low)
            found.append((1 - t) * f / s + t * f)
    return Numbers(found, slack=4e-7 * max(s, 1) * high / (high - low) if high > low else 0)


def longrope(case: Case, given: dict) -> Numbers:
    original, long = given[LO], case.rows > given[LO]
    factors = given["long_factor" if long else "short_factor"]
    found = [f / by for f, by in zip(case.plain(), factors, strict=True)]
    s = given.get("factor")
    if s is None or case.dialect != "transformers":
        s = case.model_max / original
    m = 1.0 if s <= 1 else math.sqrt(1 + math.log(s) / math.log(original))
    m = given.get("attention_factor") or m
    return Numbers(found, given.get("long_mscale" if long else "short_mscale") or m)


def proportional(case: Case, given: dict) -> Numbers:
    moving = int(given.get("partial_rotary_factor", 1) * 2 * case.half) // 2
    by = given.get("factor") or 1
    return Numbers([f / by if i < moving else 0.0 for i, f in enumerate(case.plain())])


FORMULAS: dict[str, Callable[[Case, dict], Numbers]] = {
    "plain": no_scaling,
    "default": no_scaling,
    "linear": linear,
    "old_linear": linear,
    "dynamic": dynamic,
    "ntk_alpha": ntk_alpha,
    "ntk": ntk,
    "ntk_mixed": ntk,
    "yarn": yarn,
    "deepseek_yarn": deepseek_yarn,
    "deepseek_llama_scaling": deepseek_yarn,
    "telechat3-yarn": telechat_yarn,
    "mistral_yarn": mistral_yarn,
    "llama3": llama3,
    "longrope": longrope,
    "su": longrope,
    "old_longrope": longrope,
    "two_names": longrope,
    "proportional": proportional,
}
# What must be there, apart from the type.
REQUIRED = {
    "linear": ("factor",),
    "old_linear": ("factor",),
    "dynamic": ("factor",),
    "ntk": ("factor",),
    "ntk_mixed": ("factor",),
    "yarn": ("factor", LO),
    "deepseek_yarn": ("factor", LO),
    "deepseek_llama_scaling": ("factor", LO),
    "telechat3-yarn": ("factor", LO),
    "mistral_yarn": ("factor", LO),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LO),
    "longrope": ("short_factor", "long_factor", LO),
    "su": ("short_factor", "long_factor", LO),
    "two_names": ("short_factor", "long_factor", LO),
}


# ------------------------------------------------------------------------------------- cases

FACTORS = st.sampled_from([1, 1.0, 2, 4.0, 8, 40.0, 0.5, 32.25]) | st.floats(1, 64)
LENGTHS = st.sampled_from([64, 2048, 4096, 8192, 32768]) | st.integers(16, 2**17)
BETAS = st.sampled_from([None, 0, 1, 4, 32.0])
POSITIVE = st.sampled_from([0.5, 1, 1.25, 2.0])


def some(draw: st.DrawFn, **optional: st.SearchStrategy) -> dict[str, object]:
    """Some of the optional keys."""
    return {key: draw(values) for key, values in optional.items() if draw(st.booleans())}


@st.composite
def entries_of(draw: st.DrawFn, kind: str, half: int, dialect: str) -> dict[str, object]:
    """The keys of one kind."""
    if kind in ("plain", "default"):
        return {}
    if kind == "ntk_alpha":
        return {"alpha": draw(st.sampled_from([1, 2.0, 1000, 50.5]))}
    if kind == "proportional":
        shares = st.sampled_from([1, 0.25, 0.5, 1.0, 0.75])
        return some(draw, partial_rotary_factor=shares, factor=FACTORS)
    if "long" in kind or kind in ("su", "two_names"):
        lists = st.lists(st.floats(0.5, 64) | st.integers(1, 8), min_size=half, max_size=half)
        found = {"short_factor": draw(lists), "long_factor": draw(lists), LO: draw(LENGTHS)}
        mscales = dict.fromkeys(("short_mscale", "long_mscale", "attention_factor"), POSITIVE)
        return found | some(draw, factor=FACTORS, **mscales)
    given: dict[str, object] = {"factor": draw(FACTORS)}
    if kind == "dynamic" and dialect == "vllm":
        given |= some(draw, max_trained_positions=LENGTHS)
    if kind == "ntk_mixed":
        given["mixed_b"] = draw(st.sampled_from([0.625, 1, 0.5]))
    if kind == "llama3":
        low = draw(st.sampled_from([1, 0.5, 2.0]))
        given |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.sampled_from([3, 0.5]))}
        given[LO] = draw(LENGTHS)
    if "yarn" in kind or kind == "deepseek_llama_scaling":
        given[LO] = draw(LENGTHS)
    if kind in ("yarn", "deepseek_yarn"):
        fast, slow = draw(BETAS), draw(BETAS)
        if (fast or 32) >= (slow or 1):
            given |= {"beta_fast": fast, "beta_slow": slow}
        given |= some(
            draw,
            extrapolation_factor=st.sampled_from([1, 0.5, 0]),
            mscale=st.sampled_from([0, 0.707, 1]),
            mscale_all_dim=st.sampled_from([0, 0.8, 1]),
            attn_factor=st.sampled_from([1, 1.25]),
        )
        given["factor"] = draw(st.just(given["factor"]) | st.none())
    if kind == "yarn":
        given |= some(draw, truncate=st.booleans())
        if "attn_factor" not in given:
            given |= some(draw, attention_factor=POSITIVE)
        if dialect != "sglang":
            given |= some(draw, apply_yarn_scaling=st.booleans())
    if kind == "mistral_yarn":
        given |= {"beta": draw(st.sampled_from([32, 8.0])), "alpha": draw(st.sampled_from([1, 2]))}
        given |= some(draw, apply_scale=st.booleans())
    return given


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(FORMULAS), dialect: str = "") -> Case:
    """A configuration that every reader of these dictionaries accepts."""
    kind = draw(st.sampled_from(kinds))
    chosen = dialect or draw(st.sampled_from(["transformers", "sglang", "vllm"]))
    half = draw(st.sampled_from([2, 3, 4, 8, 16, 32, 64]))
    case = Case(
        kind=kind,
        entries=draw(entries_of(kind, half, chosen)),
        half=half,
        base=draw(st.sampled_from([10000, 1e4, 5e5, 1e6, 150000.0, 100.0]) | st.floats(2, 1e7)),
        model_max=draw(LENGTHS),
        rows=draw(LENGTHS),
        dialect=chosen,
    )
    trained = case.entries.get("max_trained_positions")
    if trained is not None:  # else its base would not be positive
        s = case.entries["factor"]
        assume(s * case.model_max / trained - (s - 1) > 0.01)
    return case


def assert_numbers(config: RopeConfig, case: Case) -> None:
    """float64 to 1e-11; float32 to its own rounding of ``base ** (2i/R)`` and of the blends."""
    right = case.numbers()
    largest = max([case.base, *(1 / f for f in right.frequencies if f)])
    single = 2e-7 * (3 + math.log(largest)) + right.slack
    for dtype, relative in ((torch.float64, 1e-11), (torch.float32, single)):
        found = config.inv_freq(dtype).double().numpy()
        np.testing.assert_allclose(found, right.frequencies, rtol=relative, atol=0)
    assert config.attention_scaling == pytest.approx(right.magnitude, rel=1e-12)
    assert config.rotary_dim == 2 * case.half
    assert (config.base, config.max_position) == (case.base, case.rows)


@examples(500)
@given(cases())
def test_any_dictionary_is_right(case: Case) -> None:
    entries = case.dictionary()
    before = copy.deepcopy(entries)
    assert_numbers(case.build(MappingProxyType(entries)), case)
    assert entries == before


def hf_config(case: Case, spelling: str) -> dict[str, object]:
    """A ``config.json`` of transformers 4 or 5."""
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 4 * case.half,
        "num_attention_heads": 2,
        "max_position_embeddings": case.model_max,
    }
    entries = case.dictionary()
    if spelling == "v4":
        return config | {"rope_theta": case.base, "rope_scaling": entries or None}
    if spelling == "v4_type":
        if "rope_type" in entries:
            entries["type"] = entries.pop("rope_type")
        return config | {"rope_theta": case.base, "rope_scaling": entries}
    inside = entries | {"rope_theta": case.base}
    if spelling == "v5":
        return config | {"rope_parameters": inside}
    layers = ["full_attention", "sliding_attention"]
    other = {"rope_type": "default", "rope_theta": 77.0}
    nested = {"full_attention": inside, "sliding_attention": other}
    return config | {"layer_types": layers, "rope_parameters": nested}


@examples(200)
@given(
    cases(TRANSFORMERS, "transformers"),
    st.sampled_from(["v4", "v4_type", "v5", "v5_layers"]),
    st.booleans(),
)
def test_any_config_of_transformers_is_right(case: Case, spelling: str, as_object: bool) -> None:
    case = replace(case, rows=case.model_max)
    config = hf_config(case, spelling)
    before = copy.deepcopy(config)
    layer = "full_attention" if spelling == "v5_layers" else None
    given = SimpleNamespace(**config) if as_object else config
    found = RopeConfig.from_transformers(given, layer)
    assert found is not None
    assert_numbers(found, case)
    assert (vars(given) if as_object else config) == before
    if layer is not None:
        other = RopeConfig.from_transformers(given, "sliding_attention")
        assert (other.base, type(other.scaling).__name__) == (77.0, "DefaultScaling")


@st.composite
def axial_configs(draw: st.DrawFn) -> RopeConfig:
    shared = draw(st.booleans())
    axes = draw(st.integers(1, 4))
    width = st.integers(1, 12).map(lambda n: 2 * n)
    dims = (draw(width),) * axes if shared else tuple(draw(width) for _ in range(axes))
    return RopeConfig(
        head_dim=sum(dims),
        max_position=64,
        base=draw(st.sampled_from([1e4, 100.0])),
        scaling=LinearScaling(factor=draw(st.sampled_from([1.0, 4.0]))),
        axes=AxialAxes(
            dims,
            order=draw(st.sampled_from(["blocks", "alternating"])) if shared else "blocks",
            axis_order=tuple(draw(st.permutations(range(axes)))),
            frequencies=draw(st.sampled_from(["own", "global"])) if shared else "own",
        ),
    )


def axial_frequencies(config: RopeConfig) -> list[float]:
    """Lane by lane: which one of its axis, in its axis' own width or dealt out of the whole one."""
    axes, seen, found = config.axes, {}, []
    turns = list(axes.axis_order)
    for axis in lanes_of(axes):
        nth = seen.get(axis, 0)
        seen[axis] = nth + 1
        exponent = 2 * nth / axes.dims[axis]
        if axes.frequencies == "global":
            exponent = 2 * (nth * len(turns) + turns.index(axis)) / config.rotary_dim
        found.append(config.base**-exponent / config.scaling.factor)
    return found


@examples(60)
@given(axial_configs())
def test_any_axial_map_has_its_frequencies(config: RopeConfig) -> None:
    assert config.lane_axes == lanes_of(config.axes)
    wanted = axial_frequencies(config)
    np.testing.assert_allclose(config.inv_freq(torch.float64).numpy(), wanted, rtol=1e-12)


# ----------------------------------------------------------------------- one thing is wrong


def assert_refused(build: Callable[[], object], *names: str) -> None:
    """One sentence of the kinds that are promised; it has one of the names in it."""
    try:
        found = build()
    except (ValueError, TypeError, NotImplementedError) as error:
        assert_sentence(str(error), *names)
    else:
        raise AssertionError(f"accepted as {found}")


def assert_sentence(sentence: str, *names: str) -> None:
    assert any(name in sentence for name in names), f"{names} not in {sentence!r}"
    assert "\n" not in sentence
    assert "must" in sentence or "needs" in sentence or "unknown" in sentence, sentence


@st.composite
def misspelt(draw: st.DrawFn, key: str) -> str:
    """A key with a letter too many, too few, or two exchanged."""
    at = draw(st.integers(0, len(key) - 2))
    start, one, two, end = key[:at], key[at], key[at + 1], key[at + 2 :]
    wrong = (start + two + end, start + one * 2 + two + end, start + two + one + end, key + "s")
    return draw(st.sampled_from(wrong).filter(lambda found: found != key))


@examples(150)
@given(st.data())
def test_a_misspelt_key_is_named(data: st.DataObject) -> None:
    case = data.draw(cases().filter(lambda case: case.entries))
    entries = case.dictionary()
    key = data.draw(st.sampled_from(sorted(case.entries)))
    wrong = data.draw(misspelt(key))
    entries = {wrong if name == key else name: value for name, value in entries.items()}
    assert_refused(lambda: case.build(entries), wrong, key)


@examples(100)
@given(st.data())
def test_a_missing_key_is_named(data: st.DataObject) -> None:
    case = data.draw(cases(tuple(REQUIRED)))
    key = data.draw(st.sampled_from(REQUIRED[case.kind]))
    entries = {name: value for name, value in case.dictionary().items() if name != key}
    assert_refused(lambda: case.build(entries), repr(key))
    if key != "factor":  # where it means M / original length
        assert_refused(lambda: case.build(entries | {key: None}), repr(key))


STRANGERS = ("zzz", "factors", "low_freq_factor", "rotary_dim", "beta", 7, None, ("a", "b"))


@examples(80)
@given(cases(), st.sampled_from(STRANGERS), st.sampled_from([1, 2.5, "x", None, [1]]))
def test_a_stranger_is_named(case: Case, key: object, value: object) -> None:
    """Whatever its value, and whatever kind of thing the key is."""
    assume(not (key == "low_freq_factor" and case.kind == "llama3"))
    assume(not (key == "beta" and case.kind in ("mistral_yarn", "plain")))
    assert_refused(lambda: case.build({**case.dictionary(), key: value}), str(key))


class Strange:
    """Something that no reader expects."""

    def __repr__(self) -> str:
        return "Strange()"


JUNK = st.sampled_from(
    [
        *(True, False, [], [1.0], (), {"a": 1}, {1}, b"4", "", "four", "1e400", "nan", Strange()),
        *(2j, math.nan, math.inf, -math.inf, -1, -2.5, np.array([1.0, -2.0]), torch.zeros(2)),
        *(np.float32("nan"), torch.tensor(math.inf), np.bool_(True)),
    ]
)
# Keys where some of these are right.
MAY_BE = {
    "truncate": (bool,),
    "apply_scale": (bool,),
    "apply_yarn_scaling": (bool,),
}


@examples(300)
@given(st.data())
def test_a_value_of_a_wrong_kind_is_named(data: st.DataObject) -> None:
    """Not a number, not finite, not positive, or nothing of the sort."""
    case = data.draw(cases().filter(lambda case: case.entries))
    key = data.draw(st.sampled_from(sorted(case.entries)))
    value = data.draw(JUNK)
    assume(not isinstance(value, MAY_BE.get(key, ())))
    assert_refused(lambda: case.build(case.dictionary() | {key: value}), key)


@examples(80)
@given(cases(), JUNK, st.sampled_from(["base", "rope_theta", "partial_rotary_factor"]))
def test_a_wrong_value_beside_the_scaling_is_named(case: Case, value: object, key: str) -> None:
    name = "rope_theta" if key == "base" else key
    if key == "base":
        assert_refused(lambda: case.build(base=value), name)
    else:
        entries = {**case.dictionary(), key: value}
        beside = {"base": None} if key == "rope_theta" else {}
        assert_refused(lambda: case.build(entries, **beside), name)


HUGE = (1, 1e-320, 1e-42, 1e-30, 1e30, 1e39, 1e150, 1e300, 10**40, 10**400, "1e-310", 2**63)


@examples(300)
@given(st.data())
def test_a_number_beyond_all_bounds_is_right_or_named(data: st.DataObject) -> None:
    """No overflow, no division by zero, and no frequency that is not a number."""
    case = data.draw(cases())
    key = data.draw(st.sampled_from([*sorted(case.entries), "rope_theta"]))
    assume(not isinstance(case.entries.get(key, 1.0), bool | list))
    value = data.draw(st.sampled_from(HUGE))
    entries = case.dictionary() | {key: value}
    beside = {"base": None} if key == "rope_theta" else {}
    try:
        config = case.build(entries, **beside)
        config.attention_scaling, config.inv_freq()
    except (ValueError, TypeError, NotImplementedError) as error:
        # Of several numbers that do not fit together, one is named.
        related = ("base", "factor", "beta_fast", "original_max_position", "max_trained_position")
        assert_sentence(str(error), key, *related)
        return
    assert_usable(config)


def assert_usable(config: RopeConfig) -> None:
    """Both precisions agree on finite frequencies, and float32 holds the magnitude."""
    single, double = config.inv_freq(), config.inv_freq(torch.float64)
    assert single.isfinite().all(), single
    assert double.isfinite().all(), double
    normal = double.abs() > 1e-36
    ratio = single[normal].double() / double[normal]
    assert ((ratio - 1).abs() < 1e-3).all(), (single, double)
    assert 0 < config.attention_scaling < 1e36


CONFLICTS = {
    "rope_theta": {"rope_theta": 123.0},
    "type": {"type": "linear", "rope_type": "llama3"},
    "max_position_embeddings": {"max_position_embeddings": 15},
    "partial_rotary_factor": {"partial_rotary_factor": 0.25},
    "mrope_section": {"mrope_section": [1, 2, 3], "xdrope_section": [3, 2, 1]},
}


@examples(60)
@given(cases(), st.sampled_from(sorted(CONFLICTS)))
def test_two_values_for_one_thing_are_named(case: Case, name: str) -> None:
    beside = {"partial_rotary_factor": 0.5} if name == "partial_rotary_factor" else {}
    assume(not (case.kind == "proportional" and name == "partial_rotary_factor"))
    if name == "partial_rotary_factor" and case.dialect == "sglang":
        beside["rotary_dim"] = 2 * case.half  # there the argument is about this width
        beside["partial_rotary_factor"] = None
    assert_refused(lambda: case.build(case.dictionary() | CONFLICTS[name], **beside), name)


def respelled(value: object, seed: int) -> object:
    """The same number, list or flag as another kind of thing."""
    chosen = random.Random(seed)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        array = np.array(value, dtype=np.float64)
        return chosen.choice([tuple(value), array, torch.from_numpy(array), array.tolist()])
    kinds = [np.float64, float, repr, lambda v: torch.tensor(float(v), dtype=torch.float64)]
    kinds.append(lambda v: np.array(float(v)))
    if float(value).is_integer():
        kinds += [int, np.int64, lambda v: torch.tensor(int(v))]
    return chosen.choice(kinds)(value)


@examples(200)
@given(cases(), st.integers(0, 2**16))
def test_other_spellings_of_the_numbers_are_the_same_config(case: Case, seed: int) -> None:
    """NumPy scalars, 0-d tensors, strings and arrays, in another order: equal, with one hash."""
    entries = case.dictionary()
    names = list(entries)
    random.Random(seed).shuffle(names)
    others = {name: respelled(entries[name], seed + i) for i, name in enumerate(names)}
    theta = {"rope_theta": respelled(case.base, seed)}
    found = case.build(others | theta, base=respelled(case.base, seed + 1))
    assert found == case.build()
    assert hash(found) == hash(case.build())


@examples(60)
@given(cases(TRANSFORMERS, "transformers"), st.integers(0, 2**16))
def test_other_spellings_in_both_containers_are_no_conflict(case: Case, seed: int) -> None:
    """Checkpoints carry rope_parameters and rope_scaling side by side."""
    entries = {key: respelled(value, seed) for key, value in case.dictionary().items()}
    config = hf_config(replace(case, rows=case.model_max), "v5")
    config["rope_parameters"] = entries | {"rope_theta": case.base}
    config["rope_scaling"] = copy.deepcopy(config["rope_parameters"])
    found = RopeConfig.from_transformers(config)
    assert_numbers(found, replace(case, rows=case.model_max))


KEYS = (
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "qk_rope_head_dim",
    "rotary_dim",
)


@examples(200)
@given(
    cases(TRANSFORMERS, "transformers"),
    st.sampled_from(["v4", "v5"]),
    st.sampled_from(KEYS),
    JUNK | st.sampled_from([0, 10**400, None]),
)
def test_a_config_of_transformers_with_one_wrong_value_is_named(
    case: Case, spelling: str, key: str, value: object
) -> None:
    """Or it is right all the same, where nothing reads that key."""
    config = hf_config(case, spelling) | {key: value}
    try:
        found = RopeConfig.from_transformers(config)
    except (ValueError, TypeError, NotImplementedError) as error:
        related = ("head_dim", "rotary_dim", "rope_theta", "max_position", "rope_type")
        assert_sentence(str(error), key, *related)
        return
    assert found is not None
    assert_usable(found)


# ------------------------------------------------------------------------------- wrong twins


def test_a_formula_of_another_kind_would_be_found() -> None:
    """Wrong twin: a base that is a thousandth too large."""

    def check(case: Case) -> None:
        assert_numbers(replace(case, base=case.base * 1.001).build(), case)

    refutes(check, cases())


def test_a_silent_default_would_be_found() -> None:
    """Wrong twin: unknown keys are dropped, as some readers do."""

    def lenient(case: Case) -> None:
        entries = {name[::-1]: value for name, value in case.entries.items()}
        assert_refused(lambda: replace(case, kind="plain", entries={}).build(), *entries)

    refutes(lenient, cases())


def test_a_crash_of_another_kind_would_be_found() -> None:
    """Wrong twin: a reader that indexes and divides."""

    def careless(case: Case) -> None:
        entries = case.dictionary() | {"factor": 0}
        assert_refused(lambda: 1 / entries["factor"], "factor")

    with pytest.raises(ZeroDivisionError):
        refutes(careless, cases())


def test_a_sentence_without_the_name_would_be_found() -> None:
    """Wrong twin: "math domain error" names no key."""

    def vague(case: Case) -> None:
        assert_refused(lambda: math.log(-case.half), "factor")

    refutes(vague, cases())
