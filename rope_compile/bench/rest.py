"""The speed of what is not a rotation: tables, look-ups, the import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import rope_compile as rc
from rope_compile.bench.protocol import spread
from rope_compile.bench.rows import Row
from rope_compile.bench.timers import loop

__all__ = ["setup_rows"]

_IMPORT = """
import time
import torch
start = time.perf_counter()
import rope_compile
print(time.perf_counter() - start)
"""


def setup_rows(device: torch.device, *, quick: bool) -> list[Row]:
    """Times of building and growing tables, of `get_rope`, and of the import in a new process."""
    rows, width, times = (131072 if quick else 1048576), 128, 1 if quick else 3
    rope = rc.RopeConfig(head_dim=width, max_position=rows)
    small = rc.RopeConfig(head_dim=width, max_position=8192)
    measured = {
        f"table of {rows} x {width}": _repeat(
            lambda: rc.RotaryEmbedding(rope, device), times, device
        ),
        "reserve of 131072 rows, from 8192": [_reserve(small, device) for _ in range(times)],
        "get_rope, miss, 8192 rows": [_miss(number, device) for number in range(times)],
        "get_rope, hit": [loop(lambda: rc.get_rope(small, device), 1000) for _ in range(5)],
        "import rope_compile, after torch": [_import() for _ in range(3 if quick else 5)],
    }
    return [_row(name, seconds) for name, seconds in measured.items()]


def _row(name: str, seconds: list[float]) -> Row:
    middle = spread(seconds)
    return Row(
        kernel=name,
        provider="rope_compile",
        mode="setup",
        y_50=middle.median * 1e6,
        y_20=middle.p20 * 1e6,
        y_80=middle.p80 * 1e6,
        rounds=len(seconds),
        threads=torch.get_num_threads(),
    )


def _repeat(call: Callable[[], object], times: int, device: torch.device) -> list[float]:
    return [_once(call, device) for _ in range(times)]


def _once(call: Callable[[], object], device: torch.device) -> float:
    def finished() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return loop(finished, 1)


def _reserve(config: rc.RopeConfig, device: torch.device) -> float:
    rope = rc.RotaryEmbedding(config, device)
    return _once(lambda: rope.reserve(131072), device)


def _miss(number: int, device: torch.device) -> float:
    """A configuration that nobody has asked for before."""
    config = rc.RopeConfig(head_dim=128, max_position=8192, base=12345.0 + number)
    return _once(lambda: rc.get_rope(config, device), device)


def _import() -> float:
    """Seconds that the import adds to that of torch, in a process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        cwd=Path(rc.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(child.stdout)
