"""How many pictures show what their caption says: the quickstart's honest measure.

Captions name a colour and a shape (``a red heart``). A picture matches when both are recognised by plain rules,
fitted on real pictures only and validated on other real pictures (``tests/unit/test_caption_match.py``):

- The silhouette is everything that the background, flooded in from the border, does not reach, single pixels
  aside; of that the largest connected piece.
- The colour is the median inside the silhouette, away from its outline; the nearest colour of the real pictures
  wins, in CIE Lab. The background is one of the candidates, so an empty picture matches nothing.
- The shape is the real silhouette with the largest overlap (intersection over union, at the same centre of mass
  and area). A silhouette that overlaps with it no better than two different real shapes overlap with each other
  is no shape.

Every threshold follows from the real pictures. The shape rule itself was changed once after generated samples had
been looked at: a first one, aligned by bounding box and as good on real pictures, took frayed outlines for no shape
and gives about 0.5 where this one gives 0.9. What counts as a recognised shape is a choice, and this is the milder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_SILHOUETTE = 24
"""Side of a normalised silhouette, in cells."""
_WINDOW = 1.8
"""Side of the window that is normalised, in square roots of the silhouette's area: a heart needs 1.4."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rules recognise in one picture; None where nothing is recognised."""

    colour: str | None
    shape: str | None


@dataclass(frozen=True, slots=True)
class Match:
    """Shares of pictures, each in 0..1."""

    both: float
    """Colour and shape are the caption's: the caption match."""
    colour: float
    shape: float
    count: int
    """Pictures that were judged."""


@dataclass(frozen=True, slots=True, eq=False)
class CaptionMatcher:
    """The fitted rules; made by :func:`fit`."""

    colours: tuple[str, ...]
    """The name of each reference colour; a name may have several (light and dark blue)."""
    references: Floats
    """[number of reference colours, 3] in Lab."""
    shapes: tuple[str, ...]
    silhouettes: Floats
    """[number of shapes, 24, 24], coverage in 0..1."""
    background: Floats
    """RGB, 0..255."""
    tolerance: float
    """Largest RGB distance from the background of a pixel that belongs to it."""
    smallest_area: float
    """Share of the picture below which a silhouette is a speck."""
    largest_area: float
    """Share of the picture above which it is no object on a background; a picture of noise is all silhouette."""
    smallest_overlap: float
    """Overlap at or below which a silhouette is none of the shapes."""

    def see(self, picture: Pixels) -> Seen:
        """Colour and shape of a picture, uint8 [H, W, 3]."""
        mask = _opened(_silhouette(_majority(_near(picture, self.background, self.tolerance))))
        if not self.smallest_area <= mask.mean() <= self.largest_area:
            return Seen(None, None)
        colour = _lab(_inner_colour(picture, mask))
        distances = np.linalg.norm(self.references - colour, axis=1)
        nearest: str | None = self.colours[int(distances.argmin())]
        if np.linalg.norm(_lab(self.background) - colour) <= distances.min():
            nearest = None
        overlaps = [_overlap(_normalised(mask), silhouette) for silhouette in self.silhouettes]
        best = int(np.argmax(overlaps))
        return Seen(nearest, self.shapes[best] if overlaps[best] > self.smallest_overlap else None)

    def match(self, pictures: Pixels, captions: Sequence[str]) -> Match:
        """The share of pictures, uint8 [n, H, W, 3], whose colour and shape are those of their captions [n].

        Raises:
            ValueError: a caption names no colour or no shape that was fitted, or the counts differ.
        """
        wanted = [self.parse(caption) for caption in captions]
        seen = [self.see(picture) for picture in pictures]
        colour = [s.colour == w.colour for s, w in zip(seen, wanted, strict=True)]
        shape = [s.shape == w.shape for s, w in zip(seen, wanted, strict=True)]
        both = np.logical_and(colour, shape)
        return Match(float(both.mean()), float(np.mean(colour)), float(np.mean(shape)), len(both))

    def parse(self, caption: str) -> Seen:
        """The one colour and the one shape that a caption names."""
        words = set(caption.lower().replace(",", " ").replace(".", " ").split())
        colours, shapes = words & set(self.colours), words & set(self.shapes)
        if len(colours) != 1 or len(shapes) != 1:
            raise ValueError(f"caption {caption!r} does not name one known colour and one known shape")
        return Seen(colours.pop(), shapes.pop())


