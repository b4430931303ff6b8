"""What shall go wrong next, as clouds go wrong: throttled, unavailable, a connection that breaks before or after the effect."""

from __future__ import annotations

import fnmatch
import threading
from dataclasses import dataclass, field
from typing import Literal

Drop = Literal["drop-before", "drop-after"]
MESSAGES = {
    429: ("TooManyRequests", "Too many requests. Received too many requests in a short amount of time."),
    500: ("ServiceError", "InternalServerError"),
    503: (
        "ServiceUnavailable",
        "The server is currently unable to receive requests. Please retry your request.",
    ),
    403: (
        "AuthorizationFailed",
        "The client does not have authorization to perform this action over the scope.",
    ),
}


@dataclass
class Fault:
    """One kind of failure, for so many requests of an operation."""

    operation: str
    """A glob over names such as jobs.put, jobs.get, history.details."""
    kind: int | Drop
    times: int
    retry_after: float | None = None


@dataclass
class Faults:
    """The failures that wait for their request."""

    _waiting: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self, operation: str, kind: int | Drop, times: int = 1, *, retry_after: float | None = None
    ) -> None:
        """The next requests of the operation fail.

        Args:
            operation: such as "jobs.put", or a glob ("jobs.*", "*").
            kind: an HTTP status, or "drop-before" / "drop-after": the connection is closed before or after the effect.
            times: how many requests.
            retry_after: seconds for the Retry-After header; given by default with 429 and 503.
        """
        if kind in (429, 503) and retry_after is None:
            retry_after = 1
        with self._lock:
            self._waiting.append(Fault(operation, kind, times, retry_after))

    def clear(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._waiting.clear()

    def take(self, operation: str) -> Fault | None:
        """The failure that this request meets."""
        with self._lock:
            for fault in self._waiting:
                if fault.times > 0 and fnmatch.fnmatch(operation, fault.operation):
                    fault.times -= 1
                    return fault
        return None
