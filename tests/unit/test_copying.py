"""fetch and runs copy: whole, checked, resumable, and the run goes on from the copy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paper import Paper
from training import recipe_data

from isthmus.backends.copying import carry_out, plan_copy
from isthmus.backends.fetch import fetch
from isthmus.backends.following import status_of
from isthmus.backends.launch import start
from isthmus.backends.prepare import prepare, prepare_resume
from isthmus.backends.runs import Record, find_current
from isthmus.backends.supervisor import Supervisor
from isthmus.core.recipe import parse_recipe
from isthmus.errors import DataError, RunExists, UsageError
from isthmus.storage.copying import Tree
from isthmus.storage.rundir import RunDirectory

Made = Callable[..., Record]


def commit(run: RunDirectory, step: int, **files: bytes) -> None:
    """A checkpoint of these files, as the trainer commits one."""
    listed = {}
    for name, data in files.items():
        run.write_file(f"checkpoints/step-{step:08d}/{name}", data)
        listed[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    run.commit_checkpoint(step, {"files": listed})


@pytest.fixture
def made(paper: Paper, tmp_path: Path, latents: dict[str, str]) -> Made:
    """A run on paper, preempted, with two checkpoints and one that was never committed."""

    def made(place: str = "", state: Any = "preempted") -> Record:
        data = recipe_data(latents["dit"])
        data["run_directory"] = place or str(tmp_path / "runs")
        launch = prepare(parse_recipe(json.dumps(data), filename="tiny.yaml"), backend="paper", run_id="one")
        start(launch, tmp_path)
        run = RunDirectory(launch.job.run_uri)
        paper.set("one-01", "running")
        commit(run, 1, weights=os.urandom(1000), optimizer=b"x" * 3000)
        commit(run, 2, weights=os.urandom(1000), optimizer=b"y" * 3000)
        run.write_file("checkpoints/step-00000003/weights", b"half")
        run.write_file("samples/step-00000001.png", b"picture")
        run.write_file("lease/0001.json", b"{}")
        run.write_file("jobs/one-01/start.py", b"pass")
        if state != "running":
            paper.set("one-01", state, "spot interruption")
        return find_current("one")

    return made


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["", "memory://fetched/runs"])
def test_a_run_is_fetched_whole_and_again_only_what_is_new(made: Made, tmp_path: Path, place: str) -> None:
    record = made(place, state="running")
    run = RunDirectory(record.run_uri)
    here = tmp_path / "here"
    first = fetch(run, here)
    assert first.copied.kept == 0
    found = names(here)
    assert {"run.json", "recipe.yaml", "samples/step-00000001.png", "submissions/0001.json"} <= found
    assert {name for name in found if name.startswith("checkpoints/")} == {
        f"checkpoints/step-0000000{step}/{name}"
        for step in (1, 2)
        for name in ("weights", "optimizer", "COMMITTED")
    }
    assert not any(name.startswith(("lease/", "jobs/")) for name in found)
    assert RunDirectory(here).checkpoints() == [1, 2]
    # A file that was cut off, and one with other bytes of the same size, are brought again.
    (here / "checkpoints/step-00000001/weights").write_bytes(b"short")
    (here / "checkpoints/step-00000002/optimizer").write_bytes(b"z" * 3000)
    run.event("note", text="more")
    again = fetch(run, here)
    assert RunDirectory(here).events("note")
    copied = again.copied
    mutable = 2  # run.json and recipe.yaml may change
    assert (copied.files, copied.kept) == (2 + 1 + mutable, again.files - 3 - mutable)
    assert (here / "checkpoints/step-00000002/optimizer").read_bytes() == b"y" * 3000
    only = fetch(run, tmp_path / "there", only="samples/*")
    assert names(tmp_path / "there") == {"samples/step-00000001.png"}
    assert only.files == 1
    with pytest.raises(UsageError, match="no file of the run matches"):
        fetch(run, tmp_path / "there", only="smaples/*")


def test_a_fetched_directory_is_no_place_for_a_job(made: Made, tmp_path: Path, paper: Paper) -> None:
    record = made()
    fetch(RunDirectory(record.run_uri), tmp_path / "here")
    with pytest.raises(UsageError, match="a copy of the run at"):
        Supervisor(str(tmp_path / "here")).look()
    assert paper.jobs() == ["one-01"]
    other = RunDirectory(tmp_path / "other")
    other.create("", {"id": "two", "recipe_hash": ""})
    with pytest.raises(UsageError, match="holds run two"):
        fetch(RunDirectory(record.run_uri), tmp_path / "other")


def test_a_run_is_carried_over_and_goes_on_there(made: Made, tmp_path: Path, paper: Paper) -> None:
    record = made()
    target = "memory://carried/runs/one"
    plan = plan_copy(record, target)
    assert plan.steps == (2,)
    before = sorted(Tree(target).sizes())
    assert before == [], "a plan writes nothing"
    copied = carry_out(plan)
    assert copied.bytes >= 4000
    there = RunDirectory(target)
    assert there.checkpoints() == [2]
    assert there.read_run_json()["copied_from"] == plan.run.uri
    assert there.lease_holder() is None
    assert [event["type"] for event in there.events()] == [event["type"] for event in plan.run.events()][:-1]
    assert plan.run.events("note")[-1]["text"] == f"copied to {target}"
    # Again: nothing is left to do, and nothing is told twice.
    again = plan_copy(record, target)
    assert again.there >= 4000
    carry_out(again)
    assert len([event for event in plan.run.events("note") if "copied" in event["text"]]) == 1

    # The other cloud goes on, without a word with the first one.
    forgotten = (paper.folder / "jobs" / "one-01.json").rename(tmp_path / "forgotten.json")
    carried = find_current(target)
    assert status_of(carried).state == "preempted"
    with pytest.raises(UsageError, match="a copy of the run at"):
        Supervisor(target).look()
    launch = prepare_resume(carried, backends=["papyrus"])
    handle = start(launch, tmp_path, by="resume")
    assert (handle.backend, handle.run_uri, handle.native["job_id"]) == ("papyrus", target, "one-02")
    assert find_current("one").run_uri == target
    assert Supervisor(target).look().did == "waited"
    forgotten.rename(paper.folder / "jobs" / "one-01.json")
    with pytest.raises(RunExists, match="has gone on since"):
        plan_copy(record, target)


def test_what_runs_or_is_not_whole_is_not_carried(made: Made, tmp_path: Path, paper: Paper) -> None:
    record = made(state="running")
    with pytest.raises(UsageError, match="one is running"):
        plan_copy(record, str(tmp_path / "there"))
    paper.set("one-01", "preempted")
    for inside in (record.run_uri, f"{record.run_uri}/copy"):
        with pytest.raises(UsageError, match="the run's own directory"):
            plan_copy(record, inside)
    run = RunDirectory(record.run_uri)
    run.write_file("checkpoints/step-00000002/weights", os.urandom(1000))
    plan = plan_copy(record, str(tmp_path / "there"))
    with pytest.raises(DataError, match="not the ones that were written"):
        carry_out(plan)
    there = RunDirectory(tmp_path / "there")
    assert not there.exists(), "half a copy is no run"
    assert there.checkpoints() == []
    assert "checkpoints/step-00000002/weights" not in names(tmp_path / "there")
    # An older one is whole.
    run.remove_checkpoint(2)
    carry_out(plan_copy(record, str(tmp_path / "there")))
    assert there.checkpoints() == [1]


@pytest.mark.parametrize("store", ["s3", "blob"])
def test_it_is_carried_between_real_stores(
    made: Made, request: pytest.FixtureRequest, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = made()
    there = request.getfixturevalue(store)
    target = there.root.rstrip("/") + "/runs/one"
    carry_out(plan_copy(record, target, checkpoints="all"))
    run = RunDirectory(target)
    assert run.checkpoints() == [1, 2]
    again = carry_out(plan_copy(record, target, checkpoints="all"))
    assert again.kept > again.files
    source = Tree(record.run_uri).sizes()
    copied = Tree(target).sizes()
    fixed = {name: size for name, size in copied.items() if name.startswith(("checkpoints/", "events/"))}
    assert all(source[name] == size for name, size in fixed.items())
