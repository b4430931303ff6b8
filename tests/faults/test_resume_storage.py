"""Storage that fails under a run in training: one line, the right exit code, older checkpoints untouched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import figures, make_latents, recipe_data, rows, train, trained, write_recipe

from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.faults]

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a file system needs root"
)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines that say an error."""
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints, but not for three."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5000k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@needs_root
@pytest.mark.root
@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_older_checkpoints(
    latents: dict[str, str], tmp_path: Path, small_disk: Path
) -> None:
    """Slow: two launches. After room is made, the run goes on from the older checkpoint."""
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"]))
    run = small_disk / "run"
    done = train(recipe, run)
    assert done.returncode == 1
    assert len(errors(done)) == 1, done.stdout + done.stderr
    assert "the disk is full" in errors(done)[0]
    assert "checkpoint" in errors(done)[0]
    assert "Traceback" not in done.stdout
    assert RunDirectory(run).checkpoints() == [2, 4]
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    expected = trained(recipe, tmp_path / "whole")
    assert figures(trained(recipe, run)) == figures(expected)


@needs_root
@pytest.mark.root
def test_a_disk_that_is_full_for_a_checkpoint_in_the_background(
    latents: dict[str, str], tmp_path: Path, small_disk: Path
) -> None:
    one = {"compute__gpus_per_node": 1, "stages__0__steps": 30}
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], **one))
    run = small_disk / "run"
    done = train(recipe, run, 1)
    assert done.returncode == 1
    assert len(errors(done)) == 1, done.stdout + done.stderr
    assert "cannot write the checkpoint: the disk is full" in errors(done)[0]
    assert "Traceback" not in done.stderr
    committed = RunDirectory(run).checkpoints()
    assert committed == list(range(2, committed[-1] + 1, 2))
    failed = committed[-1] + 2
    assert f"step-{failed:08d}" in errors(done)[0]
    # The step loop heard of it at the latest when the next checkpoint was due.
    assert failed <= rows(run)[-1]["step"] <= failed + 2


@needs_root
@pytest.mark.root
def test_a_read_only_run_directory_is_one_line(
    latents: dict[str, str], tmp_path: Path, small_disk: Path
) -> None:
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"]))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = train(recipe, small_disk / "run")
    assert done.returncode == 1
    assert len(errors(done)) == 1, done.stdout + done.stderr
    assert "read-only" in errors(done)[0]
    assert str(small_disk) in errors(done)[0]


@pytest.mark.slow
def test_the_newest_checkpoint_is_damaged_so_the_one_before_is_taken(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: two launches."""
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"]))
    expected = trained(recipe, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000006"
    shard = folder / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 4
    shard.write_bytes(data)
    done = train(recipe, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "step 6 is damaged" in done.stdout
    assert "resumed from the checkpoint of step 4" in done.stdout
    assert "__1_0.distcp" in RunDirectory(tmp_path / "run").events("note")[0]["message"]
    assert figures(rows(tmp_path / "run")) == figures(expected)


def test_other_data_than_the_runs_is_refused_before_anything_is_written(
    latents: dict[str, str], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], stages__0__steps=3))
    trained(recipe, tmp_path / "run", 1)
    other = make_latents(tmp_path / "other", seed=1)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    done = train(write_recipe(tmp_path, recipe_data(other), "other.yaml"), tmp_path / "run", 1)
    assert done.returncode == 2
    assert "fingerprint" in errors(done)[0]
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_another_model_is_refused(latents: dict[str, str], tmp_path: Path) -> None:
    trained(write_recipe(tmp_path, recipe_data(latents["dit"], stages__0__steps=3)), tmp_path / "run", 1)
    changed = recipe_data(latents["dit"], model__config__num_layers=3)
    done = train(write_recipe(tmp_path, changed, "other.yaml"), tmp_path / "run", 1)
    assert done.returncode == 1
    assert errors(done) == [line for line in errors(done) if "another model" in line] != []


def test_a_damaged_shard_names_itself_and_ends_all_ranks(latents: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(latents["dit"], data)
    for shard in data.glob("part-*.16px.parquet"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    done = train(write_recipe(tmp_path, recipe_data(str(data))), tmp_path / "run")
    assert done.returncode == 1
    assert any("shard part-" in line and "row group" in line for line in errors(done)), done.stderr
