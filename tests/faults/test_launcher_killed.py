"""The launcher is killed -9 at random moments of launch, follow and supervise: never two jobs, never a lost run.

Real processes around a stand-in for the trainer, on the backend of this machine and on the example of a third party's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.backends.local.place import JobPlace
from isthmus.storage.rundir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"
SECONDS = 300
PLAN = {"*": ["preempt", "finish"]}


class Desk:
    """A folder with a recipe, the command, and the example's package where Python finds it."""

    def __init__(self, folder: Path, data: str) -> None:
        self.folder = folder
        site = folder / "site"
        shutil.copytree(EXAMPLE / "acme_isthmus", site / "acme_isthmus")
        info = site / "acme_isthmus-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-isthmus\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[isthmus]\nacme = acme_isthmus.plugin\n")
        recipe = recipe_data(data)
        recipe["compute"]["gpus_per_node"] = 1
        (folder / "tiny.yaml").write_text(json.dumps(recipe))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "XDG_STATE_HOME": str(folder / "state"),
            "ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal",
            "ISTHMUS_REHEARSAL": json.dumps(PLAN),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command, as a process that can be killed."""
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def isthmus(self, *words: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*words)
        out, _ = process.communicate(timeout=SECONDS)
        assert "Traceback" not in out, out
        return process.returncode, out

    def killed_after(self, seconds: float, *words: str) -> bool:
        """Starts the command and kills it; False when it ended before."""
        process = self.start(*words)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        return process.returncode == -signal.SIGKILL

    def run(self, run_id: str) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.folder / "runs" / run_id)


@pytest.fixture
def desk(tmp_path: Path, latents: dict[str, str]) -> Iterator[Desk]:
    """A desk whose keepers are ended with the test."""
    yield Desk(tmp_path, latents["dit"])
    for folder in (tmp_path / "runs").glob("*"):
        for process in JobPlace(folder / "logs").processes().values():
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)


def check(run: RunDirectory, attempts: int | None) -> list[str]:
    """What a run must look like whatever was killed: every job began once, one after the other."""
    events = run.events()
    jobs = [event["job_id"] for event in events if event["type"] == "submitted"]
    assert len(set(jobs)) == len(jobs), "a job was submitted under two events"
    assert run.read_run_json()["job_ids"] == jobs
    assert [one.number for one in run.submissions().all()] == list(range(1, len(jobs) + 1))
    assert all(one.answer is not None for one in run.submissions().all())
    running = False
    for event in events:
        if event["type"] == "started":
            assert not running, "two jobs ran at once"
            running = True
        elif event["type"] in ("preempted", "finished", "failed", "stopped"):
            running = False
    started = [event["attempt"] for event in events if event["type"] == "started"]
    assert started == list(range(1, len(started) + 1))
    if attempts is not None:
        assert len(started) == attempts, [event["type"] for event in events]
    return jobs


def launch_until_it_took(desk: Desk, run_id: str, *words: str) -> None:
    """As a user would: the same command again, until the run is there."""
    if not desk.run(run_id).exists():
        code, out = desk.isthmus("launch", "tiny.yaml", "--run-id", run_id, *words)
        assert code == 0, out


ACME = ("--backend", "acme", "--yes")


def acme(desk: Desk, kind: str, run_id: str, moment: float | None) -> tuple[bool, float]:
    """A run whose launcher or supervisor is killed at that moment, and brought to its end by another.

    Args:
        kind: `launch`, `follow` or `supervise`: what is killed.
        moment: seconds after its start; None: never.

    Returns:
        Whether the kill struck, and how long the process lived.
    """
    command = ["supervise", run_id, "--interval", "0.2"]
    if kind == "supervise":
        launch_until_it_took(desk, run_id, *ACME)
    else:
        follow = ["--follow"] if kind == "follow" else []
        command = ["launch", "tiny.yaml", "--run-id", run_id, *ACME, *follow]
    began = time.monotonic()
    struck = desk.killed_after(SECONDS if moment is None else moment, *command)
    lived = time.monotonic() - began
    launch_until_it_took(desk, run_id, *ACME)
    code, out = desk.isthmus("supervise", run_id, "--interval", "0.2")
    assert code == 0, out
    jobs = check(desk.run(run_id), attempts=2)
    assert jobs == [f"{run_id}-1", f"{run_id}-2"]
    folders = sorted(path.name for path in (desk.folder / "runs" / run_id / "acme").iterdir())
    assert folders == jobs
    for job in jobs:
        text = (desk.folder / "runs" / run_id / "acme" / job / "log").read_text()
        assert text.count("rank 0 attempt") == 1, text
    return struck, lived


def local(desk: Desk, kind: str, run_id: str, moment: float | None) -> tuple[bool, float]:
    """The same on this machine, where a keeper restarts: a launch in the foreground, or a detached one, is killed."""
    words = ("--detach",) if kind == "detached" else ()
    began = time.monotonic()
    command = ("launch", "tiny.yaml", "--run-id", run_id, *words)
    struck = desk.killed_after(SECONDS if moment is None else moment, *command)
    lived = time.monotonic() - began
    deadline = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < deadline
        state = "gone"
        if desk.run(run_id).exists():
            state = json.loads(desk.isthmus("status", run_id, "--json")[1])["state"]
        if state == "finished":
            break
        if state in ("running", "restarting"):
            time.sleep(0.2)
            continue
        verb: tuple[str, ...] = ("launch", "tiny.yaml", "--run-id", run_id)
        if state == "preempted":
            verb = ("resume", run_id)
        elif state == "pending":
            verb = ("supervise", run_id, "--interval", "0.2")
        code, out = desk.isthmus(*verb)
        assert code in (0, 2, 75), out  # 2: it began just now; 75: it was ended with its launcher
    check(desk.run(run_id), attempts=None)
    assert len(desk.run(run_id).events("finished")) == 1
    return struck, lived


def kill(desk: Desk, one: Any, kinds: tuple[str, ...], kills: int, seed: int) -> None:
    """So many kills that struck, each at a random moment of the life of what is killed."""
    chance = random.Random(seed)
    lives = {kind: one(desk, kind, f"whole-{kind}", None)[1] for kind in kinds}
    struck = 0
    for number in range(2 * kills):
        if struck == kills:
            return
        kind = kinds[struck % len(kinds)]
        struck += one(desk, kind, f"run{number}", chance.uniform(0.0, 0.95) * lives[kind])[0]
    raise AssertionError(f"only {struck} kills came before the end")


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_third_party_s_jobs_survive_20_kills(desk: Desk) -> None:
    """Long: more than 20 runs of two real attempts each."""
    kill(desk, acme, ("launch", "follow", "supervise"), 20, seed=5)


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_local_jobs_survive_20_kills(desk: Desk) -> None:
    """Long: more than 20 runs of up to four real attempts each."""
    kill(desk, local, ("foreground", "detached"), 20, seed=7)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_kills_leave_one_job_each(desk: Desk) -> None:
    """Slow: six runs of two real attempts each."""
    kill(desk, acme, ("launch", "follow", "supervise"), 3, seed=1)


@pytest.mark.faults
def test_a_kill_leaves_one_job(desk: Desk) -> None:
    acme(desk, "follow", "one", 2.5)


@pytest.mark.faults
def test_two_supervisors_of_real_processes_bring_one_run_to_its_end(desk: Desk) -> None:
    launch_until_it_took(desk, "one", *ACME)
    words = ("supervise", "one", "--interval", "0.2", "--no-log", "--json")
    both = [desk.start(*words), desk.start(*words)]
    ended = [process.communicate(timeout=SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert check(desk.run("one"), attempts=2) == ["one-1", "one-2"]
