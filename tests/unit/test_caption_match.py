"""The caption-match measure, validated on real pictures before anything generated is judged by it.

The rules are fitted on some variants of the pictures and judged on others. It must be right on real ones and on
what the autoencoder makes of them, and must fail where captions and pictures do not belong together.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from isthmus.core.encode.emoji import BACKGROUND, HELD_OUT, EmojiSource
from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.core.sample.caption_match import CaptionMatcher, fit, shuffled
from isthmus.core.sample.grids import to_pixels

SIZE = 32


def pictures(seed: int, variants: int) -> tuple[np.ndarray, list[str]]:
    """All 27 pairs, the held-out ones too."""
    records = [
        record
        for held_out in (False, True)
        for record in EmojiSource(size=SIZE, variants=variants, seed=seed, held_out=held_out)
    ]
    return np.stack([np.asarray(record.image) for record in records]), [r.captions[0] for r in records]


@pytest.fixture(scope="module")
def matcher() -> CaptionMatcher:
    drawn, captions = pictures(seed=1000, variants=8)
    words = [caption.split() for caption in captions]
    return fit(drawn, [colour for colour, _ in words], [shape for _, shape in words])


@pytest.fixture(scope="module")
def unseen() -> tuple[np.ndarray, list[str]]:
    return pictures(seed=1, variants=24)


def as_tensor(drawn: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


def test_real_pictures_that_it_was_not_fitted_on_match_their_captions(matcher, unseen):
    drawn, captions = unseen
    assert matcher.match(drawn, captions).both >= 0.97
    held_out = [index for index, caption in enumerate(captions) if caption in HELD_OUT]
    assert matcher.match(drawn[held_out], [captions[i] for i in held_out]).both >= 0.97


def test_real_pictures_through_the_autoencoder_match_their_captions(matcher, unseen):
    drawn, captions = unseen
    training = as_tensor(pictures(seed=0, variants=8)[0])
    autoencoder = PatchPCA.fit([training], factor=4, latent_channels=32)
    there_and_back = autoencoder.decode(autoencoder.encode(as_tensor(drawn))[0])
    assert matcher.match(to_pixels(there_and_back), captions).both >= 0.97


def test_real_pictures_with_some_noise_match_their_captions(matcher, unseen):
    drawn, captions = unseen
    noisy = drawn + np.random.default_rng(0).normal(0, 12, drawn.shape)
    assert matcher.match(noisy.clip(0, 255).astype(np.uint8), captions).both >= 0.97


@pytest.mark.parametrize("seed", range(5))
def test_real_pictures_with_shuffled_captions_do_not_match(matcher, unseen, seed):
    drawn, captions = unseen
    control = shuffled(captions, seed)
    assert sorted(control) == sorted(captions)
    assert matcher.match(drawn, control).both <= 0.25


def test_a_wrong_colour_or_a_wrong_shape_is_no_match(matcher, unseen):
    drawn, captions = unseen
    recoloured = ["green " + caption.split()[1] for caption in captions]
    reshaped = [f"{c} {'heart' if s != 'heart' else 'circle'}" for c, s in map(str.split, captions)]
    assert matcher.match(drawn, recoloured).both <= 0.15
    assert matcher.match(drawn, reshaped).both <= 0.01


def test_what_is_no_shape_is_not_recognised(matcher):
    def seen(draw_on):
        image = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
        draw_on(ImageDraw.Draw(image))
        return matcher.see(np.asarray(image))

    nothing = seen(lambda draw: None)
    assert (nothing.colour, nothing.shape) == (None, None)
    speck = seen(lambda draw: draw.rectangle((14, 14, 17, 17), fill=(210, 47, 39)))
    assert speck.shape is None
    bar = seen(lambda draw: draw.rectangle((4, 12, 28, 20), fill=(210, 47, 39)))
    assert bar.shape is None
    cross = seen(
        lambda draw: [draw.rectangle(box, fill=(210, 47, 39)) for box in ((4, 13, 28, 19), (13, 4, 19, 28))]
    )
    assert cross.shape is None
    noise = np.random.default_rng(0).integers(0, 256, (16, SIZE, SIZE, 3), dtype=np.uint8)
    assert all(matcher.see(picture).shape is None for picture in noise)


@pytest.mark.parametrize(
    "corners",
    [
        pytest.param([(16, 3), (29, 28), (3, 28)], id="triangle"),
        pytest.param([(3, 22), (16, 9), (29, 22), (16, 26)], id="kite"),
        pytest.param([(2, 2), (24, 2), (30, 28), (8, 28)], id="parallelogram"),
        pytest.param(
            [
                (16 + r * np.sin(a), 16 - r * np.cos(a))
                for a, r in zip(np.arange(10) * np.pi / 5, [14, 6] * 5, strict=True)
            ],
            id="star",
        ),
    ],
)
def test_other_shapes_are_none_of_the_three(matcher, corners):
    image = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    ImageDraw.Draw(image).polygon(corners, fill=(210, 47, 39))
    seen = matcher.see(np.asarray(image))
    assert (seen.colour, seen.shape) == ("red", None)


def test_captions_are_read_in_their_variants_and_unknown_ones_refused(matcher):
    assert matcher.parse("an Orange square.").colour == "orange"
    assert matcher.parse("a red heart").shape == "heart"
    for caption in ("a heart", "red and blue heart", "a red rocket"):
        with pytest.raises(ValueError, match="does not name"):
            matcher.parse(caption)
