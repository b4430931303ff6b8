"""launch, status, logs, stop, resume as commands, with real processes around a stand-in for the trainer."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.backends.local.place import JobPlace
from isthmus.storage.rundir import RunDirectory


class Desk:
    """A folder with a recipe and data, and the isthmus command in it."""

    def __init__(self, folder: Path, data: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal",
        }
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(json.dumps(recipe_data(data)))

    def start(self, *words: str, plan: dict[str, Any] | None = None, **options: Any) -> subprocess.Popen[str]:
        """The command as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus", *words],
            cwd=self.folder,
            env={**self.environment, "ISTHMUS_REHEARSAL": json.dumps(plan or {"*": "finish"})},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
        )

    def isthmus(self, *words: str, plan: dict[str, Any] | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*words, plan=plan)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def json(self, *words: str, plan: dict[str, Any] | None = None) -> Any:
        """What the command prints with --json; it must succeed."""
        code, out, err = self.isthmus(*words, "--json", plan=plan)
        assert code == 0, out + err
        return json.loads(out)

    def run(self, run_id: str) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.folder / "runs" / run_id)

    def until(self, what: Callable[[], object]) -> None:
        """Until that is true."""
        deadline = time.monotonic() + 60
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def until_training(self, run_id: str, attempt: int = 1) -> None:
        """Until rank 0 of an attempt has said so."""
        self.until(lambda: len(self.run(run_id).events("note")) >= attempt)


@pytest.fixture
def desk(tmp_path: Path, latents: dict[str, str]) -> Iterator[Desk]:
    """A desk whose runs are ended with the test."""
    desk = Desk(tmp_path, latents["dit"])
    yield desk
    for folder in (tmp_path / "runs").glob("*"):
        for process in JobPlace(folder / "logs").processes().values():
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)


def test_launch_in_the_foreground_finishes_with_0_and_leaves_a_whole_record(desk: Desk) -> None:
    code, out, err = desk.isthmus("launch", "tiny.yaml")
    assert code == 0, out + err
    assert "world size 2" in out
    assert "rank 0 attempt 1: finish" in out
    run_id = next(line.split()[1] for line in out.splitlines() if line.startswith("run "))
    assert run_id.startswith("tiny-")
    run = desk.run(run_id)
    facts = run.read_run_json()
    assert facts["id"] == run_id
    assert facts["recipe"]["name"] == "tiny"
    assert facts["job_ids"] == [f"{run_id}-01"]
    assert facts["attempts"] == 1
    assert facts["world_size"] == 2
    assert "torch" in facts["packages"]
    assert {"git", "lock_hash", "python", "image", "recipe_hash", "dataset_fingerprints"} <= set(facts)
    assert [event["type"] for event in run.events()] == ["submitted", "started", "note", "finished"]

    facts = desk.json("status", run_id[:12])
    assert (facts["state"], facts["exit_code"], facts["total_steps"]) == ("finished", 0, 6)
    assert desk.json("status", str(desk.folder / "runs" / run_id))["run"] == run_id
    (row,) = desk.json("runs", "list")
    assert (row["run"], row["state"]) == (run_id, "finished")
    code, out, _ = desk.isthmus("logs", run_id)
    assert "rank 1 attempt 1: finish" in out


def test_detached_followed_stopped_and_resumed(desk: Desk) -> None:
    facts = desk.json("launch", "tiny.yaml", "--detach", "--run-id", "one", plan={"*": "wait"})
    assert facts["state"] == "pending"
    desk.until_training("one")
    assert desk.json("status", "one")["state"] == "running"
    follower = desk.start("logs", "-f", "one", "--json")
    code, _, err = desk.isthmus("launch", "tiny.yaml", "--run-id", "one")
    assert code == 2
    assert "one is running already" in err
    code, _, err = desk.isthmus("resume", "one")
    assert code == 2

    assert desk.json("stop", "one") == {"run": "one", "state": "stopped", "cause": None, "was": "running"}
    lines = [json.loads(line) for line in follower.communicate(timeout=30)[0].splitlines()]
    assert {"node": 0, "time": None, "text": "rank 0 attempt 1: wait"} in lines
    assert desk.json("stop", "one")["was"] == "stopped"
    assert desk.json("status", "one")["exit_code"] == 4
    assert desk.run("one").checkpoints() == [1]

    facts = desk.json("resume", "one", "--set", "stages.0.steps=8", "--set", "compute.gpus_per_node=1")
    assert facts["state"] == "finished"
    assert facts["changes"] == {"stages.0.steps": [6, 8], "compute.gpus_per_node": [2, 1]}
    assert desk.run("one").read_run_json()["world_size"] == 1
    assert "steps: 8" in desk.run("one").read_recipe()
    assert desk.run("one").events("started")[-1]["world_size"] == 1


