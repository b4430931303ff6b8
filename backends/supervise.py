"""What to do next with a run: a pure decision over its events and its job's status, and a loop that does it.

The decision keeps no state of its own, so a supervisor may die and another one go on. The price comes from
outside, as a function of hours: this module knows no price list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from isthmus.backends.spec import EXIT_CODES, Status
from isthmus.storage.rundir import RunDirectory

Price = Callable[[float], float]
"""US dollars for that many hours of the whole cluster."""

_ENDINGS = ("finished", "failed", "stopped", "preempted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may use; None is without limit."""

    max_restarts: int
    max_hours: float | None = None
    max_usd: float | None = None
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What to do: `wait` for the job, `restart` it, `stop` it, or be `done`."""

    kind: Literal["wait", "restart", "stop", "done"]
    why: str | None = None
    status: Status | None = None
    """Of the run as a whole, when done."""


def spans(events: Sequence[Mapping[str, Any]], now: float) -> list[tuple[str | None, float]]:
    """(job id, seconds) of each time that the run was running; an attempt that ended without a word counts to the last that
    was heard of it."""
    found: list[tuple[str | None, float]] = []
    job: str | None = None
    begun: float | None = None
    last = 0.0
    for event in events:
        if event["type"] == "submitted" and "job_id" in event:
            if begun is not None:
                found.append((job, max(0.0, last - begun)))
                begun = None
            job = event["job_id"]
        elif event["type"] == "started":
            if begun is not None:
                found.append((job, max(0.0, last - begun)))
            begun, job = event["time"], event.get("job") or job
        elif event["type"] in _ENDINGS and begun is not None:
            found.append((job, max(0.0, event["time"] - begun)))
            begun = None
        last = event["time"]
    if begun is not None:
        found.append((job, max(0.0, now - begun)))
    return found


def hours_run(events: Sequence[Mapping[str, Any]], now: float) -> float:
    """Hours of running over all attempts."""
    return sum(seconds for _, seconds in spans(events, now)) / 3600


def over_budget(events: Sequence[Mapping[str, Any]], limits: Limits, now: float) -> str | None:
    """Which cap is reached, in words."""
    hours = hours_run(events, now)
    if limits.max_hours is not None and hours >= limits.max_hours:
        return f"budget.max_hours {limits.max_hours:g} reached"
    if limits.max_usd is not None and limits.price is not None and limits.price(hours) >= limits.max_usd:
        return f"budget.max_usd {limits.max_usd:g} reached"
    return None


def next_action(events: Sequence[Mapping[str, Any]], status: Status, limits: Limits, now: float) -> Action:
    """The decision.

    Args:
        events: the run directory's, in order.
        status: of the newest job.
        limits: of the run.
        now: seconds since 1970.
    """
    since = _since_submitted(events)
    asked = stop_requested(events)
    capped = over_budget(events, limits, now)
    if not status.ended:
        if capped and not asked:
            return Action("stop", capped)
        return Action("wait")
    if status.state != "preempted":
        return Action("done", status.cause, status)
    if asked or capped:
        stopped = Status(
            state="stopped", exit_code=EXIT_CODES["stopped"], cause=capped, attempt=status.attempt
        )
        return Action("done", capped or "stop requested", stopped)
    # A job that never began, for want of machines, is an attempt too; a cloud's own restarts are seen by what began.
    begun = sum(event["type"] == "started" for event in since)
    restarts = max(begun, sum(event["type"] == "submitted" for event in since)) - 1
    if restarts >= limits.max_restarts:
        why = f"preempted {restarts + 1} times, compute.max_restarts is {limits.max_restarts}"
        return Action("done", why, Status(state="preempted", exit_code=75, cause=why, attempt=status.attempt))
    return Action("restart", status.cause or "preempted")


def stop_requested(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether somebody asked the run to stop since somebody last wanted it to run."""
    return any(event["type"] == "stop-requested" for event in _since_submitted(events))


def _since_submitted(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Since somebody last wanted the run to run; what a supervisor submits by itself goes on with that."""
    for index in range(len(events) - 1, -1, -1):
        if events[index]["type"] == "submitted" and events[index].get("by") != "supervise":
            return events[index:]
    return events


class Runner(Protocol):
    """The job that is supervised, on whatever backend."""

    def start(self) -> None:
        """Submits the next attempt."""

    def status(self) -> Status:
        """Of the newest attempt."""

    def stop(self) -> None:
        """Has it checkpoint and end."""

    def wait(self, seconds: float) -> None:
        """Until the job's status changes, or for that long."""

    def interrupted(self) -> bool:
        """Whether the supervisor itself was told to end: then nothing is restarted."""


def supervise(
    run: RunDirectory,
    runner: Runner,
    limits: Limits,
    *,
    interval: float = 30.0,
    clock: Callable[[], float] = time.time,
) -> Status:
    """Follows the newest attempt to its end and restarts it while `next_action` says so; returns the run's status."""
    while True:
        status = runner.status()
        action = next_action(run.events(), status, limits, clock())
        if action.kind == "done":
            assert action.status is not None
            if action.status.state == "stopped" and status.state == "preempted":
                # The attempt ended before it could be asked to stop; the run shall not be restarted by anyone.
                if not stop_requested(run.events()):
                    run.event("stop-requested", by="budget", cause=action.why)
                run.event("stopped", cause=action.why, exit_code=EXIT_CODES["stopped"])
            elif action.status is not status:
                run.event("note", text=f"not restarted: {action.why}")
            return action.status
        if action.kind == "restart":
            if runner.interrupted():
                return status
            run.event("note", text=f"restarting: {action.why}")
            runner.start()
        elif action.kind == "stop":
            run.event("stop-requested", by="budget", cause=action.why)
            runner.stop()
        else:
            runner.wait(interval)
