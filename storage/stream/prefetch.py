"""Threads that work ahead: they plan steps, read the blocks that the steps need, and build batches.

All in the rank's own process: no worker processes, no fork, no shared memory. One lock guards the state; planning,
reading and building happen outside it. Blocks are read in the order in which steps need them; a block stays while
a planned step needs it, and after that as long as there is room (the least recently used goes first).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from isthmus.errors import StorageError
from isthmus.storage.shards.blocks import Block, Bytes
from isthmus.storage.stream.batch import Allocate, Batch, BatchBuffer
from isthmus.storage.stream.memory import BATCHES
from isthmus.storage.stream.stage import BlockKey, Part


@dataclass(eq=False)
class Job:
    """One step: what it needs, and its batch once it is built."""

    step: int
    parts: Sequence[Part]
    build: Callable[[Sequence[Block], BatchBuffer], Batch]
    started: bool = False
    dropped: bool = False
    batch: Batch | None = None
    buffer: BatchBuffer | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Resident:
    """A block in memory, on its way there, or failed."""

    size: int
    """Bytes of its data; the buffer may be larger."""
    users: int = 0
    """Planned steps that need it."""
    buffer: Bytes | None = None
    block: Block | None = None
    error: BaseException | None = None
    reading: bool = False

    @property
    def settled(self) -> bool:
        return self.block is not None or self.error is not None


@dataclass(eq=False)
class Source:
    """Where the work comes from: the functions that the threads call, outside the lock."""

    plan: Callable[[int], Job]
    """Global step -> its job."""
    size: Callable[[BlockKey], int]
    """Bytes of a block."""
    read: Callable[[BlockKey, Bytes], Block]
    look_ahead: Callable[[int], int]
    """Global step -> how many steps to plan beyond it."""
    name: Callable[[BlockKey], str]
    """For messages: the block's file and row group."""


@dataclass(eq=False)
class _State:
    """What the lock guards."""

    wanted: int
    """The next step to deliver."""
    frontier: int
    """The next step to plan."""
    planning: bool = False
    stopped: bool = False
    generation: int = 0
    """Raised when planned steps are dropped, so that one that is being planned is dropped too."""
    failure: BaseException | None = None
    """Planning the frontier failed."""
    broken: BaseException | None = None
    """A thread died of something that was not caught where it belongs."""
    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    blocks: OrderedDict[BlockKey, _Resident] = field(default_factory=OrderedDict)
    """Least recently used first."""
    unread: deque[BlockKey] = field(default_factory=deque)
    """In the order in which steps need them; may hold keys that are not needed any more."""
    resident: int = 0
    """Bytes of all blocks that are in memory or on their way."""
    spare: list[Bytes] = field(default_factory=list)
    buffers: list[BatchBuffer] = field(default_factory=list)
    buffers_made: int = 0
    lent: list[BatchBuffer] = field(default_factory=list)
    """Buffers of the batches that the consumer may still look at, oldest first."""


