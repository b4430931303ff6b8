"""The pace at which a GPU takes images: what the reading of data has to keep up with."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.models.profiles import profile
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe

UTILIZATION = 0.28
"""Share of the GPU's dense bf16 peak; what was published for the training of SD2 on A100."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one rank in one stage."""

    images_per_s: float
    utilization: float
    """Share of the GPU's peak that it takes."""
    gpu: str
    ranks_per_node: int


def pace(recipe: Recipe, stage: int, *, utilization: float = UTILIZATION) -> Pace | None:
    """Images that one GPU of the recipe trains on in a second, by its peak and the model's FLOPs per image.

    None where the recipe names no GPU or the model's figures are not in `core/models/profiles.json`.
    """
    known = profile(recipe.model)
    flops = known.train_flops.get(recipe.stages[stage].resolution) if known else None
    if recipe.compute.gpu == "none" or not flops:
        return None
    return Pace(
        images_per_s=utilization * PEAK_FLOPS[recipe.compute.gpu] / flops,
        utilization=utilization,
        gpu=recipe.compute.gpu,
        ranks_per_node=recipe.compute.gpus_per_node,
    )
