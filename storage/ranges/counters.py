"""What the readers of one loader did: bytes, requests, retries, and how long a read takes."""

from __future__ import annotations

import math
import threading

NAMES = ("bytes", "requests", "retries", "throttled", "hedged", "hedges_won", "cache_hits", "cache_misses")
HISTOGRAM = tuple(2**power for power in range(17))
"""Upper ends of the histogram's buckets, in milliseconds."""

_PER_OCTAVE = 8
_FINEST_MS = 2.0**-6
_FINE = _PER_OCTAVE * 26  # 1/64 ms to 2^20 ms, so a percentile is off by less than a tenth


class Counters:
    """Counts, shared by threads. A read's latency is all of it: waiting for the store's permission, retries, the bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(NAMES, 0)
        self._fine = [0] * (_FINE + 1)
        self._coarse = [0] * (len(HISTOGRAM) + 1)
        self._reads = 0
        self._longest_ms = 0.0

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to a count; a name that was not there starts at 0."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def observe(self, seconds: float) -> None:
        """One read took so long."""
        milliseconds = max(seconds * 1000, 0.0)
        fine = 0
        if milliseconds > _FINEST_MS:
            fine = min(math.ceil(math.log2(milliseconds / _FINEST_MS) * _PER_OCTAVE), _FINE)
        coarse = 0 if milliseconds <= 1 else min(math.ceil(math.log2(milliseconds)), len(HISTOGRAM))
        with self._lock:
            self._fine[fine] += 1
            self._coarse[coarse] += 1
            self._reads += 1
            self._longest_ms = max(self._longest_ms, milliseconds)

    def count(self, name: str) -> float:
        """One count so far."""
        with self._lock:
            return self._counts.get(name, 0)

    def percentile(self, share: float) -> float:
        """The latency in seconds that a share of the reads stayed below (0.95 = p95), off by < 10 %; 0 without reads."""
        with self._lock:
            return self._percentile_ms(share) / 1000

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """All counts, `latency_s` {p50, p90, p99, max} and `latency_histogram` {"<=1": reads, ...} in ms, at one moment."""
        with self._lock:
            counts: dict[str, float | dict[str, float]] = {**self._counts}
            counts["latency_s"] = {
                **{f"p{percent}": self._percentile_ms(percent / 100) / 1000 for percent in (50, 90, 99)},
                "max": self._longest_ms / 1000,
            }
            labels = [*(f"<={end}" for end in HISTOGRAM), f">{HISTOGRAM[-1]}"]
            counts["latency_histogram"] = dict(zip(labels, map(float, self._coarse), strict=True))
            return counts

    def _percentile_ms(self, share: float) -> float:
        below, wanted = 0, share * self._reads
        for index, reads in enumerate(self._fine):
            below += reads
            if reads and below >= wanted:
                return min(_FINEST_MS * 2 ** (index / _PER_OCTAVE), self._longest_ms)
        return 0.0
