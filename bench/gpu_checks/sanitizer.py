"""Stage "memory": compute-sanitizer over small calls, in a process without a caching allocator.

    compute-sanitizer --tool memcheck python -m bench.gpu_checks.sanitizer

With PyTorch's allocator allocations share blocks, and a stray access looks valid.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from bench.gpu_checks.registry import Check, Context, NotRun, register
from bench.gpu_checks.variants import GROUPS, Variant

CHECKS: list[Check] = []

ROOT = Path(__file__).parents[2]
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")


def _variants() -> list[Variant]:
    """One of each kind of code."""
    kinds = (
        (GROUPS["widths"], 12), (GROUPS["dtypes"], 4), (GROUPS["partial"], 4),
        (GROUPS["table_only"], 2), (GROUPS["axes"], 6), (GROUPS["layouts"], 6),
    )  # fmt: skip
    return [variant for group, count in kinds for variant in group[:count]]


def exercise(device: torch.device) -> int:
    """Run one call of each kind, positions far outside included; how many calls were wrong."""
    wrong = 0
    for variant in _variants():
        at = variant.positions()
        q, k = variant.inputs(device)
        before = q.clone(), k.clone()
        wrong += variant.excess(variant.call(q, k, at.to(device)), before, at) > 0
    return wrong


def find_tool() -> str | None:
    """The tool, which an installation of CUDA alone does not put on the path."""
    found = shutil.which("compute-sanitizer")
    return found or next((place for place in _PLACES if os.access(place, os.X_OK)), None)


@register(CHECKS, "memory.memcheck")
def memcheck(context: Context) -> None:
    """compute-sanitizer's memcheck finds no access outside an allocation."""
    if not context.gpu:
        with context.case("the calls, without the tool"):
            if wrong := exercise(context.device):
                context.fail("results", f"{wrong} calls were wrong")
        return
    tool = find_tool()
    if tool is None:
        raise NotRun("compute-sanitizer not found")
    command = [tool, "--tool", "memcheck", sys.executable, "-m", __name__]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with context.case(f"{len(_variants())} calls"):
        try:
            child = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=max(1.0, context.seconds_left()),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotRun("compute-sanitizer was not done by the deadline") from None
        judge(context, child.returncode, child.stdout + child.stderr)


def judge(context: Context, status: int, output: str) -> None:
    """Failures by what the tool and the child say."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", output)
    last = (output.strip().splitlines() or ["no output"])[-1]
    if found is None:
        raise NotRun(f"compute-sanitizer does not work here: {last}")
    if int(found[1]):
        first = re.search(r"=+ (Invalid .*|.*out of bounds.*|Program hit .*)", output)
        context.fail("memcheck", f"{found[1]} errors, first {first[1] if first else last}")
    elif status:
        context.fail("results", f"the child ended with {status}: {last}")


def main() -> int:
    """In the child: 1 when a result was wrong."""
    wrong = exercise(torch.device("cuda"))
    print(f"{len(_variants())} calls, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
