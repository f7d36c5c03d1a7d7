"""RotaryEmbedding: values, what forward must not touch, and every way a model moves or casts it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, factory, get_rope

from support import NoHostReads, assert_near_oracle, edge_positions, oracle_rotate, randn

WIDTH = 16
YARN = rc.YarnScaling(factor=4.0, original_max_position=64)
LONG_ROPE = {
    "short_factor": (1.0,) * (WIDTH // 2),
    "long_factor": (2.0,) * (WIDTH // 2),
    "original_max_position": 64,
    "factor": 4.0,
}
CASES = {
    "plain": {},
    "interleaved": {"style": "interleaved"},
    "interleaved_to_half": {"style": "interleaved_to_half"},
    "partial": {"rotary_dim": 8},
    "offset": {"rotary_dim": 8, "rotary_offset": 8},
    "no_rotation": {"rotary_dim": 0},
    "float64_phase": {"phase_dtype": torch.float64},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "ntk": {"scaling": rc.NtkScaling(factor=4.0)},
    "ntk_alpha": {"scaling": rc.NtkAlphaScaling(alpha=100.0)},
    "dynamic": {
        "scaling": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    },
    "yarn": {"scaling": YARN},
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        )
    },
    "longrope": {"scaling": rc.LongRopeScaling(policy="static", **LONG_ROPE)},
    "proportional": {"scaling": rc.ProportionalScaling(partial_rotary_factor=0.5)},
    "chunked_axes": {"axes": rc.ChunkedAxes((2, 3, 3))},
    "interleaved_axes": {"axes": rc.InterleavedAxes((3, 3, 2))},
    "half_blocks": {"axes": rc.AxialAxes((8, 8)), "style": "half_blocks"},
}


@pytest.fixture(autouse=True)
def _empty_registry():
    factory.registry.clear()
    yield
    factory.registry.clear()


def config(rows: int = 256, **fields) -> RopeConfig:
    return RopeConfig(head_dim=WIDTH, max_position=rows, **fields)


def inputs(rope: RotaryEmbedding, dtype: torch.dtype = torch.float32):
    """Positions inside and outside the table, q and k."""
    positions = edge_positions(rope.capacity)
    if rope.config.num_axes:
        shifted = [positions.roll(axis) for axis in range(rope.config.num_axes)]
        positions = torch.stack(shifted)
    tokens = positions.shape[-1]
    return (
        positions,
        randn(tokens, 3, WIDTH, seed=1, dtype=dtype),
        randn(tokens, 2, WIDTH, seed=2, dtype=dtype),
    )


def assert_right(rope: RotaryEmbedding, dtype: torch.dtype = torch.float32, outs=None) -> None:
    """Module output against the float64 oracle, built from the config and nothing of the module."""
    positions, q, k = inputs(rope, dtype)
    made = rope.config
    frequencies = made.inv_freq(made.phase_dtype)
    outs = rope(positions, q, k) if outs is None else outs
    for x, out in zip((q, k), outs, strict=True):
        expected = oracle_rotate(
            x,
            positions,
            frequencies,
            style=made.style,
            rotary_offset=made.rotary_offset,
            attention_scaling=made.attention_scaling,
            lane_axes=made.lane_axes,
        )
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert_near_oracle(out, *expected)


def bits(rope: RotaryEmbedding) -> list[bytes]:
    return [x.numpy().tobytes() for x in (rope.cos_sin_cache, rope.inv_freq)]


# ----------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_output_equals_the_oracle(case: str, dtype: torch.dtype) -> None:
    assert_right(RotaryEmbedding(config(**CASES[case]), "cpu"), dtype)


def test_a_wrong_frequency_would_be_found() -> None:
    """Wrong twin: a base off by 1e-4."""
    rope = RotaryEmbedding(config(), "cpu")
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(RotaryEmbedding(config(base=10001.0), "cpu"), outs=rope(*inputs(rope)))


def test_k_is_optional_and_inverse_rotates_back() -> None:
    rope = RotaryEmbedding(config(), "cpu")
    positions, q, k = inputs(rope)
    rotated, absent = rope(positions, q)
    assert absent is None
    assert torch.equal(rotated, rope(positions, q, k)[0])
    back, _ = rope(positions, rotated, inverse=True)
    torch.testing.assert_close(back, q, rtol=1e-6, atol=1e-6)


def test_in_place_equals_functional() -> None:
    rope = RotaryEmbedding(config(scaling=YARN), "cpu")
    positions, q, k = inputs(rope)
    expected = rope(positions, q, k)
    assert rope.apply_(positions, q, k) is None
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


@pytest.mark.parametrize("rows", [4095, 4096])
def test_values_are_right_on_both_sides_of_the_end(rows: int) -> None:
    """Position + 1 decides, not the length of the chunk; the table is left alone."""
    rope = RotaryEmbedding(config(4096), "cpu")
    address, q = rope.cos_sin_cache.data_ptr(), randn(1, 3, WIDTH)
    positions = torch.tensor([rows])
    assert_near_oracle(rope(positions, q)[0], *oracle_rotate(q, positions, config().inv_freq()))
    assert (rope.capacity, rope.cos_sin_cache.data_ptr()) == (4096, address)


@pytest.mark.parametrize("rows", [128, 33152])
def test_a_planned_table_is_right_around_its_last_row(rows: int) -> None:
    rope = RotaryEmbedding(config(128), "cpu", capacity=rows)
    positions = torch.tensor([rows - 1, rows, rows + 1, 10 * rows])
    q = randn(4, 3, WIDTH)
    assert_near_oracle(rope(positions, q)[0], *oracle_rotate(q, positions, config().inv_freq()))
    with rc.debug(), pytest.raises(ValueError, match=rf"table of {rows} rows .* got {rows}"):
        rope(torch.tensor([rows]), q[:1])


def test_a_row_read_and_the_same_row_computed_agree() -> None:
    small, large = (RotaryEmbedding(config(n, scaling=YARN), "cpu") for n in (128, 4096))
    positions, q = torch.arange(4096), randn(4096, 1, WIDTH)
    read, computed = large(positions, q)[0], small(positions, q)[0]
    torch.testing.assert_close(read, computed, rtol=0, atol=6e-7 * float(q.abs().max()))


# ---------------------------------------------------------------------- what forward must not do


def snapshot(rope: RotaryEmbedding):
    """Attributes by identity, buffers by address and version, of the module and its parts."""
    attributes = {
        (name, key): id(value)
        for name, part in rope.named_modules()
        for key, value in vars(part).items()
    }
    buffers = {
        name: (id(x), x.data_ptr(), x._version, x.dtype, tuple(x.shape))
        for name, x in rope.named_buffers()
    }
    return attributes, buffers


@pytest.mark.parametrize("case", CASES)
def test_forward_assigns_nothing(case: str) -> None:
    rope = RotaryEmbedding(config(**CASES[case]), "cpu")
    before, contents = snapshot(rope), bits(rope)
    lead = (rope.config.num_axes,) if rope.config.num_axes else ()
    for i in range(100):
        tokens, dtype = (7 * i) % 31, (torch.float32, torch.bfloat16)[i % 2]
        positions = torch.arange(tokens).expand(*lead, tokens) + 20 * i
        rope(positions, randn(tokens, 3, WIDTH, seed=i, dtype=dtype))
    assert snapshot(rope) == before
    assert bits(rope) == contents


def test_an_assignment_in_forward_would_be_found() -> None:
    """Wrong twin: the usual cached position."""

    class Caching(RotaryEmbedding):
        def forward(self, positions, q, k=None, *, inverse=False):
            self.seen = positions
            return super().forward(positions, q, k, inverse=inverse)

    rope = Caching(config(), "cpu")
    before = snapshot(rope)
    rope(*inputs(rope))
    assert snapshot(rope) != before


@pytest.mark.usefixtures("fresh_compiler")
def test_bfloat16_then_float16_leave_the_table_alone() -> None:
    """Eager and compiled; no dtype conversion is written back."""
    rope = RotaryEmbedding(config(), "cpu")
    before = snapshot(rope)[1]
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for dtype in (torch.bfloat16, torch.float16):
        eager, traced = rope(*inputs(rope, dtype)), compiled(*inputs(rope, dtype))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
        assert_right(rope, dtype)
        assert snapshot(rope)[1] == before


@pytest.mark.parametrize("case", CASES)
def test_forward_reads_no_value_on_the_host(case: str) -> None:
    """In two nets: an operator that reads, and fake tensors, which hold nothing to read."""
    rope = RotaryEmbedding(config(**CASES[case]), "cpu")
    positions, q, k = inputs(rope)
    with NoHostReads():
        rope(positions, q, k)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        out, _ = rope(*(mode.from_tensor(x) for x in (positions, q, k)))
    assert out.shape == q.shape


def test_a_host_read_would_be_found() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="host read"):
        bool(torch.arange(3).max() > 1)


# ----------------------------------------------------------------------------------------- compile


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", CASES)
def test_one_graph_whatever_the_config(case: str) -> None:
    rope = RotaryEmbedding(config(**CASES[case]), "cpu")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    arguments = inputs(rope)
    for out, expected in zip(compiled(*arguments), rope(*arguments), strict=True):
        assert torch.equal(out, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_nothing_recompiles_within_the_reserve() -> None:
    """Table once reserved, any number of rows in use: one graph. Beyond it: one more."""
    rope = RotaryEmbedding(config(128), "cpu", capacity=1024)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, fullgraph=True, backend=counter)
    q = randn(7, 3, WIDTH)
    for start in (0, 500, 1020, 5000, -3):
        positions = torch.arange(7) + start
        assert torch.equal(compiled(positions, q)[0], rope(positions, q)[0])
        rope.reserve(start if start > 0 and start < 1024 else 1024)
    assert counter.frame_count == 1
    rope.reserve(2000)
    assert torch.equal(compiled(torch.arange(7), q)[0], rope(torch.arange(7), q)[0])
    assert counter.frame_count == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_one_code_serves_modules_of_different_magnitude() -> None:
    """The magnitude is a constant of a graph, never a number read at every call."""
    ropes = [RotaryEmbedding(config(**CASES[case]), "cpu") for case in ("plain", "yarn", "linear")]
    compiled = torch.compile(lambda rope, *a: rope(*a), fullgraph=True, backend="aot_eager")
    for rope in ropes * 2:
        assert_right(rope, outs=compiled(rope, *inputs(rope)))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict: bool) -> None:
    rope = RotaryEmbedding(config(), "cpu")
    arguments = inputs(rope)
    exported = torch.export.export(rope, arguments, strict=strict)
    assert torch.ops.rope_compile.rope.default in [node.target for node in exported.graph.nodes]
    for out, expected in zip(exported.module()(*arguments), rope(*arguments), strict=True):
        assert torch.equal(out, expected)


# ------------------------------------------------------------------------------------ casts, moves


class Model(nn.Module):
    def __init__(self, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.rope = rope


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to_dtype": lambda m: m.to(torch.bfloat16),
    "to_dtype_device": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float64),
    "cpu": lambda m: m.cpu(),
    "share_memory": lambda m: m.share_memory(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_tensor": lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_casts_never_reach_the_table(cast: str, shared: bool) -> None:
    rope = get_rope(config(), "cpu") if shared else RotaryEmbedding(config(), "cpu")
    before, address = bits(rope), rope.cos_sin_cache.data_ptr()
    CASTS[cast](Model(rope))
    assert rope.cos_sin_cache.dtype == rope.inv_freq.dtype == torch.float32
    assert bits(rope) == before
    assert rope.cos_sin_cache.data_ptr() == address
    assert_right(rope)


def test_growth_after_a_cast_is_exact() -> None:
    """Frequencies rounded to bfloat16 and grown from would be off by 0.47 at position 511."""
    rope = RotaryEmbedding(config(), "cpu")
    Model(rope).to(torch.bfloat16)
    rope.reserve(4096)
    assert_right(rope)
    fresh = RotaryEmbedding(config(), "cpu", capacity=4096)
    assert torch.equal(rope.cos_sin_cache, fresh.cos_sin_cache)


def assert_materialised(rope: nn.Module) -> None:
    """What a module must be after it left meta; a naive one is not."""
    assert rope.inv_freq[0] == 1.0
    assert torch.equal(rope.inv_freq, config().inv_freq())


MOVES = {
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "to_dtype_device": lambda m: m.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_leaving_meta_ends_with_right_values(move: str, shared: bool) -> None:
    with torch.device("meta"):
        rope = get_rope(config()) if shared else RotaryEmbedding(config())
    assert rope.device.type == "meta"
    rope.reserve(500)
    assert MOVES[move](rope) is rope
    assert rope.device == torch.device("cpu")
    assert rope.capacity == 512
    assert_materialised(rope)
    assert_right(rope)


def test_to_empty_over_garbage() -> None:
    """Memory that torch hands out again is full of NaN; the whole model goes through it."""
    with torch.device("meta"):
        model = Model(RotaryEmbedding(config()))
    garbage = [torch.full((256, WIDTH), math.nan) for _ in range(8)]
    del garbage
    model.to_empty(device="cpu")
    assert_materialised(model.rope)
    assert_right(model.rope)


def test_a_naive_module_would_be_found() -> None:
    """Wrong twin: non-persistent frequencies filled in ``__init__`` only."""

    class Naive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", config().inv_freq().to("meta"), persistent=False)

    naive = Naive().to_empty(device="cpu")
    naive.inv_freq.fill_(math.nan)  # what the allocator may hand out
    with pytest.raises(AssertionError):
        assert_materialised(naive)


def test_a_lone_module_moves() -> None:
    rope = RotaryEmbedding(config(), "cpu", capacity=1000)
    Model(rope).to("meta")
    assert rope.device == torch.device("meta")
    assert [name for name, _ in rope.named_buffers()] == [
        "tables.on_meta.cos_sin_cache",
        "tables.on_meta.inv_freq",
    ]
    rope.to_empty(device="cpu")
    assert rope.capacity == 1024
    assert_right(rope)


@pytest.mark.parametrize("change", [*CASTS.values(), lambda m: m.to("meta")])
def test_one_owner_changes_nothing_for_another(change) -> None:
    """One shared entry in two models; the second keeps its object, address and bits."""
    first, second = Model(get_rope(config(), "cpu")), Model(get_rope(config(), "cpu"))
    assert first.rope is second.rope
    before, address = bits(second.rope), second.rope.cos_sin_cache.data_ptr()
    change(first)
    assert (bits(second.rope), second.rope.cos_sin_cache.data_ptr()) == (before, address)
    assert second.rope.device == torch.device("cpu")
    assert_right(second.rope)
    assert get_rope(config(), "cpu") is second.rope


def test_a_shared_module_serves_both_devices() -> None:
    """After ``.to("meta")`` by one owner it takes meta tensors too."""
    rope = get_rope(config(), "cpu")
    positions, q, _ = inputs(rope)
    with pytest.raises(ValueError, match=re.escape("(cpu), got meta; call .to('meta')")):
        rope(positions.to("meta"), q.to("meta"))
    Model(rope).to("meta")
    out, _ = rope(positions.to("meta"), q.to("meta"))
    assert (out.device.type, out.shape) == ("meta", q.shape)
    assert_right(rope)
    rope.reserve(1000)
    assert {table.capacity for table in rope.tables.values()} == {1024}


def test_two_owners_leave_meta_one_after_the_other() -> None:
    with torch.device("meta"):
        first, second = Model(get_rope(config())), Model(get_rope(config()))
    assert first.rope is second.rope
    first.to_empty(device="cpu")
    positions, q, _ = inputs(first.rope)
    out, _ = second.rope(positions.to("meta"), q.to("meta"))
    assert out.device.type == "meta"
    second.to_empty(device="cpu")
    assert_right(second.rope)


def test_a_module_whose_table_died_is_revived_by_a_move() -> None:
    rope = RotaryEmbedding(config(), "cpu")
    rope.cos_sin_cache.untyped_storage().resize_(0)
    rope.to("cpu")
    assert_right(rope)
    shared = get_rope(config(), "cpu")
    shared.table._buffers["cos_sin_cache"] = shared.cos_sin_cache.to("meta")
    shared.to("cpu")
    assert_right(shared)


def test_real_q_with_a_meta_table_raises() -> None:
    """Silence here left queries unrotated: the meta kernel does nothing."""
    rope = RotaryEmbedding(config(), "meta")
    positions, q, k = inputs(rope)
    sentence = "q must be on a device that this module has a table for (meta), got cpu; call .to("
    for call in (rope, rope.apply_):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            call(positions, q, k)


def test_real_q_with_a_table_overwritten_by_meta_raises() -> None:
    """The table's module still says cpu; the operator looks at the tensor itself."""
    rope = RotaryEmbedding(config(), "cpu")
    rope.table._buffers["cos_sin_cache"] = rope.cos_sin_cache.to("meta")
    positions, q, k = inputs(rope)
    for call in (rope, rope.apply_):
        with pytest.raises(ValueError, match="cos_sin_cache on meta"):
            call(positions, q, k)


