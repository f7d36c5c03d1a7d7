"""The lint tier as tests: ruff, its formatter and mypy, each shown to fail on a wrong twin."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# ruff on a text that it must refuse: an unused import, and no annotation on a public function.
BADLY_WRITTEN = "from __future__ import annotations\n\nimport os\n\n\ndef f(x):\n    return x\n"
BADLY_FORMATTED = "from __future__ import annotations\nx = { 'a':1 }\n"
BADLY_TYPED = "from __future__ import annotations\n\n\ndef f(x: int) -> str:\n    return x\n"


def tool(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool of the ``test`` extra from the repository root, where its settings are."""
    return subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
    )


def assert_clean(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing():
    assert_clean(tool("ruff", "check"))


def test_ruff_would_find_a_fault():
    """The strict rules are in force for package files: the twin fails on exactly what it breaks."""
    result = tool(
        "ruff", "check", "--output-format=concise", "--stdin-filename", "rope_compile/twin.py", "-",
        text=BADLY_WRITTEN,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert {"F401", "ANN001", "ANN201"} <= set(result.stdout.replace(":", " ").split())


def test_formatter_changes_nothing():
    assert_clean(tool("ruff", "format", "--check", "--diff"))


def test_formatter_would_change_a_fault():
    result = tool(
        "ruff", "format", "--check", "--stdin-filename", "rope_compile/twin.py", "-",
        text=BADLY_FORMATTED,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr


def test_mypy_strict_finds_nothing():
    assert_clean(tool("mypy"))


def test_mypy_would_find_a_fault(tmp_path: Path):
    twin = tmp_path / "twin.py"
    twin.write_text(BADLY_TYPED)
    result = tool("mypy", str(twin))
    assert result.returncode == 1, result.stderr
    assert "[return-value]" in result.stdout


def unexplained_skips(source: str) -> list[str]:
    """Marks that hide a test without a reason, or retry it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in ("pytest.mark.skipif", "pytest.mark.xfail", "pytest.mark.skip"):
            keywords = {keyword.arg for keyword in node.keywords}
            if "reason" not in keywords or (name.endswith("xfail") and "strict" not in keywords):
                found.append(f"line {node.lineno}: {name} without reason")
        if name == "pytest.skip" and not (node.args or node.keywords):
            found.append(f"line {node.lineno}: {name} without reason")
        if name == "pytest.importorskip" and "reason" not in {k.arg for k in node.keywords}:
            found.append(f"line {node.lineno}: {name} without reason")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.flaky":
            found.append(f"line {node.lineno}: flaky mark")
    return found


def test_no_test_is_hidden_without_a_reason():
    found = {path.name: unexplained_skips(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "twin",
    [
        "@pytest.mark.skipif(True)\ndef f(): ...",
        "@pytest.mark.flaky\ndef f(): ...",
        "def test_f():\n    pytest.skip()",
        "def test_f():\n    pytest.importorskip('x')",
    ],
)
def test_a_hidden_test_would_be_found(twin: str):
    assert unexplained_skips(twin)
