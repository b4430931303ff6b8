"""Runs as the clouds know them, by the tags of their jobs: a second laptop sees what the first one launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from isthmus.backends.prepare import backend_settings
from isthmus.backends.registry import backend_names, get_backend
from isthmus.backends.runs import Record, records, save
from isthmus.backends.spec import CloudJob, Discovers
from isthmus.core.recipe import LoadedRecipe
from isthmus.errors import IsthmusError


def cloud_runs(
    backends: Sequence[str] = (),
    loaded: LoadedRecipe | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """A row a run whose jobs a cloud lists: run, state, backend, run_uri, created, attempt; the newest first.

    Runs that this machine does not know are remembered, so that they can be named by their id from now on.

    Args:
        backends: whose clouds are asked; none: all that can list their jobs.
        loaded: a recipe, whose sections say which region and workspace; without one the environment does.
        say: gets a line for each cloud that does not answer.

    Raises:
        IsthmusError: a backend that was named does not answer.
    """
    rows: dict[str, dict[str, Any]] = {}
    known = {record.id for record in records()}
    for name in backends or backend_names():
        try:
            backend = get_backend(name)
            if not isinstance(backend, Discovers):
                continue
            settings = (
                backend_settings(backend, loaded)
                if loaded is not None
                else backend.settings.model_validate({})
            )
            found = list(backend.jobs(settings))
        except IsthmusError as error:
            if name in backends:
                raise
            say(f"{name}: {error}")
            continue
        for job in sorted(found, key=lambda one: one.created or 0.0, reverse=True):
            row = _row(job)
            if row["run_uri"] not in rows or rows[row["run_uri"]]["created"] < row["created"]:
                rows[row["run_uri"]] = row
            if job.handle.run_id not in known:
                known.add(job.handle.run_id)
                _remember(job)
    return sorted(rows.values(), key=lambda row: float(row["created"]), reverse=True)


def _row(job: CloudJob) -> dict[str, Any]:
    return {
        "run": job.handle.run_id,
        "state": job.state,
        "backend": job.handle.backend,
        "run_uri": job.handle.run_uri,
        "created": job.created or 0.0,
        "attempt": job.attempt,
    }


def _remember(job: CloudJob) -> None:
    handle = job.handle
    save(
        Record(
            id=handle.run_id,
            name=handle.run_id,
            backend=handle.backend,
            run_uri=handle.run_uri,
            created=job.created or 0.0,
            handle=asdict(handle),
        )
    )
