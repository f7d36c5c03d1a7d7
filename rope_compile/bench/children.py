"""What needs a process of its own: another kernel, or another way to allocate.

Both are decided when a process starts. The child runs cells of the matrix by the same protocol,
with its own yardsticks in its own rounds, and hands its rows back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import rope_compile as rc
from rope_compile.bench.matrix import blocks, run_block
from rope_compile.bench.memory import FRESH_PAGES_BYTES
from rope_compile.bench.providers import OURS
from rope_compile.bench.rows import Row, read_text, text
from rope_compile.bench.shapes import OUT_EXISTING, OUT_FRESH, SHAPES, Cell

__all__ = ["FALLBACK", "existing_rows", "fallback_rows", "gets_fresh_pages"]

FALLBACK = f"{OURS}_fallback"
_TIMEOUT_S = 1800
_NO_NATIVE = {"ROPE_COMPILE_NATIVE": "0"}
# glibc (malloc.h): no allocation by mmap, and nothing is given back to the system.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def fallback_rows(cells: Sequence[Cell], rounds: int | None) -> list[Row]:
    """Our rows without the native kernel, against HF eager, as provider `FALLBACK`."""
    found = _child(cells, rounds, ("hf_eager",), _NO_NATIVE)
    named = [replace(row, provider=FALLBACK) for row in found if row.provider == OURS]
    return [row for row in named if row.ratio_to == "hf_eager" or row.y_50 is None]


def gets_fresh_pages(cell: Cell) -> bool:
    """Whether an output of a cell is so large that every call gets fresh pages for it."""
    heads = max(cell.shape.q_heads, cell.shape.k_heads)
    size = cell.tokens * heads * cell.shape.head_dim * cell.torch_dtype.itemsize
    return size >= FRESH_PAGES_BYTES


def existing_rows(cells: Sequence[Cell], rounds: int | None) -> list[Row]:
    """The functional call with outputs in memory that is mapped already, beside a copy.

    No operator takes outputs. So the call runs in a process whose allocator hands out again what
    the call before gave back: the public call without the page faults. That is checked by counting
    them. Only the copy, which needs no allocation, is a fair yardstick there.
    """
    rows = []
    for row in _child(cells, rounds, (), _KEEP_MEMORY):
        if row.provider != OURS or row.form != OUT_FRESH:
            continue
        row = replace(row, form=OUT_EXISTING, ratio_to="", ratio=None, ratio_low=None)
        row = replace(row, ratio_high=None, note=f"in a process of its own; {row.note}")
        if row.y_50 is not None and not _few_faults(row.note):
            row = Row(
                provider=row.provider, form=row.form, shape=row.shape, dtype=row.dtype,
                tokens=row.tokens, threads=row.threads,
                note="not run: the C library's allocator does not keep memory here",
            )  # fmt: skip
        rows.append(row)
    # One row a cell: without a yardstick, the rows of our references are all the same.
    return list({(row.shape, row.dtype, row.tokens, row.threads): row for row in rows}.values())


def _few_faults(note: str) -> bool:
    counts = [part.split()[0] for part in note.split("; ") if part.endswith(" page faults")]
    return bool(counts) and int(counts[0]) < 64


def _child(
    cells: Sequence[Cell],
    rounds: int | None,
    peers: tuple[str, ...],
    environment: Mapping[str, str],
) -> list[Row]:
    plan = {
        "cells": [(cell.shape.id, cell.dtype, cell.tokens, cell.threads) for cell in cells],
        "peers": peers,
        "rounds": rounds,
    }
    search = (str(Path(rc.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    path = {"PYTHONPATH": os.pathsep.join(filter(None, search))}
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(plan),
            env={**os.environ, **path, **environment},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no output"])[-1]
        return [Row(provider=OURS, form=OUT_FRESH, note=f"not run: {last_line}")]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Row(provider=OURS, form=OUT_FRESH, note=f"not run: {error}")]
    return read_text(child.stdout)


def main() -> None:
    """In the child: the cells of the plan on standard input, as CSV."""
    plan = json.load(sys.stdin)
    cells = [Cell(SHAPES[shape], *rest) for shape, *rest in plan["cells"]]
    rows = [
        row
        for block in blocks(cells)
        for found in run_block(
            block, torch.device("cpu"), peer_names=tuple(plan["peers"]), rounds=plan["rounds"]
        )
        for row in found
    ]
    sys.stdout.write(text(rows))


if __name__ == "__main__":
    main()
