"""Grids: every image is there, enlarged by a whole factor, under its own label."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.core.sample.grids import labelled_grid, to_pixels


def test_pixels_are_clipped_and_non_finite_values_are_black():
    images = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0, float("nan")]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert to_pixels(images)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255, 0]


def test_small_images_are_enlarged_by_a_whole_factor_without_blurring():
    colours = [(200, 10, 20), (10, 200, 20), (10, 20, 200)]
    images = np.stack([np.full((32, 32, 3), colour, np.uint8) for colour in colours])
    sheet = np.asarray(labelled_grid(images, ["a", "b", "c"], columns=3))
    for colour in colours:
        assert (sheet == colour).all(-1).sum() == 96 * 96


def test_marked_tiles_are_framed_and_large_images_keep_their_size():
    images = torch.zeros(2, 3, 128, 160)
    plain = labelled_grid(images, ["seen", "unseen"])
    marked = labelled_grid(
        images, ["seen", "unseen"], marked=[False, True], title="step 100", footer="* held out"
    )
    assert plain.width >= 160
    assert marked.height > plain.height
    assert np.asarray(plain.convert("RGB")).tolist() != np.asarray(marked.convert("RGB")).tolist()


def test_a_long_label_stays_inside_its_tile():
    label = "a very long caption that goes on and on about a supercalifragilisticexpialidocious heart"
    sheet = labelled_grid(np.zeros((1, 32, 32, 3), np.uint8), [label])
    assert sheet.width < 130


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (2, 2), (4, 2), (8, 4), (9, 3), (10, 5), (32, 8), (70, 8)]
)
def test_few_gaps_are_left(count, columns):
    sheet = labelled_grid(np.zeros((count, 96, 96, 3), np.uint8), ["a"] * count)
    assert sheet.width == columns * 104 + 8


def test_counts_that_differ_are_refused():
    with pytest.raises(ValueError, match="one label"):
        labelled_grid(torch.zeros(2, 3, 8, 8), ["only one"])
