"""The list of deliberate bugs fits the code and the tests; its runner tells bugs from none."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import Counter
from pathlib import Path

import pytest

from bench import mutations
from bench.mutations import MUTATIONS, ROOT, Copy, Mutation, Outcome, Result, Unusable, main

# Found by a test of a few milliseconds.
QUICK = "scaling-linear-multiplies"


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, read and not run."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def misfit(mutation: Mutation) -> str | None:
    """Why a mutation cannot be run; None if it can."""
    places = (ROOT / mutation.path).read_text().count(mutation.old)
    if places != 1:
        return f"its old text is there {places} times"
    if mutation.new == mutation.old:
        return "it changes nothing"
    for test in mutation.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).exists() or name.partition("[")[0] not in names_in(file):
            return f"there is no test {test}"
    if len({test.startswith(mutations.INTERPRETED) for test in mutation.tests}) != 1:
        return "its tests need two processes"
    return None


def test_every_mutation_fits_the_code_and_names_tests_that_exist() -> None:
    found = {mutation.name: misfit(mutation) for mutation in MUTATIONS}
    assert {name: why for name, why in found.items() if why is not None} == {}
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1


def test_a_mutation_that_does_not_fit_would_be_found() -> None:
    right = MUTATIONS[0]
    assert misfit(right) is None
    twin = functools.partial(dataclasses.replace, right)
    assert misfit(twin(old="no such text")) == "its old text is there 0 times"
    assert misfit(twin(old="    ")) != "its old text is there 1 times"
    assert misfit(twin(new=right.old)) == "it changes nothing"
    assert misfit(twin(tests=("tests/test_ops.py::test_no_such",))).startswith("there is no test")
    assert misfit(twin(tests=(*right.tests, f"{mutations.INTERPRETED}::test_every_dtype"))) == (
        "its tests need two processes"
    )


def test_every_part_has_its_bugs() -> None:
    areas = Counter(mutation.area for mutation in MUTATIONS)
    assert len(MUTATIONS) >= 60
    assert {"kernel", "table", "factory", "scaling", "capture"} <= set(areas)
    assert min(areas[name] for name in ("table", "factory", "scaling", "capture")) >= 5
    kernels = {mutation.file for mutation in MUTATIONS if mutation.area == "kernel"}
    assert kernels == {
        f"kernels/{name}"
        for name in ("reference.py", "cpu.py", "triton_rope.py", "native.py", "rope_cpu.cpp")
    }


def quick(name: str, **changes: object) -> Mutation:
    found = next(mutation for mutation in MUTATIONS if mutation.name == QUICK)
    return dataclasses.replace(found, name=name, **changes)


def test_a_bug_is_found_and_a_harmless_change_survives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One real run; the two twins of the bug must end it with status 1, each for its reason."""
    listed = [
        quick("bug"),
        quick("harmless", new=quick("").old.rstrip("\n") + "  # the same\n"),
        quick("misplaced", old="no such text"),
    ]
    before = (ROOT / listed[0].path).read_bytes()
    assert main(["--write", str(tmp_path)], listed) == 1
    assert (ROOT / listed[0].path).read_bytes() == before, "the working tree is only read"
    lines = capsys.readouterr().out.splitlines()
    said = {line.split("s  ", 1)[1].split(":")[0]: line for line in lines if line.startswith("[")}
    assert list(said) == [mutation.name for mutation in listed]
    assert "killed" in said["bug"]
    assert "tests/test_scaling.py::test_golden_6_linear" in said["bug"]
    assert "SURVIVED" in said["harmless"]
    assert "its old text must occur once in scaling.py, not 0" in said["misplaced"]
    assert lines[-1] == "1 of 3 killed"
    table = (tmp_path / mutations.REPORT).read_text()
    assert "1 of 3 deliberate bugs" in table
    assert "| bug | scaling.py | test_scaling.py::test_golden_6_linear" in table


def test_tests_that_do_not_pass_without_the_bug_prove_nothing(tmp_path: Path) -> None:
    result = Copy(tmp_path).test(quick("toothless"), sound=frozenset())
    assert (result.status, result.detail) == (
        "error",
        "without the mutation must pass: tests/test_scaling.py::test_golden_6_linear",
    )


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(1, frozenset(), ("tests/test_a.py::test_b[1]",), ""), "killed"),
        (Outcome(0, frozenset({"tests/test_a.py::test_b"}), (), ""), "SURVIVED"),
        (Outcome(-11, frozenset(), ("tests/test_a.py::test_b (SIGSEGV)",), ""), "killed"),
        (Outcome(-9, frozenset(), (), "out of memory"), "error"),
        (Outcome(0, frozenset(), (), "1 skipped"), "error"),
        (Outcome(2, frozenset(), (), "ERROR collecting"), "error"),  # no longer Python
    ],
)
def test_what_pytest_says_is_read_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome, status: str
) -> None:
    copy, mutation = Copy(tmp_path), quick("any")
    original = (copy.root / mutation.path).read_text()

    def run(*_arguments: object, **_options: object) -> Outcome:
        assert (copy.root / mutation.path).read_text() != original
        return outcome

    monkeypatch.setattr(copy, "run", run)
    assert copy.test(mutation, sound=frozenset(mutation.tests)).status == status
    assert (copy.root / mutation.path).read_text() == original


def test_the_test_that_crashed_is_named() -> None:
    said = (
        'Current thread:\n  File "/x/tests/support.py", line 3 in randn\n'
        '  File "/x/tests/test_a.py", line 7 in test_b\n  File "/x/pytest.py", line 1 in run\n'
    )
    assert mutations.crashes(-11, said) == ["tests/test_a.py::test_b (SIGSEGV)"]
    assert mutations.crashes(-6, "") == ["after a test that broke memory (SIGABRT)"]
    assert mutations.crashes(1, said) == mutations.crashes(-9, said) == []


def test_a_test_that_does_not_exist_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = Copy(tmp_path)
    said = Outcome(4, frozenset(), (), "ERROR: not found: test_x\n\nno tests ran")
    monkeypatch.setattr(copy, "run", lambda *_arguments, **_options: said)
    with pytest.raises(Unusable, match="must run without a mutation, got ERROR: not found: test_x"):
        mutations.baseline(copy, [quick("any")])


def test_only_the_named_ones_run_and_all_killed_means_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(chosen, jobs, _scratch):
        assert jobs == 3
        return [Result(mutation, "killed", 1.0, "a test") for mutation in chosen]

    monkeypatch.setattr(mutations, "test_all", killed)
    assert main(["--jobs", "3", "--only", QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 mutations;")
    assert lines[-1] == "1 of 1 killed"
