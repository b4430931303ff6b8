"""Threads that work ahead: they plan steps, open windows, and read what these need into the steps' batches.

All in the rank's own process: no worker processes, no fork, no shared memory. One lock guards the state; planning,
reading and copying happen outside it. Windows are opened in the order of the steps that need them, as far as memory
allows; what the step that is due needs is opened in any case, and the order's need was checked against the limit.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence

from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.stream.batch import Allocate
from isthmus.storage.stream.depth import Depth
from isthmus.storage.stream.pool import Pool
from isthmus.storage.stream.reading import copy, scatter
from isthmus.storage.stream.stage import BlockKey
from isthmus.storage.stream.state import State
from isthmus.storage.stream.windows import Opening, Planner
from isthmus.storage.stream.work import Job, Kept, Read, Target

LENT = 2
"""Batches that the consumer may look at."""


class Prefetcher:
    """Delivers the steps from `start_step` on.

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
        self._planner, self._name = planner, name
        self._ahead, self._expect, self._capacity = ahead, expect, capacity
        self._wait_limit, self.depth = wait_limit, depth
        self._pool = Pool(allocate)
        self._state = State(wanted=start_step, opening=start_step)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        with self._lock:
            self._start_threads()

    @property
    def wanted(self) -> int:
        """The step that :meth:`next` delivers next."""
        return self._state.wanted

    @property
    def resident_bytes(self) -> int:
        """Bytes of batches and blocks in memory, those that are kept for reuse included."""
        return self._pool.bytes

    def stats(self) -> dict[str, float]:
        """Figures so far."""
        state = self._state
        with self._lock:
            return {
                "depth": self.depth.value,
                "max_depth": self.depth.most,
                "in_flight": len(state.active),
                "ready_steps": state.ready_steps(),
                "resident_bytes": self._pool.bytes,
                "wait_s": state.waited,
                "steps": state.delivered,
                "split_blocks": self._planner.split_blocks,
                "read_bytes_wasted": self._planner.read_bytes_wasted,
            }

    def waiting_for(self) -> str:
        """What the next step waits for, in words."""
        with self._lock:
            return self._state.waiting_for(self._name)

    def next(self) -> Job:
        """The next step, complete; its buffer is the consumer's until the next-but-one is asked for.

        Raises:
            StorageError: it did not come within the limit; names what it waits for.
            Exception: whatever reading or planning the step raised; again on the next call.
        """
        state, began = self._state, time.monotonic()
        with self._lock:
            if len(state.lent) >= LENT:
                self._recycle(state.lent.popleft())
            if not state.settled():
                while not state.stopped and not state.settled():
                    left = began + self._wait_limit - time.monotonic()
                    if left <= 0:
                        raise StorageError(
                            f"step {state.wanted} did not come within {self._wait_limit:g} s; "
                            f"waiting for {state.waiting_for(self._name)}"
                        )
                    self._ready.wait(left)
                self.depth.waited()
                self._start_threads()
            else:
                self.depth.served()
            state.waited += time.monotonic() - began
            if state.stopped:
                raise StorageError("the loader is closed")
            error = state.error()
            if error is not None:
                raise error
            job = state.jobs.pop(state.wanted)
            state.lent.append(job)
            state.wanted += 1
            state.delivered += 1
            state.full = False  # what is due now is opened in any case
            self._work.notify()
            return job

    def stop(self) -> None:
        """Tells the threads to stop."""
        with self._lock:
            self._state.stopped = True
            self._ready.notify_all()
            self._work.notify_all()

    def close(self, timeout: float = 30.0) -> None:
        """Stops the threads and waits for them; a thread that hangs in a read is left behind with a warning."""
        self.stop()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            reading = ", ".join(self._name(item.key) for item in list(self._state.active))
            warnings.warn(
                f"{', '.join(left)} did not stop within {timeout:g} s, still reading {reading}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    # --- the threads ---

    def _start_threads(self) -> None:
        """One thread for each read in flight, and one that plans meanwhile. Under the lock."""
        while len(self._threads) < self.depth.value + 1 and not self._state.stopped:
            number = len(self._threads)
            thread = threading.Thread(target=self._run, name=f"isthmus-loader-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    task = self._pick()
                    while task is None and not self._state.stopped:
                        self._work.wait()
                        task = self._pick()
                    if self._state.stopped or task is None:
                        return
                task()
        except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
            with self._lock:
                self._state.broken = self._state.broken or error
                self._ready.notify_all()

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
            self.depth.read(took, item.size)
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

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = job.error or error
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

    def _recycle(self, job: Job) -> None:
        """The consumer is done with a batch."""
        assert job.buffer is not None
        self._pool.give_batch(job.buffer)
        job.buffer = None
        self._state.full = False
        self._work.notify()
