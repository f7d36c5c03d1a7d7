"""RopeTable: the rows it holds, when it may grow, what kills it, and where it must not notice."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import operator
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rope_compile import RopeConfig, table
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
from rope_compile.table import RopeTable, canonical_device, plain_tensors, round_up, row_count

from oracle import oracle_table
from support import run_child, ulp_distance

# Every type whose rows never depend on the length.
SCALINGS = {
    "default": DefaultScaling(),
    "linear": LinearScaling(factor=4.0),
    "ntk": NtkScaling(factor=4.0),
    "ntk_mixed": NtkScaling(factor=4.0, mixed_b=0.5),
    "ntk_alpha": NtkAlphaScaling(alpha=1000.0),
    "dynamic_static_factor": DynamicScaling(factor=2.0, policy="static_factor"),
    "dynamic_static_max": DynamicScaling(
        factor=2.0, policy="static_max", original_max_position=4096, max_trained_position=2048
    ),
    "yarn": YarnScaling(factor=4.0, original_max_position=256),
    "deepseek_yarn": DeepseekYarnScaling(
        factor=40.0, original_max_position=256, mscale=1.0, mscale_all_dim=0.8
    ),
    "llama3": Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256
    ),
    "proportional": ProportionalScaling(partial_rotary_factor=0.5),
}
# Types whose config fixes the length: growing rows changes nothing for them either.
FIXED_LENGTH = {
    "dynamic_by_length": DynamicScaling(factor=2.0, policy="by_length", original_max_position=256),
    "longrope": LongRopeScaling(
        short_factor=(1.0,) * 16,
        long_factor=tuple(1.0 + i for i in range(16)),
        original_max_position=128,
        factor=4.0,
        policy="static",
    ),
}


def config(rows: int = 256, width: int = 32, **fields) -> RopeConfig:
    return RopeConfig(head_dim=width, max_position=rows, **fields)


def content(built: RopeTable) -> tuple[bytes, bytes]:
    return built.cos_sin_cache.numpy().tobytes(), built.inv_freq.numpy().tobytes()


def assert_ordinary(built: RopeTable, expected: RopeTable) -> None:
    """An everyday float32 table with the expected bits."""
    for made, wanted in zip(built.buffers(), expected.buffers(), strict=True):
        assert type(made) is torch.Tensor
        assert not made.is_inference()
        assert not made.requires_grad
        assert not torch._is_functional_tensor(made)
        assert not torch._C._functorch.is_functorch_wrapped_tensor(made)
        assert (made.dtype, made.device) == (wanted.dtype, wanted.device)
        assert torch.equal(made, wanted)
    assert built.dead() is None


# ------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("phase_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*SCALINGS, *FIXED_LENGTH])
def test_rows_equal_the_oracle(name: str, phase_dtype: torch.dtype) -> None:
    """Every row, to the last bit that two float64 cosines may disagree about."""
    scaling = {**SCALINGS, **FIXED_LENGTH}[name]
    built = RopeTable(config(scaling=scaling, phase_dtype=phase_dtype), "cpu")
    wanted = oracle_table(256, built.inv_freq, built.config.attention_scaling)
    assert built.inv_freq.dtype == phase_dtype
    assert built.cos_sin_cache.dtype == torch.float32
    assert ulp_distance(built.cos_sin_cache, wanted).max() <= 1
    assert (built.cos_sin_cache != wanted).double().mean() < 1e-3


def test_first_row_is_the_identity() -> None:
    built = RopeTable(config(), "cpu")
    assert torch.equal(built.cos_sin_cache[0], torch.tensor([1.0] * 16 + [0.0] * 16))
    assert built.inv_freq[0] == 1.0


# Frequencies from 1 to 178 (a base below 1): half a step of float32 is 8e-3 at the largest phase.
STEEP = config(1024, 8, base=1e-3)


def rows_of(phase: torch.Tensor) -> torch.Tensor:
    """NumPy's float64 cos and sin of ``[rows, R/2]`` phases."""
    return torch.from_numpy(np.concatenate([np.cos(phase.numpy()), np.sin(phase.numpy())], 1))


