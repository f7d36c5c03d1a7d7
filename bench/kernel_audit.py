"""Compiles every shipped variant of the Triton kernel for GPUs that are not there, and reads it.

    python -m bench.kernel_audit [--quick] [--targets sm_90,gfx942] [--json] [--write DIR]

A variant is described by tensors on ``meta``; the launcher itself turns it into kernel arguments,
so that what is compiled here is what would be launched. Exit status 1 when a gate fails.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from rope_compile.kernels import triton_rope

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
Q_AND_K = ("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")

# ---------------------------------------------------------------------------------------- variants


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of the operator, as shapes; the fields are those that change code."""

    tokens: int = 4096
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    rotary_dim: int | None = None
    rotary_offset: int = 0
    dtype: torch.dtype = torch.bfloat16
    positions_dtype: torch.dtype = torch.int64
    style: str = "half"
    lane_axes: tuple[int, ...] = ()
    layout: str = "contiguous"  # or packed_qkv, odd_stride, odd_pointer
    inverse: bool = False
    in_place: bool = False
    exact_phase: bool = False
    computes_rows: bool = True  # inv_freq is given
    batch: int = 1

    @property
    def width(self) -> int:
        """Channels that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def aligned(self) -> bool:
        """Whether 16-byte accesses are possible at all."""
        return not self.layout.startswith("odd")

    @property
    def full_width(self) -> bool:
        """Whether the two channels of a pair follow different axes."""
        return len(self.lane_axes) > self.width // 2

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), self.style, str(self.width)]
        if self.width < self.head_dim:
            parts.append(f"of {self.head_dim} {'last' if self.rotary_offset else 'first'}")
        if self.lane_axes:
            form = "in blocks" if [*self.lane_axes] == sorted(self.lane_axes) else "alternating"
            form = "over the full width" if self.full_width else form
            parts.append(f"{max(self.lane_axes) + 1} axes {form}")
        parts.append("in place" if self.in_place else "out of place")
        for field, word in (
            (self.inverse, "inverse"),
            (self.positions_dtype == torch.int32, "int32 positions"),
            (not self.computes_rows, "table only"),
            (self.exact_phase, "exact phase"),
            (self.layout != "contiguous", self.layout),
        ):
            parts += [word] if field else []
        return " ".join(parts)

    def tensors(self) -> list[Tensor]:
        """q and k, ``[batch, tokens, heads, head_dim]`` on meta."""
        total = sum(self.heads) + (self.heads[1] if self.layout == "packed_qkv" else 0)
        width = total * self.head_dim
        row = width + (self.layout == "odd_stride")
        start = int(self.layout == "odd_pointer")
        count = self.batch * self.tokens
        memory = torch.empty(start + count * row, dtype=self.dtype, device="meta")[start:]
        packed = memory.view(self.batch, self.tokens, row)[..., :width]
        packed = packed.unflatten(-1, (total, self.head_dim))
        slices = packed.split([*self.heads, total - sum(self.heads)], dim=2)[:2]
        if self.layout == "contiguous":
            slices = [x.contiguous() for x in slices]
        return list(slices)

    def grid_and_arguments(
        self, warp_size: int = 32
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """What the launcher would launch, and with which arguments."""
        inputs = self.tensors()
        pairs = [
            (x if self.in_place else torch.empty(x.shape, dtype=x.dtype, device="meta"), x)
            for x in inputs
        ]
        lead = (max(self.lane_axes) + 1,) if self.lane_axes else ()
        positions = torch.empty(
            *lead, self.batch, self.tokens, dtype=self.positions_dtype, device="meta"
        )
        table = torch.empty(8192, self.width, device="meta")
        phase = torch.float64 if self.exact_phase else torch.float32
        inv_freq = torch.empty(self.width // 2, dtype=phase, device="meta")
        return triton_rope.launch_arguments(
            pairs,
            positions,
            table,
            inv_freq if self.computes_rows else None,
            self.lane_axes,
            self.style,
            self.rotary_offset,
            1.0,
            self.inverse,
            warp_size,
        )

    def arguments(self, warp_size: int = 32) -> dict[str, object]:
        return self.grid_and_arguments(warp_size)[1]


# Full width, then the first channels alone, then the last ones.
WIDTHS = (
    *({"head_dim": width} for width in (32, 64, 80, 96, 128, 192, 256)),
    {"head_dim": 80, "rotary_dim": 32},  # Phi-2
    {"head_dim": 128, "rotary_dim": 96},  # Phi-4-mini
    {"head_dim": 256, "rotary_dim": 64},  # GPT-J
    {"head_dim": 192, "rotary_dim": 64, "rotary_offset": 128},  # DeepSeek's q
)
STYLES = ("half", "interleaved", "interleaved_to_half")
# Lanes of width 128 by axis: Qwen2-VL, Qwen3-VL, and HunYuan's pairs over two axes.
BLOCKS = (0,) * 16 + (1,) * 24 + (2,) * 24
ALTERNATING = (0, 1, 2) * 20 + (0,) * 4
FULL_WIDTH = (0,) * 32 + (1,) * 32 + (2,) * 32 + (3,) * 32


def _forms(style: str) -> list[dict[str, bool]]:
    """Out of place forward, inverse, and with the table alone; and in place."""
    forms = [{}, {"inverse": True}, {"computes_rows": False}]
    # interleaved_to_half moves channels, so the operator refuses it in place.
    return forms if style == "interleaved_to_half" else [*forms, {"in_place": True}]


def variants() -> list[Launch]:
    """Everything that is served or trained, one launch for each kind of code."""
    found: list[Launch] = []
    for style, width in itertools.product(STYLES, WIDTHS):
        found += [Launch(style=style, **width, **form) for form in _forms(style)]
        found.append(Launch(dtype=torch.float32, style=style, **width))
    for style, dtype in itertools.product(STYLES, (torch.float16, torch.float32, torch.float64)):
        found += [Launch(dtype=dtype, style=style, **form) for form in _forms(style)]
    multi_axis = [
        *(("half", axes) for axes in (BLOCKS, ALTERNATING, FULL_WIDTH)),
        *(("interleaved", axes) for axes in (BLOCKS, ALTERNATING)),
        ("half_blocks", BLOCKS),
    ]
    for style, axes in multi_axis:
        found += [Launch(style=style, lane_axes=axes, **form) for form in _forms(style)]
        found += [
            Launch(style=style, lane_axes=axes, positions_dtype=torch.int32),
            Launch(style=style, lane_axes=axes, dtype=torch.float32),
            Launch(style=style, lane_axes=axes, head_dim=192, rotary_dim=128),
        ]
    for style in STYLES:
        found += [
            Launch(style=style, exact_phase=True),
            Launch(style=style, positions_dtype=torch.int32),
        ]
        forms = [form for form in _forms(style) if form in ({}, {"in_place": True})]
        found += [Launch(style=style, layout="packed_qkv", **form) for form in forms]
        found += [
            Launch(style=style, layout=layout, dtype=dtype, **form)
            for layout in ("odd_stride", "odd_pointer")
            for dtype in (torch.bfloat16, torch.float32)
            for form in forms
        ]
    return list(dict.fromkeys(found))


def quick_variants() -> list[Launch]:
    """One of each kind, in half a minute: what CI compiles."""
    return [
        *(Launch(style=style) for style in STYLES),
        *(Launch(style=style, dtype=torch.float32) for style in STYLES),
        Launch(style="interleaved_to_half", inverse=True),
        Launch(head_dim=32),
        Launch(head_dim=80),
        Launch(head_dim=192),
        Launch(head_dim=80, rotary_dim=32),
        Launch(head_dim=192, rotary_dim=64, rotary_offset=128),
        Launch(dtype=torch.float64),
        Launch(layout="packed_qkv", in_place=True),
        Launch(computes_rows=False),
        Launch(lane_axes=BLOCKS, style="half_blocks", in_place=True),
        Launch(lane_axes=ALTERNATING),
        Launch(lane_axes=FULL_WIDTH),
        Launch(layout="odd_stride"),
    ]


# ------------------------------------------------------------------------------------ machine code


def compile_launch(launch: Launch, target: str, **changed: object):
    """The binary that Triton would build for this launch on ``target``.

    ``changed`` replaces arguments of the kernel or options of the launch: how a twin is made wrong.
    """
    kernel = triton_rope.rope_kernel
    arguments = launch.arguments(TARGETS[target].warp_size) | changed
    signature, constexprs, divisible = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTER[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            if aligned and not parameter.do_not_specialize:
                divisible[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            assert parameter.do_not_specialize, f"{parameter.name} would multiply binaries"
            signature[parameter.name] = "i32"
    source = triton.compiler.ASTSource(kernel, signature, constexprs, divisible)
    # What is no parameter of the kernel is an option of the launch, such as num_warps.
    with warnings.catch_warnings():
        # Triton 3.9 announces another default. Nothing here hangs on it: fusion finds no sum.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")
        return triton.compile(source, target=TARGETS[target], options=arguments)


Accesses = dict[str, "collections.Counter[int]"]  # "q_ptr load" -> bytes of an access -> count


@dataclasses.dataclass(frozen=True)
class Audit:
    """What one binary does: bytes of every access to each tensor, and what it keeps where."""

    accesses: Accesses
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    registers: int

    def widths(self, *tensors: str) -> set[int]:
        """Bytes of the accesses to these pointers, loads and stores."""
        found = [widths for name, widths in self.accesses.items() if name.split()[0] in tensors]
        return set().union(*found)


def _follow(
    origin: dict[str, set[str]],
    flows: list[tuple[str, list[str]]],
    accesses: list[tuple[str, int, str]],
) -> Accesses:
    """Sort accesses by the pointer parameters that their addresses come from.

    An address is one pointer parameter plus offsets, and reaches its access through integer
    instructions only, so names are propagated until nothing changes. What reaches no parameter (a
    coefficient of a library function) is listed as "constant".
    """
    size = -1
    while size != (size := sum(map(len, origin.values()))):
        for target, sources in flows:
            reached = set().union(*(origin.get(source, set()) for source in sources))
            if reached:
                origin.setdefault(target, set()).update(reached)
    table: Accesses = collections.defaultdict(collections.Counter)
    for kind, width, address in accesses:
        reached = origin.get(address, {"constant"})
        table[f"{'+'.join(sorted(reached))} {kind}"][width] += 1
    return dict(table)


def ptx_accesses(ptx: str, names: Sequence[str]) -> Accesses:
    """Accesses to global memory by tensor; ``names`` are the kernel's parameters in order."""
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("\n}")]  # device functions behind it reuse the register names
    origin: dict[str, set[str]] = {}
    flows: list[tuple[str, list[str]]] = []
    accesses: list[tuple[str, int, str]] = []
    for line in entry.splitlines():
        found = re.search(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", line)
        if found:
            name = names[int(found[2])]
            if name.endswith("_ptr"):
                origin[found[1]] = {name}
            continue
        found = re.search(r"\b(ld|st)\.global([.\w:]*)\s.*\[\s*(%\w+)", line)
        if found:
            vector = re.search(r"\.v(\d)", found[2])
            bits = int(re.findall(r"\.[bfusd](\d+)", found[2])[-1])
            width = int(vector[1] if vector else 1) * bits // 8
            accesses.append(("load" if found[1] == "ld" else "store", width, found[3]))
            continue
        registers = re.findall(r"%r[dsq]?\d+", line)
        if len(registers) > 1 and not re.search(r"\b(?:ld|st|setp|atom)\b", line):
            flows.append((registers[0], registers[1:]))
    return _follow(origin, flows, accesses)


BYTES_OF_LLVM = {"half": 2, "bfloat": 2, "float": 4, "double": 8}
LLVM_TYPE = r"(?:<(\d+) x )?(half|bfloat|float|double|i\d+)>?"


def llvm_accesses(llir: str, names: Sequence[str]) -> Accesses:
    """The same from LLVM's last form of the kernel, for targets whose assembly hides addresses."""
    body = llir[re.search(r"^define .*@rope_kernel\(", llir, re.M).start() :]
    body = body[: body.index("\n}")]
    heading, *lines = body.splitlines()
    # One parameter for each name; later ones belong to the compiler.
    parameters = re.findall(r"(%[\w.]+)(?=[,)])", heading)
    origin = {
        parameter: {name}
        for parameter, name in zip(parameters, names, strict=False)
        if name.endswith("_ptr")
    }
    flows: list[tuple[str, list[str]]] = []
    accesses: list[tuple[str, int, str]] = []
    for line in lines:
        found = re.search(rf"= load {LLVM_TYPE}, ptr addrspace\(1\) (%[\w.]+)", line) or re.search(
            rf"store {LLVM_TYPE} \S+, ptr addrspace\(1\) (%[\w.]+)", line
        )
        if found:
            size = BYTES_OF_LLVM.get(found[2]) or int(found[2][1:]) // 8
            kind = "load" if "= load" in line else "store"
            accesses.append((kind, int(found[1] or 1) * size, found[3]))
            continue
        found = re.match(r"\s*(%[\w.]+) = (?!load|icmp|fcmp)(.*)", line)
        if found:
            flows.append((found[1], re.findall(r"%[\w.]+", found[2])))
    return _follow(origin, flows, accesses)


GCN_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def gcn_accesses(gcn: str) -> Accesses:
    """Accesses in AMD's assembly, of whichever tensor."""
    table: Accesses = collections.defaultdict(collections.Counter)
    for kind, size in re.findall(r"(?:global|buffer)_(load|store)_(\w+)", gcn):
        # Everything below a dword has a name of its own: ushort, short_d16_hi, ubyte ...
        table[f"any {kind}"][GCN_BYTES.get(size, 2)] += 1
    return dict(table)


def ptxas_report(ptx: str) -> dict[str, int]:
    """Registers, spills and stack, from the assembler that the Triton wheel brings."""
    architecture = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        assembler = get_ptxas(int(architecture[2])).path
        done = subprocess.run(
            [assembler, "-v", f"--gpu-name={architecture[1]}", source, "-o", f"{folder}/kernel.o"],
            check=True,
            capture_output=True,
            text=True,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "stack_bytes": int(re.search(r"(\d+) bytes stack frame", done.stderr)[1]),
    }


def read_binary(compiled) -> Audit:
    """What a compiled kernel does."""
    names = [p.name for p in triton_rope.rope_kernel.params if not p.is_constexpr]
    shared = compiled.metadata.shared
    if "ptx" in compiled.asm:
        ptx = compiled.asm["ptx"]
        return Audit(ptx_accesses(ptx, names), shared, **ptxas_report(ptx))
    gcn = compiled.asm["amdgcn"]
    # Scalar registers spill to lanes of vector registers, which costs no memory.
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", gcn)
    stack = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", gcn)[1])
    accesses = llvm_accesses(compiled.asm["llir"], names)
    # Had the assembly other widths, LLVM's form would prove nothing: then all count as x's.
    if _all_widths(accesses) != _all_widths(assembled := gcn_accesses(gcn)):
        accesses = assembled
    return Audit(
        accesses,
        shared,
        spill_bytes=max(4 * int(spills[1]), stack),
        stack_bytes=stack,
        registers=int(re.search(r"\.vgpr_count:\s+(\d+)", gcn)[1]),
    )


def _all_widths(accesses: Accesses) -> dict[str, set[int]]:
    """Widths in bytes, of all tensors, loads and stores apart."""
    return {
        kind: {width for name, widths in accesses.items() if kind in name for width in widths}
        for kind in ("load", "store")
    }


def audit(launch: Launch, target: str, **changed: object) -> Audit:
    """Compile one launch and read its machine code; of an unchanged kernel only once."""
    if changed:
        return read_binary(compile_launch(launch, target, **changed))
    return _audit_once(launch, target)


@functools.cache
def _audit_once(launch: Launch, target: str) -> Audit:
    return read_binary(compile_launch(launch, target))


# ------------------------------------------------------------------------------------------- gates

# A thread. NVIDIA: 64 let an SM keep 1024 threads in flight, 64 KB of q and k with two heads under
# way; ptxas as Triton before 3.9 brings it takes 66 for blocks of half style in place, so 896
# threads. AMD: 512 registers serve a SIMD's lane, so 96 leave 5 wavefronts of 64, 40 KB a compute
# unit.
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
REGISTERS = {"cuda": 72 if OLDER else 64, "hip": 96}
# Bytes. That ptxas also parks two of 56 registers at width 80 in half style, on sm_80 alone.
SPILLS = {"sm_80": 16} if OLDER else {}


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant on one target, and what is wrong with it."""

    target: str
    variant: str
    aligned: bool
    spill_bytes: int
    wide: bool
    narrowest_bytes: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    bytes_per_token: int
    minimum_bytes_per_token: int
    note: str
    faults: tuple[str, ...]


def bytes_per_token(launch: Launch) -> tuple[int, int]:
    """What the kernel asks of the caches for a token, and the least that any kernel could.

    A group of heads reads the table row once; the least is once for all heads, which is also what
    leaves the DRAM, because the groups of a token run at one time. Positions are read for the table
    and again for the test whether one lies outside.
    """
    arguments = launch.arguments()
    moved = launch.width if launch.in_place else launch.head_dim
    channels = 2 * sum(launch.heads) * moved * launch.dtype.itemsize
    row = 4 * launch.width * (2 if launch.full_width else 1)
    position = arguments["AXIS_COUNT"] * launch.positions_dtype.itemsize
    groups = sum(-(-heads // arguments["heads_per_program"]) for heads in launch.heads)
    reads = groups * (row + position * (2 if launch.computes_rows else 1))
    return channels + reads, channels + row + position


def faults(found: Audit, launch: Launch, target: str) -> tuple[str, ...]:
    """The gates that a binary fails.

    Memory that is not aligned moves by elements: each has an address, or neighbours go to threads
    side by side and on through shared memory. That is Triton's choice, rare, and slow either way.
    """
    limit = REGISTERS[TARGETS[target].backend]
    failed = []
    if found.spill_bytes > SPILLS.get(target, 0):
        failed.append(f"spills {found.spill_bytes} bytes")
    if not launch.aligned:
        return tuple(failed)
    if found.shared_bytes:
        failed.append(f"uses {found.shared_bytes} bytes of shared memory")
    if found.registers > limit:
        failed.append(f"needs {found.registers} registers, more than {limit}")
    least = least_access(launch)
    widths = x_widths(found)
    if not widths or min(widths) < least or max(widths) > 16:
        failed.append(f"moves q or k in accesses of {sorted(widths)} bytes, not {least}")
    return tuple(failed)


def x_widths(found: Audit) -> set[int]:
    """Widths of the accesses to q and k; of all accesses where they are not told apart."""
    return found.widths(*Q_AND_K, "any")


def least_access(launch: Launch) -> int:
    """Bytes that each access to aligned q and k must have."""
    if launch.full_width:
        return min(16, triton_rope.LANES_OF_FULL_WIDTH_VECTOR * launch.dtype.itemsize)
    return 16


def note(launch: Launch) -> str:
    """Why a row is exempt from a gate."""
    if not launch.aligned:
        return "unaligned: gated on spills alone"
    if least_access(launch) < 16:
        return "two angles a lane: 8 bytes, or 80 registers"
    return ""


def row(launch: Launch, target: str) -> Row:
    found = audit(launch, target)
    moved, minimum = bytes_per_token(launch)
    return Row(
        target=target,
        variant=str(launch),
        aligned=launch.aligned,
        spill_bytes=found.spill_bytes,
        wide=x_widths(found) == {16},
        narrowest_bytes=min(x_widths(found)),
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        stack_bytes=found.stack_bytes,
        bytes_per_token=moved,
        minimum_bytes_per_token=minimum,
        note=note(launch),
        faults=faults(found, launch, target),
    )


def _row(job: tuple[Launch, str]) -> Row:
    return row(*job)


def collect(
    launches: Iterable[Launch],
    targets: Sequence[str],
    jobs: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Row]:
    """Rows of all launches on all targets, compiled in ``jobs`` processes."""
    work = [(launch, target) for target in targets for launch in launches]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        found: Iterable[Row] = map(_row, work)
        if jobs > 1:
            pool = concurrent.futures.ProcessPoolExecutor(
                jobs, mp_context=multiprocessing.get_context("spawn")
            )
            found = stack.enter_context(pool).map(_row, work, chunksize=4)
        for one in found:
            rows.append(one)
            progress(len(rows), len(work))
    return rows


# ------------------------------------------------------------------------------------------ output

COLUMNS = ["spills", "wide", "registers", "shared", "stack", "bytes/token", "least", "over"]


def cells(found: Row) -> list[str]:
    """A row's columns as text, in the order of COLUMNS."""
    over = found.bytes_per_token / found.minimum_bytes_per_token - 1
    return [
        str(found.spill_bytes),
        "yes" if found.wide else f"{found.narrowest_bytes} bytes",
        str(found.registers),
        str(found.shared_bytes),
        str(found.stack_bytes),
        str(found.bytes_per_token),
        str(found.minimum_bytes_per_token),
        f"{over:.1%}",
    ]


def verdict(found: Row) -> str:
    return f"FAILS: {'; '.join(found.faults)}" if found.faults else found.note


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines for each target, aligned and unaligned memory apart, and how many gates failed."""
    lines = []
    for (target, aligned), group in itertools.groupby(
        sorted(rows, key=lambda found: (list(TARGETS).index(found.target), not found.aligned)),
        key=lambda found: (found.target, found.aligned),
    ):
        of = list(group)
        lines.append(
            f"{target}, {'aligned' if aligned else 'unaligned'}: {len(of)} variants, "
            f"{sum(found.wide for found in of)} wide, "
            f"up to {max(found.registers for found in of)} registers, "
            f"{max(found.spill_bytes for found in of)} bytes spilled and "
            f"{max(found.shared_bytes for found in of)} of shared memory"
        )
    failed = sum(bool(found.faults) for found in rows)
    lines.append(f"{failed} of {len(rows)} variants fail a gate" if failed else "every gate holds")
    return lines


LEGEND = """\
spills, shared, stack: bytes. wide: every access to q and k moves 16 bytes. bytes/token: what the
kernel asks of the caches for one of 4096 tokens with 32 q heads and 8 k heads. least: the same with
the table row and the positions read once for all heads, which is what leaves the DRAM."""


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": get_ptxas(90).version,
    }


def text_table(rows: Sequence[Row]) -> str:
    """Aligned columns, a block for each target."""
    lines = [", ".join(f"{name} {version}" for name, version in versions().items()), LEGEND]
    width = max(len(found.variant) for found in rows)
    for target in dict.fromkeys(found.target for found in rows):
        lines += ["", f"{target:{width}}  " + " ".join(f"{name:>11}" for name in COLUMNS)]
        for found in rows:
            if found.target == target:
                values = " ".join(f"{value:>11}" for value in cells(found))
                lines.append(f"{found.variant:{width}}  {values}  {verdict(found)}".rstrip())
    return "\n".join([*lines, "", *summary(rows)])


def markdown_table(rows: Sequence[Row]) -> str:
    """The same for a reader of the repository."""
    lines = ["# Kernel audit", "", "Written by `python -m bench.kernel_audit --write DIR`.", ""]
    lines += [f"* {name} {version}" for name, version in versions().items()]
    lines += ["", LEGEND, "", *(f"* {line}" for line in summary(rows))]
    for target in dict.fromkeys(found.target for found in rows):
        lines += ["", f"## {target}", "", f"| variant | {' | '.join(COLUMNS)} | |"]
        lines.append("|---|" + "--:|" * len(COLUMNS) + "---|")
        lines += [
            f"| {found.variant} | {' | '.join(cells(found))} | {verdict(found)} |"
            for found in rows
            if found.target == target
        ]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row]) -> str:
    report = {
        "versions": versions(),
        "gates": {"registers": REGISTERS},
        "rows": [dataclasses.asdict(found) for found in rows],
        "failed": sum(bool(found.faults) for found in rows),
    }
    return json.dumps(report, indent=1)


def show_progress(done: int, total: int) -> None:
    """A line on stderr that overwrites itself; one line a tenth where that is not a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} variants compiled", end=end, file=sys.stderr, flush=True)
    elif done == total or done % max(1, total // 10) == 0:
        print(f"{done}/{total} variants compiled", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel_audit", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="one variant of each kind")
    parser.add_argument("--targets", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--write", type=Path, metavar="DIR", help="kernel_audit.md and .json there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    if unknown := [target for target in targets if target not in TARGETS]:
        parser.error(f"targets must be among {', '.join(TARGETS)}, got {', '.join(unknown)}")
    launches = quick_variants() if options.quick else variants()
    rows = collect(launches, targets, options.jobs, show_progress)
    print(as_json(rows) if options.json else text_table(rows))
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "kernel_audit.md").write_text(markdown_table(rows))
        (options.write / "kernel_audit.json").write_text(as_json(rows) + "\n")
    return int(any(found.faults for found in rows))


if __name__ == "__main__":
    sys.exit(main())
