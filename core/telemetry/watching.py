"""The worker's thread that measures its node, writes the rows and raises the alarms."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from isthmus.core.recipe.schema import Monitor, Recipe
from isthmus.core.telemetry.disk import DiskWatch, LowDisk, newest_checkpoint_bytes, watched_places
from isthmus.core.telemetry.expected import expected_fabric
from isthmus.core.telemetry.probe import SystemProbe
from isthmus.core.telemetry.thresholds import Alarm, Thresholds
from isthmus.errors import IsthmusError

if TYPE_CHECKING:
    from isthmus.storage.rundir import RunDirectory

INTERVAL_S = 15.0
_RECENT_STEPS = 100
_log = logging.getLogger(__name__)


def watch(
    run: RunDirectory,
    node_rank: int,
    monitor: Monitor,
    stop_event: threading.Event,
    *,
    recipe: Recipe | None = None,
    attempt: int = 1,
    probe: SystemProbe | None = None,
    interval: float = INTERVAL_S,
    warm_up: float = 300.0,
) -> None:
    """Writes a `system-node<n>` row every `interval` seconds until `stop_event` is set, and alarm events.

    Meant as the target of a thread. Nothing that fails here stops training: a failed reading or write is
    logged, and tried again at the next interval.

    Args:
        run: the run directory.
        node_rank: this node among the run's nodes.
        monitor: the recipe's thresholds.
        stop_event: set by the worker when training has ended.
        recipe: needed for the thresholds that are `auto`.
        attempt: recorded in each row.
        interval: seconds between rows.
        warm_up: seconds in which thresholds are not judged.
    """
    fabric = monitor.fabric_gigabytes_per_s
    expected = (
        FabricExpectation(run, recipe)
        if recipe is not None and fabric is not None and fabric.min == "auto"
        else lambda: None
    )
    thresholds = Thresholds(monitor, node=node_rank, expected_fabric=expected, warm_up=warm_up)
    probe = probe or SystemProbe()
    disks = _disks(run, recipe, node_rank)
    writer = run.metrics(f"system-node{node_rank}", writer=f"attempt{attempt}")
    pending: list[Alarm | LowDisk] = []  # an alarm is told, even when the store refuses at first
    stopped = False
    while not stopped:
        try:
            row = probe.sample()
            pending += thresholds.observe(row)
            pending += disks.observe() if disks is not None else []
            while pending:
                fields = pending[0].event_fields()
                run.event(pending[0].event_type, **fields)
                pending.pop(0)
                _log.warning("%s", fields["message"])
            writer.write({**row, "attempt": attempt})
            stopped = stop_event.wait(interval)
            if stopped:
                writer.close()
        except Exception:  # noqa: BLE001
            # Whatever it is, a node's own measurements are not worth a training run.
            _log.warning("system metrics of node %d: a row is lost", node_rank, exc_info=True)
            stopped = stopped or stop_event.wait(interval)


def _disks(run: RunDirectory, recipe: Recipe | None, node_rank: int) -> DiskWatch | None:
    if recipe is None:
        return None
    return DiskWatch(
        watched_places(recipe, run),
        recipe.watchdog.disk_free,
        node=node_rank,
        checkpoint_bytes=lambda: newest_checkpoint_bytes(run),
    )


class FabricExpectation:
    """Gigabytes a second that a node of this run should receive, from its recent step times.

    Called for every row; reads the run's train rows at most once every `refresh` seconds.
    """

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        *,
        refresh: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._recipe = run, recipe
        self._refresh, self._clock = refresh, clock
        self._parameters = _parameters(recipe)
        self._read_at: float | None = None
        self._value: float | None = None

    def __call__(self) -> float | None:
        """The figure, None while no step was measured or the model's size is unknown."""
        if self._parameters is None:
            return None
        now = self._clock()
        if self._read_at is None or now - self._read_at >= self._refresh:
            self._read_at = now
            self._value = self._measure(self._parameters)
        return self._value

    def _measure(self, parameters: int) -> float | None:
        rows = self._run.read_metrics("train")[-_RECENT_STEPS:]
        if not rows:
            return None
        stage = rows[-1].get("stage", 0)
        times = [row["step_s"] for row in rows if row.get("stage", 0) == stage and row.get("step_s")]
        if not times:
            return None
        stages = self._recipe.stages
        return expected_fabric(self._recipe, stages[stage], parameters=parameters, step_s=median(times))


def _parameters(recipe: Recipe) -> int | None:
    try:
        from isthmus.core.models.profiles import profile

        found: Any = profile(recipe.model)
    except IsthmusError as error:
        _log.warning("no expected figure for the fabric: %s", error)
        return None
    return None if found is None else int(found.parameters)
