"""Starting a prepared launch, and staying with it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from isthmus.backends.following import status_of
from isthmus.backends.prepare import Launch
from isthmus.backends.provenance import provenance
from isthmus.backends.runs import record_of
from isthmus.backends.spec import Attachable, Backend, Handle, LogLine, Status
from isthmus.backends.submission import By, put_down, send
from isthmus.core.recipe.dump import dump_recipe, recipe_data, recipe_hash
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory


def start(launch: Launch, folder: Path, *, by: By = "launch") -> Handle:
    """Writes the run directory and this machine's record, then submits; or completes what an earlier launch began.

    Whenever this is killed, the same launch under the same id, `resume` or `supervise` goes on from there.

    Args:
        launch: prepared, and not refused.
        folder: whose commit and lock are recorded.
        by: who starts it.

    Raises:
        RunExists: the run directory holds a run of another recipe.
        UsageError: it runs already, or another launcher was faster.
        PreflightRefused: the cloud has no quota or no capacity for it.
    """
    job = launch.job
    run = RunDirectory(job.run_uri)
    if launch.pending is not None:
        return send(run, launch.pending, launch.backend)
    _refuse_running(launch, run)
    changed = _write(launch, run, folder)
    submission = put_down(
        run,
        job.attempt,
        launch.rendered,
        by=by,
        choice=launch.choice,
        destination=launch.destinations[launch.choice] if launch.destinations else None,
        usd_per_hour=launch.usd_per_hour,
        runs_on=launch.offer,
        event={"changes": launch.changes} if launch.changes else None,
        run_json=changed,
        recipe_text=None if launch.changes is None else dump_recipe(job.recipe),
    )
    if submission is None:
        raise UsageError(
            f"another launcher is submitting {job.run_id}",
            hint=f"`isthmus status {job.run_id}` says how it is",
        )
    return send(run, submission, launch.backend)


def _write(launch: Launch, run: RunDirectory, folder: Path) -> dict[str, Any]:
    """The run directory, unless it is there; returns what run.json shall say anew once the attempt is claimed.

    Before that another launcher may be the one: run.json is read and written as a whole.
    """
    job = launch.job
    again: dict[str, Any] = {
        "recipe": recipe_data(job.source),
        "recipe_hash": recipe_hash(job.source),
        **provenance(folder),
        "world_size": job.world_size,
        "destinations": [destination.to_json() for destination in launch.destinations],
    }
    if launch.code is not None:
        # Named by its content, so it can be there before anything that refers to it.
        run.write_file(launch.code.name, launch.code.data)
        again["code"] = launch.code.facts()
    if launch.changes is not None:
        return again
    if run.exists():
        run.check_same_recipe(again["recipe_hash"])
        return {"destinations": again["destinations"]}
    facts: dict[str, Any] = {
        "id": job.run_id,
        "name": job.recipe.name,
        "backend": job.backend,
        "created": time.time(),
        **again,
        "image": None,
        "dataset_fingerprints": [],
        "job_ids": [],
        "native": {},
        "attempts": 0,
    }
    run.create(dump_recipe(job.recipe), facts)
    return {}


def _refuse_running(launch: Launch, run: RunDirectory) -> None:
    if not run.exists():
        return
    run_id, record = launch.job.run_id, record_of(run)
    if not record.handle["native"].get("job_id"):
        return  # begun, never submitted
    state = status_of(record).state
    if state in ("pending", "running", "restarting"):
        raise UsageError(
            f"{run_id} is {state} already",
            hint=f"follow it: isthmus logs -f {run_id}, or end it: isthmus stop {run_id}",
        )


def lines_so_far(launch: Launch) -> int:
    """Lines of the log that earlier submissions left, for a backend that goes on in the same log."""
    run = RunDirectory(launch.job.run_uri)
    if not isinstance(launch.backend, Attachable) or not run.exists():
        return 0
    handle = record_of(run).to_handle()
    if not handle.native.get("job_id"):
        return 0
    return sum(1 for _ in launch.backend.logs(handle, follow=False))


def attend(
    backend: Backend,
    handle: Handle,
    write: Callable[[LogLine], None],
    say: Callable[[str], None],
    *,
    skip: int = 0,
) -> Status:
    """Passes the job's log on until it ends; returns how it ended.

    The first Ctrl-C (or SIGTERM, or a closed terminal) has the job checkpoint and end, the second one kills it; its
    data is safe either way. A job of a backend that cannot do that is only left alone.

    Args:
        write: gets the log's lines, without the first `skip`.
        say: gets what the launcher itself has to say.
    """
    interruptions = 0

    def interrupt() -> None:
        nonlocal interruptions
        if not isinstance(backend, Attachable):
            raise KeyboardInterrupt
        interruptions += 1  # first of all: the next Ctrl-C may come before this one has been acted on
        if interruptions == 1:
            say("checkpointing, then ending; Ctrl-C again kills it")
            backend.interrupt(handle)
        else:
            backend.interrupt(handle, kill=True)

    with _on_interruption(interrupt):
        try:
            for line in islice(backend.logs(handle, follow=True), skip, None):
                write(line)
        except KeyboardInterrupt:
            say(f"{handle.run_id} goes on; stop it with: isthmus stop {handle.run_id}")
        return backend.status(handle)


@contextmanager
def _on_interruption(act: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C, SIGTERM and a closed terminal do that instead."""

    def handle(signum: int, frame: FrameType | None) -> None:
        act()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(signum, handle) for signum in signals]
    try:
        yield
    finally:
        for signum, old in zip(signals, before, strict=True):
            signal.signal(signum, old)
