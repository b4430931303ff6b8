"""How many reads are in flight: enough to hide the store's latency at the pace of the trainer, no more."""

from __future__ import annotations

import os
import time

QUIET_STEPS = 64
"""After so many steps that nobody waited for, an eighth of the reads fewer is kept in flight."""
GAIN = 1.15
"""More reads at once must have brought so many times the bytes a second, or they are taken back."""
STARVED = 0.01
"""More are tried when the trainer waited for more than this share of the time."""
PROOF_S = 0.25
"""How long a number is tried at least."""
PATIENCE_S = 2.0, 60.0
"""How long after a vain attempt before the next one: doubles with each further one, up to the second figure."""
_LATENCIES = 3
"""And at least for so many reads, one after the other: the first of them began under the number before."""
_RECENT = 0.1


class Depth:
    """Adapts the number of reads in flight. Called under the prefetcher's lock.

    It doubles while the trainer waits for data, as long as that brings more bytes a second; it falls slowly while
    nobody waits. A page-cached disk so stays at `least`: there more threads only compete for the cores. What counts is the
    time that is waited, not how often: a window's steps become ready together, and only the first of them is waited for.

    Args:
        least: reads to start with.
        most: reads that are worth having.
        fixed: a number that is kept; nothing adapts.
    """

    def __init__(self, least: int, most: int, fixed: int | None = None) -> None:
        self.value = fixed or least
        self._least, self.most = least, fixed or max(least, most)
        self.fixed = fixed is not None
        """Nothing adapts."""
        self._latency_s = 0.0
        self._quiet = self._bytes = 0
        self._began = time.monotonic()
        self._since: float | None = None
        """Since when the trainer waits."""
        self._waited_s = 0.0
        """How long it did before, in this period."""
        self._before: tuple[int, float] | None = None
        """The number that was raised, and the bytes a second that it brought."""
        self._not_until, self._patience_s = 0.0, PATIENCE_S[0]

    def read(self, seconds: float, size: int) -> bool:
        """A read of `size` bytes took so long. Whether there may be more in flight now."""
        self._latency_s += _RECENT * (seconds - self._latency_s) if self._latency_s else seconds
        self._bytes += size
        return self._consider()

    def waiting(self) -> None:
        """The trainer begins to wait for a step."""
        self._since, self._quiet = time.monotonic(), 0

    def waited(self) -> None:
        """It has the step."""
        if self._since is not None:
            self._waited_s += max(time.monotonic() - max(self._since, self._began), 0.0)
            self._since = None

    def served(self) -> None:
        """A step was ready when it was asked for."""
        self._quiet += 1
        if not self.fixed and self._quiet >= QUIET_STEPS:
            self.value, self._quiet = max(self._least, self.value - max(self.value // 8, 1)), 0

    def _consider(self) -> bool:
        now = time.monotonic()
        lasted = now - self._began
        if self.fixed or lasted < max(PROOF_S, _LATENCIES * self._latency_s):
            return False
        waited_s = self._waited_s + (0.0 if self._since is None else now - max(self._since, self._began))
        rate = self._bytes / lasted
        self._bytes, self._waited_s, self._began = 0, 0.0, now
        if waited_s <= STARVED * lasted:
            self._before = None
        elif self._before is not None and rate < GAIN * self._before[1]:
            self.value, self._not_until = self._before[0], now + self._patience_s
            self._before, self._patience_s = None, min(2 * self._patience_s, PATIENCE_S[1])
        elif now >= self._not_until and self.value < self.most:
            if self._before is not None:
                self._patience_s = PATIENCE_S[0]  # the last attempt was not in vain
            self._before = (self.value, rate)
            self.value = min(self.most, 2 * self.value)
            return True
        return False


def usable_cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS has not
    return len(affinity(0)) if affinity else os.cpu_count() or 1
