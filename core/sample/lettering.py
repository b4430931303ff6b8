"""Captions as they are read: in any script and direction, broken into lines, and harmless whatever they hold."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import ImageDraw, features

from isthmus.core.sample.fonts import Fonts

_JOINERS = "\u200c\u200d"
_BOX = "\u25a1"
_LONGEST = 4096
"""Characters that are looked at: no few lines hold more."""
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """One line, in the order in which it is read."""

    runs: tuple[tuple[str, int], ...]
    """(text, number of its font), drawn one behind the other."""
    width: float
    """In pixels."""
    right_to_left: bool


class Lettering:
    """Breaks and draws text of one size.

    Args:
        size: in pixels.
        fonts: files that are asked for characters before the system's.
    """

    def __init__(self, size: int, fonts: Sequence[str] = ()) -> None:
        self.size, self.height = size, round(size * 1.3)
        self._fonts = Fonts(size, fonts)
        self.shapes = features.check("raqm")
        """Whether scripts are joined and put in order; without, each character stands where it is typed."""
        self.lacking: Counter[str] = Counter()
        """Scripts without a font here -> characters that could not be drawn."""

    def lines(self, text: str, width: float, most: int) -> list[Line]:
        """At most `most` lines of `width` pixels; what does not fit is cut with an ellipsis."""
        clean = cleaned(text[:_LONGEST])
        base = right_to_left(clean)
        rows: list[str] = []
        rest = clean.split(" ") if clean else []
        while rest:
            if len(rows) == most:
                rows[-1] = self._cut(rows[-1] + "…", width)
                break
            row = rest.pop(0)
            if self.width(row) > width:
                row, left = self._split(row, width)
                rest.insert(0, left)
            else:
                while rest and self.width(f"{row} {rest[0]}") <= width:
                    row = f"{row} {rest.pop(0)}"
            rows.append(row)
        return [Line(tuple(self._runs(row, count=True)), self.width(row), base) for row in rows]

    def width(self, text: str) -> float:
        """Pixels that a text takes in one line."""
        return sum(self._fonts[font].getlength(run) for run, font in self._runs(text))

    def draw(
        self, draw: ImageDraw.ImageDraw, left: float, top: float, width: float, line: Line, ink: Colour
    ) -> None:
        """A line within `width` pixels, at the side from which it is read."""
        at = left + (max(0.0, width - line.width) if line.right_to_left else 0.0)
        for run, number in line.runs:
            font = self._fonts[number]
            # Fonts differ in height: all stand on one base line.
            draw.text((at, top + self.size), run, fill=ink, font=font, anchor="ls")
            at += font.getlength(run)

    def _runs(self, text: str, *, count: bool = False) -> list[tuple[str, int]]:
        """A text in pieces of one font each. What is read from the right is one piece: its order is the font engine's."""
        if not text:
            return []
        if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in text):
            font = self._fonts.best(text)
            return [(self._known(text, font, count), font)]
        found: list[tuple[str, int]] = []
        for char in text:
            number = None
            if found and self._fonts.has(found[-1][1], char):
                number = found[-1][1]
            elif unicodedata.category(char) not in ("Cf", "Zs"):
                number = self._fonts.having(char)
            if number is None:
                number = found[-1][1] if found else self._fonts.fallback
                char = self._known(char, number, count)
            if found and found[-1][1] == number:
                found[-1] = (found[-1][0] + char, number)
            else:
                found.append((char, number))
        return found

    def _known(self, text: str, font: int, count: bool) -> str:
        """A text with a box, or a question mark, for each character that a font lacks."""
        box = _BOX if self._fonts.has(font, _BOX) else "?"
        known = []
        for char in text:
            if self._fonts.has(font, char):
                known.append(char)
                continue
            known.append(box)
            if count:
                self.lacking[script(char)] += 1
        return "".join(known)

    def _split(self, word: str, width: float) -> tuple[str, str]:
        """What of a word fits, one character at least, and the rest."""
        end = 1
        while end < len(word) and (
            self.width(word[: end + 1]) <= width or unicodedata.combining(word[end]) or word[end] in _JOINERS
        ):
            end += 1
        return word[:end], word[end:]

    def _cut(self, row: str, width: float) -> str:
        while len(row) > 1 and self.width(row) > width:
            row = row[:-2].rstrip() + "…"
        return row


def cleaned(text: str) -> str:
    """A caption without what could disturb its neighbours: control characters, changes of direction, runs of space."""
    kept = []
    for char in unicodedata.normalize("NFC", text):
        category = unicodedata.category(char)
        if char.isspace() or category in ("Zl", "Zp"):
            kept.append(" ")
        elif char in _JOINERS or category not in ("Cc", "Cf", "Cs", "Co", "Cn"):
            kept.append(char)
    return " ".join("".join(kept).split())


def right_to_left(text: str) -> bool:
    """Whether the first letter that has a direction is read from the right."""
    strong = (unicodedata.bidirectional(char) for char in text)
    return next((kind for kind in strong if kind in ("L", "R", "AL")), "L") != "L"


def script(char: str) -> str:
    """The first word of a character's name, which for letters is the script: CJK, THAI, HIRAGANA; else `symbols`."""
    if unicodedata.category(char)[0] not in "LMN":
        return "symbols"
    return unicodedata.name(char, "UNKNOWN").split()[0].split("-")[0]
