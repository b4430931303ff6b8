"""A submission, from what is put down before it to what came of it: nothing is lost or done twice whenever a launcher dies.

In this order: the run directory with the request in `submissions/`, this machine's record, run.json's job ids, the event
`submitted`, the request itself, the answer. Whoever finds a submission without an answer calls `send` again: the event keeps
its name, and the backend knows a job of the same name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from isthmus.backends.destinations import Destination
from isthmus.backends.runs import Record, save
from isthmus.backends.spec import Backend, Handle, Offer, Rendered
from isthmus.core.recipe.secrets import redact
from isthmus.errors import IsthmusError, PreflightRefused, StorageError, UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.submissions import Submission

By = Literal["launch", "resume", "supervise"]


def put_down(
    run: RunDirectory,
    number: int,
    rendered: Rendered,
    *,
    by: By,
    choice: int = 0,
    destination: Destination | None = None,
    usd_per_hour: float | None = None,
    runs_on: Offer | None = None,
    event: Mapping[str, Any] | None = None,
    run_json: Mapping[str, Any] | None = None,
    recipe_text: str | None = None,
) -> Submission | None:
    """Claims the attempt of that number for this request; None when another process has it.

    Args:
        choice: which of the run's destinations it goes to.
        runs_on: the machines, as the backend tells; the destination may leave them to the backend's settings.
        event: what else the event `submitted` tells.
        run_json: fields of run.json that are others from this attempt on.
        recipe_text: of recipe.yaml, where it is another one from this attempt on.
    """
    told = {"backend": rendered.backend, "job_id": rendered.job_id, "submission": number, "by": by}
    data = {
        "number": number,
        "by": by,
        "choice": choice,
        "destination": None if destination is None else destination.to_json(),
        "usd_per_hour": usd_per_hour,
        "runs_on": None if runs_on is None else asdict(runs_on),
        "created": time.time(),
        "rendered": asdict(rendered),
        "event_name": run.next_event("submitted"),
        "event": {**told, **(event or {})},
        "run_json": dict(run_json or {}),
        "recipe_text": recipe_text,
    }
    submissions = run.submissions()
    return submissions.read(number) if submissions.claim(number, data) else None


def rendered_of(submission: Submission) -> Rendered:
    """The request that was put down."""
    return Rendered(**submission.data["rendered"])


def handle_of(submission: Submission) -> Handle:
    """Of its job, whether or not anybody knows that there is one."""
    answered = (submission.answer or {}).get("handle")
    if answered:
        return Handle.from_json(answered)
    rendered = rendered_of(submission)
    return Handle(
        backend=rendered.backend,
        run_id=rendered.run_id,
        run_uri=rendered.run_uri,
        native={"job_id": rendered.job_id, **rendered.native},
    )


def refusal_of(submission: Submission) -> Mapping[str, Any] | None:
    """`cause` and `exit_code` of a submission that was refused for good."""
    refused = (submission.answer or {}).get("refused")
    return refused if isinstance(refused, dict) else None


def send(run: RunDirectory, submission: Submission, backend: Backend, *, record: bool = True) -> Handle:
    """Sends what was put down, or finds that it has arrived already; returns the job's handle.

    Args:
        record: this machine must remember the run; otherwise it is tried.

    Raises:
        IsthmusError: PreflightRefused and UsageError are put down as the answer; after any other it is not known
            whether the job exists, and the next call finds out.
    """
    rendered = rendered_of(submission)
    handle = handle_of(submission)
    data = run.read_run_json()
    remember(run, data, handle, must=record)
    if rendered.job_id not in data.get("job_ids", []):
        if submission.data.get("recipe_text") is not None:
            run.write_recipe(str(submission.data["recipe_text"]))
        run.update_run_json(
            **submission.data.get("run_json", {}),
            job_ids=[*data.get("job_ids", []), rendered.job_id],
            native=dict(rendered.native),
            backend=rendered.backend,
            offer=submission.data.get("destination"),
            submission=submission.number,
        )
    run.event_once(str(submission.data["event_name"]), submission.data["event"])
    try:
        handle = backend.submit(rendered)
    except (PreflightRefused, UsageError) as error:
        _refused(run, submission, error)
        raise
    except IsthmusError as error:
        # Whatever else may help: it is not known whether the job exists, and this finds out.
        again = f"`isthmus supervise {rendered.run_id}` tries again, under the same name"
        error.hint = f"{again}; {error.hint}" if error.hint and error.hint != "try again" else again
        raise
    run.submissions().answer(submission.number, {"handle": handle.to_json()})
    remember(run, data, handle, must=False)
    return handle


def withdraw(run: RunDirectory, submission: Submission, cause: str) -> None:
    """Puts down that it shall not be sent any more."""
    if run.submissions().answer(submission.number, {"withdrawn": cause}):
        run.event("stopped", cause=cause, exit_code=4, job=rendered_of(submission).job_id)


def _refused(run: RunDirectory, submission: Submission, error: IsthmusError) -> None:
    # A cloud's answer may quote a header or an address; what is put down shall hold no credential.
    cause = redact(str(error))
    refused = {"cause": cause, "exit_code": error.exit_code, "kind": type(error).__name__}
    job_id = rendered_of(submission).job_id
    if not run.submissions().answer(submission.number, {"refused": refused}):
        return
    if isinstance(error, PreflightRefused):
        run.event("failed", cause=cause, exit_code=error.exit_code, job=job_id)
    else:
        # As when another job of the run is running: its state is not this refusal's to tell.
        run.event("note", text=f"{job_id} was refused: {cause}")


def remember(run: RunDirectory, run_json: Mapping[str, Any], handle: Handle, *, must: bool) -> None:
    """Saves this machine's record of the run."""
    with contextlib.ExitStack() as stack:
        if not must:
            stack.enter_context(contextlib.suppress(StorageError))
        created = run_json.get("created")
        save(
            Record(
                id=str(run_json.get("id")),
                name=str(run_json.get("name")),
                backend=handle.backend,
                run_uri=run.uri,
                created=float(created) if isinstance(created, int | float) else 0.0,
                handle=handle.to_json(),
            )
        )
