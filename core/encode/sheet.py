"""A contact sheet of a dataset: decoded pictures of any shape, their captions below, in any script."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from isthmus.core.encode.looking import Look
from isthmus.core.sample.lettering import Lettering, Line

TILE = 224
"""Pixels of a tile's side; pictures are scaled to fit, small ones by whole factors so that pixels stay pixels."""
_GAP, _CAPTION_LINES, _COLUMNS = 14, 4, 8
_PAPER, _INK, _GREY, _FRAME = (255, 255, 255), (32, 33, 36), (110, 114, 120), (222, 224, 228)


def contact_sheet(looks: Sequence[Look], heading: Sequence[str], fonts: Sequence[str] = ()) -> Image.Image:
    """One tile a row: the picture, its caption (at most four lines), and in grey its key, size and bucket.

    Args:
        looks: at least one.
        heading: lines above the tiles; the first is larger.
        fonts: files that are asked for characters before the system's.

    Raises:
        ValueError: there is nothing to show.
        UsageError: a file is no font.
    """
    if not looks:
        raise ValueError("no rows to show")
    title, text, small = Lettering(18, fonts), Lettering(14, fonts), Lettering(11, fonts)
    columns = min(_COLUMNS, math.ceil(math.sqrt(len(looks) * 1.5)))
    width = columns * (TILE + _GAP) + _GAP
    cells = [
        (text.lines(look.caption, TILE, _CAPTION_LINES), small.lines(_facts(look), TILE, 2)) for look in looks
    ]
    head = [
        line
        for at, one in enumerate(heading)
        for line in (title if at == 0 else text).lines(one, width - 2 * _GAP, 2)
    ]
    rows = [range(start, min(start + columns, len(looks))) for start in range(0, len(looks), columns)]
    heights = [
        TILE + 6 + max(len(cells[at][0]) * text.height + 3 + len(cells[at][1]) * small.height for at in row)
        for row in rows
    ]
    notes = [line for note in _notes(text) for line in small.lines(note, width - 2 * _GAP, 3)]
    top = _GAP + title.height + (len(head) - 1) * text.height + _GAP if head else _GAP
    height = top + sum(heights) + _GAP * len(rows) + len(notes) * small.height + (_GAP if notes else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, title, head[:1], _GAP, _GAP, width - 2 * _GAP, _INK)
    _write(draw, text, head[1:], _GAP, _GAP + title.height, width - 2 * _GAP, _GREY)
    for row, used in zip(rows, heights, strict=True):
        for at in row:
            left = _GAP + (at - row.start) * (TILE + _GAP)
            _tile(sheet, draw, looks[at], left, top)
            below = _write(draw, text, cells[at][0], left, top + TILE + 6, TILE, _INK)
            _write(draw, small, cells[at][1], left, below + 3, TILE, _GREY)
        top += used + _GAP
    _write(draw, small, notes, _GAP, top, width - 2 * _GAP, _GREY)
    return sheet


def as_png(sheet: Image.Image) -> bytes:
    """The file's bytes."""
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _write(
    draw: ImageDraw.ImageDraw,
    letters: Lettering,
    lines: Sequence[Line],
    left: int,
    top: int,
    width: int,
    ink: tuple[int, int, int],
) -> int:
    """Lines below each other; returns where the next one would be."""
    for line in lines:
        letters.draw(draw, left, top, width, line, ink)
        top += letters.height
    return top


def _tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, look: Look, left: int, top: int) -> None:
    picture = Image.fromarray(np.ascontiguousarray(look.picture))
    longest = max(picture.size)
    if longest * 2 <= TILE:
        factor = TILE // longest
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    elif longest > TILE:
        share = TILE / longest
        size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    across, down = (TILE - picture.width) // 2, TILE - picture.height
    draw.rectangle((left - 1, top - 1, left + TILE, top + TILE), outline=_FRAME)
    sheet.paste(picture, (left + across, top + down // 2))


def _facts(look: Look) -> str:
    parts = [look.key if len(look.key) <= 48 else f"{look.key[:20]}…{look.key[-27:]}"]
    if all(look.original_size):
        parts.append(f"{look.original_size[1]} x {look.original_size[0]}")
    parts.append(f"{look.bucket} @ {look.size_class} px")
    if look.flipped:
        parts.append("mirrored")
    if not look.caption.strip():
        parts.insert(0, "no caption")
    return ", ".join(parts)


def _notes(text: Lettering) -> list[str]:
    """What the captions could not be shown with; known once they are broken into lines."""
    notes = []
    if text.lacking:
        scripts = ", ".join(f"{name.lower()} ({count})" for name, count in sorted(text.lacking.items()))
        notes.append(
            f"No font of this machine has these characters, drawn as boxes: {scripts}. Give one with --font."
        )
    if not text.shapes:
        notes.append(
            "Pillow lacks libraqm here: letters are not joined, and right-to-left text is not put in order."
        )
    return notes
