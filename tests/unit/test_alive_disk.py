"""Free space: an alarm once, and a word before a checkpoint that cannot fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.core.recipe import load_recipe
from isthmus.core.telemetry import disk
from isthmus.core.telemetry.disk import (
    DiskWatch,
    cannot_fit,
    free_bytes,
    newest_checkpoint_bytes,
    watched_places,
)
from isthmus.storage.rundir import RunDirectory


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What disks say, by path."""
    found: dict[str, int] = {}

    def usage(path: Any) -> Any:
        if str(path) not in found:
            raise FileNotFoundError(path)
        return SimpleNamespace(free=found[str(path)])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return found


def test_a_disk_that_runs_low_alarms_once_and_says_when_it_is_over(free: dict[str, int]) -> None:
    watch = DiskWatch({"the run directory": Path("/runs")}, 5 * 10**9, node=3)
    found = []
    for gigabytes in (6, 4, 3, 5.2, 4, 5.6, 6):
        free["/runs"] = int(gigabytes * 10**9)
        found += watch.observe()
    assert [low.event_type for low in found] == ["alarm", "note"]
    fields = found[0].event_fields()
    assert fields["message"] == "node 3: 4 GB are free for the run directory (/runs), below 5 GB"
    assert fields["metric"] == "disk_free"


def test_auto_is_two_checkpoints_and_asked_now_and_then(free: dict[str, int]) -> None:
    free["/runs"] = 50 * 10**9
    asked: list[int] = []
    moments = iter([0.0, 100.0, 400.0])

    def size() -> int:
        asked.append(1)
        return 40 * 10**9

    watch = DiskWatch({"x": Path("/runs")}, "auto", checkpoint_bytes=size, clock=lambda: next(moments))
    assert [len(watch.observe()) for _ in range(3)] == [1, 0, 0]
    assert len(asked) == 2
    free["/runs"] = disk.LEAST_BYTES - 1
    (low,) = DiskWatch({"x": Path("/runs")}, "auto").observe()
    assert low.bound == disk.LEAST_BYTES


def test_a_checkpoint_without_room_is_told_before(free: dict[str, int]) -> None:
    free["/data"] = 12 * 10**9
    assert cannot_fit(Path("/data/runs/new"), 41 * 10**9) == (
        "the checkpoint needs 41 GB and 12 GB are free at /data/runs/new: free some space, or lower checkpoint.keep"
    )
    assert cannot_fit(Path("/data"), 10**9) is None
    assert cannot_fit(None, 10**18) is None, "an object store has no disk that could be full"
    assert free_bytes(Path("/elsewhere")) is None


def test_the_places_are_the_recipes(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["data.access=download", "data.cache_directory=/fast"]).recipe
    run = RunDirectory(tmp_path)
    assert watched_places(recipe, run) == {
        "the run directory": tmp_path,
        "the cache of shards": Path("/fast"),
    }
    streaming = load_recipe("quickstart", ["data.access=stream"]).recipe
    assert watched_places(streaming, RunDirectory("memory://runs/x")) == {}


def test_the_size_of_the_newest_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert newest_checkpoint_bytes(run) is None
    run.commit_checkpoint(10, {"files": {}, "bytes": 7})
    run.commit_checkpoint(20, {"files": {}, "bytes": 9})
    assert newest_checkpoint_bytes(run) == 9
