"""What a place must do so that files can be copied from it and to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.errors import DataError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a place."""

    name: str
    """Below the root, with forward slashes."""
    size: int
    version: str
    """Changes when the file is replaced: an ETag, or of a local file size, time of change and inode."""
    modified: float = 0.0
    """Seconds since 1970."""
    crc32: int | None = None
    """Of the whole file, where the place tells it."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A part that a place has received and holds for a file that is not finished."""

    size: int
    tag: str
    """What finishing the file needs to name it: an ETag, or a block's id."""
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a place accepts. Bytes."""

    largest_part: int
    most_parts: int
    smallest_part: int = 1
    largest_file: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Link:
    """An address at which another store may read a file by itself, with what proves that it may."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    conditional: bool = True
    """The store that reads can be told which version it must be."""


class Changed(DataError):
    """A file of the source is not the one that was listed."""

    def __init__(self, where: str, what: str = "the file was replaced while it was copied") -> None:
        super().__init__(what, where=where, hint="copy again when nothing writes there; what arrived is kept")


class Unsupported(Exception):
    """The store cannot do it this way; the caller has another."""


class Place(Protocol):
    """Where files are. One try a call; whoever calls tries again. Safe to use from several threads."""

    uri: str
    kind: str
    """local, s3 or azure."""
    limits: Limits

    def entries(self) -> Iterator[Entry]:
        """All files below the root, in any order."""
        ...

    def find(self, name: str) -> Entry | None:
        """One file with all that the place knows of it; None when it is not there."""
        ...

    def read(self, entry: Entry, start: int, view: memoryview) -> int:
        """Fills the view with bytes of a file; returns their CRC-32. Raises Changed when it is no longer the entry's."""
        ...

    def put(self, name: str, view: memoryview, crc32: int) -> Entry:
        """Creates or replaces a file in one request."""
        ...

    def begin(self, name: str, token: str, crc32: int | None) -> str:
        """Starts a file in parts.

        Args:
            token: names this version of the source and how it is divided; parts of another are not mixed with it.
            crc32: of the whole file, where it is known beforehand.

        Returns:
            What the later calls and a resumed copy name it by.
        """
        ...

    def arrived(self, name: str, upload: str) -> dict[int, Arrived] | None:
        """The parts that are there, by number from 0; None when the place knows no such upload (any more)."""
        ...

    def send(self, name: str, upload: str, number: int, start: int, view: memoryview, crc32: int) -> Arrived:
        """Sends a part; the place has checked its bytes when this returns."""
        ...

    def finish(self, name: str, upload: str, parts: Sequence[Arrived], crc32: int | None) -> Entry:
        """Makes a file of its parts, and looks whether it is the one that was meant."""
        ...

    def holds(self, entry: Entry, parts: Sequence[Arrived]) -> bool:
        """Whether a file is what these parts make: of a copy that was killed before it wrote that down."""
        ...

    def abandon(self, name: str, upload: str) -> None:
        """Drops the parts of an upload that will not be finished."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file; one that is not there is no error."""
        ...

    def link(self, name: str, *, to: Place) -> Link | None:
        """How another store may read the file by itself; None: not at all."""
        ...

    def fetch(
        self, name: str, upload: str, number: int, link: Link, entry: Entry, start: int, size: int
    ) -> Arrived:
        """A part that the store reads from a link by itself. Raises Unsupported."""
        ...

    def settle(self) -> None:
        """Everything that was finished so far outlives a loss of power when this returns."""
        ...

    def refresh(self) -> bool:
        """Looks credentials up anew, after they were refused. False: there are none to look up."""
        ...

    def close(self) -> None:
        """Closes connections."""
        ...
