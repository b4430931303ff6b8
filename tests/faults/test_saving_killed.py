"""Processes that die while a checkpoint is written in the background: what is committed stays, training goes on from it."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from saving import phases_of, wait_for_phase
from training import (
    figures,
    output,
    rank_process,
    recipe_data,
    rows,
    trained,
    training,
    weights,
    write_recipe,
)

from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.faults

STEPS = 12


def recipe(data: str, **changes: Any) -> dict[str, Any]:
    """A checkpoint every other step, two kept, each waited for."""
    return recipe_data(
        data,
        **(
            {"stages__0__steps": STEPS, "checkpoint": {"every": 2, "keep": 2, "wait_limit": "60 s"}} | changes
        ),
    )


@pytest.mark.slow
def test_killed_while_files_are_written(latents: dict[str, str], tmp_path: Path) -> None:
    one = {"compute__gpus_per_node": 1, "stages__0__steps": 6}
    file = write_recipe(tmp_path, recipe(latents["dit"], **one))
    run = tmp_path / "run"
    trace = {"ISTHMUS_TRACE_PHASES": "1", "ISTHMUS_HOLD_PHASES": "uploaded=0.5"}
    with training(file, run, 1, **trace) as process:
        wait_for_phase(process, run / "logs", "uploaded", step=4)
        process.kill()
        process.wait(30)
    assert RunDirectory(run).checkpoints() == [2]
    assert (run / "checkpoints" / "step-00000004" / "__0_0.distcp").exists()
    found = trained(file, run, 1)
    assert [row["attempt"] for row in found] == [1, 1, 2, 2, 2, 2]
    assert RunDirectory(run).checkpoints() == [4, 6]
    assert figures(found) == figures(trained(file, tmp_path / "whole", 1))
    assert weights(run) == weights(tmp_path / "whole")


@pytest.mark.long
def test_killed_in_each_phase(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: five launches of two processes. A rank is killed in each phase in turn; then the run equals an unbroken one."""
    file = write_recipe(tmp_path, recipe(latents["dit"]))
    expected = trained(file, tmp_path / "whole")
    run = tmp_path / "run"
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    committed = 0
    for phase in ("writing", "before-commit", "pruning"):
        folder = tmp_path / phase
        trace = {"ISTHMUS_TRACE_PHASES": str(folder), "ISTHMUS_HOLD_PHASES": f"{phase}=2.5"}
        with training(file, run, **trace) as process:
            found = wait_for_phase(process, folder, phase, step=committed + 2 * dice.randint(1, 2))
            rank_process(process, dice.randint(0, 1)).kill()
            assert process.wait(timeout=60) == 1
        there = RunDirectory(run).checkpoints()
        where = f"dice {seed}, {phase} of step {found['step']}: {there}"
        assert phase in {row["phase"] for row in phases_of(folder)}, where
        assert (found["step"] in there) == (phase == "pruning"), where
        assert len(there) <= 3, where
        committed = max(there, default=0)
    assert figures(trained(file, run)) == figures(expected), f"dice {seed}"
    assert weights(run, "model") == weights(tmp_path / "whole", "model")
    assert weights(run) == weights(tmp_path / "whole")
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["step-00000010", "step-00000012"]


@pytest.mark.long
def test_evicted_while_one_is_written(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: the worker with two processes. The one in flight and the last one are both there, within the grace."""
    file = write_recipe(tmp_path, recipe(latents["dit"], stages__0__steps=400, checkpoint__every=50))
    run = tmp_path / "run"
    trace = {"ISTHMUS_TRACE_PHASES": "1", "ISTHMUS_HOLD_PHASES": "writing=1"}
    with training(file, run, module="isthmus.core.worker", **trace) as process:
        wait_for_phase(process, run / "logs", "writing", step=50)
        rank_process(process, 1).send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 75, output(process)
    last = rows(run)[-1]["step"]
    assert RunDirectory(run).checkpoints() == [50, last]
    event = RunDirectory(run).events("checkpoint-committed")[-1]
    assert event["step"] == last
    assert event["after_signal_s"] > 1
    assert event["grace_left_s"] > 0
    stalls = {row["step"]: row["checkpoint_stall_s"] for row in rows(run)}
    assert 0 < stalls[51] < 1
    assert all(stall == 0 for step, stall in stalls.items() if step != 51)
