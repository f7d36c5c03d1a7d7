"""Errors as a product: every wrong argument of the public surface gets one clear sentence.

One list of cases (callable, argument, exception, sentence). Of each the error must be raised by a
``raise`` of this package, in one line, and must leave nothing behind: no registry entry, no changed
table, no held lock, no switch turned. Two tests keep the list complete: every parameter of every
public callable has a case, and every ``raise`` of the package is reached by one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest
import torch

import rope_compile as rc
from rope_compile import table as table_module
from rope_compile.factory import registry
from rope_compile.functional import _Debug

PACKAGE = Path(rc.__file__).parent
KINDS = (TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError)
NAN, INFINITY, HUGE = float("nan"), float("inf"), 2**62
CONFIG = rc.RopeConfig(head_dim=8, max_position=128)


# ---------------------------------------------------------------------------------- what is called


@dataclass(frozen=True, eq=False)
class Case:
    """One call with one wrong argument. Lambdas among the values are called, just before."""

    target: str
    parameter: str
    value: object
    error: type[Exception]
    sentence: str  # as it stands; <> is anything
    others: dict[str, object] = field(default_factory=dict)
    subject: Callable[[], object] | None = None  # whose method; the shared rope's otherwise
    within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def pattern(self) -> str:
        # From the beginning of a word: max_position is not model_max_position.
        return r"(?<!\w)" + ".*".join(map(re.escape, self.sentence.split("<>")))


CASES: list[Case] = []


def bad(target, parameter, value, error, sentence, *, subject=None, within=contextlib.nullcontext,
        **others):  # fmt: skip
    CASES.append(Case(target, parameter, value, error, sentence, others, subject, within))


def plain_model(**changes: object) -> dict[str, object]:
    known = {"model_type": "llama", "head_dim": 8, "max_position_embeddings": 128}
    return known | {"rope_theta": 1e4} | changes


def tensors() -> dict[str, object]:
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    return {"q": q, "k": k, "positions": torch.arange(3), "cos_sin_cache": torch.randn(16, 8)}


def operator_arguments() -> dict[str, object]:
    rest = {"inv_freq": torch.ones(4), "axes": [], "style": "half", "rotary_offset": 0}
    return {**tensors(), **rest, "attention_scaling": 1.0, "inverse": False}


def of_call() -> dict[str, object]:
    return {name: x for name, x in tensors().items() if name != "cos_sin_cache"}


LONG = {
    "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_max_position": 64,
    "policy": "static", "factor": 2.0,
}  # fmt: skip
YARN = {"factor": 2.0, "original_max_position": 64}
PEER = {"head_size": 8, "rotary_dim": 8, "max_position": 128, "base": 1e4}
PACKED = {"cu_seqlens": torch.tensor([0, 4, 8]), "total": 8}

# Target -> arguments that are right; a case replaces one of them.
GOOD: dict[str, Callable[[], dict[str, object]]] = {
    "__getattr__": lambda: {"name": "inductor"},
    "AxialAxes": lambda: {"dims": (4, 4)},
    "BailingAxes": lambda: {"sections": (2, 1, 1)},
    "ChunkedAxes": lambda: {"sections": (2, 1, 1)},
    "ErnieAxes": lambda: {"sections": (1, 1, 2)},
    "GlmAxes": lambda: {"sections": (2, 1, 1)},
    "InterleavedAxes": lambda: {"sections": (2, 1, 1)},
    "PanguAxes": lambda: {"sections": (2, 1, 1)},
    "XdropeAxes": lambda: {"sections": (1, 1, 1, 1)},
    "CapturePlan": lambda: {"max_position": 100},
    "CapturePlan.for_models": lambda: {"target": 100},
    "DefaultScaling": dict,
    "DeepseekYarnScaling": lambda: dict(YARN),
    "DynamicScaling": lambda: YARN | {"policy": "by_length"},
    "LinearScaling": lambda: {"factor": 2.0},
    "Llama3Scaling": lambda: YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "LongRopeScaling": lambda: dict(LONG),
    "NtkAlphaScaling": lambda: {"alpha": 2.0},
    "NtkScaling": lambda: {"factor": 2.0},
    "ProportionalScaling": dict,
    "YarnScaling": lambda: dict(YARN),
    "RopeConfig": lambda: {"head_dim": 8, "max_position": 128},
    "RopeConfig.from_dict": lambda: {
        "rope": None, "head_dim": 8, "max_position": 128, "base": 1e4,
    },
    "RopeConfig.from_transformers": lambda: {"hf_config": plain_model()},
    "RopeConfig.inv_freq": dict,
    "RopeConfig.with_length": lambda: {"length": 5},
    "RopeSelector": lambda: {"ropes": [rc.get_rope(CONFIG)]},
    "RopeSelector.forward": lambda: of_call() | {"selector": torch.zeros(1, dtype=torch.int64)},
    "RopeSelector.apply_": lambda: of_call() | {"selector": torch.zeros(1, dtype=torch.int64)},
    "RopeSelector.reserve": lambda: {"rows": 5},
    "RotaryEmbedding": lambda: {"config": CONFIG},
    "RotaryEmbedding.forward": of_call,
    "RotaryEmbedding.apply_": of_call,
    "RotaryEmbedding.reserve": lambda: {"rows": 5},
    "RotaryEmbedding.rebuild_": dict,
    "apply_rope": tensors,
    "apply_rope_": tensors,
    "rope": operator_arguments,
    "rope_": operator_arguments,
    "capture_guard": lambda: {"model": rc.get_rope(CONFIG)},
    "prepare_for_capture": lambda: {
        "model": rc.get_rope(CONFIG), "plan": rc.CapturePlan(max_position=10, margin=0),
    },
    "context_parallel_positions": lambda: {"length": 8, "rank": 0, "ranks": 2},
    "packed_context_parallel_positions": lambda: {**PACKED, "rank": 0, "ranks": 2},
    "positions_from_cu_seqlens": lambda: dict(PACKED),
    "debug": lambda: {"enabled": False},
    "get_rope": lambda: {"config": CONFIG},
    "inductor.enable": dict,
    "aiter.get_rope": lambda: dict(PEER),
    "sglang.get_rope": lambda: dict(PEER),
    "vllm.get_rope": lambda: {"head_size": 8, "max_position": 128},
    "vllm.get_rope_v0": lambda: dict(PEER),
}  # fmt: skip

# Public, and without an argument that a caller could get wrong.
NOT_CALLED = {
    "inductor.Record": "what report() returns; nobody builds one",
    "inductor.disable": "takes nothing",
    "inductor.report": "takes nothing",
    "RotaryEmbedding.table_on": "a device is looked up by equality; one without a table gives None",
    "RotaryEmbedding.extra_repr": "takes nothing",
}

# (target, parameter) for which every value is right, or which torch itself refuses.
FREE = {
    ("RopeConfig.from_dict", "name"): "only what errors call the dictionary",
    ("rope", "attention_scaling"): "any float is a magnitude; the schema admits no other type",
    ("rope_", "attention_scaling"): "any float is a magnitude; the schema admits no other type",
    ("rope", "inverse"): "both are right; the schema admits no other type",
    ("rope_", "inverse"): "both are right; the schema admits no other type",
}


def resolve(target: str) -> object:
    if target in ("rope", "rope_"):
        return getattr(torch.ops.rope_compile, target).default
    owner, _, name = target.rpartition(".")
    if owner in rc.integrations.__all__:
        return getattr(importlib.import_module(f"rope_compile.integrations.{owner}"), name)
    return functools.reduce(getattr, target.split("."), rc)


def bound(case: Case) -> Callable[..., object]:
    """What the case calls."""
    owner, _, name = case.target.rpartition(".")
    if case.subject is not None:
        return getattr(case.subject(), name)
    if owner == "RotaryEmbedding":
        return getattr(rc.get_rope(CONFIG), name)
    if owner == "RopeSelector":
        return getattr(rc.RopeSelector([rc.get_rope(CONFIG)]), name)
    if case.target == "RopeConfig.inv_freq":
        return CONFIG.inv_freq
    if case.target == "RopeConfig.with_length":
        return by_length().with_length
    if case.target == "capture_guard":
        return enter_guard
    return resolve(case.target)


def enter_guard(model: object) -> None:
    with rc.capture_guard(model):
        pass


def parameters(target: str) -> list[str]:
    """Names of a target's parameters, without ``self``."""
    found = resolve(target)
    if isinstance(found, torch._ops.OpOverload):
        return [argument.name for argument in found._schema.arguments]
    return [name for name in inspect.signature(found).parameters if name != "self"]


def evaluated(value: object) -> object:
    return value() if isinstance(value, FunctionType | functools.partial) else value


# ------------------------------------------------------------------------------------ shared parts


def config(**changes: object) -> rc.RopeConfig:
    return rc.RopeConfig(**({"head_dim": 8, "max_position": 128} | changes))


def by_length() -> rc.RopeConfig:
    return config(scaling=rc.LongRopeScaling(**LONG | {"policy": "by_length"}))


def dynamic() -> rc.RopeConfig:
    return config(
        scaling=rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    )


def dead_rope() -> rc.RotaryEmbedding:
    rope = rc.RotaryEmbedding(CONFIG)
    rope.cos_sin_cache.untyped_storage().resize_(0)
    return rope


def meta_rope() -> rc.RotaryEmbedding:
    return rc.RotaryEmbedding(CONFIG, "meta")


def compiling():
    return mock.patch("torch.compiler.is_compiling", return_value=True)


def capturing():
    return mock.patch.object(table_module, "stream_is_capturing", return_value=True)


def frozen_rope() -> rc.RotaryEmbedding:
    rope = rc.RotaryEmbedding(CONFIG)
    rope.table.freeze()  # what capture_guard does
    return rope


def freed(*shape: int) -> torch.Tensor:
    x = torch.zeros(shape)
    x.untyped_storage().resize_(0)
    return x


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # a prototype, says torch
        return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(1, 8)], layout=layout)


@functools.cache
def mesh(*shape: int):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    importlib.import_module("rope_compile.distributed")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", shape)


