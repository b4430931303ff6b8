"""How runs are, for whoever asks: from their records, their backend and their run directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from isthmus.backends.registry import get_backend
from isthmus.backends.runs import Record, find, records
from isthmus.backends.spec import Attachable, LogLine, Status
from isthmus.backends.submission import handle_of, refusal_of
from isthmus.core.recipe import parse_recipe
from isthmus.errors import IsthmusError, RunNotFound, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.store import open_store
from isthmus.storage.rundir.submissions import Submission

SETTLING_S = 600.0
"""For which a job that was just taken may be missing from its cloud's answers."""
_PLACES = ("region", "subscription", "resource_group", "workspace")


def status_of(record: Record) -> Status:
    """The status of the run's newest submission: what its backend tells, or that it was refused or not confirmed."""
    newest = RunDirectory(record.run_uri).submissions().newest()
    if newest is not None and (refused := refusal_of(newest)):
        code = int(refused.get("exit_code", 1))
        return Status(state="failed", exit_code=code, cause=str(refused.get("cause")))
    answer = (newest.answer if newest is not None else None) or {}
    if withdrawn := answer.get("withdrawn"):
        return Status(state="stopped", exit_code=4, cause=str(withdrawn))
    if ended := answer.get("ended"):
        return Status(**ended)  # the run was copied here after its job had ended
    if not record.handle["native"].get("job_id"):
        return Status(
            state="pending", detail=f"begun and never submitted; `isthmus supervise {record.id}` goes on"
        )
    unconfirmed = newest is not None and newest.answer is None
    try:
        status = get_backend(record.backend).status(record.to_handle())
    except IsthmusError:
        if not unconfirmed:
            raise
        status = Status(state="unknown")
    if unconfirmed and (status.state == "unknown" or (status.state == "failed" and status.attempt is None)):
        # Nobody knows whether it arrived; where it did not, a backend sees a job that never began.
        detail = f"its submission was begun and not confirmed; `isthmus supervise {record.id}` completes it"
        return Status(state="pending", detail=detail)
    if status.missing:
        return replace(status, detail=f"{status.detail}; {_elsewhere(record)}")
    return status


def gone(record: Record, submission: Submission | None, status: Status, now: float) -> UsageError | None:
    """What to tell of a run whose cloud took its job and does not know it now; None where that is not so, or may pass.

    Whether the job was deleted or this is another account or region than it was submitted to, nobody can tell from here; a
    second job beside one that runs would be worse than a question.
    """
    if not status.missing or submission is None or submission.answer is None:
        return None
    if now - float(submission.data["created"]) < SETTLING_S:
        return None
    taken = datetime.fromtimestamp(float(submission.data["created"]), UTC).strftime("%Y-%m-%d %H:%M UTC")
    told = (status.detail or "the cloud does not know the job").partition(";")[0]
    return UsageError(f"{told}, which it took at {taken}", where=record.id, hint=_elsewhere(record))


def _elsewhere(record: Record) -> str:
    place = ", ".join(
        f"{key} {value}" for key, value in sorted(record.handle["native"].items()) if key in _PLACES
    )
    where = f" ({place})" if place else ""
    return (
        f"look with the account that it was submitted with{where}; where it was deleted, "
        f"`isthmus resume {record.id}` goes on from the newest checkpoint"
    )


def run_logs(record: Record, follow: bool) -> Iterator[LogLine]:
    """What all attempts of a run printed, on all nodes, in the attempts' order; with `follow` on until the newest ends."""
    backend, handle = get_backend(record.backend), record.to_handle()
    if not isinstance(backend, Attachable):  # there one log holds all attempts
        for submission in RunDirectory(record.run_uri).submissions().all():
            earlier = handle_of(submission)
            if earlier.native["job_id"] == handle.native.get("job_id") or refusal_of(submission):
                continue
            yield from get_backend(earlier.backend).logs(earlier, follow=False)
    if handle.native.get("job_id"):
        yield from backend.logs(handle, follow)


def shown(line: LogLine) -> str:
    """A line as people read it: those of other nodes than the first say which."""
    return f"[{line.node}] {line.text}" if line.node else line.text


def describe(record: Record) -> dict[str, Any]:
    """State, progress, checkpoints and alarms of a run, JSON-able. Raises RunNotFound when its directory is gone."""
    run = RunDirectory.open(record.run_uri)
    status = status_of(record)
    rows = run.read_metrics("train")
    last = rows[-1] if rows else {}
    recipe = run.read_run_json().get("recipe", {})
    stages = recipe.get("stages", []) if "encode" not in recipe else []
    encoded = run.read_metrics("encode") if "encode" in recipe else []
    return {
        "run": record.id,
        "state": status.state,
        "exit_code": status.exit_code,
        "cause": status.cause,
        "detail": status.detail,
        "attempt": status.attempt,
        "backend": record.backend,
        "run_uri": run.uri,
        "created": record.created,
        "step": last.get("step"),
        "total_steps": _total_steps(stages),
        "loss": last.get("loss"),
        "samples_per_s": last.get("samples_per_s"),
        "encode": {**_encode_places(run), **(encoded[-1] if encoded else {})} if "encode" in recipe else None,
        "checkpoints": run.checkpoints(),
        "alarms": [str(event.get("message") or event.get("metric")) for event in run.events("alarm")][-5:],
    }


def _encode_places(run: RunDirectory) -> dict[str, Any]:
    """Where an encode job reads and writes."""
    section = parse_recipe(run.read_recipe(), filename="recipe.yaml").recipe.encode
    return {} if section is None else {"source": section.source, "dest": section.dest}


def _total_steps(stages: list[dict[str, Any]]) -> int:
    return sum(
        int(stage.get("steps") or int(stage.get("samples") or 0) // int(stage["global_batch_size"]))
        for stage in stages
    )


def overview(place: str | None = None) -> list[dict[str, Any]]:
    """A row a run that is known here, or found in `place`: run, state, backend, run_uri, created; the newest first."""
    found = {record.run_uri.rstrip("/"): record for record in records()}
    if place is not None:
        root = open_store(place)
        for name in root.names(""):
            uri = filesystems.join(root.uri, name)
            if uri not in found and root.read(f"{name}/run.json") is not None:
                found[uri] = find(uri)
    rows = []
    for record in sorted(found.values(), key=lambda record: record.created, reverse=True):
        rows.append(
            {
                "run": record.id,
                "state": _state(record),
                "backend": record.backend,
                "run_uri": record.run_uri,
                "created": record.created,
            }
        )
    return rows


def _state(record: Record) -> str:
    try:
        RunDirectory.open(record.run_uri)
        return status_of(record).state
    except RunNotFound:
        return "gone"
    except IsthmusError:
        return "unknown"  # its plugin or its store is not there; `status` says which
