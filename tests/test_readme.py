"""The README is true: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import rope_compile as rc
from rope_compile import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[tuple[int, str]]:
    """``(line number, text)`` of every fenced block of one language."""
    blocks = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return [(README.count("\n", 0, block.start()) + 2, block[1]) for block in blocks]


PYTHON = fenced("python")


@pytest.fixture(scope="module")
def namespace() -> dict[str, object]:
    """The blocks are read from top to bottom, each with the names of those before it."""
    torch.manual_seed(0)
    return {}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("line", "code"), PYTHON, ids=[f"line {line}" for line, _ in PYTHON])
def test_code_runs(
    line: int, code: str, namespace: dict[str, object], capsys: pytest.CaptureFixture[str]
):
    exec(compile("\n" * (line - 1) + code, str(ROOT / "README.md"), "exec"), namespace)
    if "print(" in code:
        assert capsys.readouterr().out.strip()


def test_a_reader_sees_code_and_both_commands_first():
    first_screen = "\n".join(README.splitlines()[:24])
    assert "rc.get_rope(" in first_screen
    assert "pip install . && rope-compile demo" in first_screen
    assert "pip install '.[test]' && pytest" in first_screen


def test_commands_are_what_the_project_offers():
    """The console script, the extras and what CI runs are the ones named in the README."""
    project = (ROOT / "pyproject.toml").read_text()
    commands = " && ".join(text for _, text in fenced("bash"))
    assert set(re.findall(r"\brope-compile\b", commands)) == {"rope-compile"}
    assert 'rope-compile = "rope_compile.cli:main"' in project
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    script = (ROOT / ".ci" / "run").read_text()
    assert "'.[test]'" in script
    assert script.rstrip().endswith("pytest")


def defined_in(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "name")}


def dead_links(text: str) -> list[str]:
    """Links to files that are not there, and names of tests that their file does not define."""
    dead = []
    for label, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", text):
        path = ROOT / target
        if not path.exists():
            dead.append(target)
        elif label.startswith("test_") and not label.endswith(".py"):
            dead += [label] if label not in defined_in(path) else []
    return dead


def without_a_test(text: str) -> list[str]:
    """Guarantees that link to no test."""
    table = text.partition("| guaranteed | shown by |\n")[2].partition("\n\n")[0]
    rows = table.splitlines()[1:]
    assert len(rows) > 10
    return [row for row in rows if "](tests/test_" not in row]


def test_each_guarantee_names_its_test():
    assert dead_links(README) == []
    assert without_a_test(README) == []
    twin = README.replace("](tests/test_capture.py)", "")
    assert len(without_a_test(twin)) == 1


@pytest.mark.parametrize(
    "link", ["[test_x.py](tests/test_x.py)", "[test_nothing](tests/test_readme.py)"]
)
def test_a_dead_link_would_be_found(link: str):
    assert dead_links(link)


def test_names_are_public():
    """Every ``rc.name`` and every class in the tables is exported."""
    named = set(re.findall(r"\brc\.(\w+)", README)) | set(
        re.findall(r"`(\w+(?:Scaling|Axes))`", README)
    )
    assert named <= set(rc.__all__), named - set(rc.__all__)
    classes = {name for name in rc.__all__ if name.endswith(("Scaling", "Axes"))}
    assert classes <= named, classes - named


def test_the_table_of_speeds_is_made_by_its_command(capsys: pytest.CaptureFixture[str]):
    """Byte for byte what the command above it prints from the committed results."""
    (command,) = re.findall(r"^`(rope-compile bench --from-csv .*)`", README, re.M)
    arguments = command.split()[1:]
    arguments[arguments.index("bench/results/cpu.csv")] = str(ROOT / "bench/results/cpu.csv")
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n") > 5
    assert printed in README
