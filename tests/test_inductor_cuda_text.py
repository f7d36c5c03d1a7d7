"""The code that Inductor writes around the operator for a GPU, read without one.

What is promised here: one launch for q and k, inlined into the wrapper, with views passed as views.
Inductor's text changes with each release, so only these facts are asserted, never the text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inductor_text import CASES, Facts
from support import run_child

FUNCTIONAL = sorted(set(CASES) - {"in_place", "in_place_whole", "copied"})


@pytest.fixture(scope="module")
def found() -> dict[str, Facts]:
    """Every case, compiled in one child process: a CPU build of torch may end it."""
    script = Path(__file__).parent / "inductor_text.py"
    output = run_child("-W", "ignore", str(script), *CASES)
    return {name: Facts(**values) for name, values in json.loads(output).items()}


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_one_launch_serves_q_and_k(found: dict[str, Facts], case: str):
    """The kernel is inlined: the wrapper launches it once, and calls no operator of ours."""
    assert sum(name.startswith("rope_kernel") for name in found[case].launches) == 1
    assert found[case].opaque_calls == 0


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_nothing_is_cloned_or_copied(found: dict[str, Facts], case: str):
    assert found[case].copies == []


def test_a_copy_would_be_seen(found: dict[str, Facts]):
    """The twin: the caller made q contiguous first."""
    assert len(found["copied"].copies) == 1
    assert found["copied"].allocations == 3


@pytest.mark.parametrize("case", ["plain", "dynamic", "partial_dynamic", "interleaved"])
def test_only_the_results_are_allocated(found: dict[str, Facts], case: str):
    assert found[case].launches == ["rope_kernel_0"]
    assert found[case].allocations == 2


def test_q_alone_allocates_one_result(found: dict[str, Facts]):
    assert found["q_only"].launches == ["rope_kernel_0"]
    assert found["q_only"].allocations == 1
    assert found["q_only"].rope_constants["K_HEADS"] == 0


@pytest.mark.parametrize(
    ("case", "count"),
    [("packed_qkv", "77"), ("packed_qkv_tokens", "s77")],
    ids=["static", "dynamic"],
)
def test_packed_qkv_slices_stay_views(found: dict[str, Facts], case: str, count: str):
    """q and k enter the kernel as views of the projection's own memory, at their offsets."""
    facts = found[case]
    arguments = facts.rope_arguments[0]
    assert f"reinterpret_tensor(buf0, (1, {count}, 32, 128)" in arguments
    assert f"reinterpret_tensor(buf0, (1, {count}, 8, 128)" in arguments
    assert ", 4096), " in arguments  # k lies behind 32 heads of 128 channels
    assert len(facts.launches) == 2  # ours, and the relu behind it
    assert facts.allocations == 4  # projection, q, k, relu


def test_transposed_input_is_passed_as_a_view(found: dict[str, Facts]):
    """The layout of transformers costs no copy going in."""
    arguments = found["transposed"].rope_arguments[0]
    assert "(3, 77, 32, 128), (315392, 128, 9856, 1)" in arguments
    assert found["transposed"].launches == ["rope_kernel_0"]
    assert found["transposed"].allocations == 2


@pytest.mark.parametrize("case", ["dynamic", "partial_dynamic", "packed_qkv_tokens"])
def test_token_count_is_a_symbol(found: dict[str, Facts], case: str):
    """One graph for every token count: the launch and its grid compute with the symbol."""
    assert " s77, " in found[case].rope_arguments[0] or " s85, " in found[case].rope_arguments[0]
    assert "77, 4096," not in found[case].rope_arguments[0].replace("s77", "")


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_compiled_code_keeps_wide_accesses(found: dict[str, Facts], case: str):
    """Strides stay provably divisible, symbolic ones too, and widths stay plain numbers.

    ``tests/test_ptx.py`` shows that this makes 16-byte accesses of q, k and the table.
    """
    constants = found[case].rope_constants
    assert (constants["ALIGN"], constants["CACHE_ALIGN"]) == (8, 4)
    assert constants["LANES"] == 64


def test_rotation_in_place_is_one_launch(found: dict[str, Facts]):
    for case in ("in_place", "in_place_whole"):
        assert sum(name.startswith("rope_kernel") for name in found[case].launches) == 1
        assert found[case].opaque_calls == 0
        assert found[case].rope_constants["IN_PLACE"] is True
