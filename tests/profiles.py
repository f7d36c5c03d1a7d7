"""How much Hypothesis searches: a little and always the same in CI, long and random on demand.

``ci`` is the default: derandomised, no database, the same examples in every run. The long search::

    ROPE_COMPILE_HYPOTHESIS=long pytest -n0 --hypothesis-show-statistics \
        tests/test_fuzz.py tests/test_properties.py tests/test_fuzz_config.py \
        tests/test_state_machine.py

draws new examples each time, `LONG` times as many (``ROPE_COMPILE_HYPOTHESIS_SCALE`` for another
number), and prints how to repeat a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

LONG = 20
PROFILE = os.environ.get("ROPE_COMPILE_HYPOTHESIS", "ci")
SCALE = int(os.environ.get("ROPE_COMPILE_HYPOTHESIS_SCALE", LONG)) if PROFILE == "long" else 1

# Building buffers and fixtures that only empty a registry are what Hypothesis warns about here.
_COMMON = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)
settings.register_profile("ci", _COMMON, derandomize=True, database=None)
settings.register_profile("long", _COMMON, print_blob=True)
settings.load_profile(PROFILE)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of tiny calls: to wake a second thread for one takes longer than the call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def examples(number: int, **others: object) -> settings:
    """Settings for a test that tries ``number`` examples in CI."""
    return settings(max_examples=number * SCALE, **others)


def refutes(check: Callable[[T], None], cases: SearchStrategy[T], number: int = 200) -> None:
    """Fail unless a search of ``number`` CI examples finds a case that ``check`` refuses.

    For wrong twins: ``check`` is a property applied to something that is deliberately wrong.
    """

    @settings(
        settings.get_profile("ci"),
        max_examples=number,
        phases=[Phase.generate],  # finding one is enough: nobody reads the smallest
        report_multiple_bugs=False,
    )
    @given(cases)
    def search(case: T) -> None:
        check(case)

    with pytest.raises(AssertionError):
        search()
