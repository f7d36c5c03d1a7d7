"""The Triton kernel's machine code, compiled ahead of time for GPUs that need not be here.

Each shipped configuration moves q and k in 16-byte accesses, keeps nothing in shared memory and
spills nothing. ``bench/kernel_audit.py`` finds out which access belongs to which tensor, and gates
many more variants; here is what has a reason of its own.
"""

from __future__ import annotations

import re

import pytest
import torch
import triton
from torch import Tensor

from bench.kernel_audit import (
    ALTERNATING,
    BLOCKS,
    FULL_WIDTH,
    POINTER,
    Q_AND_K,
    REGISTERS,
    TARGETS,
    Launch,
    audit,
    compile_launch,
    ptxas_report,
)
from rope_compile.kernels import triton_rope

NVIDIA = [name for name, target in TARGETS.items() if target.backend == "cuda"]

# What is served and trained: each differs from the first in one thing.
SHIPPED = {
    "prefill": Launch(),
    "interleaved": Launch(style="interleaved"),
    "interleaved to half": Launch(style="interleaved_to_half"),
    "half to interleaved": Launch(style="interleaved_to_half", inverse=True),
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
    "three axes": Launch(lane_axes=BLOCKS),
    "alternating axes": Launch(lane_axes=ALTERNATING),
    "blocks of half style": Launch(lane_axes=BLOCKS, style="half_blocks", in_place=True),
    "exact phase": Launch(exact_phase=True),
    "int32 positions": Launch(positions_dtype=torch.int32),
    "table only": Launch(computes_rows=False),
}


# sm_90 sees every configuration; the other targets those that stand for a kind of code.
ON_ALL = ("prefill", "interleaved", "first 96 of 128", "float32", "alternating axes")
CASES = [
    pytest.param(SHIPPED[name], target, id=f"{target}, {name}")
    for target in TARGETS
    for name in SHIPPED
    if target == "sm_90" or name in ON_ALL
]


@pytest.mark.parametrize(("launch", "target"), CASES)
def test_nothing_is_spilled_or_shared(launch: Launch, target: str):
    """Registers hold the table row and the heads; no program exchanges anything."""
    found = audit(launch, target)
    assert (found.spill_bytes, found.shared_bytes) == (0, 0)


@pytest.mark.parametrize(("launch", "target"), CASES)
def test_q_and_k_move_in_16_byte_accesses(launch: Launch, target: str):
    found = audit(launch, target)
    assert found.widths(*Q_AND_K) == {16}, found.accesses
    assert {*found.accesses} >= {"q_ptr load", "k_ptr load", "q_out_ptr store", "k_out_ptr store"}


@pytest.mark.parametrize(("launch", "target"), CASES)
def test_table_rows_are_read_in_16_byte_accesses(launch: Launch, target: str):
    """Less only where a thread has fewer lanes of one row, next to 16 bytes of x.

    Also where lanes alternate between axes: whole vectors of every axis, and a choice.
    """
    lanes = launch.arguments()["VECTOR"]
    assert audit(launch, target).widths("cos_sin_cache_ptr") == {min(16, 4 * lanes)}


@pytest.mark.parametrize("target", TARGETS)
def test_two_angles_a_lane_move_8_bytes(target: str):
    """Full-width axes: 8 lanes a thread would hold a table row of 32 registers."""
    found = audit(Launch(lane_axes=FULL_WIDTH), target)
    assert found.widths(*Q_AND_K) == {8}
    assert (found.spill_bytes, found.shared_bytes) == (0, 0)


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
    lanes_per_thread = launch.arguments()["VECTOR"]
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


def test_token_counts_share_a_binary():
    """Decode and prefill, whatever the count: nothing compiles while serving."""
    counts = (1, 2, 3, 16, 17, 64, 65, 256, 4095, 4096, 100003)
    assert len({binary(Launch(tokens=tokens)) for tokens in counts}) == 1


def test_strides_share_a_binary():
    """Aligned slices of any packed projection and contiguous tensors run the same code."""
    launches = [Launch(layout=layout) for layout in ("contiguous", "packed_qkv")]
    assert len({binary(launch) for launch in launches}) == 1
    assert binary(Launch(layout="odd_stride")) != binary(launches[0])  # the twin


@pytest.mark.parametrize("tokens", [1, 16, 100, 1000, 4096, 100_000, 2_000_000])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (1, 0), (128, 1), (7, 5)])
def test_grid_covers_every_head_of_every_token(tokens: int, heads: tuple[int, int]):
    """Once, with programs enough to fill a GPU wherever there are heads enough to make them."""
    grid, arguments = Launch(tokens=tokens, heads=heads, head_dim=64).grid_and_arguments()
    walked, blocks = arguments["heads_per_program"], -(-tokens // arguments["TOKENS"])
    assert grid[0] == sum(-(-count // walked) for count in heads)
    assert grid[1] * grid[2] >= blocks > grid[1] * (grid[2] - 1)
    assert max(grid[1:]) <= 65535
    assert 1 <= walked <= 8
    assert walked == 1 or grid[0] * blocks >= triton_rope.RESIDENT_PROGRAMS


def test_a_number_that_is_always_1_may_be_a_constant():
    """Inductor turns it into one, whatever the kernel says about specialisation."""
    kernel, arguments = triton_rope.rope_kernel, Launch().arguments()
    signature, constexprs = {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTER[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "constexpr"
            constexprs[(index,)] = value if parameter.is_constexpr else 1
    source = triton.compiler.ASTSource(kernel, signature, constexprs, {})
    assert triton.compile(source, target=TARGETS["sm_90"], options=arguments).asm["ptx"]


@pytest.mark.parametrize(("launch", "target"), [case for case in CASES if case.values[1] in NVIDIA])
def test_register_ceiling(launch: Launch, target: str):
    """64 let an SM keep 1024 threads in flight, as many as hide the latency of its memory."""
    assert audit(launch, target).registers <= REGISTERS["cuda"]
