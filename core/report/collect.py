"""Everything a report shows, read from a run directory. Run data is untrusted: what is not as expected is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from isthmus.core.report.images import Picture, choose, load_picture
from isthmus.core.report.text import finite
from isthmus.errors import IsthmusError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.metrics import last_attempt

Row = dict[str, Any]
_T = TypeVar("_T")
_ENDS = ("finished", "failed", "preempted", "stopped")
_MAX_PICTURES = 9


@dataclass(slots=True)
class Attempt:
    """One start of the run, until it ended."""

    number: int
    started: float | None = None
    ended: float | None = None
    outcome: str = "running"
    first_step: int | None = None
    last_step: int | None = None

    @property
    def seconds(self) -> float:
        """How long it ran."""
        if self.started is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.started)


@dataclass(slots=True)
class RunData:
    """What a run directory holds, tidied."""

    uri: str
    run: Row
    recipe: Row
    recipe_text: str
    events: list[Row] = field(default_factory=list)
    train: list[Row] = field(default_factory=list)
    """One row a step, ascending."""
    redone_steps: int = 0
    """Steps that were trained again after a restart."""
    validation: list[Row] = field(default_factory=list)
    reading: list[Row] = field(default_factory=list)
    """How the data was read, one row an interval, ascending steps."""
    encode: list[Row] = field(default_factory=list)
    """How far an encode job was, one row an interval, over all attempts."""
    system: dict[int, list[Row]] = field(default_factory=dict)
    """By node, in time order."""
    checkpoints: list[tuple[int, float | None]] = field(default_factory=list)
    """Step and bytes."""
    pictures: list[Picture] = field(default_factory=list)
    all_pictures: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def stages(self) -> list[Row]:
        """The recipe's stages."""
        stages = self.recipe.get("stages")
        return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []

    def section(self, *path: str) -> Row:
        """A section of the recipe, empty when it is not there."""
        found: Any = self.recipe
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def encodes(self) -> bool:
        """Whether the run makes a dataset, rather than training on one."""
        return bool(self.section("encode"))

    def stage_name(self, stage: object) -> str:
        """A stage's name from what a row calls it (its index)."""
        if isinstance(stage, int) and 0 <= stage < len(self.stages):
            return str(self.stages[stage].get("name", f"stage {stage}"))
        return f"stage {stage}"

    def total_steps(self) -> int | None:
        """Steps that the recipe asks for."""
        total = 0
        for stage in self.stages:
            steps, samples, batch = (
                finite(stage.get(key)) for key in ("steps", "samples", "global_batch_size")
            )
            if steps is None:
                if samples is None or not batch:
                    return None
                steps = samples // batch
            total += int(steps)
        return total or None

    def state(self) -> str:
        """What the last event that says so says: running, stopping, submitted or how it ended; else created."""
        names = {"started": "running", "resumed": "running", "stop-requested": "stopping"}
        names |= {kind: kind for kind in ("submitted", *_ENDS)}
        kinds = [str(event.get("type")) for event in self.events]
        return next((names[kind] for kind in reversed(kinds) if kind in names), "created")

    def failure(self) -> Row | None:
        """When the run failed: the first event of its last attempt that says why (each node may tell one)."""
        if self.state() != "failed":
            return None
        first: Row | None = None
        for event in reversed(self.events):
            if event.get("type") == "failed":
                first = event
            elif event.get("type") == "started":
                break
        return first


