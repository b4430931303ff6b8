"""Sample grids as data URIs, bounded in number, bytes and pixels."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.storage.filesystems import filesystem

_PNG = b"\x89PNG\r\n\x1a\n"
AS_IT_IS_BYTES = 500_000
"""Up to here a picture is embedded unchanged; larger ones are scaled down."""
WIDEST = 1400
MAX_BYTES = 60_000_000
MAX_PIXELS = 80_000_000


@dataclass(frozen=True, slots=True)
class Picture:
    """A sample grid, or why it is not shown."""

    step: int
    data_uri: str = ""
    width: int = 0
    height: int = 0
    missing: str = ""


def choose(samples: Sequence[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """At most `most` of the samples, evenly spread, the first and the last among them."""
    if len(samples) <= most:
        return list(samples)
    picks = sorted({round(index * (len(samples) - 1) / (most - 1)) for index in range(most)})
    return [samples[pick] for pick in picks]


def load_picture(step: int, uri: str) -> Picture:
    """Reads a grid; one that is damaged, not a PNG or too large is a Picture with `missing` set."""
    store, path = filesystem(uri)
    bytes_there = store.size(path)
    if bytes_there is None or bytes_there > MAX_BYTES:
        return Picture(step, missing=f"larger than {MAX_BYTES // 10**6} MB")
    return picture_of(step, store.cat_file(path))


def picture_of(step: int, data: bytes) -> Picture:
    """The bytes of a PNG as a Picture."""
    if not data.startswith(_PNG) or len(data) < 33 or data[12:16] != b"IHDR":
        return Picture(step, missing="not a PNG")
    width, height = struct.unpack(">II", data[16:24])
    if not 0 < width * height <= MAX_PIXELS:
        return Picture(step, missing=f"{width} x {height} pixels are too many")
    if len(data) <= AS_IT_IS_BYTES:
        return Picture(step, _data_uri("image/png", data), width, height)
    return _scaled(step, data)


def _scaled(step: int, data: bytes) -> Picture:
    try:
        from PIL import Image  # comes with [train]; a launcher without it shows the small pictures
    except ImportError:
        return Picture(step, missing="too large to embed without Pillow: pip install pillow")
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            small = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return Picture(step, missing=f"damaged: {error}")
    if small.width > WIDEST:
        small = small.resize((WIDEST, max(1, round(small.height * WIDEST / small.width))))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return Picture(step, _data_uri("image/jpeg", buffer.getvalue()), small.width, small.height)


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