def exact_phase(inv_freq: torch.Tensor) -> torch.Tensor:
    """float64 products: exact for float32 frequencies, 10 + 24 bits."""
    return torch.arange(1024, dtype=torch.float64)[:, None] * inv_freq.double()


def test_phase_is_the_rounded_exact_product() -> None:
    """float32 frequencies: the row is that of the product rounded to float32, and not of another.

    The twins: without the rounding, and with a product that was rounded to 16 bits first.
    """
    built = RopeTable(STEEP, "cpu")
    exact = exact_phase(built.inv_freq)
    found = built.cos_sin_cache.double()
    # Half a float32 step of a value below 1, and what float64 cosines leave open.
    assert (found - rows_of(exact.float().double())).abs().max() <= 2**-25 + 1e-12
    for twin in (exact, exact.bfloat16().double()):
        assert (found - rows_of(twin)).abs().max() > 1e-3


def test_float64_frequencies_keep_their_phase() -> None:
    """Neither the frequency nor the product is rounded; the twin rounds the product."""
    built = RopeTable(replace(STEEP, phase_dtype=torch.float64), "cpu")
    exact = exact_phase(STEEP.inv_freq(torch.float64))
    found = built.cos_sin_cache.double()
    assert (found - rows_of(exact)).abs().max() <= 2**-25 + 1e-12
    assert (found - rows_of(exact.float().double())).abs().max() > 1e-3


def test_float32_phases_are_near_the_exact_ones() -> None:
    """To 2.8e-4 up to position 4095, of 64 lanes and base 10000: frequency and phase rounded."""
    positions = torch.arange(4096, dtype=torch.float64)
    exact = rows_of(positions[:, None] * config(width=128).inv_freq(torch.float64))
    built = RopeTable(config(4096, 128), "cpu")
    assert (built.cos_sin_cache.double() - exact).abs().max() <= 2.8e-4


@pytest.mark.parametrize(
    ("asked", "rows"), [(1, 128), (128, 128), (129, 256), (300, 384), (4096, 4096)]
)
def test_rows_are_a_multiple_of_128(asked: int, rows: int) -> None:
    assert RopeTable(config(asked), "cpu").capacity == rows == round_up(asked)
    assert RopeTable(config(1), "cpu", capacity=asked).capacity == rows


@pytest.mark.parametrize(
    ("scaling", "served"),
    [
        (
            Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
            ),
            131072,
        ),
        (YarnScaling(factor=4.0, original_max_position=32768), 131072),
        (YarnScaling(factor=40.0, original_max_position=32768), 131072),
        (DeepseekYarnScaling(factor=40.0, original_max_position=4096), 131072),
    ],
)
def test_rows_follow_the_served_length_alone(scaling, served: int) -> None:
    """Neither the pretraining length nor the factor sizes a table, and rows change no frequency."""
    built = RopeTable(config(served, 32, scaling=scaling), "cpu")
    assert built.capacity == served
    assert torch.equal(built.inv_freq, config(1024, 32, scaling=scaling).inv_freq())


@pytest.mark.parametrize("width", [2, 6, 96, 256, 576])
def test_odd_widths(width: int) -> None:
    built = RopeTable(config(200, width), "cpu")
    wanted = oracle_table(256, built.inv_freq)
    assert built.cos_sin_cache.shape == (256, width)
    assert ulp_distance(built.cos_sin_cache, wanted).max() <= 1


def test_rotary_width_zero_is_an_empty_table() -> None:
    """Legitimately empty, so not dead: numel is 0."""
    built = RopeTable(config(64, rotary_dim=0), "cpu")
    assert built.cos_sin_cache.shape == (128, 0)
    assert built.inv_freq.shape == (0,)
    assert built.dead() is None
    assert built.reserve(300)
    assert built.cos_sin_cache.shape == (384, 0)


