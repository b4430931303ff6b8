"""What a copy will do, from two listings: what differs, what is there already, what only the destination has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from isthmus.errors import DataError
from isthmus.storage.ranges.paths import checked
from isthmus.storage.transfer.journal import Done, Started
from isthmus.storage.transfer.local import is_part
from isthmus.storage.transfer.spec import MIB, Entry, Limits

MANIFEST = "manifest.json"
"""The same as `shards.manifest.MANIFEST`, which is not imported: it needs pyarrow, and a copy of other files does not."""
LAST = (MANIFEST, "COMMITTED")
"""Names whose presence says that all the rest is there: written when it is."""
PART_BYTES = 32 * MIB
"""Large enough that many servers, which write each part to a disk and then all of them again, have few to join."""


@dataclass(frozen=True, slots=True)
class Item:
    """A file that will be copied."""

    entry: Entry
    """Of the source."""
    why: str
    """missing, size, checksum, newer."""
    crc32: int | None = None
    """What its bytes must have, where the dataset's index tells it."""

    @property
    def last(self) -> bool:
        """Whether it is written after all others."""
        return self.entry.name.rpartition("/")[2] in LAST


@dataclass(slots=True)
class Plan:
    """What a copy will do."""

    source: str
    target: str
    items: list[Item] = field(default_factory=list)
    same: list[tuple[Entry, Entry, str]] = field(default_factory=list)
    """Source, destination, and how they are known to be the same: copied, checksum, etag, time."""
    extra: list[Entry] = field(default_factory=list)
    """Only at the destination."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> files of the source that are not copied."""
    part_bytes: int = PART_BYTES
    started: Mapping[str, Started] = field(default_factory=dict)
    """Of an earlier copy that did not end."""

    @property
    def bytes(self) -> int:
        """Of the files that will be copied."""
        return sum(item.entry.size for item in self.items)

    @property
    def bytes_there(self) -> int:
        """Of those, what an earlier copy has sent, by its journal."""
        going = {item.entry.name: item.entry for item in self.items}
        return sum(
            sum(part.size for part in started.parts.values())
            for name, started in self.started.items()
            if name in going and going[name].version == started.source
        )

    @property
    def buffer_bytes(self) -> int:
        """Of one part that is on its way: no more than the largest file."""
        return max(min(self.part_bytes, max((item.entry.size for item in self.items), default=0)), 1)

    def parts(self, size: int) -> int:
        """Requests that carry the bytes of a file."""
        return max(math.ceil(size / self.part_bytes), 1)

    def requests(self) -> dict[str, int]:
        """How many requests the copy makes, by kind: reads, writes (one a part, two a file in parts), lists."""
        reads = sum(self.parts(item.entry.size) for item in self.items if item.entry.size)
        writes = sum(
            parts if (parts := self.parts(item.entry.size)) == 1 else parts + 2 for item in self.items
        )
        seen = len(self.items) + len(self.same)
        return {
            "read": reads,
            "write": writes,
            "list": math.ceil(seen / 1000) + math.ceil((len(self.same) + len(self.extra) + 1) / 1000),
        }


def accepted(entries: Iterable[Entry], uri: str, left_out: dict[str, int]) -> dict[str, Entry]:
    """The files of a listing that are copied, by name; the others are counted by reason."""
    found: dict[str, Entry] = {}
    for entry in entries:
        hidden = any(part.startswith(".") and part != ".metadata" for part in entry.name.split("/"))
        if is_part(entry.name) or hidden:
            left_out["hidden"] = left_out.get("hidden", 0) + 1
            continue
        try:
            checked(entry.name, uri)
        except DataError:
            left_out["a name that no folder can hold"] = left_out.get("a name that no folder can hold", 0) + 1
            continue
        found[entry.name] = entry
    return found


def part_bytes_for(largest: int, limits: Limits, wanted: int) -> int:
    """Bytes of a part so that the largest file has no more parts than a place takes."""
    least = max(wanted, limits.smallest_part, math.ceil(largest / limits.most_parts))
    return min(math.ceil(least / MIB) * MIB if least > MIB else least, limits.largest_part)


def difference(
    entry: Entry,
    there: Entry | None,
    done: Done | None,
    crc32: int | None,
    look: Callable[[str], Entry | None],
) -> tuple[str, bool]:
    """How a file differs from the destination's (True), or why they count as the same (False).

    Args:
        crc32: of the source's bytes, where it is known.
        look: asks the destination for all it knows of a file.
    """
    if there is None:
        return "missing", True
    if there.size != entry.size:
        return "size", True
    if done is not None and (done.source, done.target, done.size) == (
        entry.version,
        there.version,
        entry.size,
    ):
        return "copied", False
    known = crc32 if crc32 is not None else entry.crc32
    if known is not None:
        told = there.crc32 if there.crc32 is not None else getattr(look(entry.name), "crc32", None)
        if told is not None:
            return "checksum", told != known
    if "-" not in entry.version and len(entry.version) == 32 and entry.version == there.version:
        return "etag", False
    # Stores tell whole seconds.
    changed = entry.modified if there.modified % 1 else int(entry.modified)
    return ("time", False) if there.modified >= changed else ("newer", True)
