"""Footers of foreign files: fetched where the index says they are, checked, kept while memory allows."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import CorruptShard
from isthmus.storage.ranges.spec import Ranges

REPLACED = "index the files again with `isthmus data index`"
_KEPT_BYTES = 1 << 25
_PARSED = 6  # a parsed footer takes about this many times its bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column chunk, as the footer describes it."""

    start: int
    """Offset in the file of its first page, the dictionary's when it has one."""
    stored: int
    """Bytes in the file."""
    decoded: int
    """Bytes without compression."""
    values: int
    """Of a list column its elements, and one for each row that has none."""
    codec: str
    dictionary: bool
    """Whether it may have a dictionary page."""
    kind: str
    """Parquet's physical type."""
    levels: tuple[int, int]
    """The most that its definition and repetition levels reach: (0 or 1, 0) is one value a row, or none."""

    @property
    def flat(self) -> bool:
        """One value a row at the most: no list."""
        return self.levels[1] == 0


class Footer:
    """A file's parsed footer."""

    def __init__(self, data: bytes | memoryview, shard: str) -> None:
        try:
            # A footer can be read by itself when it is made a file that ends with it.
            self.metadata: Any = pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(data)))
            schema = self.metadata.schema
            self.leaves: dict[str, list[int]] = {}
            """Top-level column -> positions of what parquet stores for it."""
            for at in range(self.metadata.num_columns):
                path = schema.column(at).path
                self.leaves.setdefault(path, []).append(at)
                root = path.partition(".")[0]
                if root != path:
                    self.leaves.setdefault(root, []).append(at)
            columns = [schema.column(at) for at in range(self.metadata.num_columns)]
            self._levels = [(c.max_definition_level, c.max_repetition_level) for c in columns]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptShard(f"its footer is unreadable: {error}", shard=shard) from None

    def chunks(self, row_group: int, column: str) -> list[Chunk]:
        """The chunks of a column; KeyError when the file has no such column."""
        group = self.metadata.row_group(row_group)
        return [self._chunk(group.column(at), self._levels[at]) for at in self.leaves[column]]

    @staticmethod
    def _chunk(chunk: Any, levels: tuple[int, int]) -> Chunk:
        start, first = chunk.data_page_offset, chunk.dictionary_page_offset
        if first is not None and 0 < first < start:
            start = first
        return Chunk(
            start=start,
            stored=chunk.total_compressed_size,
            decoded=chunk.total_uncompressed_size,
            values=chunk.num_values,
            codec=chunk.compression,
            dictionary=any("DICTIONARY" in name for name in chunk.encodings),
            kind=chunk.physical_type,
            levels=levels,
        )


class Footers:
    """The footers of a dataset's files; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Footer, int]] = OrderedDict()
        self._bytes = 0

    def get(self, ranges: Ranges, shard: str, *, file_bytes: int, footer_bytes: int, crc32: int) -> Footer:
        """The footer of a file, from memory or with one read.

        Raises:
            CorruptShard: it is not the footer that was indexed.
        """
        with self._lock:
            if shard in self._kept:
                self._kept.move_to_end(shard)
                return self._kept[shard][0]
        # Two threads may fetch the same one: cheaper than making all wait for each other's reads.
        data = ranges.read(shard, file_bytes - footer_bytes, footer_bytes, file_bytes=file_bytes)
        if zlib.crc32(data) != crc32:
            raise CorruptShard(
                "its footer is not the one that was indexed: the file was replaced or damaged",
                shard=shard,
                hint=REPLACED,
            )
        footer = Footer(data, shard)
        size = _PARSED * footer_bytes
        with self._lock:
            if shard not in self._kept:
                self._kept[shard] = footer, size
                self._bytes += size
                while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                    self._bytes -= self._kept.popitem(last=False)[1][1]
        return footer
