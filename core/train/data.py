"""From a recipe and its opened datasets to loaders, and to what turns batches into a model's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isthmus.core.models.conditioning import build_condition
from isthmus.core.models.profiles import latent_channels
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.sources import Sources, make_access
from isthmus.core.train.step import Inputs
from isthmus.errors import UsageError
from isthmus.storage.stream.batch import allocate_touched
from isthmus.storage.stream.loader import Loader
from isthmus.storage.stream.owning import OwningLoader
from isthmus.storage.stream.plan import Plan


def make_inputs(recipe: Recipe, sources: Sources, model_config: dict[str, Any]) -> Inputs:
    """How this recipe's batches become inputs; the null embedding is still on the CPU."""
    dataset = sources.datasets[0]
    autoencoder = dataset.spec.autoencoder
    size = recipe.stages[0].resolution
    null = build_condition(
        recipe.model.family, model_config, dataset.null_text, recipe.encoders, target_size=(size, size)
    )
    takes = latent_channels(recipe.model.family, model_config)
    if takes is not None and recipe.encoders.autoencoder.latent_channels != takes:
        raise UsageError(
            f"latents have {recipe.encoders.autoencoder.latent_channels} channels, the model takes {takes}",
            where="model.config",
        )
    return Inputs(
        family=recipe.model.family,
        model_config=model_config,
        encoders=recipe.encoders,
        factor=autoencoder.factor,
        scaling_factor=autoencoder.scaling_factor,
        shift_factor=autoencoder.shift_factor,
        null=null.to("cpu", torch.float32),
    )


def make_loader(
    recipe: Recipe,
    sources: Sources,
    plan: Plan,
    resolutions: Sequence[int],
    *,
    rank: int,
    world_size: int,
    start_step: int,
    seed: int | None = None,
    epochs_left: float = 0.0,
    pinned: bool = False,
) -> Loader:
    """A loader of this rank's part of every global batch from `start_step` on.

    Args:
        resolutions: of the stages, pixels.
        epochs_left: see :func:`isthmus.core.train.sources.make_access`.
        pinned: batches lie in page-locked memory.
    """
    depth = recipe.data.read_depth
    return OwningLoader(
        sources.datasets,
        sources.repeats,
        access=make_access(recipe, sources, resolutions, epochs_left=epochs_left),
        depth=depth if isinstance(depth, int) else None,
        seed=recipe.seed if seed is None else seed,
        lanes=recipe.data.lanes,
        shuffle_window=recipe.data.shuffle_window,
        stages=list(resolutions),
        plan=plan,
        rank=rank,
        world_size=world_size,
        memory_limit=recipe.data.memory_limit,
        start_step=start_step,
        check=recipe.data.checksums,
        wait_limit=recipe.data.wait_limit,
        allocate=_pinned if pinned else allocate_touched,
    )


def _pinned(size: int) -> Any:
    """Page-locked memory: copies from it to a GPU do not block."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
