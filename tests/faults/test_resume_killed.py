"""A run that is killed or evicted at a random step goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from training import (
    figures,
    output,
    rank_process,
    recipe_data,
    rows,
    trained,
    training,
    wait_for_step,
    weights,
    write_recipe,
)

from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.faults, pytest.mark.slow]

STEPS = 30
"""Of each of the two stages."""


def long_recipe(data: str, **changes: Any) -> dict[str, Any]:
    """Two stages with all that has state: EMA warm-up, moments, learning rates, accumulation, dropped captions."""
    first = {
        "name": "16px", "resolution": 16, "steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2,
        "learning_rate": 1e-2, "lr_warmup_steps": 5, "lr_scheduler": "cosine",
    }  # fmt: skip
    second = first | {"name": "32px", "resolution": 32, "global_batch_size": 16, "on_enter": {"ema": "reset"}}
    return recipe_data(data, stages=[first, second], checkpoint={"every": 7, "keep": 3}, **changes)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_kill_then_sigterm_then_resume_equal_the_uninterrupted_run(
    latents: dict[str, str], tmp_path: Path, strategy: str
) -> None:
    """Slow: four launches of two processes."""
    recipe = write_recipe(tmp_path, long_recipe(latents["dit"], parallel__strategy=strategy))
    expected = trained(recipe, tmp_path / "whole")
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    run = tmp_path / "broken"

    killed_at = dice.randint(2, STEPS)
    with training(recipe, run) as process:
        wait_for_step(process, run, killed_at, attempt=1)
        rank_process(process, dice.randint(0, 1)).kill()
        assert process.wait(timeout=60) == 1

    evicted_at = dice.randint(STEPS + 1, 2 * STEPS - 20)
    with training(recipe, run, module="isthmus.core.worker") as process:
        wait_for_step(process, run, evicted_at, attempt=2)
        rank_process(process, dice.randint(0, 1)).send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        assert code == 75, output(process)
    events = [event["type"] for event in RunDirectory(run).events()]
    assert events[-1] == "preempted"
    saved = RunDirectory(run).checkpoints()[-1]
    done = [row["step"] for row in rows(run, all_attempts=True) if row["attempt"] == 2]
    assert saved == max(done), "an evicted run loses no step"

    found = trained(recipe, run)
    where = f"dice {seed}: killed at {killed_at}, evicted at {evicted_at}"
    assert figures(found) == figures(expected), where
    assert weights(run, "ema") == weights(tmp_path / "whole", "ema"), where
    assert weights(run, "model") == weights(tmp_path / "whole", "model"), where
    assert [segment["first_step"] for segment in RunDirectory(run).segments()] == [0, STEPS]


def test_stop_ends_with_4_after_a_checkpoint_and_is_not_preemption(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: a launch of the worker."""
    recipe = write_recipe(tmp_path, long_recipe(latents["dit"]))
    run = tmp_path / "run"
    with training(recipe, run, module="isthmus.core.worker") as process:
        wait_for_step(process, run, 3, attempt=1)
        RunDirectory(run).event("stop-requested", by="user")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 4, output(process)
    steps = [row["step"] for row in rows(run)]
    assert RunDirectory(run).checkpoints()[-1] == steps[-1] < 2 * STEPS


@pytest.mark.parametrize("family", ["unet", "mmdit"])
def test_other_families_resume_exactly(latents: dict[str, str], tmp_path: Path, family: str) -> None:
    """Slow: two launches."""
    recipe = write_recipe(tmp_path, recipe_data(latents[family], family))
    expected = trained(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in (4, 6):
        RunDirectory(tmp_path / "again").remove_checkpoint(step)
    assert figures(trained(recipe, tmp_path / "again")) == figures(expected)
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_four_processes_resume_exactly(latents: dict[str, str], tmp_path: Path, strategy: str) -> None:
    """Slow: two launches of four processes. With more than two, the order of an all-reduce's sums matters."""
    changes = {"parallel__strategy": strategy, "compute__gpus_per_node": 4, "stages__0__micro_batch_size": 2}
    if strategy == "hsdp":
        changes["parallel__shard_size"] = 2
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], **changes))
    expected = trained(recipe, tmp_path / "whole", 4)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in (4, 6):
        RunDirectory(tmp_path / "again").remove_checkpoint(step)
    assert figures(trained(recipe, tmp_path / "again", 4)) == figures(expected)
    assert weights(tmp_path / "again", "model") == weights(tmp_path / "whole", "model")
