"""Public fault reports: which tests and GPU checks answer each, and that none is left out.

Every entry is a fault that was reported against some implementation of rotary embedding; its tests
lie in ``test_faults_<group>.py`` and begin with its label, ``test_a1_...``. Each names the kind and
the report. Shared here: what runs a rotation (`BACKENDS`) and the comparison with float64. Rows of
the Triton kernel are interpreted, in a process of their own that the last test starts.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import rope_compile as rc
from rope_compile import ops
from rope_compile.ops import rope_op

from oracle import assert_near_oracle, oracle_rotate
from support import run_child, ulp_distance

HERE = Path(__file__).parent
GROUPS = {
    "A": (1, 2, 3, 4, 6, 7, 8),  # positions outside the table
    "B": (1, 2, 4, 5, 6, 7),  # capture and replay
    "C": (1, 3, 4, 5, 6, 8, 9),  # torch.compile
    "D": (1, 2, 3, 4, 5, 6, 7, 10),  # the operator's contract
    "E": (1, 2, 4, 6, 7),  # the shared registry
    "F": (1, 2, 3),  # meta construction and casts
    "G": (1, 3, 4),  # precision
    "H": (1, 2, 3, 4, 5, 6, 9),  # scaling formulas and configurations
    "I": (1, 2, 4, 5, 6, 9, 10, 11),  # layouts, shapes, devices
}
LABELS = tuple(f"{group}{number}" for group, numbers in GROUPS.items() for number in numbers)
# What only a GPU shows of an entry: the checks of ``python -m bench.gpu_check`` that look at it.
GPU_CHECKS = {
    "A4": ("graphs.replay",),
    "B1": ("compile.no_sync",),
    "B4": ("graphs.growth", "graphs.reserve_refused"),
    "B5": ("graphs.reduce_overhead",),
    "B6": ("graphs.reduce_overhead",),
    "C5": ("speed.binaries",),
    "C8": ("numbers.axes", "compile.interleaved_axes"),
    "D4": ("compile.equals_eager", "numbers.layouts", "compile.shape_padding"),
    "D6": ("compile.package",),
    "E7": ("numbers.two_devices",),
    "G3": ("numbers.tf32",),
    "I4": ("numbers.widths", "numbers.wide_heads"),
    "I6": ("numbers.zero_tokens",),
    "I9": ("numbers.two_devices",),
    "I10": ("numbers.determinism",),
    "I11": ("numbers.dtypes", "numbers.rounding", "numbers.equals_reference"),
}
GPU_ENTRIES = frozenset(
    ("A4", "B1", "B5", "B6", "C5", "C8", "D4", "D6", "E7", "G3", "I4", "I6", "I9", "I10", "I11")
)
# "owner/repo #number", or "owner/repo PR #number", as a reader looks it up.
REPORT = re.compile(r"[\w.-]+/[\w.-]+ (PR )?#\d+")


# ------------------------------------------------------------------------- what the files share


def _interpreted(views, at, *rest) -> None:
    from rope_compile.kernels import triton_rope

    # A program walks all heads, as on a GPU with many tokens: fewer of them, and less to wait for.
    with mock.patch.object(triton_rope, "RESIDENT_PROGRAMS", 1):
        triton_rope.launch(triton_rope.rope_kernel, views, at, *rest)


_TORCH = torch.ops.rope_compile
_TRITON = ops._make_pair(_interpreted)
BACKENDS = (
    pytest.param(rope_op, id="native"),
    pytest.param(_TORCH.rope_torch.default, id="torch"),
    pytest.param(_TRITON[0], id="triton", marks=pytest.mark.interpret),
)
IN_PLACE = (
    pytest.param(ops.rope_inplace_op, id="native"),
    pytest.param(_TORCH.rope_torch_.default, id="torch"),
    pytest.param(_TRITON[1], id="triton", marks=pytest.mark.interpret),
)
TRITON = _TRITON[0]


def rest_of(rope: rc.RotaryEmbedding, inverse: bool = False) -> tuple[object, ...]:
    """What the operators take behind positions, for a module's table and configuration."""
    config = rope.config
    return (
        rope.cos_sin_cache, rope.inv_freq, list(config.lane_axes), config.style,
        config.rotary_offset, config.attention_scaling, inverse,
    )  # fmt: skip


