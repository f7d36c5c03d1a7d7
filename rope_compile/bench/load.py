"""What else ran on the machine while something was timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUSY_CORES", "LoadMeter", "load_average"]

# Others that use this much of a core make a run worthless: single times then move several fold.
BUSY_CORES = 0.5
# The kernel counts in ticks of 10 ms; over less than this many seconds that is too coarse.
_SHORTEST_S = 0.2


def load_average() -> str:
    """The 1, 5 and 15 minute load, or why there is none."""
    try:
        return " ".join(f"{load:.2f}" for load in os.getloadavg())
    except (OSError, AttributeError):
        return "unknown"


@dataclass(frozen=True)
class _Reading:
    at_s: float
    all_s: float  # processor seconds of the whole machine, stolen ones included
    own_s: float  # of this process and its finished children


class LoadMeter:
    """Measures how many cores other processes took since it was started; Linux only."""

    def __init__(self) -> None:
        self._start = _read()

    def others(self) -> float | None:
        """Cores used by others on average, or None where that cannot be said."""
        now = _read()
        if self._start is None or now is None or now.at_s - self._start.at_s < _SHORTEST_S:
            return None
        used = (now.all_s - self._start.all_s) - (now.own_s - self._start.own_s)
        return max(0.0, used / (now.at_s - self._start.at_s))


def _read() -> _Reading | None:
    try:
        line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
        ticks = [int(value) for value in line.split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = ticks
    del idle, waiting
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return _Reading(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))
