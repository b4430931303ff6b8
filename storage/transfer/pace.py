"""A limit on bytes a second, shared by all threads of a copy."""

from __future__ import annotations

import threading
import time


class Bandwidth:
    """Sleeps so that the bytes told to it come to no more than a rate.

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def __call__(self, count: int) -> None:
        """Some bytes are about to go out, or came in."""
        with self._lock:
            now = time.monotonic()
            begin = max(self._free, now)
            self._free = begin + count / self.rate
        if begin > now:
            time.sleep(begin - now)
