"""The recipe's trackers (TensorBoard, MLflow, Weights & Biases), off the hot path and on rank 0 alone.

A training step puts its row into a queue and goes on. Each tracker has a queue and a thread of its own, so one that
hangs holds up neither training nor another tracker. What a tracker does not take in time is dropped and counted; one
that fails is told once, and tried again at growing intervals.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.core.outcome import FOLDER_VARIABLE
from isthmus.core.recipe.alive import Tracker
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import NotInstalled
from isthmus.storage.rundir import RunDirectory

WAITING = 10_000
"""Rows that wait for a tracker at most; some megabytes."""
BATCH = 1000
"""Rows that are handed to a tracker at a time, MLflow's own limit for a request."""
GATHER_S = 2.0
"""How long rows gather before a tracker gets them."""
CLOSE_S = 10.0
"""How long the end of training waits for trackers."""
_TRIES = 5
"""After so many failures in a row a batch is given up: it may be what a tracker refuses."""
_PAUSE_S = (2.0, 300.0)
"""Before the next try: the first pause, doubled each time, and the longest."""
_MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


@dataclass(frozen=True, slots=True)
class Point:
    """A row of metrics, or a sample grid, for trackers."""

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """By name, such as `train/loss`."""
    picture: bytes | None = None
    """PNG."""


class Sink(Protocol):
    """What a tracker's thread writes to."""

    def open(self) -> None:
        """Connects; called again after it failed."""

    def write(self, points: Sequence[Point]) -> None:
        """Takes points in the order of their making."""

    def close(self) -> None:
        """Hands over what is buffered."""


def check_installed(trackers: Sequence[Tracker]) -> None:
    """Refuses, before training starts, trackers whose package is missing. Raises NotInstalled."""
    for tracker in trackers:
        module = _MODULES[tracker.name]
        if importlib.util.find_spec(module) is None:
            raise NotInstalled(f"the tracker {tracker.name}", extra="trackers", module=module)


