"""Fault group E: shared entries that are dead, confused with another, or changed by one owner.

The labels are those of test_faults_index.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from test_faults_index import assert_right, rest_of
from torch import Tensor, nn

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, get_rope
from rope_compile.factory import registry
from rope_compile.ops import rope_inplace_op, rope_op
from rope_compile.table import RopeTable, canonical_device

from support import randn

META = torch.device("meta")
AT = torch.tensor([0, 1, 127, 128, 5000, -7])


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def config(**fields: object) -> RopeConfig:
    return RopeConfig(**{"head_dim": 8, "max_position": 128, **fields})


def assert_serves(rope: RotaryEmbedding, dtype: torch.dtype = torch.float32) -> None:
    """Right values in and outside the table, on the CPU."""
    q, k = randn(6, 2, 8, seed=1, dtype=dtype), randn(6, 1, 8, seed=2, dtype=dtype)
    at = AT.expand(rope.config.num_axes, -1) if rope.config.num_axes else AT
    assert_right(rope(at, q, k), (q, k), at, rope.config)


# --------------------------------------------------------------------------------------------- E1


class Model(nn.Module):
    def __init__(self, made: RopeConfig, device: str | None = "cpu") -> None:
        super().__init__()
        self.layers = nn.ModuleList([get_rope(made, device), get_rope(made, device)])


def freed(rope: RotaryEmbedding) -> None:
    rope.cos_sin_cache.untyped_storage().resize_(0)


def replaced(rope: RotaryEmbedding) -> None:
    rope.table._buffers["cos_sin_cache"] = rope.cos_sin_cache.to(META)


@pytest.mark.parametrize("kill", [freed, replaced])
def test_e1_a_dead_entry_is_never_handed_out(kill: Callable[[RotaryEmbedding], None]) -> None:
    """A torn-down model leaves later ones unrotated, sgl-project/sglang PR #33575: rebuilt."""
    model = Model(config())
    rope = model.layers[0]
    kill(rope)
    with pytest.warns(UserWarning, match="discards a dead entry"):
        fresh = get_rope(config(), "cpu")
    assert fresh is not rope
    assert fresh.device.type == "cpu"
    assert_serves(fresh)
    assert get_rope(config(), "cpu") is fresh


def test_e1_a_teardown_to_meta_reaches_nobody_else() -> None:
    """A torn-down model leaves later ones unrotated, sgl-project/sglang PR #33575: .to("meta")."""
    model = Model(config())
    other = get_rope(config(), "cpu")
    model.to("meta")
    for rope in (other, get_rope(config(), "cpu")):
        assert rope.cos_sin_cache.device.type == "cpu"
        assert_serves(rope)


