"""For tests of checkpoints: a tiny model with optimizer and average in this process, and phases of other processes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from training import MODELS, output

from isthmus.core.models.families import build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import EMA as EMASettings
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine, prepare
from isthmus.core.train.trainer_state import Identity

IDENTITY = Identity("model", ("data",), 1)


def engine(strategy: str = "fsdp", seed: int = 0) -> tuple[Engine, EMA]:
    """A prepared model, AdamW and its average."""
    model = build_from_config(CLASSES["dit"], MODELS["dit"], seed)
    made = prepare(model, Optimizer(), Parallel(strategy=strategy, precision="fp32"), cpu=True)  # type: ignore[arg-type]
    return made, EMA(made.parameters)


def step(made: Engine, ema: EMA, number: int) -> None:
    """A step without data: every gradient a number drawn from `number`."""
    torch.manual_seed(number)
    for weight in made.parameters.values():
        weight.grad = torch.zeros_like(weight) + torch.randn(())
    made.optimizer.param_groups[0]["lr"] = 1e-2
    made.optimizer.step()
    made.optimizer.zero_grad()
    ema.step(number, EMASettings(decay=0.9))


def phases_of(folder: Path) -> list[dict[str, Any]]:
    """What all ranks reported there, in order of time."""
    lines = [line for path in folder.glob("phases-rank*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda row: row["time"])


def wait_for_phase(
    process: subprocess.Popen[str], folder: Path, phase: str, *, step: int = 0, timeout: float = 90
) -> dict[str, Any]:
    """Until a rank reports a phase of a step from `step` on; returns the report."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for row in phases_of(folder):
            if row["phase"] == phase and row["step"] >= step:
                return row
        assert process.poll() is None, f"ended with {process.returncode} before {phase}: {output(process)}"
        time.sleep(0.005)
    raise AssertionError(f"no {phase} of step {step} in {timeout} s")
