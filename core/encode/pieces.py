"""Sources that are read piece by piece: a tar, a row group, a file of arrow batches, one picture of a folder.

Pieces have a fixed order, and each can be read alone: whoever encodes a run of them needs no other. What a piece yields
is not decoded yet: that is left to threads (:mod:`isthmus.core.encode.ahead`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.filters import captions_of, check_fields, check_size, kept_of, provenance_of
from isthmus.core.encode.pictures import Size, Unusable, read_picture, read_size
from isthmus.core.encode.sources import ImageRecord, Rejected, Survey

if TYPE_CHECKING:
    from isthmus.core.encode.places import File
    from isthmus.core.recipe.pictures import Pictures

MAX_BYTES = 256 * 2**20
"""Of one picture's file: a larger one is rejected, `too-many-bytes`, without being kept in memory."""
_SAMPLE = 256
"""Pictures that a survey looks at."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source that is read by itself."""

    file: File
    group: int = -1
    """Row group of a parquet file; -1: the whole file."""
    size: int = 0
    """Bytes that are read."""

    @property
    def identity(self) -> str:
        """Differs when the file was replaced."""
        return f"{self.file.name}\n{self.group}\n{self.file.size}\n{self.file.version}\n"


@dataclass(frozen=True, slots=True)
class Pending:
    """A picture that is not decoded yet; both calls may raise Unusable, and may be made in any thread."""

    key: str
    size: int
    """Bytes that it keeps in memory until it is loaded."""
    load: Callable[[], ImageRecord]
    look: Callable[[], tuple[Size, int]]
    """Size and number of captions, from the header alone."""


def pending(
    key: str,
    size: int,
    fetch: Callable[[], tuple[bytes, Mapping[str, Any]]],
    pictures: Pictures,
    provenance: str,
) -> Pending:
    """A picture whose bytes and fields `fetch` gives."""

    def look() -> tuple[Size, int]:
        data, fields = fetch()
        check_fields(fields, pictures)
        captions, _ = captions_of(fields, pictures)
        own = read_size(BytesIO(data))
        check_size(own, pictures)
        return own, len(captions)

    def load() -> ImageRecord:
        data, fields = fetch()
        if not data:
            raise Unusable("unreadable", "an empty file")
        check_fields(fields, pictures)
        captions, weights = captions_of(fields, pictures)
        check_size(read_size(BytesIO(data)), pictures)
        kept, unfit = kept_of(fields, pictures)
        return ImageRecord(
            key=key,
            image=read_picture(BytesIO(data)),
            captions=captions,
            weights=weights,
            source=provenance_of(fields, pictures, provenance),
            fields=kept,
            unfit=unfit,
        )

    return Pending(key, size, load, look)


class PieceSource(ABC):
    """An :class:`ImageSource` in pieces."""

    description: str
    pieces: Sequence[Piece]
    sampled_pieces = 4
    """How many pieces a survey opens."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """A piece's pictures, in a fixed order."""

    def __iter__(self) -> Iterator[ImageRecord | Rejected]:
        """Every picture, one at a time."""
        for piece in self.pieces:
            for item in self.read(piece):
                if isinstance(item, Rejected):
                    yield item
                    continue
                try:
                    yield item.load()
                except Unusable as problem:
                    yield Rejected(key=item.key, reason=problem.reason, detail=problem.detail)

    def survey(self) -> Survey:
        """The headers of a few hundred pictures, evenly from the source's pieces; the same ones each time."""
        count = min(len(self.pieces), self.sampled_pieces)
        chosen = [self.pieces[at * len(self.pieces) // count] for at in range(count)] if count else []
        most, sizes, seen, read = 0, Counter[Size](), 0, 0
        for piece in chosen:
            taken, bytes_taken = 0, 0
            for item in self.read(piece):
                taken += 1
                if isinstance(item, Pending):
                    bytes_taken += item.size
                    try:
                        size, captions = item.look()
                    except Unusable:
                        pass
                    else:
                        most = max(most, captions)
                        sizes[size] += 1
                if taken >= -(-_SAMPLE // count):
                    break
            else:
                bytes_taken = piece.size  # all of it
            read += bytes_taken
            seen += taken
        total = sum(piece.size for piece in self.pieces)
        return Survey(most, sizes, round(seen * max(1.0, total / read)) if read else seen)


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of pieces that one rank encodes into shards of its own."""

    number: int
    start: int
    stop: int
    size: int
    """Bytes of its pieces; 0 when the source has no pieces."""
    digest: str
    """Of the pieces' names, sizes and versions."""


def units_of(source: object, *, max_bytes: int, max_pieces: int) -> list[Unit]:
    """Cuts a source into units. What a unit holds depends on the source and the limits alone.

    A source without pieces is one unit.
    """
    if not isinstance(source, PieceSource):
        return [Unit(0, 0, 0, 0, "")]
    units: list[Unit] = []
    start, size, digest = 0, 0, hashlib.sha256()
    for at, piece in enumerate(source.pieces):
        if at > start and (size + piece.size > max_bytes or at - start >= max_pieces):
            units.append(Unit(len(units), start, at, size, digest.hexdigest()))
            start, size, digest = at, 0, hashlib.sha256()
        size += piece.size
        digest.update(piece.identity.encode("utf-8", "surrogatepass"))
    units.append(Unit(len(units), start, len(source.pieces), size, digest.hexdigest()))
    return units


def items_of(source: Any, unit: Unit) -> Iterator[ImageRecord | Pending | Rejected]:
    """What a unit holds."""
    if not isinstance(source, PieceSource):
        yield from source
        return
    for piece in source.pieces[unit.start : unit.stop]:
        yield from source.read(piece)
