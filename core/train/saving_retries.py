"""Small writes and reads of a run directory, tried again while the store's refusal may pass."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from isthmus.errors import StorageError
from isthmus.storage.ranges.causes import Kind, cause_of

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
    """The result of `work`, tried again for `budget_s` from its first failure that may pass.

    Raises:
        StorageError: of the last try, with how long it was tried.
    """
    delay, failed = _FIRST_S, None
    tries = 0
    while True:
        tries += 1
        try:
            return work()
        except StorageError as error:
            now = time.monotonic()
            failed = now if failed is None else failed
            if not may_pass(error):
                raise
            if now - failed >= budget_s:
                if tries > 1:
                    error.message += f", tried {tries} times in {now - failed:.0f} s"
                raise
        # Full jitter: ranks that failed together do not come back together.
        pause(random.random() * delay)
        delay = min(2 * delay, _LONGEST_S)
