"""Opens a recipe's datasets and checks that they are what the recipe says. No torch: the launcher looks at orders too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from isthmus.core.recipe.schema import Recipe, Source
from isthmus.core.telemetry.disk import cache_folder
from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.stream.access import Access


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
    datasets = [open_dataset(roots(source)) for source in sources]
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


def make_access(
    recipe: Recipe, sources: Sources, resolutions: Sequence[int], *, epochs_left: float = 1.0
) -> list[Access]:
    """How the sources' files are reached, as `data` says; they share their counters. To be closed by the caller.

    Args:
        resolutions: that will be read, pixels.
        epochs_left: how often the sources will still be read; what a cache keeps depends on it.
    """
    data = recipe.data
    policy, counters = RetryPolicy(budget_s=data.retry_budget), Counters()
    return [
        Access(
            dataset,
            data.access,
            cache_dir=cache_folder(recipe.data),
            cache_limit=data.cache_limit,
            policy=policy,
            counters=counters,
            resolutions=resolutions,
            passes=epochs_left * float(repeat) / recipe.compute.nodes,
        )
        for dataset, repeat in zip(sources.datasets, sources.repeats, strict=True)
    ]


def epochs_left(recipe: Recipe, sources: Sources, step: int) -> float:
    """Epochs of the sources that are read from a global step on."""
    rows = sum(
        dataset.manifest.samples * repeat
        for dataset, repeat in zip(sources.datasets, sources.repeats, strict=True)
    )
    samples, first = 0, 0
    for stage in recipe.stages:
        samples += max(0, stage.total_steps - max(0, step - first)) * stage.global_batch_size
        first += stage.total_steps
    return float(samples / rows)


def roots(source: Source) -> list[str]:
    """The places of a source of a resolved recipe."""
    if isinstance(source.uri, dict):
        raise UsageError("the recipe is not resolved for a backend", where=", ".join(source.uri))
    return [source.uri] if isinstance(source.uri, str) else list(source.uri)


def _same_encoders(datasets: Sequence[Dataset]) -> None:
    first = datasets[0]
    for other in datasets[1:]:
        if other.spec.autoencoder != first.spec.autoencoder or other.spec.text != first.spec.text:
            raise DatasetMismatch(
                f"was made with other encoders than {first.uri}",
                where=other.uri,
                hint="the sources of one run must share autoencoder and text encoders",
            )
