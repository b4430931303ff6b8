"""Threads that work ahead: they plan steps, open windows, and read what these need into the steps' batches.

Windows are opened in the order of the steps that need them, as far as memory
allows; what the step that is due needs is opened in any case, and the order's need was checked against the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from isthmus.errors import IsthmusError
from isthmus.storage.stream.ahead import Ahead
from isthmus.storage.stream.batch import Allocate
from isthmus.storage.stream.depth import Depth
from isthmus.storage.stream.reading import copy, scatter
from isthmus.storage.stream.stage import BlockKey
from isthmus.storage.stream.windows import Opening, Planner
from isthmus.storage.stream.work import Job, Kept, Read, Target


class Prefetcher(Ahead[Read | Kept]):
    """Delivers the steps from `start_step` on, by windows and blocks.

    Args:
        planner: of this rank's steps; used by one thread at a time.
        name: block -> its file and row group, for messages.
        ahead: global step -> how many steps to plan beyond it at most.
        expect: is told of the blocks that will be read, in order.
        capacity: bytes of batches and blocks to hold; exceeded only when the step that is due needs more.
        wait_limit: seconds that :meth:`next` waits before it gives up and says for what.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        name: Callable[[BlockKey], str],
        ahead: Callable[[int], int],
        expect: Callable[[Sequence[Read | Kept]], None],
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
        self._planner, self._expect = planner, expect
        with self._lock:
            self._start_threads()

    def split(self) -> tuple[int, int]:
        """See `Ahead.split`."""
        return self._planner.split_blocks, self._planner.read_bytes_wasted

    # --- the threads ---

    def _pick(self) -> Callable[[], None] | None:
        """The most urgent thing to do, marked as begun. Under the lock."""
        state = self._state
        if state.stopped:
            return None
        can_read = bool(state.queue) and len(state.active) < self.depth.value
        can_plan = not state.planning and not state.full
        if can_plan and (not can_read or len(state.queue) < self.depth.value):
            state.planning = True
            if can_read:
                self._work.notify()
            return self._plan
        while state.queue and isinstance(state.queue[0], Kept) and not state.queue[0].left:
            state.queue.popleft()  # nobody needs it any more
        if not can_read or not state.queue:
            return None
        item = state.queue.popleft()
        if isinstance(item, Kept) and not self._room_for(item):
            due = next((other for other in (item, *state.queue) if state.due(other)), None)
            if due is not item:
                state.queue.appendleft(item)
                if due is None:
                    return None
                state.queue.remove(due)
                item = due
        state.active[item] = time.monotonic()
        if state.queue and len(state.active) < self.depth.value:
            self._work.notify()  # one thread wakes the next: all at once would fight over the lock
        if isinstance(item, Kept):
            if item.reader.fills:
                item.buffer = self._pool.take_block(item.size)
            else:
                self._pool.count_block(item.size)
        chosen = item
        return lambda: self._read(chosen)

    def _room_for(self, item: Kept) -> bool:
        capacity = self._capacity(self._state.wanted)
        return self._pool.used + item.size <= capacity or not self._state.active

    def _plan(self) -> None:
        """Opens the windows of the next step, if memory allows."""
        state, planner = self._state, self._planner
        done = False
        try:
            while not done and not state.stopped:
                job = self._next_to_open()
                if job is None:
                    continue
                if planner.is_open(job):
                    with self._lock:
                        state.opening += 1
                        self._ready.notify_all()
                    done = state.opening > state.wanted + self._ahead(state.wanted)
                    continue
                end = planner.window_end(job) + 1
                while planner.planned_to(job) < end and planner.frontier <= job.step + self._ahead(job.step):
                    self._plan_one()
                cost = planner.cost(job)
                capacity = self._capacity(state.wanted)
                with self._lock:
                    self._pool.limit = capacity
                    # Blocks that are queued get their memory when they are read.
                    queued = sum(item.size for item in state.queue if isinstance(item, Kept))
                    fits = self._pool.used + queued + cost <= capacity
                    # What is in flight ends soon, and most of it gives its memory back.
                    if not fits and (job.step > state.wanted or state.active):
                        state.full = True
                        break
                self._apply(planner.open(job))
                done = True
        except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
            with self._lock:
                state.failure = error  # and `planning` stays: nobody plans any more
                self._ready.notify_all()
            return
        with self._lock:
            state.planning = False
            state.full = state.full or (done and state.opening > state.wanted + self._ahead(state.wanted))
            self._work.notify()

    def _next_to_open(self) -> Job | None:
        """The first step whose windows may not be open; None when it was delivered meanwhile."""
        state = self._state
        with self._lock:
            state.opening = step = max(state.opening, state.wanted)
        while self._planner.frontier <= step:
            self._plan_one()
        return state.jobs.get(step)

    def _plan_one(self) -> None:
        job, opening = self._planner.plan(self._state.wanted)
        with self._lock:
            self._state.jobs[job.step] = job
        self._apply(opening)

    def _apply(self, opening: Opening) -> None:
        """Gives buffers to the steps that get rows, queues the reads, and copies what is in memory already."""
        for job in opening.jobs():
            if job.buffer is None:
                job.buffer = self._pool.take_batch(job.layout)
        if opening.work:
            self._expect(opening.work)
        ready: list[tuple[Kept, int, Target]] = []
        with self._lock:
            for kept, row, target in opening.copies:
                if kept.error is not None:
                    self._fail(target[0], kept.error)
                elif kept.block is not None:
                    ready.append((kept, row, target))
                else:
                    kept.copies.append((row, target))
            for kept in opening.dropped:
                self._give_up(kept, 1)
            self._state.queue.extend(opening.work)
            self._work.notify()
        for kept, row, target in ready:
            assert kept.block is not None
            copy(kept.block, [(row, target)])
        if ready:
            with self._lock:
                for kept, _, target in ready:
                    self._arrived([target[0]])
                    self._give_up(kept, 1)

    def _read(self, item: Read | Kept) -> None:
        began = time.monotonic()
        failure: BaseException | None = None
        try:
            if isinstance(item, Read):
                scatter(item)
            else:
                self._load(item)
        except BaseException as error:  # noqa: BLE001 - the step that needs the rows raises it
            failure = error
        took = time.monotonic() - began
        with self._lock:
            del self._state.active[item]
            if self._state.wanted >= self._state.opening:
                self._state.full = False  # what is due may wait for this read to end
            if self.depth.read(took, item.size):
                self._start_threads()
                self._work.notify()
            if failure is not None:
                if not isinstance(failure, IsthmusError):
                    self._state.broken = failure
                for job in item.jobs():
                    self._fail(job, failure)
                if isinstance(item, Kept):
                    item.error = failure
                    self._free(item)
            elif isinstance(item, Read):
                self._arrived([target[0] for target in item.targets if target is not None])
            # Nobody is woken: this thread picks what is next itself.

    def _load(self, kept: Kept) -> None:
        """Reads a block and copies its rows; those that are asked for meanwhile, too."""
        memory = () if kept.buffer is None else (kept.buffer,)
        block = kept.reader.read(kept.key.block, kept.key.caption, *memory)
        while True:
            with self._lock:
                copies, kept.copies = kept.copies, []
                if not copies:
                    kept.block = block
                    self._give_up(kept, 0)
                    return
            copy(block, copies)
            with self._lock:
                self._arrived([target[0] for _, target in copies])
                kept.left -= len(copies)

    # --- under the lock ---

    def _arrived(self, jobs: list[Job]) -> None:
        """Each of these steps got a row."""
        for job in jobs:
            job.left -= 1
        wanted = self._state.jobs.get(self._state.wanted)
        if wanted is not None and not wanted.left:
            self._ready.notify_all()

    def _give_up(self, kept: Kept, rows: int) -> None:
        """So many of the block's rows are needed no more."""
        kept.left -= rows
        if not kept.left and kept.block is not None:
            self._free(kept)

    def _free(self, kept: Kept) -> None:
        kept.block = None
        self._pool.give_block(kept.size, kept.buffer)
        kept.buffer = None
        self._state.full = False