def test_meta_table_has_shapes_only() -> None:
    built = RopeTable(config(), "meta")
    assert built.cos_sin_cache.device.type == built.inv_freq.device.type == "meta"
    assert built.cos_sin_cache.shape == (256, 32)
    assert built.dead() is None
    built.rebuild_()
    assert built.reserve(500)
    assert built.capacity == 512


def test_buffers_are_named_and_in_no_checkpoint() -> None:
    built = RopeTable(config(), "cpu")
    assert [name for name, _ in built.named_buffers()] == ["cos_sin_cache", "inv_freq"]
    assert not built.state_dict()


# ----------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize("name", [*SCALINGS, *FIXED_LENGTH])
def test_growth_equals_a_fresh_build_bit_for_bit(name: str) -> None:
    scaling = {**SCALINGS, **FIXED_LENGTH}[name]
    start = 4096 if name in ("default", "llama3", "yarn") else 256
    end = 33920 if start == 4096 else 1300
    grown = RopeTable(config(start, scaling=scaling), "cpu")
    before = grown.cos_sin_cache
    frequencies = grown.inv_freq
    assert grown.reserve(end)
    fresh = RopeTable(config(start, scaling=scaling), "cpu", capacity=end)
    assert grown.capacity == fresh.capacity == round_up(end)
    assert torch.equal(grown.cos_sin_cache, fresh.cos_sin_cache)
    assert torch.equal(grown.cos_sin_cache[:start], before)
    assert grown.inv_freq is frequencies


def test_a_growth_that_rescales_would_be_found() -> None:
    """Wrong twin: frequencies that follow the row count, as growing dynamic NTK does."""
    by_rows = [
        DynamicScaling(factor=2.0, policy="by_length", original_max_position=256, length=rows)
        for rows in (256, 1300)
    ]
    small, large = (RopeTable(config(scaling=scaling), "cpu") for scaling in by_rows)
    assert not torch.equal(small.cos_sin_cache, large.cos_sin_cache)


def test_reserve_in_small_steps() -> None:
    """8, 16, 24 stay in the first 128 rows; then 256 and 384. Old rows keep their bits."""
    built = RopeTable(config(8), "cpu")
    address, rows = built.cos_sin_cache.data_ptr(), built.cos_sin_cache.clone()
    for asked in (8, 16, 24, 128):
        assert built.reserve(asked) is False
        assert (built.capacity, built.cos_sin_cache.data_ptr()) == (128, address)
    for asked, capacity in ((129, 256), (300, 384)):
        assert built.reserve(asked) is True
        assert built.capacity == capacity
        assert torch.equal(built.cos_sin_cache[:128], rows)


def test_address_is_fixed_within_the_reserve() -> None:
    built = RopeTable(config(4096), "cpu")
    assert built.reserve(33064)
    assert built.capacity == 33152
    addresses = [x.data_ptr() for x in built.buffers()]
    for asked in (0, 1, 4096, 4097, 33064, 33151, 33152):
        assert not built.reserve(asked)
        assert [x.data_ptr() for x in built.buffers()] == addresses
    assert built.reserve(33153)


@pytest.mark.parametrize("value", [-1, -128])
def test_negative_rows_are_refused(value: int) -> None:
    built = RopeTable(config(), "cpu")
    with pytest.raises(ValueError, match=f"^rows must not be negative, got {value}$"):
        built.reserve(value)


@pytest.mark.parametrize("value", [None, True, 3.0, "8"])
def test_rows_that_are_no_int_are_refused(value) -> None:
    with pytest.raises(TypeError, match=re.escape(f"rows must be an int, got {value!r}")):
        row_count("rows", value)


