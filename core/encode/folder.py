"""A folder of pictures with captions: sidecar `.txt` files, a `metadata.jsonl`, or a `.csv`."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from isthmus.core.encode.filters import (
    MAX_CAPTION,
    captions_of,
    check_fields,
    check_size,
    clean,
    kept_of,
    provenance_of,
)
from isthmus.core.encode.pictures import SUFFIXES, Size, Unusable, read_picture, read_size
from isthmus.core.encode.pieces import Pending, Piece, PieceSource
from isthmus.core.encode.places import File
from isthmus.core.encode.sources import ImageRecord, Rejected, Survey
from isthmus.core.encode.webdataset import fields_of
from isthmus.core.recipe.pictures import Pictures
from isthmus.errors import UsageError

LISTINGS = ("metadata.jsonl", "metadata.csv", "captions.csv")
"""Files that list captions, in the order they are looked for in a folder's root."""
_MAX_TEXT = 2**20


_Kept = tuple[dict[str, float | str | None], tuple[str, ...]]


@dataclass(slots=True)
class _Entry:
    captions: list[str] = field(default_factory=list)
    source: str | None = None
    reason: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Everything that the listing says of it."""


class FolderSource(PieceSource):
    """Pictures below a folder, in the order of their names.

    Captions come from the listing where there is one, else from a `.txt` file beside each picture. Several lines
    of a `.txt`, several rows of a listing or a list under `captions` are several captions.

    Args:
        root: the folder.
        listing: a `.jsonl` (`file_name` and `text`, `caption` or `captions`) or a `.csv` (columns `file_name` and
            `text` or `caption`); by default the first of `LISTINGS` that is there. An optional `source` names a
            picture's provenance.
        pictures: the recipe's names of fields, captions and filters. Fields are those of the listing; without one,
            `txt` and those of a `.json` beside the picture, as img2dataset writes it.

    Raises:
        UsageError: the folder is not there or holds no picture, or the listing cannot be read.
    """

    def __init__(self, root: Path, listing: Path | None = None, pictures: Pictures | None = None) -> None:
        if not root.is_dir():
            raise UsageError(f"no folder of pictures at {root}")
        self.root = root
        self._pictures = pictures if pictures is not None else Pictures()
        asked = self._pictures
        self._wants_fields = bool(
            asked.captions or asked.scores or asked.licences or asked.provenance or asked.keep
        )
        self._resolved = root.resolve()
        if listing is None:
            listing = next((root / name for name in LISTINGS if (root / name).is_file()), None)
        self.listing = listing
        self.name = self._resolved.name
        self.description = f"pictures of the folder {self.name}"
        self._entries = self._read_listing(listing) if listing is not None else None
        self._files = sorted(self._walk() | set(self._entries or {}))
        if not any(PurePosixPath(name).suffix.lower() in SUFFIXES for name in self._files):
            raise UsageError(
                f"{root} holds no pictures",
                hint=f"files ending in {', '.join(sorted(SUFFIXES))}, with captions",
            )

    @cached_property
    def pieces(self) -> list[Piece]:  # type: ignore[override]
        """A piece is a file."""
        return [self._piece(name) for name in self._files]

    def _piece(self, name: str) -> Piece:
        try:
            seen = self._inside(name).stat()
        except (Unusable, OSError):
            return Piece(File(name, 0, ""))
        return Piece(File(name, seen.st_size, str(seen.st_mtime_ns)), size=seen.st_size)

    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """The picture of one file."""
        name = piece.file.name
        # The file is opened when it is decoded, so nothing waits in memory.
        yield Pending(name, 0, lambda: self._unchanged(piece), lambda: self._look(name))

    def _unchanged(self, piece: Piece) -> ImageRecord:
        record = self._record(piece.file.name)
        if self._piece(piece.file.name) != piece:
            raise Unusable("changed", "the file was replaced while the source was encoded")
        return record

    def __len__(self) -> int:
        """Files that will be looked at."""
        return len(self._files)

    def survey(self) -> Survey:
        """Opens every picture's header and, without a listing, every `.txt` file."""
        most, sizes = 0, Counter[Size]()
        for name in self._files:
            with contextlib.suppress(Unusable):
                size, captions = self._look(name)
                most = max(most, captions)
                sizes[size] += 1
        return Survey(most, sizes)

    def _look(self, name: str) -> tuple[Size, int]:
        captions, *_ = self._told(name)
        size = read_size(self._inside(name))
        check_size(size, self._pictures)
        return size, len(captions)

    def __iter__(self) -> Iterator[ImageRecord | Rejected]:
        """One file at a time, by name."""
        for name in self._files:
            try:
                yield self._record(name)
            except Unusable as problem:
                yield Rejected(key=name, reason=problem.reason, detail=problem.detail)

    def _record(self, name: str) -> ImageRecord:
        path = self._inside(name)
        if path.is_dir():
            raise Unusable("link", "a symbolic link to a folder is not followed")
        captions, weights, source, (kept, unfit) = self._told(name)
        if any(len(text) > MAX_CAPTION for text in captions):
            raise Unusable("caption-too-long", f"over {MAX_CAPTION} characters")
        check_size(read_size(path), self._pictures)
        return ImageRecord(
            key=name,
            image=read_picture(path),
            captions=captions,
            weights=weights,
            source=source,
            fields=kept,
            unfit=unfit,
        )

    def _told(self, name: str) -> tuple[tuple[str, ...], tuple[float, ...], str, _Kept]:
        """Captions, weights, provenance and the fields that are kept, of a picture that the recipe's fields take."""
        entry = (self._entries or {}).get(name)
        source = (entry.source if entry else None) or self.name
        if not self._wants_fields:
            return tuple(self._captions(name)), (), source, ({}, ())
        if self._entries is not None:
            fields = entry.fields if entry else {}
        else:
            fields = fields_of(dict(self._beside(name)))
        check_fields(fields, self._pictures)
        if self._pictures.captions:
            captions, weights = captions_of(fields, self._pictures)
        else:
            captions, weights = tuple(self._captions(name)), ()
        kept = kept_of(fields, self._pictures)
        return captions, weights, provenance_of(fields, self._pictures, source), kept

    def _beside(self, name: str) -> Iterator[tuple[str, bytes]]:
        for kind in ("txt", "json"):
            try:
                file = self._inside(str(PurePosixPath(name).with_suffix(f".{kind}")))
                if file.stat().st_size <= _MAX_TEXT:
                    yield kind, file.read_bytes()
            except Unusable as problem:
                if problem.reason != "missing":
                    raise

    def _captions(self, name: str) -> list[str]:
        """Without surplus white space, empty ones and repetitions; at least one."""
        if self._entries is None:
            lines = self._sidecar(name)
        elif name not in self._entries:
            raise Unusable("no-caption", f"not in {self.listing.name if self.listing else 'the listing'}")
        else:
            entry = self._entries[name]
            if entry.reason:
                raise Unusable("bad-listing", entry.reason)
            lines = entry.captions
        captions = list(dict.fromkeys(text for text in (clean(line) for line in lines) if text))
        if not captions:
            raise Unusable("no-caption", "the caption is empty")
        return captions

    def _inside(self, name: str) -> Path:
        """The file of a name, if it lies in the folder once every link is followed."""
        path = self.root / name
        try:
            if PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(self._resolved):
                raise Unusable("escapes", "it lies outside the folder")
            if not path.exists():
                raise Unusable("missing", "there is no such file")
        except (OSError, ValueError, RuntimeError) as error:
            # A name too long, a zero byte, a loop of links.
            raise Unusable("missing", str(error).replace(str(self.root), "")) from None
        if not path.is_dir() and not path.is_file():
            raise Unusable("unreadable", "not a plain file")
        return path

    def _sidecar(self, name: str) -> list[str]:
        sidecar = str(PurePosixPath(name).with_suffix(".txt"))
        try:
            return self._inside(sidecar).read_text(encoding="utf-8-sig").splitlines()
        except Unusable as problem:
            if problem.reason == "missing":
                raise Unusable("no-caption", f"no {PurePosixPath(sidecar).name}") from None
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable("no-caption", f"the .txt cannot be read: {type(error).__name__}") from None

    def _walk(self) -> set[str]:
        names = set()
        for folder, folders, files in os.walk(self.root, followlinks=False):
            # Hidden folders are tools' own: caches, version control, thumbnails.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            here = Path(folder).relative_to(self.root)
            names |= {
                (here / name).as_posix()
                for name in files
                if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
            }
            names |= {(here / name).as_posix() for name in folders if (Path(folder) / name).is_symlink()}
        return names

    def _read_listing(self, path: Path) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        try:
            with path.open(encoding="utf-8-sig", newline="") as lines:
                for name, captions, source, reason, fields in rows_of(path, lines):
                    # `./a.png` and `a.png` are one picture.
                    entry = entries.setdefault(str(PurePosixPath(name)), _Entry())
                    entry.captions += captions
                    entry.source = source or entry.source
                    entry.reason = reason or entry.reason
                    entry.fields |= fields
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"cannot read it: {error}", where=str(path)) from None
        return entries