def test_e1_an_empty_table_is_alive() -> None:
    """Dead is no bytes for some elements, sgl-project/sglang PR #33575: rotary width 0 has none."""
    rope = get_rope(config(rotary_dim=0), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_rope(config(rotary_dim=0), "cpu") is rope


def test_e1_meta_entries_stay_in_meta_construction() -> None:
    """A meta entry served a real call, sgl-project/sglang PR #33575: shared there, never here."""
    real = get_rope(config(), "cpu")
    with META:
        first, second = get_rope(config()), get_rope(config())
        elsewhere: list[RotaryEmbedding] = []
        thread = threading.Thread(target=lambda: elsewhere.append(get_rope(config())))
        thread.start()  # the context is this thread's own
        thread.join()
    assert first is second
    assert first.device == META
    assert get_rope(config(), "cpu") is elsewhere[0] is real
    assert_serves(real)


@pytest.mark.parametrize("op", [rope_op, rope_inplace_op])
@pytest.mark.parametrize("which", range(5))
def test_e1_the_operator_refuses_mixed_devices(op, which: int) -> None:
    """A meta table routed the call to a fake, sgl-project/sglang PR #33575: silently nothing."""
    rope = RotaryEmbedding(config(), "cpu")
    q, k = randn(6, 2, 8), randn(6, 1, 8)
    arguments = [q, k, AT, *rest_of(rope)]
    before = q.clone()
    arguments[which] = arguments[which].to(META)
    with pytest.raises(ValueError, match=r"must be on one device, .* on meta"):
        op(*arguments)
    assert torch.equal(q, before)
    all_meta = [x.to(META) if isinstance(x, Tensor) else x for x in arguments]
    out = op(*all_meta)
    assert out is None or out[0].device == META


def test_e1_a_freed_table_is_refused_by_the_operator() -> None:
    """A table whose storage is gone, sgl-project/sglang PR #33575: held by somebody, and used."""
    rope = RotaryEmbedding(config(), "cpu")
    freed(rope)
    with pytest.raises(ValueError, match="cos_sin_cache must have memory"):
        rope(AT, randn(6, 2, 8))


def test_e1_a_registry_without_a_look_would_be_found() -> None:
    """Wrong twin of sgl-project/sglang PR #33575: a plain dictionary, and a blind fake."""
    entries = {config(): RotaryEmbedding(config(), "cpu")}
    entries[config()].to("meta")  # a module of its own moves
    with pytest.raises(ValueError, match="table for"):
        assert_serves(entries[config()])
    library = torch.library.Library("rope_fault_mixed", "DEF")
    library.define("rope_(Tensor(a!) q, Tensor table) -> ()")
    library.impl("rope_", lambda q, table: q.mul_(table[0]), "CPU")
    torch.library.register_fake("rope_fault_mixed::rope_", lambda q, table: None, lib=library)
    q = randn(6, 2, 8)
    before = q.clone()
    torch.ops.rope_fault_mixed.rope_(q, torch.ones(8, device=META))
    assert torch.equal(q, before)  # unrotated, and nobody was told


# --------------------------------------------------------------------------------------------- E2

BASE = {
    "head_dim": 8, "max_position": 128, "rotary_dim": 8, "rotary_offset": 0, "base": 10000.0,
    "style": "half", "scaling": rc.YarnScaling(factor=4.0, original_max_position=64), "axes": None,
    "phase_dtype": torch.float32,
}  # fmt: skip
OTHER = {
    "head_dim": 16, "max_position": 129, "rotary_dim": 4, "rotary_offset": 4, "base": 10000.5,
    "style": "interleaved", "scaling": rc.YarnScaling(factor=4.5, original_max_position=64),
    "axes": rc.ChunkedAxes((1, 1, 2)), "phase_dtype": torch.float64,
}  # fmt: skip
ALONGSIDE = {"rotary_offset": {"rotary_dim": 4}}
SCALINGS = (
    rc.LinearScaling(factor=4.0),
    rc.NtkScaling(factor=4.0, mixed_b=0.5),
    rc.NtkAlphaScaling(alpha=100.0),
    rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64, length=128),
    rc.YarnScaling(factor=4.0, original_max_position=64, mscale=1.0, mscale_all_dim=0.5),
    rc.DeepseekYarnScaling(factor=4.0, original_max_position=64, mscale_all_dim=0.5),
    rc.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    ),
    rc.ProportionalScaling(partial_rotary_factor=0.5),
    rc.LongRopeScaling(
        policy="by_length", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4,
        original_max_position=64, factor=4.0, length=128,
    ),
)  # fmt: skip
# Fields that are a word, or nothing, until they are given: another value, and what goes with it.
GIVEN: dict[str, dict[str, object]] = {
    "attention_factor": {"attention_factor": 1.0},  # all that DeepSeek allows
    "short_mscale": {"short_mscale": 1.5},
    "long_mscale": {"long_mscale": 1.5},
    "mscale": {"mscale": 0.5},
    "mscale_all_dim": {"mscale_all_dim": 0.5},
    "max_trained_position": {
        "max_trained_position": 32, "policy": "static_max", "length": None,
    },
    "policy": {"length": None},
}  # fmt: skip
POLICIES = {rc.DynamicScaling: "static_factor", rc.LongRopeScaling: "static"}


