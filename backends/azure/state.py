"""A job's state in our words: what Azure ML says, why, and what the run directory tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

from isthmus.backends.settle import NativeState, settle
from isthmus.backends.spec import Metered, Status
from isthmus.core.recipe.secrets import redact

STATES: Mapping[str, NativeState] = {
    "NotStarted": "pending", "Starting": "pending", "Provisioning": "pending", "Preparing": "pending",
    "Queued": "pending", "Paused": "pending", "Running": "running", "Finalizing": "running",
    "CancelRequested": "running", "NotResponding": "running", "Completed": "finished", "Failed": "failed",
    "Canceled": "stopped",
}  # fmt: skip
assert set(STATES.values()) <= set(get_args(NativeState))
_OURS_TO_RESTART = re.compile(
    r"pre-?empt|evict|\bspot\b|low.?priority|node.{0,30}(?:lost|unhealthy|unusable|died|failed to)|deallocat"
    r"|internal (?:server |service )?error|service ?error|system ?error|capacity|timed? ?out|time limit|lifetime",
    re.IGNORECASE,
)
_SYSTEM = {"ServiceError", "SystemError", "InternalError"}


def reason_of(details: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The cloud's reason, and whether it is the cloud's own doing: an eviction, no capacity, an internal error, its limit."""
    outer = details.get("error") or {}
    error = outer.get("error", outer) if isinstance(outer, Mapping) else {}
    code, message = error.get("code"), error.get("message")
    warnings = [entry.get("message") for entry in details.get("warnings") or [] if isinstance(entry, Mapping)]
    text = " ".join(str(part) for part in (message, *warnings) if part)
    line = " ".join(text.split())[:500]
    reason = f"{code}: {line}" if code and line else line or (str(code) if code else "")
    own = code in _SYSTEM or bool(_OURS_TO_RESTART.search(reason))
    return (redact(reason) or None), own


def status_of(azure: str, details: Mapping[str, Any], events: list[dict[str, Any]], job_id: str) -> Status:
    """The status of a job.

    Args:
        azure: Azure ML's own word.
        details: of its run history; empty where nobody asked.
        events: of the run directory.
        job_id: of the job.
    """
    native: NativeState = STATES.get(azure, "unknown")
    reason, own = reason_of(details)
    if native == "failed" and own:
        native = "interrupted"
    if native == "stopped" and own and not stop_asked(events):
        native = "interrupted"  # cancelled by its time limit or by an eviction, not by anybody
    if native == "pending" and _begun(events, job_id):
        native = "restarting"  # preempted, and queued again by Azure ML itself
    return settle(native, events, cause=reason, job_id=job_id, detail=azure)


def metered(details: Mapping[str, Any], now: datetime | None = None) -> Metered | None:
    """How long the run has been going, by its history; None before it began."""
    begun = _moment(details.get("startTimeUtc"))
    if begun is None:
        return None
    ended = _moment(details.get("endTimeUtc")) or now or datetime.now(UTC)
    return Metered(seconds=max(0.0, (ended - begun).total_seconds()))


def _moment(text: Any) -> datetime | None:
    """A moment of the run history; it writes up to seven digits of a second, or none."""
    try:
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", str(text)))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _since(events: list[dict[str, Any]], job_id: str) -> list[dict[str, Any]]:
    for index in range(len(events) - 1, -1, -1):
        if events[index]["type"] == "submitted" and events[index].get("job_id") in (job_id, None):
            return events[index:]
    return events


def _begun(events: list[dict[str, Any]], job_id: str) -> bool:
    return any(event["type"] == "started" for event in _since(events, job_id))


def stop_asked(events: list[dict[str, Any]]) -> bool:
    """Whether the newest submission was asked to stop, by whomever."""
    for event in reversed(events):
        if event["type"] == "stop-requested":
            return True
        if event["type"] == "submitted":
            return False
    return False
