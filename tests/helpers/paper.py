"""A cloud on paper: a backend whose jobs are files that a test turns over, registered as any plugin is.

It runs nothing. A job is `<PAPER_CLOUD>/jobs/<id>.json` with its state; a region whose name is in `full.json` refuses, for
want of machines. `papyrus` is the same cloud under a second name.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from isthmus.backends.settle import settle_missing
from isthmus.backends.spec import (
    EXIT_CODES,
    Capability,
    CloudJob,
    Finding,
    Handle,
    Job,
    LogLine,
    Offer,
    Rendered,
    State,
    Status,
)
from isthmus.core.recipe.dump import dump_recipe, yaml_text
from isthmus.core.recipe.stages import Section
from isthmus.errors import PreflightRefused, StorageError
from isthmus.files import replace_file
from isthmus.storage.rundir import RunDirectory


class PaperSettings(Section):
    """`backends.paper` of a recipe."""

    region: str = "north"
    """Where."""


class Paper:
    """The cloud, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True, exist_ok=True)

    def full(self, *regions: str) -> None:
        """From now on these refuse."""
        (self.folder / "full.json").write_text(json.dumps(regions))

    def jobs(self) -> list[str]:
        """Ids of the jobs that there ever were, by the time of their creation."""
        return sorted(self._all(), key=lambda name: float(self.job(name)["created"]))

    def _all(self) -> list[str]:
        return [path.stem for path in (self.folder / "jobs").glob("*.json")]

    def job(self, name: str) -> dict[str, Any]:
        """What is known of a job."""
        data: dict[str, Any] = json.loads((self.folder / "jobs" / f"{name}.json").read_text())
        return data

    def set(self, name: str, state: State, cause: str | None = None, *, begin: bool = True) -> None:
        """Turns a job over, as its worker and the cloud would."""
        job = self.job(name)
        run = RunDirectory(job["run_uri"])
        if begin and not job.get("began"):
            job["began"] = True
            run.event("started", attempt=len(run.events("started")) + 1, job=name)
        if state in EXIT_CODES and begin:
            run.event(state, cause=cause, exit_code=EXIT_CODES[state])
        # Whole: launchers look at it many times a second.
        replace_file(
            self.folder / "jobs" / f"{name}.json", json.dumps({**job, "state": state, "cause": cause})
        )

    def break_network(self, when: Literal["before", "after", "never"]) -> None:
        """From now on a submission's connection is lost before, or after, it had its effect."""
        (self.folder / "network").write_text(when)


