"""Stage "speed": the rows that the targets are judged by, the most wanted ones first."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import rope_compile as rc
from bench.gpu_checks.machine import empty_launch, read_clocks
from bench.gpu_checks.races import cases, cell_of, race, small_tables, timed, timer_for
from bench.gpu_checks.registry import Check, Context, NotRun, register
from bench.gpu_checks.training import bhsd_providers, compiled_formulas, gradient_providers
from rope_compile.bench import shapes
from rope_compile.bench.case import Case
from rope_compile.bench.counts import SWEEP_BATCHES, SWEEP_TOKENS, count_rows
from rope_compile.bench.host import host_rows, op_tax_rows
from rope_compile.bench.peers import peers
from rope_compile.bench.providers import OURS, Provider, ceilings, ours
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_FRESH, SHAPES
from rope_compile.bench.timers import Prepared

CHECKS: list[Check] = []

TOKENS = (8192, 128, 32768)
DECODE_TOKENS = (1, 8, 32, 64, 128)
TRAINING_TOKENS = 4 * 4096
OUTSIDE_TOKENS = (1, 128, 8192)
LAYOUT_TOKENS = (8192, 2048)
# Of the compiled peers a dry run takes none: a CPU's compiler needs longer than all the rest.
_PEERS = ("hf_eager", "hf_compiled", "hf_compiled_combo", "liger")


def _forward(shape: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        forward(context, shape)

    run.__doc__ = f"{SHAPES[shape].model} beside its peers, cold and (where it fits) warm"
    return run


def forward(context: Context, shape: str) -> None:
    """Every form of ours, the ceilings and the peers, in common rounds."""
    with small_tables(context), torch.no_grad():
        torch.compiler.reset()  # a compiled function keeps few variants
        first = cell_of(context, shape, TOKENS[0])
        names = _PEERS if context.gpu else _PEERS[:1]
        # A compiled copy takes seconds to build, and tells as much at one shape as at six.
        limits = [x for x in ceilings(first, context.device) if shape == "L8" or x.name == "copy"]
        everybody = [*ours(), *limits, *peers(first, context.device, names)]
        for tokens in TOKENS:
            cell = cell_of(context, shape, tokens)
            for cold in (True, False):
                if cold or fits_in_cache(context, cell.copy_bytes):
                    label = f"{shape}, {tokens} tokens, {'cold' if cold else 'warm'}"
                    with context.case(label):
                        timed(context, cell, everybody, cold=cold)


def fits_in_cache(context: Context, copy_bytes: int) -> bool:
    """Whether a warm cache can hold q and k and their results; else warm is as cold."""
    if not context.gpu:
        return False
    return copy_bytes <= torch.cuda.get_device_properties(context.device).L2_cache_size


register(CHECKS, "speed.forward_L8", seconds=50)(_forward("L8"))


@register(CHECKS, "speed.decode", seconds=20)
def decode(context: Context) -> None:
    """One node of a CUDA graph at few tokens, beside an empty kernel's node"""
    with small_tables(context), torch.no_grad():
        for shape in ("L8", "L70t"):
            for tokens in DECODE_TOKENS:
                with context.case(f"{shape}, {tokens} tokens"):
                    cell = cell_of(context, shape, tokens)
                    timer = timer_for(context, cell, cold=False)
                    (case,) = cases(context, cell, timer)
                    contenders = {}
                    if context.gpu:
                        contenders["empty_node"] = "", [Prepared(empty_launch())]
                    for provider in ours()[:2]:
                        one = checked(provider, case)
                        both = {**contenders, OURS: (provider.form, [one])}
                        race(context, cell, both, timer, tuple(contenders))
    context.say("PDL not run: the launcher has no such option")


def checked(provider: Provider, case: Case) -> Prepared:
    """A provider made ready whose result was compared with float64."""
    prepared = provider.prepare(case)
    assert prepared.result is not None, "ours always has one"
    case.check(prepared.result(), rotated=provider.rotated, steps=provider.steps)
    return prepared


@register(CHECKS, "speed.table_branch", seconds=20)
def table_branch(context: Context) -> None:
    """The path for positions outside costs nothing while all are inside"""
    with small_tables(context), torch.no_grad():
        for shape in ("L8", "DS", "P4"):
            for tokens in TOKENS:
                with context.case(f"{shape}, {tokens} tokens"):
                    cell = cell_of(context, shape, tokens)
                    timer = timer_for(context, cell, cold=True)
                    sets = cases(context, cell, timer)
                    contenders = {
                        "no_branch": (IN_PLACE, [_in_place(case, computes=False) for case in sets]),
                        OURS: (IN_PLACE, [_in_place(case, computes=True) for case in sets]),
                    }
                    race(context, cell, contenders, timer, ("no_branch",))


def _in_place(case: Case, *, computes: bool) -> Prepared:
    q, k = case.copy()
    rope, config = case.rope, case.cell.shape.config
    call = functools.partial(
        rc.apply_rope_, q, k, case.positions, rope.cos_sin_cache,
        inv_freq=rope.inv_freq if computes else None, style=config.style, axes=config.axes,
    )  # fmt: skip
    call()
    case.check((q, k), rotated=True, steps=1)
    return Prepared(call)


