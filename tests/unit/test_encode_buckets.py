"""Aspect buckets: shapes that every part of the model can take, and no picture enlarged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")

from PIL import Image

from isthmus.core.encode.buckets import bucket_table, cover, latent_multiple
from isthmus.core.encode.pictures import Size, Unusable
from isthmus.core.encode.prepare import prepare
from isthmus.core.encode.sources import ImageRecord
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Buckets, Model
from isthmus.errors import UsageError

SDXL = bucket_table(Buckets(step=64, min_ratio=0.5, max_ratio=2.0), [256, 512, 1024], 32)


def record(width: int, height: int) -> ImageRecord:
    return ImageRecord(key="a", image=Image.new("RGB", (width, height)), captions=("a",), source="test")


def test_the_square_is_the_resolution_itself_and_alone_by_default() -> None:
    table = bucket_table(Buckets(), [64, 32], 4)
    (bucket,) = table.buckets
    assert bucket.name == "1:1"
    assert bucket.sizes == {32: (32, 32), 64: (64, 64)}


def test_sdxl_buckets_are_those_it_was_published_with() -> None:
    largest = {bucket.sizes[1024] for bucket in SDXL.buckets}
    for height, width in ((1024, 1024), (896, 1152), (832, 1216), (768, 1344), (960, 1088)):
        assert {Size(height, width), Size(width, height)} <= largest
    assert len({bucket.name for bucket in SDXL.buckets}) == len(SDXL.buckets) == 11


@given(
    step=st.sampled_from([16, 32, 64]),
    largest=st.sampled_from([64, 128, 256, 512]),
    low=st.floats(0.25, 1),
    high=st.floats(1, 4),
)
def test_every_shape_is_divisible_allowed_and_no_larger_than_the_square(
    step: int, largest: int, low: float, high: float
) -> None:
    table = bucket_table(Buckets(step=step, min_ratio=low, max_ratio=high), [largest // 2, largest], 16)
    for bucket in table.buckets:
        for resolution, size in bucket.sizes.items():
            assert size.height % 16 == 0
            assert size.width % 16 == 0
            assert min(size) >= 16
            assert size.height * size.width <= max(resolution**2, 16 * max(size))
        top = bucket.sizes[largest]
        assert low - 1e-6 <= top.width / top.height <= high + 1e-6
        assert top == (largest, largest) or (top.height % step, top.width % step) == (0, 0)
    assert "1:1" in {bucket.name for bucket in table.buckets}


def test_landscape_and_portrait_mirror_each_other() -> None:
    shapes = {bucket.sizes[512] for bucket in SDXL.buckets}
    assert shapes == {Size(size.width, size.height) for size in shapes}


@given(st.integers(40, 4000), st.integers(40, 4000))
def test_the_nearest_aspect_is_chosen_and_the_size_class_needs_no_enlarging(width: int, height: int) -> None:
    picture = Size(height, width)
    bucket = SDXL.choose(picture)

    def off(size: Size) -> float:
        return abs(float(np.log(size.width / size.height / (width / height))))

    assert off(bucket.sizes[1024]) <= min(off(other.sizes[1024]) for other in SDXL.buckets) + 1e-6
    size_class = bucket.size_class(picture)
    for resolution, size in bucket.sizes.items():
        fits = size.height <= height and size.width <= width
        assert fits == (size_class is not None and resolution <= size_class)
        crop = cover(picture, size)
        assert crop.top >= 0
        assert crop.left >= 0
        assert crop.top + crop.height <= height
        assert crop.left + crop.width <= width
        assert crop.height == height or crop.width == width
        if fits:
            # The crop has the bucket's aspect to within half a pixel on its shorter side.
            assert (
                abs(crop.width / crop.height - size.width / size.height)
                < 1.2 * max(size) / min(size) ** 2 * 2
            )


def test_each_resolution_shows_the_middle_of_the_picture() -> None:
    image = Image.new("RGB", (600, 300), (255, 0, 0))
    image.paste((0, 255, 0), (150, 0, 450, 300))
    table = bucket_table(Buckets(), [64, 128, 512], 8)
    item = prepare(ImageRecord(key="a", image=image, captions=("a",), source="t"), table)
    assert item.size_class == 128
    assert sorted(item.pixels) == [64, 128]
    assert (item.crop.top, item.crop.left, item.crop.height, item.crop.width) == (0, 150, 300, 300)
    assert item.original_size == (300, 600)
    for resolution, pixels in item.pixels.items():
        assert pixels.shape == (resolution, resolution, 3)
        # LANCZOS looks a little past the crop.
        assert (pixels[:, 3:-3] == (0, 255, 0)).all()


def test_a_picture_below_the_smallest_resolution_is_unusable() -> None:
    with pytest.raises(Unusable) as problem:
        prepare(record(31, 500), bucket_table(Buckets(), [32, 64], 4))
    assert problem.value.reason == "too-small"
    assert problem.value.detail == "31 x 500, bucket 1:1 needs 32 x 32"


def test_sizes_that_the_model_cannot_take_are_refused_with_both_settings() -> None:
    with pytest.raises(UsageError, match="stage resolution 100 is not a multiple of 16"):
        bucket_table(Buckets(), [100], 16)
    with pytest.raises(UsageError, match=r"data.buckets.step 24 is not a multiple of 16"):
        bucket_table(Buckets(step=24, max_ratio=2.0), [64], 16)


@pytest.mark.parametrize(
    ("family", "config", "pixels"),
    [
        ("dit", {"patch_size": 1}, 4),
        ("dit", {}, 8),
        ("mmdit", {"patch_size": 2}, 8),
        ("unet", {"block_out_channels": [320, 640, 1280]}, 16),
        ("flux", {}, 8),
        ("my-own", {"patch_size": 2}, 4),
    ],
)
def test_the_multiple_follows_autoencoder_and_denoiser(
    family: str, config: dict[str, object], pixels: int
) -> None:
    recipe = load_recipe("quickstart").recipe
    model = Model.model_validate({"family": family, "config": config})
    assert latent_multiple(recipe.model_copy(update={"model": model})) == pixels
