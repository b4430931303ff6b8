"""Latents for a rehearsal: random values in the real format, made with the recipe's encoders by name and size."""

from __future__ import annotations

from isthmus.core.recipe.schema import Recipe
from isthmus.storage.shards import AutoencoderSpec, DatasetSpec, EncoderSpec
from isthmus.storage.shards.synthetic import write_synthetic

SAMPLES = 64


def spec_of(recipe: Recipe) -> DatasetSpec:
    """What datasets that fit the recipe hold; two aspect classes where the recipe has several."""
    autoencoder, buckets = recipe.encoders.autoencoder, recipe.data.buckets
    several = buckets.min_ratio < 1 or buckets.max_ratio > 1
    return DatasetSpec(
        autoencoder=AutoencoderSpec(
            autoencoder.kind, "synthetic", autoencoder.latent_channels, autoencoder.factor, 0.5, 0.0
        ),
        text=tuple(
            EncoderSpec(encoder.name, encoder.max_tokens, encoder.width, encoder.pooled_width, "synthetic")
            for encoder in recipe.encoders.text
        ),
        resolutions=tuple(sorted({stage.resolution for stage in recipe.stages})),
        captions=1,
        buckets=("1:1", "2:1") if several else ("1:1",),
    )


def make(recipe: Recipe, folder: str, *, number: int, samples: int = SAMPLES) -> None:
    """Writes one dataset; those of other numbers hold other values under other keys."""
    spec = spec_of(recipe)
    write_synthetic(
        folder,
        samples,
        spec,
        bucket_of=lambda index: spec.buckets[index % 4 == 3] if len(spec.buckets) > 1 else spec.buckets[0],
        seed=number,
        prefix=f"d{number}-",
        rows_per_shard=16,
        rows_per_group=4,
    )
