"""Opens a recipe's datasets, checks that they are what the recipe says, and makes loaders over them."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from isthmus.core.models.conditioning import build_condition
from isthmus.core.recipe.schema import Recipe, Source
from isthmus.core.train.agreement import patient_barrier
from isthmus.core.train.step import Inputs
from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.stream.access import place_data
from isthmus.storage.stream.batch import allocate_touched
from isthmus.storage.stream.loader import Loader
from isthmus.storage.stream.plan import Plan

DOWNLOAD_PATIENCE = datetime.timedelta(hours=6)
"""How long a rank waits for a copy of the data, its own node's or another's."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Opened datasets with their repeats."""

    datasets: tuple[Dataset, ...]
    repeats: tuple[Fraction, ...]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """What a run records and a resume compares."""
        return tuple(dataset.fingerprint for dataset in self.datasets)


def open_sources(recipe: Recipe, sources: Sequence[Source]) -> Sources:
    """Open and check `sources` of a resolved recipe.

    Raises:
        DatasetNotFound: there is none where the recipe says.
        DatasetMismatch: it was made with other encoders, or the sources with different ones.
        UsageError: it has no latents at a stage's resolution.
    """
    datasets = []
    for source in sources:
        uris = [source.uri] if isinstance(source.uri, str) else list(source.uri)
        datasets.append(open_dataset(_placed(uris, recipe)))
    autoencoder = recipe.encoders.autoencoder
    for dataset in datasets:
        dataset.check_encoders(
            {e.name: (e.max_tokens, e.width, e.pooled_width) for e in recipe.encoders.text},
            kind=autoencoder.kind,
            latent_channels=autoencoder.latent_channels,
            factor=autoencoder.factor,
        )
        for index, stage in enumerate(recipe.stages):
            if stage.resolution not in dataset.spec.resolutions:
                have = ", ".join(str(resolution) for resolution in dataset.spec.resolutions)
                raise UsageError(
                    f"stages.{index}.resolution is {stage.resolution}, the dataset has latents at {have}",
                    where=dataset.uri,
                )
    _same_encoders(datasets)
    return Sources(tuple(datasets), tuple(source.repeat for source in sources))


def download(recipe: Recipe) -> None:
    """Bring the data to this node where the recipe asks for it, and wait until every node has done so.

    To be entered by all ranks, before anything that waits for others with the usual patience: nodes may finish
    copying an hour apart. A copy that is there already costs a look.
    """
    if recipe.data.access != "download":
        return
    for source in [*recipe.data.sources, *recipe.validation.sources]:
        _placed([source.uri] if isinstance(source.uri, str) else list(source.uri), recipe)
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
        allocate=_pinned if pinned else allocate_touched,
    )


def _pinned(size: int) -> Any:
    """Page-locked memory: copies from it to a GPU do not block."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _same_encoders(datasets: Sequence[Dataset]) -> None:
    first = datasets[0]
    for other in datasets[1:]:
        if other.spec.autoencoder != first.spec.autoencoder or other.spec.text != first.spec.text:
            raise DatasetMismatch(
                f"was made with other encoders than {first.uri}",
                where=other.uri,
                hint="the sources of one run must share autoencoder and text encoders",
            )


def _cache_folder() -> Path:
    return Path(os.environ.get("ISTHMUS_CACHE_DIR") or Path(tempfile.gettempdir()) / "isthmus-data")
