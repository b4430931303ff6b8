"""Finds the rank that makes the others wait, while all still make progress.

Every rank needs the same step time, since all wait for the slowest; what differs is where it goes. Four parts of it
hold no waiting for others, and are compared: the wait for data; the rank's own time, which is the step without
data and exposed communication (`throughput.py`); the host's work from the batch to the forward pass; and the forward
pass of one block, timed on the device. The last two are there for fsdp and hsdp, whose gathers of weights make ranks
wait inside the passes, in what looks like their own time; before the passes and within a block there is no exchange.

A rank's parts ride in the all-reduce that collects the loaders' counters every few seconds (`reading.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import nn

from isthmus.core.models.families import blocks

PARTS = ("data", "own", "wait", "host", "block")
"""Seconds a step: waiting for data, computing and the rest, waiting for others, from the batch to the forward pass, and
the forward pass of the measured block."""
_LEAST_SHARE = 0.05
"""Of the step: a part that is longer by less makes nobody wait to speak of."""
_SAMPLES = 8
"""Forward passes that are timed in an interval."""
_WORDS = {
    "data": "waits {ratio} as long for data as the median rank",
    "own": "needs {ratio} the time of the median rank for itself",
    "host": "needs {ratio} the time of the median rank to prepare a step",
    "block": "computes a block in {ratio} the time of the median rank",
}


class BlockTimer:
    """Times the way to the forward pass, and that of the middle block: there is no exchange, whatever the strategy.

    Args:
        model: as prepared, compiled or not.
        device: that computes.
        outer: what is called, when it is wrapped around the model.
        compiled: whether blocks are.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        outer: nn.Module | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        found = blocks(model)
        self.host = 0.0
        """Seconds from the beginning of the newest step to its first forward pass."""
        self._started: float | None = None
        # First of all, so before FSDP2 gathers the first weights.
        (model if outer is None else outer).register_forward_pre_hook(self._arrive, prepend=True)
        self.count = len(found)
        """Blocks of the model."""
        self.wanted = False
        """Only passes of training are timed."""
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        if found:
            middle = found[len(found) // 2]
            # Made after FSDP2's own, so they run within: after the gather and before the weights are let go. A compiler
            # would trace them, and a clock cannot be compiled; without one, its import is spared.
            hooks = [self._begin, self._end]
            if compiled:
                hooks = [torch.compiler.disable(hook) for hook in hooks]  # type: ignore[no-untyped-call]
            middle.register_forward_pre_hook(hooks[0])
            middle.register_forward_hook(hooks[1])

    def begin(self) -> None:
        """A step of training begins."""
        self.wanted, self._started = True, time.perf_counter()

    def _arrive(self, *_: Any) -> None:
        if self._started is not None:
            self.host, self._started = time.perf_counter() - self._started, None

    def take(self) -> float:
        """Mean seconds of the passes since the last call; 0 without any. The device must have done them."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return 0.0
        times: list[float] = [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]
        return sum(times) / len(times)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin(self, *_: Any) -> None:
        self._began = self._now() if self.wanted and len(self._pairs) < _SAMPLES else None

    def _end(self, *_: Any) -> None:
        if self._began is not None:
            self._pairs.append((self._began, self._now()))
            self._began = None


class StragglerMeter:
    """This rank's parts of an interval, and the figures of all ranks.

    Args:
        timer: of a block; None measures none.
    """

    def __init__(self, rank: int, world_size: int, timer: BlockTimer | None = None) -> None:
        self._rank, self._size, self._timer = rank, world_size, timer
        self._sums = {"data": 0.0, "own": 0.0, "wait": 0.0, "host": 0.0}
        self._steps = 0

    def add(self, *, seconds: float, data: float, wait: float) -> None:
        """A step of `seconds`, of which so much went to data and to waiting for others."""
        self._steps += 1
        self._sums["data"] += data
        self._sums["wait"] += wait
        self._sums["own"] += max(0.0, seconds - data - wait)
        self._sums["host"] += self._timer.host if self._timer is not None else 0.0

    def take(self) -> list[float]:
        """This rank's parts in its place of all ranks, seconds a step; the next interval begins."""
        steps = max(1, self._steps)
        mine = {name: value / steps for name, value in self._sums.items()}
        mine["block"] = self._timer.take() if self._timer is not None else 0.0
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._steps = 0
        vector = [0.0] * (len(PARTS) * self._size)
        for number, name in enumerate(PARTS):
            vector[number * self._size + self._rank] = mine[name]
        return vector

    def by_rank(self, summed: Sequence[float]) -> dict[str, list[float]]:
        """Part -> seconds a step of each rank, from the sum of the ranks' vectors."""
        size = self._size
        return {name: list(summed[n * size : (n + 1) * size]) for n, name in enumerate(PARTS)}


def figures(parts: dict[str, list[float]]) -> dict[str, Any]:
    """For a metrics row: median and highest of each part, and whose that is."""
    row: dict[str, Any] = {}
    for name, values in parts.items():
        highest = max(range(len(values)), key=values.__getitem__)
        row |= {
            f"{name}_s": median_low(values),
            f"{name}_max_s": values[highest],
            f"{name}_max_rank": highest,
        }
    return row


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow, or no longer is."""

    rank: int
    part: str
    ratio: float
    """To the median."""
    seconds: float
    """A step, of the part."""
    median: float
    for_s: float
    over: bool = False

    @property
    def event_type(self) -> str:
        """Of the run directory's event."""
        return "note" if self.over else "alarm"

    def event_fields(self) -> dict[str, Any]:
        """The event's fields, with a `message` for people."""
        if self.over:
            message = f"rank {self.rank} is no longer slow"
        else:
            words = _WORDS[self.part].format(ratio=f"{self.ratio:.1f} times")
            message = (
                f"rank {self.rank} is slow and the others wait for it: it {words} "
                f"({1e3 * self.seconds:.3g} ms a step against {1e3 * self.median:.3g}, over {self.for_s:g} s)"
            )
        return {
            "metric": "straggler", "rank": self.rank, "part": self.part, "value": round(self.ratio, 3),
            "for_s": self.for_s, "message": message,
        }  # fmt: skip


class StragglerWatch:
    """Names ranks that are slow in every interval for long enough; once, until they are no longer.

    Args:
        factor: times the median.
        for_s: how long.
        blocks: of the model: what a slow one costs a step is the block's excess times this and three passes.
    """

    def __init__(self, factor: float, for_s: float, blocks: int = 1) -> None:
        self._factor, self._for_s, self._blocks = factor, for_s, blocks
        self._slow_s: dict[int, float] = {}
        self._told: dict[int, str] = {}

    def observe(self, parts: dict[str, list[float]], seconds: float) -> list[Straggler]:
        """Takes an interval of `seconds`; returns what changed with it."""
        slow = self._slow(parts)
        changed = []
        for rank in list(self._slow_s):
            if rank not in slow:
                del self._slow_s[rank]
                if part := self._told.pop(rank, None):
                    changed.append(Straggler(rank, part, 1.0, 0.0, 0.0, self._for_s, over=True))
        for rank, (part, ratio, value, middle) in slow.items():
            self._slow_s[rank] = self._slow_s.get(rank, 0.0) + seconds
            if self._slow_s[rank] >= self._for_s and rank not in self._told:
                self._told[rank] = part
                changed.append(Straggler(rank, part, ratio, value, middle, self._for_s))
        return changed

    def _slow(self, parts: dict[str, list[float]]) -> dict[int, tuple[str, float, float, float]]:
        """Rank -> the part that costs the others most, its ratio to the median, its seconds and the median's."""
        step = sum(median_low(parts[name]) for name in ("data", "own", "wait"))
        found: dict[int, tuple[str, float, float, float]] = {}
        cost: dict[int, float] = {}
        for part in _WORDS:
            middle = median_low(parts[part])
            scale = 3 * self._blocks if part == "block" else 1
            for rank, value in enumerate(parts[part]):
                excess = scale * (value - middle)
                # A block that a rank did not measure in the interval is 0, and so may be a median of them.
                known = part != "block" or middle > 0
                slow = known and value > self._factor * middle and excess > _LEAST_SHARE * step
                if slow and excess > cost.get(rank, 0.0):
                    cost[rank] = excess
                    found[rank] = (part, value / max(middle, 1e-3 * step), value, middle)
        return found