@pytest.mark.parametrize("bad", [None, 3, [1.0]])
def test_q_that_is_no_tensor_is_named(bad) -> None:
    rope = RotaryEmbedding(config(), "cpu")
    with pytest.raises(TypeError, match=f"q must be a tensor, got {type(bad).__name__}"):
        rope(torch.arange(3), bad)


def test_config_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="config must be a RopeConfig, got dict"):
        RotaryEmbedding({"head_dim": 16}, "cpu")


# ------------------------------------------------------------------------------ copies, checkpoints


def through_pickle(rope):
    return pickle.loads(pickle.dumps(rope))


def through_file(rope):
    file = io.BytesIO()
    torch.save(rope, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, through_pickle, through_file])
def test_a_copy_is_a_lone_module(copier) -> None:
    rope = get_rope(config(scaling=YARN), "cpu")
    rope.reserve(1000)
    made = copier(Model(rope).eval()).rope if copier is not copy.copy else copier(rope.eval())
    assert made is not rope
    assert not made.training
    assert made.cos_sin_cache.data_ptr() != rope.cos_sin_cache.data_ptr()
    assert bits(made) == bits(rope)
    assert made.config == rope.config
    made.to("meta")
    assert made.device.type == "meta"
    assert rope.device.type == "cpu"


def test_a_copy_serves_the_same_devices() -> None:
    rope = get_rope(config(), "cpu").to("meta")
    made = copy.deepcopy(rope)
    assert {str(table.device) for table in made.tables.values()} == {"cpu", "meta"}
    assert made.device == torch.device("cpu")
    assert_right(made)


