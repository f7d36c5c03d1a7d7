"""The Triton kernel's machine code, compiled ahead of time for GPUs that need not be here.

Each shipped configuration moves q and k in 16-byte accesses, keeps nothing in shared memory and
spills nothing. ``aot.audit`` finds out which access belongs to which tensor.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from aot import TARGETS, Launch, audit, compile_launch, ptxas_report

NVIDIA = [name for name, target in TARGETS.items() if target.backend == "cuda"]
CHUNKED = (0,) * 16 + (1,) * 24 + (2,) * 24
Q_AND_K = ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")

# What is served and trained: each differs from the first in one thing.
SHIPPED = {
    "prefill": Launch(),
    "decode": Launch(tokens=4),
    "interleaved": Launch(style="interleaved"),
    "interleaved decode": Launch(tokens=4, style="interleaved"),
    "width 64": Launch(head_dim=64),
    "width 64 interleaved": Launch(head_dim=64, style="interleaved"),
    "first 96 of 128": Launch(rotary_dim=96),
    "last 64 of 192": Launch(head_dim=192, rotary_dim=64, rotary_offset=128),
    "width 80": Launch(head_dim=80),
    "width 256": Launch(head_dim=256),
    "float32": Launch(dtype=torch.float32),
    "float32 interleaved": Launch(dtype=torch.float32, style="interleaved"),
    "float64": Launch(dtype=torch.float64),
    "float16": Launch(dtype=torch.float16),
    "packed qkv": Launch(layout="packed_qkv"),
    "in place, packed qkv": Launch(layout="packed_qkv", in_place=True),
    "backward": Launch(inverse=True),
    "three axes": Launch(lane_axes=CHUNKED),
    "exact phase": Launch(exact_phase=True),
    "int32 positions": Launch(positions_dtype=torch.int32),
    "table only": Launch(computes_rows=False),
}


# sm_90 sees every configuration; the other targets those that stand for a kind of code.
ON_ALL = ("prefill", "decode", "interleaved", "first 96 of 128", "float32", "three axes")
CASES = [
    pytest.param(SHIPPED[name], target, id=f"{target}, {name}")
    for target in TARGETS
    for name in SHIPPED
    if target == "sm_90" or name in ON_ALL
]
NVIDIA_CASES = [case for case in CASES if case.values[1] in NVIDIA]


@pytest.mark.parametrize(("launch", "target"), CASES)
def test_nothing_is_spilled_or_shared(launch: Launch, target: str):
    """Registers hold the table row and the heads; no program exchanges anything."""
    found = audit(launch, target)
    assert (found.spill_bytes, found.shared_bytes) == (0, 0)


@pytest.mark.parametrize(("launch", "target"), NVIDIA_CASES)
def test_q_and_k_move_in_16_byte_accesses(launch: Launch, target: str):
    found = audit(launch, target)
    assert found.widths(*Q_AND_K) == {16}, found.accesses
    assert {*found.accesses} >= {"q_ptr load", "k_ptr load", "q_out_ptr store", "k_out_ptr store"}


@pytest.mark.parametrize(("launch", "target"), NVIDIA_CASES)
def test_table_rows_are_read_in_16_byte_accesses(launch: Launch, target: str):
    """Less only where a thread has fewer lanes of one row, next to 16 bytes of x.

    Lanes that follow different axes find their rows one by one.
    """
    lanes = 16 // launch.dtype.itemsize // (2 if launch.style == "interleaved" else 1)
    width = 4 if launch.lane_axes else min(16, 4 * lanes)
    assert audit(launch, target).widths("cos_sin_cache_ptr") == {width}


@pytest.mark.parametrize("name", ON_ALL)
def test_amd_accesses_are_whole_dwords(name: str):
    """gfx942: no access below 4 bytes, so no element is moved by itself."""
    found = audit(SHIPPED[name], "gfx942")
    assert min(found.widths("any")) >= 4, found.accesses


@pytest.mark.parametrize("layout", ["odd_stride", "odd_pointer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_accesses_would_be_seen(layout: str, dtype: torch.dtype):
    """The twin: memory that is not 16-byte aligned is read one element at a time, still right."""
    found = audit(Launch(layout=layout, dtype=dtype), "sm_90")
    assert found.widths("q_ptr", "k_ptr") == {dtype.itemsize}
    assert found.widths("q_out_ptr", "k_out_ptr") == {16}  # fresh outputs stay aligned
    assert found.spill_bytes == 0


def test_spills_would_be_seen():
    """The twin: held to 24 registers, a thread with 16 elements must spill."""
    compiled = compile_launch(Launch(), "sm_90", maxnreg=24)
    assert ".maxnreg 24" in compiled.asm["ptx"]
    found = ptxas_report(compiled.asm["ptx"])
    assert found["registers"] <= 24
    assert found["spill_bytes"] > 0


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("inverse", [False, True])
def test_rounding_does_not_hang_on_a_compiler_flag(style: str, inverse: bool):
    """Every fused multiply-add is written out: fusion finds no sum to change."""
    launch = Launch(style=style, inverse=inverse, computes_rows=False)
    arguments = launch.arguments()
    lanes_per_thread = arguments["BLOCK"] // (32 * arguments["num_warps"])
    for fused in (True, False):
        ptx = compile_launch(launch, "sm_90", enable_fp_fusion=fused).asm["ptx"]
        fused_sums = re.findall(r"\bfma\.rn\.f32.*", ptx)
        # Triton 3.6 negates by a subtraction from zero, which fusion may write as such a sum.
        kept = [line for line in fused_sums if not line.endswith("0f00000000;")]
        # Two channels a lane, in the code for q and in the code for k.
        assert len(kept) == lanes_per_thread * 2 * 2
        assert not re.findall(r"\badd\.(?:\w+\.)*f32", ptx)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", NVIDIA)
def test_16_bit_values_are_widened_before_arithmetic(dtype: torch.dtype, target: str):
    """float32 inside, one rounding: each stored value comes from one conversion of its own."""
    launch = Launch(dtype=dtype, computes_rows=False)
    ptx = compile_launch(launch, target).asm["ptx"]
    assert not re.findall(r"\b(?:add|sub|mul|fma|neg)\.\S*(?:bf16|f16)", ptx)
    assert re.findall(r"\bcvt\.rn\.\S*(?:bf16|f16)\S*\.f32", ptx)


def binary(launch: Launch) -> tuple[object, ...]:
    """Everything of a launch that selects a binary: all but sizes, strides and memory."""
    return tuple(
        (value.dtype, value.storage_offset() % 16) if isinstance(value, Tensor) else (name, value)
        for name, value in launch.arguments().items()
        if name == name.upper() or name == "num_warps" or isinstance(value, Tensor)
    )


def test_token_counts_share_two_binaries():
    """One for decode and one for prefill, whatever the count: nothing compiles while serving."""
    counts = (1, 2, 3, 16, 17, 64, 65, 256, 4095, 4096, 100003)
    assert len({binary(Launch(tokens=tokens)) for tokens in counts}) == 2
    assert len({binary(Launch(tokens=tokens)) for tokens in counts if tokens > 64}) == 1


def test_strides_share_a_binary():
    """Aligned slices of any packed projection and contiguous tensors run the same code."""
    launches = [Launch(layout=layout) for layout in ("contiguous", "packed_qkv")]
    assert len({binary(launch) for launch in launches}) == 1
    assert binary(Launch(layout="odd_stride")) != binary(launches[0])  # the twin


# Registers a thread. 64 let an SM keep 1024 threads in flight, as many as hide its memory latency.
# A decode step has too few programs to fill the SMs, so there a few more cost nothing; Triton 3.6
# needs a few more than later ones for three axes.
CEILINGS = {"prefill": 64, "interleaved": 64, "table only": 64, "three axes": 72, "decode": 72}


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("name", CEILINGS)
def test_register_ceiling(name: str, target: str):
    assert audit(SHIPPED[name], target).registers <= CEILINGS[name]