_Row = tuple[str, list[str], str | None, str | None, dict[str, Any]]


def rows_of(path: Path, lines: Iterator[str]) -> Iterator[_Row]:
    """The lines of a listing: name, captions, provenance, what is wrong with it, all fields."""
    return _jsonl(path, lines) if path.suffix.lower() == ".jsonl" else _csv(path, lines)


def _jsonl(path: Path, lines: Iterator[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", where=f"{path}:{number}") from None
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise UsageError("a line needs a `file_name`", where=f"{path}:{number}")
        captions: list[str] = []
        reason = None
        for key in ("text", "caption", "captions"):
            value = row.get(key, [])
            values = value if isinstance(value, list) else [value]
            if all(isinstance(item, str) for item in values):
                captions += values
            else:
                reason = f"line {number}: `{key}` is not text"
        source = row.get("source")
        yield name, captions, source if isinstance(source, str) else None, reason, row


def _csv(path: Path, lines: Iterator[str]) -> Iterator[_Row]:
    table = csv.DictReader(lines)
    columns = table.fieldnames or []
    column = next((name for name in ("text", "caption") if name in columns), None)
    if "file_name" not in columns or column is None:
        raise UsageError(
            "the first line must name the columns `file_name` and `text` or `caption`", where=str(path)
        )
    for row in table:
        if not row["file_name"]:
            raise UsageError("a row needs a `file_name`", where=f"{path}:{table.line_num}")
        yield row["file_name"], [row[column] or ""], row.get("source"), None, row
