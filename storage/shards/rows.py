"""Reads of a block what a reader of single rows needs: where the arrays of its rows lie, and its strings and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from isthmus.errors import CorruptShard
from isthmus.storage.shards.blocks import MAX_GAP, BlockReader
from isthmus.storage.shards.small import NotValues, Small, SmallPlace, decode_small, stretches


class FixedColumn(NamedTuple):
    """Where the values of a column of fixed width lie: row r's from `start` + r `width` on."""

    name: str
    file: str
    file_bytes: int
    start: int
    width: int


class RowPlaces(NamedTuple):
    """Where the columns of a block lie."""

    fixed: list[FixedColumn]
    """Of fixed width: their rows can be read one by one."""
    small: list[SmallPlace]
    """Numbers and strings."""


class RowReader(BlockReader):
    """A :class:`BlockReader` of rows that lie apart, too."""

    def places(self, block: int, caption: int = 0) -> RowPlaces:
        """Where a block's columns lie."""
        rows, index = int(self.dataset.index.rows[block]), self.dataset.index
        found = RowPlaces([], [])
        for part in self._parts(block, caption):
            sibling, lengths = index.sibling(part.sibling), self._lengths(block, part)
            start, size = sibling.start(block, part.first), int(sibling.file_bytes[block])
            name, end = index.file(block, part.sibling), start
            for column, length in zip(part.columns, lengths, strict=True):
                end += length
                if column.kind == "bytes":
                    width = column.width
                    assert width is not None
                    found.fixed.append(FixedColumn(column.name, name, size, end - rows * width, width))
            for stretch in stretches(part.columns, lengths, start, gap=MAX_GAP):
                found.small.append(SmallPlace(name, size, stretch))
        return found

    def small(self, block: int, caption: int = 0) -> Small:
        """A block's numbers and strings; checksums are not compared. Errors as of :meth:`read`."""
        found: list[memoryview] = []
        places = self.places(block, caption).small
        for place in places:
            part = next(
                p
                for p in self._parts(block, caption)
                if self.dataset.index.file(block, p.sibling) == place.file
            )
            found.append(memoryview(bytearray(place.stretch.length)))
            with self._place(block, part) as (name, ranges, file_bytes):
                ranges.scatter(name, place.stretch.start, found[-1:], file_bytes=file_bytes)
        return self.small_of(block, places, found)

    def small_of(self, block: int, places: Sequence[SmallPlace], bytes_of: Sequence[memoryview]) -> Small:
        """The numbers and strings in what was read at `places`."""
        try:
            return decode_small(places, bytes_of, int(self.dataset.index.rows[block]))
        except NotValues as error:
            group = int(self.dataset.index.row_group[block])
            raise CorruptShard(
                f"unreadable: {error}", shard=error.file, row_group=group, column=error.column
            ) from None
