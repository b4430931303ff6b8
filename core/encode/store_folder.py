"""Pictures below a URI, with captions beside them or in a listing: what :mod:`folder` is on this machine."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.folder import LISTINGS, rows_of
from isthmus.core.encode.pictures import SUFFIXES, Unusable
from isthmus.core.encode.pieces import MAX_BYTES, Pending, Piece, PieceSource, pending
from isthmus.core.encode.sources import Rejected
from isthmus.core.encode.webdataset import fields_of
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.core.encode.places import File, Place
    from isthmus.core.recipe.pictures import Pictures

_MAX_TEXT, _MAX_LISTING = 2**20, 2**30


class StoreFolder(PieceSource):
    """Pictures of a store, by name; keys are their names below the root.

    Args:
        listing: a `.jsonl` or `.csv` there; by default the first of `LISTINGS` in the root. Without one captions are the
            lines of the `.txt` and the fields of the `.json` beside a picture.
    """

    sampled_pieces = 256

    def __init__(self, place: Place, files: list[File], pictures: Pictures, listing: str | None) -> None:
        self._place, self._pictures = place, pictures
        names = {file.name for file in files}
        listing = listing or next((name for name in LISTINGS if name in names), None)
        self._entries = None if listing is None else self._listed(listing)
        self._texts = {name for name in names if name.lower().endswith((".txt", ".json"))}
        self.pieces = [
            Piece(file, size=file.size)
            for file in files
            if PurePosixPath(file.name).suffix.lower() in SUFFIXES
        ]
        if not self.pieces:
            raise UsageError(
                "there are no pictures",
                where=place.uri,
                hint=f"files ending in {', '.join(sorted(SUFFIXES))}, or .tar, .parquet, .arrow",
            )
        self._lost = sorted(set(self._entries or ()) - names)
        self.description = f"pictures of the folder {place.name}"

    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """One file, and before the first one what is listed and not there."""
        if self.pieces and piece == self.pieces[0]:
            for name in self._lost:
                escapes = name.startswith("/") or ".." in name.split("/")
                yield Rejected(
                    key=name, reason="escapes" if escapes else "missing", detail="it is only listed"
                )
        name, size = piece.file.name, piece.file.size
        if size > MAX_BYTES:
            yield Rejected(key=name, reason="too-many-bytes", detail=f"{size} bytes")
            return

        def fetch() -> tuple[bytes, Mapping[str, Any]]:
            fields = self._fields(name)
            try:
                data = self._place.read(name, MAX_BYTES)
            except FileNotFoundError:
                raise Unusable("changed", "the file went away while the source was encoded") from None
            if len(data) != size:
                raise Unusable("changed", f"{len(data)} bytes, {size} when the source was listed")
            return data, fields

        yield pending(name, size, fetch, self._pictures, self._place.name)

    def _fields(self, name: str) -> Mapping[str, Any]:
        if self._entries is not None:
            if name not in self._entries:
                raise Unusable("no-caption", "not in the listing")
            return self._entries[name]
        stem = name[: -len(PurePosixPath(name).suffix)]
        parts: dict[str, bytes | Unusable] = {}
        for kind in ("txt", "json"):
            if f"{stem}.{kind}" in self._texts:
                try:
                    parts[kind] = self._place.read(f"{stem}.{kind}", _MAX_TEXT)
                except FileNotFoundError:
                    raise Unusable("changed", f"the .{kind} went away") from None
                except ValueError as error:
                    parts[kind] = Unusable("bad-caption", str(error))
        return fields_of(parts)

    def _listed(self, listing: str) -> dict[str, dict[str, Any]]:
        where = Path(listing)
        entries: dict[str, dict[str, Any]] = {}
        try:
            text = self._place.read(listing, _MAX_LISTING).decode("utf-8-sig")
            for name, captions, source, reason, fields in rows_of(where, io.StringIO(text, newline="")):
                entry = entries.setdefault(str(PurePosixPath(name)), {})
                known = entry.get("captions", [])
                entry |= {key: value for key, value in fields.items() if key not in ("text", "caption")}
                # What is no text is told by whoever reads the captions.
                entry["captions"] = [*known, *(captions if reason is None else [0])]
                entry |= {"source": source} if source else {}
        except (FileNotFoundError, ValueError, csv.Error) as error:
            raise UsageError(
                f"cannot read the listing: {error}", where=f"{self._place.root}/{listing}"
            ) from None
        return entries
