"""A run that ends on either side of a stage's border, or on it, resumes into the same course."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training import figures, recipe_data, rows, weights

from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.train.loop import train
from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.faults


def train_here(data: str, run: Path) -> str:
    """Three stages of four steps in this process; the second and third reset what they may."""
    stage: dict[str, Any] = {
        "name": "a", "resolution": 16, "steps": 4, "global_batch_size": 8, "micro_batch_size": 4,
        "learning_rate": 1e-2, "lr_warmup_steps": 2, "lr_scheduler": "linear",
    }  # fmt: skip
    stages = [
        stage,
        stage | {"name": "b", "resolution": 32, "on_enter": {"optimizer": "reset", "ema": "reset"}},
        stage
        | {"name": "c", "global_batch_size": 16, "objective": {"logit_mean": 0.5}, "ema": {"decay": 0.5}},
    ]
    changes = {
        "parallel__strategy": "ddp",
        "compute__gpus_per_node": 1,
        "checkpoint": {"every": 1, "keep": 50},
    }
    text = json.dumps(recipe_data(data, stages=stages, **changes))
    return train(resolve(parse_recipe(text, filename="x").recipe, "local"), RunDirectory(run), cpu=True)


@pytest.mark.parametrize("last", [3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("plan", ["kept", "cut"])
def test_resume_around_a_border(latents: dict[str, str], tmp_path: Path, last: int, plan: str) -> None:
    """`cut`: the crash came before the border's segment was written, `kept`: after it."""
    train_here(latents["dit"], tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    run = RunDirectory(tmp_path / "again")
    for step in run.checkpoints():
        if step > last:
            run.remove_checkpoint(step)
    if plan == "cut":
        for number, segment in enumerate(run.segments(), start=1):
            if segment["first_step"] >= last:
                (tmp_path / "again" / "plan" / f"{number:04d}.json").unlink()
    assert train_here(latents["dit"], tmp_path / "again") == "finished"
    assert figures(rows(tmp_path / "again")) == figures(rows(tmp_path / "whole"))
    for name in ("model", "ema"):
        assert weights(tmp_path / "again", name) == weights(tmp_path / "whole", name)
    assert run.segments() == RunDirectory(tmp_path / "whole").segments()


def test_a_finished_run_is_finished_again(latents: dict[str, str], tmp_path: Path) -> None:
    train_here(latents["dit"], tmp_path / "run")
    before = figures(rows(tmp_path / "run"))
    assert train_here(latents["dit"], tmp_path / "run") == "finished"
    assert figures(rows(tmp_path / "run")) == before
