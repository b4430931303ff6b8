"""The backend: renders a batch script, starts it, and follows it through the run directory."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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
from isthmus.core.recipe.dump import dump_recipe, yaml_text
from isthmus.core.recipe.stages import Section
from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.filesystems import is_local, local_path
from isthmus.storage.rundir import RunDirectory
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

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def render(self, job: Job) -> Rendered:
        """The script; `$JOB` is the folder that the cluster puts the files in."""
        assert isinstance(job.settings, AcmeSettings)
        job_id = f"{job.run_id}-{job.attempt}"
        worker = f"-m isthmus.core.worker --recipe $JOB/recipe.yaml --run {shlex.quote(job.run_uri)} --cluster local"
        lines = [
            "#!/bin/sh",
            f"#ACME --name {job_id} --queue {shlex.quote(job.settings.queue)}",
            # A job is run once: one that was submitted again, since nobody heard the answer, finds that it was taken.
            'mkdir "$JOB/taken" 2>/dev/null || exit 0',
            'echo $$ >"$JOB/.pid" && mv "$JOB/.pid" "$JOB/pid"',
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

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        """What `acme submit` would take."""
        request = dict(rendered.request)
        return (
            yaml_text(request) if format == "yaml" else json.dumps(request, indent=2, sort_keys=True) + "\n"
        )

    def submit(self, rendered: Rendered) -> Handle:
        """Starts the script in a session of its own, unless that job was taken before."""
        handle = Handle(
            backend=self.name,
            run_id=rendered.run_id,
            run_uri=rendered.run_uri,
            native={"job_id": rendered.job_id},
        )
        folder = _folder(handle)
        taken = (folder / "taken").exists()
        if not taken:
            self._start(folder, rendered)
        for _ in range(200):
            if (folder / "pid").exists():
                return handle
            time.sleep(0.05)
        if taken:
            return handle
        raise StorageError("the cluster does not answer", where=str(folder))

    def _start(self, folder: Path, rendered: Rendered) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in {**rendered.files, "job.sh": str(rendered.request["script"])}.items():
                # Whole or not at all: another launcher may be submitting the same job.
                temporary = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
                temporary.write_text(text)
                temporary.replace(folder / name)
            with (folder / "log").open("ab") as log:
                self._children.append(
                    subprocess.Popen(
                        ["/bin/sh", str(folder / "job.sh")],
                        env={**os.environ, "JOB": str(folder), "PYTHON": sys.executable},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        except OSError as error:
            raise StorageError(f"cannot start the job: {error.strerror}", where=str(folder)) from error

    def status(self, handle: Handle) -> Status:
        """What the worker recorded, while its process is there or once it has ended."""
        for child in self._children:
            child.poll()  # or it would stay as a zombie of this process
        alive = _alive(handle)  # before its events: it may write its last word and end in between
        attempt, ending = None, None
        for event in RunDirectory(handle.run_uri).events():
            if event["type"] in ("submitted", "started"):
                attempt, ending = event.get("attempt"), None
            elif event["type"] in EXIT_CODES and ending is None:
                ending = event
        if ending is not None and not alive:
            state = ending["type"]
            code = int(ending.get("exit_code", EXIT_CODES[state]))
            return Status(state=state, exit_code=code, cause=ending.get("cause"), attempt=attempt)
        if alive:
            return Status(state="pending" if attempt is None else "running", attempt=attempt)
        return Status(state="failed", exit_code=1, cause="it ended without a word", attempt=attempt)

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """The script's output."""
        path = _folder(handle) / "log"
        if not path.exists():
            return
        with path.open(errors="replace") as log:
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
        pid = _pid(handle)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)

    def offers(self, job: Job) -> list[Offer]:
        """The one machine."""
        return [Offer(backend=self.name, sku="acme-1")]


def _folder(handle: Handle) -> Path:
    return local_path(handle.run_uri) / "acme" / str(handle.native["job_id"])


def _pid(handle: Handle) -> int | None:
    """The running job's process."""
    folder = _folder(handle)
    try:
        pid = int((folder / "pid").read_text())
    except (OSError, ValueError):
        return None
    # Another process may have got its id since; this job's has the job's folder in its command line.
    command = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return pid if str(folder) in found else None


def _alive(handle: Handle) -> bool:
    return _pid(handle) is not None
