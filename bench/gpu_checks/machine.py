"""Stage "versions": what runs here, how warm it is, what the memory can do; kernels built ahead."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.gpu_checks import build
from bench.gpu_checks.registry import Check, Context, NotRun, first_line, register
from bench.gpu_checks.variants import GROUPS, speed_variants
from rope_compile.bench.protocol import interleave, spread
from rope_compile.bench.providers import kernel_in_use
from rope_compile.bench.rows import Row
from rope_compile.bench.timers import CpuTimer, CudaGraphTimer, Prepared, Timer, loop

CHECKS: list[Check] = []

# Ids of the shapes that are timed, whose kernels are built with the others.
TIMED = ("L8", "L70", "DS", "P4", "GJ", "QV", "X80", "P3", "X192", "FX", "P2")
_QUERY = (
    "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used,driver_version"
)
_COPY_BYTES = 2**31
# A kernel that is being compiled when time is up is finished.
_MARGIN_S = 5.0


@register(CHECKS, "versions.software", needs_gpu=False)
def software(context: Context) -> None:
    """Which versions, which device, which kernel answers."""
    with context.case("versions"):
        context.say(f"python {platform.python_version()}, torch {torch.__version__}")
        try:
            context.say(f"triton {importlib.metadata.version('triton')}")
        except importlib.metadata.PackageNotFoundError:
            context.say("no triton")
        if context.gpu:
            properties = torch.cuda.get_device_properties(context.device)
            context.say(f"{properties.name}, CUDA {torch.version.cuda}")
            context.say(f"{properties.multi_processor_count} SMs, {properties.L2_cache_size >> 20}"
                        f" MiB L2, {properties.total_memory >> 30} GiB")  # fmt: skip
        context.say(f"kernel: {kernel_in_use(context.device)}")


@register(CHECKS, "versions.clocks", rehearse=False)
def clocks(context: Context) -> None:
    """Clocks, temperature and other users of the device before anything runs."""
    with context.case("nvidia-smi"):
        context.say(read_clocks())


def read_clocks() -> str:
    """One line of nvidia-smi.

    Raises:
        NotRun: there is no such tool, or it fails.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise NotRun("nvidia-smi not found")
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotRun(f"nvidia-smi fails: {first_line(error)}") from None
    pairs = zip(_QUERY.split(","), child.stdout.split(","), strict=False)
    return ", ".join(f"{name} {value.strip()}" for name, value in pairs)


@register(CHECKS, "versions.build", rehearse=False)
def build_kernels(context: Context) -> None:
    """Every kernel of the run compiles, before anything waits for it."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    wanted = [*speed_variants(TIMED), *(v for group in GROUPS.values() for v in group)]
    known = (target.backend, target.arch, target.warp_size)
    with context.case(f"{len(wanted)} kernels"):
        wrong, left = build.build_all(wanted, known, max(1.0, context.seconds_left() - _MARGIN_S))
        for text in wrong:
            context.fail("build", text)
        context.say(f"{len(wanted) - left} of {len(wanted)} kernels for {target.arch}")
    with context.case("what was built is found"):
        variant = GROUPS["widths"][0]
        operands = (*variant.inputs(context.device), variant.positions().to(context.device))
        milliseconds = loop(lambda: variant.call(*operands), 1) * 1e3
        context.synchronize()
        context.say(f"the first call took {milliseconds:.0f} ms")


@register(CHECKS, "versions.ceilings")
def ceilings(context: Context) -> None:
    """What a copy and an empty kernel take here: no rate and no node can be better."""
    count = (_COPY_BYTES if context.gpu else 2**22) // 4
    source = torch.randn(count // 2, dtype=torch.float32, device=context.device)
    target = torch.empty_like(source)
    contenders = {"copy": (functools.partial(target.copy_, source), 5)}
    if context.gpu:
        contenders["empty kernel"] = (empty_launch(), 200)
    for name, (call, calls) in contenders.items():
        with context.case(name):
            timer: Timer = CudaGraphTimer(1, calls) if context.gpu else CpuTimer()
            samples = interleave({name: timer.sampler([Prepared(call)])}, 10 if context.gpu else 2)
            seconds = spread(samples[name])
            row = Row(
                kernel="ceiling",
                provider=name,
                y_50=seconds.median * 1e6,
                y_20=seconds.p20 * 1e6,
                y_80=seconds.p80 * 1e6,
                rounds=float(len(samples[name])),
                cache="cold" if name == "copy" else "warm",
            )
            if name == "copy":
                moved = 2 * source.numel() * source.element_size()
                rate = moved / seconds.median / 1e9
                row = replace(row, bytes=float(moved), gb_per_s=rate)
                context.say(f"copy {rate:.0f} GB/s")
            else:
                context.say(f"{name} {seconds.median * 1e6:.2f} us a node")
            context.emit([row])
    if context.gpu:
        with context.case("launch from the host"):
            call = contenders["empty kernel"][0]
            microseconds = min(loop(call, 100) for _ in range(5)) * 1e6
            context.synchronize()
            context.say(f"{microseconds:.1f} us to launch it")


def empty_launch() -> Callable[[], object]:
    """One launch of a Triton kernel that does nothing."""
    from bench.gpu_checks import empty_kernel

    return functools.partial(empty_kernel.nothing[(1,)], num_warps=4)