def test_growth_while_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = RopeTable(config(), "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert built.reserve(256) is False
    message = "must not grow to 384 rows while compiling, it has 256; call reserve()"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        built.reserve(257)
    with pytest.raises(RuntimeError, match="must not be refilled while compiling"):
        built.rebuild_()
    assert built.capacity == 256


@pytest.mark.usefixtures("fresh_compiler")
def test_growth_inside_a_compiled_function_is_refused() -> None:
    built = RopeTable(config(), "cpu")

    def grow(x, rows):
        built.reserve(rows)
        return x + built.cos_sin_cache[0, 0]

    compiled = torch.compile(grow, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1), 256) == 1
    with pytest.raises(Unsupported, match="must not grow to 384 rows while compiling"):
        compiled(torch.zeros(1), 257)
    assert built.capacity == 256


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("action", ["build", "grow", "rebuild"])
def test_no_table_is_filled_by_compiled_code(action: str) -> None:
    """After a graph break Dynamo would go on to compile the filling, cosines and all."""
    built, expected = RopeTable(config(), "cpu"), RopeTable(config(), "cpu", capacity=4096)
    traced: list[object] = []

    def backend(graph, _inputs):
        traced.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    def function(x):
        torch._dynamo.graph_break()
        if action == "build":
            return RopeTable(config(), "cpu", capacity=4096), x + 1
        if action == "grow":
            built.reserve(4096)
        else:
            built.rebuild_()
        return built, x + 1

    made, _ = torch.compile(function, backend=backend)(torch.zeros(3))
    rows = made.capacity
    assert rows == (256 if action == "rebuild" else 4096)
    assert torch.equal(made.cos_sin_cache, expected.cos_sin_cache[:rows])
    assert set(traced) <= {operator.add}  # the caller's own, where Dynamo comes back to it


def test_growth_while_capturing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = RopeTable(config(), "cpu")
    monkeypatch.setattr(table, "stream_is_capturing", lambda: True)
    assert built.reserve(256) is False
    message = "must not grow to 384 rows while the current CUDA stream captures a graph"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        built.reserve(257)
    with pytest.raises(RuntimeError, match="must not be refilled while the current CUDA stream"):
        built.rebuild_()
    with pytest.raises(RuntimeError, match="must not be built while the current CUDA stream"):
        RopeTable(config(), "cpu")
    assert built.capacity == 256
    assert built.dead() is None


