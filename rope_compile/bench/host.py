"""What a call costs before any work is done: host time at one token, and the tax of an operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rope_compile.bench.case import Case
from rope_compile.bench.matrix import describe
from rope_compile.bench.peers import peers
from rope_compile.bench.protocol import Samples, interleave, ratio, spread
from rope_compile.bench.providers import NATIVE, OURS, kernel_in_use, ours
from rope_compile.bench.rows import Row
from rope_compile.bench.shapes import IN_PLACE, OUT_FRESH, SHAPES, Cell
from rope_compile.bench.timers import loop

__all__ = [
    "CALLS",
    "QUICK_CALLS",
    "ROPE",
    "TAX",
    "WITH_AUTOGRAD",
    "host_rows",
    "op_tax_rows",
]

CALLS, QUICK_CALLS = 10_000, 1_000
_CALLS_PER_SAMPLE = 100


def host_rows(device: torch.device, dtype: str, *, calls: int, compiled: bool) -> list[Row]:
    """Host microseconds of one call at one token of L8, every way to make it, in common rounds."""
    cell = Cell(SHAPES["L8"], dtype, 1, torch.get_num_threads() if device.type == "cpu" else 0)
    base = replace(describe(cell), metric="host_time", cache="warm")
    with torch.no_grad():
        ways = _ways(Case(cell, device), compiled)
        samples = _sample({name: call for name, (_, call) in ways.items()}, calls, device)
    return [
        _row(replace(base, provider=name, form=form), samples, name)
        for name, (form, _) in ways.items()
    ]


def _ways(case: Case, compiled: bool) -> dict[str, tuple[str, Callable[[], object]]]:
    """Name -> form and call; from the bare kernel up to the compiled module, and two floors."""
    rope, config = case.rope, case.cell.shape.config
    q, k = case.copy()
    operands = (
        case.q, case.k, case.positions, rope.cos_sin_cache, rope.inv_freq, config.lane_axes,
        config.style, config.rotary_offset, config.attention_scaling, False,
    )  # fmt: skip
    ways: dict[str, tuple[str, Callable[[], object]]] = {}
    operators = torch.ops.rope_compile
    if kernel_in_use(case.device) == NATIVE:
        ways["kernel"] = OUT_FRESH, functools.partial(operators.rope_native.default, *operands)
    ways["op"] = OUT_FRESH, functools.partial(operators.rope.default, *operands)
    for provider in ours()[1:3]:  # apply_rope, and the module
        ways[provider.name] = provider.form, provider.prepare(case).call
    ways[f"{OURS}_module in place"] = (
        IN_PLACE,
        functools.partial(rope.apply_, case.positions, q, k),
    )
    names = ["hf_eager"]
    if compiled:
        torch.compiler.reset()
        module = torch.compile(rope, fullgraph=True)
        call = functools.partial(module, case.positions, case.q, case.k)
        ways[f"{OURS}_module compiled"] = OUT_FRESH, call
        names.append("hf_compiled")
    for provider in peers(case.cell, case.device, tuple(names)):
        if provider.role == "peer":
            ways[provider.name] = provider.form, provider.prepare(case).call
    ways["torch.add"] = OUT_FRESH, functools.partial(torch.add, case.k, case.k)
    ways["nn.Identity"] = "", functools.partial(nn.Identity(), case.k)
    return ways


def _sample(
    calls_by_name: Mapping[str, Callable[[], object]], calls: int, device: torch.device
) -> Samples:
    repeats = min(_CALLS_PER_SAMPLE, calls)

    def sample(call: Callable[[], object]) -> float:
        seconds = loop(call, repeats)
        if device.type == "cuda":  # the queue must not fill up, or the host waits in the next one
            torch.cuda.synchronize(device)
        return seconds

    samplers = {name: functools.partial(sample, call) for name, call in calls_by_name.items()}
    interleave(samplers, 1)  # compiles, and fills caches
    return interleave(samplers, max(1, calls // repeats))


def _row(row: Row, samples: Samples, name: str) -> Row:
    seconds = spread(samples[name])
    row = replace(
        row,
        y_50=seconds.median * 1e6,
        y_20=seconds.p20 * 1e6,
        y_80=seconds.p80 * 1e6,
        rounds=len(samples[name]),
    )
    if "hf_eager" not in samples:
        return row
    times = ratio(samples["hf_eager"], samples[name])
    return replace(
        row, ratio_to="hf_eager", ratio=times.median, ratio_low=times.low, ratio_high=times.high
    )


def op_tax_rows(device: torch.device, *, calls: int) -> list[Row]:
    """What registration costs: operators minus a Python body, grad mode off and on.

    The body allocates two outputs, and trivial operators with the schema of ``rope`` do no more.
    ``rope`` itself is among them where its kernel is native: then what it costs beyond that body,
    the rotation included, is an upper bound of its tax.
    """
    cell = Cell(SHAPES["L8"], "float32", 1, torch.get_num_threads() if device.type == "cpu" else 0)
    base = replace(
        describe(cell), kernel="op_tax", metric="host_time", form=OUT_FRESH, cache="warm"
    )
    case = Case(cell, device)
    q, k = (x.clone().requires_grad_() for x in case.contiguous)
    operands = (q, k, case.positions, case.rope.cos_sin_cache, None, (), "half", 0, 1.0, False)
    calls_by_name = _trivial_calls()
    if kernel_in_use(device) == NATIVE:
        calls_by_name[ROPE] = torch.ops.rope_compile.rope.default
    contenders = {name: functools.partial(call, *operands) for name, call in calls_by_name.items()}
    rows = []
    for mode, enabled in (("no grad", False), ("grad", True)):
        with torch.set_grad_enabled(enabled):
            samples = _sample(contenders, calls, device)
        for name, seconds in samples.items():
            rows.append(_row(replace(base, provider=f"{name}, {mode}"), samples, name))
            if name != BODY:
                pairs = zip(seconds, samples[BODY], strict=True)
                taxes = {TAX: [with_tax - bare for with_tax, bare in pairs]}
                tax = replace(base, provider=f"{TAX} of {name}, {mode}", note="round by round")
                rows.append(_row(tax, taxes, TAX))
    return rows


BODY, TAX = "plain Python body", "tax"
REGISTERED, WITH_AUTOGRAD = "define + impl", "define + impl + register_autograd"
ROPE = "rope_compile::rope, native"


def _trivial_body(q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _trivial_calls() -> dict[str, Callable[..., object]]:
    """The body, and operators around it with the same arguments to parse as ``rope`` has."""
    _register_trivial_operators()
    operators = torch.ops.rope_compile_bench
    return {
        BODY: _trivial_body,
        REGISTERED: operators.trivial.default,
        WITH_AUTOGRAD: operators.trivial_grad.default,
    }


@functools.cache
def _register_trivial_operators() -> torch.library.Library:
    """Once for the process; the cache keeps the library, with which its operators would go."""
    library = torch.library.Library("rope_compile_bench", "DEF")
    schema = str(torch.ops.rope_compile.rope.default._schema)
    for name in ("trivial", "trivial_grad"):
        library.define(schema.replace("rope_compile::rope", name, 1))
        for key in ("CPU", "CUDA"):
            library.impl(name, _trivial_body, key)
    torch.library.register_autograd(
        "rope_compile_bench::trivial_grad", lambda ctx, q, k: (q, k, *(None,) * 8), lib=library
    )
    return library