def test_e2_every_scaling_with_fields_is_here() -> None:
    """Attributes missing from a hash, tenstorrent/tt-metal PR #50093: a new type must join."""
    public = {getattr(rc, name) for name in rc.__all__ if name.endswith("Scaling")}
    assert public - {rc.DefaultScaling} == {type(scaling) for scaling in SCALINGS}


def variants(scaling: rc.DefaultScaling) -> Iterator[object]:
    """One for each field of a scaling type, which is changed."""
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if isinstance(value, bool):
            yield dataclasses.replace(scaling, **{field.name: not value})
        elif isinstance(value, int | float):
            step = 0.25 if field.name in ("mixed_b", "partial_rotary_factor") else 1
            yield dataclasses.replace(scaling, **{field.name: value + step})
        elif isinstance(value, tuple):
            yield dataclasses.replace(scaling, **{field.name: (*value[:-1], value[-1] + 1)})
        elif isinstance(value, str):
            changes = GIVEN[field.name] | {field.name: POLICIES[type(scaling)]}
            yield dataclasses.replace(scaling, **changes)
        else:
            assert value is None, field
            yield dataclasses.replace(scaling, **GIVEN[field.name])


@pytest.mark.parametrize(
    "order", list(itertools.permutations((torch.float16, torch.bfloat16, torch.float32)))
)
def test_e2_models_of_several_dtypes_share_a_float32_table(order) -> None:
    """dtype missing from the key, vllm-project/vllm PR #4835: none changes another's table."""
    for dtype in order:
        model = nn.ModuleList([get_rope(config(), "cpu")]).to(dtype)
        assert_serves(model[0], dtype)
        assert model[0].cos_sin_cache.dtype == torch.float32
    for dtype in order:
        assert_serves(get_rope(config(), "cpu"), dtype)


def test_e2_every_argument_has_another_value_here() -> None:
    """Attributes missing from a hash, tenstorrent/tt-metal PR #50093: a new field must join."""
    assert set(BASE) == set(OTHER) == {field.name for field in dataclasses.fields(RopeConfig)}


@pytest.mark.parametrize("name", OTHER)
def test_e2_every_argument_is_in_the_key(name: str) -> None:
    """Attributes missing from a hash, tenstorrent/tt-metal PR #50093: each one changed alone."""
    fields = BASE | ALONGSIDE.get(name, {})
    first, second = RopeConfig(**fields), RopeConfig(**fields | {name: OTHER[name]})
    ropes = [get_rope(made, "cpu") for made in (first, second)]
    assert ropes[0] is not ropes[1]
    for rope, made in zip(ropes, (first, second), strict=True):
        assert rope.config == made
        assert torch.equal(rope.inv_freq, made.inv_freq(made.phase_dtype))


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_e2_every_number_of_a_scaling_is_in_the_key(scaling) -> None:
    """Attributes missing from a hash, tenstorrent/tt-metal PR #50093: the scaling's numbers too."""
    made = [config(scaling=scaling), *(config(scaling=other) for other in variants(scaling))]
    ropes = [get_rope(one, "cpu") for one in made]
    assert len({id(rope) for rope in ropes}) == len(made) > 1


def test_e2_every_axis_map_is_in_the_key() -> None:
    """Attributes missing from a hash, tenstorrent/tt-metal PR #50093: kinds and sections too."""
    maps = (
        None, rc.ChunkedAxes((1, 1, 2)), rc.ChunkedAxes((1, 2, 1)), rc.InterleavedAxes((2, 1, 1)),
        rc.GlmAxes((1, 1, 2)), rc.AxialAxes((4, 4)), rc.AxialAxes((4, 4), frequencies="global"),
    )  # fmt: skip
    ropes = {id(get_rope(config(axes=axes), "cpu")) for axes in maps}
    assert len(ropes) == len(maps)


