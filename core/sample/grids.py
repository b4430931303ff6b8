"""Labelled grids of images: readable at a glance, whatever size the images have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

SMALLEST_TILE = 96
"""Images below this many pixels are enlarged by a whole factor, nearest neighbour, so that pixels stay pixels."""
_GAP = 8
_LABEL_SIZE = 12
_PAPER, _INK, _MARK = (255, 255, 255), (32, 33, 36), (26, 95, 180)


def to_pixels(images: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[n, 3, H, W] in [-1, 1] -> uint8 [n, H, W, 3]; values outside are clipped, non-finite ones black."""
    finite = torch.nan_to_num(images.detach().float().cpu(), nan=-1.0, posinf=1.0, neginf=-1.0)
    scaled = ((finite.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    pixels: npt.NDArray[np.uint8] = scaled.permute(0, 2, 3, 1).contiguous().numpy()
    return pixels


def labelled_grid(
    images: torch.Tensor | npt.NDArray[np.uint8],
    labels: Sequence[str],
    *,
    columns: int | None = None,
    marked: Sequence[bool] | None = None,
    title: str | None = None,
    footer: str | None = None,
) -> Image.Image:
    """A white sheet with one tile an image and its label above it.

    Args:
        images: float [n, 3, H, W] in [-1, 1], or uint8 [n, H, W, 3].
        labels: n captions; long ones wrap to at most two lines, as a newline says.
        columns: tiles a row; default about as wide as high, at most 8.
        marked: tiles to set apart (held-out captions): a coloured frame, and an asterisk before the label.
        title, footer: a line above and a line below the tiles.

    Raises:
        ValueError: no images, or another number of labels or marks.
    """
    pixels = to_pixels(images) if isinstance(images, torch.Tensor) else images
    count = len(pixels)
    if count == 0 or count != len(labels) or (marked is not None and count != len(marked)):
        raise ValueError(f"{count} images, {len(labels)} labels: one label (and mark) for each image")
    marks = [False] * count if marked is None else list(marked)
    height, width = pixels.shape[1:3]
    factor = max(1, -(-SMALLEST_TILE // min(height, width)))
    tile_height, tile_width = height * factor, width * factor
    columns = columns or _columns(count, tile_height / tile_width)
    rows = -(-count // columns)

    font = ImageFont.load_default(size=_LABEL_SIZE)
    lines = [
        _wrap(("* " if mark else "") + label, tile_width, font)
        for label, mark in zip(labels, marks, strict=True)
    ]
    label_height = (_LABEL_SIZE + 3) * max(len(wrapped) for wrapped in lines) + 2
    cell_height, cell_width = tile_height + label_height + _GAP, tile_width + _GAP
    heading = _LABEL_SIZE + 12 if title else 0
    ending = _LABEL_SIZE + 8 if footer else 0
    sheet = Image.new(
        "RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP + heading + ending), _PAPER
    )
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((_GAP, _GAP - 2), title, fill=_INK, font=ImageFont.load_default(size=_LABEL_SIZE + 2))
    for index in range(count):
        left = _GAP + (index % columns) * cell_width
        top = _GAP + heading + (index // columns) * cell_height
        ink = _MARK if marks[index] else _INK
        draw.multiline_text((left, top), "\n".join(lines[index]), fill=ink, font=font, spacing=3)
        tile = Image.fromarray(pixels[index]).resize((tile_width, tile_height), Image.Resampling.NEAREST)
        sheet.paste(tile, (left, top + label_height))
        if marks[index]:
            frame = (
                left - 2,
                top + label_height - 2,
                left + tile_width + 1,
                top + label_height + tile_height + 1,
            )
            draw.rectangle(frame, outline=_MARK, width=2)
    if footer:
        draw.text((_GAP, sheet.height - ending + 2), footer, fill=_INK, font=font)
    return sheet


def _columns(count: int, shape: float) -> int:
    """About a square sheet of tiles `shape` times as high as wide, a little wider when that leaves fewer gaps."""
    least = min(8, max(1, math.ceil((count * shape) ** 0.5)))
    return min(range(least, min(8, count, 2 * least) + 1), key=lambda n: (-count % n, n), default=least)


def _wrap(label: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """At most two lines that fit ``width`` pixels; the rest is cut with an ellipsis. A newline breaks the line."""
    if "\n" in label:
        return [_cut(line, width, font) for line in label.split("\n")[:2]]
    words, lines = label.split(), [""]
    while words:
        longer = f"{lines[-1]} {words[0]}".strip()
        if lines[-1] and font.getlength(longer) > width:
            if len(lines) == 2:
                lines[-1] += " …"
                break
            lines.append("")
            continue
        lines[-1] = longer
        words.pop(0)
    return [_cut(line, width, font) for line in lines]


def _cut(line: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(line) <= width:
        return line
    line = line.removesuffix(" …")
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"