def spread(x: torch.Tensor, *dims: int | None):
    """A DTensor on a mesh of one rank: the rules look at placements, not at sizes."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(x, mesh(*[1] * len(dims)), placements)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    yield
    if mesh.cache_info().currsize:
        mesh.cache_clear()
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """A switch that a wrong value turned is turned back."""
    before = _Debug.enabled
    yield
    _Debug.enabled = before


# ----------------------------------------------------------------------------- numbers, by the rule

NOT_A_NUMBER = (
    ("x", ValueError, "must be a number, got 'x'"),
    (True, TypeError, "must be a number, got True"),
    ([2.0], TypeError, "must be a number, got [2.0]"),
    (1j, TypeError, "must be a number, got 1j"),
    (NAN, ValueError, "must be finite, got nan"),
    (-INFINITY, ValueError, "must be finite, got -inf"),
)
NOT_POSITIVE = ((0, ValueError, "must be positive, got 0"),
                (-0.5, ValueError, "must be positive, got -0.5"))  # fmt: skip
NEGATIVE = ((-0.5, ValueError, "must not be negative, got -0.5"),)
NOT_A_COUNT = (
    (0, ValueError, "must be a positive integer, got 0"),
    (-3, ValueError, "must be a positive integer, got -3"),
    (1.5, ValueError, "must be an integer, got 1.5"),
)
NONE = ((None, TypeError, "must be a number, got None"),)
NOT_A_FLAG = tuple((v, TypeError, f"must be True or False, got {v!r}") for v in (1, "no", None))


def numbers(target: str, names: str, *rules, prefix: str | None = None, **others: object) -> None:
    for name in names.split():
        called = f"{target}.{name}" if prefix is None else prefix + name
        for value, error, sentence in (case for rule in rules for case in rule):
            bad(target, name, value, error, f"{called} {sentence}", **others)


POSITIVE = (NOT_A_NUMBER, NOT_POSITIVE, NONE)
COUNT = (NOT_A_NUMBER, NOT_A_COUNT, NONE)
numbers("LinearScaling", "factor", *POSITIVE)
numbers("NtkScaling", "factor", *POSITIVE)
numbers("NtkScaling", "mixed_b", NOT_A_NUMBER, NOT_POSITIVE)
numbers("NtkAlphaScaling", "alpha", *POSITIVE)
numbers("DynamicScaling", "factor", *POSITIVE)
bad("DynamicScaling", "factor", 2e6, ValueError, "DynamicScaling.factor must be at most 1e+06, got")
numbers("DynamicScaling", "original_max_position length", NOT_A_NUMBER, NOT_A_COUNT)
numbers("DynamicScaling", "max_trained_position", NOT_A_NUMBER, NOT_A_COUNT, policy="static_max")
for _yarn in ("YarnScaling", "DeepseekYarnScaling"):
    numbers(_yarn, "factor beta_fast beta_slow attn_factor", *POSITIVE)
    numbers(_yarn, "original_max_position", *COUNT)
    numbers(_yarn, "attention_factor", NOT_A_NUMBER, NOT_POSITIVE)
    numbers(_yarn, "extrapolation_factor", NOT_A_NUMBER, NEGATIVE, NONE)
    bad(_yarn, "extrapolation_factor", 1001, ValueError,
        f"{_yarn}.extrapolation_factor must be at most 1000, got 1001; the formula")  # fmt: skip
    numbers(_yarn, "mscale mscale_all_dim", NOT_A_NUMBER, NEGATIVE)
numbers("DeepseekYarnScaling", "mscale mscale_all_dim", NONE)
numbers("DeepseekYarnScaling", "softmax_scale", NOT_A_FLAG)
numbers("YarnScaling", "truncate", NOT_A_FLAG)
numbers("Llama3Scaling", "factor low_freq_factor high_freq_factor", *POSITIVE)
numbers("Llama3Scaling", "original_max_position", *COUNT)
numbers("LongRopeScaling", "original_max_position", *COUNT)
numbers("LongRopeScaling", "factor attention_factor short_mscale long_mscale",
        NOT_A_NUMBER, NOT_POSITIVE)  # fmt: skip
numbers("LongRopeScaling", "length", NOT_A_NUMBER, NOT_A_COUNT, policy="by_length")
numbers("ProportionalScaling", "partial_rotary_factor", NOT_A_NUMBER, NEGATIVE, NONE)
numbers("ProportionalScaling", "factor", *POSITIVE)
numbers("RopeConfig", "head_dim max_position", *COUNT, prefix="")
numbers("RopeConfig", "base", *POSITIVE, prefix="")
numbers("RopeConfig", "rotary_dim", NOT_A_NUMBER, NOT_A_COUNT[2:], prefix="")
numbers("RopeConfig", "rotary_offset", NOT_A_NUMBER, NOT_A_COUNT[2:], NONE, prefix="")
numbers("RopeConfig.from_dict", "head_dim max_position", *COUNT, prefix="")
numbers("RopeConfig.from_dict", "rotary_dim rotary_offset", NOT_A_NUMBER, prefix="")
numbers("RopeConfig.from_dict", "model_max_position", NOT_A_NUMBER, NOT_A_COUNT, prefix="")
numbers("RopeConfig.from_dict", "partial_rotary_factor", NOT_A_NUMBER, NOT_POSITIVE, prefix="")
for _value, _error, _sentence in (*NOT_A_NUMBER, *NOT_POSITIVE):
    bad("RopeConfig.from_dict", "base", _value, _error, f"base (rope_theta) {_sentence}")
numbers("RopeConfig.from_transformers", "max_position", NOT_A_NUMBER, NOT_A_COUNT, prefix="")
for _value, _error, _sentence in (*NOT_A_NUMBER, *NOT_A_COUNT):
    bad("RopeConfig.with_length", "length", _value, _error, f"LongRopeScaling.length {_sentence}")


def ints(target: str, names: str, *, zero: bool, none: bool = True, **others: object) -> None:
    """Arguments that must be an int, without any conversion."""
    for name in names.split():
        for value in ("x", True, 1.5, NAN, [1], torch.tensor(1), *((None,) if none else ())):
            got = "a tensor of shape () on cpu" if isinstance(value, torch.Tensor) else repr(value)
            bad(target, name, value, TypeError, f"{name} must be an int, got {got}", **others)
        bad(target, name, -1, ValueError, f"{name} must not be negative, got -1", **others)
        if not zero:
            bad(target, name, 0, ValueError, f"{name} must be at least 1, got 0", **others)


ints("CapturePlan", "max_position align", zero=False)
ints("CapturePlan", "draft_max_position speculative_steps draft_tokens margin", zero=True)
ints("CapturePlan.for_models", "align", zero=False)
ints("CapturePlan.for_models", "speculative_steps draft_tokens margin", zero=True)
ints("RotaryEmbedding", "capacity", zero=True)
ints("RotaryEmbedding.reserve", "rows", zero=True)
ints("RopeSelector.reserve", "rows", zero=True)

# -------------------------------------------------------------------------------------------- axes

for _axes, _count in {
    "BailingAxes": "3", "ChunkedAxes": "2 or 3 or 4", "ErnieAxes": "3", "GlmAxes": "3",
    "InterleavedAxes": "3", "PanguAxes": "2 or 3", "XdropeAxes": "4",
}.items():  # fmt: skip
    _name = f"{_axes}.sections must be a non-empty list of integers, got "
    for _wrong in ("x", None, 4, True, [], {}, [1.5, 2, 1], ["x"], [True, 2, 1], [[2, 1, 1]]):
        bad(_axes, "sections", _wrong, TypeError, f"{_name}{_wrong!r}")
    bad(_axes, "sections", (2, -1, 1), ValueError,
        f"{_axes}.sections must not be negative nor all zero, got (2, -1, 1)")  # fmt: skip
    bad(_axes, "sections", (0, 0, 0), ValueError, "must not be negative nor all zero")
    bad(_axes, "sections", (1,) * 5, ValueError,
        f"{_axes} must have {_count} sections, got (1, 1, 1, 1, 1)")  # fmt: skip
    bad(_axes, "sections", (NAN, 2, 1), TypeError, f"{_name}(nan, 2, 1)")
    bad(_axes, "sections", (INFINITY, 2, 1), TypeError, f"{_name}(inf, 2, 1)")
    bad(_axes, "sections", lambda: torch.ones(3, device="meta"), TypeError,
        f"{_name}a tensor of shape (3,) on meta")  # fmt: skip
bad("XdropeAxes", "full_width", "no", TypeError,
    "XdropeAxes.full_width must be True or False, got 'no'")  # fmt: skip
for _wrong in ("x", None, 8, [], [3.5, 4], ["x"]):
    bad("AxialAxes", "dims", _wrong, TypeError,
        f"AxialAxes.dims must be a non-empty list of integers, got {_wrong!r}")  # fmt: skip
bad("AxialAxes", "dims", (3, 5), ValueError, "AxialAxes.dims must be even, got (3, 5)")
bad("AxialAxes", "dims", (4, -4), ValueError, "AxialAxes.dims must not be negative nor all zero")
bad("AxialAxes", "dims", (4, NAN), TypeError,
    "AxialAxes.dims must be a non-empty list of integers, got (4, nan)")  # fmt: skip
for _wrong in ((0, 2), (0,), (0, 0), ()):
    bad("AxialAxes", "axis_order", _wrong, ValueError,
        f"AxialAxes.axis_order must name each of the 2 axes once, got {tuple(_wrong)}")  # fmt: skip
for _wrong in (3, NAN, True, "x", [True, 3], (0, "x"), (0, None), lambda: torch.tensor(1)):
    bad("AxialAxes", "axis_order", _wrong, TypeError,
        "AxialAxes.axis_order must be a list of integers or None, got <>")  # fmt: skip
for _wrong in ("random", None, 1, []):
    bad("AxialAxes", "order", _wrong, ValueError,
        f"AxialAxes.order must be one of ['blocks', 'alternating'], got {_wrong!r}")  # fmt: skip
    bad("AxialAxes", "frequencies", _wrong, ValueError,
        f"AxialAxes.frequencies must be one of ['own', 'global'], got {_wrong!r}")  # fmt: skip
bad("AxialAxes", "dims", (2, 6), ValueError,
    "AxialAxes.dims must be equal for 'alternating' order and 'own' frequencies, got (2, 6)",
    order="alternating")  # fmt: skip
bad(
    "RopeConfig",
    "axes",
    rc.ChunkedAxes((2, 2, 1)),
    ValueError,
    "ChunkedAxes must share out rotary_dim / 2 = 4 lanes, got (2, 2, 1), which sum to 5",
)
bad(
    "RopeConfig",
    "axes",
    rc.InterleavedAxes((1, 1, 2)),
    ValueError,
    "InterleavedAxes must place (1, 1, 2) lanes, got (2, 1, 1): this map cannot realise its",
)
bad("RopeConfig", "style", "half_blocks", ValueError,
    "style 'half_blocks' must be used with AxialAxes in blocks and axis order, got ChunkedAxes(",
    axes=rc.ChunkedAxes((2, 1, 1)))  # fmt: skip
bad("RopeConfig", "style", "interleaved", ValueError,
    "style must be 'half' for XdropeAxes in full width, got 'interleaved'",
    axes=rc.XdropeAxes((1, 1, 1, 1)))  # fmt: skip

_CU = "positions_from_cu_seqlens", "packed_context_parallel_positions"
for _target in _CU:
    bad(_target, "cu_seqlens", torch.tensor([0.0, 8.0]), TypeError,
        "cu_seqlens must be int32 or int64, got torch.float32")  # fmt: skip
    bad(_target, "cu_seqlens", torch.tensor([True, False]), TypeError, "got torch.bool")
    for _shape in ((1, 2), (1,), ()):
        bad(
            _target,
            "cu_seqlens",
            torch.zeros(_shape, dtype=torch.int64),
            ValueError,
            f"cu_seqlens must be [sequences + 1] with a sequence or more, got {_shape}",
        )
    for _wrong in (None, [0, 8], 8):
        bad(
            _target,
            "cu_seqlens",
            _wrong,
            TypeError,
            f"cu_seqlens must be an int32 or int64 tensor, got {type(_wrong).__name__}",
        )
    for _wrong in (None, "x", [8], 8.5, True):
        bad(_target, "total", _wrong, TypeError, f"total must be an int, got {_wrong!r}")
    bad(_target, "total", -8, ValueError, "total must not be negative, got -8")
    for _wrong in ([4, 8], [-4, 8], [0, 8, 4], [0, 8, 4, 8], [0, -4]):
        bad(_target, "cu_seqlens", torch.tensor(_wrong), ValueError,
            f"cu_seqlens must start at 0 and never decrease, got {_wrong}")  # fmt: skip
    bad(_target, "cu_seqlens", torch.arange(300).flip(0), ValueError, "never decrease, got a list")
bad("positions_from_cu_seqlens", "total", 7, ValueError,
    "total must be at least cu_seqlens[-1] = 8, got 7; it counts the tokens of every")  # fmt: skip
for _wrong in (4, 12):
    bad("packed_context_parallel_positions", "total", _wrong, ValueError,
        f"total must be cu_seqlens[-1] = 8, got {_wrong}; padding must be a sequ")  # fmt: skip
bad("packed_context_parallel_positions", "total", 6, ValueError,
    "total must be divisible by 2 * ranks = 4, got 6; pad the sequences")  # fmt: skip
bad("packed_context_parallel_positions", "cu_seqlens", torch.tensor([0, 2, 8]), ValueError,
    "every sequence length must be divisible by 2 * ranks = 4, got [2, 6]")  # fmt: skip
bad("positions_from_cu_seqlens", "starts", torch.zeros(3).int(), ValueError,
    "starts must have one entry a sequence, (2,), got (3,)")  # fmt: skip
bad("positions_from_cu_seqlens", "starts", torch.tensor(1), ValueError, "starts must have one")
bad("positions_from_cu_seqlens", "starts", [0, 1], TypeError,
    "starts must be an int32 or int64 tensor or None, got list")  # fmt: skip
bad("positions_from_cu_seqlens", "starts", torch.tensor([0.5, 1.0]), TypeError,
    "starts must be int32 or int64, got torch.float32")  # fmt: skip
bad("positions_from_cu_seqlens", "starts", lambda: torch.ones(2, device="meta").int(), ValueError,
    "starts must be on the device of cu_seqlens, cpu, got meta")  # fmt: skip
for _target in ("context_parallel_positions", "packed_context_parallel_positions"):
    for _rank, _ranks in ((2, 2), (-1, 2)):
        bad(_target, "rank", _rank, ValueError,
            f"rank must be in 0..ranks - 1, got rank {_rank} of {_ranks} ranks")  # fmt: skip
    for _ranks in (0, -2):
        bad(_target, "ranks", _ranks, ValueError, f"got rank 0 of {_ranks} ranks")
    for _name in ("rank", "ranks"):
        for _wrong in ("x", None, 1.5, [1], True):
            bad(_target, _name, _wrong, TypeError, f"{_name} must be an int, got {_wrong!r}")
bad("context_parallel_positions", "length", 10, ValueError,
    "length must be divisible by 2 * ranks = 4, got 10; pad the sequence")  # fmt: skip
for _wrong in ("x", None, [8], 8.0, True):
    bad("context_parallel_positions", "length", _wrong, TypeError,
        f"length must be an int, got {_wrong!r}")  # fmt: skip
bad("context_parallel_positions", "length", -8, ValueError, "length must not be negative, got -8")
_DEVICE = "device must be a torch.device that this machine has, its name or number, or None, got "
for _target in ("context_parallel_positions", "get_rope", "RotaryEmbedding"):
    for _wrong in (1.5, [], True):
        bad(_target, "device", _wrong, TypeError, f"{_DEVICE}{_wrong!r}")
    for _wrong in ("nodevice", "", "cuda:-1", -1, HUGE):
        bad(_target, "device", _wrong, ValueError, f"{_DEVICE}{_wrong!r}")
    for _wrong in ("cuda:99", torch.device("xpu", 99), "vulkan"):
        bad(_target, "device", _wrong, ValueError, f"{_DEVICE}'{_wrong}")

# ----------------------------------------------------------------------------------------- scaling

for _target in ("YarnScaling", "DeepseekYarnScaling"):
    bad(_target, "attn_factor", 1.2, ValueError,
        "attention_factor and attn_factor must not both be given, got 1.0 and 1.2",
        attention_factor=1.0)  # fmt: skip
    bad(_target, "beta_fast", 1, ValueError,
        "beta_fast must be at least beta_slow, got 1.0 and 2.0", beta_slow=2)  # fmt: skip
bad("DeepseekYarnScaling", "attention_factor", 1.5, ValueError,
    "DeepseekYarnScaling.attention_factor must be 1.0 or None, got 1.5")  # fmt: skip
bad("Llama3Scaling", "high_freq_factor", 0.5, ValueError,
    "high_freq_factor must be at least low_freq_factor, got 0.5 and 1.0")  # fmt: skip
for _wrong in ("sometimes", None, 1, []):
    bad(
        "DynamicScaling",
        "policy",
        _wrong,
        ValueError,
        f"policy must be one of ['by_length', 'static_factor', 'static_max'], got {_wrong!r}",
    )
    bad(
        "LongRopeScaling",
        "policy",
        _wrong,
        ValueError,
        f"LongRopeScaling.policy must be one of ['static', 'by_length'], got {_wrong!r}",
    )
bad(
    "LongRopeScaling",
    "policy",
    "per_sequence",
    ValueError,
    "policy must be 'static' or 'by_length', got 'per_sequence'; for a choice by sequence give",
)
bad("LongRopeScaling", "length", 5, ValueError,
    "length must be None for policy 'static', got 5; it belongs to 'by_length'")  # fmt: skip
bad("DynamicScaling", "length", 5, ValueError,
    "length must be None for policy 'static_factor', got 5", policy="static_factor")  # fmt: skip
bad(
    "LongRopeScaling",
    "factor",
    None,
    ValueError,
    "LongRopeScaling must have factor <>, attention_factor, or both <>, got none of them",
)
for _name in ("short_factor", "long_factor"):
    for _wrong in (3.0, "abcd", None, {}):
        bad("LongRopeScaling", _name, _wrong, TypeError,
            f"LongRopeScaling.{_name} must be a list of numbers, got {_wrong!r}")  # fmt: skip
    bad("LongRopeScaling", _name, [1, 2, 0, 4], ValueError, f"{_name}[2] must be positive, got 0")
    bad("LongRopeScaling", _name, [1, None], TypeError, f"{_name}[1] must be a number, got None")
    bad("LongRopeScaling", _name, [NAN], ValueError, f"{_name}[0] must be finite, got nan")
    bad("LongRopeScaling", _name, lambda: torch.ones(4, device="meta"), TypeError,
        f"LongRopeScaling.{_name} must be a list of numbers, got a tensor of shape (4,) on meta"
        )  # fmt: skip
bad("DynamicScaling", "original_max_position", None, ValueError,
    "original_max_position must be given for policy 'by_length', got None")  # fmt: skip
bad(
    "DynamicScaling",
    "max_trained_position",
    5,
    ValueError,
    "max_trained_position must be None for policy 'by_length', got 5; it belongs to 'static_max'",
)
bad("DynamicScaling", "max_trained_position", 128, ValueError,
    "max_trained_position must be less than original_max_position * factor / (factor - 1) = 128, "
    "got 128", policy="static_max")  # fmt: skip
bad("ProportionalScaling", "partial_rotary_factor", 1.5, ValueError,
    "partial_rotary_factor must be at most 1, got 1.5")  # fmt: skip
for _shape, _device in (((2, 2), "cpu"), ((), "meta")):
    bad("LinearScaling", "factor", torch.ones(_shape, device=_device), TypeError,
        f"LinearScaling.factor must be a number, got a tensor of shape {_shape} on {_device}"
        )  # fmt: skip
for _value in (2**2000, 10**5000):
    bad("LinearScaling", "factor", _value, ValueError,
        f"LinearScaling.factor must be a number, got an int of {_value.bit_length()} bits"
        )  # fmt: skip

# ------------------------------------------------------------------------------------------ config

bad("RopeConfig", "scaling", lambda: rc.DynamicScaling(factor=2, policy="static_factor"),
    ValueError, "rotary_dim must be at least 4 for DynamicScaling, got 2",
    rotary_dim=2)  # fmt: skip
bad("RopeConfig", "scaling", rc.NtkAlphaScaling(alpha=2), ValueError,
    "rotary_dim must be at least 4 for NtkAlphaScaling, got 2: its exponent",
    rotary_dim=2)  # fmt: skip
bad("RopeConfig", "base", 1e31, ValueError,
    "base must be 0 or of a size between 1e-30 and 1e30, got 1e+31")  # fmt: skip
bad("RopeConfig", "rotary_offset", 2**70, ValueError,
    "rotary_offset must fit in 64 bits, got 71 bits")  # fmt: skip
bad("RopeConfig", "scaling", rc.NtkAlphaScaling(alpha=1e29), ValueError,
    "base must stay within float32 when NtkAlphaScaling(alpha=1e+29) stretches it, got ",
    base=1e9)  # fmt: skip
bad("RopeConfig", "axes", rc.ChunkedAxes((2, 2, 0)), ValueError,
    "ChunkedAxes must give its last axis a lane, got (2, 2, 0): a call could not")  # fmt: skip
bad("LongRopeScaling", "original_max_position", 1, ValueError,
    "LongRopeScaling.original_max_position must be at least 2 where the magnitude")  # fmt: skip
bad("RopeConfig", "base", 1.0, ValueError, "base must be above 1 for YarnScaling, got 1.0",
    scaling=rc.YarnScaling(**YARN))  # fmt: skip
bad("RopeConfig", "scaling", rc.ProportionalScaling(), ValueError,
    "rotary_dim must equal head_dim (8) for ProportionalScaling, got 4", rotary_dim=4)  # fmt: skip
bad("RopeConfig", "scaling", lambda: rc.LongRopeScaling(**LONG | {"short_factor": (1.0,)}),
    ValueError, "short_factor must have rotary_dim / 2 = 4 entries, got 1")  # fmt: skip
bad("RopeConfig", "scaling", rc.NtkScaling(factor=2), ValueError,
    "scaling must be DefaultScaling or LinearScaling with AxialAxes, got NtkScaling: the other",
    axes=rc.AxialAxes((4, 4)))  # fmt: skip
for _wrong in (None, "linear", {"factor": 2}, rc.LinearScaling):
    bad("RopeConfig", "scaling", (lambda x: lambda: x)(_wrong), TypeError,
        f"scaling must be a Scaling such as DefaultScaling(), got {_wrong!r}")  # fmt: skip
for _target in ("RopeConfig", "RopeConfig.from_dict"):
    for _name, _most in (("head_dim", 2**20), ("max_position", 2**40)):
        for _wrong in (_most + 1, HUGE):
            bad(_target, _name, _wrong, ValueError,
                f"{_name} must be at most {_most}, got {_wrong}")  # fmt: skip
    for _wrong in (3, -2, 10):
        bad(_target, "rotary_dim", _wrong, ValueError,
            f"rotary_dim must be even and between 0 and head_dim (8), got {_wrong}")  # fmt: skip
    for _wrong in (1, -1, HUGE):
        bad(
            _target,
            "rotary_offset",
            _wrong,
            ValueError,
            f"rotary_offset must be between 0 and head_dim - rotary_dim (0), got {_wrong}",
        )
    for _wrong in ("neox", None, 1, []):
        bad(_target, "style", _wrong, ValueError,
            f"style must be one of ['half', 'interleaved', <>], got {_wrong!r}")  # fmt: skip
    bad(_target, "style", "half_blocks", ValueError,
        "style 'half_blocks' must be used with AxialAxes, got axes=None")  # fmt: skip
    for _wrong in ((2, 1, 1), "chunked", 3):
        bad(
            _target,
            "axes",
            _wrong,
            TypeError,
            f"axes must be an Axes such as ChunkedAxes((16, 24, 24)) or None, got {_wrong!r}",
        )
    for _wrong in (torch.bfloat16, "float32", None, 32):
        bad(_target, "phase_dtype", _wrong, TypeError,
            f"phase_dtype must be torch.float32 or torch.float64, got {_wrong}")  # fmt: skip
for _wrong in (torch.float16, None, "float32", 64):
    bad("RopeConfig.inv_freq", "dtype", _wrong, TypeError,
        f"dtype must be torch.float32 or torch.float64, got {_wrong}")  # fmt: skip
for _subject in (dynamic, lambda: CONFIG):  # also where no formula reads it
    numbers("RopeConfig.inv_freq", "length", NOT_A_NUMBER, NOT_A_COUNT, prefix="",
            subject=_subject)  # fmt: skip
    for _wrong in (torch.ones(()), torch.ones(2).int(), torch.tensor(True), torch.tensor(1j)):
        bad("RopeConfig.inv_freq", "length", _wrong, TypeError,
            "length must be a positive integer, a 0-d integer tensor or None, got a tensor of "
            f"shape {tuple(_wrong.shape)} on cpu of {_wrong.dtype}", subject=_subject)  # fmt: skip
bad("RopeConfig.with_length", "length", 5, ValueError,
    "scaling must have a by_length policy, got DefaultScaling", subject=lambda: CONFIG)  # fmt: skip

_FROM = "RopeConfig.from_dict"
for _wrong in ("trt", None, 1, []):
    bad(_FROM, "dialect", _wrong, ValueError,
        f"dialect must be one of ['transformers', 'sglang', 'vllm'], got {_wrong!r}")  # fmt: skip
for _wrong in ("yarn", 3, [("rope_type", "yarn")], True):
    bad(_FROM, "rope", _wrong, TypeError,
        f"rope_scaling must be a dictionary or None, got {_wrong!r}")  # fmt: skip
bad(
    _FROM,
    "base",
    None,
    ValueError,
    "rope_scaling must have 'rope_theta', or base must be given beside it, got neither",
)
bad(_FROM, "base", 5.0, ValueError,
    "rope_theta must have one value, got 10 in rope_scaling and 5 beside it",
    rope={"rope_theta": 10})  # fmt: skip
bad(_FROM, "model_max_position", 9, ValueError,
    "max_position_embeddings must have one value, got 4 in rope_scaling and 9 beside it",
    rope={"max_position_embeddings": 4})  # fmt: skip
bad(_FROM, "partial_rotary_factor", 1.5, ValueError,
    "partial_rotary_factor must be at most 1, got 1.5")  # fmt: skip
bad(_FROM, "partial_rotary_factor", 0.4, ValueError,
    "partial_rotary_factor must give an even rotary_dim, got 0.4 * head_dim 8 = 3")  # fmt: skip
bad(_FROM, "partial_rotary_factor", 0.5, ValueError,
    "partial_rotary_factor must agree with the rotary width 8 of head_dim 8, got 0.5; it is not",
    rotary_dim=8)  # fmt: skip
bad(_FROM, "rotary_dim", 4, ValueError, "rotary_dim must have one value, got 4 and rope_dim 8",
    rope={"rope_dim": 8})  # fmt: skip
bad(_FROM, "axes", rc.GlmAxes((2, 1, 1)), ValueError,
    "axes must be None when rope_scaling has 'mrope_section', got GlmAxes(",
    rope={"mrope_section": [2, 1, 1]})  # fmt: skip
bad(_FROM, "axes", None, ValueError,
    "axes must be given for rope_type 'axial', got None: the dictionary does not tell the layout; "
    "pass for example axes=AxialAxes((4, 4))", rope={"rope_type": "axial"})  # fmt: skip

_LO = "original_max_position_embeddings"
for _rope, _error, _sentence in (
    ({"facter": 2, "type": "linear"}, ValueError,
        "rope_scaling must have 'factor' for rope_type 'linear', got keys ['facter', 'type']; did "
        "you mean 'factor' by 'facter'?"),
    ({"zzz": 1}, ValueError,
        "rope_scaling has unknown keys ['zzz'] for rope_type 'default'; known are ["),
    ({"rope_type": "linear", "factor": [2, 4]}, NotImplementedError,
        "factor must be one number, got [2, 4]: one table per config for now"),
    ({"rope_type": "yarn", "factor": 2, _LO: 64, "attention_factor": 1, "attn_factor": 2},
        ValueError, "rope_scaling must not have both 'attention_factor' and 'attn_factor', got"),
    ({"rope_type": "deepseek_yarn", "factor": 2, _LO: 64, "attention_factor": 1.5}, ValueError,
        "attention_factor must be 1.0 or absent for rope_type 'deepseek_yarn', got 1.5"),
    ({"rope_type": "telechat3-yarn", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, _LO: 64},
        ValueError, "rope_scaling must not have factor lists for rope_type 'telechat3-yarn'"),
    ({"rope_type": 3}, TypeError, "rope_type must be a string, got 3"),
    ({"rope_type": "yarn", "type": "linear"}, ValueError,
        "rope_scaling must have one type, got {'rope_type': 'yarn', 'type': 'linear'}"),
    ({"rope_type": "llama-3"}, ValueError,
        "rope_scaling must have a rope_type of [<>], got 'llama-3'; did you mean 'llama3'?"),
    ({"mrope_section": 64}, TypeError, "mrope_section must be a list of integers, got 64"),
    ({"mrope_section": [1, None, 2]}, TypeError, "mrope_section[1] must be a number, got None"),
    ({"mrope_section": [1, 1, 1, 1], "xdrope_section": [4]}, ValueError,
        "mrope_section and xdrope_section must be equal, got (1, 1, 1, 1) and (4,)"),
    ({"type": "bailing_mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True}, ValueError,
        "rope_scaling must not have 'mrope_interleaved' for a model with the 'bailing' axis map"),
    ({"mrope_section": [2, 1, 1], "mrope_interleaved": 1}, TypeError,
        "mrope_interleaved must be True or False, got 1"),
    ({"type": "mrope"}, ValueError,
        "rope_scaling must have 'mrope_section' for the 'chunked' axis map, got none"),
    ({"use_fope": True}, NotImplementedError,
        "rope_scaling must not have 'use_fope', which is not implemented yet"),
    ({"full_attention": {"rope_theta": 1e4}}, ValueError,
        "rope_scaling must be flat, got an entry per layer type: ['full_attention']; pass one"),
    ({"rope_type": "linear", "factor": "two"}, ValueError, "factor must be a number, got 'two'"),
    ({"rope_type": "linear", "factor": -2}, ValueError, "factor must be positive, got -2"),
):  # fmt: skip
    bad(_FROM, "rope", _rope, _error, _sentence)
for _rope in ({3: 4}, {3: 4, "a": 1}, {3: 4, "rope_type": "yarn"}):
    bad(_FROM, "rope", _rope, TypeError, "rope_scaling must have strings for keys, got 3")
# Where other numbers follow from these before the configuration is built.
_HALF = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0] * 2, _LO: 4,
         "partial_rotary_factor": 0.5}  # fmt: skip
numbers(_FROM, "head_dim max_position", *COUNT, prefix="", rope=_HALF)
numbers(_FROM, "rotary_dim", NOT_A_NUMBER, prefix="", dialect="sglang", partial_rotary_factor=0.5)

_HF = "RopeConfig.from_transformers"
for _wrong in (None, 3, "llama", [], {}):
    bad(
        _HF,
        "hf_config",
        _wrong,
        ValueError,
        "config must have 'max_position_embeddings', or max_position must be given, got neither",
    )
for _changes, _error, _sentence in (
    ({"model_type": "nanochat"}, NotImplementedError,
        "config must not be of model_type 'nanochat', which rotates by the negative angle"),
    ({"model_type": "siglip_vision_model"}, NotImplementedError,
        "config must not be of model_type 'siglip_vision_model', a vision tower whose layout"),
    ({"head_dim": None}, ValueError,
        "config must have 'head_dim', or 'hidden_size' and 'num_attention_heads', got neither"),
    ({"head_dim": 0}, ValueError, "head_dim must be a positive integer, got 0"),
    ({"rope_parameters": [1]}, TypeError, "rope_parameters must be a dictionary or None, got [1]"),
    ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e5}}, ValueError,
        "rope_parameters and rope_scaling must be equal where both are given, got two"),
    ({"rope_theta": "x"}, ValueError, "base (rope_theta) must be a number, got 'x'"),
):  # fmt: skip
    bad(_HF, "hf_config", (lambda x: lambda: plain_model(**x))(_changes), _error, _sentence)
_PER_LAYER = {"rope_parameters": {"full": {"rope_theta": 1e4}}}
for _wrong in (None, "main", 3):
    bad(_HF, "layer_type", _wrong, ValueError, f"layer_type must be one of ['full'], got {_wrong}"
        if not isinstance(_wrong, str) else "layer_type must be one of ['full'], got 'main'",
        hf_config=lambda: plain_model(**_PER_LAYER))  # fmt: skip
bad(
    _HF,
    "layer_type",
    "full",
    ValueError,
    "rope_parameters has unknown keys ['zzz'] beside its layer types ['full']",
    hf_config=lambda: plain_model(rope_parameters={**_PER_LAYER["rope_parameters"], "zzz": 1}),
)
bad(_HF, "layer_type", "compress", ValueError,
    "layer_type must be 'full_attention' or 'sliding_attention' for a config with "
    "'rope_local_base_freq', got 'compress'",
    hf_config=lambda: plain_model(rope_local_base_freq=1e4))  # fmt: skip
bad(_HF, "layer_type", "full", ValueError,
    "layer_type must be one of the config's layer types [], got 'full'")  # fmt: skip
for _wrong in ([["x"]], ["x", 3], "full", 3, {"x": 1}):
    bad(_HF, "hf_config", (lambda x: lambda: plain_model(layer_types=x))(_wrong), TypeError,
        f"layer_types must be a list of strings, got {_wrong!r}")  # fmt: skip
bad(
    _HF,
    "layer_type",
    "full",
    TypeError,
    "rope_parameters must have strings for keys, got 3",
    hf_config=lambda: plain_model(rope_parameters={"full": {"rope_theta": 1e4}, "z": 1, 3: 4}),
)
numbers(_HF, "max_position", NOT_A_NUMBER, NOT_A_COUNT, prefix="",
        hf_config=lambda: plain_model(max_position_embeddings=None, rope_parameters=_HALF)
        )  # fmt: skip

# --------------------------------------------------------------------------- capture, module, table


class OwnText:
    """A config that is its own text config."""

    @property
    def text_config(self) -> OwnText:
        return self


for _name in ("target", "draft"):
    for _wrong in ("x", 1.5, {}, [], True, OwnText(), torch.tensor(5)):
        bad("CapturePlan.for_models", _name, _wrong, ValueError,
            f"{_name} must name a length (max_position_embeddings, or a RotaryEmbedding inside), "
            f"got {type(_wrong).__name__} without one; pass the number of positions instead"
            )  # fmt: skip
    for _wrong in (-1, {"max_position_embeddings": -1}):
        bad("CapturePlan.for_models", _name, _wrong, ValueError,
            f"{_name} must not be negative, got -1")  # fmt: skip
for _wrong in (0, {"text_config": {"max_position_embeddings": 0}}):
    bad("CapturePlan.for_models", "target", _wrong, ValueError, "target must be at least 1, got 0")
bad("CapturePlan.for_models", "target", None, ValueError, "target must name a length <> NoneType")
for _target in ("prepare_for_capture", "capture_guard"):
    for _wrong, _type in (
        ([3], "int"), ("x", "str"), ({"a": 1}, "str"), (3, "int"), (NAN, "float"), (True, "bool"),
        (torch.tensor(1), "Tensor"), (torch.ones(2), "Tensor"), (rc.RotaryEmbedding, "type"),
    ):  # fmt: skip
        bad(_target, "model", _wrong, TypeError,
            f"model must be a module, several modules or None, got {_type}")  # fmt: skip
    bad(_target, "model", lambda: torch.nn.Linear(1, 1), ValueError,
        "model must contain a RotaryEmbedding, got Linear without one; build it with get_rope, or "
        "patch it with rope_compile.integrations first")  # fmt: skip
    bad(
        _target,
        "model",
        meta_rope,
        ValueError,
        "model must be on a real device, got RotaryEmbedding on meta; call to_empty() or .to(",
    )
    bad(_target, "model", dead_rope, RuntimeError,
        "RotaryEmbedding must have a live table, got a dead one: cos_sin_cache has lost its "
        "storage; fetch it again with get_rope, or call reserve(128) on its module")  # fmt: skip
for _wrong in (None, 128, {"max_position": 5}, "x"):
    bad("prepare_for_capture", "plan", _wrong, TypeError,
        f"plan must be a CapturePlan, got {type(_wrong).__name__}")  # fmt: skip
bad("prepare_for_capture", "plan", rc.CapturePlan(max_position=9999), RuntimeError,
    "RopeTable(128 rows, rotary_dim=8, base=10000, device=cpu) must not grow to 11136 rows while "
    "compiling, it has 128; call reserve() or prepare_for_capture() before compile and capture",
    within=compiling)  # fmt: skip

for _target in ("get_rope", "RotaryEmbedding"):
    for _wrong in (None, {"head_dim": 8}, 8, "llama", rc.RopeConfig):
        bad(_target, "config", (lambda x: lambda: x)(_wrong), TypeError,
            f"config must be a RopeConfig, got {type(_wrong).__name__}")  # fmt: skip
    bad(_target, "config", lambda: config(base=77.0), RuntimeError,
        "must not be built while the current CUDA stream captures a graph",
        within=capturing)  # fmt: skip
for _target, _name, _wrong in (
    ("LinearScaling", "factor", 1e-300), ("NtkAlphaScaling", "alpha", 1e300),
    ("DynamicScaling", "factor", 1e300), ("YarnScaling", "beta_fast", 1e308),
    ("YarnScaling", "beta_slow", 5e-324), ("YarnScaling", "attention_factor", 1e300),
):  # fmt: skip
    bad(
        _target,
        _name,
        _wrong,
        ValueError,
        f"{_target}.{_name} must be 0 or of a size between 1e-30 and 1e30, got {_wrong}",
    )
for _target in ("YarnScaling", "Llama3Scaling", "DynamicScaling", "LongRopeScaling"):
    bad(_target, "original_max_position", 2**2000, ValueError,
        f"{_target}.original_max_position must fit in 64 bits, got 2001 bits")  # fmt: skip

bad("RotaryEmbedding.reserve", "rows", 257, RuntimeError,
    "must not grow to 384 rows while compiling, it has 128; call reserve() or prepare_for_capture(",
    within=compiling)  # fmt: skip
bad("RotaryEmbedding.reserve", "rows", 129, RuntimeError,
    "must not grow to 256 rows while the current CUDA stream captures a graph, it has 128; call",
    within=capturing)  # fmt: skip
bad("RotaryEmbedding.reserve", "rows", 129, RuntimeError,
    "must not grow to 256 rows inside capture_guard, it has 128; call",
    subject=frozen_rope)  # fmt: skip
for _target, _name in (("RotaryEmbedding.reserve", "rows"), ("RotaryEmbedding", "capacity")):
    for _wrong in (2**40 + 1, HUGE):
        bad(_target, _name, _wrong, ValueError,
            f"{_name} must be at most {2**40}, got {_wrong}")  # fmt: skip
    bad(_target, _name, 10**5000, ValueError,
        f"{_name} must be at most {2**40}, got an int of 16610 bits")  # fmt: skip
_FIX = "must not be refilled while "
for _wrong in (None, 3, "x", {}):
    bad("RopeSelector", "ropes", _wrong, TypeError,
        f"ropes must be a list of RotaryEmbedding modules, got {type(_wrong).__name__}",
        )  # fmt: skip
bad("RopeSelector", "ropes", [3], TypeError,
    "ropes[0] must be a RotaryEmbedding such as get_rope gives, got int")  # fmt: skip
bad("RopeSelector", "ropes", [], ValueError, "ropes must have at least one RotaryEmbedding, got")
bad("RopeSelector", "ropes", lambda: [rc.RotaryEmbedding(config(head_dim=n)) for n in (8, 16)],
    ValueError, "ropes must have one head_dim, got 8 and, in ropes[1], 16")  # fmt: skip
bad("RopeSelector", "ropes",
    lambda: [rc.RotaryEmbedding(config(axes=rc.XdropeAxes((1, 1, 1, 1), full_width=True)))],
    ValueError, "ropes must have one angle for each pair, got XdropeAxes")  # fmt: skip
for _target in ("RopeSelector.forward", "RopeSelector.apply_"):
    for _wrong in (None, [0, 1, 0], 1):
        bad(_target, "selector", _wrong, TypeError,
            f"selector must be a tensor, got {type(_wrong).__name__}")  # fmt: skip
    bad(_target, "selector", torch.ones(3), TypeError, "selector must be bool, int32 or int64, got")
    bad(_target, "selector", lambda: torch.ones(3, device="meta").int(), ValueError,
        "selector must be on the device of q, cpu, got meta")  # fmt: skip
    bad(_target, "selector", torch.zeros(4).int(), ValueError,
        "selector must broadcast against the tokens of positions, (3,), got (4,)")  # fmt: skip
bad("RotaryEmbedding.rebuild_", "", None, RuntimeError, _FIX + "compiling; call", within=compiling)
bad("RotaryEmbedding.rebuild_", "", None, RuntimeError, _FIX + "the current CUDA stream captures",
    within=capturing)  # fmt: skip
bad("RotaryEmbedding.rebuild_", "", None, RuntimeError,
    "must be alive to be refilled in place, got a dead table: cos_sin_cache has lost its storage; "
    "call reserve(128) to allocate it again", subject=dead_rope)  # fmt: skip

# ----------------------------------------------------------------------------------- the operation

_ROPES = ("apply_rope", "apply_rope_", "rope", "rope_", "RotaryEmbedding.forward",
          "RotaryEmbedding.apply_", "RopeSelector.forward", "RopeSelector.apply_")  # fmt: skip
_TABLES, _MODULES, _FUNCTIONS = _ROPES[:4], _ROPES[4:], _ROPES[:2]
_IN_PLACE = ("apply_rope_", "rope_", "RotaryEmbedding.apply_", "RopeSelector.apply_")
_MOVED = "all tensors must be on one device, got <>; move them to q's device (a table on meta was"
for _target in _ROPES:
    for _name in ("q", "k"):
        bad(
            _target,
            _name,
            lambda: torch.ones(3, 2, 8, dtype=torch.int32),
            TypeError,
            f"{_name} must be float16, bfloat16, float32 or float64, got torch.int32; convert it",
        )
        bad(
            _target,
            _name,
            lambda: torch.ones(3, 2, 8, dtype=torch.complex64),
            TypeError,
            f"{_name} must be float16, bfloat16, float32 or float64, got torch.complex64",
        )
        bad(
            _target,
            _name,
            lambda: torch.ones(3, 2, 6),
            ValueError,
            f"rotary_offset + rotary_dim must lie in 0..head_dim of {_name}, got 0 + 8 for head_",
        )
        bad(
            _target,
            _name,
            lambda: freed(3, 2, 8),
            ValueError,
            f"{_name} must have memory, got a freed storage for shape (3, 2, 8); fetch",
        )
        bad(_target, _name, lambda: torch.ones(3, 2, 8).to_sparse(), TypeError,
            f"{_name} must be a dense tensor, got layout torch.sparse_coo; use to_d")  # fmt: skip
    bad(_target, "k", lambda: torch.ones(3, 2, 8, device="meta"), ValueError, _MOVED)
    bad(_target, "q", lambda: torch.ones(8), ValueError,
        "q and k must be [..., heads, head_dim] of one rank, got (8,) and (3, 1, 8)")  # fmt: skip
    bad(_target, "k", lambda: torch.ones(1, 3, 1, 8), ValueError, "q and k must be [..., heads,")
    bad(_target, "k", lambda: torch.ones(2, 1, 8), ValueError,
        "k must have the token dimensions of q, (3,), got (2,)")  # fmt: skip
    for _dtype in (torch.float32, torch.bool, torch.uint8, torch.int16):
        bad(_target, "positions", (lambda d: lambda: torch.ones(3, dtype=d))(_dtype), TypeError,
            f"positions must be int32 or int64, got {_dtype}; use positions.long()")  # fmt: skip
    bad(_target, "positions", lambda: torch.arange(3, device="meta"), ValueError, _MOVED)
    for _shape in ((2,), (1, 3)):
        bad(_target, "positions", torch.zeros(_shape, dtype=torch.int64), ValueError,
            f"positions must broadcast to q.shape[:-2] = (3,), got {_shape}")  # fmt: skip
for _target in _MODULES:
    for _wrong in (None, [1.0], 3, "x"):
        bad(_target, "q", _wrong, TypeError, f"q must be a tensor, got {type(_wrong).__name__}")
        bad(_target, "positions", _wrong, TypeError,
            f"positions must be a tensor, got {type(_wrong).__name__}")  # fmt: skip
        bad(_target, "positions", _wrong, TypeError, "positions must be a tensor", within=rc.debug)
    for _wrong in ([1.0], 3, "x"):
        bad(_target, "k", _wrong, TypeError,
            f"k must be a tensor or None, got {type(_wrong).__name__}")  # fmt: skip
    bad(_target, "q", lambda: torch.ones(3, 2, 8, device="meta"), ValueError,
        "q must be on a device that this module has a table for (cpu), got meta; call .to('meta') "
        "on the module before the first call")  # fmt: skip
for _target in (*_FUNCTIONS, "RotaryEmbedding.forward", "RotaryEmbedding.apply_"):
    for _layout in (torch.strided, torch.jagged):
        for _name in ("q", "k", "positions"):
            bad(_target, _name, functools.partial(nested, _layout), TypeError,
                f"{_name} must be a dense tensor, got a nested one; rotate its v")  # fmt: skip
for _target in (*_FUNCTIONS, *_MODULES):
    for _wrong in ("x", None, 1.5, 0, 1, []):
        bad(_target, "inverse", _wrong, TypeError, f"inverse must be True or False, got {_wrong!r}")
    bad(
        _target,
        "positions",
        torch.tensor([0, 500, 1]),
        ValueError,
        "positions must lie inside the table of <> rows while the debug check is on, got 500; call "
        "reserve(501) before capture or compile, or switch the check off",
        within=rc.debug,
    )
    bad(_target, "positions", torch.tensor([0, -1, 1]), ValueError, "got -1; call reserve(2)",
        within=rc.debug)  # fmt: skip
for _target in _FUNCTIONS:
    for _name, _kind in (("q", "a tensor"), ("k", "a tensor or None"), ("positions", "a tensor"),
                         ("inv_freq", "a tensor or None")):  # fmt: skip
        for _wrong in ([1.0], 3, "x"):
            bad(_target, _name, _wrong, TypeError,
                f"{_name} must be {_kind}, got {type(_wrong).__name__}")  # fmt: skip
    bad(_target, "positions", None, TypeError, "positions must be a tensor, got NoneType")
    bad(_target, "q", None, TypeError, "q must be a tensor, got NoneType")
    for _wrong in (None, [1.0], 3):
        bad(
            _target,
            "cos_sin_cache",
            _wrong,
            TypeError,
            f"cos_sin_cache must be a tensor [rows, rotary_dim], got {type(_wrong).__name__}",
        )
    for _wrong in (12, -8, "x", 7.5, NAN):
        bad(
            _target,
            "rotary_dim",
            _wrong,
            ValueError,
            f"rotary_dim must be the width of cos_sin_cache, 8, got {_wrong}; leave it out",
        )
    for _wrong in ([8, 8], 8):
        bad(_target, "rotary_dim", torch.tensor(_wrong), TypeError,
            "rotary_dim must be an int or None, got a tensor of shape (")  # fmt: skip
    for _wrong in ("x", None, 1.5):
        bad(_target, "rotary_offset", _wrong, TypeError,
            f"rotary_offset must be an int, got {_wrong!r}")  # fmt: skip
    for _wrong in (None, 1, []):
        bad(_target, "style", _wrong, TypeError,
            f"style must be one of ('half', 'interleaved', <>), got {_wrong!r}")  # fmt: skip
    for _wrong in ("x", None, [1.0]):
        bad(_target, "attention_scaling", _wrong, TypeError,
            f"attention_scaling must be a number, got {_wrong!r}")  # fmt: skip
    for _wrong in ("x", 1.5, [1.5], {}, True):
        bad(_target, "axes", _wrong, TypeError,
            f"axes must be an Axes, one axis for each lane, or None, got {_wrong!r}")  # fmt: skip
    bad(
        _target,
        "axes",
        rc.ChunkedAxes((2, 3)),
        ValueError,
        "ChunkedAxes must share out rotary_dim / 2 = 4 lanes, got (2, 3), which sum to 5",
    )
for _target in ("rope", "rope_"):
    for _name in ("q", "positions", "cos_sin_cache"):
        bad(_target, _name, None, TypeError, f"{_name} must be a tensor, got NoneType")
_AXES_AT = {"positions": torch.zeros(2, 3, dtype=torch.int64)}
for _target in _TABLES:
    bad(_target, "q", lambda: torch.ones(3, 2, 8, device="meta"), ValueError, _MOVED)
    bad(_target, "cos_sin_cache", lambda: torch.ones(16, 8, device="meta"), ValueError, _MOVED)
    bad(_target, "inv_freq", lambda: torch.ones(4, device="meta"), ValueError, _MOVED)
    for _dtype in (torch.float16, torch.float64, torch.int64):
        bad(
            _target,
            "cos_sin_cache",
            (lambda d: lambda: torch.ones(16, 8, dtype=d))(_dtype),
            TypeError,
            f"cos_sin_cache must be float32 whatever the dtype of q, got {_dtype}; build",
        )
    for _shape in ((8,), (16, 7), (1, 16, 8)):
        bad(
            _target,
            "cos_sin_cache",
            torch.ones(_shape),
            ValueError,
            f"cos_sin_cache must be [rows, rotary_dim] with an even rotary_dim, got {_shape}",
        )
    bad(_target, "cos_sin_cache", torch.ones(0, 8), ValueError,
        "cos_sin_cache must have at least one row when inv_freq is None, got (0, 8); pass inv_freq",
        inv_freq=None)  # fmt: skip
    bad(_target, "cos_sin_cache", lambda: freed(16, 8), ValueError,
        "cos_sin_cache must have memory, got a freed storage for shape (16, 8); fetch the table "
        "again with get_rope, or call rebuild_() once memory is back")  # fmt: skip
    for _dtype in (torch.float16, torch.int64):
        bad(_target, "inv_freq", (lambda d: lambda: torch.ones(4, dtype=d))(_dtype), TypeError,
            f"inv_freq must be float32 or float64 (exact phases), got {_dtype}")  # fmt: skip
    for _shape in ((3,), (1, 4), ()):
        bad(_target, "inv_freq", torch.ones(_shape), ValueError,
            f"inv_freq must be [rotary_dim / 2] = (4,), got {_shape}")  # fmt: skip
    bad(_target, "style", "neox", ValueError,
        "style must be one of ('half', 'interleaved', 'half_blocks', 'interleaved_to_half'), got "
        "'neox'")  # fmt: skip
    bad(_target, "style", "half_blocks", ValueError,
        "style 'half_blocks' needs axes, got none; use style 'half'")  # fmt: skip
    for _wrong in (1, -1, 2**40):
        bad(
            _target,
            "rotary_offset",
            _wrong,
            ValueError,
            f"rotary_offset + rotary_dim must lie in 0..head_dim of q, got {_wrong} + 8 for head_",
        )
    for _wrong in ((0, 1), (0, -1, 0, 0)):
        bad(_target, "axes", _wrong, ValueError,
            f"axes must name one axis for each of 4 lanes (or of 8 channels), got {len(_wrong)} "
            f"entries from {min(_wrong)} to {max(_wrong)}")  # fmt: skip
    bad(_target, "axes", (0, 1, 0, 1) * 2, ValueError,
        "axes of full width need style 'half', got 'interleaved'", style="interleaved",
        **_AXES_AT)  # fmt: skip
    bad(_target, "axes", (0, 1, 0, 1), ValueError,
        "style 'half_blocks' needs axes in contiguous ascending blocks, got (0, 1, 0, 1)",
        style="half_blocks", **_AXES_AT)  # fmt: skip
    bad(_target, "positions", torch.zeros(2, 1, 3, dtype=torch.int64), ValueError,
        "positions must be [2, ...] with the rest broadcasting to q.shape[:-2] = (3,), got (2, 1, ",
        axes=(0, 0, 1, 1))  # fmt: skip
    bad(_target, "positions", torch.zeros(3, 3, dtype=torch.int64), ValueError,
        "positions must have 2 axes (or 1 for all) first, got (3, 3)",
        axes=(0, 0, 1, 1))  # fmt: skip
for _target in _IN_PLACE:
    bad(_target, "q", lambda: torch.ones(3, 1, 8).expand(3, 2, 8), ValueError,
        "q must not overlap itself to be rotated in place, got strides (8, 0, 1) for shape (3, 2, "
        "8); use the functional form, or q.contiguous()")  # fmt: skip
    bad(_target, "k", lambda: torch.ones(1, 1, 8).expand(3, 1, 8), ValueError,
        "k must not overlap itself")  # fmt: skip
    bad(_target, "q", lambda: torch.ones(3, 2, 8, requires_grad=True), RuntimeError,
        "q and k must not require grad (or carry tangents) to be rotated in place while gradients "
        "are recorded; use the functional form")  # fmt: skip
_SHARED = torch.ones(3, 2, 8)
for _target in _IN_PLACE:
    bad(_target, "k", lambda: _SHARED[:, :1], ValueError,
        "q and k must not share memory to be rotated in place; use the functional form",
        q=lambda: _SHARED)  # fmt: skip
for _target in _IN_PLACE[:2]:
    bad(
        _target,
        "style",
        "interleaved_to_half",
        ValueError,
        "style 'interleaved_to_half' moves channels and cannot be applied in place; use the",
    )

# Inside a transform of torch.func, or on DTensors: what goes in is no plain tensor.
FUNCTION_TRANSFORMS = {
    "grad": lambda f: lambda q, **rest: torch.func.grad(lambda x: f(x, **rest)[0].sum())(q),
    "vmap": lambda f: lambda q, cos_sin_cache, **rest: torch.vmap(
        lambda table: f(q, cos_sin_cache=table, **rest)[0]
    )(cos_sin_cache),
    "vmap q": lambda f: lambda q, **rest: torch.vmap(
        lambda x: f(x, **rest), in_dims=(0,)
    )(q),
}  # fmt: skip


def transformed(name: str, target: str):
    holder = type("Holder", (), {})()
    setattr(holder, target, FUNCTION_TRANSFORMS[name](getattr(rc, target)))
    return lambda: holder


bad("apply_rope", "q", lambda: torch.ones(3, 2, 8), NotImplementedError,
    "torch.func.grad, vjp and jvp must not reach rope_compile::rope, got such a transform; use "
    "torch.autograd", subject=transformed("grad", "apply_rope"))  # fmt: skip
bad("apply_rope", "cos_sin_cache", lambda: torch.ones(2, 16, 8), ValueError,
    "cos_sin_cache and inv_freq must not be mapped by vmap, got in_dims (0, None); map q, k or",
    subject=transformed("vmap", "apply_rope"))  # fmt: skip
bad("apply_rope_", "k", lambda: torch.ones(3, 1, 8), ValueError,
    "q and k must both be mapped to be rotated in place under vmap, got in_dims (0, None)",
    q=lambda: torch.ones(2, 3, 2, 8), subject=transformed("vmap q", "apply_rope_"))  # fmt: skip

_Q = functools.partial(torch.ones, 2, 3, 2, 8)
bad("apply_rope", "k", lambda: torch.ones(2, 3, 1, 8), ValueError,
    "k must be a DTensor where another argument is one, got a plain tensor; make it one with",
    q=lambda: spread(_Q(), 0))  # fmt: skip
bad("apply_rope", "k", lambda: spread(torch.ones(2, 3, 1, 8), 0, None), ValueError,
    "k must be on the mesh of q, <>, got <>; redistribute it first",
    q=lambda: spread(_Q(), 0))  # fmt: skip
bad("apply_rope", "cos_sin_cache", lambda: spread(torch.ones(16, 8), 0), ValueError,
    "cos_sin_cache must be a plain or replicated tensor, got placements (Shard(dim=0),); every",
    q=lambda: spread(_Q(), 0), k=None)  # fmt: skip
bad("apply_rope", "q", lambda: spread(_Q(), 3), ValueError,
    "q must be sharded over batch, sequence or heads, replicated or a partial sum, got <> for q of",
    k=None)  # fmt: skip
bad("apply_rope", "positions", lambda: spread(torch.arange(6).view(2, 3), 1), ValueError,
    "positions must be replicated, or placed as <>, to be rotated without communication, got <>",
    q=lambda: spread(_Q(), 0), k=None)  # fmt: skip

# ------------------------------------------------------------------------------ switches and peers

bad("__getattr__", "name", "rotary", AttributeError,
    "module 'rope_compile' has no attribute 'rotary'")  # fmt: skip
for _wrong in ("off", 1, None):
    bad("debug", "enabled", _wrong, TypeError, f"enabled must be True or False, got {_wrong!r}")
bad("debug", "enabled", lambda: torch.ones(2), TypeError,
    "enabled must be True or False, got a tensor of shape (2,) on cpu")  # fmt: skip


def enable_and_undo():
    def enable(**arguments):
        with rc.inductor.enable(**arguments):
            pass

    return type("Holder", (), {"enable": staticmethod(enable)})


bad("inductor.enable", "trust_full_width", "no", TypeError,
    "trust_full_width must be True or False, got 'no'", subject=enable_and_undo)  # fmt: skip

_DUAL = "dual_chunk_attention_config must be None, got one: dual chunk attention"
for _target in ("aiter.get_rope", "sglang.get_rope", "vllm.get_rope", "vllm.get_rope_v0"):
    for _value, _error, _sentence in (*NOT_A_NUMBER, *NOT_A_COUNT, *NONE):
        bad(_target, "max_position", _value, _error, f"max_position {_sentence}")
    numbers(_target, "head_size", *COUNT, prefix="")
    bad(_target, "head_size", HUGE, ValueError, f"head_size must be at most 1048576, got {HUGE}")
    for _value, _error, _sentence in NOT_A_FLAG:
        bad(_target, "is_neox_style", _value, _error, f"is_neox_style {_sentence}")
    for _wrong in ([], "float16", 16):
        bad(_target, "dtype", _wrong, TypeError,
            f"dtype must be a torch.dtype or None, got {_wrong!r}")  # fmt: skip
    bad(_target, "dual_chunk_attention_config", {"chunk_size": 8}, NotImplementedError, _DUAL)
    _dictionary = "rope_parameters" if _target == "vllm.get_rope" else "rope_scaling"
    bad(_target, _dictionary, {"rope_type": "xpos"}, ValueError, "must have a rope_type of [")
    for _wrong in ("yarn", 3, []):
        bad(_target, _dictionary, _wrong, TypeError,
            f"{_dictionary} must be a dictionary or None, got {_wrong!r}")  # fmt: skip
    if _target == "vllm.get_rope":
        continue
    for _value, _error, _sentence in (*NOT_A_NUMBER, *NOT_POSITIVE):
        bad(_target, "base", _value, _error, f"base (rope_theta) {_sentence}")
    bad(_target, "rotary_dim", 7, ValueError, "rotary_dim must be even and between 0 and head_dim")
    # "proportional": where the peers' narrowed width becomes a share of head_size.
    for _kind in ({}, {"rope_type": "proportional"}):
        numbers(_target, "rotary_dim", NOT_A_NUMBER, prefix="", rope_scaling=_kind)
        numbers(_target, "partial_rotary_factor", NOT_A_NUMBER, NOT_POSITIVE, prefix="",
                rope_scaling=_kind)  # fmt: skip
        numbers(_target, "head_size", *COUNT, prefix="", rope_scaling=_kind)
for _axes in ({}, {"mrope_section": [2, 1, 1]}):
    numbers("vllm.get_rope", "mrope_positions_factor", *COUNT, prefix="",
            rope_parameters=_axes)  # fmt: skip


# ------------------------------------------------------------------------------- what a case proves


def state() -> dict[str, object]:
    """What an error must leave as it was."""
    rope = rc.get_rope(CONFIG)
    table = rope.table
    return {
        "entries": dict(registry._numbers),
        "modules": {number: id(module) for number, module in registry.slots.items()},
        "pins": set(registry._pinned),
        "guards": dict(registry._guards),
        "rope": {name: id(value) for name, value in vars(rope).items()},
        "table": {name: id(value) for name, value in vars(table).items() if name != "_frozen"},
        "frozen": table._frozen,
        "rows": (table.capacity, table.cos_sin_cache.data_ptr(), table.cos_sin_cache.sum().item()),
        "dead": table.dead(),
        "debug": _Debug.enabled,
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
    }


def held_locks() -> list[str]:
    """Locks that another thread cannot take."""
    rope = rc.get_rope(CONFIG)
    locks = {"registry": registry._lock, "module": rope._lock, "table": rope.table._lock}
    held = []

    def take() -> None:
        for name, lock in locks.items():
            if lock.acquire(timeout=1):
                lock.release()
            else:
                held.append(name)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return held


def is_plain(x: object) -> bool:
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and not x.is_nested
        and x.device.type == "cpu"
        and (x.numel() == 0 or x.untyped_storage().nbytes() > 0)
    )


@dataclass(frozen=True)
class Outcome:
    error: Exception
    file: str
    line: int


Call = tuple[Callable[..., object], dict[str, object]]


def prepared(case: Case) -> Call:
    """What is called with what; errors here are no errors of the call."""
    changed = {name: evaluated(x) for name, x in case.others.items()}
    if case.parameter:
        changed[case.parameter] = evaluated(case.value)
    return bound(case), GOOD[case.target]() | changed


def outcome(case: Case, call: Call) -> Outcome:
    """Run a case, and see that nothing but the error is left of it."""
    function, arguments = call
    inputs = {name: x.clone() for name, x in arguments.items() if is_plain(x)}
    before = state()
    with case.within(), pytest.raises(case.error) as caught:
        function(**arguments)
    assert state() == before
    assert held_locks() == []
    for name, x in inputs.items():
        assert torch.equal(arguments[name], x), f"{name} was written"
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    return Outcome(caught.value, last.filename, last.lineno or 0)


@functools.cache
def raise_lines(file: str) -> set[int]:
    return {
        line
        for raised in raises(Path(file).read_text())
        for line in range(raised.first, raised.last + 1)
    }


def shortcoming(case: Case) -> str | None:
    """What is wrong with the error of a case; None if nothing is."""
    call = prepared(case)
    try:
        seen = outcome(case, call)
    except pytest.fail.Exception:
        return "nothing was raised"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    message = str(seen.error)
    if not re.search(case.pattern(), message):
        return f"another sentence: {message}"
    if "\n" in message or len(message) > 600:
        return f"not one sentence: {message}"
    if type(seen.error) not in KINDS:
        return f"of type {type(seen.error).__name__}"
    if PACKAGE not in Path(seen.file).parents or seen.line not in raise_lines(seen.file):
        return f"not raised by this package but in {seen.file}:{seen.line}"
    return None


def shortcomings(cases: list[Case]) -> dict[str, str | None]:
    # Not by the values: to print a tensor whose memory was freed crashes.
    return {
        f"{case.parameter}: {case.sentence} ({i})": shortcoming(case)
        for i, case in enumerate(cases)
    }


def of_target(target: str) -> list[Case]:
    return [case for case in CASES if case.target == target]


@pytest.mark.parametrize("target", GOOD)
def test_wrong_arguments_get_one_sentence_and_change_nothing(target: str) -> None:
    found = shortcomings(of_target(target))
    assert {name: why for name, why in found.items() if why is not None} == {}


def test_wrong_cases_would_be_found() -> None:
    """Twins: a right argument, another sentence, an error of torch, one that leaves a trace."""

    def case(value, sentence="", **changes):
        return Case("LinearScaling", "factor", value, ValueError, sentence, **changes)

    assert shortcoming(case(0, "LinearScaling.factor must be positive, got 0")) is None
    assert shortcoming(case(1)) == "nothing was raised"
    assert "another sentence" in shortcoming(case(0, "factor must be negative"))
    assert "another sentence" in shortcoming(case(0, "actor must be positive, got 0"))
    assert "TypeError" in shortcoming(case(None))
    inner = Case("rope", "axes", "x", RuntimeError, "")
    assert "not one sentence" in shortcoming(inner)
    torchs = Case("debug", "enabled", -8, RuntimeError, "", subject=debug_of_torch)
    assert "not raised by this package" in shortcoming(torchs)
    leaving = case(0, within=lambda: guard_that_stays())
    assert "AssertionError" in shortcoming(leaving)


def debug_of_torch():
    """Its sentence is one, but not ours."""
    return type("Holder", (), {"debug": staticmethod(lambda enabled: torch.arange(enabled))})


@contextlib.contextmanager
def guard_that_stays() -> Iterator[None]:
    """Leaves the debug switch turned; the fixture turns it back."""
    rc.debug()
    yield


@pytest.mark.parametrize("target", GOOD)
def test_the_right_arguments_are_right(target: str) -> None:
    """So that the error of a case comes from what the case changes."""
    case = Case(target, "", None, Exception, "")
    function = enable_and_undo().enable if target == "inductor.enable" else bound(case)
    function(**GOOD[target]())


def test_a_changed_state_would_be_seen() -> None:
    """The wrong twin: an entry, a switch, a row, a lock."""
    before = state()
    with rc.debug():
        assert state() != before
    rope = rc.get_rope(CONFIG)
    with rc.capture_guard(rope):
        assert state() != before
    registry.slots[10**6] = rope
    try:
        assert state() != before
    finally:
        del registry.slots[10**6]
    with registry._lock:
        pass
    assert held_locks() == []
    release, taken = threading.Event(), threading.Event()

    def hold() -> None:
        with rope.table._lock:
            taken.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    assert held_locks() == ["table"]
    release.set()
    thread.join()


# ------------------------------------------------------------------- complete: every parameter


def own_methods(cls: type) -> list[str]:
    """Public methods that the class defines itself."""
    return [
        f"{cls.__name__}.{name}"
        for name, value in vars(cls).items()
        if not name.startswith("_") and isinstance(value, FunctionType | classmethod)
    ]


def adapters_get_rope() -> list[str]:
    """The peers' get_rope, found in the source: nothing is imported."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted((PACKAGE / "integrations").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in ("get_rope", "get_rope_v0")
    ]


