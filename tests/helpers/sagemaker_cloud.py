"""Jobs in an emulated SageMaker for tests of the launcher's side.

The container's `python3` is a shell script here, so that a job takes no time. A test module imports the fixtures that it uses:
`place`, `cloud`, `script`, `shared`, `backend`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sagemaker_recipes import make_job

from isthmus.backends.sagemaker import logs
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.spec import Handle, Job, Rendered, Status
from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.storage.rundir import RunDirectory

SCRIPT = """#!/bin/sh
echo "hello from $(hostname) of $TRAINING_JOB_NAME"
echo "{words}"
for i in $(seq {tenths}); do [ -e {folder}/end ] && break; sleep 0.1; done
exit {code}
"""
Say = Callable[..., None]
BEGUN = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sagemaker")


@pytest.fixture(scope="module")
def cloud(place: Path) -> Iterator[SageMakerEmulator]:
    """One account for all tests of this module; each has a run of its own."""
    image = Image(python=str(place / "bin" / "python3"))
    with SageMakerEmulator(
        place / "cloud", images={"*": image}, privileges="processes", grace=2, restart_delay=0.1, patience=0.5
    ) as emulator:
        emulator.bucket("example-bucket")
        client = emulator.client("s3", "us-east-1")
        for name in ("quickstart/manifest.json", "heldout/manifest.json"):
            client.put_object(Bucket="example-bucket", Key=name, Body=b"{}")
        yield emulator


@pytest.fixture
def script(place: Path) -> Say:
    """What the containers do from now on."""

    def say(words: str = "step 1/2  stage a  loss 0.5", code: int = 0, seconds: float = 0) -> None:
        (place / "bin").mkdir(exist_ok=True)
        (place / "end").unlink(missing_ok=True)
        path = place / "bin" / "python3"
        text = SCRIPT.format(words=words, code=code, tenths=int(10 * seconds), folder=place)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(path)

    say()
    return say


@pytest.fixture(scope="module")
def shared() -> SageMakerBackend:
    """One for all tests: making a client takes longer than most of them."""
    return SageMakerBackend()


@pytest.fixture
def backend(
    cloud: SageMakerEmulator,
    shared: SageMakerBackend,
    no_credentials: pytest.MonkeyPatch,
    monkeypatch: pytest.MonkeyPatch,
) -> SageMakerBackend:
    """With the environment of a client of the emulator."""
    for name, value in cloud.environment().items():
        no_credentials.setenv(name, value)
    monkeypatch.setattr(logs, "IDLE", 0.1)
    return shared


_runs = iter(range(1, 10_000))


def job_of(cloud: SageMakerEmulator, *words: str, attempt: int = 1) -> Job:
    """A job of a run of its own, its run directory made."""
    role = f"backends.sagemaker.role_arn={cloud.role}"
    job = make_job(role, *words, run_id=f"run-{next(_runs)}", attempt=attempt)
    RunDirectory(job.run_uri).create("", {"id": job.run_id, "recipe_hash": ""})
    return job


def send(backend: SageMakerBackend, job: Job) -> Handle:
    """As the launcher does: the event first."""
    rendered = backend.render(job)
    RunDirectory(job.run_uri).event("submitted", backend="sagemaker", job_id=rendered.job_id)
    return backend.submit(rendered)


def until(check: Callable[[], Status], wanted: Callable[[Status], bool], seconds: float = 20) -> Status:
    deadline = time.monotonic() + seconds
    while not wanted(status := check()):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def names(cloud: SageMakerEmulator, rendered: Rendered) -> int:
    """How many jobs of that name there are."""
    return sum(job["TrainingJobName"] == rendered.job_id for job in cloud.jobs())
