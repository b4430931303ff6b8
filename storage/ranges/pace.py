"""How long reads take lately, to tell a slow one: it gets a second request, if few did before."""

from __future__ import annotations

import threading
from collections import deque

from isthmus.storage.ranges.retry import RetryPolicy

_RECENT = 64
_ENOUGH = 16
_SHORTEST_S = 0.2  # under it a second request costs the store more than the wait costs us


class Pace:
    """Recent durations by the size of the read, and how many second requests there were."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._recent: dict[int, deque[float]] = {}
        self._requests = 0
        self._seconds = 0

    def served(self, length: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        with self._lock:
            self._requests += 1
            # Reads of one dataset come in few sizes (a block of text, a block of latents): a class per power of two.
            self._recent.setdefault(length.bit_length(), deque(maxlen=_RECENT)).append(seconds)

    def slow_after_s(self, length: int) -> float | None:
        """After how long a read of so many bytes is slow; None while too few are known, or hedging is off."""
        if not self._policy.hedge:
            return None
        with self._lock:
            recent = self._recent.get(length.bit_length())
            if recent is None or len(recent) < _ENOUGH:
                return None
            ordered = sorted(recent)
        usual = ordered[int(0.95 * (len(ordered) - 1))]
        return max(self._policy.hedge_factor * usual, _SHORTEST_S)

    def may_hedge(self) -> bool:
        """Takes the permission for one second request, if the share of them allows it."""
        with self._lock:
            if self._seconds >= 1 + self._policy.hedge_share * self._requests:
                return False
            self._seconds += 1
            return True
