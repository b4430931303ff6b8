"""What a resume is given that is not what the run was begun with: one line each, from one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import environment, make_latents, recipe_data, rows, write_recipe

from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.train.loop import train
from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.rundir import RunDirectory

ONE = {"parallel__strategy": "ddp", "compute__gpus_per_node": 1}


def train_here(data: str, run: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train in this process; the rows of the train metrics."""
    text = json.dumps(recipe_data(data, **(ONE | changes)))
    assert (
        train(resolve(parse_recipe(text, filename="x").recipe, "local"), RunDirectory(run), cpu=True)
        == "finished"
    )
    return rows(run)


def notes(run: Path) -> list[str]:
    return [event["message"] for event in RunDirectory(run).events("note")]


def test_a_rank_with_another_recipe_is_one_line_of_one_rank(latents: dict[str, str], tmp_path: Path) -> None:
    one = write_recipe(tmp_path, recipe_data(latents["dit"]), "one.yaml")
    other = write_recipe(tmp_path, recipe_data(latents["dit"], seed=99), "other.yaml")
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\n"
        "from isthmus.core.train.__main__ import main\n"
        "recipe = sys.argv[1 + int(os.environ['RANK'])]\n"
        "sys.exit(main(['--recipe', recipe, '--run', sys.argv[3]]))\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(script), str(one), str(other), str(tmp_path / "run"),
        ],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert "rank 1 of 2 started with another recipe than rank 0" in errors[0]
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused_unless_asked_for(latents: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(latents["dit"], run, stages__0__steps=3)
    other = make_latents(tmp_path / "other", seed=1)
    with pytest.raises(DatasetMismatch, match="fingerprint changed") as caught:
        train_here(other, run, stages__0__steps=5)
    assert "data.allow_changed" in str(caught.value)
    found = train_here(other, run, stages__0__steps=5, data__allow_changed=True)
    assert [row["attempt"] for row in found] == [1, 1, 1, 2, 2]
    assert "the data is not the run's" in notes(run)[0]
    assert RunDirectory(run).read_run_json()["dataset_fingerprints"] != []
    # From here on the other data is the run's.
    assert [row["attempt"] for row in train_here(other, run, stages__0__steps=6)][-1] == 3


def test_a_changed_batch_and_an_added_stage_are_said_and_a_removed_one_is_refused(
    latents: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    stage: dict[str, Any] = {
        "name": "a", "resolution": 16, "steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3,
    }  # fmt: skip
    train_here(latents["dit"], run, stages=[stage])
    more = [stage | {"steps": 4, "global_batch_size": 16}, stage | {"name": "b", "steps": 2}]
    found = train_here(latents["dit"], run, stages=more)
    assert [row["samples"] for row in found] == [8, 16, 24, 40, 48, 56]
    said = notes(run)
    assert said == [f"changed: {line}" for line in (
        "stages.0.steps 3 -> 4: the learning rate follows the new length from here on",
        "stages.0.global_batch_size 8 -> 16 from step 3 on: a step takes so many samples, no sample is repeated or left "
        "out; learning_rate stays 0.001 and steps stay 4",
        "stages to come: none -> b",
    )]  # fmt: skip
    printed = capsys.readouterr().out
    assert all(line in printed for line in said)
    with pytest.raises(UsageError, match=r"stages\.1: step 6 was reached with stages a, b; now they are a"):
        train_here(latents["dit"], run, stages=more[:1])


def test_every_row_says_how_long_training_stood_still(latents: dict[str, str], tmp_path: Path) -> None:
    found = train_here(
        latents["dit"], tmp_path / "run", stages__0__steps=5, checkpoint={"every": 2, "keep": 9}
    )
    stood = [row["step"] for row in found if row["checkpoint_stall_s"] > 0]
    assert stood == [3, 5]
    assert RunDirectory(tmp_path / "run").checkpoints() == [2, 4, 5]
    assert all(row["checkpoint_stall_s"] < 5 for row in found)