def collect(run: RunDirectory) -> RunData:
    """Reads a run.

    Raises:
        RunNotFound: there is no run at that place. Everything else that cannot be read is listed in `problems`.
    """
    description = run.read_run_json()
    problems: list[str] = []

    def read(what: str, call: Callable[[], _T], default: _T) -> _T:
        try:
            return call()
        except (IsthmusError, OSError, ValueError, TypeError, KeyError) as error:
            problems.append(f"{what}: {error}")
            return default

    def read_list(what: str, call: Callable[[], list[_T]]) -> list[_T]:
        nothing: list[_T] = []
        return read(what, call, nothing)

    recipe = description.get("recipe")
    data = RunData(
        uri=run.uri,
        run=description,
        recipe=recipe if isinstance(recipe, dict) else {},
        recipe_text=read("recipe.yaml", run.read_recipe, ""),
        problems=problems,
    )
    data.events = read_list("events", run.events)
    every_row = _with_step(read_list("train metrics", lambda: run.read_metrics("train", all_attempts=True)))
    data.train = last_attempt(iter(every_row))
    data.redone_steps = len(every_row) - len(data.train)
    if data.encodes:
        told = read_list("encode metrics", lambda: run.read_metrics("encode", all_attempts=True))
        data.encode = [row for row in told if finite(row.get("pictures")) is not None]
        # A picture is to an encoding what a step is to a training.
        every_row = _with_step({**row, "step": round(row["pictures"])} for row in data.encode)
    data.validation = _with_step(read_list("validation metrics", lambda: run.read_metrics("validation")))
    data.reading = _with_step(read_list("data metrics", lambda: run.read_metrics("data")))
    for kind in read_list("metrics", run.metric_kinds):
        node = kind.removeprefix("system-node")
        if node != kind and node.isdecimal() and len(node) < 7:
            rows = read_list(f"metrics of node {node}", partial(run.read_metrics, kind))
            timed = [row for row in rows if finite(row.get("time")) is not None]
            data.system[int(node)] = sorted(timed, key=lambda row: float(row["time"]))
    data.system = dict(sorted(data.system.items()))
    for step in read_list("checkpoints", run.checkpoints):
        commit: Row = {}
        commit = read(f"checkpoint {step}", partial(run.read_commit, step), commit)
        data.checkpoints.append((step, _bytes(commit)))
    samples = read_list("samples", run.samples)
    data.all_pictures = len(samples)
    for step, uri in choose(samples, _MAX_PICTURES):
        unread = Picture(step, missing="could not be read")
        data.pictures.append(read(f"samples of step {step}", partial(load_picture, step, uri), unread))
    data.attempts = _attempts(data.events, every_row)
    return data


def _with_step(rows: Iterable[Row]) -> list[Row]:
    """Rows that can be placed; an attempt that is no number is left out of its row."""
    return [
        row if isinstance(row.get("attempt", 1), int) else {**row, "attempt": 1}
        for row in rows
        if isinstance(row.get("step"), int) and row["step"] >= 0
    ]


def _bytes(commit: Row) -> float | None:
    """Total size in a checkpoint's manifest, however it nests its files."""
    files = commit.get("files")
    entries = files.values() if isinstance(files, dict) else files if isinstance(files, list) else []
    sizes = [
        size
        for entry in entries
        if isinstance(entry, dict) and (size := finite(entry.get("size", entry.get("bytes")))) is not None
    ]
    return math.fsum(sizes) if sizes else None


def _attempts(events: list[Row], rows: list[Row]) -> list[Attempt]:
    """Starts and ends from the events, steps from the rows."""
    attempts: list[Attempt] = []
    for event in events:
        kind, time = event.get("type"), finite(event.get("time"))
        if kind == "started":
            number = event.get("attempt")
            known = {attempt.number for attempt in attempts}
            if not isinstance(number, int) or number in known:
                number = max(known, default=0) + 1
            attempts.append(Attempt(number, started=time))
        elif kind in _ENDS and attempts and attempts[-1].ended is None:
            attempts[-1].ended = time
            attempts[-1].outcome = str(kind)
    by_number = {attempt.number: attempt for attempt in attempts}
    for row in rows:
        number = row.get("attempt", 1)
        if not isinstance(number, int):
            continue
        attempt = by_number.setdefault(number, Attempt(number))
        step, time = row["step"], finite(row.get("time"))
        attempt.first_step = step if attempt.first_step is None else min(attempt.first_step, step)
        attempt.last_step = step if attempt.last_step is None else max(attempt.last_step, step)
        if time is not None:
            attempt.started = time if attempt.started is None else min(attempt.started, time)
            if attempt.outcome == "running":
                attempt.ended = time if attempt.ended is None else max(attempt.ended, time)
    found = sorted(by_number.values(), key=lambda attempt: attempt.number)
    for attempt in found[:-1]:
        # A later attempt began: this one died without a word (kill -9, lost node).
        if attempt.outcome == "running":
            attempt.outcome = "died"
    return found
