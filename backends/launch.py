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

from isthmus.backends.prepare import Launch
from isthmus.backends.provenance import provenance
from isthmus.backends.runs import Record, save
from isthmus.backends.spec import Attachable, Backend, Handle, LogLine, Status
from isthmus.core.recipe.dump import dump_recipe, recipe_data, recipe_hash
from isthmus.errors import IsthmusError, UsageError
from isthmus.storage.rundir import RunDirectory


def start(launch: Launch, folder: Path) -> Handle:
    """Writes the run directory and this machine's record, then submits.

    Args:
        launch: prepared, and not refused.
        folder: whose commit and lock are recorded.

    Raises:
        RunExists: the run directory holds a run of another recipe.
    """
    job = launch.job
    run = RunDirectory(job.run_uri)
    _refuse_running(launch, run)
    facts: dict[str, Any] = {
        "id": job.run_id,
        "name": job.recipe.name,
        "backend": job.backend,
        "created": time.time(),
        "recipe": recipe_data(job.source),
        "recipe_hash": recipe_hash(job.source),
        **provenance(folder),
        "image": None,
        "dataset_fingerprints": [],
        "job_ids": [],
        "attempts": 0,
        "world_size": job.world_size,
    }
    if launch.changes is None:
        run.create(dump_recipe(job.recipe), facts)
    data = run.read_run_json()
    again = ("recipe", "recipe_hash", "git", "python", "packages", "lock_hash", "world_size")
    # All before the job begins, which from then on writes this file.
    run.update_run_json(
        job_ids=[*data.get("job_ids", []), launch.rendered.job_id],
        **({name: facts[name] for name in again} if launch.changes is not None else {}),
    )
    if launch.changes is not None:
        run.write_recipe(dump_recipe(job.recipe))
    if launch.code is not None:
        run.write_file(launch.code.name, launch.code.data)
        run.update_run_json(code=launch.code.facts())
    submitted: dict[str, Any] = {"backend": job.backend, "job_id": launch.rendered.job_id}
    if launch.changes:
        submitted["changes"] = launch.changes
    run.event("submitted", **submitted)
    try:
        handle = launch.backend.submit(launch.rendered)
    except IsthmusError as error:
        if not isinstance(error, UsageError):  # as when another launcher was faster
            run.event("failed", cause=str(error), exit_code=error.exit_code)
        raise
    save(
        Record(
            id=job.run_id,
            name=job.recipe.name,
            backend=job.backend,
            run_uri=run.uri,
            created=float(data["created"]),
            handle=handle.to_json(),
        )
    )
    return handle


def _known_handle(launch: Launch, run: RunDirectory) -> Handle | None:
    """Of the submission before, as its run directory tells it."""
    job = launch.job
    if not run.exists() or not run.events("submitted"):
        return None
    native = {"job_id": next(reversed(run.read_run_json().get("job_ids") or [None]))}
    return Handle(backend=job.backend, run_id=job.run_id, run_uri=run.uri, native=native)


def _refuse_running(launch: Launch, run: RunDirectory) -> None:
    handle, run_id = _known_handle(launch, run), launch.job.run_id
    state = launch.backend.status(handle).state if handle is not None else None
    if state in ("pending", "running", "restarting"):
        raise UsageError(
            f"{run_id} is {state} already",
            hint=f"follow it: isthmus logs -f {run_id}, or end it: isthmus stop {run_id}",
        )


def lines_so_far(launch: Launch) -> int:
    """Lines of the log that earlier submissions left, for a backend that goes on in the same log."""
    handle = _known_handle(launch, RunDirectory(launch.job.run_uri))
    if handle is None or not isinstance(launch.backend, Attachable):
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
