"""Seeds, compiler resets where asked for, and interpreter tests kept to their own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Last, so that an installed package comes before the source tree: for the scripts in bench/.
sys.path.append(str(Path(__file__).parents[1]))

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Before anything here imports the package: a process that finds the native kernel built runs
    # it as users will from their second process on.
    subprocess.run(
        [sys.executable, "-c", "from rope_compile.kernels import native; native.load_or_build()"],
        cwd=Path(__file__).parents[1],
        check=True,
    )

# The processes of a parallel run share the cores; tests that need threads say how many.
torch.set_num_threads(
    max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# Files of few tests that take long: begun first, or one process waits for them at the end.
FIRST = (
    "test_interpreter_tier.py",
    "test_faults_index.py",
    "test_inductor_pass.py",
    "test_integration_transformers.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this process cannot run.

    Triton reads TRITON_INTERPRET when a kernel is defined, so one process is either interpreted
    or not. ``tests/test_interpreter_tier.py`` runs the left-out tests in a process of their own.
    """
    if INTERPRETED:
        return
    items.sort(key=lambda item: item.path.name not in FIRST)
    left_out = [item for item in items if item.get_closest_marker("interpret")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20260117)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compiled code and its counters start empty, and leave nothing behind.

    Asked for by the tests that compile (``pytest.mark.usefixtures``): a reset before every test
    would cost more than most of them.
    """
    torch.compiler.reset()
    yield
    torch.compiler.reset()
