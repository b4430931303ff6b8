"""From a picture to pixels: bucket, size class, crop, and one array for each resolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.core.encode.buckets import BucketTable, Crop, cover
from isthmus.core.encode.hashes import picture_fields
from isthmus.core.encode.pictures import Size, Unusable
from isthmus.core.encode.sources import ImageRecord

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A picture that is ready for the encoders."""

    key: str
    captions: tuple[str, ...]
    weights: tuple[float, ...]
    """Of the captions; empty when they are even."""
    source: str
    bucket: str
    size_class: int
    original_size: Size
    crop: Crop
    """Of the largest resolution, in the picture's pixels."""
    pixels: dict[int, NDArray[np.uint8]]
    """Resolution -> [H, W, 3]."""
    fields: Mapping[str, float | str | None] = field(default_factory=dict)
    """What is kept beside: of the source's fields, and the picture's hash."""
    unfit: tuple[str, ...] = ()
    """Fields that were there and not of their kind."""

    @property
    def bytes(self) -> int:
        """Of all its pixels."""
        return sum(array.nbytes for array in self.pixels.values())


def prepare(
    record: ImageRecord, table: BucketTable, *, largest_only: bool = False, phash: bool = False
) -> Prepared:
    """Chooses the bucket, then resizes and crops the picture for every resolution that it reaches.

    The crop is central. Each resolution is made from the picture itself, with LANCZOS, not from a larger one.

    Args:
        largest_only: leave out all but the largest resolution that it reaches.
        phash: hash what is encoded at the smallest resolution.

    Raises:
        Unusable: `too-small`, when it would have to be enlarged for the smallest resolution.
    """
    from PIL import Image

    picture = Size(record.image.height, record.image.width)
    bucket = table.choose(picture)
    size_class = bucket.size_class(picture)
    if size_class is None:
        smallest = bucket.sizes[table.resolutions[0]]
        raise Unusable(
            "too-small",
            f"{picture.width} x {picture.height}, bucket {bucket.name} needs {smallest.width} x {smallest.height}",
        )
    pixels = {}
    fields = dict(record.fields)
    for resolution in table.resolutions:
        if resolution > size_class or (largest_only and resolution != size_class):
            continue
        size = bucket.sizes[resolution]
        crop = cover(picture, size)
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        resized = record.image.resize((size.width, size.height), Image.Resampling.LANCZOS, box=box)
        pixels[resolution] = np.asarray(resized, dtype=np.uint8)
        if phash and resolution == table.resolutions[0]:
            fields |= picture_fields(resized)
    return Prepared(
        key=record.key,
        captions=record.captions,
        weights=record.weights,
        source=record.source,
        bucket=bucket.name,
        size_class=size_class,
        original_size=picture,
        crop=cover(picture, bucket.sizes[size_class]),
        pixels=pixels,
        fields=fields,
        unfit=record.unfit,
    )


def as_tensor(pictures: list[NDArray[np.uint8]]) -> Tensor:
    """Arrays [H, W, 3] of one shape -> fp32 [b, 3, H, W] in [-1, 1]."""
    import torch

    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
