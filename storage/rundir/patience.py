"""A store that refuses for a while is asked again: small reads and writes of a run directory."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from isthmus.errors import StorageError
from isthmus.storage.ranges.causes import Kind, cause_of
from isthmus.storage.rundir.store import Store

Result = TypeVar("Result")

_FIRST_S, _LONGEST_S = 0.1, 15.0


def may_pass(error: StorageError) -> bool:
    """Whether another try may succeed: the store is away or asks for fewer requests."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
        return False  # a disk that cannot read its own sector
    cause = cause_of(error.__cause__) if error.__cause__ is not None else None
    return cause is not None and cause.kind in {Kind.PASSING, Kind.THROTTLED}


def persistently(
    work: Callable[[], Result], budget_s: float, *, pause: Callable[[float], None] = time.sleep
) -> Result:
    """The result of `work`, tried again for `budget_s` from the beginning of the first try that failed.

    Raises:
        StorageError: of the last try, with how long it was tried.
    """
    delay, failed = _FIRST_S, None
    tries = 0
    while True:
        tries += 1
        began = time.monotonic()
        try:
            return work()
        except StorageError as error:
            now = time.monotonic()
            # The try itself may have waited: what tries again within what tries again must not double the budget.
            failed = began if failed is None else failed
            if not may_pass(error):
                raise
            if now - failed >= budget_s:
                if tries > 1:
                    error.message += f", tried {tries} times in {now - failed:.0f} s"
                raise
        # Full jitter: ranks that failed together do not come back together.
        pause(random.random() * delay)
        delay = min(2 * delay, _LONGEST_S)


class PatientStore:
    """A store whose refusals are waited out, each operation up to `budget_s`.

    A create whose answer was lost is asked again and finds its own object: it returns False then. Who must know compares
    what is there with what it wrote.
    """

    def __init__(self, store: Store, budget_s: float) -> None:
        self.uri = store.uri
        self._store = store
        self._budget_s = budget_s

    def read(self, name: str) -> bytes | None:
        """The object's bytes, or None when there is none."""
        return persistently(lambda: self._store.read(name), self._budget_s)

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces the object."""
        persistently(lambda: self._store.write(name, data), self._budget_s)

    def create(self, name: str, data: bytes) -> bool:
        """Creates the object unless there is one: then False."""
        return persistently(lambda: self._store.create(name, data), self._budget_s)

    def names(self, folder: str) -> list[str]:
        """Names of the entries of a folder."""
        return persistently(lambda: self._store.names(folder), self._budget_s)

    def remove(self, name: str) -> None:
        """Removes an object, or a folder with all in it."""
        persistently(lambda: self._store.remove(name), self._budget_s)

    def local_path(self, name: str) -> Path | None:
        """Where it is on this machine, or None."""
        return self._store.local_path(name)
