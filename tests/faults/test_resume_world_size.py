"""A run resumed on another number of processes sees the same samples and draws, and follows the same course."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from training import recipe_data, rows, trained, write_recipe

from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RELATIVE_ERROR = 1e-4
"""Of losses and gradient norms over 30 steps. Sums over ranks are rounded in another order (1e-7 a step), and
training at a learning rate of 1e-2 amplifies that."""


def keys(run: Path, world_size: int) -> dict[int, dict[int, str]]:
    """Step -> position -> key, of all ranks."""
    found: dict[int, dict[int, str]] = {}
    for rank in range(world_size):
        for row in rows(run, f"keys-rank{rank}"):
            found.setdefault(row["step"], {}).update(zip(row["positions"], row["keys"], strict=True))
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_one_two_processes_across_a_stage_border(
    latents: dict[str, str], tmp_path: Path, strategy: str
) -> None:
    """Slow: four launches. The run changes its world size at steps 10 and 20; stages change at step 15."""
    first = {
        "name": "16px", "resolution": 16, "steps": 15, "global_batch_size": 8, "micro_batch_size": 4,
        "learning_rate": 1e-2,
    }  # fmt: skip
    stages = [first, first | {"name": "32px", "resolution": 32, "global_batch_size": 16}]
    changes = {"stages": stages, "checkpoint": {"every": 5, "keep": 10}, "parallel__strategy": strategy}
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], **changes))
    expected = trained(recipe, tmp_path / "whole", 2, ISTHMUS_RECORD_KEYS="1")

    run = tmp_path / "changing"
    for world_size, last in ((2, 10), (1, 20), (2, 30)):
        trained(recipe, run, world_size, ISTHMUS_RECORD_KEYS="1")
        for step in RunDirectory(run).checkpoints():
            if step > last:
                RunDirectory(run).remove_checkpoint(step)
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, 31))
    assert [row["attempt"] for row in found] == [1] * 10 + [2] * 10 + [3] * 10
    for one, other in zip(found, expected, strict=True):
        for figure in ("loss", "grad_norm"):
            assert one[figure] == pytest.approx(other[figure], rel=RELATIVE_ERROR), one["step"]
        assert one["learning_rate"] == other["learning_rate"]
        assert one["samples"] == other["samples"]
    whole = keys(tmp_path / "whole", 2)
    assert sorted(whole) == list(range(1, 31))
    assert all(len(samples) == (8 if step <= 15 else 16) for step, samples in whole.items())
    # Attempts with one process have all positions on rank 0; the last row of a step and rank counts.
    changing = keys(run, 2)
    for step, samples in whole.items():
        assert changing[step] == samples, step


def test_strategies_change_too(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: three launches. A checkpoint of fsdp goes on under ddp and in bf16 on one process."""
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"]))
    expected = trained(recipe, tmp_path / "fsdp")
    run = tmp_path / "ddp"
    shutil.copytree(tmp_path / "fsdp", run)
    for step in (4, 6):
        RunDirectory(run).remove_checkpoint(step)
    ddp = write_recipe(tmp_path, recipe_data(latents["dit"], parallel__strategy="ddp"), "ddp.yaml")
    for one, other in zip(trained(ddp, run), expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert [row["attempt"] for row in rows(run)] == [1, 1, 2, 2, 2, 2]