def test_loading_follows_map_location() -> None:
    file = io.BytesIO()
    torch.save(RotaryEmbedding(config(), "cpu"), file)
    file.seek(0)
    assert torch.load(file, map_location="meta", weights_only=False).device.type == "meta"


LEGACY = ["inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "cos_sin_cache", "freqs_cis"]


def test_no_key_is_saved_and_legacy_keys_are_ignored() -> None:
    model = Model(RotaryEmbedding(config(), "cpu"))
    state = model.state_dict()
    assert set(state) == {"project.weight", "project.bias"}
    before = bits(model.rope)
    model.load_state_dict(state, strict=True)
    stray = {f"rope.{key}": torch.full((3,), math.nan) for key in LEGACY}
    model.load_state_dict(state | stray, strict=True)
    model.rope.load_state_dict({key: torch.zeros(1) for key in LEGACY}, strict=True)
    assert bits(model.rope) == before


@pytest.mark.parametrize("key", ["rope.scale", "rope.inv_freq.more", "rope.tables.cos_sin_cache"])
def test_other_unexpected_keys_are_still_reported(key: str) -> None:
    model = Model(RotaryEmbedding(config(), "cpu"))
    stray = {"rope.inv_freq": torch.zeros(1), key: torch.zeros(1)}
    with pytest.raises(RuntimeError, match=re.escape(f'Unexpected key(s) in state_dict: "{key}"')):
        model.load_state_dict(model.state_dict() | stray, strict=True)


def test_surroundings_leave_no_trace() -> None:
    expected = bits(RotaryEmbedding(config(), "cpu"))
    for around in (torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")):
        with around():
            rope = RotaryEmbedding(config(), "cpu")
        assert bits(rope) == expected
        assert_right(rope)


def test_rebuild_refills_every_table_in_place() -> None:
    rope = get_rope(config(), "cpu").to("meta")
    before, address = bits(rope), rope.cos_sin_cache.data_ptr()
    rope.cos_sin_cache.fill_(math.nan)
    rope.rebuild_()
    assert (bits(rope), rope.cos_sin_cache.data_ptr()) == (before, address)


def test_gradients_flow_across_a_growth() -> None:
    """Backward reads the table of its own forward."""
    rope = RotaryEmbedding(config(), "cpu")
    positions, q, _ = inputs(rope)
    grads = []
    for rows in (0, 5000):
        leaf = q.clone().requires_grad_()
        out, _ = rope(positions, leaf)
        rope.reserve(rows)
        out.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_repr_names_what_matters() -> None:
    text = repr(RotaryEmbedding(config(axes=rc.ChunkedAxes((2, 3, 3))), "cpu"))
    for part in ("head_dim=16", "style='half'", "DefaultScaling", "ChunkedAxes", "256 rows", "cpu"):
        assert part in text
