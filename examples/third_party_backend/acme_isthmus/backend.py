"""The backend: renders a batch script, starts it, and follows it through the run directory."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from isthmus.backends.spec import (
    EXIT_CODES,
    Capability,
    Finding,
    Handle,
    Job,
    LogLine,
    Offer,
    Rendered,
    Status,
)
from isthmus.core.recipe.dump import dump_recipe
from isthmus.core.recipe.stages import Section
from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.filesystems import is_local, local_path
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import ProcessId
from isthmus.storage.shards import open_dataset


class AcmeSettings(Section):
    """`backends.acme` of a recipe."""

    queue: str = "default"
    """The cluster's queue."""


class AcmeBackend:
    """Runs a job's worker from a batch script. It does not restart a preempted job: that is the supervisor's work."""

    name = "acme"
    capabilities = frozenset({Capability.DETACHED})
    settings: type[BaseModel] = AcmeSettings

    def render(self, job: Job) -> Rendered:
        """The script; `$JOB` is the folder that the cluster puts the files in."""
        assert isinstance(job.settings, AcmeSettings)
        job_id = f"{job.run_id}-{job.attempt}"
        worker = f"-m isthmus.core.worker --recipe $JOB/recipe.yaml --run {shlex.quote(job.run_uri)} --cluster local"
        lines = [
            "#!/bin/sh",
            f"#ACME --name {job_id} --queue {shlex.quote(job.settings.queue)}",
            # exec, so that the cluster's SIGTERM reaches the worker and not a shell.
            f'exec "$PYTHON" {worker}',
        ]
        return Rendered(
            backend=self.name,
            run_id=job.run_id,
            run_uri=job.run_uri,
            job_id=job_id,
            request={"name": job_id, "queue": job.settings.queue, "script": "\n".join(lines) + "\n"},
            files={"recipe.yaml": dump_recipe(job.recipe)},
        )

    def lint(self, job: Job) -> list[Finding]:
        """One node, and a run directory that the log can be put beside."""
        found = []
        if job.recipe.compute.nodes != 1:
            found.append(Finding("acme.nodes", "error", "acme has one node", "--set compute.nodes=1", 2))
        if not is_local(job.run_uri):
            found.append(Finding("acme.place", "error", "acme needs a run_directory that is a path", None, 2))
        return found

    def preflight(self, job: Job) -> list[Finding]:
        """The datasets are there."""
        found = []
        for source in job.recipe.data.sources:
            try:
                open_dataset(source.uri if isinstance(source.uri, str) else list(source.uri))
            except IsthmusError as error:
                found.append(Finding.of("acme.data", error))
        return found

    def submit(self, rendered: Rendered) -> Handle:
        """Starts the script in a session of its own."""
        folder = _folder(rendered.run_uri)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in rendered.files.items():
                (folder / name).write_text(text)
            script = folder / "job.sh"
            script.write_text(str(rendered.request["script"]))
            with (folder / "log").open("ab") as log:
                process = subprocess.Popen(
                    ["/bin/sh", str(script)],
                    env={**os.environ, "JOB": str(folder), "PYTHON": sys.executable},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            own = ProcessId.of(process.pid) or ProcessId(process.pid, 0.0)
            (folder / "pid").write_text(f"{own.pid} {own.started}")
        except OSError as error:
            raise StorageError(f"cannot start the job: {error.strerror}", where=str(folder)) from error
        return Handle(
            backend=self.name,
            run_id=rendered.run_id,
            run_uri=rendered.run_uri,
            native={"job_id": rendered.job_id},
        )

    def status(self, handle: Handle) -> Status:
        """What the worker recorded, while its process is there or once it has ended."""
        attempt, ending = None, None
        for event in RunDirectory(handle.run_uri).events():
            if event["type"] in ("submitted", "started"):
                attempt, ending = event.get("attempt"), None
            elif event["type"] in EXIT_CODES and ending is None:
                ending = event
        alive = _alive(handle)
        if ending is not None and not alive:
            state = ending["type"]
            code = int(ending.get("exit_code", EXIT_CODES[state]))
            return Status(state=state, exit_code=code, cause=ending.get("cause"), attempt=attempt)
        if alive:
            return Status(state="pending" if attempt is None else "running", attempt=attempt)
        return Status(state="failed", exit_code=1, cause="it ended without a word", attempt=attempt)

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """The script's output."""
        with (_folder(handle.run_uri) / "log").open(errors="replace") as log:
            rest = ""
            while True:
                last = not follow or not _alive(handle)
                for piece in log:
                    rest += piece
                    if rest.endswith("\n"):
                        yield LogLine(0, None, rest.rstrip("\n"))
                        rest = ""
                if last:
                    break
                time.sleep(0.1)
        if rest:
            yield LogLine(0, None, rest)

    def stop(self, handle: Handle) -> None:
        """Records the wish, then sends SIGTERM; the worker keeps to its grace."""
        if self.status(handle).ended:
            return
        RunDirectory(handle.run_uri).event("stop-requested", by="user")
        process = _process(handle)
        if process is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)

    def offers(self, job: Job) -> list[Offer]:
        """The one machine."""
        return [Offer(backend=self.name, sku="acme-1")]


def _folder(run_uri: str) -> Path:
    return local_path(run_uri) / "acme"


def _process(handle: Handle) -> ProcessId | None:
    try:
        pid, started = (_folder(handle.run_uri) / "pid").read_text().split()
    except (OSError, ValueError):
        return None
    return ProcessId(int(pid), float(started))


def _alive(handle: Handle) -> bool:
    process = _process(handle)
    return process is not None and process.is_alive()
