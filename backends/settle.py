"""How a cloud's job is: what the cloud says of it, and what the run directory's events say, in one status.

The cloud knows whether a job waits, runs or has ended; only the run directory knows how it ended. A cloud's own word
for that ("Failed", exit code 75) says nothing of why, and names the host that it looked at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from isthmus.backends.spec import EXIT_CODES, State, Status

NativeState = Literal[
    "pending", "running", "restarting", "finished", "failed", "stopped", "interrupted", "unknown"
]
"""A cloud's state in our words. `stopped`: on somebody's request. `interrupted`: ended by the cloud itself: spot
interruption, eviction, no capacity, an internal error, its limit of waiting or running time."""
_LIVE: frozenset[str] = frozenset({"pending", "running", "restarting", "unknown"})
_PREEMPTED = 75


def settle(
    native: NativeState,
    events: Sequence[Mapping[str, Any]],
    *,
    cause: str | None = None,
    exit_code: int | None = None,
    job_id: str | None = None,
    detail: str | None = None,
) -> Status:
    """The status of a job.

    Args:
        native: what the cloud says, in our words.
        events: of the run directory, in order.
        cause: the cloud's own reason, when it has one.
        exit_code: of the container, when the cloud tells it.
        job_id: of the job; only what happened since its submission counts. None: since the newest.
        detail: the cloud's own word for the state, passed on.
    """
    told = _since_submission(events, job_id)
    attempt, endings = None, list[Mapping[str, Any]]()
    for event in told:
        if event["type"] == "started":
            attempt, endings = event.get("attempt"), []
        elif event["type"] in EXIT_CODES:
            endings.append(event)
    if native in _LIVE:
        last = first_cause(endings) if native == "restarting" else None
        return Status(
            state=cast(State, native),
            attempt=attempt,
            cause=_cause_of(last) or (cause if native != "running" else None),
            detail=detail,
        )
    if endings:
        ending = first_cause(endings)
        assert ending is not None
        state: State = ending["type"]
        return Status(
            state=state,
            exit_code=int(ending.get("exit_code", EXIT_CODES[state])),
            cause=_cause_of(ending) or (why_stopped(told) if state == "stopped" else None),
            attempt=attempt,
            detail=detail,
        )
    state, code, why = _silent(native, told, cause, exit_code)
    return Status(state=state, exit_code=code, cause=why, attempt=attempt, detail=detail)


def settle_missing(events: Sequence[Mapping[str, Any]], *, cloud: str, job_id: str) -> Status:
    """The status of a job that its cloud, asked by name, does not have.

    Its worker's last word counts even when the job's record is gone; without one it was never created, or is somewhere else.

    Args:
        cloud: its name, such as `SageMaker`.
    """
    said = f"{cloud} has no job {job_id}"
    told = settle("failed", events, cause=f"{said}, and its run directory tells of no end", job_id=job_id)
    if told.attempt is not None or told.state == "stopped":
        return told
    return Status(state="unknown", detail=said, missing=True)


def first_cause(endings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the words of several nodes and the supervisor, the one that counts.

    A stop is for good, whatever came before it. A failure counts before a preemption or a finish that another node saw,
    the first in time (`at`: when it happened, on the node that saw it). One that only says that ranks of another node are
    gone (`echo`) counts after what that node says.
    """
    order = {"stopped": 0, "failed": 1, "preempted": 2, "finished": 4}

    def rank(event: Mapping[str, Any]) -> tuple[int, float]:
        place = 3 if event["type"] == "failed" and event.get("echo") else order[event["type"]]
        return place, float(event.get("at") or event.get("time") or 0.0)

    return min(endings, key=rank, default=None)


def why_stopped(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Which cap of the budget was reached, where that is why the newest stop was requested; a user knows why they asked."""
    for event in reversed(events):
        if event["type"] == "stop-requested":
            why = event.get("cause") or event.get("reason")  # of a supervisor, of rank 0
            return str(why) if why and event.get("by") == "budget" else None
    return None


def _since_submission(events: Sequence[Mapping[str, Any]], job_id: str | None) -> Sequence[Mapping[str, Any]]:
    """What happened from the job's submission to the next one's, or all there is when none is told."""
    borders = [index for index, event in enumerate(events) if event["type"] == "submitted"]
    mine = [index for index in borders if job_id is None or events[index].get("job_id") == job_id]
    if not mine:
        # Its submission is not in the directory (copied, or still being written): what its worker said is.
        started = [i for i, event in enumerate(events) if event["type"] == "started"]
        own = [i for i in started if job_id is not None and events[i].get("job") == job_id]
        if own:
            return events[own[0] :]
        return [] if borders and job_id is not None else events
    later = [index for index in borders if index > mine[-1]]
    return events[mine[-1] : later[0] if later else None]


def _silent(
    native: NativeState, events: Sequence[Mapping[str, Any]], cause: str | None, exit_code: int | None
) -> tuple[State, int, str]:
    """Of a job that ended and whose workers recorded no ending: killed, never begun, or cut off from the store."""
    asked = any(event["type"] == "stop-requested" for event in events)
    if native == "stopped" or (asked and native != "finished"):
        return "stopped", EXIT_CODES["stopped"], cause or "stopped before it could say how far it was"
    if native == "interrupted" or exit_code == _PREEMPTED:
        return "preempted", EXIT_CODES["preempted"], cause or "the cloud took the machines away"
    if native == "finished":
        # The cloud may be right, but a run that nobody finished has no weights: never call that done.
        why = "the cloud says that it completed, but its run directory tells of no end"
        return "failed", EXIT_CODES["failed"], f"{why}; {cause}" if cause else why
    code = exit_code if exit_code in (1, 2, 3) else EXIT_CODES["failed"]
    return "failed", code, cause or "it ended without a word"


def _cause_of(event: Mapping[str, Any] | None) -> str | None:
    return None if event is None or not event.get("cause") else str(event["cause"])
