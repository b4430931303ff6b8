"""What the lock of a prefetcher or a gatherer guards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from isthmus.storage.stream.stage import BlockKey
from isthmus.storage.stream.work import Job


class Reading(Protocol):
    """Something that is read."""

    @property
    def key(self) -> BlockKey:
        """The block, or one of them."""

    def jobs(self) -> set[Job]:
        """The steps that wait for it."""


Item = TypeVar("Item", bound=Reading)


@dataclass(eq=False)
class State(Generic[Item]):
    """Of the steps and reads that are under way."""

    wanted: int
    """The next step to deliver."""
    opening: int
    """The next step whose windows are to be opened."""
    planning: bool = False
    full: bool = False
    """The next window has to wait for memory."""
    stopped: bool = False
    failure: BaseException | None = None
    """Planning or opening the step `opening` failed."""
    broken: BaseException | None = None
    """A thread died of something that was not caught where it belongs."""
    jobs: dict[int, Job] = field(default_factory=dict)
    queue: deque[Item] = field(default_factory=deque)
    """To be read, in the order of need."""
    active: dict[Item, float] = field(default_factory=dict)
    """Being read, since when."""
    lent: deque[Job] = field(default_factory=deque)
    """The batches that the consumer may still look at."""
    waited: float = 0.0
    """Seconds spent in :meth:`Ahead.next`."""
    delivered: int = 0

    def due(self, item: Item) -> bool:
        """Whether the next step to deliver waits for this."""
        job = self.jobs.get(self.wanted)
        return job is not None and job in item.jobs()

    def settled(self) -> bool:
        """Whether the next step to deliver is complete, or will never be."""
        job = self.jobs.get(self.wanted)
        if self.broken is not None or (self.failure is not None and self.wanted >= self.opening):
            return True
        return job is not None and (not job.left or job.error is not None)

    def error(self) -> BaseException | None:
        """Why the next step to deliver will never come."""
        job = self.jobs.get(self.wanted)
        error = self.broken or (job.error if job is not None else None)
        return self.failure if error is None and self.wanted >= self.opening else error

    def ready_steps(self) -> int:
        """Complete steps in a row from the next one to deliver on."""
        ready = 0
        while (job := self.jobs.get(self.wanted + ready)) is not None and not job.left:
            ready += 1
        return ready

    def waiting_for(self, name: Callable[[BlockKey], str]) -> str:
        """What the next step to deliver waits for."""
        job = self.jobs.get(self.wanted)
        if job is None:
            return "the step to be planned"
        now = time.monotonic()
        for item, since in self.active.items():
            if job in item.jobs():
                return f"{name(item.key)}, which has been read for {now - since:.1f} s"
        for item in self.queue:
            if job in item.jobs():
                return f"{name(item.key)}, which is not being read yet"
        return "its rows to be copied"
