"""What ``patch`` does to every model of the zoo, measured, as a Markdown report.

``python tests/zoo/report.py [FAMILY ...] [--out PATH]`` runs each family before, while and after it
is patched: outputs, gradients, operator calls, and the model's own rotary code that still ran.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

if __package__ in (None, ""):  # run as a file: tests/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rope_compile.integrations.transformers import PatchReport, patch, unpatch

import zoo

__all__ = ["Row", "check", "operator_calls", "own_rotations", "relative_error"]

_OWN = re.compile(r"rotate_(half|every_two|pairwise|queries)|apply_\w*(rotary|rope)")


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.calls += func is torch.ops.rope_compile.rope.default
        return func(*args, **(kwargs or {}))


@contextmanager
def operator_calls() -> Iterator[_Counter]:
    """Counts the calls of our operator that reach a kernel."""
    with _Counter() as counter:
        yield counter


@contextmanager
def own_rotations() -> Iterator[Counter[str]]:
    """Counts the runs of transformers' own rotary functions, however they are reached.

    Not those of a copy that ``patch`` made, to call our function from within: such a copy has no
    ``__name__`` among its globals.
    """
    counter: Counter[str] = Counter()

    def saw(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or not _OWN.search(code.co_name):
            return
        if "modeling_" in code.co_filename and "__name__" in frame.f_globals:
            counter[code.co_name] += 1

    sys.setprofile(saw)
    try:
        yield counter
    finally:
        sys.setprofile(None)


def relative_error(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest error of any output, of the largest value of that output; inf for NaN."""
    assert len(got) == len(expected)
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        if not b.numel():
            continue
        error = ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


@dataclass(frozen=True)
class Row:
    """One family.

    Attributes:
        own: Runs of the model's own rotary functions before. left_running: while patched.
        operator: Operator calls while patched.
        error: Of the outputs, relative. gradient_error: of any parameter's gradient.
        exact: Outputs after ``unpatch`` are those from before, bit for bit.
        refused: Why ``patch`` left the whole model alone. failure: What went wrong instead.
    """

    family: str
    report: PatchReport | None = None
    own: int = 0
    left_running: dict[str, int] = field(default_factory=dict)
    operator: int = 0
    error: float = float("nan")
    gradient_error: float = float("nan")
    exact: bool = False
    seconds: float = 0.0
    refused: str = ""
    failure: str = ""

    @property
    def good(self) -> bool:
        """Right, bit for bit undone, and all that still runs is named in ``left``."""
        return (
            self.report is not None
            and self.error <= 1e-4
            and self.gradient_error <= 1e-4
            and self.exact
            and self.operator > 0
            and (not self.left_running or bool(self.report.left))
        )


def _run(case: zoo.Case) -> Any:
    torch.manual_seed(0)  # diffusion models start from noise
    return case()


def gradients(case: zoo.Case) -> tuple[Tensor, ...]:
    """Of every parameter that the loss reaches, in order."""
    case.model.zero_grad()
    case.loss(_run(case)).backward()
    return tuple(p.grad.clone() for p in case.model.parameters() if p.grad is not None)


def check(family: str, changed: Callable[[zoo.Case], PatchReport] | None = None) -> Row:
    """Build, run, patch, run, unpatch, run. ``changed`` patches in another way, for wrong twins."""
    start = time.perf_counter()
    case = zoo.build(family)
    with torch.no_grad(), own_rotations() as own:
        before = case.output(_run(case))
    expected = gradients(case)
    try:
        report = patch(case.model) if changed is None else changed(case)
    except ValueError as error:
        return Row(family, own=sum(own.values()), refused=str(error))
    with torch.no_grad(), own_rotations() as left_running, operator_calls() as operator:
        after = case.output(_run(case))
    got = gradients(case)
    unpatch(case.model)
    with torch.no_grad():
        again = case.output(_run(case))
    return Row(
        family=family,
        report=report,
        own=sum(own.values()),
        left_running=dict(left_running),
        operator=operator.calls,
        error=relative_error(after, before),
        gradient_error=relative_error(got, expected),
        exact=all(torch.equal(a, b) for a, b in zip(again, before, strict=True)),
        seconds=time.perf_counter() - start,
    )


def _line(row: Row) -> str:
    if row.report is None:
        return f"| {row.family} | | {row.own} | | | | {row.refused or row.failure} |"
    left = "; ".join(f"`{name}`: {why}" for name, why in row.report.left.items())
    kinds = Counter(form for form in row.report.forms.values())
    forms = "<br>".join(f"{form} ({count})" for form, count in kinds.items())
    return (
        f"| {row.family} | {forms} | {row.own} | {row.operator} | {row.error:.1e} | "
        f"{row.gradient_error:.1e} | {left} |"
    )


def _markdown(rows: list[Row]) -> str:
    import transformers

    good = sum(row.good for row in rows)
    idle = sum(bool(row.refused) and not row.own for row in rows)
    refused = sum(bool(row.refused) and row.own > 0 for row in rows)
    head = [
        "# `integrations.transformers.patch` on every rotary model type of transformers",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on a CPU, "
        "tiny models with random weights. Written by "
        "`python tests/zoo/report.py --out tests/zoo/REPORT.md`.",
        "",
        f"{good} of {len(rows)} families: outputs and gradients within 1e-4, undone bit for bit, "
        f"and all rotary code that still runs is named. {refused} rotate in a way that is not "
        f"replaced, and are refused by name. {idle} never call the rotary function that their "
        f"files define. {len(rows) - good - refused - idle} failed.",
        "",
        "| family | rotates by (modules) | own rotary calls before | operator calls | error | "
        "gradient error | left, or failed |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(_line(row) for row in rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for family in options.families or zoo.families():
        try:
            row = check(family)
        except LookupError as skipped:
            row = Row(family, failure=str(skipped))
        except Exception as error:
            row = Row(family, failure=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            traceback.print_exc()
        rows.append(row)
        verdict = "ok " if row.good else "-  " if row.refused else "BAD"
        sys.stdout.write(f"{row.seconds:5.1f} s  {verdict} {_line(row)}\n")
        sys.stdout.flush()
    if options.out:
        options.out.write_text(_markdown(rows))
    return int(not all(row.good or row.refused for row in rows))


if __name__ == "__main__":
    sys.exit(main())
