"""Trying again: how long, how often, and how all threads of a store slow down together."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.ranges.causes import Cause, Kind, cause_of
from isthmus.storage.ranges.counters import Counters

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long a read is tried, and when one is slow. Times in seconds."""

    budget_s: float = 300.0
    """From the first failure of one read until it is given up."""
    first_delay_s: float = 0.1
    """The longest pause after the first failure; doubles with each further one. A pause is drawn from [0, this)."""
    max_delay_s: float = 20.0
    """The longest pause."""
    stall_s: float = 30.0
    """No byte for so long, and the read is cancelled and tried again."""
    hedge: bool = True
    """A second request for a slow read; the first answer wins. Object stores only."""
    hedge_factor: float = 3.0
    """Slow: this many times the 95th percentile of the recent reads."""
    hedge_share: float = 0.03
    """At most this share of the requests are second ones."""

    def __post_init__(self) -> None:
        if min(self.first_delay_s, self.max_delay_s, self.stall_s) <= 0 or self.budget_s < 0:
            raise ValueError("the times of a retry policy are positive")


class Gate:
    """The store's permission to send, shared by all threads that read from one store.

    When the store says to slow down, the gate closes for as long as it asked (Retry-After), else for a pause that
    doubles each time it says so again; behind it the threads start spread over one more pause, not all at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opens = 0.0
        self._pause_s = 0.0

    def throttled(self, sent: float, asked_s: float | None, policy: RetryPolicy) -> None:
        """The store said to slow down, to a request sent at `sent` (monotonic seconds)."""
        with self._lock:
            now = time.monotonic()
            # Requests that were in flight together say so together: that is one reason to slow down, not many.
            if sent >= self._opens or self._pause_s == 0:
                self._pause_s = min(max(2 * self._pause_s, policy.first_delay_s), policy.max_delay_s)
            pause = self._pause_s if asked_s is None else min(asked_s, policy.budget_s)
            self._opens = max(self._opens, now + pause)

    def served(self) -> None:
        """The store answered: the next pause is shorter."""
        if self._pause_s:
            with self._lock:
                self._pause_s = self._pause_s / 2 if self._pause_s > 0.01 else 0.0

    def wait_s(self) -> float:
        """How long to wait before the next request; 0 when the gate is open."""
        if not self._pause_s:
            return 0.0
        with self._lock:
            left = self._opens - time.monotonic()
            return left + random.random() * self._pause_s if left > 0 else 0.0


_gates: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
_gates_lock = threading.Lock()


def _after_fork() -> None:
    """A child must not inherit a lock that another thread of its parent held."""
    global _gates_lock
    _gates_lock = threading.Lock()
    _gates.clear()


os.register_at_fork(after_in_child=_after_fork)


def gate_of(store: str) -> Gate:
    """The gate of a store (a bucket, a container, a host), the same for every reader of this process that is open."""
    with _gates_lock:
        gate = _gates.get(store)
        if gate is None:
            gate = _gates[store] = Gate()
        return gate


class Retry:
    """The one loop around every try of a reader.

    Args:
        uri: the reader's root, for messages.
        store: names the gate that this reader shares.
    """

    def __init__(self, uri: str, policy: RetryPolicy, counters: Counters, *, store: str) -> None:
        self.uri, self.policy, self.counters = uri, policy, counters
        self.gate = gate_of(store)
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether the reader was closed."""
        return self._closed.is_set()

    def close(self) -> None:
        """Wakes those that wait between two tries; they get a StorageError."""
        self._closed.set()

    def run(
        self, name: str, attempt: Callable[[], Result], *, refresh: Callable[[], bool] | None = None
    ) -> Result:
        """What `attempt` returns, tried until it succeeds, cannot succeed, or the budget is used up.

        Args:
            name: the file, for messages.
            attempt: one try; each has a limit of its own.
            refresh: fetches fresh credentials; called once, after the store denied access. False: there are none.

        Raises:
            StorageError: given up, refused for good, or closed; one line.
            FileNotFoundError: the store says that there is no such file.
            DataError: what `attempt` itself raises of it.
        """
        began = time.monotonic()
        first_failure: float | None = None
        tries, refreshed = 0, False
        failed: Exception | None = None
        try:
            while True:
                closed_for_s = self.gate.wait_s()
                if first_failure is not None:
                    closed_for_s = min(closed_for_s, first_failure + self.policy.budget_s - time.monotonic())
                self._pause(name, closed_for_s)
                sent = time.monotonic()
                tries += 1
                self.counters.add("requests")
                try:
                    result = attempt()
                except IsthmusError:
                    raise
                except Exception as error:
                    if self.closed:
                        raise self._closed_error(name) from error
                    cause = cause_of(error)
                    if cause is None:
                        raise
                    failed = error
                else:
                    self.gate.served()
                    self.counters.observe(time.monotonic() - began)
                    return result
                now = time.monotonic()
                first_failure = first_failure if first_failure is not None else now
                if cause.kind is Kind.MISSING:
                    raise FileNotFoundError(f"{self.uri}/{name}: {cause.words}") from failed
                if cause.kind is Kind.DENIED and not refreshed and refresh is not None:
                    refreshed = True
                    if refresh():
                        self.counters.add("retries")
                        continue
                left = first_failure + self.policy.budget_s - now
                if cause.kind in {Kind.FINAL, Kind.DENIED} or left <= 0:
                    raise self._given_up(name, cause, tries, now - began) from failed
                self.counters.add("retries")
                self._pause(name, min(self._delay(cause, sent, tries), left))
        finally:
            # It, its traceback and this frame would hold each other, and with them the caller's memory and the socket.
            failed = None

    def _delay(self, cause: Cause, sent: float, tries: int) -> float:
        if cause.kind is Kind.THROTTLED:
            self.counters.add("throttled")
            self.gate.throttled(sent, cause.retry_after_s, self.policy)
            return 0.0  # the gate is waited for before the next try, by every thread
        longest = min(self.policy.first_delay_s * 2.0 ** min(tries - 1, 30), self.policy.max_delay_s)
        # Full jitter: readers that failed together do not come back together.
        return max(random.random() * longest, cause.retry_after_s or 0.0)

    def _pause(self, name: str, delay_s: float) -> None:
        if delay_s > 0:
            self._closed.wait(delay_s)
        if self.closed:
            raise self._closed_error(name)

    def _closed_error(self, name: str) -> StorageError:
        return StorageError("the reader was closed", where=f"{self.uri}/{name}")

    def _given_up(self, name: str, cause: Cause, tries: int, seconds: float) -> StorageError:
        how_often = "" if tries == 1 else f", tried {tries} times in {seconds:.1f} s"
        return StorageError(
            f"cannot read: {cause.words}{how_often}", where=f"{self.uri}/{name}", hint=cause.hint
        )
