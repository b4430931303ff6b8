"""Opens picture files that nobody has checked, and turns whatever is in them into upright RGB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"})
"""Of file names that are taken for pictures."""
# Decoders that are asked at all: no PostScript, no PDF, no formats that start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
MAX_PIXELS = 100_000_000
"""Larger pictures are refused before they are decoded: 300 MB as RGB."""
PAPER = (255, 255, 255)
"""What shows through transparent pixels."""


class Unusable(Exception):
    """A picture that cannot be used.

    Args:
        reason: a word to count by.
        detail: one line more.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, " ".join(detail.split())[:200]


class Size(NamedTuple):
    """Of a picture, in pixels."""

    height: int
    width: int


def read_picture(path: Path | BytesIO) -> Image:
    """The picture in a file as RGB: EXIF orientation applied, transparency laid on white, the first frame only.

    Grey, palette, CMYK, YCbCr, LAB and 16-bit pictures are converted; colour profiles are not applied.

    Raises:
        Unusable: `too-many-pixels`, `unreadable` or `unsupported`.
    """
    from PIL import ImageOps

    with _opened(path) as image:
        image.load()
        return to_rgb(ImageOps.exif_transpose(image))


def read_size(path: Path | BytesIO) -> Size:
    """The size that :func:`read_picture` would give, from the file's header alone.

    Raises:
        Unusable: `too-many-pixels` or `unreadable`.
    """
    with _opened(path) as image:
        # EXIF orientations 5 to 8 lay the picture on its side.
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        return Size(image.width, image.height) if turned else Size(image.height, image.width)


@contextmanager
def _opened(path: Path | BytesIO) -> Iterator[Image]:
    """A picture file whose size is within bounds; whatever goes wrong in the block is Unusable."""
    from PIL import Image, UnidentifiedImageError

    # Pillow warns above its limit and refuses above twice that; this is the second line behind the check below.
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        if not (path.getbuffer().nbytes if isinstance(path, BytesIO) else path.stat().st_size):
            raise Unusable("unreadable", "an empty file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Unusable("too-many-pixels", f"{image.width} x {image.height}")
                yield image
    except Unusable:
        raise
    except UnidentifiedImageError:
        raise Unusable("unreadable", f"no picture, or none of {', '.join(_FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise Unusable("too-many-pixels", str(error)) from None
    except Exception as error:  # noqa: BLE001  decoders raise anything at damaged bytes
        # Without the path: rejections are stored beside the shards.
        text = (
            str(error)
            .replace(repr(str(path)), "the file")
            .replace(str(path), "the file")
            .replace(repr(path), "the file")
        )
        raise Unusable("unreadable", f"{type(error).__name__}: {text}") from None


def to_rgb(image: Image) -> Image:
    """RGB pixels of any Pillow picture.

    Raises:
        Unusable: `unsupported`, for floating-point pixels, whose range is not known.
    """
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode == "F":
        raise Unusable("unsupported", "floating-point pixels")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.int64)
        # Pillow's own conversion would clip 16-bit values to 255.
        bits = values // 257 if image.mode != "I" or values.max(initial=0) > 255 else values
        return Image.fromarray(bits.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        paper = Image.new("RGBA", layer.size, (*PAPER, 255))
        return Image.alpha_composite(paper, layer).convert("RGB")
    return image.convert("RGB")
