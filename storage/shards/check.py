"""What a sample must be before it is written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, UsageError
from isthmus.storage.shards.layout import finite_rows
from isthmus.storage.shards.spec import DatasetSpec, EncoderSpec, Float16, Sample

LatentShape = tuple[int, int, int]


def check_sample(sample: Sample, size_class: int, spec: DatasetSpec, shapes: dict[int, LatentShape]) -> None:
    """Checks a sample against the spec.

    Args:
        shapes: the latent shapes of its bucket by resolution; the bucket's first sample fills them in.

    Raises:
        DataError: a value is not finite.
        UsageError: a name or a shape is not that of the spec.
    """
    where = f"sample {sample.key!r}"
    if not sample.key:
        raise UsageError("a sample needs a key")
    if sample.bucket not in spec.buckets:
        raise UsageError(f"bucket {sample.bucket} is not one of {', '.join(spec.buckets)}", where=where)
    if size_class not in spec.resolutions or set(sample.latents) != set(spec.resolutions_of(size_class)):
        raise UsageError(
            f"latents at {sorted(sample.latents)} px for size class {size_class}; "
            f"the dataset's resolutions are {list(spec.resolutions)}",
            where=where,
        )
    if not 1 <= len(sample.captions) <= spec.captions or len(sample.text) != len(sample.captions):
        raise UsageError(
            f"{len(sample.captions)} captions and {len(sample.text)} embeddings; "
            f"there must be as many of both, 1 to {spec.captions}",
            where=where,
        )
    for text in sample.text:
        for encoder in spec.text:
            if encoder.name not in text:
                raise UsageError(f"no embedding of text encoder {encoder.name}", where=where)
            check_text(encoder, *text[encoder.name], where=where)
    _check_fields(sample, spec, where)
    found = {resolution: _latent_shape(mean, spec, where) for resolution, (mean, _) in sample.latents.items()}
    for resolution, (mean, logvar) in sample.latents.items():
        shape = shapes.get(resolution, found[resolution])
        for name, array in (("latent_mean", mean), ("latent_logvar", logvar)):
            _check_array(array, shape, f"{name} at {resolution} px", where)
    shapes.update(found)


def _check_fields(sample: Sample, spec: DatasetSpec, where: str) -> None:
    kinds = {told.name: float | int if told.kind == "number" else str for told in spec.fields}
    for name, value in sample.fields.items():
        if name not in kinds:
            raise UsageError(f"field {name} is not one of {', '.join(kinds) or 'none'}", where=where)
        if value is not None and not isinstance(value, kinds[name]):
            raise UsageError(f"field {name} is {type(value).__name__} {value!r:.60}", where=where)


def check_text(
    encoder: EncoderSpec, tokens: Float16, length: int, pooled: Float16 | None, *, where: str
) -> None:
    """Checks one caption's embedding: tokens [T, D] with T <= max_tokens, and pooled [P] where there is one."""
    if tokens.ndim != 2 or tokens.shape[0] > encoder.max_tokens or not 0 <= length <= encoder.max_tokens:
        raise UsageError(
            f"{encoder.name} gave tokens {list(tokens.shape)} and length {length}, "
            f"the dataset stores [{encoder.max_tokens}, {encoder.width}]",
            where=where,
        )
    _check_array(tokens, (tokens.shape[0], encoder.width), f"{encoder.name}_tokens", where)
    if encoder.pooled_width is not None:
        if pooled is None:
            raise UsageError(f"no pooled vector of text encoder {encoder.name}", where=where)
        _check_array(pooled, (encoder.pooled_width,), f"{encoder.name}_pooled", where)


def _latent_shape(mean: Float16, spec: DatasetSpec, where: str) -> LatentShape:
    if mean.ndim != 3 or mean.shape[0] != spec.autoencoder.latent_channels:
        raise UsageError(
            f"a latent of shape {list(mean.shape)} is not [{spec.autoencoder.latent_channels}, H, W]",
            where=where,
        )
    channels, height, width = mean.shape
    return channels, height, width


def _check_array(array: NDArray[np.float16], shape: tuple[int, ...], what: str, where: str) -> None:
    if array.dtype != np.float16:
        raise UsageError(f"{what} is {array.dtype}, not float16", where=where)
    if array.shape != shape:
        raise UsageError(f"{what} has shape {list(array.shape)}, not {list(shape)}", where=where)
    if not finite_rows(np.ascontiguousarray(array)[None])[0]:
        raise DataError(f"{what} is not finite", where=where)
