"""``python -m bench.gpu_check``: its dry run, its accounts, and its GPU code on stand-ins.

No test here proves anything about a GPU. What is shown is that the script runs to its end, that no
check drops out of its report, that a wrong result is named, and that the lines which only a GPU
reaches can be executed at all: `pretend_gpu` answers for ``torch.cuda`` on CPU tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import rope_compile as rc
from bench import gpu_check
from bench.gpu_checks import (
    compiled,
    graphs,
    machine,
    numbers,
    races,
    registry,
    sanitizer,
    speed,
    summary,
)
from bench.gpu_checks.registry import Check, Context, NotRun, Outcome
from rope_compile import table
from rope_compile.bench import rows as bench_rows
from rope_compile.bench.rows import Row

from support import run_child

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
NAMES = {check.name: check for check in gpu_check.CHECKS}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def context(*, gpu: bool = False, clock: Callable[[], float] = time.monotonic) -> Context:
    return Context(CPU, gpu, lambda made: made, clock)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a dry run."""
    with gpu_check._threads(1):
        yield


def outcome_of(name: str, *, gpu: bool = False) -> Outcome:
    return context(gpu=gpu).run(NAMES[name], time.monotonic() + 600)


# --------------------------------------------------------------------------------------- a dry run


@dataclasses.dataclass
class Finished:
    status: int
    text: str
    rows: list[Row]
    report: str


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("gpu_check")
    csv, report = folder / "rows.csv", folder / "report.md"
    done = script("--dry", "--csv", str(csv), "--report", str(report))
    found = bench_rows.read(csv)
    return Finished(done.returncode, done.stdout + done.stderr, found, report.read_text())


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def verdicts(found: list[Row]) -> dict[str, str]:
    """Check -> its status, from the CSV alone."""
    of_checks = [row for row in found if (row.kernel, row.metric) == ("check", "check")]
    assert len(of_checks) == len({row.provider for row in of_checks})
    return {row.provider: row.note.partition(":")[0] for row in of_checks}


def test_dry_run_ends_well(dry: Finished) -> None:
    assert dry.status == 0, dry.text
    assert "dry run (--dry)" in dry.text
    assert "FAILED" not in dry.text


def test_every_check_is_accounted_for(dry: Finished) -> None:
    """Each ran for good, or is named as not proved, in the table, in the CSV and in the report."""
    found = verdicts(dry.rows)
    assert list(found) == [check.name for check in gpu_check.CHECKS]
    unproved_text = dry.text.partition("not proved here")[2]
    unproved_report = dry.report.partition("## Not proved here")[2].partition("\n## ")[0]
    for check in gpu_check.CHECKS:
        if not check.needs_gpu:
            assert found[check.name] == registry.OK, check.name
            continue
        wanted = registry.REHEARSED if check.rehearse else registry.NOT_PROVED
        assert found[check.name] == wanted, check.name
        assert f" {check.name}," in unproved_text.replace("\n", " ,").replace(" ,", ", ") + ","
        assert f"`{check.name}` ({wanted})" in unproved_report
    assert "Measurements (of a few tokens: they mean nothing)" in dry.report


def test_rows_have_the_schema_and_say_where_they_come_from(dry: Finished) -> None:
    assert len({row.run_id for row in dry.rows}) == 1
    assert all(row.device.startswith("cpu: ") and row.torch and row.timestamp for row in dry.rows)
    timed = {(row.shape, row.mode) for row in dry.rows if row.kernel == "rope" and row.y_50}
    assert {("L8", "backward"), ("L8", "full")} <= timed
    assert {(shape, "forward") for shape in ("L8", "L70", "DS", "P4", "GJ", "QV")} <= timed


def test_summary_has_a_line_for_every_target(dry: Finished) -> None:
    wanted = {f"G{n}" for n in range(1, 12)} | {f"B{n}" for n in range(1, 5)}
    of_targets = [row for row in dry.rows if row.kernel == summary.TARGET]
    assert {row.provider for row in of_targets} == wanted
    assert all(f"\n| {name} |" in dry.report for name in wanted)
    assert all(f"\n{name} " in dry.text for name in wanted)