class PaperBackend:
    """Submits to the cloud on paper."""

    name = "paper"
    capabilities = frozenset({Capability.DETACHED, Capability.MULTI_NODE, Capability.SPOT})
    settings: type[BaseModel] = PaperSettings

    @property
    def cloud(self) -> Paper:
        """The one that the environment names."""
        return Paper(Path(os.environ["PAPER_CLOUD"]))

    def _region(self, job: Job) -> str:
        assert isinstance(job.settings, PaperSettings)
        return (job.offer.region if job.offer else None) or job.settings.region

    def render(self, job: Job) -> Rendered:
        request = {"name": job.run_id, "region": self._region(job), "usd_per_hour": job.usd_per_hour}
        return Rendered(
            backend=self.name, run_id=job.run_id, run_uri=job.run_uri, job_id=f"{job.run_id}-{job.attempt:02d}",
            request=request, files={"recipe.yaml": dump_recipe(job.recipe)}, native={"region": self._region(job)},
        )  # fmt: skip

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        return json.dumps(dict(rendered.request)) if format == "json" else yaml_text(dict(rendered.request))

    def lint(self, job: Job) -> list[Finding]:
        return []

    def preflight(self, job: Job) -> list[Finding]:
        if self._region(job) in self._full():
            return [Finding("paper.quota", "error", f"no quota in {self._region(job)}")]
        return []

    def _full(self) -> list[str]:
        path = self.cloud.folder / "full.json"
        found: list[str] = json.loads(path.read_text()) if path.exists() else []
        return found

    def submit(self, rendered: Rendered) -> Handle:
        network = self.cloud.folder / "network"
        broken = network.read_text() if network.exists() else "never"
        if broken == "before":
            raise StorageError("the connection was reset", where="paper")
        region = rendered.native["region"]
        path = self.cloud.folder / "jobs" / f"{rendered.job_id}.json"
        if region in self._full() and not path.exists():
            raise PreflightRefused(f"insufficient capacity in {region}")
        data = {"state": "pending", "created": time.time(), "run_uri": rendered.run_uri, "region": region, "run_id": rendered.run_id, "request": dict(rendered.request)}  # fmt: skip
        temporary = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}")
        temporary.write_text(json.dumps(data))
        with contextlib.suppress(FileExistsError):  # the one of an earlier call
            os.link(temporary, path)
        temporary.unlink()
        if broken == "after":
            raise StorageError("the connection was reset", where="paper")
        return Handle(
            backend=self.name, run_id=rendered.run_id, run_uri=rendered.run_uri,
            native={"job_id": rendered.job_id, "region": region},
        )  # fmt: skip

    def status(self, handle: Handle) -> Status:
        try:
            job = self.cloud.job(handle.native["job_id"])
        except FileNotFoundError:
            events = RunDirectory(handle.run_uri).events()
            return settle_missing(events, cloud="paper", job_id=handle.native["job_id"])
        state: State = job["state"]
        return Status(state=state, exit_code=EXIT_CODES.get(state), cause=job.get("cause"))

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        yield LogLine(0, None, f"log of {handle.native['job_id']}")
        while follow and not self.status(handle).ended:
            time.sleep(0.05)

    def stop(self, handle: Handle) -> None:
        if not self.status(handle).ended:
            run = RunDirectory(handle.run_uri)
            if not any(event["type"] == "stop-requested" for event in run.events()[-2:]):
                run.event("stop-requested", by="user")
            with contextlib.suppress(FileNotFoundError):
                self.cloud.set(handle.native["job_id"], "stopped")

    def offers(self, job: Job) -> list[Offer]:
        tier = job.offer.tier if job.offer else "on_demand"
        return [Offer(backend=self.name, sku="sheet", region=self._region(job), tier=tier)]

    def jobs(self, settings: BaseModel) -> Iterator[CloudJob]:
        for name in reversed(self.cloud.jobs()):
            job = self.cloud.job(name)
            native = {"job_id": name, "region": job["region"]}
            handle = Handle(backend=self.name, run_id=job["run_id"], run_uri=job["run_uri"], native=native)
            yield CloudJob(handle=handle, state=job["state"], created=job["created"], attempt=int(name[-2:]))


class PapyrusBackend(PaperBackend):
    """Another cloud of the kind."""

    name = "papyrus"


PLUGIN = """
from isthmus.backends.hooks import hookimpl
@hookimpl
def isthmus_backends():
    return [("paper", "paper:PaperBackend", None), ("papyrus", "paper:PapyrusBackend", None)]
"""


def install(folder: Path) -> dict[str, str]:
    """Makes the plugin known to processes that get this environment; it lies in `folder`."""
    site = folder / "site"
    info = site / "paper-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isthmus]\npaper = paper_plugin\n")
    (site / "paper_plugin.py").write_text(PLUGIN)
    path = os.pathsep.join([str(site), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep), "PAPER_CLOUD": str(folder / "cloud")}


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    """The cloud, known to this process and to those that it starts."""
    from isthmus.backends import registry
    from isthmus.core import plugins

    for name, value in install(tmp_path / "paper").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "paper" / "site"), *sys.path])
    registry._scan.cache_clear()
    plugins.installed.cache_clear()
    yield Paper(tmp_path / "paper" / "cloud")
    registry._scan.cache_clear()
    plugins.installed.cache_clear()
