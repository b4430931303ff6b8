"""What a reader of byte ranges is, and what can go wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isthmus.errors import DataError


class FileCutShort(DataError):
    """The file ends before the range that was asked for."""


class FileReplaced(DataError):
    """Another file than before, or than the index describes, answers to the name."""


class Ranges(Protocol):
    """Byte ranges of the files below one root. Safe to share between the threads of a process, never across a fork.

    Every call is retried as its policy says, has a limit, and ends with the bytes or one of:

    Raises:
        FileNotFoundError: there is no such file, while the root is there.
        FileCutShort: the file ends before the range.
        FileReplaced: the file is not the one that was read before, or has another size than `file_bytes`.
        StorageError: the store refused or did not answer within the budget; says how often it was tried and the cause.
    """

    uri: str
    """The root."""
    direct: bool
    """`scatter` fills the caller's memory without a copy of its own (preadv), so that a read may be cut anywhere."""
    max_depth: int
    """Reads that are worth having in flight at once."""

    def read(self, name: str, start: int, length: int, *, file_bytes: int | None = None) -> memoryview:
        """The bytes [start, start + length) of a file, in memory of the reader's own."""

    def scatter(
        self, name: str, start: int, views: Sequence[memoryview], *, file_bytes: int | None = None
    ) -> None:
        """Fills the views, one behind the other, with the file's bytes from `start` on."""

    def close(self) -> None:
        """Gives up what is in flight: waiting callers get a StorageError. Called again, does nothing."""
