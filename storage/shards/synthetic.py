"""Datasets of random values in the real format: for tests, benchmarks, and trying a recipe without pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.spec import (
    AutoencoderSpec,
    DatasetSpec,
    EncodedText,
    EncoderSpec,
    FieldSpec,
    Float16,
    Sample,
    TextColumn,
)
from isthmus.storage.shards.writer import DatasetWriter

TINY = DatasetSpec(
    autoencoder=AutoencoderSpec("patch_pca", "synthetic", 4, 8, 0.5, 0.0),
    text=(EncoderSpec("clip_l", 4, 6, 5, "synthetic"), EncoderSpec("t5", 3, 8, None, "synthetic")),
    resolutions=(32, 64),
    captions=1,
    buckets=("1:1", "2:1"),
)
"""Rows of a few hundred bytes."""

SDXL_256 = DatasetSpec(
    autoencoder=AutoencoderSpec("diffusers", "synthetic", 4, 8, 0.13025, 0.0),
    text=(EncoderSpec("clip", 77, 2048, 1280, "synthetic"),),
    resolutions=(256,),
)
"""Full-size rows of SDXL at 256 pixels: 335 KB."""


def latent_shape(spec: DatasetSpec, bucket: str, resolution: int) -> tuple[int, int, int]:
    """[C, H, W] of a bucket named width:height, whose longer side is the resolution."""
    width, height = map(int, bucket.split(":"))
    side, longest = resolution // spec.autoencoder.factor, max(width, height)
    return spec.autoencoder.latent_channels, side * height // longest, side * width // longest


def sample(
    spec: DatasetSpec,
    number: int,
    *,
    bucket: str = "1:1",
    size_class: int | None = None,
    seed: int = 0,
    prefix: str = "s",
) -> Sample:
    """Sample `number`: its key is prefix and number, its values depend on seed and number alone."""
    random = np.random.default_rng([seed, number])

    def values(*shape: int) -> Float16:
        # Two exponent bits cleared: every pattern that is left is a finite number below 2.
        bits = random.integers(0, 1 << 16, shape, dtype=np.uint16) & np.uint16(0xBBFF)
        return bits.view(np.float16)

    def text() -> EncodedText:
        return {
            encoder.name: (
                values(encoder.max_tokens, encoder.width),
                int(random.integers(1, encoder.max_tokens + 1)),
                None if encoder.pooled_width is None else values(encoder.pooled_width),
            )
            for encoder in spec.text
        }

    size_class = size_class or spec.resolutions[-1]
    return Sample(
        key=f"{prefix}{number}",
        captions=[f"caption {caption} of {prefix}{number}" for caption in range(spec.captions)],
        text=[text() for _ in range(spec.captions)],
        latents={
            resolution: (
                values(*latent_shape(spec, bucket, resolution)),
                values(*latent_shape(spec, bucket, resolution)),
            )
            for resolution in spec.resolutions_of(size_class)
        },
        bucket=bucket,
        size_class=size_class,
        source=f"synthetic:{number}",
        original_size=(number + 1, number + 2),
        crop=(number, 0, number + 1, number + 2),
        flipped=number % 3 == 0,
        fields={told.name: _field(told, number) for told in spec.fields},
    )


def _field(told: FieldSpec, number: int) -> float | str | None:
    """Of every fifth sample nobody told the numbers, of every fourth the texts."""
    if told.kind == "number":
        return None if number % 5 == 4 else number / 2
    return None if number % 4 == 3 else f"{told.name} {number % 3}"


def write_synthetic(
    uri: str,
    samples: int,
    spec: DatasetSpec = TINY,
    *,
    bucket_of: Callable[[int], str] = lambda number: "1:1",
    size_class_of: Callable[[int], int | None] = lambda number: None,
    seed: int = 0,
    prefix: str = "s",
    prompts: Sequence[str] = ("a prompt",),
    rows_per_shard: int = 32,
    rows_per_group: int = 8,
) -> Manifest:
    """Writes a dataset of samples 0 to `samples` - 1."""
    with DatasetWriter(uri, spec, rows_per_shard=rows_per_shard, rows_per_group=rows_per_group) as writer:
        for number in range(samples):
            writer.add(
                sample(
                    spec,
                    number,
                    bucket=bucket_of(number),
                    size_class=size_class_of(number),
                    seed=seed,
                    prefix=prefix,
                )
            )
        return writer.finish(random_text(spec, 1), list(prompts), random_text(spec, len(prompts)))


def random_text(spec: DatasetSpec, rows: int) -> dict[str, TextColumn]:
    """Embeddings for the files beside the shards: encoder -> `rows` rows."""
    texts = [sample(spec, number, seed=1).text[0] for number in range(rows)]
    columns = {}
    for encoder in spec.text:
        tokens, lengths, pooled = zip(*(text[encoder.name] for text in texts), strict=True)
        columns[encoder.name] = TextColumn(
            np.stack(tokens),
            np.array(lengths, np.int32),
            None
            if encoder.pooled_width is None
            else np.stack([vector for vector in pooled if vector is not None]),
        )
    return columns