def test_no_cuda_stream_captures_where_cuda_never_started() -> None:
    """The question itself must not start CUDA, nor raise on a build without it."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has started in this process")
    assert table.stream_is_capturing() is False
    assert not torch.cuda.is_initialized()


def test_frozen_tables_do_not_grow_and_freezing_nests() -> None:
    built = RopeTable(config(), "cpu")
    built.freeze()
    built.freeze()
    built.thaw()
    assert built.reserve(256) is False
    with pytest.raises(RuntimeError, match="must not grow to 384 rows inside capture_guard"):
        built.reserve(257)
    built.thaw()
    assert built.reserve(257)


def test_pinned_storage_outlives_growth() -> None:
    """A capture keeps an address only. Wrong twin: an unpinned table drops its old rows."""
    pinned, loose = RopeTable(config(), "cpu"), RopeTable(config(), "cpu")
    pinned.pin()
    old = [weakref.ref(built.cos_sin_cache) for built in (pinned, loose)]
    for built in (pinned, loose):
        built.reserve(4096)
    assert old[0]() is not None
    assert torch.equal(old[0](), pinned.cos_sin_cache[:256])
    assert old[1]() is None


def test_reader_of_the_old_table_stays_valid() -> None:
    built = RopeTable(config(), "cpu")
    reader, rows = built.cos_sin_cache, built.cos_sin_cache.clone()
    built.reserve(4096)
    assert torch.equal(reader, rows)


# --------------------------------------------------------------------------------------- rebuild


def test_rebuild_refills_at_the_same_address() -> None:
    built = RopeTable(config(scaling=SCALINGS["yarn"]), "cpu")
    bits, addresses = content(built), [x.data_ptr() for x in built.buffers()]
    built.cos_sin_cache.fill_(math.nan)
    built.inv_freq.normal_()
    # Lost contents cannot be seen from outside.
    assert built.dead() is None
    built.rebuild_()
    assert content(built) == bits
    assert [x.data_ptr() for x in built.buffers()] == addresses


def test_rebuild_refills_what_captured_graphs_read() -> None:
    """A graph goes on reading the smaller table that growth left to it, after a sleep too."""
    built = RopeTable(config(128), "cpu")
    captured = built.pin()
    built.reserve(1000)
    lost = built.pin()[0]
    built.reserve(5000)
    right = [x.clone() for x in (*captured, *built.buffers())]
    for x in (*captured, *built.buffers()):
        x.fill_(float("nan"))
    lost.untyped_storage().resize_(0)  # nothing to refill
    built.rebuild_()
    assert all(torch.equal(x, y) for x, y in zip((*captured, *built.buffers()), right, strict=True))


def test_growth_does_not_read_a_corrupted_buffer() -> None:
    built, fresh = RopeTable(config(), "cpu"), RopeTable(config(512), "cpu")
    built.cos_sin_cache.fill_(math.nan)
    built.inv_freq.fill_(math.nan)
    built.reserve(512)
    assert torch.equal(built.cos_sin_cache, fresh.cos_sin_cache)


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad])
def test_rebuild_inside_other_modes(inside) -> None:
    built, fresh = RopeTable(config(), "cpu"), RopeTable(config(), "cpu")
    built.cos_sin_cache.fill_(math.nan)
    with inside():
        built.rebuild_()
    assert_ordinary(built, fresh)


# -------------------------------------------------------------------------------------- liveness


def fake_like(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape)


def inference_like(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def put(name: str, make):
    def kill(built: RopeTable) -> None:
        built._buffers[name] = make(getattr(built, name))

    return kill


DEATHS = {
    "meta": (put("cos_sin_cache", lambda x: x.to("meta")), "cos_sin_cache is on meta instead of"),
    "meta_frequencies": (put("inv_freq", lambda x: x.to("meta")), "inv_freq is on meta instead"),
    "storage": (
        lambda built: built.cos_sin_cache.untyped_storage().resize_(0),
        "cos_sin_cache has lost its storage",
    ),
    "frequency_storage": (
        lambda built: built.inv_freq.untyped_storage().resize_(0),
        "inv_freq has lost its storage",
    ),
    "fake": (put("cos_sin_cache", fake_like), "cos_sin_cache is a FakeTensor"),
    "functional": (
        put("cos_sin_cache", torch._to_functional_tensor),
        "cos_sin_cache is a functional tensor",
    ),
    "subclass": (put("cos_sin_cache", nn.Parameter), "cos_sin_cache is a Parameter"),
    "inference": (put("cos_sin_cache", inference_like), "cos_sin_cache is an inference tensor"),
    "cast": (
        put("cos_sin_cache", torch.Tensor.half),
        "cos_sin_cache is torch.float16 instead of torch.float32",
    ),
    "cast_in_place": (
        lambda built: setattr(built.cos_sin_cache, "data", built.cos_sin_cache.bfloat16()),
        "cos_sin_cache is torch.bfloat16 instead of torch.float32",
    ),
    "cut": (
        put("cos_sin_cache", lambda x: x[:100]),
        "cos_sin_cache has shape (100, 32) instead of (256, 32)",
    ),
    "replaced": (
        put("cos_sin_cache", torch.Tensor.clone),
        "cos_sin_cache was replaced by another tensor",
    ),
    "moved_storage": (
        lambda built: setattr(built.cos_sin_cache, "data", built.cos_sin_cache.clone()),
        "cos_sin_cache was moved to another storage",
    ),
    "removed": (put("cos_sin_cache", lambda _: None), "cos_sin_cache was removed"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_every_death_is_named(death: str) -> None:
    kill, message = DEATHS[death]
    built = RopeTable(config(), "cpu")
    assert built.dead() is None
    kill(built)
    reason = built.dead()
    assert reason is not None
    assert reason.startswith(message)


@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_table_is_refused_and_reserve_revives_it(death: str) -> None:
    built, fresh = RopeTable(config(), "cpu"), RopeTable(config(), "cpu")
    DEATHS[death][0](built)
    with pytest.raises(RuntimeError, match=r"got a dead table: .*; call reserve\(256\)"):
        built.rebuild_()
    assert built.reserve(10) is True
    assert built.capacity == 256
    assert_ordinary(built, fresh)


def test_a_live_table_stays_alive_through_ordinary_use() -> None:
    built = RopeTable(config(), "cpu")
    built.reserve(1000)
    built.rebuild_()
    built.pin()
    built.eval().train()
    built.requires_grad_(False)
    assert built.dead() is None


# ------------------------------------------------------------------------- casts, moves and copies


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.type(torch.float16),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_nothing_that_changes_a_module_changes_a_table(change) -> None:
    built, fresh = RopeTable(config(), "cpu"), RopeTable(config(), "cpu")
    assert change(built) is built
    assert_ordinary(built, fresh)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, "pickle", "torch"])
def test_a_copy_is_another_table_of_equal_rows(copier) -> None:
    built = RopeTable(config(), "cpu", capacity=1000)
    if copier == "pickle":
        made = pickle.loads(pickle.dumps(built))
    elif copier == "torch":
        file = io.BytesIO()
        torch.save(built, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    else:
        made = copier(built)
    assert made.cos_sin_cache.data_ptr() != built.cos_sin_cache.data_ptr()
    assert_ordinary(made, built)
    assert made.reserve(2000)
    assert built.capacity == 1024


# ---------------------------------------------------------------------- what is active while built


class Recorder(TorchDispatchMode):
    """Sees every operator, and how many elements it works on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size = result.numel() if isinstance(result, torch.Tensor) else 0
        self.seen.append((func.overloadpacket.__name__, size))
        return result


