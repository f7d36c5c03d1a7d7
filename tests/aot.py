"""Where tests find ``bench/kernel_audit.py``, which is no part of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path

# Last, so that an installed rope_compile stays the one that is tested.
sys.path.append(str(Path(__file__).parents[1]))

from bench import kernel_audit
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

__all__ = [
    "ALTERNATING",
    "BLOCKS",
    "FULL_WIDTH",
    "POINTER",
    "Q_AND_K",
    "REGISTERS",
    "TARGETS",
    "Launch",
    "audit",
    "compile_launch",
    "kernel_audit",
    "ptxas_report",
]