class Prefetcher:
    """Delivers the batches of consecutive steps.

    Args:
        source: plans, reads and builds.
        start_step: the first step to deliver.
        capacity: bytes of blocks to hold; exceeded only when a single step needs more.
        threads: how many work ahead.
        wait_limit: seconds that :meth:`next` waits before it gives up and says for what.
    """

    def __init__(
        self,
        source: Source,
        *,
        start_step: int,
        capacity: int,
        threads: int,
        wait_limit: float,
        allocate: Allocate,
    ) -> None:
        self._source = source
        self.capacity = capacity
        self._wait_limit, self._allocate = wait_limit, allocate
        self._state = _State(wanted=start_step, frontier=start_step)
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"isthmus-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def wanted(self) -> int:
        """The step that :meth:`next` delivers next."""
        return self._state.wanted

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return self._state.resident

    def next(self) -> Batch:
        """The next step's batch.

        Raises:
            StorageError: it did not come within the limit; names what it waits for.
            Exception: whatever reading or building the step raised; again on the next call.
        """
        state = self._state
        with self._changed:
            if len(state.lent) > 1:
                state.buffers.append(state.lent.pop(0))
                self._changed.notify_all()
            deadline = time.monotonic() + self._wait_limit
            while not state.stopped and not self._ready():
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise StorageError(
                        f"step {state.wanted} did not come within {self._wait_limit:g} s; "
                        f"waiting for {self._waiting_for()}"
                    )
            if state.stopped:
                raise StorageError("the loader is closed")
            job = state.jobs.get(state.wanted)
            error = state.broken or (state.failure if job is None else job.error)
            if error is not None:
                raise error
            assert job is not None
            assert job.batch is not None
            assert job.buffer is not None
            del state.jobs[state.wanted]
            state.lent.append(job.buffer)
            state.wanted += 1
            self._changed.notify_all()
            return job.batch

    def _ready(self) -> bool:
        job = self._state.jobs.get(self._state.wanted)
        if self._state.broken is not None:
            return True
        if job is None:
            return self._state.failure is not None
        return job.batch is not None or job.error is not None

    def _waiting_for(self) -> str:
        job = self._state.jobs.get(self._state.wanted)
        if job is None:
            return "the step to be planned"
        for part in job.parts:
            resident = self._state.blocks.get(part.key)
            if resident is None or not resident.settled:
                return self._source.name(part.key)
        return "the batch to be built"

    def drop_from(self, step: int) -> None:
        """Forgets the steps from `step` on that were planned and not delivered; they are planned again."""
        state = self._state
        with self._changed:
            for number in [number for number in state.jobs if number >= step]:
                job = state.jobs.pop(number)
                job.dropped = True
                if not job.started or job.error is not None:
                    self._release(job)
                elif job.buffer is not None and job.batch is not None:
                    state.buffers.append(job.buffer)
            state.frontier = max(step, state.wanted) if state.frontier > step else state.frontier
            state.generation += 1
            state.failure = None
            self._changed.notify_all()

    def close(self, timeout: float = 30.0) -> None:
        """Stops the threads and waits for them; a thread that hangs in a read is left behind with a warning."""
        with self._changed:
            self._state.stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            reading = [self._source.name(key) for key, block in self._state.blocks.items() if block.reading]
            warnings.warn(
                f"{', '.join(left)} did not stop within {timeout:g} s, still reading {', '.join(reading)}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    # --- the threads ---

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    task = self._pick()
                    while task is None and not self._state.stopped:
                        self._changed.wait()
                        task = self._pick()
                    if self._state.stopped or task is None:
                        return
                task()
        except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
            with self._changed:
                self._state.broken = error
                self._changed.notify_all()

    def _pick(self) -> Callable[[], None] | None:
        """The most urgent thing to do, marked as begun: build what is complete, read what is needed, plan ahead."""
        state = self._state
        if state.stopped:
            return None
        first = next((job for job in state.jobs.values() if not job.started), None)
        if first is not None and self._complete(first):
            buffer = self._take_buffer()
            if buffer is not None:
                first.started, first.buffer = True, buffer
                return lambda: self._build(first, buffer)
        while state.unread:
            key = state.unread[0]
            resident = state.blocks.get(key)
            if resident is None or resident.settled or resident.reading:
                state.unread.popleft()
                continue
            # The step that is due gets its blocks even above the limit; one further on waits for room.
            if not self._make_room(resident.size) and not (
                first and any(part.key == key for part in first.parts)
            ):
                break
            state.unread.popleft()
            resident.reading = True
            buffer_ = self._take_bytes(resident.size)
            resident.buffer = buffer_
            state.resident += len(buffer_)
            return lambda: self._read(key, resident, buffer_)
        ahead = self._source.look_ahead(state.wanted)
        if not state.planning and state.failure is None and state.frontier <= state.wanted + ahead:
            state.planning = True
            step, generation = state.frontier, state.generation
            return lambda: self._plan(step, generation)
        return None

    def _complete(self, job: Job) -> bool:
        return all(self._state.blocks[part.key].settled for part in job.parts)

    def _plan(self, step: int, generation: int) -> None:
        job, failure = None, None
        try:
            job = self._source.plan(step)
            sizes = [self._source.size(part.key) for part in job.parts]
        except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
            failure = error
        state = self._state
        with self._changed:
            state.planning = False
            if generation == state.generation:
                state.failure = failure
                if failure is None:
                    assert job is not None
                    for part, size in zip(job.parts, sizes, strict=True):
                        if part.key not in state.blocks:
                            state.blocks[part.key] = _Resident(size)
                            state.unread.append(part.key)
                        state.blocks[part.key].users += 1
                        state.blocks.move_to_end(part.key)
                    state.jobs[step] = job
                    state.frontier = step + 1
            self._changed.notify_all()

    def _read(self, key: BlockKey, resident: _Resident, buffer: Bytes) -> None:
        block, failure = None, None
        try:
            block = self._source.read(key, buffer[: resident.size])
        except BaseException as error:  # noqa: BLE001 - the step that needs the block raises it
            failure = error
        with self._changed:
            resident.reading = False
            resident.block, resident.error = block, failure
            if resident.users == 0 and failure is not None:
                self._evict(key)
            self._changed.notify_all()

    def _build(self, job: Job, buffer: BatchBuffer) -> None:
        residents = [
            self._state.blocks[part.key] for part in job.parts
        ]  # pinned, so they cannot go meanwhile
        batch, failure = None, next((r.error for r in residents if r.error is not None), None)
        if failure is None:
            try:
                batch = job.build([r.block for r in residents if r.block is not None], buffer)
            except BaseException as error:  # noqa: BLE001 - the consumer's next() raises it
                failure = error
        with self._changed:
            self._release(job)
            if job.dropped or failure is not None:
                self._state.buffers.append(buffer)
            job.batch, job.error = batch, failure
            self._changed.notify_all()

    # --- memory; all under the lock ---

    def _release(self, job: Job) -> None:
        """The job needs its blocks no more."""
        for part in job.parts:
            resident = self._state.blocks[part.key]
            resident.users -= 1
            if resident.users == 0 and resident.error is not None:
                self._evict(part.key)
            elif resident.users == 0 and resident.block is None and not resident.reading:
                del self._state.blocks[part.key]
        job.parts = ()

    def _make_room(self, size: int) -> bool:
        """Evicts unused blocks until `size` bytes fit; whether they do."""
        state = self._state
        for key in list(state.blocks):
            if state.resident + size <= self.capacity:
                break
            if state.blocks[key].users == 0 and state.blocks[key].settled:
                self._evict(key)
        return state.resident + size <= self.capacity

    def _evict(self, key: BlockKey) -> None:
        resident = self._state.blocks.pop(key)
        if resident.buffer is not None:
            self._state.resident -= len(resident.buffer)
            self._state.spare.append(resident.buffer)

    def _take_bytes(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes: a spare one that is not much larger, else fresh memory."""
        spare = self._state.spare
        fitting = [at for at, buffer in enumerate(spare) if size <= len(buffer) <= 2 * size]
        if fitting:
            return spare.pop(min(fitting, key=lambda at: len(spare[at])))
        # Spare memory of other sizes counts too: it goes before the limit is passed.
        while spare and self._state.resident + size + sum(map(len, spare)) > self.capacity:
            spare.pop(0)
        return np.empty(size, np.uint8)

    def _take_buffer(self) -> BatchBuffer | None:
        state = self._state
        if state.buffers:
            return state.buffers.pop()
        if state.buffers_made < BATCHES:
            state.buffers_made += 1
            return BatchBuffer(self._allocate)
        return None
