"""The quickstart's training: how many steps, through the local backend, and what came of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from isthmus.core.recipe import LoadedRecipe, resolve
from isthmus.core.recipe.dump import dump_recipe
from isthmus.errors import Preempted, Stopped, TrainingFailed, UsageError
from isthmus.storage.rundir import RunDirectory

RUN_ID = "quickstart"
TIMED_STEPS = 24
TIMING = (
    f"stages.0.steps={TIMED_STEPS}",
    "stages.0.lr_warmup_steps=0",
    "validation.sampling_steps=1",
    "validation.samples=8",
    "validation.timestep_bins=1",
)
"""What makes the recipe one that is only timed."""
_WARM_UP = 4
_MARGIN = 1.15
"""Checkpoints, validation and what else happens between steps."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Real steps of the recipe, by the same processes."""

    seconds_per_step: float
    """Median."""
    steps: int
    """How many were timed."""


def time_steps(loaded: LoadedRecipe, folder: Path) -> Timing:
    """Runs a few steps by the same worker in a folder of their own, which is removed afterwards.

    Raises:
        TrainingFailed: the worker failed; says why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recipe, run = folder / "recipe.yaml", folder / "run"
    recipe.write_text(dump_recipe(resolve(loaded.recipe, "local")))
    command = ["-m", "isthmus.core.worker", "--recipe", str(recipe), "--run", str(run), "--cluster", "local"]
    try:
        with (folder / "log").open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which passes it on; if it is killed, the worker ends, too.
                start_new_session=True,
                env={**os.environ, "ISTHMUS_PARENT": str(os.getpid())},
            )
            try:
                code = worker.wait()
            except BaseException:
                worker.terminate()
                worker.wait()
                raise
        if code:
            lines = (folder / "log").read_text(errors="replace").splitlines()
            cause = next((line for line in reversed(lines) if line.startswith("error: ")), "error: unknown")
            raise TrainingFailed(cause.removeprefix("error: "))
        seconds = [row["step_s"] for row in RunDirectory(run).read_metrics("train")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    timed = seconds[_WARM_UP:]
    return Timing(seconds_per_step=round(median(timed), 4), steps=len(timed))


def steps_within(timing: Timing, minutes: float, most: int) -> int:
    """Steps that training may take to end within `minutes`, at most `most`.

    Raises:
        UsageError: not even the steps that were timed fit.
    """
    fitting = int(60 * minutes / (timing.seconds_per_step * _MARGIN))
    if fitting < TIMED_STEPS:
        least = TIMED_STEPS * timing.seconds_per_step * _MARGIN / 60
        raise UsageError(
            f"{minutes:g} min are {fitting} steps on this machine",
            hint=f"--minutes {least + 0.1:.1f} or more",
        )
    return min(most, fitting)


def train(loaded: LoadedRecipe, say: Callable[[str], None]) -> str:
    """Launches the recipe through the local backend, or goes on with it; returns the run directory's URI.

    Raises:
        Preempted: Ctrl-C; a checkpoint was written.
        Stopped: somebody stopped the run; TrainingFailed: with its cause.
        RunExists: the folder holds a run of another recipe.
    """
    from isthmus.backends.launch import attend, start
    from isthmus.backends.prepare import preflight, prepare, refuse_errors

    prepared = prepare(loaded, backend="local", run_id=RUN_ID)
    run = RunDirectory(prepared.job.run_uri)
    if run.exists() and run.events("finished"):
        say(f"    done before, in {run.uri}")
        return run.uri
    prepared = preflight(prepared)
    refuse_errors(prepared)
    handle = start(prepared, Path.cwd())
    status = attend(prepared.backend, handle, lambda line: say(f"    {line.text}"), say)
    if status.state == "preempted":
        steps = run.checkpoints()
        where = f"after the checkpoint of step {steps[-1]}" if steps else "before the first checkpoint"
        raise Preempted(f"interrupted {where}", hint="the same command goes on from there")
    if status.state == "stopped":
        raise Stopped(status.cause or "stopped", hint="the same command goes on")
    if status.state != "finished":
        raise TrainingFailed(status.cause or status.state, hint=f"the log: {run.uri}/logs")
    return run.uri


def training_figures(run_uri: str) -> dict[str, Any]:
    """`steps`, `seconds` (from the first to the last step of each attempt), `samples_per_s`, `data_wait_fraction`."""
    rows = RunDirectory(run_uri).read_metrics("train")
    seconds = 0.0
    for _, group in groupby(rows, key=lambda row: row["attempt"]):
        attempt = list(group)
        seconds += attempt[-1]["time"] - attempt[0]["time"] + attempt[0]["step_s"]
    in_steps = sum(row["step_s"] for row in rows)
    return {
        "steps": len(rows),
        "seconds": round(seconds, 1),
        "samples_per_s": round(rows[-1]["samples"] / in_steps, 1),
        "data_wait_fraction": round(sum(row["data_wait_s"] for row in rows) / in_steps, 5),
    }