class Meddler(torch.overrides.TorchFunctionMode):
    """Sends every tensor factory to float16."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.half() if isinstance(result, torch.Tensor) else result


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND = {
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "function_mode": Meddler,
    "dispatch_mode": Recorder,
}


@pytest.mark.parametrize("around", AROUND)
def test_surroundings_leave_no_trace(around: str) -> None:
    """Built and grown inside; equal bit for bit to one built outside."""
    fresh = RopeTable(config(scaling=SCALINGS["llama3"]), "cpu", capacity=500)
    with AROUND[around]():
        built = RopeTable(config(scaling=SCALINGS["llama3"]), "cpu")
        assert built.reserve(500)
    assert_ordinary(built, fresh)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.vmap, torch.func.functionalize, torch.func.jacfwd]
)
def test_functional_transforms_leave_no_trace(transform) -> None:
    made = []

    def body(x):
        made.append(RopeTable(config(), "cpu"))
        return x.sum()

    transform(body)(torch.ones(3, 3))
    assert_ordinary(made[0], RopeTable(config(), "cpu"))


def test_the_private_ways_out_of_a_mode_still_work() -> None:
    """Fails when torch moves one of the private functions of plain_tensors, or changes its use."""
    assert callable(table._disable_current_modes)
    assert callable(table.temporarily_clear_interpreter_stack)
    assert callable(torch._C.DisableTorchFunction)
    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        # The twin: without plain_tensors all of it sticks.
        fake = torch.empty(1, device="cpu")
        with plain_tensors():
            plain = torch.empty(1, device="cpu")
        again = torch.empty(1, device="cpu")
    assert type(fake) is not torch.Tensor
    assert type(again) is not torch.Tensor
    assert type(plain) is torch.Tensor
    assert not plain.is_inference()


def recorded(monkeypatch: pytest.MonkeyPatch, build) -> list[tuple[str, int]]:
    """Operators of a build, which would be hidden if it left the recording mode."""
    monkeypatch.setattr(table, "plain_tensors", contextlib.nullcontext)
    with Recorder() as recorder:
        build()
    return recorder.seen


def matmuls(seen: list[tuple[str, int]]) -> set[str]:
    return {name for name, _ in seen} & {"mm", "bmm", "addmm", "matmul", "dot", "mv", "einsum"}


@pytest.mark.parametrize("phase_dtype", [torch.float32, torch.float64])
def test_no_matmul_builds_a_table(monkeypatch: pytest.MonkeyPatch, phase_dtype) -> None:
    """TF32 would round positions to 11 bits."""
    seen = recorded(monkeypatch, lambda: RopeTable(config(phase_dtype=phase_dtype), "cpu"))
    assert {"polar", "mul"} <= {name for name, _ in seen}
    assert not matmuls(seen)


def test_a_matmul_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive():
        return torch.outer(torch.arange(4.0), torch.ones(3)) @ torch.ones(3, 2)

    assert matmuls(recorded(monkeypatch, naive)) == {"mm"}


def of_mkl(seen: list[tuple[str, int]]) -> set[str]:
    return {name for name, _ in seen} & {"cos", "sin", "cos_", "sin_", "exp"}


@pytest.mark.parametrize("width", [2, 128, 576])
def test_no_cosine_is_left_to_threads_of_mkl(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """A first ``torch.cos`` of a process is not always right; see NOTE [One cosine]."""
    assert not of_mkl(recorded(monkeypatch, lambda: RopeTable(config(1024, width), "cpu")))
    assert of_mkl(recorded(monkeypatch, lambda: torch.ones(3).cos())) == {"cos"}  # the twin


@pytest.mark.parametrize("elements", [1, 100, 2**30])
def test_neither_blocks_nor_threads_change_a_bit(monkeypatch: pytest.MonkeyPatch, elements) -> None:
    expected = content(RopeTable(config(1024), "cpu"))
    monkeypatch.setattr(table, "_BLOCK_ELEMENTS", elements)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert content(RopeTable(config(1024), "cpu")) == expected
    finally:
        torch.set_num_threads(threads)


FIRST_TABLE = """
import math, torch
from rope_compile import RopeConfig
from rope_compile.table import RopeTable

