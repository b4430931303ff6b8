"""How many reads are in flight: enough to hide the store's latency at the pace of the trainer, no more."""

from __future__ import annotations

import time

QUIET_STEPS = 64
"""After so many steps that nobody waited for, one read fewer is kept in flight."""
LATENCY_BOUND = 2.0
"""A read that takes this many times its processor time waits for the store; more of them at once then help."""
_RECENT = 0.1


class Depth:
    """Adapts the number of reads in flight. Called under the prefetcher's lock.

    It doubles when the trainer waits for data although reads spend their time waiting for the store, at most once in
    the time that a read takes, and falls slowly while nobody waits. A page-cached disk never leaves `least`: there
    more threads only compete for the cores.

    Args:
        least: reads to start with.
        most: reads that are worth having.
        fixed: a number that is kept; nothing adapts.
    """

    def __init__(self, least: int, most: int, fixed: int | None = None) -> None:
        self.value = fixed or least
        self._least, self._most, self._fixed = least, max(least, most), fixed is not None
        self._wall = self._processor = 0.0
        self._quiet, self._raised = 0, 0.0

    def read(self, wall: float, processor: float) -> None:
        """A read took `wall` seconds, in `processor` of which its thread computed."""
        self._wall += _RECENT * (wall - self._wall)
        self._processor += _RECENT * (processor - self._processor)

    def waited(self) -> None:
        """The trainer waited for a step."""
        self._quiet = 0
        now = time.monotonic()
        latency_bound = self._wall > LATENCY_BOUND * self._processor
        if not self._fixed and latency_bound and now - self._raised >= self._wall:
            self.value, self._raised = min(self._most, 2 * self.value), now

    def served(self) -> None:
        """A step was ready when it was asked for."""
        self._quiet += 1
        if not self._fixed and self._quiet >= QUIET_STEPS:
            self.value, self._quiet = max(self._least, self.value - 1), 0
