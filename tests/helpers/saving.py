"""A tiny model with optimizer and average, for tests of checkpoints in this process."""

from __future__ import annotations

import torch
from training import MODELS

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