def fit(pictures: Pixels, colours: Sequence[str], shapes: Sequence[str]) -> CaptionMatcher:
    """The rules for pictures whose colour and shape are known.

    Args:
        pictures: uint8 [n, H, W, 3], one object on a plain background that reaches every border.
        colours, shapes: n words each.
    """
    border = np.concatenate([pictures[:, 0], pictures[:, -1], pictures[:, :, 0], pictures[:, :, -1]], axis=1)
    background = np.median(border.reshape(-1, 3), axis=0).astype(np.float64)
    # Clean pictures with dark outlines: any tolerance below theirs finds what the inner colours come from.
    first = [_silhouette(_near(picture, background, 64.0)) for picture in pictures]
    inner = np.stack([_inner_colour(picture, mask) for picture, mask in zip(pictures, first, strict=True)])
    # Half way to the nearest colour of an object.
    tolerance = float(np.linalg.norm(inner - background, axis=1).min() / 2)
    masks = [_opened(_silhouette(_majority(_near(picture, background, tolerance)))) for picture in pictures]

    groups: dict[tuple[str, str], list[int]] = {}
    for index, pair in enumerate(zip(colours, shapes, strict=True)):
        groups.setdefault(pair, []).append(index)
    references = np.stack([_lab(np.median(inner[members], axis=0)) for members in groups.values()])
    shape_names = tuple(sorted(set(shapes)))
    silhouettes = np.stack(
        [
            np.mean([_normalised(m) for m, s in zip(masks, shapes, strict=True) if s == name], axis=0)
            for name in shape_names
        ]
    )
    across = [_overlap(silhouettes[i], silhouettes[j]) for i in range(len(shape_names)) for j in range(i)]
    return CaptionMatcher(
        colours=tuple(colour for colour, _ in groups),
        references=references,
        shapes=shape_names,
        silhouettes=silhouettes,
        background=background,
        tolerance=tolerance,
        # Half way from the real sizes to nothing and to everything.
        smallest_area=float(min(mask.mean() for mask in masks) / 2),
        largest_area=float((1 + max(mask.mean() for mask in masks)) / 2),
        smallest_overlap=max(across, default=0.5),
    )


def shuffled(captions: Sequence[str], seed: int) -> list[str]:
    """The captions dealt out at random among the pictures: the control in which the measure must fail."""
    order = np.random.default_rng(seed).permutation(len(captions))
    return [captions[index] for index in order]


def _near(picture: Pixels, background: Floats, tolerance: float) -> Mask:
    return np.asarray(np.linalg.norm(picture - background, axis=-1) <= tolerance)


def _silhouette(near: Mask) -> Mask:
    """The largest piece that the background, given by the pixels near its colour, does not reach."""
    border = np.zeros_like(near)
    border[0] = border[-1] = border[:, 0] = border[:, -1] = True
    inside = ~_spread(border & near, near)
    largest = np.zeros_like(inside)
    while inside.any():
        start = np.zeros_like(inside)
        start.flat[int(inside.argmax())] = True
        piece = _spread(start, inside)
        if piece.sum() > largest.sum():
            largest = piece
        inside &= ~piece
    return largest


def _majority(mask: Mask) -> Mask:
    """Whether most of the 3 x 3 pixels around are set: a single noisy pixel is no part of a silhouette."""
    height, width = mask.shape
    padded = np.pad(mask, 1, mode="edge")
    votes = sum(padded[y : y + height, x : x + width].astype(np.int64) for y in range(3) for x in range(3))
    return np.asarray(votes >= 5)


def _spread(start: Mask, allowed: Mask) -> Mask:
    """What can be reached from ``start`` over ``allowed`` cells, by side (4-connected)."""
    reached = start
    while True:
        grown = reached.copy()
        grown[1:] |= reached[:-1]
        grown[:-1] |= reached[1:]
        grown[:, 1:] |= reached[:, :-1]
        grown[:, :-1] |= reached[:, 1:]
        grown &= allowed
        if (grown == reached).all():
            return reached
        reached = grown


def _opened(mask: Mask) -> Mask:
    """Without what is thinner than three pixels: strands that hang on to a silhouette."""
    core = _erode(mask)
    return core | ~_erode(~core) & mask


def _erode(mask: Mask) -> Mask:
    padded = np.pad(mask, 1, mode="edge")
    return padded[1:-1, 1:-1] & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]


def _inner_colour(picture: Pixels, mask: Mask) -> Floats:
    """Median RGB inside the silhouette, one tenth of its side away from the edge: the outline is not the colour."""
    inner = mask
    for _ in range(max(1, round(float(mask.sum()) ** 0.5 / 10))):
        smaller = _erode(inner)
        if not smaller.any():
            break
        inner = smaller
    if not inner.any():
        inner = np.ones_like(inner)
    colour: Floats = np.median(picture[inner].astype(np.float64), axis=0)
    return colour


def _normalised(mask: Mask) -> Floats:
    """The silhouette around its centre of mass, scaled to one area, as coverage of 24 x 24 cells.

    Mass and area hardly change with a loose pixel or a frayed outline, as a bounding box would.
    """
    rows, columns = np.nonzero(mask)
    side = _WINDOW * float(mask.sum()) ** 0.5
    finer = 3 * _SILHOUETTE
    offsets = ((np.arange(finer) + 0.5) / finer - 0.5) * side
    y = np.rint(rows.mean() + offsets).astype(int)
    x = np.rint(columns.mean() + offsets).astype(int)
    inside = ((y >= 0) & (y < mask.shape[0]))[:, None] & ((x >= 0) & (x < mask.shape[1]))[None, :]
    found = mask[y.clip(0, mask.shape[0] - 1)][:, x.clip(0, mask.shape[1] - 1)] & inside
    cells = found.reshape(_SILHOUETTE, 3, _SILHOUETTE, 3).mean(axis=(1, 3), dtype=np.float64)
    return np.asarray(cells, np.float64)


def _overlap(one: Floats, other: Floats) -> float:
    """Intersection over union of two coverages."""
    return float(np.minimum(one, other).sum() / np.maximum(one, other).sum())


def _lab(rgb: Floats) -> Floats:
    """CIE Lab (D65) of an sRGB colour in 0..255; distances there are roughly what an eye sees."""
    value = rgb / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    )
    xyz = to_xyz @ linear / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    lab: Floats = np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
    return lab
