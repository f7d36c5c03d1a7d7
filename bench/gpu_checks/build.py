"""Builds kernels ahead of time in several processes, so that no check waits for the compiler.

The children need no GPU: they are told the target, and Triton's own launcher takes it from there
into the cache on disk, where this process finds the binaries.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
import types
from collections.abc import Iterable, Sequence

from bench.gpu_checks.registry import first_line
from bench.gpu_checks.variants import Variant

__all__ = ["build", "build_all"]

Target = tuple[str, int | str, int]  # Triton's GPUTarget, in a form that can be sent


class _TargetOnly:
    """What Triton asks a driver on the way to a binary that it does not load."""

    utils = types.SimpleNamespace(get_device_properties=lambda _device: {})

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(*target)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def build(variants: Sequence[Variant], target: Target, stop_at: float) -> tuple[list[str], int]:
    """Compile some variants in this process until ``time.time()`` is ``stop_at``.

    Returns:
        What went wrong, one text each, and how many variants were left.
    """
    from triton.runtime import driver

    from rope_compile.kernels import triton_rope

    driver.set_active(_TargetOnly(target))
    wrong = []
    for number, variant in enumerate(variants):
        if time.time() > stop_at:
            return wrong, len(variants) - number
        try:
            grid, arguments = variant.kernel_arguments()
            triton_rope.rope_kernel.warmup(grid=grid, **arguments)
        except Exception as error:
            wrong.append(f"{variant}: {type(error).__name__}: {first_line(error)}")
    return wrong, 0


def build_all(
    variants: Iterable[Variant], target: Target, timeout_s: float, workers: int = 0
) -> tuple[list[str], int]:
    """Compile variants in processes of their own; what `build` returns, for all of them."""
    wanted = list(dict.fromkeys(variants))
    count = workers or max(1, min(16, (os.cpu_count() or 2) - 1))
    # Dealt like cards: the first ones are wanted first.
    shares = [wanted[first::count] for first in range(min(count, len(wanted)))]
    context = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA context
    stop_at = time.time() + timeout_s
    with concurrent.futures.ProcessPoolExecutor(len(shares), mp_context=context) as pool:
        found = list(pool.map(build, shares, [target] * len(shares), [stop_at] * len(shares)))
    return [text for wrong, _ in found for text in wrong], sum(left for _, left in found)
