"""A progress bar on a terminal, one line a stage elsewhere, nothing when silent."""

from __future__ import annotations

import time
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 30
_REDRAW_SECONDS = 0.1


class Progress:
    """Shows which stage of ``stages`` is running and how far it is.

    On a terminal: one line that is redrawn at most ten times a second and wiped at the end. On
    anything else: one plain line when a stage begins. With ``stream`` None: nothing. ``seconds``
    holds how long each finished stage took.
    """

    def __init__(self, stream: TextIO | None, stages: int) -> None:
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._stages = stages
        self._stage = 0
        self._name = ""
        self._steps = 0
        self._done = 0
        self._drawn_at = 0.0
        self._started_at = self._stage_at = time.monotonic()
        self.seconds: dict[str, float] = {}

    def stage(self, name: str, steps: int = 1) -> None:
        """Begin the next stage, of ``steps`` steps."""
        self._note_seconds()
        self._stage += 1
        self._name, self._steps, self._done = name, max(1, steps), 0
        if self._terminal:
            self._draw()
        else:
            self._write(f"[{self._stage}/{self._stages}] {name}\n")

    def advance(self, steps: int = 1) -> None:
        """``steps`` more steps of the stage are done."""
        self._done = min(self._steps, self._done + steps)
        if self._terminal and time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        """Wipe the bar."""
        self._note_seconds()
        if self._terminal:
            self._write("\r\x1b[K")

    def _note_seconds(self) -> None:
        now = time.monotonic()
        if self._name:
            self.seconds[self._name] = round(now - self._stage_at, 1)
        self._stage_at = now

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        share = (self._stage - 1 + self._done / self._steps) / self._stages
        bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH, ".")
        seconds = self._drawn_at - self._started_at
        self._write(f"\r\x1b[K[{bar}] {share:4.0%} {seconds:4.0f}s  {self._name}")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