def test_e2_spellings_of_one_number_share() -> None:
    """A key that tells spellings apart, vllm-project/vllm PR #4835: 10000, 10000.0 and "1e4"."""
    ropes = {id(get_rope(config(base=base), "cpu")) for base in (10000, 10000.0, "1e4")}
    assert len(ropes) == 1
    assert hash(1.0) == hash(True)  # so a flag must be no number, and a number no flag
    for name in ("base", "head_dim", "max_position", "rotary_offset"):
        with pytest.raises(TypeError, match=f"{name} must be a number|{name} must be"):
            config(**{name: True})
    with pytest.raises(TypeError, match="truncate must be True or False"):
        rc.YarnScaling(factor=4.0, original_max_position=64, truncate=1)


def test_e2_a_device_without_a_number_is_the_current_one(monkeypatch) -> None:
    """Spellings of one device as unequal keys, NVIDIA/TransformerEngine PR #798: cuda is cuda:0."""
    made = types.SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: made)
    assert canonical_device("cuda") == canonical_device("cuda:0") == torch.device("cuda", 0)


def test_e2_a_device_has_one_name() -> None:
    """Spellings of one device as unequal keys, NVIDIA/TransformerEngine PR #798: one name."""
    assert torch.device("cuda") != torch.device("cuda", 0)
    cpu = [get_rope(config(), name) for name in (None, "cpu", "cpu:0", torch.device("cpu", 0))]
    assert len({id(rope) for rope in cpu}) == 1
    assert canonical_device("cuda:1") == canonical_device(torch.device("cuda", 1))
    assert canonical_device("cuda:0") != canonical_device("cuda:1")


def test_e2_a_key_without_dtype_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm PR #4835: one entry, cast by each model that asks."""
    shared = nn.Module()
    shared.register_buffer("cos_sin_cache", RotaryEmbedding(config(), "cpu").cos_sin_cache)
    q = randn(6, 2, 8)
    shared.half()
    out = rc.apply_rope(q, None, AT, shared.cos_sin_cache.float(), inv_freq=config().inv_freq())
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), AT, config())


# --------------------------------------------------------------------------------------------- E4

LAYERS = {
    "target": config(base=1e6),
    "draft": config(base=1e4),
    "local": config(base=1e4, max_position=256),
    "global": config(base=1e6, scaling=rc.YarnScaling(factor=4.0, original_max_position=64)),
}


def test_e4_interleaved_models_keep_their_own_frequencies() -> None:
    """Two parameter sets in one table, vllm-project/vllm PR #29111: a hundred mixed calls."""
    order = random.Random(0)
    for _ in range(100):
        name = order.choice(sorted(LAYERS))
        assert_serves(get_rope(LAYERS[name], "cpu"))
    assert len(registry.modules()) == len(LAYERS)


def test_e4_one_global_table_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm-ascend #6612: the target's table serves the draft."""
    q = randn(6, 2, 8)
    out = get_rope(LAYERS["target"], "cpu")(AT, q)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(out, (q, None), AT, LAYERS["draft"])


# --------------------------------------------------------------------------------------------- E6


@pytest.mark.parametrize("garbage", [math.nan, 0.0, 1e30])
@pytest.mark.parametrize("through", ["module", "table"])
def test_e6_lost_contents_come_back_at_the_same_address(through: str, garbage: float) -> None:
    """Sleep discards buffers, vllm-project/vllm PR #16889: rebuild in place."""
    rope = get_rope(config(scaling=rc.YarnScaling(factor=4.0, original_max_position=64)), "cpu")
    right = [x.clone() for x in rope.buffers()]
    addresses = [x.data_ptr() for x in rope.buffers()]
    for x in rope.buffers():
        x.fill_(garbage)
    assert get_rope(rope.config, "cpu") is rope  # by its size alone it looks alive
    (rope if through == "module" else rope.table).rebuild_()
    assert [x.data_ptr() for x in rope.buffers()] == addresses
    assert all(torch.equal(x, y) for x, y in zip(rope.buffers(), right, strict=True))
    assert_serves(rope)


def test_e6_what_a_probe_cannot_see_is_documented() -> None:
    """A guard that tests for None alone, vllm-project/vllm-ascend PR #17217: said in the docs."""
    assert "cannot be seen" in " ".join((RopeTable.rebuild_.__doc__ or "").split())
    assert "overwritten in place" in " ".join((RopeTable.dead.__doc__ or "").split())


