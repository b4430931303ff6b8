"""Tiny models of every family, and conditions for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training import MODELS

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import build_from_config
from isthmus.core.models.presets import CLASSES


def build(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model of a family, `changes` over its configuration."""
    return build_from_config(CLASSES[family], {**MODELS[family], **changes}, seed)


def condition(family: str, rows: int = 2) -> Condition:
    """Random text for it, the same every time."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if family in ("dit", "sana"):
        return Condition(normal(rows, 5, 24), mask=torch.ones(rows, 5, dtype=torch.bool))
    if family == "unet":
        return Condition(normal(rows, 5, 32), pooled=normal(rows, 20), size_crop=torch.full((rows, 6), 32.0))
    if family == "flux":
        return Condition(normal(rows, 4, 48), pooled=normal(rows, 12))
    return Condition(normal(rows, 9, 48), pooled=normal(rows, 32))
