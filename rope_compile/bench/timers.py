"""How one sample is taken: a loop on a CPU, a replayed graph on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rope_compile.bench.case import Pair

__all__ = ["CpuTimer", "CudaGraphTimer", "Prepared", "Timer", "loop"]


def loop(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds a call, over ``repeats`` calls in a row."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


@dataclass(frozen=True)
class Prepared:
    """A provider, ready to run on the tensors of one case.

    Attributes:
        call: one call, as it is timed.
        result: makes a call and returns q and k ``[tokens, heads, head_dim]``; None where there is
            nothing to compare.
    """

    call: Callable[[], object]
    result: Callable[[], Pair] | None = None


class Timer(Protocol):
    """Turns a provider into something that takes one sample, in seconds a call."""

    input_sets: int
    cache: str  # "warm" or "cold"

    def sampler(self, prepared: Sequence[Prepared]) -> Callable[[], float]:
        """``prepared`` is the same provider on ``input_sets`` different sets of tensors."""
        ...


# Buffers of one's own have left the caches while the others ran, which a call that takes longer
# than this does by itself.
_COLD_BELOW_S = 5e-3


class CpuTimer:
    """Calls in a loop, long enough for the clock: short calls repeat within a sample."""

    input_sets = 1
    cache = "warm"

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, shortest_sample_s: float = 200e-6
    ) -> None:
        self._clock = clock
        self._shortest_sample_s = shortest_sample_s

    def sampler(self, prepared: Sequence[Prepared]) -> Callable[[], float]:
        (one,) = prepared
        one.call()  # warms buffers and caches
        once = loop(one.call, 1, self._clock)
        if once < self._shortest_sample_s:  # one call is too short to plan by
            once = loop(one.call, 10, self._clock)
        repeats = max(1, -int(-self._shortest_sample_s // max(once, 1e-8)))

        def sample() -> float:
            if once < _COLD_BELOW_S:
                one.call()
            return loop(one.call, repeats, self._clock)

        return sample


class CudaGraphTimer:
    """Replays a CUDA graph of many calls, so that launches from the host cost nothing.

    ``input_sets`` sets of tensors take turns inside the graph: 1 is warm, enough of them to exceed
    the level-2 cache several times is cold. The stream of the first calls is the captured one:
    autograd runs a backward pass on the stream of its forward pass.
    """

    def __init__(self, input_sets: int = 1, calls: int = 200, cache: str = "warm") -> None:
        self.input_sets = input_sets
        self.cache = cache
        self._calls = calls

    @classmethod
    def cold(cls, bytes_per_set: int, device: torch.device, calls: int = 200) -> CudaGraphTimer:
        """Input sets of more than three times the level-2 cache in all.

        No more than ``calls`` of them: where that is not enough, as at a few tokens, it is warm.
        """
        cache: int = torch.cuda.get_device_properties(device).L2_cache_size
        wanted = 3 * cache // max(1, bytes_per_set) + 2
        return cls(wanted, calls, "cold") if wanted <= calls else cls(1, calls, "warm")

    def sampler(self, prepared: Sequence[Prepared]) -> Callable[[], float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiled and loaded before the capture
            for one in prepared:
                one.call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(self._calls):
                prepared[number % len(prepared)].call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1e3 / self._calls

        return sample
