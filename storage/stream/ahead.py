"""Threads that work ahead of a consumer: what `Prefetcher` and `Gatherer` have in common.

All in the rank's own process: no worker processes, no fork, no shared memory. One lock guards the state; planning,
reading and copying happen outside it.
"""

from __future__ import annotations

import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from isthmus.errors import StorageError
from isthmus.storage.stream.batch import Allocate
from isthmus.storage.stream.depth import Depth
from isthmus.storage.stream.pool import Pool
from isthmus.storage.stream.stage import BlockKey
from isthmus.storage.stream.state import Item, State
from isthmus.storage.stream.work import Job

LENT = 2
"""Batches that the consumer may look at."""


class Ahead(ABC, Generic[Item]):
    """Delivers the steps from `start_step` on; what its threads do is the subclass's.

    Args:
        name: block -> its file and row group, for messages.
        ahead: global step -> how many steps to plan beyond it at most.
        capacity: bytes of batches and blocks to hold; exceeded only when the step that is due needs more.
        wait_limit: seconds that :meth:`next` waits before it gives up and says for what.
    """

    def __init__(
        self,
        *,
        name: Callable[[BlockKey], str],
        ahead: Callable[[int], int],
        capacity: Callable[[int], int],
        depth: Depth,
        wait_limit: float,
        allocate: Allocate,
        start_step: int,
    ) -> None:
        self._name, self._ahead, self._capacity = name, ahead, capacity
        self._wait_limit, self.depth = wait_limit, depth
        self._pool = Pool(allocate)
        self._state: State[Item] = State(wanted=start_step, opening=start_step)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    @property
    def wanted(self) -> int:
        """The step that :meth:`next` delivers next."""
        return self._state.wanted

    @property
    def resident_bytes(self) -> int:
        """Bytes of batches and blocks in memory, those that are kept for reuse included."""
        return self._pool.bytes

    @abstractmethod
    def split(self) -> tuple[int, int]:
        """Blocks of which a further part was read, and bytes that were read in vain."""

    def stats(self) -> dict[str, float]:
        """Figures so far."""
        state = self._state
        split_blocks, wasted = self.split()
        with self._lock:
            return {
                "depth": self.depth.value,
                "max_depth": self.depth.most,
                "in_flight": len(state.active),
                "ready_steps": state.ready_steps(),
                "resident_bytes": self._pool.bytes,
                "wait_s": state.waited,
                "steps": state.delivered,
                "split_blocks": split_blocks,
                "read_bytes_wasted": wasted,
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
                if self._any_work():  # memory may have come free
                    self._work.notify()
                self.depth.waiting()
                while not state.stopped and not state.settled():
                    if (task := self._help()) is not None:
                        self._lock.release()
                        try:
                            task()
                        finally:
                            self._lock.acquire()
                        continue
                    left = began + self._wait_limit - time.monotonic()
                    if left <= 0:
                        raise StorageError(
                            f"step {state.wanted} did not come within {self._wait_limit:g} s; "
                            f"waiting for {state.waiting_for(self._name)}"
                        )
                    self._ready.wait(left)
                self.depth.waited()
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
            if self._any_work():
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

    @abstractmethod
    def _pick(self) -> Callable[[], None] | None:
        """The most urgent thing to do, marked as begun. Under the lock."""

    # --- under the lock ---

    def _any_work(self) -> bool:
        """Whether a thread that sleeps might find something to do."""
        return True

    def _help(self) -> Callable[[], None] | None:
        """What the consumer itself may do rather than sleep, marked as begun: nothing that could keep it for long."""
        return None

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = job.error or error
        self._ready.notify_all()

    def _recycle(self, job: Job) -> None:
        """The consumer is done with a batch."""
        assert job.buffer is not None
        self._pool.give_batch(job.buffer)
        job.buffer = None
        self._state.full = False
