"""What a stage changes about the model itself: positions of image tokens, and how many are left out in training.

Both follow from the recipe, the stage and the step alone, so a run that is resumed, on either side of a stage's
border, goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.core.models.calling import plain
from isthmus.core.models.profiles import downsampling
from isthmus.core.models.tokens import kept_values, place_tokens
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.objective import Noised
from isthmus.core.train.parallel import Engine
from isthmus.core.train.randomness import TOKEN_MASK, mix
from isthmus.core.train.step import Inputs, Stepper


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which image tokens are kept in training, by (seed, step, place in the global batch)."""

    seed: int
    ratio: float
    """Share that is left out."""
    patch: int
    """Latent cells along one side of a token."""
    shared: bool
    """Whether all samples of a step keep the same tokens: Flux has one table of positions for a batch."""

    def kept(self, step: int, positions: Sequence[int], height: int, width: int) -> Tensor:
        """int64 [b, k] on the CPU: the kept tokens of latents [height, width], ascending in each row."""
        tokens = (height // self.patch) * (width // self.patch)
        count = max(1, round(tokens * (1 - self.ratio)))
        key = mix(self.seed, TOKEN_MASK, step)
        generator = torch.Generator()
        rows = []
        for position in [0] if self.shared else positions:
            generator.manual_seed(mix(key, position) >> 1)
            rows.append(torch.randperm(tokens, generator=generator)[:count].sort().values)
        found = torch.stack(rows)
        return found.expand(len(positions), -1) if self.shared else found

    def under(self, noised: Noised, prediction: Tensor, keep: Tensor) -> tuple[Noised, Tensor]:
        """Target and prediction of the kept tokens alone, so that the loss is their mean."""
        target = kept_values(noised.target, keep, self.patch)
        return replace(noised, target=target), kept_values(prediction, keep, self.patch)


class StageModel:
    """Sets a model in training up for a stage."""

    def __init__(self, recipe: Recipe, engine: Engine, inputs: Inputs, stepper: Stepper) -> None:
        self.recipe = recipe
        self.model = plain(engine.model)
        self.inputs = inputs
        self.stepper = stepper

    def enter(self, index: int) -> None:
        """Take up stage `index`; again is harmless."""
        stage, family = self.recipe.stages[index], self.inputs.family
        patch = downsampling(family, self.inputs.model_config)
        place_tokens(
            self.model, stage.resolution // self.inputs.factor // patch, stage.pos_embed_interpolation
        )
        ratio = stage.token_mask_ratio
        mask = TokenMask(self.recipe.seed, ratio, patch, shared=family == "flux")
        self.stepper.token_mask = mask if ratio else None
