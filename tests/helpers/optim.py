"""Engines of tiny models in this process, and steps of their optimizers with made-up gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from training import MODELS

from isthmus.core.models.families import build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.parallel import Engine, prepare

WIDE = {"num_attention_heads": 4, "cross_attention_dim": 64}
"""A dit whose matrices have rows of 64, as moments of 8 bits need."""


def made(
    family: str = "dit", strategy: str = "fsdp", config: dict[str, Any] | None = None, **optimizer: Any
) -> Engine:
    model = build_from_config(CLASSES[family], MODELS[family] | (config or {}), 0)
    return prepare(
        model,
        Optimizer(**optimizer),
        Parallel(strategy=strategy, precision="fp32"),  # type: ignore[arg-type]
        cpu=True,
    )


def step(engine: Engine, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for weight in engine.parameters.values():
        gradient = torch.randn(weight.shape, generator=generator)
        weight.grad = torch.zeros_like(weight) + (
            DTensor.from_local(gradient, weight.device_mesh, weight.placements)
            if isinstance(weight, DTensor)
            else gradient
        )
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2
    engine.optimizer.step()
    engine.optimizer.zero_grad()
