"""Progress on rank 0: a bar on a terminal, a line every so often elsewhere. A log never sees a carriage return."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

LINE_SECONDS = 10.0


class Progress:
    """Shows training's progress.

    Args:
        total: global steps of the run.
        quiet: show nothing (ranks other than 0).
    """

    def __init__(
        self, total: int, *, quiet: bool, stream: TextIO | None = None, interval: float = LINE_SECONDS
    ) -> None:
        self.total = total
        self.quiet = quiet
        self.stream = sys.stdout if stream is None else stream
        self.interval = interval
        self.terminal = not quiet and self.stream.isatty()
        self._shown = 0.0
        self._width = 0
        self._rate = 0.0

    def step(
        self,
        step: int,
        *,
        stage: str,
        loss: float,
        samples_per_s: float,
        seconds: float,
        shares: Callable[[], str] = str,
    ) -> None:
        """After global step `step` that took `seconds`; `shares` says where the time goes, asked only when shown."""
        if self.quiet:
            return
        now = time.monotonic()
        self._rate = seconds if self._rate == 0 else 0.95 * self._rate + 0.05 * seconds
        if now - self._shown < (0.2 if self.terminal else self.interval) and step != self.total:
            return
        self._shown = now
        left = _duration((self.total - step) * self._rate)
        elsewhere = shares()
        figures = f"loss {loss:.4f}  {samples_per_s:.4g} samples/s  {elsewhere + '  ' if elsewhere else ''}{left} left"
        if self.terminal:
            filled = 20 * step // max(1, self.total)
            bar = "█" * filled + "·" * (20 - filled)
            self._rewrite(f"{stage}  {bar} {step}/{self.total}  {figures}")
        else:
            self._line(f"step {step}/{self.total}  stage {stage}  {figures}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self.quiet:
            if self.terminal and self._width:
                self._rewrite("")
                self.stream.write("\r")
                self._width = 0
            self._line(text)

    def close(self) -> None:
        """Leave the bar and go on below it."""
        if self.terminal and self._width:
            self._line("")
            self._width = 0

    def _rewrite(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._width = len(text)

    def _line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
