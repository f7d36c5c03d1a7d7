"""What a check is, what it may ask of the run, and how the run keeps account of every one.

A check is a function over a `Context`, entered in a module's list by `register`. The runner gives
each exactly one `Outcome`: nothing can drop out of a report by not being called.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rope_compile.bench.rows import Row

__all__ = [
    "CHECK",
    "FAILED",
    "NOT_PROVED",
    "NOT_RUN",
    "OK",
    "REHEARSED",
    "SKIPPED",
    "STAGES",
    "Check",
    "Context",
    "NotRun",
    "OutOfTime",
    "Outcome",
    "first_line",
    "register",
    "run_checks",
]

# Stage -> its share of the time in seconds, of 360 in all. Compilation of the kernels is in the
# first, of the peers in the sixth.
STAGES = {
    "versions": 30.0,
    "numbers": 40.0,
    "compile": 30.0,
    "graphs": 30.0,
    "memory": 20.0,
    "speed": 205.0,
    "summary": 5.0,
}

OK, FAILED, SKIPPED, NOT_RUN = "ok", "FAILED", "skipped", "not run"
# On a machine without a GPU: ran on CPU tensors, which proves nothing about a GPU; did not run.
REHEARSED, NOT_PROVED = "rehearsed", "not proved"

# The column ``kernel`` of the rows that are no measurements.
CHECK = "check"
# A broken kernel breaks every case; the first ones say what there is to say.
_FAILURES_KEPT = 12


class OutOfTime(Exception):
    """The deadline of the stage, or of the check, has passed."""


class NotRun(Exception):
    """The check cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Check:
    """One contract.

    Attributes:
        name: ``stage.what``; stable across releases, the CSV has it.
        run: does it; reports through the context.
        needs_gpu: whether it says anything without a GPU.
        rehearse: whether a dry run calls it all the same, on CPU tensors.
        seconds: a limit of its own within the stage's.
    """

    name: str
    run: Callable[[Context], None]
    needs_gpu: bool = True
    rehearse: bool = True
    seconds: float | None = None

    @property
    def stage(self) -> str:
        return self.name.partition(".")[0]

    @property
    def contract(self) -> str:
        """What holds when it is ok: the first line of the function's docstring."""
        return (self.run.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def register(
    checks: list[Check],
    name: str,
    *,
    needs_gpu: bool = True,
    rehearse: bool = True,
    seconds: float | None = None,
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Decorator: enter a function in ``checks``."""

    def enter(run: Callable[[Context], None]) -> Callable[[Context], None]:
        checks.append(Check(name, run, needs_gpu, rehearse, seconds))
        return run

    return enter


@dataclass
class Outcome:
    """What became of one check."""

    check: Check
    status: str = OK
    cases: int = 0
    detail: str = ""
    failures: list[str] = field(default_factory=list)
    failed_cases: int = 0
    seconds: float = 0.0
    trace: str = ""

    def rows(self) -> list[Row]:
        """One row for the check, and one for each of the first failures."""
        ran = self.status in (OK, FAILED, REHEARSED)
        base = Row(kernel=CHECK, provider=self.check.name, mode=self.check.stage, unit="count")
        verdict = replace(
            base,
            metric=CHECK,
            x=float(self.cases),
            y_50=float(self.failed_cases) if ran else None,
            note=f"{self.status}: {self.detail}" if self.detail else self.status,
        )
        failures = [replace(base, metric="failure", note=text) for text in self.failures]
        return [verdict, *failures]


class Context:
    """What a check works with.

    Attributes:
        device: where its tensors go.
        gpu: whether that is a GPU; False in a dry run.
        found: rows that earlier checks made, for the summary.
        outcomes: what became of earlier checks.
        carried: what checks of one stage hand to each other.
    """

    def __init__(
        self,
        device: torch.device,
        gpu: bool,
        keep: Callable[[list[Row]], list[Row]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self.gpu = gpu
        self.found: list[Row] = []
        self.outcomes: list[Outcome] = []
        self.carried: dict[str, object] = {}
        self.deadline = float("inf")
        self.clock = clock
        self._keep = keep
        self._outcome: Outcome | None = None
        self._notes: list[str] = []

    @property
    def outcome(self) -> Outcome:
        assert self._outcome is not None, "only a running check has an outcome"
        return self._outcome

    def seconds_left(self) -> float:
        return self.deadline - self.clock()

    def before_case(self) -> None:
        """Stop here when time is up.

        Raises:
            OutOfTime: it is.
        """
        if self.clock() >= self.deadline:
            raise OutOfTime

    @contextlib.contextmanager
    def case(self, label: str) -> Iterator[None]:
        """One case: what goes wrong inside is a failure under this label, and the check goes on."""
        self.before_case()
        self.outcome.cases += 1
        try:
            yield
        except (OutOfTime, NotRun):
            raise
        except Exception as error:
            self.fail(label, f"{type(error).__name__}: {first_line(error)}", error)

    def fail(self, label: str, message: str, error: BaseException | None = None) -> None:
        outcome = self.outcome
        outcome.failed_cases += 1
        if len(outcome.failures) < _FAILURES_KEPT:
            outcome.failures.append(f"{label}: {message}")
        if error is not None and not outcome.trace:
            outcome.trace = "".join(
                traceback.format_exception(type(error), error, error.__traceback__)
            )

    def say(self, text: str) -> None:
        """Add to the line of this check."""
        self._notes.append(text)

    def emit(self, rows: Iterable[Row]) -> None:
        """Rows of measurements: written at once, so that a cut run keeps them."""
        self.found += self._keep(list(rows))

    def synchronize(self) -> None:
        """Wait for the device, so that its errors come up in the case that made them."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def run(self, check: Check, deadline: float) -> Outcome:
        """Call one check under a deadline; whatever it raises ends in its outcome."""
        self._outcome = outcome = Outcome(check)
        self._notes, started = [], self.clock()
        own = float("inf") if check.seconds is None else started + check.seconds
        self.deadline = min(deadline, own)
        dry = check.needs_gpu and not self.gpu
        try:
            if dry and not check.rehearse:
                outcome.status = NOT_PROVED
            else:
                self.before_case()
                check.run(self)
                self.synchronize()
                outcome.status = REHEARSED if dry else OK
        except OutOfTime:
            outcome.status = SKIPPED
            self._notes.insert(0, f"deadline, after {outcome.cases} cases")
        except NotRun as reason:
            outcome.status = NOT_RUN
            self._notes.insert(0, str(reason))
        except Exception as error:
            self.fail("outside any case", f"{type(error).__name__}: {first_line(error)}", error)
        if outcome.failed_cases:
            outcome.status = FAILED
            self._notes.insert(0, outcome.failures[0])
        outcome.detail = "; ".join(self._notes)
        outcome.seconds = self.clock() - started
        self.outcomes.append(outcome)
        self._outcome = None
        self.found += self._keep(outcome.rows())
        return outcome


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def run_checks(
    context: Context,
    checks: Sequence[Check],
    seconds: float,
    shares: Mapping[str, float] = STAGES,
    after: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every check, stage by stage, each stage under a deadline of its own.

    A stage that ends early leaves its time to the later ones. One that comes late, because a case
    cannot be interrupted, still gets half of its share, within ``seconds`` in all.
    """
    began = context.clock()
    scale = seconds / sum(shares.values())
    end, planned = began + seconds, began
    outcomes = []
    for stage, share in shares.items():
        planned += share * scale
        deadline = min(end, max(planned, context.clock() + share * scale / 2))
        for check in checks:
            if check.stage == stage:
                # The summary is short, and what a late run has measured is to be judged too.
                limit = float("inf") if stage == "summary" else deadline
                outcomes.append(context.run(check, limit))
                after(outcomes[-1])
    return outcomes
