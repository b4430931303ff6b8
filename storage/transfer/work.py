"""What the threads of a copy share: its progress, the files that are begun, and how a request of either side is tried."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.ranges.causes import Cause
from isthmus.storage.ranges.retry import Retry
from isthmus.storage.transfer.plan import Item
from isthmus.storage.transfer.spec import Arrived, Link


@dataclass(slots=True)
class Progress:
    """What was done so far."""

    files: int = 0
    bytes: int = 0
    """Of files and parts that arrived in this run."""
    parts_sent: int = 0
    parts_there: int = 0
    """Parts that an earlier run had sent."""
    by_service: int = 0
    """Parts that the store fetched by itself."""
    checked: Counter[str] = field(default_factory=Counter)
    """How files were checked -> files: checksum, parts, service."""
    failures: list[IsthmusError] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FileWork:
    """A file that is sent in parts."""

    item: Item
    upload: str
    parts: int
    link: Link | None
    todo: deque[int] = field(default_factory=deque)
    arrived: dict[int, Arrived] = field(default_factory=dict)
    unproven: dict[int, Arrived] = field(default_factory=dict)
    """That the store has, of which nobody wrote down the CRC-32."""
    old: set[int] = field(default_factory=set)
    """Parts on a disk that an earlier run wrote."""
    left: int = 0
    again: bool = False
    failed: bool = False


class SideRetry(Retry):
    """Says of which side of the copy a failure is."""

    verb = "read"

    def _given_up(self, name: str, cause: Cause, tries: int, seconds: float) -> StorageError:
        often = "" if tries == 1 else f", tried {tries} times in {seconds:.0f} s"
        hint = cause.hint or "copy again: it goes on where it was"
        return StorageError(
            f"cannot {self.verb}: {cause.words}{often}", where=f"{self.uri}/{name}", hint=hint
        )


class WriteRetry(SideRetry):
    """Of the destination."""

    verb = "write"
