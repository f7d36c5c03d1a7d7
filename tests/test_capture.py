"""CapturePlan, prepare_for_capture and capture_guard: pure numbers, one hook, no growth inside."""

from __future__ import annotations

import copy
import dataclasses
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import get_static_address_type

from rope_compile import (
    CapturePlan,
    RopeConfig,
    RotaryEmbedding,
    capture_guard,
    get_rope,
    prepare_for_capture,
    table,
)
from rope_compile.factory import live_tables, registry
from rope_compile.table import RopeTable

from support import assert_near_oracle, oracle_rotate, randn

PLAN = CapturePlan(
    max_position=32768, draft_max_position=2048, speculative_steps=5, draft_tokens=8, margin=256
)
SMALL = CapturePlan(max_position=1000, margin=0)
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _empty_registry():
    registry.clear()
    yield
    registry.clear()


def config(rows: int = 256, **fields) -> RopeConfig:
    return RopeConfig(head_dim=16, max_position=rows, **fields)


class Model(nn.Module):
    """Layers that share a rope, and a local one of another base."""

    def __init__(self, made: RopeConfig, layers: int = 3, device: str | None = "cpu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(layers))
        for layer in self.layers:
            layer.rope = get_rope(made, device)
        self.local_rope = RotaryEmbedding(dataclasses.replace(made, base=123.0), device)


# ------------------------------------------------------------------------------------------- plan


def test_lengths_of_the_example() -> None:
    assert PLAN.required_length == 33064
    assert PLAN.reserve_length == 33152


def test_defaults() -> None:
    plan = CapturePlan(max_position=4096)
    assert (plan.draft_max_position, plan.speculative_steps, plan.draft_tokens) == (0, 0, 0)
    assert (plan.margin, plan.align) == (1024, 128)
    assert (plan.required_length, plan.reserve_length) == (5120, 5120)
    documented = CapturePlan(
        max_position=32768, draft_max_position=2048, speculative_steps=5, draft_tokens=8
    )
    assert (documented.required_length, documented.reserve_length) == (33832, 33920)


@pytest.mark.parametrize("margin", [0, 1, 1024])
def test_no_position_of_any_speculation_passes_the_plan(margin: int) -> None:
    for longest in (2048, 4096, 32768):
        for steps in range(1, 9):
            for tokens in range(1, 65):
                plan = CapturePlan(
                    max_position=longest,
                    speculative_steps=steps,
                    draft_tokens=tokens,
                    margin=margin,
                )
                assert longest - 1 + steps * tokens < plan.required_length <= plan.reserve_length
                assert plan.reserve_length % 128 == 0


def test_a_longer_draft_gives_the_same_lengths() -> None:
    """Target and draft share one reserve, whichever is longer."""
    swapped = dataclasses.replace(PLAN, max_position=2048, draft_max_position=32768)
    assert swapped.required_length == 33064
    assert swapped.reserve_length == 33152


def test_plan_is_a_pure_function_of_static_configuration() -> None:
    """Built twice, with a runner's pool in another state between: identical, in every order."""
    target, draft = SimpleNamespace(max_position_embeddings=4096), config(2048)
    pool = SimpleNamespace(size=10)
    plans = []
    for size in (10, 5_000_000):
        pool.size = size
        target.pool = pool
        plans.append(CapturePlan.for_models(target, draft, speculative_steps=3, draft_tokens=4))
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    assert len({CapturePlan.for_models(*pair) for pair in ((4096, 2048), (4096, 2048))}) == 1
    assert CapturePlan.for_models(2048, 4096).reserve_length == 5120


FIELDS = [field.name for field in dataclasses.fields(CapturePlan)]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [None, True, 1.0, "8"])
def test_arguments_that_are_no_int_are_named(name: str, value) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name} must be an int, got {value!r}")):
        CapturePlan(**{"max_position": 8, name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_negative_arguments_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
        CapturePlan(**{"max_position": 8, name: -1})


@pytest.mark.parametrize("name", FIELDS)
def test_zero_is_valid_except_for_length_and_alignment(name: str) -> None:
    if name in ("max_position", "align"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            CapturePlan(**{"max_position": 8, name: 0})
    else:
        assert CapturePlan(**{"max_position": 8, name: 0}).required_length >= 8


def test_plan_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.margin = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        CapturePlan(32768)  # type: ignore[misc]


@pytest.mark.parametrize("align", [1, 7, 128, 4096])
def test_reserve_is_a_multiple_of_align(align: int) -> None:
    plan = dataclasses.replace(PLAN, align=align)
    assert plan.reserve_length % align == 0
    assert 0 <= plan.reserve_length - plan.required_length < align


class WithConfig(nn.Module):
    def __init__(self, made: object) -> None:
        super().__init__()
        self.config = made


SOURCES = {
    "int": 4096,
    "rope_config": config(4096),
    "object": SimpleNamespace(max_position_embeddings=4096),
    "text_config": SimpleNamespace(text_config=SimpleNamespace(max_position_embeddings=4096)),
    "dict": {"max_position_embeddings": 4096},
    "nested_dict": {"text_config": {"max_position_embeddings": 4096}},
    "module_config": WithConfig(SimpleNamespace(max_position_embeddings=4096)),
    "rope": RotaryEmbedding(config(4096), "meta"),
    "table": RopeTable(config(4096), "meta"),
    "ropes_inside": nn.ModuleList(
        [RotaryEmbedding(config(4096), "meta"), RotaryEmbedding(config(512), "meta")]
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_lengths_are_found_in(name: str) -> None:
    plan = CapturePlan.for_models(SOURCES[name], speculative_steps=2, draft_tokens=3, margin=5)
    assert (plan.max_position, plan.draft_max_position, plan.required_length) == (4096, 0, 4107)
    assert CapturePlan.for_models(100, SOURCES[name], margin=0).required_length == 4096


@pytest.mark.parametrize("source", [None, object(), {}, nn.Linear(2, 2), "4096", 3.5, True])
def test_a_model_without_a_length_is_named(source) -> None:
    with pytest.raises((ValueError, TypeError), match=r"target must .*got|max_position must be"):
        CapturePlan.for_models(source)


def test_a_draft_without_a_length_is_named() -> None:
    with pytest.raises(ValueError, match=r"draft must name a length .* got Linear without one"):
        CapturePlan.for_models(8, nn.Linear(2, 2))


def test_lengths_of_a_transformers_config() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made = transformers.LlamaConfig(max_position_embeddings=4096)
    assert CapturePlan.for_models(made, margin=0).required_length == 4096


# ------------------------------------------------------------------------------------------- hook


def test_hook_reserves_and_reports() -> None:
    model = Model(config())
    report = prepare_for_capture(model, PLAN)
    assert [entry.name for entry in report.tables] == ["layers.0.rope", "local_rope"]
    for entry, rope in zip(report.tables, (model.layers[0].rope, model.local_rope), strict=True):
        assert (entry.rows_before, entry.rows_after, entry.grew) == (256, 33152, True)
        assert entry.device == torch.device("cpu")
        assert entry.address == rope.cos_sin_cache.data_ptr()
        assert entry.bytes == 33152 * 16 * 4
        assert rope.capacity == 33152
    assert (report.grew, report.rows, report.bytes) == (2, 2 * 33152, 2 * 33152 * 64)
    again = prepare_for_capture(model, PLAN)
    assert again.grew == 0
    assert [x.address for x in again.tables] == [x.address for x in report.tables]


def test_values_around_the_reserved_end() -> None:
    model = Model(config())
    prepare_for_capture(model, PLAN)
    positions = torch.tensor([33151, 33152, 33153, 331520])
    q = randn(4, 2, 16)
    out, _ = model.layers[0].rope(positions, q)
    assert_near_oracle(out, *oracle_rotate(q, positions, config().inv_freq()))


def test_report_is_a_readable_table() -> None:
    text = str(prepare_for_capture(Model(config()), PLAN))
    lines = text.splitlines()
    assert lines[0].split() == ["table", "device", "rows", "before", "rows", "now", "MiB", "grew"]
    assert lines[1].split() == ["layers.0.rope", "cpu", "256", "33152", "2.0", "yes"]
    assert lines[-1] == "2 of 2 tables grew to hold 33064 positions; 4.0 MiB in all"
    assert len({len(line) for line in lines[:-1]}) == 1


def test_target_and_draft_get_the_same_rows_in_every_order() -> None:
    rows = []
    for first, second in ((8192, 2048), (2048, 8192)):
        registry.clear()
        models = [Model(config(first)), Model(config(second))]
        report = prepare_for_capture(models, PLAN)
        rows.append({entry.rows_after for entry in report.tables})
        assert [entry.name for entry in report.tables] == [
            "0.layers.0.rope",
            "0.local_rope",
            "1.layers.0.rope",
            "1.local_rope",
        ]
    assert rows == [{33152}, {33152}]


def test_hook_takes_a_rope_a_table_and_any_iterable() -> None:
    rope = get_rope(config(), "cpu")
    assert prepare_for_capture(rope, SMALL).tables[0].name == "RotaryEmbedding"
    lone = RopeTable(config(), "cpu")
    assert prepare_for_capture(lone, SMALL).tables[0].name == "RopeTable"
    assert lone.capacity == rope.capacity == 1024
    report = prepare_for_capture((module for module in (rope, Model(config()), rope)), SMALL)
    assert len(report.tables) == 2


def test_none_means_every_live_table_of_the_registry() -> None:
    """Materialised meta modules included, lone and meta modules excluded."""
    shared = [get_rope(config(base=base), "cpu") for base in (1e4, 1e6)]
    lone = RotaryEmbedding(config(), "cpu")
    with META:
        made, left = get_rope(config(base=7.0)), get_rope(config(base=8.0))
    made.to_empty(device="cpu")
    report = prepare_for_capture(None, SMALL)
    assert len(report.tables) == 3
    assert [rope.capacity for rope in (*shared, made)] == [1024] * 3
    assert lone.capacity == left.capacity == 256
    assert prepare_for_capture(None, SMALL).grew == 0


def test_an_empty_registry_has_nothing_to_prepare() -> None:
    assert prepare_for_capture(None, SMALL).tables == ()


def test_a_model_without_rope_is_named() -> None:
    sentence = (
        "model must contain a RotaryEmbedding, got Linear without one; build it with get_rope"
    )
    for model in (nn.Linear(2, 2), [Model(config()), nn.Linear(2, 2)]):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            prepare_for_capture(model, SMALL)
        with pytest.raises(ValueError, match=re.escape(sentence)), capture_guard(model):
            pass


@pytest.mark.parametrize("model", [[3], ["model"], [None]])
def test_a_model_of_a_wrong_type_is_named(model) -> None:
    with pytest.raises(TypeError, match="model must be a module, several modules or None, got"):
        prepare_for_capture(model, SMALL)


def test_a_plan_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="plan must be a CapturePlan, got int"):
        prepare_for_capture(Model(config()), 33152)


def test_a_dead_table_is_refused_by_name_before_anything_grows() -> None:
    model = Model(config())
    model.local_rope.cos_sin_cache.untyped_storage().resize_(0)
    message = r"^local_rope must have a live table, got a dead one: cos_sin_cache has lost its"
    with pytest.raises(RuntimeError, match=message):
        prepare_for_capture(model, SMALL)
    with pytest.raises(RuntimeError, match=message), capture_guard(model):
        pass
    assert model.layers[0].rope.capacity == 256
    assert model.local_rope.reserve(1)
    assert prepare_for_capture(model, SMALL).grew == 2


def test_a_model_on_meta_is_refused() -> None:
    model = Model(config(), device="meta")
    with pytest.raises(ValueError, match=r"model must be on a real device, got layers\.0\.rope on"):
        prepare_for_capture(model, SMALL)
    model.to_empty(device="cpu")
    assert prepare_for_capture(model, SMALL).grew == 2


def test_a_meta_table_beside_the_real_one_is_left_out() -> None:
    rope = get_rope(config(), "cpu")
    rope.to("meta")
    assert [x.device.type for x in prepare_for_capture(rope, SMALL).tables] == ["cpu"]
    with capture_guard(rope):
        pass


@pytest.mark.parametrize("what", ["compiling", "capturing"])
def test_preparing_too_late_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Within the reserve there is nothing left to do, so it may come at any time."""
    model = Model(config())
    if what == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        monkeypatch.setattr(table, "stream_is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must not grow to 1024 rows while"):
        prepare_for_capture(model, SMALL)
    report = prepare_for_capture(model, CapturePlan(max_position=256, margin=0))
    assert report.grew == 0


# ------------------------------------------------------------------------------------------- pins


def test_what_a_capture_saw_outlives_growth_and_model() -> None:
    """A captured graph holds the address only. Wrong twin: a model that was never prepared."""
    kept, address = {}, {}
    for name in ("prepared", "guarded", "neither"):
        model = nn.ModuleList([RotaryEmbedding(config(), "cpu")])
        if name == "prepared":
            prepare_for_capture(model, CapturePlan(max_position=8, margin=0))
        elif name == "guarded":
            with capture_guard(model):
                pass
        cache = model[0].cos_sin_cache
        kept[name], address[name] = weakref.ref(cache), cache.data_ptr()
        del cache
        model[0].reserve(4096)
        del model
    gc.collect()
    fresh = RopeTable(config(), "cpu").cos_sin_cache
    for name in ("prepared", "guarded"):
        cache = kept[name]()
        assert cache is not None
        assert cache.data_ptr() == address[name]
        assert torch.equal(cache, fresh)
    assert kept["neither"]() is None


@pytest.mark.parametrize("how", ["prepare", "guard", "guard of all"])
def test_what_is_pinned_is_static_for_compiled_code(how: str) -> None:
    """And stays so when it grows; a table nobody pins is marked by nobody."""
    rope, other = get_rope(config(), "cpu"), RotaryEmbedding(config(), "cpu")
    if how == "prepare":
        prepare_for_capture(rope, SMALL)
    else:
        with capture_guard(rope if how == "guard" else None):
            pass
    old = rope.cos_sin_cache
    assert rope.reserve(5000)
    assert rope.cos_sin_cache is not old
    for tensor in (old, rope.cos_sin_cache, rope.inv_freq):
        assert get_static_address_type(tensor) == "guarded"
    for tensor in (other.cos_sin_cache, other.inv_freq, get_rope(config(), META).inv_freq):
        assert get_static_address_type(tensor) is None


def test_a_copy_of_a_pinned_table_is_not_pinned() -> None:
    """It is a table of its own, which no capture has seen."""
    rope = get_rope(config(), "cpu")
    prepare_for_capture(rope, SMALL)
    twin = copy.deepcopy(rope)
    assert torch.equal(twin.cos_sin_cache, rope.cos_sin_cache)
    assert get_static_address_type(twin.cos_sin_cache) is None


# ------------------------------------------------------------------------------------------- guard


def test_growth_inside_the_guard_raises() -> None:
    model, other = Model(config()), get_rope(config(base=5.0), "cpu")
    with capture_guard(model):
        for rope in (model.layers[0].rope, model.local_rope):
            assert rope.reserve(256) is False
            with pytest.raises(
                RuntimeError, match="must not grow to 384 rows inside capture_guard"
            ):
                rope.reserve(257)
        assert other.reserve(257)
    assert model.layers[0].rope.reserve(257)


def test_the_guard_without_a_model_covers_what_is_built_inside() -> None:
    before, lone = get_rope(config(), "cpu"), RotaryEmbedding(config(), "cpu")
    with capture_guard():
        inside = get_rope(config(base=5.0), "cpu")
        for rope in (before, inside):
            with pytest.raises(RuntimeError, match="inside capture_guard"):
                rope.reserve(1000)
        assert lone.reserve(1000)
        assert inside(torch.arange(3), randn(3, 2, 16))[0].shape == (3, 2, 16)
    pinned = {id(x) for x in registry._pinned.values()}
    for rope in (before, inside):
        assert id(rope.cos_sin_cache) in pinned
        assert rope.reserve(1000)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_guards_nest(outer: bool, inner: bool) -> None:
    """With a model or without, in every combination; growth comes back after the last."""
    rope = get_rope(config(), "cpu")
    with capture_guard(rope if outer else None):
        with capture_guard(rope if inner else None):
            pass
        with pytest.raises(RuntimeError, match="inside capture_guard"):
            rope.reserve(1000)
    assert rope.reserve(1000)


@pytest.mark.parametrize("given", [True, False])
def test_an_exception_inside_leaves_the_guard_clean(given: bool) -> None:
    rope = get_rope(config(), "cpu")
    with pytest.raises(KeyError, match="inside"), capture_guard(rope if given else None):
        raise KeyError("inside")
    assert rope.reserve(1000)
    assert not registry._guards
    for built in live_tables():
        assert built._frozen == 0


def test_a_guard_changes_no_value() -> None:
    rope = get_rope(config(), "cpu")
    positions, q = torch.tensor([0, 255, 256, -1]), randn(4, 2, 16)
    before = rope(positions, q)[0]
    with capture_guard(rope):
        assert torch.equal(rope(positions, q)[0], before)
    assert torch.equal(rope(positions, q)[0], before)
