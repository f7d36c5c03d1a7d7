"""The main job, start to end: speculative decoding past both tables, every promise measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import rope_compile as rc
from rope_compile.demo.progress import Progress
from rope_compile.demo.promises import (
    ERROR_BOUND,
    Compiled,
    Graphed,
    Promise,
    count_host_reads,
    largest_error,
    recompiles_forbidden,
    table_state,
)
from rope_compile.demo.report import Report
from rope_compile.demo.scene import Missing, Options, Scene, other_ropes, tiny_scene
from rope_compile.demo.smollm2 import smollm2_scene
from rope_compile.demo.speculation import (
    Cache,
    CachedModel,
    Forward,
    Greedy,
    Party,
    Speculation,
    greedy,
    speculate,
)
from rope_compile.demo.timing import Timing, time_rope_calls

__all__ = ["STAGES", "Missing", "Options", "Report", "between_rounds", "check", "run"]

_SCENES = {"tiny": tiny_scene, "smollm2": smollm2_scene}
STAGES = 7
# Rows that the plan asks for beyond the longest position a round may touch.
_MARGIN = 64


def between_rounds(scene: Scene) -> None:
    """Called between rounds of the compiled run; a test puts something harmful here."""


def run(options: Options, progress: Progress | None = None) -> Report:
    """Run the demo and measure every promise; ``report.exit_code`` is 0 if all hold.

    Raises:
        ValueError: an option is out of range, or the device is not there.
        Missing: weights, or packages that read them, are not installed.
    """
    progress = progress or Progress(None, STAGES)
    started = time.monotonic()
    device = check(options)
    torch.compiler.reset()  # graphs of earlier code in this process are not ours to count
    with torch.no_grad(), _deterministic_matmul():
        progress.stage("building the models")
        scene = _SCENES[options.model](options, device)
        report = _measure(scene, options, device, progress)
    report.facts["seconds"] = round(time.monotonic() - started, 1)
    return report


def _pick_device(name: str) -> torch.device:
    """``"auto"`` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must name a device of this machine, got cuda and there is none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def check(options: Options) -> torch.device:
    """The device that the options mean.

    Raises:
        ValueError: an option is out of range, or the device is not there.
    """
    if options.model not in _SCENES:
        raise ValueError(f"--model must be one of {', '.join(_SCENES)}, got {options.model}")
    for flag, value in (("--steps", options.steps), ("--tokens", options.draft_tokens)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if options.proposals > 64:
        raise ValueError(
            f"--steps times --tokens must be at most 64 in the demo, got {options.proposals}"
        )
    return _pick_device(options.device)


@contextlib.contextmanager
def _deterministic_matmul() -> Iterator[None]:
    """float32 products in float32: TF32 would blur which token is the best one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _measure(scene: Scene, options: Options, device: torch.device, progress: Progress) -> Report:
    plan = rc.CapturePlan(
        max_position=scene.target_rope.config.max_position,
        draft_max_position=scene.draft_rope.config.max_position,
        speculative_steps=options.steps,
        draft_tokens=options.draft_tokens,
        margin=_MARGIN,
    )
    rows = plan.reserve_length
    new_tokens = scene.length - len(scene.prompt)
    ropes = (scene.target_rope, scene.draft_rope)

    progress.stage("plain greedy decoding by the target, the tokens to meet", new_tokens)
    reference = greedy(
        scene.reference,
        scene.reference.new_cache(rows),
        scene.prompt,
        scene.length,
        progress.advance,
    )

    progress.stage("speculative decoding, tables not reserved", new_tokens)
    unreserved_rows = max(rope.capacity for rope in scene.unreserved_ropes)
    unreserved = _speculate(scene, scene.unreserved, rows, options, progress)

    progress.stage("reserving rows and compiling both models", 3)
    original_rows = [rope.config.max_position for rope in ropes]
    rc.prepare_for_capture([scene.target, scene.draft], plan)
    progress.advance()
    before = table_state(ropes)
    pair = _compile_pair(scene, rows, options, progress)

    progress.stage("speculative decoding, compiled", new_tokens)
    compiled = _run_compiled(scene, pair, rows, options, device, progress)
    after = table_state(ropes)

    progress.stage("looking for host reads, measuring errors", 3)
    tokens = torch.tensor(scene.prompt[:3], device=device)
    positions = torch.tensor([0, scene.length - 1, rows - 1], device=device)
    host_reads = [
        found
        for model in (scene.target, scene.draft)
        for found in count_host_reads(model, tokens, positions, model.new_cache(rows))
    ]
    progress.advance()
    error = max(largest_error(rope) for rope in (*ropes, *other_ropes(device)))

    progress.stage("timing one rope call", 2)
    timings = _timings(scene, pair.backend, progress)

    promises = [
        _tokens("tokens", "compiled: tokens equal plain greedy decoding", compiled, reference),
        _tokens("tokens_unreserved", "tables not reserved: tokens equal", unreserved, reference),
        _beyond("beyond_target", "target", compiled.highest_target_position, original_rows[0]),
        _beyond("beyond_draft", "draft", compiled.highest_draft_position, original_rows[1]),
        Promise(
            "outside_unreserved",
            "tables not reserved: highest position is outside both",
            unreserved.highest_target_position,
            f"at least {unreserved_rows}",
            unreserved.highest_target_position >= unreserved_rows,
        ),
        _none("recompiles", "recompiles after warm-up", pair.recompiles),
        _none("graph_breaks", "graph breaks", pair.graph_breaks),
        Promise(
            "graphs",
            "graphs compiled, one for each model",
            pair.graphs,
            "2",
            pair.graphs == 2,
        ),
        _none("host_reads", "host reads in a forward", host_reads),
        Promise(
            "reallocations",
            "tables moved or resized after the hook",
            sum(a != b for a, b in zip(before, after, strict=True)),
            "0",
            before == after,
        ),
        Promise(
            "reserved",
            "rows of both tables after the hook",
            " and ".join(str(capacity) for _, capacity in before),
            f"at least {plan.required_length}",
            all(capacity >= plan.required_length for _, capacity in before),
        ),
        Promise(
            "error",
            "largest error against float64, any position",
            error,
            f"at most {ERROR_BOUND:.1e}",
            error <= ERROR_BOUND,
        ),
        Promise(
            "speculation",
            "the draft is right at times, not always",
            compiled.acceptance,
            "over 0 and under 1",
            0 < compiled.acceptance < 1,
        ),
        *scene.extra_promises,
    ]
    facts: dict[str, object] = {
        "device": _device_name(device),
        "torch": torch.__version__,
        "compiled by": pair.backend
        + (", replayed as CUDA graphs" if device.type == "cuda" else ""),
        "rows": (
            f"target {original_rows[0]}, draft {original_rows[1]}; {before[0][1]} after the hook"
        ),
        "decoded": f"{new_tokens} tokens after a prompt of {len(scene.prompt)}",
        "rounds": (
            f"{compiled.rounds}, each of {options.steps} steps with {options.draft_tokens} tokens "
            f"drafted; {compiled.accepted} of {compiled.proposed} accepted"
        ),
        "closest call": f"best and second logit {reference.smallest_margin:.1e} apart",
        "warm-up": f"{pair.seconds:.1f} s for {pair.graphs} graphs",
    }
    notes = [f"{promise.name}: {promise.detail}" for promise in promises if promise.detail]
    notes += pair.notes
    if scene.describe:
        notes.append("decoded text: " + " ".join(scene.describe(compiled.tokens).split()))
    return Report(scene.title, facts, promises, timings, notes)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def _speculate(
    scene: Scene,
    models: tuple[CachedModel, CachedModel],
    rows: int,
    options: Options,
    progress: Progress,
) -> Speculation:
    """Eager speculation with the given two models."""
    target, draft = (Party(model, model, model.new_cache(rows)) for model in models)
    return speculate(
        target,
        draft,
        scene.prompt,
        scene.length,
        steps=options.steps,
        draft_tokens=options.draft_tokens,
        after_round=progress.advance,
    )


@dataclass
class _Pair:
    """The compiled target and draft, warmed up, with the inputs they were warmed up on."""

    target: Compiled
    draft: Compiled
    caches: tuple[Cache, Cache]
    backend: str
    seconds: float
    notes: list[str]

    @property
    def graphs(self) -> int:
        return self.target.graphs + self.draft.graphs

    @property
    def recompiles(self) -> list[str]:
        return self.target.recompiles + self.draft.recompiles

    @property
    def graph_breaks(self) -> list[str]:
        return self.target.graph_breaks + self.draft.graph_breaks


def _compile_pair(scene: Scene, rows: int, options: Options, progress: Progress) -> _Pair:
    """Compile both models and run each once, with Inductor where it can build code here."""
    if options.backend != "auto":
        return _compile_with(options.backend, scene, rows, options, progress, [])
    if scene.slow_to_compile and scene.target_rope.cos_sin_cache.device.type == "cpu":
        note = (
            "the graphs ran through aot_eager, because Inductor takes minutes to build the C++ for "
            "so many layers; --backend inductor does it all the same"
        )
        return _compile_with("aot_eager", scene, rows, options, progress, [note])
    try:
        return _compile_with("inductor", scene, rows, options, progress, [])
    except torch._dynamo.exc.BackendCompilerFailed as error:
        torch.compiler.reset()
        note = (
            "Inductor cannot build code here, so the graphs ran through aot_eager; it said: "
            + str(error).strip().partition("\n")[0]
        )
        return _compile_with("aot_eager", scene, rows, options, progress, [note])


def _compile_with(
    backend: str,
    scene: Scene,
    rows: int,
    options: Options,
    progress: Progress,
    notes: list[str],
) -> _Pair:
    started = time.monotonic()
    target, draft = Compiled(scene.target, backend), Compiled(scene.draft, backend)
    caches = scene.target.new_cache(rows), scene.draft.new_cache(rows)
    with rc.capture_guard([scene.target, scene.draft]):
        for compiled, cache, count in zip(
            (target, draft), caches, (options.proposals + 1, 1), strict=True
        ):
            compiled(*_warm_up_inputs(count, cache), cache)
            progress.advance()
    return _Pair(target, draft, caches, backend, time.monotonic() - started, notes)


def _warm_up_inputs(count: int, cache: Cache) -> tuple[Tensor, Tensor]:
    positions = torch.arange(count, device=cache[0].device)
    return torch.zeros_like(positions), positions


def _run_compiled(
    scene: Scene,
    pair: _Pair,
    rows: int,
    options: Options,
    device: torch.device,
    progress: Progress,
) -> Speculation:
    """Speculate with the compiled pair; on a GPU through one captured CUDA graph for each model."""
    decode: tuple[Forward, Forward] = (pair.target, pair.draft)
    if device.type == "cuda":
        with rc.capture_guard([scene.target, scene.draft]):
            decode = (
                _capture(pair.target, options.proposals + 1, pair.caches[0]),
                _capture(pair.draft, 1, pair.caches[1]),
            )

    def after_round(count: int) -> None:
        progress.advance(count)
        between_rounds(scene)

    with recompiles_forbidden():
        return speculate(
            Party(scene.target, decode[0], pair.caches[0]),
            Party(scene.draft, decode[1], pair.caches[1]),
            scene.prompt,
            scene.length,
            steps=options.steps,
            draft_tokens=options.draft_tokens,
            after_round=after_round,
        )


def _capture(compiled: Compiled, count: int, cache: Cache) -> Graphed:
    return Graphed(compiled, *_warm_up_inputs(count, cache), cache)


def _timings(scene: Scene, backend: str, progress: Progress) -> list[Timing]:
    return time_rope_calls(
        scene.target_rope, scene.heads, scene.kv_heads, (8, 512), backend, progress.advance
    )


def _tokens(name: str, claim: str, run: Speculation, reference: Greedy) -> Promise:
    equal = sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))
    same = run.tokens == reference.tokens
    return Promise(name, claim, f"{equal} of {len(reference.tokens)}", "all", same)


def _beyond(name: str, who: str, highest: int, rows: int) -> Promise:
    return Promise(
        name,
        f"{who}: highest position passes its original rows",
        highest,
        f"at least {rows}",
        highest >= rows,
    )


def _none(name: str, claim: str, found: list[str]) -> Promise:
    """``found`` must be empty."""
    return Promise(name, claim, len(found), "0", not found, found[0] if found else "")
