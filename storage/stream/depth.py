"""How many reads are in flight: enough to hide the store's latency at the pace of the trainer, no more."""

from __future__ import annotations

import time

QUIET_STEPS = 64
"""After so many steps that nobody waited for, one read fewer is kept in flight."""
GAIN = 1.15
"""More reads at once must have brought so many times the bytes a second, or they are taken back."""
PROOF_S, PATIENCE_S = 0.25, 30.0
"""How long a number is tried at least, and how long after a vain attempt before the next one."""
_RECENT = 0.1


class Depth:
    """Adapts the number of reads in flight. Called under the prefetcher's lock.

    It doubles while the trainer waits for data, as long as that brings more bytes a second; it falls slowly while
    nobody waits. A page-cached disk so stays at `least`: there more threads only compete for the cores.

    Args:
        least: reads to start with.
        most: reads that are worth having.
        fixed: a number that is kept; nothing adapts.
    """

    def __init__(self, least: int, most: int, fixed: int | None = None) -> None:
        self.value = fixed or least
        self._least, self.most, self._fixed = least, fixed or max(least, most), fixed is not None
        self._latency_s = 0.0
        self._quiet = self._waits = self._steps = 0
        self._bytes = 0
        self._began = time.monotonic()
        self._before: tuple[int, float] | None = None
        """The number that was raised, and the bytes a second that it brought."""
        self._not_until = 0.0

    def read(self, seconds: float, size: int) -> None:
        """A read of `size` bytes took so long."""
        self._latency_s += _RECENT * (seconds - self._latency_s)
        self._bytes += size

    def waited(self) -> None:
        """The trainer waited for a step."""
        self._quiet, self._waits, self._steps = 0, self._waits + 1, self._steps + 1
        now = time.monotonic()
        lasted = now - self._began
        if self._fixed or lasted < max(PROOF_S, 4 * self._latency_s):
            return
        rate, starved = self._bytes / lasted, 2 * self._waits > self._steps
        self._bytes, self._waits, self._steps, self._began = 0, 0, 0, now
        if not starved:
            self._before = None
            return
        if self._before is not None and rate < GAIN * self._before[1]:
            self.value, self._not_until = self._before[0], now + PATIENCE_S
            self._before = None
        elif now >= self._not_until and self.value < self.most:
            self._before = (self.value, rate)
            self.value = min(self.most, 2 * self.value)

    def served(self) -> None:
        """A step was ready when it was asked for."""
        self._steps += 1
        self._quiet += 1
        if not self._fixed and self._quiet >= QUIET_STEPS:
            self.value, self._quiet = max(self._least, self.value - 1), 0