def test_a_resume_keeps_what_the_run_was_begun_with(desk: Desk) -> None:
    desk.json("launch", "tiny.yaml", "--run-id", "one")
    before = desk.run("one").read_recipe()
    code, _, err = desk.isthmus("resume", "one", "--set", "seed=4", "--set", "data.lanes=8")
    assert code == 2
    assert "changed: seed, data.lanes" in err
    assert desk.run("one").read_recipe() == before
    # From another folder relative paths still mean what they meant.
    elsewhere = desk.folder / "elsewhere"
    elsewhere.mkdir()
    desk.folder, folder = elsewhere, desk.folder
    assert desk.json("resume", "one")["state"] == "finished"
    desk.folder = folder
    assert len(desk.run("one").events("submitted")) == 2


def test_another_recipe_under_the_same_id_is_refused(desk: Desk) -> None:
    desk.json("launch", "tiny.yaml", "--run-id", "one")
    before = sorted((desk.folder / "runs" / "one").rglob("*"))
    code, _, err = desk.isthmus("launch", "tiny.yaml", "--run-id", "one", "--set", "seed=4")
    assert code == 2
    assert "holds run one of another recipe" in err
    assert sorted((desk.folder / "runs" / "one").rglob("*")) == before


@pytest.mark.parametrize(
    ("plan", "code", "cause"),
    [
        ({"0": "wait", "1": "fail"}, 1, "checkpoints/step-00000010: cannot write: the disk is full"),
        ({"0": "usage", "1": "wait"}, 2, "shard 3: no such column"),
        ({"0": "wait", "1": "kill"}, 1, "rank 1 was killed by signal 9 (SIGKILL); "),
    ],
)
def test_the_cause_and_the_exit_code_arrive(desk: Desk, plan: dict[str, str], code: int, cause: str) -> None:
    found, out, _ = desk.isthmus("launch", "tiny.yaml", "--run-id", "one", plan=plan)
    assert found == code
    assert f"one failed: {cause}" in out
    assert "go on: isthmus resume one" in out
    facts = desk.json("status", "one")
    assert facts["exit_code"] == code
    assert facts["cause"].startswith(cause)  # of a SIGKILL the machine decides what else is known


def test_preempted_is_restarted_up_to_the_limit(desk: Desk) -> None:
    words = ("launch", "tiny.yaml", "--run-id", "one", "--set", "compute.max_restarts=1")
    code, out, _ = desk.isthmus(*words, plan={"*": "preempt"})
    assert code == 75
    events = [event["type"] for event in desk.run("one").events() if event["type"] != "note"]
    assert events == ["submitted", "started", "preempted", "started", "preempted"]
    assert "rank 0 attempt 2: preempt" in out