@register(CHECKS, "speed.training", seconds=45)
def training(context: Context) -> None:
    """Backward, and forward with backward, at four sequences of 4096"""
    # A backward pass is replayed over one forward pass, whose buffers it must leave alone.
    with small_tables(context), torch._functorch.config.patch(donated_buffer=False):
        torch.compiler.reset()
        compiled = compiled_formulas() if context.gpu else {}
        for mode in ("backward", "full"):
            with context.case(mode):
                cell = cell_of(context, "L8", TRAINING_TOKENS)
                everybody = gradient_providers(compiled, full=mode == "full")
                columns = {"mode": mode}
                if mode == "full":  # twice the bytes that the cell counts
                    columns |= {"bytes": None, "gb_per_s": None}
                timed(context, cell, everybody, cold=True, **columns)


@register(CHECKS, "speed.host", seconds=25)
def host(context: Context) -> None:
    """Host time of one call at one token, and the tax of an operator"""
    calls = 2000 if context.gpu else 20
    with small_tables(context):
        with context.case("host time"):
            rows = host_rows(context.device, "bfloat16", calls=calls, compiled=context.gpu)
            context.emit(rows)
        with context.case("tax of an operator"):
            context.emit(op_tax_rows(context.device, calls=calls))


@register(CHECKS, "speed.counts", seconds=30)
def counts(context: Context) -> None:
    """Launches, allocations, peak memory, graph breaks, copies, recompiles"""
    with small_tables(context), context.case("counts"):
        context.emit(count_rows(context.device))


@contextlib.contextmanager
def counted_binaries() -> Iterator[set[str]]:
    """The kernels of ours that Triton needs inside and has not had in this process."""
    from triton import knobs

    keys: set[str] = set()
    before = knobs.runtime.jit_cache_hook

    def note(*, key: str, repr: str = "", **_: object) -> bool:
        if "rope_kernel" in repr or "rope_kernel" in key:
            keys.add(key)
        return False  # true would mean that the hook compiles it

    knobs.runtime.jit_cache_hook = note
    try:
        yield keys
    finally:
        knobs.runtime.jit_cache_hook = before


@register(CHECKS, "speed.binaries", rehearse=False, seconds=15)
def binaries(context: Context) -> None:
    """At most three Triton binaries serve a width, dtype and style, whatever the token count"""
    most = 0
    for style in ("half", "interleaved"):
        with context.case(style), torch.no_grad(), counted_binaries() as keys:
            # Heads that nothing else here has, so that every binary is a new one.
            config = rc.RopeConfig(head_dim=128, max_position=4096, style=style)
            sweep(rc.get_rope(config, context.device), (7, 5), context.device)
            most = max(most, len(keys))
            if not 1 <= len(keys) <= 3:
                context.fail(style, f"{len(keys)} binaries")
    note = f"functional and in place, over {len(SWEEP_TOKENS)} x {len(SWEEP_BATCHES)} sizes"
    base = Row(provider=OURS, metric="binaries", unit="count", dtype="bfloat16")
    context.emit([replace(base, y_50=float(most), note=note)])


def sweep(rope: rc.RotaryEmbedding, heads: tuple[int, int], device: torch.device) -> None:
    """Both forms over every number of tokens and sequences."""
    for batch in SWEEP_BATCHES:
        for tokens in SWEEP_TOKENS:
            at = torch.arange(tokens, device=device)
            q, k = (
                torch.zeros(batch, tokens, n, 128, dtype=torch.bfloat16, device=device)
                for n in heads
            )
            rope(at, q, k)
            rope.apply_(at, q, k)


for _shape in ("L70", "DS", "P4", "GJ", "QV"):
    register(CHECKS, f"speed.forward_{_shape}", seconds=25)(_forward(_shape))


@register(CHECKS, "speed.widths", seconds=20)
def widths(context: Context) -> None:
    """Other widths and styles, to be compared with width 128 in half style"""
    with small_tables(context), torch.no_grad():
        for shape in ("X80", "P3", "X192", "FX", "P2"):
            with context.case(shape):
                cell = cell_of(context, shape, TOKENS[0])
                copy = ceilings(cell, context.device)[0]
                timed(context, cell, [*ours()[:2], copy], cold=True)


@register(CHECKS, "speed.outside", seconds=20)
def outside(context: Context) -> None:
    """What positions outside the table cost: all of them, and one"""
    with small_tables(context), torch.no_grad():
        for tokens in OUTSIDE_TOKENS:
            with context.case(f"{tokens} tokens"):
                cell = cell_of(context, "L8", tokens)
                timer = timer_for(context, cell, cold=True)
                contenders = {}
                for name, where in (
                    ("inside", slice(0)), ("one outside", slice(1)), ("all outside", slice(None)),
                ):  # fmt: skip
                    sets = cases(context, cell, timer)
                    for case in sets:
                        case.positions[where] += shapes.ROWS + 5
                    contenders[name] = OUT_FRESH, [checked(ours()[1], case) for case in sets]
                race(context, cell, contenders, timer, ("inside",), kernel="rope_outside")


@register(CHECKS, "speed.liger_layout", seconds=15)
def liger_layout(context: Context) -> None:
    """Tensors that lie in memory heads first, as transformers' attention makes them"""
    with small_tables(context), torch.no_grad():
        for tokens in LAYOUT_TOKENS:
            with context.case(f"{tokens} tokens"):
                cell = cell_of(context, "L8", tokens)
                timed(context, cell, bhsd_providers(), cold=True, layout="BHSD")


@register(CHECKS, "speed.flashinfer", rehearse=False)
def flashinfer(context: Context) -> None:
    """FlashInfer, in place"""
    raise NotRun("it compiles for minutes on first use, which this script has no time for")


@register(CHECKS, "speed.clocks_after", rehearse=False)
def clocks_after(context: Context) -> None:
    """Clocks and temperature after everything has run"""
    with context.case("nvidia-smi"):
        context.say(read_clocks())
