"""Seeds, compiler resets where asked for, and interpreter tests kept to their own process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this process cannot run.

    Triton reads TRITON_INTERPRET when a kernel is defined, so one process is either interpreted
    or not. ``tests/test_interpreter_tier.py`` runs the left-out tests in a process of their own.
    """
    if INTERPRETED:
        return
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