@pytest.mark.faults
def test_ctrl_c_checkpoints_and_the_run_can_go_on(desk: Desk) -> None:
    # A terminal of its own, whose Ctrl-C reaches the launcher alone.
    primary, secondary = pty.openpty()
    process = desk.start(
        *("launch", "tiny.yaml", "--run-id", "one"),
        plan={"*": ["wait", "finish"]},
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(secondary)
    desk.until_training("one")
    os.write(primary, b"\x03")
    shown = b""
    try:
        while chunk := os.read(primary, 4096):
            shown += chunk
    except OSError:
        pass  # the terminal's other end was closed
    os.close(primary)
    assert process.wait(60) == 75, shown.decode()
    assert b"checkpointing, then ending" in shown
    assert b"go on: isthmus resume one" in shown
    run = desk.run("one")
    assert run.checkpoints() == [1]
    assert run.events("stop-requested") == []
    code, out, _ = desk.isthmus("resume", "one", plan={"*": ["wait", "finish"]})
    assert code == 0
    assert "rank 0 attempt 2: finish" in out
    assert "attempt 1" not in out, "the log of the first attempt is not shown again"


@pytest.mark.faults
def test_a_second_ctrl_c_kills_and_leaves_no_process(desk: Desk) -> None:
    process = desk.start("launch", "tiny.yaml", "--run-id", "one", plan={"*": "deaf"}, start_new_session=True)
    desk.until_training("one")
    processes = JobPlace(desk.folder / "runs" / "one" / "logs").processes()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "Ctrl-C again kills it" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 1
    desk.until(lambda: not any(one.is_alive() for one in processes.values()))
    assert (
        desk.json("status", "one")["cause"] == "it ended without a word: killed, or the machine was restarted"
    )


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_launcher_ends_its_foreground_run_after_a_checkpoint(desk: Desk) -> None:
    process = desk.start("launch", "tiny.yaml", "--run-id", "one", plan={"*": "wait"})
    desk.until_training("one")
    process.kill()
    process.communicate()
    desk.until(lambda: desk.json("status", "one")["state"] == "preempted")
    assert desk.run("one").checkpoints() == [1]


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_keeper_ends_its_worker_after_a_checkpoint(desk: Desk) -> None:
    desk.json("launch", "tiny.yaml", "--run-id", "one", "--detach", plan={"*": "wait"})
    desk.until_training("one")
    keeper = JobPlace(desk.folder / "runs" / "one" / "logs").processes()["keeper"]
    os.kill(keeper.pid, signal.SIGKILL)
    desk.until(lambda: desk.json("status", "one")["state"] == "preempted")
    assert desk.run("one").checkpoints() == [1]
    assert desk.json("resume", "one")["state"] == "finished"


@pytest.mark.faults
def test_a_killed_worker_is_named(desk: Desk) -> None:
    process = desk.start("launch", "tiny.yaml", "--run-id", "one", plan={"*": "wait"})
    desk.until_training("one")
    worker = JobPlace(desk.folder / "runs" / "one" / "logs").processes()["worker"]
    os.kill(worker.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "one failed: the worker was killed by signal 9 (SIGKILL)" in out


def test_the_budget_stops_it_for_good(desk: Desk) -> None:
    words = ("--set", "budget.max_usd=0.0001", "--set", "backends.local.usd_per_hour=3600")
    code, out, _ = desk.isthmus("launch", "tiny.yaml", "--run-id", "one", *words, plan={"*": "preempt"})
    assert code == 4, out
    assert "one stopped: budget.max_usd 0.0001 reached" in out
    assert desk.run("one").events("note")[0]["usd"] == "3600"
    code, _, err = desk.isthmus("launch", "tiny.yaml", "--set", "budget.max_usd=1")
    assert code == 3
    assert "budget.max_usd needs a price" in err


def test_grace_is_honoured(desk: Desk) -> None:
    words = ("launch", "tiny.yaml", "--run-id", "one", "--detach", "--set", "backends.local.grace=2 s")
    desk.json(*words, plan={"0": "wait", "1": "deaf"})
    desk.until_training("one")
    assert desk.json("stop", "one")["state"] == "stopped"
    asked, done = (desk.run("one").events(type)[0]["time"] for type in ("stop-requested", "stopped"))
    assert done - asked < 20


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--set", "compute.nodes=2", "--set", "compute.gpus_per_node=1"), 3, "this machine is one node"),
        (("--set", "compute.gpu=a100-80gb"), 3, "CUDA devices"),
        (("--set", "data.sources.0.uri=nowhere"), 3, "no latent dataset here"),
        (("--set", "encoders.autoencoder.kind=diffusers"), 3, "autoencoder"),
        (("--set", "data.memory_limit=1 KB"), 2, "memory_limit"),
        (("--set", "backends.local.graze=3 s"), 2, "did you mean `grace`?"),
        (("--set", "backends.locl.grace=3 s"), 2, "did you mean `local`?"),
        (("--set", "run_directory=tiny.yaml"), 3, "a part of the path is a file"),
        (("--run-id", "../out"), 2, "cannot be a run id"),
        (("--backend", "azure"), 2, "no subscription, resource_group, workspace"),
        (("--backend", "sagemaker"), 3, "is not on S3"),
        (("--backend", "loca"), 2, "did you mean local?"),
    ],
)
def test_a_bad_launch_is_one_line_and_leaves_nothing(
    desk: Desk, words: tuple[str, ...], code: int, message: str
) -> None:
    before = sorted(desk.folder.rglob("*"))
    found, out, err = desk.isthmus("launch", "tiny.yaml", *words)
    assert found == code, err
    assert message in err
    assert out == ""
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert sorted(desk.folder.rglob("*")) == before


def test_no_torch_is_one_line(desk: Desk) -> None:
    hide = desk.folder / "hide"
    hide.mkdir()
    # What a launcher install looks like: find_spec finds no torch.
    (hide / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
    )
    desk.environment["PYTHONPATH"] = str(hide)
    code, _, err = desk.isthmus("launch", "tiny.yaml")
    assert code == 3
    assert err == "error: training needs torch, which is not installed\nhint: pip install 'isthmus[train]'\n"


def test_a_dry_run_prints_the_request_and_writes_nothing(desk: Desk) -> None:
    before = sorted(desk.folder.rglob("*"))
    first = desk.json("launch", "tiny.yaml", "--dry-run", "--run-id", "one")
    assert first == desk.json("launch", "tiny.yaml", "--dry-run", "--run-id", "one")
    assert first["request"]["command"][:3] == ["python", "-m", "isthmus.core.worker"]
    assert sorted(desk.folder.rglob("*")) == before


def test_unknown_runs_are_one_line(desk: Desk) -> None:
    desk.json("launch", "tiny.yaml", "--run-id", "one")
    for words, message in (
        (("status", "onne"), "did you mean one?"),
        (("stop", "./nowhere"), "no run here"),
        (("resume", "two"), "no run 'two'"),
    ):
        code, _, err = desk.isthmus(*words)
        assert code == 2
        assert message in err


def test_a_run_is_found_without_its_record(desk: Desk) -> None:
    desk.json("launch", "tiny.yaml", "--run-id", "one")
    desk.environment["XDG_STATE_HOME"] = str(desk.folder / "another")
    (row,) = desk.json("runs", "list", "runs")
    assert (row["run"], row["state"]) == ("one", "finished")
    assert desk.json("resume", "runs/one")["state"] == "finished"


def test_launching_imports_no_torch(desk: Desk) -> None:
    desk.environment["PYTHONPROFILEIMPORTTIME"] = "1"
    process = desk.start("launch", "tiny.yaml", "--dry-run")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert " torch\n" not in err
    assert "botocore" not in err
