"""The launcher of a cloud's job is killed -9 at random moments; the cloud is the emulated SageMaker, the worker the real one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.storage.copying import Item, Tree, copy
from isthmus.storage.rundir import RunDirectory

BUCKET = "example-bucket"
SECONDS = 240


@pytest.fixture
def cloud(
    tmp_path: Path, latents: dict[str, str], no_credentials: pytest.MonkeyPatch
) -> Iterator[SageMakerEmulator]:
    """An account with the dataset in its bucket; its containers have isthmus, and a stand-in for the trainer."""
    plan = json.dumps({"*": ["preempt", "finish"]})
    image = Image(
        python=sys.executable,
        env={"ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal", "ISTHMUS_REHEARSAL": plan},
    )
    with SageMakerEmulator(
        tmp_path / "cloud", images={"*": image}, privileges="processes", grace=5, restart_delay=0.1
    ) as emulator:
        emulator.bucket(BUCKET)
        for name, value in emulator.environment().items():
            no_credentials.setenv(name, value)
        source = Tree(latents["dit"])
        items = [Item(name, size) for name, size in source.sizes().items()]
        copy(source, Tree(f"s3://{BUCKET}/data"), items)
        yield emulator


@pytest.fixture
def recipe(tmp_path: Path, latents: dict[str, str], cloud: SageMakerEmulator) -> Path:
    """A recipe of one process that lives on S3."""
    data: dict[str, Any] = recipe_data(latents["dit"])
    data["data"]["sources"] = [{"uri": f"s3://{BUCKET}/data"}]
    data["run_directory"] = f"s3://{BUCKET}/runs"
    data["compute"]["gpus_per_node"] = 1
    data["backends"] = {"sagemaker": {"role_arn": cloud.role, "region": "us-east-1"}}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(data))
    return path


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """The command, as a process that can be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus", *words],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def isthmus(tmp_path: Path, *words: str) -> tuple[int, str]:
    """Exit code and output."""
    process = start(tmp_path, *words)
    out, _ = process.communicate(timeout=SECONDS)
    assert "Traceback" not in out, out
    return process.returncode, out


def whole(
    tmp_path: Path, cloud: SageMakerEmulator, recipe: Path, kind: str, run_id: str, moment: float
) -> bool:
    """A run whose launcher or supervisor is killed at that moment, and brought to its end by another one."""
    launch = ("launch", str(recipe), "--backend", "sagemaker", "--run-id", run_id, "--yes")
    words: tuple[str, ...] = (*launch, "--follow") if kind == "follow" else launch
    run = RunDirectory(f"s3://{BUCKET}/runs/{run_id}")
    if kind == "supervise":
        assert isthmus(tmp_path, *launch)[0] == 0
        words = ("supervise", run_id, "--interval", "0.5")
    process = start(tmp_path, *words)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    if not run.exists():
        code, out = isthmus(tmp_path, *launch)
        assert code == 0, out
    code, out = isthmus(tmp_path, "supervise", run.uri, "--interval", "0.5")
    assert code == 0, out
    names = sorted(
        job["TrainingJobName"] for job in cloud.jobs() if job["TrainingJobName"].startswith(run_id)
    )
    assert names == [f"{run_id}-01", f"{run_id}-02"]
    assert run.read_run_json()["job_ids"] == names
    events = [event["type"] for event in run.events()]
    assert events.count("started") == 2, events
    assert events.count("finished") == 1, events
    assert [event["job_id"] for event in run.events("submitted")] == names
    return process.returncode == -signal.SIGKILL


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_no_job_of_sagemaker_is_doubled_or_lost(
    tmp_path: Path, cloud: SageMakerEmulator, recipe: Path
) -> None:
    """Long: each of the runs has two attempts of real processes."""
    chance = random.Random(11)
    struck = 0
    for number in range(9):
        kind = ("launch", "follow", "supervise")[number % 3]
        moment = chance.uniform(0.3, 3.0 if kind == "launch" else 9.0)
        began = time.monotonic()
        struck += whole(tmp_path, cloud, recipe, kind, f"run{number}", moment)
        print(f"{kind} killed after {moment:.1f} s, whole after {time.monotonic() - began:.1f} s", flush=True)
    assert struck >= 6


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_follower_of_a_sagemaker_job_leaves_one_job(
    tmp_path: Path, cloud: SageMakerEmulator, recipe: Path
) -> None:
    """Slow: two attempts of real processes in emulated containers."""
    whole(tmp_path, cloud, recipe, "follow", "one", 6.0)
