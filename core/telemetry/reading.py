"""How a run reads its data: the loaders' counters of all ranks, as one row for each interval.

A rank that waits for data makes the others wait in the step's all-reduce, where no figure of their own shows it.
So every rank's interval is one vector of numbers (:meth:`ReadingMeter.take`), the vectors are summed over the ranks
in one small all-reduce, and rank 0 makes the row of the sum (:meth:`ReadingMeter.row`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.storage.ranges.counters import HISTOGRAM

INTERVAL_S = 15.0
COUNTS = (
    "bytes", "requests", "retries", "throttled", "hedged", "hedges_won", "cache_hits", "cache_misses",
    "split_blocks", "read_bytes_wasted",
)  # fmt: skip
"""What is summed over the ranks."""
BUCKETS = (*(f"<={end}" for end in HISTOGRAM), f">{HISTOGRAM[-1]}")
"""Of block latency, by their upper ends in milliseconds."""
OF_A_RANK = ("wait_s", "depth", "ready_steps", "resident_bytes")
"""What is kept apart for each rank."""

Stats = Mapping[str, Any]


class ReadingMeter:
    """The figures of one loader between two moments, and the rows over all ranks.

    Args:
        stats: the loader's counters so far; see `Loader.stats`.
        rank: of `world_size` ranks.
        interval: seconds between rows.
        history_s: seconds of rows that :meth:`cause` can look back on.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        *,
        rank: int = 0,
        world_size: int = 1,
        interval: float = INTERVAL_S,
        history_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats, self._rank, self._world_size = stats, rank, world_size
        self._interval, self._history_s, self._clock = interval, history_s, clock
        self._began = clock()
        self._before = stats()
        self._rows: deque[tuple[float, dict[str, Any]]] = deque()

    def due(self) -> bool:
        """Whether the interval is over."""
        return self._clock() - self._began >= self._interval

    def take(self) -> list[float]:
        """What this rank read since the last call: counts, histogram, then its own figures in its place of all ranks."""
        before, now = self._before, self._stats()
        self._before = now
        vector = [_number(now, name) - _number(before, name) for name in COUNTS]
        vector += [
            _number(now.get("latency_histogram"), bucket) - _number(before.get("latency_histogram"), bucket)
            for bucket in BUCKETS
        ]
        for name in OF_A_RANK:
            ranks = [0.0] * self._world_size
            ranks[self._rank] = _number(now, name) - (_number(before, name) if name == "wait_s" else 0.0)
            vector += ranks
        return vector

    def row(self, summed: Sequence[float]) -> dict[str, Any]:
        """The row of an interval, from the sum of the ranks' vectors; the next interval begins."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        counts = dict(zip(COUNTS, map(round, summed), strict=False))
        histogram = [round(reads) for reads in summed[len(COUNTS) : len(COUNTS) + len(BUCKETS)]]
        at = len(COUNTS) + len(BUCKETS)
        size = self._world_size
        ranks = {name: summed[at + n * size : at + (n + 1) * size] for n, name in enumerate(OF_A_RANK)}
        longest = max(range(size), key=lambda rank: ranks["wait_s"][rank])
        row = {
            "seconds": seconds,
            "ranks": size,
            "megabytes_per_s": counts["bytes"] / 1e6 / seconds if seconds > 0 else 0.0,
            **counts,
            "latency_p50_s": percentile_s(histogram, 0.5),
            "latency_p99_s": percentile_s(histogram, 0.99),
            "latency_histogram": dict(zip(BUCKETS, histogram, strict=True)),
            "depth": round(max(ranks["depth"])),
            "ready_steps": round(min(ranks["ready_steps"])),
            "resident_bytes": round(max(ranks["resident_bytes"])),
            "wait_s": ranks["wait_s"][longest],
            "wait_rank": longest,
        }
        self._rows.append((now, row))
        while self._rows[0][0] < now - self._history_s:
            self._rows.popleft()
        return row

    def cause(self, seconds: float, *, fixed_depth: int | None = None) -> str | None:
        """Why data came late in the last `seconds`, in words, as far as the counters tell; None when they do not.

        Args:
            fixed_depth: `data.read_depth`, where the recipe gives a number.
        """
        since = self._clock() - seconds
        rows = [row for at, row in self._rows if at >= since]
        if not rows:
            return None
        total = {name: sum(row[name] for row in rows) for name in COUNTS}
        found = []
        if total["throttled"]:
            found.append(
                f"the store throttled {_count(total['throttled'])} of {_count(total['requests'])} requests"
            )
        tried_again = total["retries"] - total["throttled"]
        if tried_again > 0:
            found.append(
                f"{_count(tried_again)} of {_count(total['requests'])} requests failed and were tried again"
            )
        if total["cache_misses"]:
            looked_up = total["cache_misses"] + total["cache_hits"]
            found.append(
                f"{_count(total['cache_misses'])} of {_count(looked_up)} reads found no cached shard"
            )
        if fixed_depth is not None:
            histogram = [sum(row["latency_histogram"][bucket] for row in rows) for bucket in BUCKETS]
            middle = percentile_s(histogram, 0.5)
            if middle is not None:
                found.append(
                    f"data.read_depth is {fixed_depth} and a block takes {1000 * middle:.3g} ms: `auto` would read more"
                    " at a time"
                )
        waits: dict[int, float] = {}
        for row in rows:
            waits[row["wait_rank"]] = waits.get(row["wait_rank"], 0.0) + row["wait_s"]
        rank = max(waits, key=lambda rank: waits[rank])
        if found and self._world_size > 1 and waits[rank] > 0:
            found.append(f"rank {rank} waited longest")
        return "; ".join(found) or None


def percentile_s(histogram: Sequence[int], share: float) -> float | None:
    """The latency in seconds that a share of the reads stayed below, from the buckets; None without reads.

    Within a bucket, whose ends are a factor of two apart, reads are taken as spread evenly over the logarithm.
    """
    reads = sum(histogram)
    if reads <= 0:
        return None
    wanted, below = share * reads, 0
    for at, count in enumerate(histogram):
        if count and below + count >= wanted:
            part = (wanted - below) / count
            end = HISTOGRAM[at] if at < len(HISTOGRAM) else 2 * HISTOGRAM[-1]
            return float(end * 2.0 ** (part - 1) / 1000)
        below += count
    return None


def _number(stats: object, name: str) -> float:
    value = stats.get(name) if isinstance(stats, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return float(value)


def _count(number: float) -> str:
    return f"{number:,.0f}"
