"""What a cloud's front end does on a bad day: throttling, server errors, connections that drop before or after the effect."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Drop = Literal["drop-before", "drop-after"]
"""The connection closes without an answer; `after`: what was asked for has been done."""


@dataclass(slots=True)
class Fault:
    """What happens to the next requests of an operation."""

    operation: str
    """Its name, such as CreateTrainingJob or s3:PUT; `*` for any."""
    how: str | int
    """An error code of the service, an HTTP status, `drop-before` or `drop-after`."""
    times: int


class Faults:
    """The faults that are still to happen. Safe to use from several threads."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, operation: str, how: str | int, times: int = 1) -> None:
        """The next `times` requests of the operation fail like this, after those that were to fail before."""
        with self._lock:
            self._waiting.append(Fault(operation, how, times))

    def clear(self) -> None:
        """Nothing is to happen any more."""
        with self._lock:
            self._waiting.clear()

    def take(self, operation: str) -> str | int | None:
        """What shall happen to a request that has come in; None for nothing."""
        with self._lock:
            for fault in self._waiting:
                if fault.operation in (operation, "*"):
                    fault.times -= 1
                    if not fault.times:
                        self._waiting.remove(fault)
                    return fault.how
        return None