def public_targets() -> list[str]:
    named = [name for name in rc.__all__ if callable(getattr(rc, name))]
    methods = [
        method
        for cls in (rc.RopeConfig, rc.RotaryEmbedding, rc.RopeSelector, rc.CapturePlan)
        for method in own_methods(cls)
    ]
    passes = [f"inductor.{name}" for name in rc.inductor.__all__]
    return [*named, *methods, *passes, "rope", "rope_", *adapters_get_rope()]


def without_a_case(cases: list[Case], targets: list[str]) -> set[tuple[str, str]]:
    covered = {(case.target, case.parameter) for case in cases} | set(FREE)
    return {
        (target, name)
        for target in targets
        if target not in NOT_CALLED
        for name in parameters(target)
        if (target, name) not in covered
    }


def test_every_parameter_of_every_public_callable_has_a_case() -> None:
    targets = public_targets()
    assert {"get_rope", "RopeConfig.from_dict", "rope_", "sglang.get_rope"} < set(targets)
    assert without_a_case(CASES, targets) == set()
    assert set(NOT_CALLED) <= set(targets), "an exception for what is not public"


def test_an_exception_is_for_a_real_parameter_without_a_case() -> None:
    for target, name in FREE:
        assert name in parameters(target), (target, name)
        assert not [case for case in CASES if (case.target, case.parameter) == (target, name)]


