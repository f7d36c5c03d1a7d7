"""get_rope: what shares, what does not, and that a dead or half-real entry is never handed out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import rope_compile as rc
from rope_compile import RopeConfig, get_rope, table
from rope_compile.factory import live_tables, registry
from rope_compile.table import RopeTable

from support import assert_near_oracle, oracle_rotate, randn

META = torch.device("meta")
LLAMA3 = rc.Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
BASE = {
    "head_dim": 16,
    "max_position": 256,
    "rotary_dim": 16,
    "rotary_offset": 0,
    "base": 10000.0,
    "style": "half",
    "scaling": rc.YarnScaling(factor=4.0, original_max_position=64),
    "axes": None,
    "phase_dtype": torch.float32,
}
# For every field of RopeConfig another value; the test below fails for a field without one.
OTHER = {
    "head_dim": 32,
    "max_position": 257,
    "rotary_dim": 8,
    "rotary_offset": 8,
    "base": 10000.5,
    "style": "interleaved",
    "scaling": rc.YarnScaling(factor=4.5, original_max_position=64),
    "axes": rc.ChunkedAxes((2, 3, 3)),
    "phase_dtype": torch.float64,
}
# Values that only fit together with others.
ALONGSIDE = {"rotary_offset": {"rotary_dim": 8}}


@pytest.fixture(autouse=True)
def _empty_registry():
    registry.clear()
    yield
    registry.clear()


def config(**fields) -> RopeConfig:
    return RopeConfig(**{"head_dim": 16, "max_position": 256, **fields})


def assert_right(rope: rc.RotaryEmbedding, seed: int = 0) -> None:
    made = rope.config
    positions, q = torch.tensor([0, 1, 255, 256, 5000, -7]), randn(6, 2, made.head_dim, seed=seed)
    expected = oracle_rotate(
        q,
        positions,
        made.inv_freq(made.phase_dtype),
        style=made.style,
        rotary_offset=made.rotary_offset,
        attention_scaling=made.attention_scaling,
    )
    assert_near_oracle(rope(positions, q)[0], *expected)


# ------------------------------------------------------------------------------------------- keys


def test_equal_configs_share() -> None:
    first = get_rope(config(base=10000, scaling=LLAMA3), "cpu")
    again = rc.Llama3Scaling(
        original_max_position=64, high_freq_factor=4, low_freq_factor=1, factor=8
    )
    assert get_rope(config(base=10000.0, scaling=again), "cpu") is first
    assert get_rope(config(base="1e4", rotary_dim=16, scaling=again)) is first
    assert get_rope(config(scaling=again), torch.device("cpu", 0)) is first


def test_every_field_has_another_value_to_try() -> None:
    assert set(BASE) == set(OTHER) == {field.name for field in dataclasses.fields(RopeConfig)}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_is_part_of_the_key(field: str) -> None:
    """Changed alone it gives another object, whose own frequencies it has."""
    fields = BASE | ALONGSIDE.get(field, {})
    first, second = RopeConfig(**fields), RopeConfig(**fields | {field: OTHER[field]})
    assert get_rope(first, "cpu") is not get_rope(second, "cpu")
    for made in (first, second):
        rope = get_rope(made, "cpu")
        assert rope.config == made
        assert torch.equal(rope.inv_freq, made.inv_freq(made.phase_dtype))


SCALINGS = [
    rc.LinearScaling(factor=4.0),
    rc.NtkScaling(factor=4.0, mixed_b=0.5),
    rc.NtkAlphaScaling(alpha=100.0),
    rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64, length=128),
    rc.YarnScaling(factor=4.0, original_max_position=64, mscale=1.0, mscale_all_dim=0.5),
    rc.DeepseekYarnScaling(factor=4.0, original_max_position=64, mscale_all_dim=0.5),
    LLAMA3,
    rc.ProportionalScaling(partial_rotary_factor=0.5),
]


def changed(scaling):
    """One variant for each number of a scaling type."""
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if isinstance(value, bool):
            yield field.name, dataclasses.replace(scaling, **{field.name: not value})
        elif isinstance(value, int | float):
            by = 0.25 if field.name in ("mixed_b", "partial_rotary_factor") else 1
            yield field.name, dataclasses.replace(scaling, **{field.name: value + by})


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_every_number_of_a_scaling_is_part_of_the_key(scaling) -> None:
    first = get_rope(config(scaling=scaling), "cpu")
    variants = []
    for name, variant in changed(scaling):
        if scaling == LLAMA3 and name == "low_freq_factor":
            variant = dataclasses.replace(scaling, low_freq_factor=1.5)
        if name == "attn_factor" and getattr(scaling, "attention_factor", None) is not None:
            continue
        variants.append(get_rope(config(scaling=variant), "cpu"))
    assert len({id(rope) for rope in [first, *variants]}) == len(variants) + 1


def test_a_hand_picked_key_would_be_found() -> None:
    """Wrong twin: vLLM once left fields out of the key."""
    seen: dict[tuple[object, ...], RopeConfig] = {}
    for made in (config(), config(phase_dtype=torch.float64)):
        seen.setdefault((made.head_dim, made.max_position, made.base, made.style), made)
    assert len(seen) == 1


def test_16_bit_and_float32_callers_share_one_float32_table() -> None:
    """In every order, each right, and none changes what another reads."""
    for order in itertools.permutations([torch.float16, torch.bfloat16, torch.float32]):
        registry.clear()
        rope = get_rope(config(), "cpu")
        before = rope.cos_sin_cache.clone()
        for dtype in order:
            positions, q = torch.arange(9) * 40, randn(9, 2, 16, dtype=dtype)
            out, _ = get_rope(config(), "cpu")(positions, q)
            assert_near_oracle(out, *oracle_rotate(q, positions, config().inv_freq()))
            assert rope.cos_sin_cache.dtype == torch.float32
            assert torch.equal(rope.cos_sin_cache, before)


def test_many_parameter_sets_in_one_process() -> None:
    """Target and draft bases, local and global layers, in random order: each its own oracle."""
    configs = [
        config(base=1e6),
        config(base=1e4),
        config(base=1e4, scaling=LLAMA3),
        config(base=1e6, scaling=rc.YarnScaling(factor=4.0, original_max_position=64)),
    ]
    chosen = random.Random(7)
    for seed in range(100):
        assert_right(get_rope(chosen.choice(configs), "cpu"), seed)
    assert len(registry.modules()) == 4


def test_config_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="config must be a RopeConfig, got int"):
        get_rope(128)


# --------------------------------------------------------------------------------------- liveness


def make_fake(rope: rc.RotaryEmbedding) -> None:
    with FakeTensorMode():
        rope.table._buffers["cos_sin_cache"] = torch.empty(256, 16)


DEATHS = {
    "meta": (
        lambda rope: rope.table._buffers.update(cos_sin_cache=rope.cos_sin_cache.to("meta")),
        "cos_sin_cache is on meta instead of cpu",
    ),
    "storage": (
        lambda rope: rope.cos_sin_cache.untyped_storage().resize_(0),
        "cos_sin_cache has lost its storage",
    ),
    "frequencies": (
        lambda rope: rope.inv_freq.untyped_storage().resize_(0),
        "inv_freq has lost its storage",
    ),
    "fake": (make_fake, "cos_sin_cache is a FakeTensor"),
    "cast": (
        lambda rope: setattr(rope.cos_sin_cache, "data", rope.cos_sin_cache.half()),
        "cos_sin_cache is torch.float16",
    ),
    "overwritten": (
        lambda rope: setattr(rope.table, "cos_sin_cache", rope.cos_sin_cache.clone()),
        "cos_sin_cache was replaced by another tensor",
    ),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_entry_is_replaced_with_one_warning(death: str) -> None:
    """The warning names the key and what killed it; the new one keeps the rows."""
    kill, reason = DEATHS[death]
    old = get_rope(config(base=500.0), "cpu")
    old.reserve(1000)
    kill(old)
    with pytest.warns(UserWarning, match=reason) as caught:
        fresh = get_rope(config(base=500.0), "cpu")
    assert len(caught) == 1
    assert "base=500.0" in str(caught[0].message)
    assert " on cpu: " in str(caught[0].message)
    assert caught[0].filename == __file__
    assert fresh is not old
    assert fresh.capacity == 1024
    assert_right(fresh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_rope(config(base=500.0), "cpu") is fresh


def test_a_registry_without_the_check_would_be_found() -> None:
    """Wrong twin: a plain dictionary hands the dead entry out, and the call is refused."""
    entries = {config(): get_rope(config(), "cpu")}
    DEATHS["meta"][0](entries[config()])
    with pytest.raises(ValueError, match="cos_sin_cache on meta"):
        assert_right(entries[config()])


def test_a_warning_turned_into_an_error_leaves_a_live_entry() -> None:
    DEATHS["storage"][0](get_rope(config(), "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="discards a dead entry"):
            get_rope(config(), "cpu")
        assert_right(get_rope(config(), "cpu"))


def test_moving_a_model_to_meta_does_not_kill_its_entry() -> None:
    model = nn.ModuleList([get_rope(config(), "cpu")])
    model.to("meta")
    rope = get_rope(config(), "cpu")
    assert rope is model[0]
    assert rope.device == torch.device("cpu")
    assert_right(rope)


# ------------------------------------------------------------------------------- meta construction


def test_layers_share_a_meta_module() -> None:
    with META:
        first, second = get_rope(config()), get_rope(config())
    assert first is second is get_rope(config(), "meta")
    assert first.device == META
    assert {x.device for x in first.buffers()} == {META}


def test_a_meta_entry_is_never_handed_out_for_real() -> None:
    with META:
        meta = get_rope(config())
    real = get_rope(config(), "cpu")
    assert real is not meta
    assert_right(real)
    with META:
        assert get_rope(config()) is meta
        assert get_rope(config(), "cpu") is real
    assert get_rope(config()) is real


def test_a_materialised_meta_module_is_no_meta_entry() -> None:
    """It becomes the real entry, and the next model under meta gets a meta module of its own."""
    with META:
        first = get_rope(config())
    first.to_empty(device="cpu")
    with META:
        second = get_rope(config())
    assert second is not first
    assert second.device == META
    assert get_rope(config(), "cpu") is first
    assert_right(first)


def test_a_materialised_module_stays_known_beside_a_real_entry() -> None:
    """The hook that reserves every live table finds it; the real entry stays what it was."""
    with META:
        made = get_rope(config())
    real = get_rope(config(), "cpu")
    made.to_empty(device="cpu")
    with META:
        assert get_rope(config()).device == META
    assert get_rope(config(), "cpu") is real
    assert {id(built) for built in live_tables()} == {id(made.table), id(real.table)}
    assert_right(made)


def test_meta_tables_are_no_live_tables() -> None:
    with META:
        get_rope(config())
    assert not live_tables()
    real = get_rope(config(), "cpu")
    real.to("meta")
    assert live_tables() == [real.table]


# ----------------------------------------------------------------------------- what is active then


def assert_ordinary_registry() -> None:
    found = live_tables()
    assert found
    for built in found:
        for x in built.buffers():
            assert type(x) is torch.Tensor
            assert not x.is_inference()
        fresh = RopeTable(built.config, "cpu", built.capacity)
        assert torch.equal(built.cos_sin_cache, fresh.cos_sin_cache)


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_first_call_inside_other_modes(around) -> None:
    with around():
        get_rope(config(), "cpu")
    assert_ordinary_registry()
    assert_right(get_rope(config(), "cpu"))


OUTSIDE = config(base=77.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = config(base=78.0)

    def forward(self, positions, q):
        return get_rope(self.config, q.device)(positions, q)[0]


def from_global(positions, q):
    return get_rope(OUTSIDE)(positions, q)[0]


def from_closure():
    made = config(base=79.0)
    return lambda positions, q: get_rope(made, "cpu")(positions, q)[0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [from_global, from_closure(), Layer()])
def test_first_call_inside_a_compiled_function(function, backend: str) -> None:
    """One graph; the registry keeps ordinary tensors, right in eager use afterwards."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    positions, q = torch.arange(7) * 60, randn(7, 2, 16)
    out = compiled(positions, q)
    assert_ordinary_registry()
    assert torch.equal(out, function(positions, q))
    assert torch.equal(compiled(positions, q), out)
    assert counter.frame_count == 1
    for rope in registry.modules():
        assert_right(rope)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_config_made_inside_a_compiled_function() -> None:
    """Dynamo breaks the graph at the config's validation; the value is right all the same."""

    def function(positions, q):
        return get_rope(RopeConfig(head_dim=16, max_position=256, base=80.0))(positions, q)[0]

    positions, q = torch.arange(7) * 60, randn(7, 2, 16)
    out = torch.compile(function, backend="aot_eager")(positions, q)
    assert torch.equal(out, function(positions, q))
    assert_ordinary_registry()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_follows_the_config_it_is_given() -> None:
    """The looked-up module is guarded: another config, or a replaced entry, is seen."""

    def function(made, positions, q):
        return get_rope(made, "cpu")(positions, q)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    positions, q = torch.arange(7) * 60, randn(7, 2, 16)
    for made in (config(base=81.0), config(base=82.0), config(base=81.0)):
        out = compiled(made, positions, q)
        assert_near_oracle(out, *oracle_rotate(q, positions, made.inv_freq()))
    made = config(base=81.0)
    compiled(made, positions, q)
    DEATHS["meta"][0](get_rope(made, "cpu"))
    with pytest.warns(UserWarning, match="discards a dead entry"):
        out = compiled(made, positions, q)
    assert_near_oracle(out, *oracle_rotate(q, positions, made.inv_freq()))


