"""How long a run's jobs have run, as their clouds tell it: put down by whoever sees a job end, asked for otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Handle, Metered, Meters
from isthmus.backends.submission import handle_of, refusal_of
from isthmus.errors import IsthmusError
from isthmus.storage.rundir import RunDirectory


def told(events: Sequence[Mapping[str, Any]]) -> dict[str, Metered]:
    """Job -> what its cloud told, where an event holds it."""
    found = {}
    for event in events:
        billable = event.get("billable_s")
        seconds = event.get("metered_s", billable)
        if isinstance(seconds, int | float):
            found[str(event.get("job") or event.get("job_id"))] = Metered(
                seconds=float(seconds),
                billable_s=float(billable) if isinstance(billable, int | float) else None,
            )
    return found


def asked(
    run: RunDirectory,
    events: Sequence[Mapping[str, Any]],
    *,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Metered]:
    """`told`, and for the other jobs what their clouds say now.

    Whoever is silent is left to the run directory's own clock: this is about what is known best, not whether.

    Args:
        say: gets a line for each cloud that does not answer; its other jobs are not asked about.
    """
    found, silent = told(events), set[str]()
    for submission in run.submissions().all():
        if refusal_of(submission):
            continue
        handle = handle_of(submission)
        job = str(handle.native.get("job_id"))
        if job in found or handle.backend in silent:
            continue
        try:
            backend = get_backend(handle.backend)
            meter = backend.metered(handle) if isinstance(backend, Meters) else None
        except IsthmusError as error:
            silent.add(handle.backend)
            say(f"{handle.backend} does not say how long its machines ran: {error}")
            continue
        if meter is not None:
            found[job] = meter
    return found


def put_down(run: RunDirectory, handle: Handle, events: Sequence[Mapping[str, Any]]) -> None:
    """Of a job that has ended: what its cloud tells of it, once. It is tried; `asked` asks again."""
    job = str(handle.native.get("job_id"))
    if job in told(events):
        return
    try:
        backend = get_backend(handle.backend)
        meter = backend.metered(handle) if isinstance(backend, Meters) else None
        if meter is not None:
            text = f"{job} ran for {meter.seconds:.0f} s by the clock of {handle.backend}"
            run.event("note", text=text, job=job, metered_s=meter.seconds, billable_s=meter.billable_s)
    except IsthmusError:
        return
