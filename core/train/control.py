"""What ends or interrupts training from outside: signals, the budget, rhythms by the clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from isthmus.core.recipe.schema import Budget
from isthmus.core.recipe.units import Interval


class Signals:
    """Notes SIGTERM and SIGINT; the loop asks once a step and all ranks agree on the answer.

    A second SIGINT ends the process at once. Use as a context manager; handlers are put back on exit.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.received_at: float | None = None
        """Seconds of the monotonic clock."""
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received_at = time.monotonic()
        self.received = signal.Signals(number)

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Rhythm:
    """Whether something is due after a step: by steps a pure function of the step, else rank 0's clock."""

    def __init__(self, every: Interval) -> None:
        self.every = every
        self._last = time.monotonic()

    @property
    def by_clock(self) -> bool:
        """Whether rank 0 must be asked."""
        return self.every.seconds is not None

    def due(self, step: int) -> bool:
        """After global step `step` (1 after the first), when the rhythm is by steps."""
        return self.every.steps is not None and step % self.every.steps == 0

    def clock_due(self) -> bool:
        """By this process's clock, when the rhythm is by time."""
        return self.by_clock and self.every.due(0, time.monotonic() - self._last)

    def done(self) -> None:
        """Count from now."""
        self._last = time.monotonic()


class BudgetWatch:
    """Hours and dollars over all attempts, on rank 0.

    Args:
        budget: the recipe's.
        spent_hours: of the attempts before.
        usd_per_hour: of the whole cluster; None where nobody said, and then dollars are not watched.
    """

    def __init__(self, budget: Budget, spent_hours: float, usd_per_hour: float | None) -> None:
        self.budget = budget
        self.spent_hours = spent_hours
        self.usd_per_hour = usd_per_hour
        self._started = time.monotonic()

    @property
    def hours(self) -> float:
        """Hours of running so far, all attempts."""
        return self.spent_hours + (time.monotonic() - self._started) / 3600

    def reached(self) -> str | None:
        """Which cap was reached, in words."""
        hours = self.hours
        if self.budget.max_hours is not None and hours >= self.budget.max_hours:
            return f"budget.max_hours {self.budget.max_hours:g} reached"
        if self.budget.max_usd is not None and self.usd_per_hour is not None:
            usd = hours * self.usd_per_hour
            if usd >= self.budget.max_usd:
                return (
                    f"budget.max_usd {self.budget.max_usd:g} reached ({hours:.2f} h at {self.usd_per_hour:g})"
                )
        return None


def spent_hours(
    started: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    attempt: int,
    now: float | None = None,
) -> float:
    """Hours that attempts before `attempt` ran: from their `started` event, or first row, to their last row.

    What an attempt did after its last row (a checkpoint, a crash) is not counted.

    Args:
        now: seconds since 1970: adds what this attempt has run since its own `started`; the machines cost while it loads, too.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row in [*started, *rows]:
        number, moment = int(row.get("attempt", 0)), float(row["time"])
        if number < attempt:
            first[number] = min(first.get(number, moment), moment)
            last[number] = max(last.get(number, moment), moment)
    own = [float(row["time"]) for row in started if now is not None and int(row.get("attempt", 0)) == attempt]
    loading = max(0.0, (now or 0.0) - own[0]) if own else 0.0
    return (sum(last[number] - first[number] for number in first) + loading) / 3600


def stop_requested(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether somebody asked the newest attempt to stop, rather than its machine being taken away."""
    for event in reversed(events):
        if event["type"] in ("stop-requested", "started"):
            return bool(event["type"] == "stop-requested")
    return False


def usd_per_hour() -> float | None:
    """What the launcher says the cluster costs."""
    try:
        return float(os.environ["ISTHMUS_USD_PER_HOUR"])
    except (KeyError, ValueError):
        return None
