"""Gathers the rows of each step from wherever they lie, for files whose rows may be read apart.

A page-cached disk gives a row as fast as a block, so nothing need be read before its step and no window of batches is
filled at once: memory is a few batches, which stay in the processor's cache. A window's part of each block is told to
the system ahead, which reads it into its page cache; rows are then read straight into their places of a batch, many in
one system call. What such a call does not deliver is read again, row by row, by the usual way with its retries and
its errors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from isthmus.errors import DataError, IsthmusError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import Held, LocalRanges
from isthmus.storage.ranges.many import many_reads
from isthmus.storage.shards.rows import RowReader
from isthmus.storage.stream.ahead import Ahead
from isthmus.storage.stream.batch import Allocate
from isthmus.storage.stream.depth import Depth
from isthmus.storage.stream.rows import RowPlanner, hold, release
from isthmus.storage.stream.stage import BlockKey
from isthmus.storage.stream.work import Int64, Part, Step

PART_BYTES = 16 << 20
"""Read in one go: long enough to be worth a thread's turn, short enough that threads share a batch."""
READY_BYTES, READY_STEPS = 24 << 20, 2
"""Of batches that wait for the trainer at least; more would only push each other out of the processor's cache."""


class Gatherer(Ahead[Part]):
    """Delivers the steps from `start_step` on, row by row.

    Args:
        planner: of this rank's steps; used by one thread at a time.
        counters: of the stores.
        name, ahead, capacity, depth, wait_limit, allocate, start_step: as of `Ahead`.
    """

    def __init__(
        self,
        planner: RowPlanner,
        *,
        counters: Counters,
        name: Callable[[BlockKey], str],
        ahead: Callable[[int], int],
        capacity: Callable[[int], int],
        depth: Depth,
        wait_limit: float,
        allocate: Allocate,
        start_step: int,
    ) -> None:
        super().__init__(
            name=name,
            ahead=ahead,
            capacity=capacity,
            depth=depth,
            wait_limit=wait_limit,
            allocate=allocate,
            start_step=start_step,
        )
        self._planner, self._counters = planner, counters
        with self._lock:
            self._start_threads()

    def split(self) -> tuple[int, int]:
        """See `Ahead.split`."""
        return self._planner.split_blocks, 0

    # --- the threads ---

    def _pick(self) -> Callable[[], None] | None:
        """See `Ahead._pick`: who plans, plans on, so that the disk is told early; all others read."""
        state = self._state
        if state.stopped:
            return None
        part = state.queue[0] if state.queue and len(state.active) < self.depth.value else None
        if part is not None and part.step.buffer is None and not self._has_room(part.step):
            part = None
        if not state.planning and not state.full:
            state.planning = True
            if part is not None:
                self._work.notify()
            return self._plan
        if part is None:
            return None
        state.queue.popleft()
        if part.step.buffer is None:
            part.step.buffer = self._pool.take_batch(part.step.layout)
        state.active[part] = time.monotonic()
        if state.queue and len(state.active) < self.depth.value:
            self._work.notify()  # one thread wakes the next: all at once would fight over the lock
        return lambda: self._read(part)

    def _has_room(self, step: Step) -> bool:
        """Whether a further batch may be begun."""
        begun, size = step.step - self._state.wanted, step.layout.bytes
        if begun <= 0:
            return True
        most = max(READY_STEPS, READY_BYTES // size)
        return begun < most and self._pool.used + size <= self._pool.limit

    def _plan(self) -> None:
        """Plans one step."""
        state = self._state
        try:
            step = self._planner.plan()
        except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
            with self._lock:
                state.failure = error  # and `planning` stays: nobody plans any more
                self._ready.notify_all()
            return
        rows = step.layout.rows
        parts = min(rows, max(1, round(step.layout.bytes / PART_BYTES)))
        borders = [rows * at // parts for at in range(parts + 1)]
        step.left = parts
        capacity = self._capacity(state.wanted)
        with self._lock:
            self._pool.limit = capacity
            state.jobs[step.step] = step
            state.opening = step.step + 1
            if step.error is None:
                state.queue.extend(Part(step, first, stop) for first, stop in itertools.pairwise(borders))
            elif step.step == state.wanted:
                self._ready.notify_all()
            state.planning = False
            state.full = state.opening > state.wanted + self._ahead(state.wanted)
            self._work.notify()

    def _read(self, part: Part) -> None:
        began = time.monotonic()
        step, failure = part.step, None
        try:
            size = self._gather(part)
        except BaseException as error:  # noqa: BLE001 - the step that needs the rows raises it
            failure, size = error, 0
        took = time.monotonic() - began
        self._counters.observe(took)
        with self._lock:
            state = self._state
            del state.active[part]
            if self.depth.read(took, size):
                self._start_threads()
                self._work.notify()
            if failure is not None:
                if not isinstance(failure, IsthmusError):
                    state.broken = failure
                self._fail(step, failure)
                return
            step.left -= 1
            if not step.left:
                assert step.buffer is not None
                step.buffer.keys, step.buffer.captions = step.keys, step.captions
                step.buffer.numbers[:] = step.rows[:, -len(step.layout.numbers) :]
                if step.step == state.wanted:
                    self._ready.notify_all()

    def _gather(self, part: Part) -> int:
        """Reads the rows of a part into its step's batch; returns their bytes."""
        step, slots = part.step, slice(part.first, part.stop)
        buffer, columns, count = step.buffer, len(step.layout.columns), part.stop - part.first
        assert buffer is not None
        lengths = np.repeat(step.layout.widths, count)
        addresses = (step.layout.places[:, slots] + buffer.address).reshape(-1)
        offsets = step.rows[slots, :columns].T.reshape(-1)
        files = step.rows[slots, columns : 2 * columns].T.reshape(-1)
        got: Int64 | None = None
        held: list[tuple[LocalRanges, list[Held]]] = []
        try:
            descriptors = hold(self._planner.files, step.files, held)[files]
            with many_reads() as many:
                got = many.read(descriptors, addresses, lengths, offsets)
        except (OSError, DataError):
            pass  # the usual way finds it again, rides it out or names it
        finally:
            release(held)
        self._counters.add("requests")
        if got is None:
            missing = np.arange(part.first, part.stop)
        else:
            self._counters.add("bytes", int(got.clip(0).sum()))
            missing = part.first + np.flatnonzero((got != lengths).reshape(columns, count).any(axis=0))
        for slot in missing.tolist():
            self._read_row(step, slot)
        return int(lengths.sum())

    def _read_row(self, step: Step, slot: int) -> None:
        """One row, tried again as reads are. Errors name the shard and the row group."""
        assert step.buffer is not None
        key, row = step.key(slot), step.row(slot)
        reader = step.stage.readers[key.source]
        assert isinstance(reader, RowReader)
        into = {
            name: [of_column[slot]]
            for (name, _), of_column in zip(step.layout.columns, step.buffer.slots, strict=True)
        }
        reader.scatter(key.block, key.caption, range(row, row + 1), into)
