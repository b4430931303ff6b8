"""Which file a cache takes next, and which it gives up for it: pure arithmetic over what will be read, in order.

The order of samples is known ahead, so nothing here guesses from the past as LRU does. All counts are bytes that the
store need not send. A copy of a file costs its size once; it saves what is read of the file while it is kept. Blocks of
an epoch are permuted over all files, so a file is read a little at a time: where the cache is smaller than what is
read, taking a file for one block of it costs a hundred times what it saves. Hence the two rules:

- a file is taken only if at least `ENOUGH` of it will be read after it is there;
- files that are still needed make way only for one that will have saved more than its own size beyond what they
  would have saved by then. Where each file is read once in a known order, that is Belady's rule with the choice not
  to keep a file at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ENOUGH = 0.5
"""Part of a file that has to be read some day for a copy of it to be worth its download."""

FileKey = tuple[str, str]
"""Dataset and file name."""
Entry = TypeVar("Entry")

_EMPTY = np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one rank will read of one dataset, in order; then `rest`, in an order that is not known yet."""

    dataset: str
    names: Sequence[str] = ()
    """The files."""
    file: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[reads] position in `names`."""
    size: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """[reads] bytes."""
    rest: Mapping[str, float] = field(default_factory=dict)
    """Ending of a file's name -> how often all ranks of the node together read a file of that kind after these reads."""
    done: int = 0
    """Bytes of these reads that lie behind."""

    def then(self, reads: Sequence[tuple[str, int]], rest: Mapping[str, float]) -> Plan:
        """The plan with these reads behind its own, and another rest."""
        numbers = {name: number for number, name in enumerate(self.names)}
        files = [numbers.setdefault(name, len(numbers)) for name, _ in reads]
        return Plan(
            self.dataset,
            tuple(numbers),
            np.concatenate([self.file, np.array(files, np.int32)]),
            np.concatenate([self.size, np.array([size for _, size in reads], np.int64)]),
            dict(rest),
            self.done,
        )

    @property
    def starts(self) -> NDArray[np.float64]:
        """[reads] bytes that are read before each, from now on; below zero for reads that lie behind."""
        return (np.cumsum(self.size) - self.size - self.done).astype(np.float64)

    def ahead(self) -> list[str]:
        """The files that are still to be read, by first need."""
        starts = self.starts
        seen = dict.fromkeys(self.file[starts + self.size > 0].tolist())
        return [self.names[number] for number in seen]

    def times_after(self, name: str) -> float:
        """How often a file is read in whole after these reads."""
        return max((times for end, times in self.rest.items() if name.endswith(end)), default=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Future:
    """What will be read of one file."""

    times: NDArray[np.float64]
    """[reads] ascending: bytes that a rank reads before this one; infinite for what is read some day."""
    total: NDArray[np.float64]
    """[reads] bytes read of the file up to and including each."""

    @property
    def first(self) -> float:
        """When the file is needed next; infinite if nobody knows when, or never."""
        return float(self.times[0]) if len(self.times) else np.inf

    @property
    def bytes(self) -> float:
        """All that will be read of it."""
        return float(self.total[-1]) if len(self.total) else 0.0

    def by(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes read of the file up to and including these moments."""
        at = np.searchsorted(self.times, times, side="right")
        return np.concatenate([[0.0], self.total])[at]


SLACK = 256
"""Reads are not quite in the order in which they were expected; what lies so far behind one that was made is past."""


class Upcoming:
    """Reads that are expected and not made yet, in order."""

    def __init__(self) -> None:
        self._left: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Number -> file and bytes, ascending."""
        self._numbers: dict[str, deque[int]] = {}
        self._count = 0

    def add(self, reads: Iterable[tuple[str, int]]) -> None:
        """Expects these behind the others."""
        for read in reads:
            self._left[self._count] = read
            self._numbers.setdefault(read[0], deque()).append(self._count)
            self._count += 1

    def made(self, name: str, size: int) -> bool:
        """So many bytes of a file were read; False when that was not expected."""
        numbers = self._numbers.get(name)
        if not numbers:
            return False
        number = numbers[0]
        left = self._left[number][1] - size
        if left > 0:
            self._left[number] = name, left
        else:
            self._drop(number)
        while self._left and (oldest := next(iter(self._left))) < number - SLACK:
            self._drop(oldest)
        return True

    def _drop(self, number: int) -> None:
        name, _ = self._left.pop(number)
        numbers = self._numbers[name]
        numbers.remove(number)
        if not numbers:
            del self._numbers[name]

    def clear(self) -> None:
        """Expects nothing."""
        self._left.clear()
        self._numbers.clear()

    def left(self) -> list[tuple[str, int]]:
        """What is still expected."""
        return list(self._left.values())


class Forecast:
    """What the live ranks of a node will read, together. Ranks advance in step, so their plans share one clock."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._plans = list(plans)
        self._reads: dict[FileKey, list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = {}
        self._futures: dict[FileKey, Future] = {}
        for plan in self._plans:
            self._add(plan)

    def _add(self, plan: Plan) -> None:
        starts = plan.starts
        still = starts + plan.size > 0
        if not still.any():
            return
        files, sizes, starts = plan.file[still], plan.size[still].astype(np.float64), starts[still]
        order = np.argsort(files, kind="stable")
        files, sizes, starts = files[order], sizes[order], starts[order]
        first = np.flatnonzero(np.diff(files, prepend=-1))
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(files)], strict=True):
            key = plan.dataset, plan.names[int(files[begin])]
            self._reads.setdefault(key, []).append((starts[begin:end], sizes[begin:end]))

    def of(self, dataset: str, name: str, size: int) -> Future:
        """What will be read of a file of `size` bytes."""
        key = dataset, name
        if key not in self._futures:
            parts = list(self._reads.get(key, ()))
            rests = [plan.times_after(name) for plan in self._plans if plan.dataset == dataset]
            rest = max(rests, default=0.0) * size
            if rest:
                parts.append((np.array([np.inf]), np.array([rest])))
            times = np.concatenate([part[0] for part in parts]) if parts else _EMPTY
            sizes = np.concatenate([part[1] for part in parts]) if parts else _EMPTY
            if len(parts) > 1:
                order = np.argsort(times, kind="stable")
                times, sizes = times[order], sizes[order]
            self._futures[key] = Future(times, np.cumsum(sizes))
        return self._futures[key]


def make_way(
    wanted: Future, size: int, room: int, kept: Sequence[tuple[Entry, Future, int]]
) -> list[Entry] | None:
    """What to give up for a file, or None when it is not to be taken.

    Args:
        wanted: what will be read of the file, and
        size: its bytes.
        room: bytes that are free; below zero when the cache must shrink.
        kept: the files that may be given up, as `latest_first` orders them: each with what will be read of it, and
            its bytes.
    """
    # While it is fetched a rank reads about as many bytes, so what is needed of it before then comes too soon.
    missed = float(wanted.by(np.array([np.nextafter(size, 0)]))[0])
    if wanted.bytes - missed < ENOUGH * size:
        return None
    victims: list[Entry] = []
    lost: list[Future] = []
    for entry, future, bytes_ in kept:
        if room >= size:
            break
        victims.append(entry)
        room += bytes_
        if future.bytes:
            lost.append(future)
    if room < size:
        return None
    if lost:
        saved = wanted.total - missed - sum(future.by(wanted.times) for future in lost)
        if saved.max() <= size:
            return None
    return victims


def latest_first(kept: Iterable[tuple[Entry, Future, int]]) -> list[tuple[Entry, Future, int]]:
    """The files in the order in which to give them up: never needed again, then needed last, least first."""
    return sorted(kept, key=lambda item: (-item[1].first, item[1].bytes))
