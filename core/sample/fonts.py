"""Fonts of this machine, and which of them has a character: captions are in any script, and one font has few of them."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from PIL import ImageFont

from isthmus.errors import UsageError

Font = ImageFont.FreeTypeFont
_PREFERRED = ("NotoSans", "DejaVuSans", "LiberationSans", "Arial", "Helvetica", "SegoeUI", "Roboto")
_KINDS = (".ttf", ".otf", ".ttc")
_STYLES = (
    "bold",
    "italic",
    "oblique",
    "light",
    "thin",
    "black",
    "mono",
    "condensed",
    "serif",
    "display",
    "emoji",
    "math",
)
"""In the names of files that are looked at last."""
_MOST = 500
"""Files that are considered."""
_NOBODY_HAS = "\U0010fffd"
"""Private use, plane 16: what a font shows for it is what it shows for all that it lacks."""


def folders() -> list[Path]:
    """Where fonts lie on this system."""
    home = Path.home()
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts"]
    data = os.environ.get("XDG_DATA_HOME") or home / ".local/share"
    return [Path(data) / "fonts", home / ".fonts", Path("/usr/local/share/fonts"), Path("/usr/share/fonts")]


@cache
def files() -> tuple[Path, ...]:
    """Font files, those for running text in an upright style first."""
    found = [
        path
        for folder in folders()
        if folder.is_dir()
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _KINDS and path.is_file()
    ]

    def order(path: Path) -> tuple[int, int, int, str]:
        name = path.stem.replace("-Regular", "")
        preferred = next((at for at, one in enumerate(_PREFERRED) if one == name), len(_PREFERRED))
        odd = sum(style in name.lower() for style in _STYLES)
        return preferred, odd, "sans" not in name.lower(), path.name

    return tuple(sorted(found, key=order)[:_MOST])


class Fonts:
    """Finds a font for a character, opening as few files as that takes.

    Args:
        size: in pixels.
        first: files that are asked before those of the system.

    Raises:
        UsageError: one of them is no font.
    """

    def __init__(self, size: int, first: Sequence[str] = ()) -> None:
        self.size = size
        self._open: list[Font] = []
        self._nothing: list[bytes] = []
        self._having: dict[str, int | None] = {}
        self._seen: dict[tuple[int, str], bool] = {}
        for name in first:
            try:
                self._add(ImageFont.truetype(name, size))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"not a font: {error}", where=name, hint="a .ttf, .otf or .ttc file"
                ) from None
        self._waiting: Iterator[Path] = iter(files())

    def __getitem__(self, number: int) -> Font:
        return self._open[number]

    @property
    def fallback(self) -> int:
        """A font for whatever has no better one."""
        if not self._open:
            self._next()
        return 0

    def having(self, char: str) -> int | None:
        """The number of a font that has a character; None when there is none on this machine."""
        if char not in self._having:
            number = next((at for at in range(len(self._open)) if self._has(at, char)), None)
            while number is None and self._next():
                number = len(self._open) - 1 if self._has(len(self._open) - 1, char) else None
            self._having[char] = number
        return self._having[char]

    def best(self, text: str) -> int:
        """The font that has most of a text's characters; of several the first."""
        wanted = [char for char in dict.fromkeys(text) if not char.isspace()]
        able = [number for char in wanted if (number := self.having(char)) is not None]
        if not able:
            return self.fallback
        return max(sorted(set(able)), key=lambda number: sum(self._has(number, char) for char in wanted))

    def has(self, number: int, char: str) -> bool:
        """Whether a font has a character; what is not drawn, every font has."""
        return unicodedata.category(char) in ("Cf", "Zs", "Mn", "Me", "Mc") or self._has(number, char)

    def _has(self, number: int, char: str) -> bool:
        if (number, char) not in self._seen:
            self._seen[number, char] = _drawn(self._open[number], char) != self._nothing[number]
        return self._seen[number, char]

    def _next(self) -> bool:
        """Opens one more file; False when there is none."""
        for path in self._waiting:
            try:
                self._add(ImageFont.truetype(str(path), self.size))
            except (OSError, ValueError):
                continue  # bitmaps of one size, or damaged
            return True
        if not self._open:
            self._add(ImageFont.load_default(size=self.size))
            return True
        return False

    def _add(self, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> None:
        assert isinstance(font, ImageFont.FreeTypeFont)
        self._open.append(font)
        self._nothing.append(_drawn(font, _NOBODY_HAS))


def _drawn(font: Font, char: str) -> bytes:
    mask = font.getmask(char, mode="L")
    return repr(mask.size).encode() + bytes(mask)
