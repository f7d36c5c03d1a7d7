"""Compiles the Triton kernel ahead of time for GPUs that are not there, and reads the machine code.

A launch is described by tensors on ``meta``; the launcher itself turns it into kernel arguments, so
that what is compiled here is what would be launched.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import subprocess
import tempfile
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

    def tensors(self) -> list[Tensor]:
        """q and k, ``[1, tokens, heads, head_dim]`` on meta."""
        total = sum(self.heads) + (self.heads[1] if self.layout == "packed_qkv" else 0)
        width = total * self.head_dim
        row = width + (self.layout == "odd_stride")
        start = int(self.layout == "odd_pointer")
        memory = torch.empty(start + self.tokens * row, dtype=self.dtype, device="meta")[start:]
        packed = memory.view(self.tokens, row)[:, :width].unflatten(1, (total, self.head_dim))
        slices = packed.split([*self.heads, total - sum(self.heads)], dim=1)[:2]
        if self.layout == "contiguous":
            slices = [x.contiguous() for x in slices]
        return [x[None] for x in slices]

    def arguments(self) -> dict[str, object]:
        """What the launcher would pass to the kernel."""
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        inputs = self.tensors()
        pairs = [(x if self.in_place else torch.empty(x.shape, **meta(x)), x) for x in inputs]
        lead = (max(self.lane_axes) + 1,) if self.lane_axes else ()
        positions = torch.empty(*lead, 1, self.tokens, dtype=self.positions_dtype, device="meta")
        table = torch.empty(8192, rotary_dim, device="meta")
        phase = torch.float64 if self.exact_phase else torch.float32
        inv_freq = torch.empty(rotary_dim // 2, dtype=phase, device="meta")
        _grid, arguments = triton_rope.launch_arguments(
            pairs,
            positions,
            table,
            inv_freq if self.computes_rows else None,
            self.lane_axes,
            self.style,
            self.rotary_offset,
            1.0,
            self.inverse,
        )
        return arguments


def meta(x: Tensor) -> dict[str, object]:
    return {"dtype": x.dtype, "device": "meta"}


def compile_launch(launch: Launch, target: str, **options: object):
    """The binary that Triton would build for this launch on ``target``."""
    arguments = launch.arguments()
    kernel = triton_rope.rope_kernel
    signature, constexprs, divisible = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTER[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                divisible[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            assert parameter.do_not_specialize, f"{parameter.name} would multiply binaries"
            signature[parameter.name] = "i32"
    source = triton.compiler.ASTSource(kernel, signature, constexprs, divisible)
    # What is no parameter of the kernel is an option of the launch, such as num_warps.
    return triton.compile(source, target=TARGETS[target], options=arguments | options)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What one binary does: bytes of every access to each tensor, and what it keeps where."""

    accesses: dict[str, collections.Counter[int]]  # "q_ptr load" -> bytes of one access -> count
    shared_bytes: int
    spill_bytes: int
    registers: int

    def widths(self, *tensors: str) -> set[int]:
        """Bytes of the accesses to these pointers, loads and stores."""
        found = [widths for name, widths in self.accesses.items() if name.split()[0] in tensors]
        return set().union(*found)


def pointer_accesses(ptx: str, names: list[str]) -> dict[str, collections.Counter[int]]:
    """Follow every address back to the kernel's pointer parameters, and sort accesses by tensor.

    An address register holds one pointer parameter plus offsets; pointers reach it through
    integer instructions only, so their names are propagated until nothing changes. What reaches
    no parameter (the coefficients of a library function) is listed as "constant".
    """
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("\n}")]  # device functions behind it reuse the register names
    parameters: dict[str, str] = {}
    flows: list[tuple[str, list[str]]] = []
    accesses: list[tuple[str, int, str]] = []
    for line in entry.splitlines():
        found = re.search(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", line)
        if found:
            parameters[found[1]] = names[int(found[2])]
            continue
        found = re.search(r"\b(ld|st)\.global([.\w:]*)\s.*\[\s*(%\w+)", line)
        if found:
            kind = "load" if found[1] == "ld" else "store"
            vector = re.search(r"\.v(\d)", found[2])
            bits = int(re.findall(r"\.[bfusd](\d+)", found[2])[-1])
            accesses.append((kind, int(vector[1] if vector else 1) * bits // 8, found[3]))
            continue
        registers = re.findall(r"%r[dsq]?\d+", line)
        if len(registers) > 1 and not re.search(r"\b(?:ld|st|setp|atom)\b", line):
            flows.append((registers[0], registers[1:]))
    origin = {register: {name} for register, name in parameters.items() if name.endswith("_ptr")}
    size = -1
    while size != (size := sum(map(len, origin.values()))):
        for target, sources in flows:
            reached = set().union(*(origin.get(source, set()) for source in sources))
            if reached:
                origin.setdefault(target, set()).update(reached)
    table: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for kind, width, register in accesses:
        reached = origin.get(register, {"constant"})
        table[f"{'+'.join(sorted(reached))} {kind}"][width] += 1
    return dict(table)


def ptxas_report(ptx: str) -> dict[str, int]:
    """Registers and spilled bytes, from the assembler that the Triton wheel brings.

    ``.local`` in PTX proves nothing: the trigonometry declares an array that ptxas removes.
    """
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
    }


@functools.cache
def audit(launch: Launch, target: str) -> Audit:
    """Compile one launch and read its machine code."""
    compiled = compile_launch(launch, target)
    if "ptx" in compiled.asm:
        names = [p.name for p in triton_rope.rope_kernel.params if not p.is_constexpr]
        ptx = compiled.asm["ptx"]
        return Audit(pointer_accesses(ptx, names), compiled.metadata.shared, **ptxas_report(ptx))
    gcn = compiled.asm["amdgcn"]
    dwords = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    accesses: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for kind, size in re.findall(r"(?:global|buffer)_(load|store)_(\w+)", gcn):
        # Everything below a dword has a name of its own: ushort, short_d16_hi, ubyte ...
        accesses[f"any {kind}"][dwords.get(size, 2)] += 1
    spills = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", gcn)
    registers = re.search(r"\.vgpr_count:\s+(\d+)", gcn)
    return Audit(dict(accesses), compiled.metadata.shared, sum(map(int, spills)), int(registers[1]))
