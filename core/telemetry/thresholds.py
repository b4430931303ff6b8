"""The recipe's thresholds over rows of metrics: one alarm a breach, one note when it is over."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from isthmus.core.recipe.schema import Monitor, Threshold
from isthmus.core.telemetry.expected import AUTO_SHARE
from isthmus.core.telemetry.limits import PERCENT, thresholds_of

Side = Literal["min", "max"]
SIDES: tuple[Side, ...] = ("min", "max")
UNITS = {
    "gpu_utilization": "%",
    "gpu_memory": "%",
    "gpu_energy_kilojoules": "kJ",
    "fabric_gigabytes_per_s": "GB/s",
    "data_wait": "%",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A threshold that was crossed, or that is met again."""

    metric: str
    over: bool
    """False: the breach begins (event `alarm`). True: it is over (event `note`)."""
    value: float
    """Over the window of `for_s` seconds: the mean, or the sum for energy."""
    bound: float
    side: Side
    for_s: float
    time: float
    """Of the row that tipped it, Unix seconds."""
    node: int | None = None
    cause: str | None = None
    """What other figures say of the reason, in words."""

    @property
    def event_type(self) -> Literal["alarm", "note"]:
        """The type of the run directory's event."""
        return "note" if self.over else "alarm"

    def event_fields(self) -> dict[str, object]:
        """The event's fields, with a `message` for people."""
        fields: dict[str, object] = {
            "metric": self.metric,
            "value": round(self.value, 4),
            "bound": round(self.bound, 4),
            "side": self.side,
            "for_s": self.for_s,
            "message": self.message,
        }
        if self.node is not None:
            fields["node"] = self.node
        if self.cause is not None:
            fields["cause"] = self.cause
        return fields

    @property
    def message(self) -> str:
        """One line, such as ``gpu_utilization 81.2 % is below 95 % (over 600 s)``."""
        unit = UNITS.get(self.metric, "")
        relation = {"min": "below", "max": "above"}[self.side]
        if self.over:
            relation = "no longer " + relation
        where = "" if self.node is None else f"node {self.node}: "
        return (
            f"{where}{self.metric} {self.value:.4g} {unit} is {relation} "
            f"{self.bound:.4g} {unit} (over {self.for_s:g} s)"
        ) + (f": {self.cause}" if self.cause else "")


class Thresholds:
    """Evaluates a recipe's `monitor` over rows in time order.

    A threshold looks at the rows of the last `for` seconds: at their mean, at the sum of
    `gpu_energy_kilojoules`, and for `data_wait` at 100 x sum(data_wait_s) / sum(step_s). It says nothing
    until the rows span `for`. The mean, because single readings swing between 0 and 100 % and it is the
    integral that costs money. A breach is over when the figure is back inside by `margin` of the bound:
    one that hovers at its bound alarms once.

    Args:
        monitor: the recipe's thresholds.
        node: the node that the rows are from; recorded with an alarm.
        expected_fabric: gigabytes a second to expect now, for `auto`; None while it is unknown.
        warm_up: seconds after the first row that are ignored: loading and compiling are no breach.
        margin: of the bound, for the hysteresis.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        node: int | None = None,
        expected_fabric: Callable[[], float | None] = lambda: None,
        warm_up: float = 300.0,
        margin: float = 0.02,
    ) -> None:
        self._windows = {
            metric: _Window(metric, threshold) for metric, threshold in thresholds_of(monitor).items()
        }
        self._node, self._expected_fabric = node, expected_fabric
        self._warm_up, self._margin = warm_up, margin
        self._first: float | None = None

    def observe(self, row: Mapping[str, object]) -> list[Alarm]:
        """Takes the next row (of kind `train` or `system-node<n>`) and returns what changed with it."""
        time = _finite(row.get("time"))
        if time is None:
            return []
        if self._first is None:
            self._first = time
        if time - self._first < self._warm_up:
            return []
        alarms = []
        for window in self._windows.values():
            amount = _amount(window.metric, row)
            if amount is not None:
                window.add(time, *amount)
                alarm = self._judge(window, time)
                if alarm:
                    alarms.append(alarm)
        return alarms

    def _judge(self, window: _Window, time: float) -> Alarm | None:
        value = window.value()
        if value is None:
            return None
        if window.breached is not None:
            side = window.breached
            bound = self._bound(window.threshold, side)
            if bound is None or not _inside(value, self._clear_of(bound, window.metric, side), side):
                return None
            window.breached = None
            return self._alarm(window, True, value, bound, side, time)
        for side in SIDES:
            bound = self._bound(window.threshold, side)
            if bound is not None and not _inside(value, bound, side):
                window.breached = side
                return self._alarm(window, False, value, bound, side, time)
        return None

    def _bound(self, threshold: Threshold, side: Side) -> float | None:
        bound = threshold.min if side == "min" else threshold.max
        if not isinstance(bound, str):
            return bound
        expected = self._expected_fabric()
        return None if expected is None else AUTO_SHARE * expected

    def _clear_of(self, bound: float, metric: str, side: Side) -> float:
        """Where a breach of the bound is over."""
        if side == "max":
            return bound * (1 - self._margin)
        clear = bound * (1 + self._margin)
        # Above 98 % the margin would lie beyond what can be reached.
        return min(clear, (bound + 100) / 2) if metric in PERCENT else clear

    def _alarm(
        self, window: _Window, over: bool, value: float, bound: float, side: Side, time: float
    ) -> Alarm:
        return Alarm(
            metric=window.metric,
            over=over,
            value=value,
            bound=bound,
            side=side,
            for_s=window.threshold.for_,
            time=time,
            node=self._node,
        )


class _Window:
    """The rows of one metric within `for`. Each is (time, amount, weight); see :func:`_amount`."""

    def __init__(self, metric: str, threshold: Threshold) -> None:
        self.metric, self.threshold = metric, threshold
        self.breached: Side | None = None
        # The first row lies at or before the window's start: it tells that the window is full, and its
        # amount is of the time before. The totals are of the others.
        self._rows: deque[tuple[float, float, float]] = deque()
        self._amount = self._weight = 0.0

    def add(self, time: float, amount: float, weight: float) -> None:
        """Takes a row, lets go of those that are too old."""
        if self._rows:
            self._amount += amount
            self._weight += weight
        self._rows.append((time, amount, weight))
        while len(self._rows) > 1 and self._rows[1][0] <= time - self.threshold.for_:
            self._rows.popleft()
            self._amount -= self._rows[0][1]
            self._weight -= self._rows[0][2]

    def value(self) -> float | None:
        """The figure over the window, None until the rows span it."""
        if self._rows[-1][0] - self._rows[0][0] < self.threshold.for_:
            return None
        if self.metric == "gpu_energy_kilojoules":
            return self._amount
        return self._amount / self._weight if self._weight > 0 else None


def _amount(metric: str, row: Mapping[str, object]) -> tuple[float, float] | None:
    """What a row adds to a window: the amount and its weight, whose sums' quotient is the figure."""
    if metric == "data_wait":
        wait, step = _finite(row.get("data_wait_s")), _finite(row.get("step_s"))
        return None if wait is None or step is None else (100 * wait, step)
    value = _finite(row.get(metric))
    return None if value is None else (value, 1.0)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _inside(value: float, bound: float, side: Side) -> bool:
    return value >= bound if side == "min" else value <= bound
