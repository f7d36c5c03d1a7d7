"""Runs the interpreter tier: the Triton kernel's numbers, on a machine without a GPU.

Triton decides between compiling and interpreting when a kernel is defined, so these tests need a
process that had TRITON_INTERPRET=1 before it imported the kernel.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support import run_child

TIER = Path(__file__).parent / "test_kernel_interpret.py"


def test_interpreter_tier_passes_in_its_own_process(
    capsys: pytest.CaptureFixture[str], record_property
) -> None:
    """Every test marked ``interpret`` runs and passes; none is skipped and some were collected."""
    output = run_child(
        *("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "interpret", str(TIER)),
        TRITON_INTERPRET="1",
    )
    closing = output.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", closing)
    assert passed is not None, output
    assert not re.search(r"skipped|xfailed|xpassed|deselected", closing), output
    record_property("interpreter_tests_passed", int(passed[1]))
    with capsys.disabled():
        sys.stdout.write(f"\ninterpreter tier: {closing}\n")