class Trackers:
    """All trackers of a run, on the rank that makes it.

    Args:
        attempt: of the run.
        step: that was done last; what a tracker has of later ones is of a course that was given up.
        sinks: makes a tracker's sink.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        *,
        attempt: int,
        step: int,
        sinks: Callable[..., Sink] | None = None,
    ) -> None:
        if sinks is None:
            from isthmus.core.train.tracker_sinks import make_sink

            sinks = make_sink
        self._threads = [
            TrackerThread(
                tracker.name, sinks(tracker, recipe, run, attempt=attempt, step=step), tracker.every, run
            )
            for tracker in recipe.trackers
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def row(self, kind: str, row: Mapping[str, Any]) -> None:
        """Takes a row of the metric stream; numbers of it are kept. Never waits, never raises."""
        for thread in self._threads:
            thread.row(kind, row)

    def picture(self, step: int, png: bytes) -> None:
        """Takes a sample grid. Never waits, never raises."""
        point = Point(step, time.time(), {}, png)
        for thread in self._threads:
            thread.put(point)

    def close(self, limit: float = CLOSE_S) -> None:
        """Lets the trackers take what waits for them, for at most `limit` seconds, and leaves."""
        for thread in self._threads:
            thread.finish()
        deadline = time.monotonic() + limit
        for thread in self._threads:
            thread.leave(max(0.0, deadline - time.monotonic()))


class TrackerThread:
    """One tracker's queue and thread."""

    left_behind = False
    """Whether a tracker of this process did not end in time; it may hold up the process's exit."""

    def __init__(self, name: str, sink: Sink, every: int, run: RunDirectory) -> None:
        self.name, self.dropped = name, 0
        self._sink, self._every, self._run = sink, every, run
        self._queue: queue.Queue[Point] = queue.Queue(WAITING)
        self._ending = threading.Event()
        self._closed = threading.Event()
        self._warned = False
        self._opened = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def row(self, kind: str, row: Mapping[str, Any]) -> None:
        """Puts a row into the queue, if its step is among those that are shown."""
        step = int(row["step"])
        if kind != "train" or step % self._every == 0:
            self.put(Point(step, float(row.get("time", time.time())), _Lazy(kind, row)))

    def put(self, point: Point) -> None:
        """Puts a point into the queue; a full one drops it."""
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """No more points come."""
        self._ending.set()

    def leave(self, limit: float) -> None:
        """Waits for the thread for at most `limit` seconds; says what was not delivered."""
        self._thread.join(limit)
        if self._thread.is_alive():
            TrackerThread.left_behind = True
            self.dropped += self._queue.qsize()
            _say(f"tracker {self.name} did not end within {limit:.0f} s and is left behind")
        if self.dropped:
            _say(
                f"tracker {self.name}: {self.dropped} points were not delivered; the run's own metrics are complete"
            )

    def _work(self) -> None:
        while True:
            ending = self._ending.is_set()  # asked before it gathers: what came in between is gathered yet
            batch = self._gather()
            if batch:
                self._deliver(batch)
            elif ending:
                break
        if self._opened:
            self._attempt(self._sink.close)

    def _gather(self) -> list[Point]:
        batch: list[Point] = []
        deadline = time.monotonic() + GATHER_S
        while len(batch) < BATCH:
            left = 0.0 if self._ending.is_set() else min(0.2, deadline - time.monotonic())
            try:
                batch.append(self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait())
            except queue.Empty:
                if self._ending.is_set() or time.monotonic() >= deadline:
                    break
        return batch

    def _deliver(self, batch: list[Point]) -> None:
        pause, longest = _PAUSE_S
        for _ in range(_TRIES):
            if self._attempt(lambda: self._write(batch)):
                return
            if self._ending.wait(pause):
                break
            pause = min(2 * pause, longest)
        self.dropped += len(batch)

    def _write(self, batch: list[Point]) -> None:
        if not self._opened:
            self._sink.open()
            self._opened = True
        self._sink.write(batch)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a tracker never stops training, not even by SystemExit
            if not self._warned:
                self._warned = True
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                text = f"tracker {self.name} fails and is tried again, training goes on: {reason}"
                _say(text)
                self._note(text)
            return False
        return True

    def _note(self, text: str) -> None:
        try:
            self._run.event("note", message=text)
        except Exception:  # noqa: BLE001 - it was printed
            return


class _Lazy(Mapping[str, float]):
    """The numbers of a row, picked out in the tracker's thread rather than in the training's."""

    def __init__(self, kind: str, row: Mapping[str, Any]) -> None:
        self._kind, self._row = kind, row
        self._found: dict[str, float] | None = None

    def _values(self) -> dict[str, float]:
        if self._found is None:
            self._found = numbers(self._kind, self._row)
        return self._found

    def __getitem__(self, name: str) -> float:
        return self._values()[name]

    def __iter__(self) -> Any:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


def numbers(kind: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by name, such as `train/loss`; those of a list by their place, such as `validation/bins/0`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in ("step", "time", "attempt"):
            continue
        items = [(name, value)] if not isinstance(value, (list, tuple)) else []
        items += [(f"{name}/{at}", item) for at, item in enumerate(value)] if not items else []
        for path, item in items:
            if isinstance(item, (int, float)) and item == item and abs(item) != float("inf"):
                found[f"{kind}/{path}"] = float(item)
    return found


def end_even_if_stuck(code: int, seconds: float = 30.0) -> None:
    """At the end of a process: a tracker that was left behind may hold up its exit for so long, and no longer."""
    if not TrackerThread.left_behind:
        return
    # Towards torchrun any other code would be a failure; the outcome is written.
    code = 0 if os.environ.get(FOLDER_VARIABLE) else code

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="exit", daemon=True).start()


def _say(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")
    sys.stderr.flush()
