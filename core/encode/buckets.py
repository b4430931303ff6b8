"""Aspect buckets: which shapes a dataset has, and which one a picture goes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.core.encode.pictures import Size
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Buckets, Recipe


@dataclass(frozen=True, slots=True)
class Bucket:
    """An aspect class: one shape at each resolution."""

    name: str
    """Width to height at the largest resolution, reduced: `1:1`, `9:7`, `4:7`."""
    sizes: dict[int, Size]
    """Height and width in pixels at each resolution."""

    def size_class(self, picture: Size) -> int | None:
        """The largest resolution that a picture fills without being enlarged; None when it fills none."""
        fits = [
            r
            for r, size in self.sizes.items()
            if picture.height >= size.height and picture.width >= size.width
        ]
        return max(fits, default=None)


@dataclass(frozen=True, slots=True)
class Crop:
    """What of a picture is kept, in its own pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class BucketTable:
    """The buckets of a dataset, from narrow to wide."""

    buckets: tuple[Bucket, ...]
    resolutions: tuple[int, ...]

    def choose(self, picture: Size) -> Bucket:
        """The bucket whose aspect is nearest, as a factor; of two equally near ones the squarer."""
        aspect = math.log(picture.width / picture.height)

        def distance(bucket: Bucket) -> tuple[float, float]:
            size = bucket.sizes[self.resolutions[-1]]
            own = math.log(size.width / size.height)
            return (round(abs(own - aspect), 9), abs(own))

        return min(self.buckets, key=distance)


def bucket_table(buckets: Buckets, resolutions: Sequence[int], multiple: int) -> BucketTable:
    """The buckets of a recipe.

    At the largest resolution R there is the square of R pixels and, for every multiple of `buckets.step` as shorter
    side, the longest other side, of the multiples whose area with it is just below R x R, that the ratios allow; so
    SDXL's 1152 x 896, 1216 x 832, 1344 x 768 among others. At a smaller resolution a bucket has the same aspect as
    nearly as `multiple` admits, and at most that resolution's area.

    Args:
        buckets: the recipe's `data.buckets`.
        resolutions: in pixels; the stages'.
        multiple: pixels that every side is divisible by: the autoencoder's factor times the denoiser's patch.

    Raises:
        UsageError: a resolution or the step is no multiple of `multiple`.
    """
    resolutions = tuple(sorted(set(resolutions)))
    for resolution in resolutions:
        if resolution % multiple:
            raise UsageError(
                f"stage resolution {resolution} is not a multiple of {multiple}, the autoencoder's factor times the"
                " denoiser's patch"
            )
    largest, step = resolutions[-1], buckets.step
    shapes = {Size(largest, largest)}
    if buckets.min_ratio < 1 or buckets.max_ratio > 1:
        if step % multiple:
            raise UsageError(
                f"data.buckets.step {step} is not a multiple of {multiple}, the autoencoder's factor times the"
                " denoiser's patch"
            )
        shapes |= _oblong(largest, step, buckets.max_ratio)
        shapes |= {Size(wide.width, wide.height) for wide in _oblong(largest, step, 1 / buckets.min_ratio)}
    # Shapes of one aspect differ only in area; the largest stands for them.
    named: dict[str, Size] = {}
    for shape in sorted(shapes):
        divisor = math.gcd(shape.height, shape.width)
        named[f"{shape.width // divisor}:{shape.height // divisor}"] = shape
    ordered = sorted(named.items(), key=lambda item: item[1].width / item[1].height)
    return BucketTable(
        tuple(
            Bucket(name, {r: _scaled(shape, r, largest, multiple) for r in resolutions})
            for name, shape in ordered
        ),
        resolutions,
    )


def cover(picture: Size, target: Size) -> Crop:
    """The largest centred part of a picture with the target's aspect, in the picture's pixels."""
    scale = min(picture.height / target.height, picture.width / target.width)
    height = min(picture.height, max(1, round(target.height * scale)))
    width = min(picture.width, max(1, round(target.width * scale)))
    return Crop((picture.height - height) // 2, (picture.width - width) // 2, height, width)


def latent_multiple(recipe: Recipe) -> int:
    """Pixels that every picture's sides must be divisible by: the autoencoder's factor times the denoiser's patch.

    A team's own family says nothing here: its pictures are cut to the autoencoder's factor, or to `data.buckets.step`.
    """
    from isthmus.core.models.presets import model_config
    from isthmus.core.models.profiles import arguments, downsampling

    class_name, config = model_config(recipe.model)
    cells = downsampling(recipe.model.family, {**arguments(class_name), **config})
    return recipe.encoders.autoencoder.factor * cells


def _oblong(largest: int, step: int, limit: float) -> set[Size]:
    """Landscape shapes with a width up to `limit` times the height."""
    longest: dict[int, int] = {}
    for width in range(step, largest * largest // step + 1, step):
        height = largest * largest // width // step * step
        # A little tolerance: 1 / (4 / 3) is not quite 3 / 4.
        if 0 < height < width <= height * limit * (1 + 1e-9):
            longest[height] = width
    return {Size(height, width) for height, width in longest.items()}


def _scaled(shape: Size, resolution: int, largest: int, multiple: int) -> Size:
    """The shape at a smaller resolution."""
    if resolution == largest:
        return shape
    ratio = resolution / largest

    def side(pixels: int) -> int:
        return max(multiple, round(pixels * ratio / multiple) * multiple)

    height, width = side(shape.height), side(shape.width)
    # Rounding both sides up would make the latents larger than the square's, and so a step's memory.
    while height * width > resolution * resolution and max(height, width) > multiple:
        if height >= width:
            height -= multiple
        else:
            width -= multiple
    return Size(height, width)