def test_registry_is_consistent() -> None:
    assert len(NAMES) == len(gpu_check.CHECKS), "two checks of one name"
    assert {check.stage for check in gpu_check.CHECKS} == set(registry.STAGES)
    assert all(check.contract for check in gpu_check.CHECKS), "a check without a contract"
    assert sum(registry.STAGES.values()) == 360


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "numbers,graph"], "--only must name stages of versions, "),
        (["--minutes", "0"], "--minutes must be positive, got 0"),
        (["--csv", "/nowhere/rows.csv"], "--csv must be a file in a directory that exists"),
        (["--report", "/"], "--report must be a file in a directory that exists, got /"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([*arguments, "--dry"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert gpu_check.main(["--dry", "--csv", str(path)]) == 2
    assert "columns" in capsys.readouterr().err
    assert path.read_text() == "a,b\n1,2\n"


def test_only_runs_the_named_stages(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert gpu_check.main(["--dry", "--only", "summary,versions", "--csv", str(path)]) == 0
    stages = [row.mode for row in bench_rows.read(path) if row.kernel == "check"]
    assert list(dict.fromkeys(stages)) == ["versions", "summary"]


# --------------------------------------------------------------------------- deadlines and failures


def named(name: str, run: Callable[[Context], None]) -> Check:
    return Check(name, run, needs_gpu=False)


def test_a_stage_over_its_deadline_is_reported_and_the_rest_goes_on() -> None:
    now = [0.0]

    def slow(given: Context) -> None:
        """Ten cases of eight seconds."""
        for number in range(10):
            with given.case(str(number)):
                now[0] += 8

    def quick(given: Context) -> None:
        """One case."""
        with given.case("only"):
            now[0] += 1

    checks = [
        named("numbers.slow", slow), named("numbers.behind", quick), named("graphs.next", quick),
        named("summary.always", quick),
    ]  # fmt: skip
    found = registry.run_checks(context(clock=lambda: now[0]), checks, 360)
    by_name = {outcome.check.name: outcome for outcome in found}
    # Versions leave their 30 s to the numbers, which end at 70 s of the plan.
    assert by_name["numbers.slow"].cases == 9
    assert by_name["numbers.slow"].detail == "deadline, after 9 cases"
    assert by_name["numbers.behind"].status == registry.SKIPPED
    assert by_name["graphs.next"].status == registry.OK
    assert by_name["summary.always"].status == registry.OK


def test_a_check_has_a_limit_of_its_own_and_late_stages_get_half() -> None:
    now = [0.0]

    def endless(given: Context) -> None:
        """Never ends by itself."""
        for number in itertools.count():
            with given.case(str(number)):
                now[0] += 1

    limited = dataclasses.replace(named("compile.limited", endless), seconds=5)
    found = registry.run_checks(
        context(clock=lambda: now[0]),
        [limited, named("compile.stage", endless), named("graphs.full", endless)],
        300,
        {"compile": 100, "graphs": 200},
    )
    assert [outcome.cases for outcome in found] == [5, 95, 200]


def test_an_exception_is_a_failure_with_its_name_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(given: Context) -> None:
        """Raises in a case, and outside of any."""
        with given.case("inside"):
            raise ValueError("first\nsecond")
        raise ZeroDivisionError("outside")

    def fine(given: Context) -> None:
        """Runs."""
        with given.case("case"):
            pass

    checks = [named("numbers.broken", broken), named("graphs.fine", fine)]
    report = tmp_path / "report.md"
    assert gpu_check.main(["--dry", "--report", str(report)], checks) == 1
    text = capsys.readouterr().out
    assert "FAILED: numbers.broken: inside: ValueError: first" in text
    assert "graphs.fine" in text
    written = report.read_text()
    assert "## FAILED: numbers.broken" in written
    assert "* outside any case: ZeroDivisionError: outside" in written
    assert "Traceback" in written


def test_an_unavailable_tool_is_no_failure() -> None:
    def absent(given: Context) -> None:
        """Needs a tool."""
        raise NotRun("tool not found")

    outcome = context().run(named("memory.absent", absent), float("inf"))
    assert (outcome.status, outcome.detail) == (registry.NOT_RUN, "tool not found")
    assert outcome.rows()[0].note == "not run: tool not found"
    assert outcome.rows()[0].y_50 is None


KILLED = """
import os, signal, sys
from bench import gpu_check
from bench.gpu_checks.registry import Check

def kill(context):
    os.kill(os.getpid(), signal.SIGKILL)

wanted = [c for c in gpu_check.CHECKS if c.name in ("versions.software", "numbers.dtypes")]
gpu_check.main(["--dry", "--csv", sys.argv[1]], [*wanted, Check("graphs.kill", kill)])
"""


def test_a_cut_run_leaves_its_head(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert verdicts(bench_rows.read(path)) == {
        "versions.software": registry.OK,
        "numbers.dtypes": registry.REHEARSED,
    }


# ------------------------------------------------------------------------------------------ twins


def test_a_wrong_operator_ends_with_1_and_names_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = rc.apply_rope

    def backwards(*arguments: object, inverse: bool = False, **options: object) -> object:
        return right(*arguments, inverse=not inverse, **options)

    monkeypatch.setattr(rc, "apply_rope", backwards)
    path = tmp_path / "rows.csv"
    assert gpu_check.main(["--dry", "--only", "numbers", "--csv", str(path)]) == 1
    text = capsys.readouterr().out
    assert "FAILED: numbers.widths: half bfloat16 R=64: " in text
    found = verdicts(bench_rows.read(path))
    failed = {name for name, status in found.items() if status == registry.FAILED}
    assert {"numbers.widths", "numbers.dtypes", "numbers.axes", "numbers.layouts"} <= failed
    kinds = [row.metric for row in bench_rows.read(path) if row.provider == "numbers.widths"]
    assert kinds == ["check", *["failure"] * registry._FAILURES_KEPT]


def changed(function: Callable[..., object], change: Callable[..., object]) -> object:
    """``function``, and then ``change(result, q)``, which may return another result."""

    def run(q: Tensor, *rest: object, **options: object) -> object:
        result = function(q, *rest, **options)
        other = change(result, q)
        return result if other is None else other

    return run


def _nan_in_the_first(result: tuple[Tensor, Tensor], q: Tensor) -> None:
    result[0].view(-1)[:1] = float("nan")


def _write_beside(result: None, q: Tensor) -> None:
    if q._base is not None:
        q._base.view(-1)[0] = 0.0


def _of_the_next_token(result: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.roll(1, 0) for x in result)


_count = itertools.count()


def _every_seventh(result: tuple[Tensor, Tensor], q: Tensor) -> None:
    if next(_count) % 7 == 6:
        result[0].neg_()


def _never_equal(given: Callable[..., object], **options: object) -> object:
    return changed(given, lambda result, at: (result[0] + 1, *result[1:]))


def _off_by_much(self: rc.RotaryEmbedding, *rest: object) -> bool:
    self.table.cos_sin_cache.mul_(1.001)
    return True


# What goes wrong -> the check that must see it.
TWINS: dict[str, tuple[str, object, str, Callable[[], object]]] = {
    "an element is not written": (
        "numbers.poisoned_outputs", rc, "apply_rope",
        lambda: changed(rc.apply_rope, _nan_in_the_first),
    ),
    "memory beside is written": (
        "numbers.guard_bands", rc, "apply_rope_",
        lambda: changed(rc.apply_rope_, _write_beside),
    ),
    "runs differ": (
        "numbers.determinism", rc, "apply_rope", lambda: changed(rc.apply_rope, _every_seventh)
    ),
    "a store cuts digits off": (
        "numbers.rounding", rc, "apply_rope",
        lambda: changed(rc.apply_rope, lambda result, q: (result[0] * (1 - 2.0**-7), result[1])),
    ),
    "a choice by token takes another module": (
        "numbers.selector", rc.RopeSelector, "forward",
        lambda: changed(rc.RopeSelector.forward, _of_the_next_token),
    ),
    "a batch shares its first sequence": (
        "numbers.tf32", rc, "apply_rope",
        lambda: changed(rc.apply_rope, lambda result, q: (result[0] * 0, result[1])),
    ),
    "an empty call gives something else": (
        "numbers.zero_tokens", rc, "apply_rope",
        lambda: changed(rc.apply_rope, lambda result, q: (result[0].new_zeros(1), result[1])),
    ),
    "sequences disturb each other": (
        "numbers.many_tokens", rc, "apply_rope",
        lambda: changed(rc.apply_rope, _of_the_next_token),
    ),
    "a far stride wraps": (
        "numbers.int64_offsets", rc, "apply_rope",
        lambda: changed(rc.apply_rope, lambda result, q: (result[0] * 0, result[1])),
    ),
    "compiled code differs": ("compile.equals_eager", torch, "compile", lambda: _never_equal),
    "a replay does nothing": (
        "graphs.replay", graphs.StandInGraph, "replay", lambda: lambda self: None
    ),
    "a replay after growth does nothing": (
        "graphs.growth", graphs.StandInGraph, "replay", lambda: lambda self: None
    ),
    "growth is not refused": (
        "graphs.reserve_refused", table.RopeTable, "reserve", lambda: lambda self, rows: True
    ),
    "a grown table differs": (
        "graphs.table", rc.RotaryEmbedding, "reserve", lambda: _off_by_much
    ),
    "a call is wrong where memory is watched": (
        "memory.memcheck", rc, "apply_rope", lambda: changed(rc.apply_rope, _nan_in_the_first)
    ),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_each_fault_is_seen_by_its_check(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, make = TWINS[twin]
    monkeypatch.setattr(owner, attribute, make())
    outcome = outcome_of(name)
    assert outcome.status == registry.FAILED, outcome.detail


def test_a_host_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rc.apply_rope

    def reading(q: Tensor, *rest: object, **options: object) -> object:
        float(q.reshape(-1)[0])
        return right(q, *rest, **options)

    monkeypatch.setattr(rc, "apply_rope", reading)
    outcome = outcome_of("compile.no_sync")
    assert outcome.status == registry.FAILED
    assert outcome.failures[0].startswith("apply_rope: RuntimeError: the host reads")


def test_a_missed_count_is_a_failure_and_a_lost_race_is_none() -> None:
    run = context()
    base = Row(provider="rope_compile", unit="count", device="cpu: x")
    run.found = [dataclasses.replace(base, metric="graph_breaks", y_50=1.0)]
    outcome = run.run(NAMES["summary.targets"], float("inf"))
    assert outcome.status == registry.FAILED
    assert outcome.failures[0].startswith("B2: counts")
    run = context()
    slow = dataclasses.replace(
        base, metric="time", unit="us", device="NVIDIA H200", tokens=8192.0, y_50=1.0, ratio=0.5,
        ratio_to="hf_eager",
    )  # fmt: skip
    run.found = [slow]
    outcome = run.run(NAMES["summary.targets"], float("inf"))
    assert outcome.status == registry.OK
    assert any(row.provider == "G6" and "MISSED" in row.note for row in run.found)


def test_targets_take_what_only_this_script_measures() -> None:
    base = Row(provider="rope_compile", device="NVIDIA H200", y_50=1.5, tokens=1.0, cache="warm")
    found = [
        dataclasses.replace(base, ratio_to="empty_node", ratio=0.8),
        dataclasses.replace(base, ratio_to="liger", ratio=2.0, layout="BHSD"),
        dataclasses.replace(base, metric="binaries", unit="count", y_50=2.0),
    ]
    shown = {target.id: target.measured for target in summary.judged(found)}
    assert "of an empty node 1.25" in shown["G9"]
    assert "memory heads first, worst 2x" in shown["G7"]
    assert "binaries 2" in shown["B3"]


# --------------------------------------------------------------------------------- GPU code, faked


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        return max(other.at - self.at, 1e-9) * 1e3


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda`` for CPU tensors, tiny sizes, and a compiler that returns what it was given."""
    mode = ["default"]
    item = Tensor.item

    def watched_item(x: Tensor) -> object:
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return item(x)

    properties = types.SimpleNamespace(
        name="stand-in", multi_processor_count=1, L2_cache_size=200_000, total_memory=2**30
    )
    answers = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "CUDAGraph": graphs.StandInGraph,
        "graph": lambda graph, stream=None: graph,
        "current_stream": lambda device=None: FakeStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device=None: 0,
        "mem_get_info": lambda device=None: (2**40, 2**40),
        "get_device_properties": lambda device=None: properties,
        "get_sync_debug_mode": lambda: mode[0],
        "set_sync_debug_mode": lambda value: mode.__setitem__(0, value),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(Tensor, "item", watched_item)
    monkeypatch.setattr(
        table,
        "stream_is_capturing",
        lambda: isinstance(_get_current_dispatch_mode(), graphs.StandInGraph),
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for module in (machine, speed):
        monkeypatch.setattr(module, "empty_launch", lambda: lambda: torch.zeros(1))
    monkeypatch.setattr(machine, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(numbers, "MANY_TOKENS", 61)
    monkeypatch.setattr(numbers, "REPEATED_TOKENS", 37)
    monkeypatch.setattr(graphs, "TABLE_ROWS", 1500)
    monkeypatch.setattr(graphs, "LARGE_ROWS", 1500)
    monkeypatch.setattr(speed, "OUTSIDE_TOKENS", (3,))
    monkeypatch.setattr(speed, "LAYOUT_TOKENS", (3,))
    monkeypatch.setattr(numbers, "_large", lambda *arguments: None)
    monkeypatch.setattr(speed, "TOKENS", (6, 3))
    monkeypatch.setattr(speed, "DECODE_TOKENS", (1, 3))
    monkeypatch.setattr(speed, "TRAINING_TOKENS", 6)
    monkeypatch.setattr(speed, "counted_binaries", lambda: contextlib.nullcontext({"a", "b"}))
    monkeypatch.setattr(races.shapes, "ROWS", 1024)
    monkeypatch.setattr(races, "ROUNDS", 2)
    monkeypatch.setattr(races, "_MOST_CALLS", 16)


# What a stand-in has no answer for; each is executed by a test of its own below.
APART = {"versions.clocks", "versions.build", "compile.one_launch", "speed.clocks_after"}
# count_rows is the package's; the rest has nothing to run here.
ABSENT = {"speed.counts", "speed.flashinfer", "memory.memcheck", "numbers.two_devices"}


@pytest.mark.parametrize(
    "name",
    [name for name, check in NAMES.items() if check.needs_gpu and name not in APART | ABSENT],
)
def test_gpu_branches_run_on_stand_ins(name: str, pretend_gpu: None) -> None:
    outcome = outcome_of(name, gpu=True)
    assert outcome.status == registry.OK, f"{outcome.failures} {outcome.trace}"
    assert outcome.cases


def test_rows_of_a_stand_in_run_meet_their_targets(pretend_gpu: None) -> None:
    """What the checks emit is what the summary looks for: no name is misspelt on either side."""

    def as_of_a_gpu(row: Row) -> Row:
        large = {"tokens": 8192.0, "bytes": (row.bytes or 0) * 1e4} if row.tokens == 6 else {}
        return dataclasses.replace(row, device="GPU", **large)

    run = Context(CPU, True, lambda made: [as_of_a_gpu(row) for row in made])
    for name, check in NAMES.items():
        if check.stage == "speed" and name not in APART | ABSENT:
            run.run(check, float("inf"))
    unmeasured = {
        target.id
        for target in summary.judged(run.found)
        if target.verdict == "not measured" and target.id[0] == "G"
    }
    assert unmeasured == {"G7", "G8"}, "the peers that are not installed, and they alone"
    shown = {target.id: target.measured for target in summary.judged(run.found)}
    assert "of an empty node -" not in shown["G9"]
    assert " -" not in shown["G2"], "every width has a number"


def test_large_tensors_are_compared_in_parts(pretend_gpu: None) -> None:
    run = context(gpu=True)
    seen = []

    def large(given: Context) -> None:
        """The body of numbers.int64_offsets, at a few tokens."""
        with given.case("large"):
            seen.append(LARGE(given, numbers.Variant("half", 64), 200))

    assert run.run(named("numbers.large", large), float("inf")).status == registry.OK
    assert seen


LARGE = numbers._large  # before a fixture replaces it


def test_too_little_memory_is_no_failure(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**20, 2**40))
    with pytest.raises(NotRun, match="GiB free"):
        LARGE(context(gpu=True), numbers.Variant("half", 64), 200)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (["rope_kernel"], registry.OK),
        (["rope_kernel", "Memcpy DtoD"], registry.FAILED),
        (["elementwise_kernel"], registry.FAILED),
        ([], registry.FAILED),
    ],
)
def test_launches_are_counted(
    events: list[str], status: str, pretend_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kernels and copies; the profiler's mirror of a compiled region is none."""
    kinds = torch.autograd.DeviceType
    fakes = [
        types.SimpleNamespace(name=name, device_type=device, is_user_annotation=mirrored)
        for name, device, mirrored in (
            *((name, kinds.CUDA, False) for name in events),
            ("Torch-Compiled Region", kinds.CUDA, True),
            ("aten::empty", kinds.CPU, False),
        )
    ]

    @contextlib.contextmanager
    def profile(activities: object) -> Iterator[object]:
        yield types.SimpleNamespace(events=lambda: fakes)

    monkeypatch.setattr(compiled, "profile", profile)
    assert outcome_of("compile.one_launch", gpu=True).status == status


def test_an_unwatched_wait_is_a_failure(pretend_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check proves on each run that its net holds."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: None)
    outcome = outcome_of("compile.no_sync", gpu=True)
    assert outcome.failures == ["the net holds: a read of a value was not refused"]


def tool(folder: Path, name: str, output: str, status: int = 0) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["versions.clocks", "speed.clocks_after"])
def test_clocks_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    assert outcome_of(name, gpu=True).detail == "nvidia-smi not found"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tool(tmp_path, "nvidia-smi", "1980 MHz, 3201 MHz, 41, 120.5 W, 0 %, 4 MiB, 575.1")
    outcome = outcome_of(name, gpu=True)
    assert outcome.status == registry.OK
    assert outcome.detail.startswith("clocks.sm 1980 MHz, clocks.mem 3201 MHz, temperature.gpu 41")
    tool(tmp_path, "nvidia-smi", "no devices", status=9)
    assert outcome_of(name, gpu=True).status == registry.NOT_RUN


@pytest.mark.parametrize(
    ("output", "child_status", "status", "detail"),
    [
        ("== ERROR SUMMARY: 0 errors", 0, registry.OK, ""),
        ("== Invalid __global__ read of size 2\n== ERROR SUMMARY: 3 errors", 1, registry.FAILED,
         "memcheck: 3 errors, first Invalid __global__ read of size 2"),
        ("40 calls, 2 wrong\n== ERROR SUMMARY: 0 errors", 1, registry.FAILED, "results: the child"),
        ("cannot attach", 1, registry.NOT_RUN, "does not work here: cannot attach"),
    ],
)  # fmt: skip
def test_memcheck_is_judged_by_what_the_tool_says(
    output: str, child_status: int, status: str, detail: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, pretend_gpu: None,
) -> None:  # fmt: skip
    path = tool(tmp_path, "compute-sanitizer", output, child_status)
    monkeypatch.setattr(sanitizer, "find_tool", lambda: path)
    outcome = outcome_of("memory.memcheck", gpu=True)
    assert outcome.status == status
    assert detail in outcome.detail


def test_memcheck_without_the_tool_says_so(
    monkeypatch: pytest.MonkeyPatch, pretend_gpu: None
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer, "_PLACES", ())
    assert outcome_of("memory.memcheck", gpu=True).detail == "compute-sanitizer not found"


BUILDS = """
import json
from bench.gpu_checks import build, empty_kernel, machine, registry, speed
from bench.gpu_checks.variants import GROUPS, Variant, speed_variants

if __name__ == "__main__":
    target = ("cuda", 90, 32)
    wanted = [GROUPS["widths"][0], Variant("interleaved", 32, heads=(7, 5))]
    built = build.build_all(wanted, target, 120, workers=1)
    late = build.build(wanted, target, 0)  # from here on that target is the driver of this process
    with speed.counted_binaries() as keys:
        for variant in wanted:
            grid, arguments = variant.kernel_arguments()
            from rope_compile.kernels.triton_rope import rope_kernel
            for _ in range(2):
                rope_kernel.warmup(grid=grid, **arguments)
    wrong = build.build([Variant("half", 64, axes=(99,) * 32)], target, float("inf"))
    empty = empty_kernel.nothing.warmup(grid=(1,), num_warps=4)
    print(json.dumps([built, late, len(keys), wrong, ".entry nothing" in empty.asm["ptx"],
                      len({*speed_variants(machine.TIMED)})]))
"""


def test_kernels_are_built_ahead_of_time(tmp_path: Path) -> None:
    """For a GPU that is not there, in processes that stop in time and say what is wrong."""
    path = tmp_path / "builds.py"
    path.write_text(BUILDS)
    done = run_child(str(path), TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=f"{ROOT}")
    built, late, keys, wrong, empty, timed = json.loads(done.splitlines()[-1])
    assert built == [[], 0]
    assert late == [[], 2]
    assert keys == 2
    assert len(wrong[0]) == 1
    assert "axes must be below 16" in wrong[0][0]
    assert empty
    assert timed == 2 * len({"L8", "DS", "P4", "GJ", "QV", "X80", "P3", "X192", "FX", "P2", "L70"})


def test_every_kernel_is_built_before_it_is_called(
    pretend_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def build_all(variants: object, target: object, seconds: float) -> tuple[list[str], int]:
        given.extend([variants, target, seconds])
        return ["half: CompilationError: x"], 3

    active = types.SimpleNamespace(
        get_current_target=lambda: types.SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    )
    monkeypatch.setattr(machine.build, "build_all", build_all)
    monkeypatch.setattr("triton.runtime.driver", types.SimpleNamespace(active=active))
    outcome = outcome_of("versions.build", gpu=True)
    assert outcome.failures == ["build: half: CompilationError: x"]
    assert given[1] == ("cuda", 90, 32)
    assert f"{len(given[0]) - 3} of {len(given[0])} kernels for 90" in outcome.detail
