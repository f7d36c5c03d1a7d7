"""The models, sizes and byte counts that a benchmark covers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import rope_compile as rc
from rope_compile.axes import Axes, Style

__all__ = ["DTYPES", "IN_PLACE", "OUT_EXISTING", "OUT_FRESH", "SHAPES", "Cell", "Shape", "cells"]

# Where the result goes; the three are reported apart, none stands for another.
IN_PLACE = "in_place"
OUT_EXISTING = "out_existing"  # into memory whose pages are mapped already
OUT_FRESH = "out_fresh"  # as the allocator gives it, page faults included

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Rows of every table: the length that current models serve, and the range of random positions.
ROWS = 131072
# Below this many tokens positions are random, as in a decoding batch; from here on they count up.
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """The rotary embedding of one model; widths in channels.

    ``q_row`` and ``k_row`` are the widths of the rows that q and k are the last channels of, where
    the model slices them out of something wider; 0 means that they are contiguous.
    """

    id: str
    model: str
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    style: Style = "half"
    axes: Axes | None = None
    q_row: int = 0
    k_row: int = 0

    @property
    def layout(self) -> str:
        return "slices" if self.q_row else "BSHD"

    @property
    def axis_count(self) -> int:
        return 1 + max(self.config.lane_axes, default=0)

    @property
    def config(self) -> rc.RopeConfig:
        return rc.RopeConfig(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            max_position=ROWS,
            base=500_000.0,
            style=self.style,
            axes=self.axes,
        )

    def bytes(self, tokens: int, itemsize: int, form: str) -> int:
        """Least bytes that a call must read and write; table row once a token, int64 positions.

        Out of place the channels that pass through are copied, in place they are left alone.
        """
        width = self.rotary_dim if form == IN_PLACE else self.head_dim
        table_and_positions = 4 * self.rotary_dim + 8 * self.axis_count
        return self.copy_bytes(tokens, itemsize, width) + tokens * table_and_positions

    def copy_bytes(self, tokens: int, itemsize: int, width: int = 0) -> int:
        """Bytes that ``copy_`` of q and of k reads and writes."""
        width = width or self.head_dim
        return 2 * tokens * (self.q_heads + self.k_heads) * width * itemsize


SHAPES = {
    shape.id: shape
    for shape in (
        Shape("L8", "Llama-3-8B, Qwen3-8B", 32, 8, 128, 128),
        Shape("L70", "Llama-3-70B", 64, 8, 128, 128),
        Shape("L70t", "Llama-3-70B, 8-way tensor parallel", 8, 1, 128, 128),
        Shape("Q30", "Qwen3-30B-A3B", 32, 4, 128, 128),
        Shape("DS", "DeepSeek-V3", 128, 1, 64, 64, "interleaved", q_row=192, k_row=576),
        Shape("G3", "Gemma-3-4B", 8, 4, 256, 256),
        Shape("P4", "Phi-4-mini", 24, 8, 128, 96),
        Shape("P2", "Phi-2", 32, 32, 80, 32),
        Shape("P3", "Phi-3-mini", 32, 32, 96, 96),
        Shape("GJ", "GPT-J-6B", 16, 16, 256, 64, "interleaved"),
        Shape("QV", "Qwen2-VL-7B", 28, 4, 128, 128, axes=rc.ChunkedAxes((16, 24, 24))),
        Shape("FX", "FLUX.1", 24, 24, 128, 128, "interleaved", axes=rc.AxialAxes((16, 56, 56))),
        Shape("GO", "gpt-oss-120b", 64, 8, 64, 64),
        Shape("X80", "width 80", 32, 8, 80, 80),
        Shape("X192", "width 192", 32, 8, 192, 192),
    )
}


@dataclass(frozen=True)
class Cell:
    """One place of the matrix: every provider is timed here, in the same rounds."""

    shape: Shape
    dtype: str
    tokens: int
    threads: int  # 0 on a GPU

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def positions(self) -> str:
        return "random" if self.tokens < PREFILL_TOKENS else "contiguous"

    @property
    def copy_bytes(self) -> int:
        return self.shape.copy_bytes(self.tokens, self.torch_dtype.itemsize)

    def bytes(self, form: str) -> int:
        return self.shape.bytes(self.tokens, self.torch_dtype.itemsize, form)


_CPU_TOKENS = (1, 32, 512, 2048, 4096)
_GPU_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192, 16384, 32768)


def cells(
    device: str,
    *,
    quick: bool = False,
    shapes: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = (),
    tokens: tuple[int, ...] = (),
    threads: tuple[int, ...] = (),
) -> list[Cell]:
    """The matrix for a device; what is given replaces the default of that dimension.

    Cells that share shape, dtype and threads follow each other: one compilation serves them.
    """
    on_cpu = device == "cpu"
    if not shapes:
        shapes = ("L8",) if quick else ("L8", "DS", "P4", "GJ") if on_cpu else tuple(SHAPES)
    if not threads or not on_cpu:
        available = torch.get_num_threads()
        threads = ((min(2, available),) if quick or available < 2 else (1, 2)) if on_cpu else (0,)
    found = []
    for name in shapes:
        shape = SHAPES[name]
        for dtype in dtypes or _dtypes(name, on_cpu, quick):
            for count in threads:
                for size in tokens or _tokens(name, on_cpu, quick):
                    found.append(Cell(shape, dtype, size, count))
    return found


def _dtypes(shape: str, on_cpu: bool, quick: bool) -> tuple[str, ...]:
    if quick:
        return ("float32", "bfloat16")
    if shape == "L8":
        return tuple(DTYPES)
    return ("float32", "bfloat16") if on_cpu else ("bfloat16",)


def _tokens(shape: str, on_cpu: bool, quick: bool) -> tuple[int, ...]:
    sizes = _CPU_TOKENS if on_cpu else _GPU_TOKENS
    if quick:
        return (1, 512, 4096) if on_cpu else (1, 128, 8192)
    return (*sizes, 8192) if on_cpu and shape == "L8" else sizes
