"""The local backend: renders a command line, starts its keeper, follows and stops it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from isthmus.backends.local import checks
from isthmus.backends.local.keeper import last_error
from isthmus.backends.local.place import JobPlace
from isthmus.backends.settle import why_stopped
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
from isthmus.core.recipe.units import Duration
from isthmus.errors import StorageError, UsageError
from isthmus.files import replace_file
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import ProcessId

_LEASE_WAIT = 10
"""Seconds; a dead holder of this machine is noticed at once, so this is for one that is just ending."""


class LocalSettings(Section):
    """`backends.local` of a recipe."""

    grace: Duration = 30.0
    """Time from SIGTERM to SIGKILL: what a step and a checkpoint may take."""
    usd_per_hour: Annotated[float, Field(gt=0)] | None = None
    """What an hour of this machine costs; charged against `budget.max_usd`."""


class LocalBackend:
    """Runs jobs on this machine."""

    name = "local"
    capabilities = frozenset(
        {Capability.ATTACHED, Capability.DETACHED, Capability.RESTARTS, Capability.PRICES}
    )
    settings: type[BaseModel] = LocalSettings

    def __init__(self) -> None:
        # Children must be waited for, or they would stay as zombies of this process.
        self._children: list[subprocess.Popen[bytes]] = []

    def render(self, job: Job) -> Rendered:
        """The worker's command line; `python` and the files' names stand for what `submit` puts there."""
        settings = _settings(job)
        environment = {}
        if settings.usd_per_hour is not None:
            environment["ISTHMUS_USD_PER_HOUR"] = f"{settings.usd_per_hour:g}"
        budget = job.recipe.budget
        return Rendered(
            backend=self.name,
            run_id=job.run_id,
            run_uri=job.run_uri,
            job_id=f"{job.run_id}-{job.attempt:02d}",
            request={
                "command": [
                    *("python", "-m", "isthmus.core.worker", "--recipe", "recipe.yaml", "--run", job.run_uri),
                    *(
                        "--cluster",
                        "local",
                        "--grace",
                        f"{settings.grace:g}",
                        "--lease-wait",
                        str(_LEASE_WAIT),
                    ),
                ],
                "environment": environment,
                "grace": settings.grace,
                "detach": job.detach,
                "limits": {
                    "max_restarts": job.recipe.compute.max_restarts,
                    "max_hours": budget.max_hours,
                    "max_usd": budget.max_usd,
                    "usd_per_hour": settings.usd_per_hour,
                },
            },
            files={"recipe.yaml": dump_recipe(job.recipe)},
        )

    def lint(self, job: Job) -> list[Finding]:
        """One node, a price where a cap needs it, GPUs that are there, no more processes than cores."""
        return checks.lint(job, _settings(job).usd_per_hour)

    def preflight(self, job: Job) -> list[Finding]:
        """torch, datasets and their encoders, memory, run directory, disk."""
        return checks.preflight(job)

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        """The command and its environment."""
        request = dict(rendered.request)
        if format == "yaml":
            return yaml_text(request)
        return json.dumps(request, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def submit(self, rendered: Rendered) -> Handle:
        """Starts the keeper in a session of its own. Raises UsageError when another attempt of the run runs here."""
        place = JobPlace.of(rendered.run_uri, rendered.run_id)
        has_it = place.claimed(rendered.job_id)
        if has_it is None and any(process.is_alive() for process in place.processes().values()):
            raise UsageError(
                f"{rendered.run_id} is already running here",
                hint=f"isthmus status {rendered.run_id}, or isthmus stop {rendered.run_id}",
            )
        if has_it is None:
            keeper = self._start_keeper(place, rendered)
            # Both claim, it and we: killed here, we leave no keeper that another submission would not see.
            has_it = place.claim(rendered.job_id, ProcessId.of(keeper.pid) or ProcessId(keeper.pid, 0.0))
        return Handle(
            backend=self.name,
            run_id=rendered.run_id,
            run_uri=rendered.run_uri,
            native={"job_id": rendered.job_id, **has_it.to_json()},
        )

    def _start_keeper(self, place: JobPlace, rendered: Rendered) -> subprocess.Popen[bytes]:
        folder = place.folder / rendered.job_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Each whole or not at all: another submission of the same job writes the same bytes.
            for path, text in (
                *((folder / name, text) for name, text in rendered.files.items()),
                (folder / "job.json", rendered.to_json()),
            ):
                replace_file(path, text)
            words = ("-m", "isthmus.backends.local.keeper", str(place.folder), rendered.job_id)
            with place.log.open("ab") as log:
                keeper = subprocess.Popen(
                    [sys.executable, *words, str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise StorageError(f"cannot start the job: {error.strerror}", where=str(place.folder)) from error
        self._children.append(keeper)
        return keeper

    def _keeper(self, handle: Handle) -> ProcessId | None:
        for child in self._children:
            child.poll()
        if "pid" in handle.native:
            return ProcessId.from_json(dict(handle.native))
        place = JobPlace.of(handle.run_uri, handle.run_id)
        return place.claimed(str(handle.native.get("job_id"))) or place.processes().get("keeper")

    def status(self, handle: Handle) -> Status:
        """From the keeper's process and the run directory's events."""
        keeper = self._keeper(handle)
        alive = keeper is not None and keeper.is_alive()
        run = RunDirectory(handle.run_uri)
        attempt: int | None = None
        ending = None
        since = time.time()
        for event in run.events():
            if event["type"] == "submitted":
                attempt, ending = None, None
                since = float(event.get("time") or since)
            elif event["type"] == "started":
                attempt, ending = event.get("attempt"), None
            elif event["type"] in EXIT_CODES and (ending is None or event["type"] == "stopped"):
                ending = event  # the first one names the cause; a supervisor may end a preempted run for good
        if ending is not None:
            state = ending["type"]
            if state == "preempted" and alive:
                return Status(state="restarting", attempt=attempt, cause=ending.get("cause"))
            code = int(ending.get("exit_code", EXIT_CODES[state]))
            cause = ending.get("cause") or (why_stopped(run.events()) if state == "stopped" else None)
            return Status(state=state, exit_code=code, cause=cause, attempt=attempt)
        if alive:
            if attempt is not None:
                return Status(state="running", attempt=attempt)
            # Nothing is waited for here, as a queue would be on a cloud: Python is being loaded.
            waited = max(time.time() - since, 0.0)
            return Status(state="pending", detail=f"its processes are starting, for {waited:.0f} s")
        holder = run.lease_holder()
        if holder is not None and not holder.is_free(time.time()):
            # The keeper is gone, but a worker still runs, or the run runs on another machine.
            return Status(state="running", attempt=attempt, detail=holder.describe(time.time()))
        cause = last_error(JobPlace.of(handle.run_uri, handle.run_id).log)
        cause = cause or "it ended without a word: killed, or the machine was restarted"
        return Status(state="failed", exit_code=1, cause=cause, attempt=attempt)

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """What all attempts printed; with `follow` until the keeper has ended."""
        log = JobPlace.of(handle.run_uri, handle.run_id).log
        if not log.exists():
            return
        rest = b""
        with log.open("rb") as file:
            while True:
                keeper = self._keeper(handle)
                last = not follow or keeper is None or not keeper.is_alive()
                # Asked before reading: what was printed before the end is read after it.
                while chunk := file.read(65536):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from (
                        LogLine(0, None, line.decode(errors="replace").rstrip("\r")) for line in lines
                    )
                if last:
                    break
                time.sleep(0.1)
        if rest:
            yield LogLine(0, None, rest.decode(errors="replace"))

    def stop(self, handle: Handle) -> None:
        """Records stop-requested, sends SIGTERM, and kills what is left when the grace is over."""
        if self.status(handle).ended:
            return
        RunDirectory(handle.run_uri).event("stop-requested", by="user")
        self.interrupt(handle)
        keeper = self._keeper(handle)
        grace = _grace(handle)
        deadline = time.monotonic() + grace + 20
        while keeper is not None and keeper.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
            self._keeper(handle)
        self.interrupt(handle, kill=True)

    def interrupt(self, handle: Handle, *, kill: bool = False) -> None:
        """SIGTERM to the keeper, or to a worker whose keeper is gone; with `kill` SIGKILL to both groups."""
        processes = JobPlace.of(handle.run_uri, handle.run_id).processes()
        keeper = self._keeper(handle)
        order = [keeper, processes.get("worker")]
        for process in order:
            if process is None or not process.is_alive():
                continue
            with contextlib.suppress(ProcessLookupError):
                if kill:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    os.kill(process.pid, signal.SIGTERM)
                    return

    def offers(self, job: Job) -> list[Offer]:
        """This machine."""
        return [Offer(backend=self.name, sku="this machine", usd_per_hour=_settings(job).usd_per_hour)]


def _settings(job: Job) -> LocalSettings:
    assert isinstance(job.settings, LocalSettings)
    return job.settings


def _grace(handle: Handle) -> float:
    try:
        place = JobPlace.of(handle.run_uri, handle.run_id)
        job = json.loads(place.job(str(handle.native["job_id"])).read_text())
        return float(job["request"]["grace"])
    except (OSError, ValueError, KeyError):
        return float(LocalSettings().grace)