def loose(module: nn.Module) -> list[str]:
    """Tensors that hang on a module, or on what its attributes hold, and are no named buffer."""
    named = {id(x) for x in module.buffers()}
    found: list[str] = []

    def look(name: str, value: object, depth: int = 3) -> None:
        if isinstance(value, Tensor):
            found.extend([name] if id(value) not in named else [])
        elif isinstance(value, dict) and depth:
            for key, one in value.items():
                look(f"{name}.{key}", one, depth - 1)
        elif isinstance(value, list | tuple) and depth:
            for one in value:
                look(name, one, depth - 1)

    for path, part in module.named_modules():
        look(path, vars(part))
    return found


def test_e6_every_tensor_of_the_registry_is_a_named_buffer() -> None:
    """Derived tensors in globals are not restored, vllm-project/vllm-ascend PR #17217: none is."""
    for made in LAYERS.values():
        get_rope(made, "cpu")
    get_rope(config(axes=rc.ChunkedAxes((1, 1, 2))), "cpu")
    for rope in registry.modules():
        assert {name.rpartition(".")[2] for name, _ in rope.named_buffers()} == {
            "cos_sin_cache", "inv_freq",
        }  # fmt: skip
        assert not loose(rope)
        assert not rope.state_dict()
    state = {name: value for name, value in vars(registry).items() if name != "slots"}
    assert not [x for value in state.values() if isinstance(value, dict) for x in value.values()
                if isinstance(x, Tensor)]  # fmt: skip


def test_e6_a_derived_tensor_would_be_found() -> None:
    """Wrong twin of vllm-project/vllm-ascend PR #17217: cos and sin kept apart in a dictionary."""
    rope = RotaryEmbedding(config(), "cpu")
    rope.table.kept = {"cos": rope.cos_sin_cache[:, :4]}
    assert loose(rope)


# --------------------------------------------------------------------------------------------- E7

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to meta": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "to_empty meta": lambda model: model.to_empty(device="meta"),
    "cpu": lambda model: model.cpu(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_e7_one_owner_changes_nothing_for_another(change: str) -> None:
    """A shared module moved or cast, huggingface/transformers PR #35583: not the others'."""
    first, second = (nn.ModuleList([get_rope(config(), "cpu")]) for _ in range(2))
    bits = [x.clone() for x in second[0].buffers()]
    before = [(x.dtype, x.device, x.data_ptr()) for x in second[0].table.buffers()]
    CHANGES[change](first)
    assert [(x.dtype, x.device, x.data_ptr()) for x in second[0].table.buffers()] == before
    assert all(torch.equal(x, y) for x, y in zip(second[0].table.buffers(), bits[:2], strict=True))
    assert_serves(second[0])
    assert_serves(get_rope(config(), "cpu"))


def test_e7_a_shared_module_serves_each_device() -> None:
    """A table on another device than q, unslothai/unsloth PR #840: one for each, by q's."""
    first, second = (nn.ModuleList([get_rope(config(), "cpu")]) for _ in range(2))
    first.to("meta")
    assert first[0](AT.to(META), randn(6, 2, 8).to(META))[0].device == META
    assert_serves(second[0])
    lone = RotaryEmbedding(config(), "cpu")
    with pytest.raises(ValueError, match=r"q must be on a device .*call \.to\('meta'\)"):
        lone(AT.to(META), randn(6, 2, 8).to(META))


@pytest.mark.parametrize(
    ("change", "seen"), [("to meta", "meta"), ("half", "float16"), ("bfloat16", "bfloat16")]
)
def test_e7_plain_sharing_would_be_found(change: str, seen: str) -> None:
    """Wrong twin of mosaicml/llm-foundry PR #1334: an ordinary shared module changes for both."""
    shared = nn.Module()
    shared.register_buffer("cos_sin_cache", torch.ones(3))
    first, second = (nn.ModuleList([shared]) for _ in range(2))
    CHANGES[change](first)
    table = second[0].cos_sin_cache
    assert seen in (table.device.type, str(table.dtype).removeprefix("torch."))