torch.set_num_threads(2)
built = RopeTable(RopeConfig(head_dim=64, max_position=8192), "cpu")
for row in range(0, 8192, 61):
    for lane in range(0, 32, 5):
        phase = float((torch.tensor(float(row), dtype=torch.float64)
                       * built.inv_freq[lane].double()).float())
        cos, sin = built.cos_sin_cache[row, lane].item(), built.cos_sin_cache[row, lane + 32].item()
        assert abs(cos - math.cos(phase)) < 6e-8, (row, lane, cos, math.cos(phase))
        assert abs(sin - math.sin(phase)) < 6e-8, (row, lane, sin, math.sin(phase))
"""


def test_first_table_of_a_process_is_accurate() -> None:
    """In ten fresh multi-threaded processes: a first parallel cosine can be wrong by 1.5e-4."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(run_child, "-c", FIRST_TABLE, OMP_NUM_THREADS="2") for _ in range(10)]
    for run in runs:
        run.result()


# ---------------------------------------------------------------------------------------- devices


def test_canonical_device() -> None:
    assert canonical_device(None) == canonical_device("cpu") == torch.device("cpu")
    assert canonical_device("cpu:0") == torch.device("cpu")
    assert canonical_device("cuda:1") == torch.device("cuda", 1)
    with torch.device("meta"):
        assert canonical_device(None) == torch.device("meta")
        assert canonical_device("cpu") == torch.device("cpu")
        assert RopeTable(config()).device == torch.device("meta")
        assert RopeTable(config(), "cpu").device == torch.device("cpu")


def test_repr_says_what_it_is() -> None:
    built = RopeTable(config(), "cpu")
    assert repr(built) == "RopeTable(256 rows, rotary_dim=32, base=10000, device=cpu)"
