"""What ``inductor.enable()`` does to every model of the zoo, unchanged and compiled, as Markdown.

``python tests/zoo/pass_report.py [FAMILY ...] [--training] [--out PATH]`` compiles each family for
inference, with ``--training`` for that too, with the joint-graph passes of Inductor and without its
code generation, and compares outputs and gradients with eager mode.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

if __package__ in (None, ""):  # run as a file: tests/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from rope_compile import inductor

import zoo
from joint_graphs import Compiled
from zoo.report import relative_error

__all__ = ["PassRow", "check"]

BOUND = 1e-4


@dataclass(frozen=True)
class PassRow:
    """One family.

    Attributes:
        inference: Operators in the graphs of inference. training: of forward and backward, or None.
        joined: How many of them rotate q and k together.
        graphs: Of inference; more than one where the model itself breaks the graph.
        error: Of outputs, relative. gradient_error: of any parameter's gradient.
        alone: Where an error is beyond the bound: that of the model compiled without the pass. The
            error is then of the numbers with the pass against those without.
        refused: Why rotations were left, and how many.
        failure: What went wrong: of the model under a compiler alone if ``without`` says so.
    """

    family: str
    inference: int = 0
    training: int | None = None
    joined: int = 0
    graphs: int = 0
    error: float = float("nan")
    gradient_error: float | None = None
    alone: float | None = None
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    without: str = ""

    @property
    def right(self) -> bool:
        return not self.failure and self.error <= BOUND and (self.gradient_error or 0.0) <= BOUND

    @property
    def converted(self) -> bool:
        backward = self.training is None or self.training > self.inference
        return self.right and self.inference > 0 and backward


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return re.sub(r"/\S+/", "", f"{type(error).__name__}: {text[0][:120]}")


def _outputs(case: zoo.Case, compiled: bool) -> tuple[tuple[Tensor, ...], Compiled | None]:
    def run() -> tuple[Tensor, ...]:
        return case.output(case())

    torch.manual_seed(0)  # diffusion models start from noise
    if not compiled:
        return run(), None
    torch.compiler.reset()
    function = Compiled(run, fullgraph=False)
    return function(), function  # type: ignore[return-value]


def _gradients(case: zoo.Case, compiled: bool) -> tuple[tuple[Tensor, ...], Compiled | None]:
    case.model.zero_grad()
    outputs, function = _outputs(case, compiled)
    case.loss(outputs).backward()
    found = tuple(p.grad.clone() for p in case.model.parameters() if p.grad is not None)
    return found, function


def _compare(case: zoo.Case, training: bool) -> PassRow:
    with torch.no_grad():
        plain, _ = _outputs(case, compiled=False)
        with inductor.enable():
            got, inference = _outputs(case, compiled=True)
    assert inference is not None
    records = inductor.report()
    refused = Counter[str]()
    for record in records:
        if not record.replaced:
            refused[record.reason] += record.count
    row = PassRow(
        family=case.family,
        inference=sum(inference.counts),
        joined=sum(record.count for record in records if record.joined),
        graphs=len(inference.graphs),
        error=relative_error(got, plain),
        refused=dict(refused),
    )
    if row.error > BOUND:  # what the compiler does by itself
        with torch.no_grad():
            without, _ = _outputs(case, compiled=True)
        row = replace(row, error=relative_error(got, without), alone=relative_error(without, plain))
    if not training:
        return row
    plain_gradients, _ = _gradients(case, compiled=False)
    with inductor.enable():
        gradients, trained = _gradients(case, compiled=True)
    assert trained is not None
    error, alone = relative_error(gradients, plain_gradients), row.alone
    if error > BOUND:
        without, _ = _gradients(case, compiled=True)
        error, own = relative_error(gradients, without), relative_error(without, plain_gradients)
        alone = max(own, alone or 0.0)
    return replace(row, training=sum(trained.counts), gradient_error=error, alone=alone)


def check(family: str, training: bool = False) -> PassRow:
    """Eager, compiled for inference, and compiled for training."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    case = zoo.build(family)
    try:
        row = _compare(case, training)
    except Exception as error:
        row = PassRow(family, failure=_first_line(error))
        try:  # whose fault it is
            with torch.no_grad():
                _outputs(case, compiled=True)
            if training:
                _gradients(case, compiled=True)
        except Exception as alone:
            row = replace(row, without=_first_line(alone))
    return replace(row, seconds=time.perf_counter() - start)


def _line(row: PassRow) -> str:
    if row.failure:
        why = f"without the pass too: {row.without}" if row.without else row.failure
        return f"| {row.family} | | | | | | | {why} |"
    notes = [f"{reason} ({count})" for reason, count in row.refused.items()]
    if row.alone is not None:
        notes.append(f"compiled without the pass it is off by {row.alone:.1e}")
    refused = "; ".join(notes)
    return (
        f"| {row.family} | {row.inference} | {row.joined} | {row.graphs} | {row.error:.1e} | "
        f"{_number(row.training, 'd')} | {_number(row.gradient_error, '.1e')} | {refused} |"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _markdown(rows: list[PassRow]) -> str:
    import transformers

    converted = sum(row.converted for row in rows)
    cannot = sum(bool(row.without) for row in rows)
    trained = sum(row.converted and row.training is not None for row in rows)
    wrong = [row.family for row in rows if not row.right and not row.without]
    head = [
        "# `inductor.enable()` on every rotary model type of transformers, unchanged",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on a CPU, "
        "tiny models with random weights, compiled with the joint-graph passes of Inductor. "
        "Written by `python tests/zoo/pass_report.py --out PATH`.",
        "",
        f"{converted} of {len(rows)} families compiled, of {len(zoo.families())} in all, rotate "
        f"with the operator, {trained} of them trained too; outputs and gradients within {BOUND:g} "
        "of eager mode, or of the model compiled without the pass where that is off by itself; "
        f"wrong: {', '.join(wrong) if wrong else 'none'}. {cannot} cannot be compiled this way "
        "with or without the pass. The others are left as they are.",
        "",
        "| family | operators | of these q and k together | graphs | error | with backward | "
        "gradient error | left, or failed |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join([*head, *map(_line, rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--training", action="store_true", help="compile for training as well")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    rows = []
    run = functools.partial(check, training=options.training)
    # New processes every few families: what a compiler keeps adds up.
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for row in pool.imap(run, options.families or zoo.families()):
            rows.append(row)
            _show(row)
            if options.out:
                options.out.write_text(_markdown(rows))
    return int(not all(row.right or row.without for row in rows))


def _show(row: PassRow) -> None:
    verdict = "ok " if row.converted else "-  " if row.right or row.without else "BAD"
    sys.stdout.write(f"{row.seconds:5.1f} s  {verdict} {_line(row)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