def test_a_missing_case_would_be_found() -> None:
    fewer = [case for case in CASES if (case.target, case.parameter) != ("get_rope", "config")]
    assert without_a_case(fewer, public_targets()) == {("get_rope", "config")}


# ------------------------------------------------------------------------ complete: every raise

# The library: its command line and its benchmarks have errors of their own.
SOURCES = sorted({*PACKAGE.glob("*.py"), *PACKAGE.glob("inductor/*.py")} - {PACKAGE / "cli.py"})
# Not errors: how the pass gives up on a pattern, which `inductor.report()` then says.
CAUGHT_INSIDE = ("Refused",)
# Beginning of a message that no call can bring about here -> why.
UNREACHED: dict[str, str] = {}


@dataclass(frozen=True)
class Raise:
    first: int
    last: int
    text: str


def raises(source: str) -> list[Raise]:
    """Every ``raise`` with a message."""
    return [
        Raise(node.lineno, node.end_lineno or node.lineno, ast.unparse(node.exc))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and node.exc.args
        and ast.unparse(node.exc.func) not in CAUGHT_INSIDE
    ]


def unmatched(source: str, lines: set[int]) -> list[str]:
    """Raises on none of these lines, that have no reason to be left out."""
    return [
        raised.text
        for raised in raises(source)
        if not lines & set(range(raised.first, raised.last + 1))
        and not any(part in raised.text for part in UNREACHED)
    ]


@functools.cache
def reached() -> dict[str, set[int]]:
    """Lines of each file at which the cases raise."""
    lines: dict[str, set[int]] = {}
    for case in CASES:
        seen = outcome(case, prepared(case))
        lines.setdefault(seen.file, set()).add(seen.line)
    return lines


def test_every_raise_of_the_package_is_reached_by_a_case() -> None:
    missing = {
        path.name: found
        for path in SOURCES
        if (found := unmatched(path.read_text(), reached().get(str(path), set())))
    }
    assert missing == {}
    assert sum(len(raises(path.read_text())) for path in SOURCES) > 120


def test_a_raise_without_a_case_would_be_found() -> None:
    path = PACKAGE / "axes.py"
    twin = path.read_text() + "\n\ndef f(x: int) -> None:\n    raise ValueError(f'got {x}')\n"
    assert unmatched(twin, reached()[str(path)]) == ["ValueError(f'got {x}')"]
    assert len(unmatched(path.read_text(), set())) == len(raises(path.read_text()))