def test_building_while_capturing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = get_rope(config(), "cpu")
    monkeypatch.setattr(table, "stream_is_capturing", lambda: True)
    assert get_rope(config(), "cpu") is known
    with pytest.raises(RuntimeError, match="must not be built while the current CUDA stream"):
        get_rope(config(base=9.0), "cpu")
    monkeypatch.undo()
    assert_right(get_rope(config(base=9.0), "cpu"))


# ------------------------------------------------------------------------------- memory and lookup


def test_every_tensor_of_the_registry_is_a_named_buffer() -> None:
    """What sleep mode restores or rebuilds is what ``named_buffers`` lists; nothing is derived."""
    for made in (config(), config(scaling=LLAMA3), config(axes=rc.ChunkedAxes((2, 3, 3)))):
        get_rope(made, "cpu")
    for rope in registry.modules():
        named = {id(x) for _, x in rope.named_buffers()}
        parts = [value for part in rope.modules() for value in vars(part).values()]
        loose = [x for x in parts if isinstance(x, torch.Tensor) and id(x) not in named]
        assert len(named) == 2
        assert not loose


def test_sleep_mode_is_undone_by_rebuild() -> None:
    rope = get_rope(config(), "cpu")
    address = rope.cos_sin_cache.data_ptr()
    for x in rope.buffers():
        x.fill_(math.nan)
    assert get_rope(config(), "cpu") is rope  # by sizes alone it looks alive
    rope.rebuild_()
    assert rope.cos_sin_cache.data_ptr() == address
    assert_right(rope)


def test_clear_leaves_modules_in_use_working() -> None:
    rope = get_rope(config(), "cpu")
    registry.clear()
    assert not live_tables()
    assert_right(rope)
    assert get_rope(config(), "cpu") is not rope
