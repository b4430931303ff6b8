"""The life of a run on a cloud, as commands, over the cloud on paper: plan, submission, supervision, two laptops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paper import Paper
from training import recipe_data

from isthmus.storage.rundir import RunDirectory

OFFERS = [{"backend": "paper", "region": "north", "tier": "spot"}, {"backend": "papyrus", "region": "south"}]


class Laptop:
    """The command line of one user."""

    def __init__(self, folder: Path, state: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / state)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def isthmus(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def json(self, *words: str) -> Any:
        """What it prints with --json; it must succeed."""
        code, out, err = self.isthmus(*words, "--json")
        assert code == 0, out + err
        return json.loads(out)


@pytest.fixture
def laptop(tmp_path: Path, paper: Paper, latents: dict[str, str]) -> Laptop:
    """One with a recipe that goes to paper, and then to papyrus."""
    data = recipe_data(latents["dit"])
    data["run_directory"] = str(tmp_path / "runs")
    data["compute"] |= {"offers": OFFERS}
    (tmp_path / "tiny.yaml").write_text(json.dumps(data))
    return Laptop(tmp_path, "state")


def test_from_a_plan_to_the_end(laptop: Laptop, paper: Paper, tmp_path: Path) -> None:
    code, out, err = laptop.isthmus("launch", "tiny.yaml", "--run-id", "one")
    assert code == 0, err
    assert "where   paper, north, sheet, spot, 1 node x 2 processes" in out
    assert "offers  1. paper north spot; 2. papyrus south on-demand; this is 1" in out
    assert f"output  {tmp_path / 'runs' / 'one'}" in out
    tail = out.partition("started; next:\n")[2].splitlines()
    assert [line.strip() for line in tail] == [
        f"isthmus {verb} one" for verb in ("supervise", "status", "logs -f", "stop", "report")
    ]
    assert paper.jobs() == ["one-01"]
    assert laptop.json("status", "one")["state"] == "pending"
    code, _, err = laptop.isthmus("launch", "tiny.yaml", "--run-id", "one")
    assert code == 2
    assert "one is pending already" in err
    code, out, _ = laptop.isthmus("supervise", "one", "--once")
    assert (code, out) == (0, "one pending: waited\n")
    paper.set("one-01", "preempted", "spot interruption")
    assert laptop.isthmus("supervise", "one", "--once")[1] == "one pending: submitted (spot interruption)\n"
    assert laptop.isthmus("logs", "one")[1] == "log of one-01\nlog of one-02\n"
    assert laptop.json("stop", "one")["state"] == "stopped"
    assert laptop.isthmus("supervise", "one", "--once")[0] == 4
    resumed = laptop.json("resume", "one", "--backend", "papyrus")
    assert (resumed["backend"], resumed["attempt"]) == ("papyrus", 3)
    paper.set("one-03", "failed", "rank 1: the disk is full")
    code, out, _ = laptop.isthmus("supervise", "one")
    assert code == 1
    assert "one failed: rank 1: the disk is full\ngo on: isthmus resume one" in out


def test_a_second_laptop_sees_it_and_ends_it(laptop: Laptop, paper: Paper, tmp_path: Path) -> None:
    laptop.json("launch", "tiny.yaml", "--run-id", "one")
    other = Laptop(tmp_path, "elsewhere")
    assert other.isthmus("status", "one")[0] == 2
    assert other.json("runs", "list") == []
    (row,) = other.json("runs", "list", "--cloud", "--backend", "paper")
    assert (row["run"], row["state"], row["run_uri"]) == ("one", "pending", str(tmp_path / "runs" / "one"))
    assert other.json("status", "one")["state"] == "pending", "it is remembered"
    paper.set("one-01", "preempted", "spot interruption")
    assert other.json("supervise", "one", "--once")["job"] == "one-02"
    # The first laptop's record is of the first job; the run directory knows better.
    assert laptop.isthmus("logs", "one")[1] == "log of one-01\nlog of one-02\n"
    paper.set("one-02", "finished")
    assert laptop.json("status", "one")["state"] == "finished"


def test_ctrl_c_while_following_leaves_the_job_and_says_how_to_stop_it(laptop: Laptop, paper: Paper) -> None:
    process = laptop.start("launch", "tiny.yaml", "--run-id", "one", "--follow", "--yes")
    deadline = time.monotonic() + 60
    while not paper.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    paper.set("one-01", "running")
    assert process.stdout is not None
    while "log of one-01" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "one goes on; stop it: isthmus stop one" in out
    assert paper.job("one-01")["state"] == "running"
    assert RunDirectory(laptop.folder / "runs" / "one").events("stop-requested") == []


def test_following_goes_through_a_preemption_to_the_end(laptop: Laptop, paper: Paper) -> None:
    laptop.json("launch", "tiny.yaml", "--run-id", "one")
    paper.set("one-01", "preempted", "spot interruption")
    process = laptop.start("supervise", "one", "--interval", "0.1")
    deadline = time.monotonic() + 60
    while len(paper.jobs()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    paper.set("one-02", "finished")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "submitting one-02 to paper: spot interruption" in err
    assert "one finished\nnext: isthmus report one" in out


def test_what_has_no_room_is_passed_over_and_all_full_is_refused_with_3(laptop: Laptop, paper: Paper) -> None:
    paper.full("north")
    code, out, err = laptop.isthmus("launch", "tiny.yaml", "--run-id", "one")
    assert code == 0, err
    assert "note: not paper north spot: no quota in north" in err
    assert "where   papyrus, south" in out
    paper.full("north", "south")
    before = sorted((laptop.folder / "runs").rglob("*"))
    code, _, err = laptop.isthmus("launch", "tiny.yaml", "--run-id", "two")
    assert code == 3
    assert "error: no quota in north" in err
    assert sorted((laptop.folder / "runs").rglob("*")) == before
    code, out, _ = laptop.isthmus("doctor", "tiny.yaml")
    assert code == 3
    assert "error    no quota in north  [paper.quota]" in out
    paper.full()
    places = laptop.json("doctor", "tiny.yaml", "--backend", "paper")
    assert [place["ok"] for place in places] == [True]
    checks = {check["id"]: check["level"] for check in places[0]["checks"]}
    assert checks["preflight.data"] == "ok"
    assert checks["preflight.run-directory"] == "ok"
    assert not (laptop.folder / "runs" / "two").exists()
    nowhere = ("tiny.yaml", "--set", "data.sources.0.uri=nowhere")
    code, out, _ = laptop.isthmus("doctor", *nowhere)
    assert code == 3
    wrong = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  error")]
    assert len(wrong) == 2, "once a place"
    assert wrong[0].endswith("[preflight.data]")
    code, _, err = laptop.isthmus("launch", *nowhere)
    assert code == 3, "what doctor refuses, launch refuses with the same code"
    assert err.startswith(f"error: {wrong[0].removesuffix('  [preflight.data]')}")
    for verb in ("doctor", "launch"):
        code, _, err = laptop.isthmus(verb, "tiny.yaml", "--set", "data.lanes=0")
        assert code == 2, "what is wrong with the recipe itself is no refusal"


def test_a_place_that_cannot_take_the_run_over_is_told_of_before(laptop: Laptop, paper: Paper) -> None:
    far = json.dumps({"paper": str(laptop.folder / "runs"), "papyrus": "memory://far/runs"})
    code, _, err = laptop.isthmus("launch", "tiny.yaml", "--run-id", "one", "--set", f"run_directory={far}")
    assert code == 0, err
    assert "note: not later to papyrus south on-demand: papyrus keeps its runs at memory://" in err
    assert "isthmus runs copy one --to memory://far/runs/one" in err


def test_a_dry_run_is_one_document(laptop: Laptop, paper: Paper) -> None:
    words = ("launch", "tiny.yaml", "--run-id", "one", "--dry-run")
    _, out, _ = laptop.isthmus(*words, "--format", "json")
    assert json.loads(out)["region"] == "north"
    _, out, _ = laptop.isthmus(*words, "--format", "yaml", "--backend", "papyrus")
    assert "region: south" in out
    code, _, err = laptop.isthmus(*words, "--format", "toml")
    assert (code, "there are json, yaml and text" in err) == (2, True)
    code, _, err = laptop.isthmus("launch", "tiny.yaml", "--format", "json")
    assert (code, "--format belongs to --dry-run" in err) == (2, True)
    assert paper.jobs() == []
    assert not (laptop.folder / "runs").exists()


IMPORTS = """
import sys
from isthmus.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(sorted(sys.modules.keys() & {"azure.ai.ml", "sagemaker", "boto3", "botocore", "torch", "s3fs", "adlfs"}), ended.code, file=sys.stderr)
"""
CLOUDS = {
    "sagemaker": ("role_arn=arn:aws:iam::123456789012:role/isthmus", "region=us-east-1"),
    "azure": (
        "subscription=11111111-2222-3333-4444-555555555555", "resource_group=team", "workspace=training",
        "client_id=22222222-3333-4444-5555-666666666666",
        f"environment.image=registry.example.com/team/train@sha256:{'a' * 64}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", sorted(CLOUDS))
def test_a_dry_run_loads_no_sdk_and_reaches_no_network(tmp_path: Path, backend: str) -> None:
    words = ["launch", "sdxl-progressive", "--backend", backend, "--dry-run", "--format", "json"]
    for setting in CLOUDS[backend]:
        words += ["--set", f"backends.{backend}.{setting}"]
    # Whoever would look anything up, a credential or a region, would fail here.
    unreachable = dict.fromkeys(("http_proxy", "https_proxy", "AWS_ENDPOINT_URL"), "http://127.0.0.1:9")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **unreachable}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stderr.splitlines()[-1] in ("[] 0", "[] None"), done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert list(tmp_path.iterdir()) == []
