"""Pictures and captions -> a dataset of latents and text embeddings, in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.core.encode.batches import batches, fit_patch_pca
from isthmus.core.encode.buckets import BucketTable, bucket_table, latent_multiple
from isthmus.core.encode.captions import CaptionEncoder, finite_columns, not_finite
from isthmus.core.encode.prepare import Prepared, as_tensor
from isthmus.core.encode.pretrained import require_torch
from isthmus.core.encode.sources import ImageSource, Rejected, Survey
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.text import TextEncoderRunner
    from isthmus.core.recipe.schema import Recipe
    from isthmus.storage.shards import DatasetSpec, DatasetWriter, Manifest

DEFAULT_CAPTIONS = 5
"""Captions kept of a picture unless told otherwise; each adds its embeddings to every sample."""
_AUTOENCODER_PIXELS = 4 * 2**20  # of one call: 64 pictures of 256 px, 4 of 1024 px


@dataclass(slots=True)
class Progress:
    """How far encoding is."""

    written: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason -> count."""
    captions_left_out: int = 0
    """Captions beyond the number stored for each picture."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.written / self.seconds if self.seconds else 0.0
        return (
            f"encoded {self.written} pictures, rejected {sum(self.rejected.values())}, {rate:.1f} pictures/s"
        )


def encode(
    source: ImageSource,
    dest_uri: str,
    recipe: Recipe,
    *,
    captions: int | None = None,
    autoencoder: Autoencoder | None = None,
    device: str = "auto",
    bf16: bool = False,
    batch_size: int = 32,
    rows_per_group: int | None = None,
    rows_per_shard: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    interval: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Encodes a source for a recipe's model and writes the dataset.

    Every resolution of the recipe's stages that a picture reaches without being enlarged is written, so that one
    pass serves all stages. Pictures are not mirrored. The same source and settings give the same bytes on the same
    machine. Memory does not grow with the number of pictures.

    Args:
        source: the pictures; iterated once, or twice when a patch_pca autoencoder is fitted.
        dest_uri: a folder or URI that holds no dataset yet.
        recipe: says the encoders, the stages' resolutions, the buckets and the validation prompts.
        captions: stored for each picture; by default the most that any has, up to `DEFAULT_CAPTIONS`. A picture
            with fewer repeats its own, one with more keeps the first ones.
        autoencoder: takes the place of the recipe's. Held-out pictures need the patch_pca of the training
            pictures; one of their own would have other latents.
        device: a torch device for the encoders; `auto` is the first GPU, or the CPU.
        bf16: run the encoders in bfloat16; fp32 otherwise, and never fp16.
        batch_size: pictures that are encoded together.
        rows_per_group: rows of a block in the most frequent bucket; by default about 10 MB, and no more than a
            lane's share of the shuffle window. Rarer buckets have smaller blocks.
        rows_per_shard: by default about 1.5 GB.
        progress: called every `interval` seconds of `clock`, and at the end.

    Returns:
        The manifest of the written dataset.

    Raises:
        UsageError: there is a dataset already, the recipe and the encoders disagree, no picture could be used.
        DataError: the null embedding or a validation prompt's is not finite.
        NotInstalled: torch or the model libraries are missing.
    """
    require_torch("encoding")
    from isthmus.core.encode.autoencoders import load_autoencoder, patch_pca_folder
    from isthmus.core.encode.text import load_text_encoders
    from isthmus.storage.filesystems import filesystem, join
    from isthmus.storage.shards import DatasetWriter, balanced_row_groups, rows_by_bytes

    files, manifest_path = filesystem(join(dest_uri, "manifest.json"))
    if files.exists(manifest_path):
        # The writer refuses, too, but only after the models are loaded.
        raise UsageError(
            f"{dest_uri} holds a dataset already", hint="choose another folder, or remove that one"
        )
    table = bucket_table(
        recipe.data.buckets, [stage.resolution for stage in recipe.stages], latent_multiple(recipe)
    )
    survey = source.survey()
    count = _captions(survey, captions)
    section = recipe.encoders.autoencoder
    if autoencoder is None:
        autoencoder = (
            fit_patch_pca(source, table, factor=section.factor, latent_channels=section.latent_channels)
            if section.kind == "patch_pca"
            else load_autoencoder(section, dest_uri, device=device, bf16=bf16)
        )
    text = load_text_encoders(recipe, device=device, bf16=bf16)
    spec = _spec(autoencoder, list(text.values()), table, count)
    block, shard = rows_by_bytes(spec)
    # A lane holds at least one block of every bucket: larger ones than its share of the shuffle window would cost
    # memory and shuffle nothing.
    block = max(1, min(block, recipe.data.shuffle_window // recipe.data.lanes))
    groups = balanced_row_groups(_bucket_counts(survey, table), rows_per_group or block)
    shard = max(rows_per_shard or shard, *groups.values())
    with DatasetWriter(dest_uri, spec, rows_per_group=groups, rows_per_shard=shard) as writer:
        job = _Job(writer, autoencoder, CaptionEncoder(text), count, progress, interval, clock)
        for batch in batches(source, table, batch_size, job.reject):
            job.write(batch)
        if not job.progress.written:
            raise UsageError(
                f"no picture could be used: {_counts(job.progress.rejected) or 'the source is empty'}",
                hint="; ".join(f"{item.key}: {item.detail or item.reason}" for item in job.rejected[:3])
                or None,
            )
        if section.kind == "patch_pca":
            autoencoder.save(patch_pca_folder(section, dest_uri))
        prompts = list(recipe.validation.prompts)
        manifest = writer.finish(
            null_text=finite_columns(text, [""], "the null embedding"),
            prompts=prompts,
            prompt_text=finite_columns(text, prompts, "a validation prompt's embedding"),
            rejected=[item.to_json() for item in job.rejected],
            source=source.description,
        )
    job.report(final=True)
    return manifest


class _Job:
    """The encoders at work on one batch after the other."""

    def __init__(
        self,
        writer: DatasetWriter,
        autoencoder: Autoencoder,
        captions: CaptionEncoder,
        count: int,
        report: Callable[[Progress], None] | None,
        interval: float,
        clock: Callable[[], float],
    ) -> None:
        self._writer, self._autoencoder, self._captions, self._count = writer, autoencoder, captions, count
        self._report, self._interval, self._clock = report, interval, clock
        self._started = self._reported = clock()
        self.progress, self.rejected = Progress(), list[Rejected]()
        self._keys: set[str] = set()

    def reject(self, item: Rejected) -> None:
        """Counts and lists what is left out."""
        self.rejected.append(item)
        self.progress.rejected[item.reason] = self.progress.rejected.get(item.reason, 0) + 1
        self.report()

    def report(self, *, final: bool = False) -> None:
        """Tells the progress, when it is time."""
        now = self._clock()
        self.progress.seconds = now - self._started
        if self._report and (final or now - self._reported >= self._interval):
            self._reported = now
            self._report(self.progress)

    def write(self, batch: Sequence[Prepared]) -> None:
        """Encodes pictures of one bucket and size class, and hands them to the writer."""
        from isthmus.storage.shards import Sample

        captions = self._captions.encode([text for item in batch for text in item.captions[: self._count]])
        latents = {
            resolution: self._latents([item.pixels[resolution] for item in batch])
            for resolution in batch[0].pixels
        }
        for row, item in enumerate(batch):
            if item.key in self._keys:
                self.reject(Rejected(key=item.key, reason="duplicate", detail="another picture has this key"))
                continue
            self._keys.add(item.key)
            own = {resolution: (mean[row], logvar[row]) for resolution, (mean, logvar) in latents.items()}
            texts = item.captions[: self._count]
            encoded = [captions[text] for text in texts]
            problem = not_finite(own, encoded)
            if problem:
                self.reject(Rejected(key=item.key, reason="non-finite", detail=problem))
                continue
            self._writer.add(
                Sample(
                    key=item.key,
                    captions=list(texts),
                    text=encoded,
                    latents=own,
                    bucket=item.bucket,
                    size_class=item.size_class,
                    source=item.source,
                    original_size=(item.original_size.height, item.original_size.width),
                    crop=(item.crop.top, item.crop.left, item.crop.height, item.crop.width),
                    flipped=False,
                )
            )
            self.progress.written += 1
            self.progress.captions_left_out += len(item.captions) - len(texts)
        self.report()

    def _latents(self, pictures: list[Any]) -> tuple[Any, Any]:
        """Unscaled mean and log variance, fp16 [b, C, H, W], of pictures of one shape."""
        height, width = pictures[0].shape[:2]
        at_once = max(1, _AUTOENCODER_PIXELS // (height * width))
        parts = [
            self._autoencoder.encode(as_tensor(pictures[start : start + at_once]))
            for start in range(0, len(pictures), at_once)
        ]
        mean, logvar = (np.concatenate([part[index].numpy() for part in parts]) for index in (0, 1))
        with np.errstate(over="ignore"):
            # What fp16 cannot hold becomes infinite and is rejected.
            return mean.astype(np.float16), logvar.astype(np.float16)


def _bucket_counts(survey: Survey, table: BucketTable) -> dict[str, int]:
    """How many pictures each bucket will have, about."""
    counts = dict.fromkeys((bucket.name for bucket in table.buckets), 0)
    for size, count in survey.sizes.items():
        bucket = table.choose(size)
        if bucket.size_class(size) is not None:
            counts[bucket.name] += count
    return counts


def _spec(
    autoencoder: Autoencoder, text: Sequence[TextEncoderRunner], table: BucketTable, captions: int
) -> DatasetSpec:
    from isthmus.storage.shards import AutoencoderSpec, DatasetSpec, EncoderSpec

    return DatasetSpec(
        autoencoder=AutoencoderSpec(
            kind=autoencoder.kind,
            fingerprint=autoencoder.fingerprint,
            latent_channels=autoencoder.latent_channels,
            factor=autoencoder.factor,
            scaling_factor=autoencoder.scaling_factor,
            shift_factor=autoencoder.shift_factor,
        ),
        text=tuple(
            EncoderSpec(
                name=encoder.name,
                max_tokens=encoder.max_tokens,
                width=encoder.width,
                pooled_width=encoder.pooled_width,
                fingerprint=encoder.fingerprint,
            )
            for encoder in text
        ),
        resolutions=table.resolutions,
        captions=captions,
        buckets=tuple(bucket.name for bucket in table.buckets),
    )


def _captions(survey: Survey, wanted: int | None) -> int:
    if wanted is not None:
        if not 1 <= wanted <= 64:
            raise UsageError(f"captions must be from 1 to 64, not {wanted}")
        return wanted
    return max(1, min(survey.most_captions, DEFAULT_CAPTIONS))


def _counts(rejected: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items()))
