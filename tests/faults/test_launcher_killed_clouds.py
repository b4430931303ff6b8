"""The launcher of a cloud's job is killed -9 at random moments; the clouds are the emulated ones, the worker the real one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_clouds import BACKENDS, Clouds, Laptop, open_clouds

SECONDS = 240


@pytest.fixture
def clouds(tmp_path: Path, latents: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    """Both, with the dataset; their containers have isthmus, and a stand-in for the trainer that is preempted once."""
    with open_clouds(tmp_path / "clouds", monkeypatch, privileges="processes", grace=5) as found:
        found.upload(latents["dit"])
        plan = json.dumps({"*": ["preempt", "finish"]})
        found.image |= {"ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal", "ISTHMUS_REHEARSAL": plan}
        yield found


@pytest.fixture
def laptop(tmp_path: Path, clouds: Clouds, latents: dict[str, str]) -> Laptop:
    """In a folder with a recipe of one process, which lives in both clouds."""
    clouds.recipe(tmp_path, latents["dit"], compute__nodes=1)
    return Laptop(tmp_path)


def whole(clouds: Clouds, laptop: Laptop, backend: str, kind: str, run_id: str, moment: float) -> bool:
    """A run whose launcher or supervisor is killed at that moment, and brought to its end by another one."""
    launch = ("launch", "tiny.yaml", "--backend", backend, "--run-id", run_id, "--yes")
    words: tuple[str, ...] = (*launch, "--follow") if kind == "follow" else launch
    run = clouds.run(backend, run_id)
    if kind == "supervise":
        code, _, err = laptop.isthmus(*launch)
        assert code == 0, err
        words = ("supervise", run_id, "--interval", "0.5")
    process = laptop.start(*words)
    try:
        process.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    if not run.exists():
        code, _, err = laptop.isthmus(*launch)
        assert code == 0, err
    code, out, err = laptop.isthmus("supervise", run.uri, "--interval", "0.5", timeout=SECONDS)
    assert code == 0, out + err
    names = clouds.job_names(backend, run_id)
    assert names == [f"{run_id}-01", f"{run_id}-02"]
    assert run.read_run_json()["job_ids"] == names
    events = [event["type"] for event in run.events()]
    assert events.count("started") == 2, events
    assert events.count("finished") == 1, events
    assert [event["job_id"] for event in run.events("submitted")] == names
    return process.returncode == -signal.SIGKILL


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_job_is_doubled_or_lost_over_ten_kills(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    """Long: each of the runs has two attempts of real processes. Twenty kills over both clouds."""
    chance = random.Random(11)
    struck = tried = 0
    # Importing azure.ai.ml alone takes seconds.
    launching, staying = (5.0, 9.0) if backend == "azure" else (3.0, 8.0)
    while struck < 10:
        assert tried < 30, f"of {tried} only {struck} struck: they were done before"
        kind = ("launch", "follow", "supervise")[tried % 3]
        moment = chance.uniform(0.3, launching if kind == "launch" else staying)
        began = time.monotonic()
        hit = whole(clouds, laptop, backend, kind, f"run{tried}", moment)
        struck, tried = struck + hit, tried + 1
        took = time.monotonic() - began
        print(
            f"{backend} {kind}: {'killed' if hit else 'done'} at {moment:.1f} s, whole after {took:.1f} s",
            flush=True,
        )


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_follower_leaves_one_job(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    """Slow: two attempts of real processes in emulated containers."""
    whole(clouds, laptop, backend, "follow", "one", 8.0)
