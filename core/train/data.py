"""Opens a recipe's datasets, checks that they are what the recipe says, and makes loaders over them."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.core.models.conditioning import build_condition
from isthmus.core.recipe.schema import Recipe, Source
from isthmus.core.train.agreement import patient_barrier
from isthmus.core.train.sources import Sources, roots
from isthmus.core.train.sources import open_sources as sources_of
from isthmus.core.train.step import Inputs
from isthmus.errors import UsageError
from isthmus.storage.stream.access import place_data
from isthmus.storage.stream.batch import allocate_touched
from isthmus.storage.stream.loader import Loader
from isthmus.storage.stream.plan import Plan

DOWNLOAD_PATIENCE = datetime.timedelta(hours=6)
"""How long a rank waits for a copy of the data, its own node's or another's."""


def open_sources(recipe: Recipe, sources: Sequence[Source]) -> Sources:
    """Open and check `sources` of a resolved recipe, at the node's copy where the recipe asks for one."""
    return sources_of(recipe, sources, locate=lambda uris: _placed(uris, recipe))


def download(recipe: Recipe) -> None:
    """Bring the data to this node where the recipe asks for it, and wait until every node has done so.

    To be entered by all ranks, before anything that waits for others with the usual patience: nodes may finish
    copying an hour apart. A copy that is there already costs a look.
    """
    if recipe.data.access != "download":
        return
    for source in [*recipe.data.sources, *recipe.validation.sources]:
        _placed(roots(source), recipe)
    patient_barrier(DOWNLOAD_PATIENCE)


def _placed(uris: list[str], recipe: Recipe) -> list[str]:
    return place_data(uris, recipe.data.access, _cache_folder(), wait_limit=DOWNLOAD_PATIENCE.total_seconds())


def make_inputs(recipe: Recipe, sources: Sources, model_config: dict[str, Any]) -> Inputs:
    """How this recipe's batches become inputs; the null embedding is still on the CPU."""
    dataset = sources.datasets[0]
    autoencoder = dataset.spec.autoencoder
    size = recipe.stages[0].resolution
    null = build_condition(
        recipe.model.family, model_config, dataset.null_text, recipe.encoders, target_size=(size, size)
    )
    if recipe.encoders.autoencoder.latent_channels != model_config.get("in_channels", 4):
        raise UsageError(
            f"latents have {recipe.encoders.autoencoder.latent_channels} channels, "
            f"the model's in_channels is {model_config.get('in_channels', 4)}",
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
    pinned: bool = False,
) -> Loader:
    """A loader of this rank's part of every global batch from `start_step` on."""
    return Loader(
        sources.datasets,
        sources.repeats,
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


def _cache_folder() -> Path:
    return Path(os.environ.get("ISTHMUS_CACHE_DIR") or Path(tempfile.gettempdir()) / "isthmus-data")
