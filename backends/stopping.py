"""Stopping a run, whatever state its submission is in."""

from __future__ import annotations

from typing import Any

from isthmus.backends.following import status_of
from isthmus.backends.registry import get_backend
from isthmus.backends.runs import find_current
from isthmus.backends.submission import withdraw
from isthmus.backends.supervise import stop_requested
from isthmus.storage.rundir import RunDirectory


def stop(text: str) -> dict[str, Any]:
    """Asks the run's job to checkpoint and end; nobody restarts it. JSON-able: run, state, cause, and what it `was`.

    Raises:
        RunNotFound, and what the backend raises.
    """
    record = find_current(text)
    run = RunDirectory(record.run_uri)
    before = status_of(record)
    # A preempted run has ended until a supervisor looks: from now on none shall restart it.
    waiting = before.state == "preempted" and not stop_requested(run.events())
    if waiting:
        run.event("stop-requested", by="user")
        run.event("stopped", cause="stopped while it was preempted", exit_code=4)
    if not before.ended:
        newest = run.submissions().newest()
        job = record.handle["native"].get("job_id")
        if job is not None:
            backend, handle = get_backend(record.backend), record.to_handle()
            if newest is not None and newest.answer is None:
                # Whoever may be sending it: a job that begins now finds the wish and ends at once.
                run.event("stop-requested", by="user")
                seen = backend.status(handle)
                if not seen.ended and seen.state != "unknown":
                    backend.stop(handle)
                withdraw(run, newest, "stopped before it was confirmed")
            else:
                backend.stop(handle)
                if before.missing:
                    # Should it run where nobody looks now: its worker reads the wish in the run directory.
                    run.event(
                        "stopped", cause="stop requested, and its cloud does not know the job", exit_code=4
                    )
    after = status_of(find_current(text))
    return {"run": record.id, "state": after.state, "cause": after.cause, "was": before.state}
