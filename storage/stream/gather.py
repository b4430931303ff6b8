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
READY_BYTES, READY_STEPS = 24 << 20, 3
"""Of batches that wait for the trainer at least, those that are being read included; more would only push each other out
of the processor's cache."""
PLAN_SLACK = 4
"""Steps that are planned in one go: a thread that wakes up for each costs more than the planning."""
VAIN_STEPS = 64
"""Steps without the consumer's help, at most, after it found rows that are not in the page cache."""


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
        self._filling = True
        """Steps are planned until as many are ahead as shall be."""
        self._helping = 0
        """Parts that the consumer reads."""
        self._vain = self._no_help_before = 0
        """For how many steps it does not help when it fails again; and the step from which on it tries."""
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
        part = self._due()
        if not state.planning and self._may_plan():
            state.planning = True
            if part is not None:
                self._work.notify()
            return self._plan
        if part is None:
            return None
        self._begin(part)
        if self._due() is not None:
            self._work.notify()  # one thread wakes the next: all at once would fight over the lock
        return lambda: self._read(part)

    def _any_work(self) -> bool:
        """See `Ahead._any_work`."""
        return self._due() is not None or (not self._state.planning and self._may_plan())

    def _may_plan(self) -> bool:
        state = self._state
        ahead, most = state.opening - state.wanted, self._ahead(state.wanted)
        if ahead > most:
            self._filling = False
        elif ahead <= most - PLAN_SLACK:
            self._filling = True
        return self._filling

    def _due(self) -> Part | None:
        """The next part that a thread may read."""
        state = self._state
        # What the consumer reads comes on top, unless somebody set how much shall be in flight.
        reading = len(state.active) - (0 if self.depth.fixed else self._helping)
        if not state.queue or reading >= self.depth.value:
            return None
        return state.queue[0] if self._has_room(state.queue[0].step) else None

    def _begin(self, part: Part) -> None:
        """The first of the queue is read from now on."""
        self._state.queue.popleft()
        if part.step.buffer is None:
            part.step.buffer = self._pool.take_batch(part.step.layout)
        self._state.active[part] = time.monotonic()

    def _help(self) -> Callable[[], None] | None:
        """See `Ahead._help`: reading is better than to sleep and be woken while a core is idle, where no disk is waited for."""
        state = self._state
        if not state.queue or state.wanted < self._no_help_before:
            return None
        part = state.queue[0]
        if part.cold or not self._has_room(part.step):
            return None
        if self.depth.fixed and len(state.active) >= self.depth.value:
            return None
        self._begin(part)
        self._helping = 1
        if self._due() is not None:
            self._work.notify()
        return lambda: self._read_cached(part)

    def _read_cached(self, part: Part) -> None:
        """Reads a part if it is in the page cache; else a thread does."""
        began, size = time.monotonic(), 0
        try:
            size = self._gather(part, wait=False)
        except Exception:  # noqa: BLE001 - the thread that tries again finds and tells it
            size = 0
        finally:
            with self._lock:
                self._helping = 0
                del self._state.active[part]
                if size:
                    took, self._vain = time.monotonic() - began, 0
                    self._counters.observe(took)
                    if self.depth.read(took, size):
                        self._start_threads()
                    self._done(part)
                else:
                    part.cold = True
                    self._state.queue.appendleft(part)
                    self._vain = min(max(1, 2 * self._vain), VAIN_STEPS)
                    self._no_help_before = self._state.wanted + self._vain
                if self._any_work():
                    self._work.notify()

    def _has_room(self, step: Step) -> bool:
        """Whether a part of a step may be read: its batch was begun, or a further one may be."""
        if step.buffer is not None:
            return True
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
            if self._due() is not None:
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
            self._done(part)

    def _done(self, part: Part) -> None:
        """A part was read. Under the lock."""
        step = part.step
        step.left -= 1
        if not step.left:
            assert step.buffer is not None
            step.buffer.keys, step.buffer.captions = step.keys, step.captions
            step.buffer.numbers[:] = step.rows[:, -len(step.layout.numbers) :]
            if step.step == self._state.wanted:
                self._ready.notify_all()

    def _gather(self, part: Part, *, wait: bool = True) -> int:
        """Reads the rows of a part into its step's batch; returns their bytes.

        Args:
            wait: for the disk and for whatever must be tried again; else 0 comes back when not all is in the page cache.
        """
        step, slots = part.step, slice(part.first, part.stop)
        buffer, columns, count = step.buffer, len(step.layout.columns), part.stop - part.first
        assert buffer is not None
        lengths = step.layout.lengths(count)
        addresses = (step.layout.places[:, slots] + buffer.address).reshape(-1)
        offsets = step.rows[slots, :columns].T.reshape(-1)
        files = step.rows[slots, columns : 2 * columns].T.reshape(-1)
        got: Int64 | None = None
        held: list[tuple[LocalRanges, list[Held]]] = []
        try:
            descriptors = hold(self._planner.files, step.files, held)[files]
            with many_reads() as many:
                got = many.read(descriptors, addresses, lengths, offsets, wait=wait)
        except (OSError, DataError):
            pass  # the usual way finds it again, rides it out or names it
        finally:
            release(held)
        if got is not None and got.tobytes() == lengths.tobytes():
            size = step.layout.row_bytes * count
            self._counters.add("requests")
            self._counters.add("bytes", size)
            return size
        if not wait:
            return 0
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