def assert_right(
    outs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    positions: Tensor,
    config: rc.RopeConfig,
    *,
    truncated: bool = False,
) -> None:
    """Each output is the float64 rotation of its input, rounded once.

    ``truncated``: bfloat16 that the Triton interpreter stored, which rounds toward zero.
    """
    for out, x in zip(outs, inputs, strict=True):
        if x is None:
            assert out is None
            continue
        expected, larger = oracle_rotate(
            x, positions, config.inv_freq(config.phase_dtype), style=config.style,
            rotary_offset=config.rotary_offset, attention_scaling=config.attention_scaling,
            lane_axes=config.lane_axes,
        )  # fmt: skip
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        if truncated and x.dtype == torch.bfloat16:
            # A cancelled pair has a float32 error of many steps of its tiny result.
            near = ulp_distance(out, expected.to(out.dtype)) <= 1
            assert (near | ((out.double() - expected).abs() <= 1e-6 * larger)).all()
        else:
            assert_near_oracle(out, expected, larger)


# ------------------------------------------------------------------------------------ the index


def functions(sources: Iterable[str]) -> dict[str, str]:
    """Test functions of some files, and their docstrings."""
    return {
        node.name: ast.get_docstring(node) or ""
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def fault_files() -> list[Path]:
    return [path for path in sorted(HERE.glob("test_faults_*.py")) if path != Path(__file__)]


def by_label(found: Iterable[str]) -> dict[str, list[str]]:
    """Label -> its tests, in the order of `LABELS`."""
    names = sorted(found)
    return {
        label: [name for name in names if name.startswith(f"test_{label.lower()}_")]
        for label in LABELS
    }


def without(table: dict[str, list[str]]) -> list[str]:
    return [label for label, names in table.items() if not names]


def unregistered(table: dict[str, tuple[str, ...]], registered: Iterable[str]) -> list[str]:
    known = set(registered)
    return [name for names in table.values() for name in names if name not in known]


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in fault_files()]


def test_every_entry_has_tests_of_its_name() -> None:
    """And no test carries a label that the list does not have."""
    found = functions(sources())
    table = by_label(found)
    assert not without(table)
    labelled = set(itertools.chain(*table.values()))
    assert not [n for n in found if re.match(r"test_[a-i]\d+_", n) and n not in labelled]


def test_every_test_names_its_report() -> None:
    """In a docstring of one line, so that a stranger can look it up."""
    found = functions(sources())
    for name in itertools.chain(*by_label(found).values()):
        text = found[name]
        assert REPORT.search(text), f"{name}: {text!r}"
        assert "\n" not in text, name


def test_no_two_tests_share_a_name() -> None:
    """The later one would silently replace the other in its file."""
    names = Counter(
        node.name
        for source in sources()
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_every_named_gpu_check_is_registered() -> None:
    from bench.gpu_check import CHECKS
    from bench.gpu_checks import registry

    assert all(isinstance(check, registry.Check) for check in CHECKS)
    assert GPU_ENTRIES <= set(GPU_CHECKS) <= set(LABELS)
    assert not unregistered(GPU_CHECKS, [check.name for check in CHECKS])


def test_a_gap_in_the_index_would_be_found() -> None:
    """Wrong twins: an entry without a test (a1 is not a10), a check that moved, no report."""
    table = by_label(functions(["def test_i10_x(): ...\ndef test_a1_y(): ..."]))
    assert table["I10"] == ["test_i10_x"]
    assert "I1" in without(table)
    assert "A1" not in without(table)
    assert unregistered({"A4": ("graphs.moved",)}, ["graphs.replay"]) == ["graphs.moved"]
    assert not REPORT.search("Reported somewhere in 2024.")


def test_the_interpreted_rows_pass_in_a_process_of_their_own() -> None:
    """Every one that is marked runs and passes; none is skipped."""
    output = run_child(
        *("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "interpret"),
        *map(str, fault_files()),
        TRITON_INTERPRET="1",
        PYTEST_XDIST_WORKER_COUNT="2",  # conftest.py: one thread, all tensors are tiny
    )
    closing = output.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", closing)
    assert passed is not None, output
    assert not re.search(r"skipped|xfailed|xpassed", closing), output
    assert int(passed[1]) >= 100
