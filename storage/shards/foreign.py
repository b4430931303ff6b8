"""Reads blocks of parquet files that others made, through pyarrow: the general path.

A block is one row group: one read of the column chunks that are needed, which are handed to pyarrow from memory with the
footer that was read before. What decoding may allocate is bounded first (:mod:`.foreign_pages`). pyarrow's own threads
are not used: several blocks are read at once by the caller's, and decoding releases the GIL.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import CorruptShard, StorageError
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced, Ranges
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.foreign_arrays import Bytes, allocate
from isthmus.storage.shards.foreign_block import Expected, Roles
from isthmus.storage.shards.foreign_footers import REPLACED, Chunk, Footer, Footers
from isthmus.storage.shards.foreign_pages import Pages, walk
from isthmus.storage.shards.foreign_plain import plain_rows

if TYPE_CHECKING:
    from isthmus.storage.shards.blocks import Block

MAX_GAP = 1 << 20
"""Bytes of other columns that are read and thrown away rather than asked for around."""
_MAX_RISK = 1 << 29
"""Bytes that dictionaries might unpack to, beyond what is usual, before rows are decoded a few at a time."""
_BATCH_BYTES = 1 << 26


class HasRanges(Protocol):
    """What a dataset or an access gives: a reader of a file's bytes."""

    def ranges(self, name: str) -> Ranges:
        """The reader of the root that holds the file."""


class ForeignReader:
    """Reads the blocks of a foreign dataset at one resolution; safe to share between threads.

    Args:
        dataset: what to read; its manifest has a column map.
        resolution: which of the map's latents.
        access: who reads the files' bytes: an access, or a function of the file's name; the dataset itself if not told.
        check: compare the pages' checksums, where the files have any.
    """

    fills = False

    def __init__(
        self,
        dataset: Dataset,
        resolution: int,
        access: HasRanges | Callable[[str], Ranges] | None = None,
        *,
        check: bool = True,
    ) -> None:
        assert dataset.manifest.columns is not None
        assert dataset.index.foreign is not None
        self.dataset, self.resolution = dataset, resolution
        self._columns, self._files = dataset.manifest.columns, dataset.index.foreign
        access = access if access is not None else dataset
        self._ranges: Callable[[str], Ranges] = access if callable(access) else access.ranges
        self._check = check
        self._footers = Footers()
        self._scratch = threading.local()
        # Lists take several times their rows' memory while pyarrow decodes them: one block at a time.
        self._lists = threading.Lock()
        self._roles: dict[tuple[int, int], Roles] = {}

    def _of(self, block: int, caption: int) -> Roles:
        bucket = int(self.dataset.index.bucket[block])
        if (bucket, caption) not in self._roles:
            self._roles[bucket, caption] = Roles(
                self.dataset.manifest, self.dataset.spec.buckets[bucket], self.resolution, caption
            )
        return self._roles[bucket, caption]

    def direct(self, block: int) -> bool:
        """Whether rows can be read into the caller's memory without a copy: never, they are decoded."""
        return False

    def files(self, block: int, caption: int = 0) -> list[tuple[str, int]]:
        """The file that a block is read from, and the bytes that are read of it."""
        stored, _ = self._files.of(block, self._of(block, caption).names)
        return [(self.dataset.index.file(block, ""), stored)]

    def size(self, block: int, caption: int = 0) -> int:
        """Bytes of a block in memory."""
        roles, rows = self._of(block, caption), int(self.dataset.index.rows[block])
        _, text = self._files.of(block, roles.text)
        return rows * roles.row_bytes + 2 * text

    def read(self, block: int, caption: int = 0, *memory: Bytes) -> Block:
        """Reads a whole block, into memory of its own (`memory` is for readers that fill it).

        Raises:
            CorruptShard: the file is not the one that was indexed, its bytes cannot be decoded or would take more memory
                than its rows can need, or a row is not what the column map promises.
            StorageError: the store refuses.
        """
        index, roles = self.dataset.index, self._of(block, caption)
        rows, row_group = int(index.rows[block]), int(index.row_group[block])
        footer = self.footer(block)
        with self._place(block) as (name, ranges):
            decoder = Decoder(footer, name, row_group, rows, roles.expected, check=self._check)
            end = int(self._files.file_bytes[block] - self._files.footer_bytes[block])
            into = _pooled if decoder.lasts else self._memory
            decoder.fetch(ranges, end, int(self._files.file_bytes[block]), into)
            table, plain = decoder.decode(plain=True)
        lists = any(column.width and column.name not in plain for column in roles.expected)
        with self._lists if lists else contextlib.nullcontext():
            return roles.block(table, plain, name, row_group, rows)

    def footer(self, block: int) -> Footer:
        """The footer of a block's file, from memory or with one read. CorruptShard when it is not the indexed one."""
        with self._place(block) as (name, ranges):
            return self._footers.get(
                ranges,
                name,
                file_bytes=int(self._files.file_bytes[block]),
                footer_bytes=int(self._files.footer_bytes[block]),
                crc32=int(self._files.footer_crc32[block]),
            )

    def _memory(self, size: int) -> memoryview:
        """This thread's memory for what is stored, reused: pyarrow copies while it decodes, fresh pages cost more."""
        kept: Bytes | None = getattr(self._scratch, "stored", None)
        if kept is None or len(kept) < size:
            kept = self._scratch.stored = np.empty(size, np.uint8)
        return kept.data[:size]

    @contextlib.contextmanager
    def _place(self, block: int) -> Iterator[tuple[str, Ranges]]:
        """A block's file and its reader. Errors of reading get the shard and the row group."""
        name, row_group = self.dataset.index.file(block, ""), int(self.dataset.index.row_group[block])
        try:
            yield name, self._ranges(name)
        except FileNotFoundError:
            raise CorruptShard("the file is missing", shard=name, row_group=row_group) from None
        except FileCutShort as error:
            raise CorruptShard(
                f"the file is cut short: {error.message}", shard=name, row_group=row_group
            ) from None
        except FileReplaced as error:
            raise CorruptShard(error.message, shard=name, row_group=row_group, hint=REPLACED) from None
        except StorageError as error:
            message = f"cannot read shard {name}, row group {row_group}: {error.message}"
            raise StorageError(message, where=error.where, hint=error.hint) from error


class Decoder:
    """Some columns of one row group: fetched in one read where they lie together, bounded, decoded."""

    def __init__(
        self,
        footer: Footer,
        shard: str,
        row_group: int,
        rows: int,
        expected: Sequence[Expected],
        *,
        check: bool = True,
    ) -> None:
        self._footer, self._shard, self._row_group, self._rows = footer, shard, row_group, rows
        self._expected, self._check = expected, check
        told = footer.metadata.num_row_groups
        if row_group >= told or footer.metadata.row_group(row_group).num_rows != rows:
            raise self._corrupt("its footer has other rows than the index lists", None)
        self._chunks: dict[str, list[Chunk]] = {}
        for column in expected:
            if column.name not in footer.leaves:
                raise self._corrupt("the file has no such column", column.name)
            self._chunks[column.name] = footer.chunks(row_group, column.name)
        self._pages: dict[str, Pages] = {}
        self.lasts = all(
            chunk.codec == "UNCOMPRESSED" and chunk.flat
            for column in expected
            if column.width
            for chunk in self._chunks[column.name]
        )
        """Whether the fetched bytes must last as long as the rows, which may be views of them."""
        self._file = _Memory()

    def fetch(
        self, ranges: Ranges, end: int, file_bytes: int, memory: Callable[[int], memoryview] | None = None
    ) -> None:
        """Reads the chunks' bytes, which must lie before `end`.

        Args:
            memory: bytes -> memory to read into, which stays untouched until the columns are decoded.
        """
        wanted = sorted((c.start, c.start + c.stored) for chunks in self._chunks.values() for c in chunks)
        for name, chunks in self._chunks.items():
            if any(c.start < 4 or c.stored < 0 or c.start + c.stored > end for c in chunks):
                raise self._corrupt("its footer gives it bytes that the file does not have", name)
        joined: list[list[int]] = []
        for start, stop in wanted:
            if joined and start <= joined[-1][1] + MAX_GAP:
                joined[-1][1] = max(stop, joined[-1][1])
            else:
                joined.append([start, stop])
        if memory is None or not ranges.direct:
            parts = [
                (start, ranges.read(self._shard, start, stop - start, file_bytes=file_bytes))
                for start, stop in joined
            ]
        else:
            parts, left = [], memory(sum(stop - start for start, stop in joined))
            for start, stop in joined:
                into, left = left[: stop - start], left[stop - start :]
                ranges.scatter(self._shard, start, [into], file_bytes=file_bytes)
                parts.append((start, into))
        self._file = _Memory(parts, file_bytes)

    def decode(self, *, plain: bool = False) -> tuple[Any, dict[str, Bytes]]:
        """What has the columns, as a pyarrow table has, but not those of raw bytes of one width: their rows, [rows, width].

        Args:
            plain: otherwise all columns are in a table. With it, other arrays are decoded when they are asked for, one
                at a time, which must be before the next :meth:`fetch` of the thread.
        """
        self._bound()
        found: dict[str, Bytes] = {}
        for column in self._expected if plain else ():
            rows = self._plain(column)
            if rows is not None:
                found[column.name] = rows
        left = [column for column in self._expected if column.name not in found]
        if not plain:
            return self.table(left), found
        return _Columns(self, self.table([c for c in left if not c.width]), {c.name: c for c in left}), found

    def _plain(self, column: Expected) -> Bytes | None:
        (chunk, *more), pages = self._chunks[column.name], self._pages.get(column.name)
        fixed = chunk.kind == "FIXED_LEN_BYTE_ARRAY"
        if not column.width or more or pages is None or not chunk.flat or chunk.levels[0] > 1:
            return None
        if not fixed and chunk.kind != "BYTE_ARRAY":
            return None
        return plain_rows(
            self._file.view(chunk.start, chunk.stored),
            pages.pages,
            rows=self._rows,
            width=column.width,
            codec=chunk.codec,
            fixed=fixed,
            optional=chunk.levels[0] == 1,
            lasts=self.lasts,
            check=self._check,
        )

    def table(self, columns: Sequence[Expected]) -> Any:
        """A pyarrow table of these columns. CorruptShard names the one that cannot be decoded."""
        if not columns:
            return pa.table({})
        names, batch = [column.name for column in columns], self._batch(columns)
        try:
            return self._read(names, batch)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            message = f"cannot be decoded: {error}"
        # pyarrow does not say which column it was.
        for name in names:
            try:
                self._read([name], batch)
            except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
                raise self._corrupt(f"cannot be decoded: {error}", name) from None
        raise self._corrupt(message, None)

    def _read(self, names: list[str], batch: int | None) -> Any:
        file = pq.ParquetFile(
            pa.PythonFile(self._file, "r"),
            metadata=self._footer.metadata,
            pre_buffer=False,
            page_checksum_verification=self._check,
        )
        if batch is None:
            table = file.read_row_group(self._row_group, columns=names, use_threads=False)
        else:
            batches, decoded = [], 0
            allowed = sum(column.decoded(self._rows) for column in self._expected)
            for part in file.iter_batches(
                batch_size=batch, row_groups=[self._row_group], columns=names, use_threads=False
            ):
                decoded += part.nbytes
                if decoded > allowed:
                    raise ValueError(f"its {self._rows} rows take more than {allowed} bytes")
                batches.append(part)
            table = pa.Table.from_batches(batches)
        if table.num_rows != self._rows:
            raise ValueError(f"it has {table.num_rows} rows, the index {self._rows}")
        return table

    def _bound(self) -> None:
        """Refuses chunks that claim more than their rows can need."""
        for column in self._expected:
            allowed = column.decoded(self._rows)
            for chunk in self._chunks[column.name]:
                values = self._rows if chunk.flat else self._rows * max(1, column.values)
                self._refuse_above(chunk.decoded, allowed, column.name)
                self._refuse_above(chunk.values, values, column.name, "values")
                if chunk.codec == "UNCOMPRESSED" and chunk.flat and not chunk.dictionary and not column.width:
                    continue
                try:
                    pages = self._pages[column.name] = walk(self._file.view(chunk.start, chunk.stored))
                except ValueError as error:
                    raise self._corrupt(f"cannot be decoded: {error}", column.name) from None
                self._refuse_above(pages.decoded, allowed, column.name)
                self._refuse_above(pages.values, values, column.name, "values")

    def _batch(self, columns: Sequence[Expected]) -> int | None:
        """How many rows pyarrow may decode at once; None for all.

        A value of a dictionary may be as long as its page, and every row may be that value. Of lists all values count.
        """
        words = [
            self._pages[column.name].dictionary
            for column in columns
            if column.name in self._pages and self._chunks[column.name][0].flat
        ]
        usual = sum(column.bytes(self._rows) for column in columns)
        if self._rows * sum(words) <= usual + _MAX_RISK:
            return None
        return max(1, _BATCH_BYTES // max(words))

    def _refuse_above(self, told: int, allowed: int, column: str, what: str = "bytes") -> None:
        if told > allowed:
            message = f"it claims {told} {what}; {self._rows} rows have at most {allowed}"
            raise self._corrupt(message, column)

    def _corrupt(self, message: str, column: str | None) -> CorruptShard:
        return CorruptShard(message, shard=self._shard, row_group=self._row_group, column=column)


def _pooled(size: int) -> memoryview:
    return allocate(size).data


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of a row group: the small ones decoded, the others when they are asked for."""

    decoder: Decoder
    table: Any
    expected: Mapping[str, Expected]

    def column(self, name: str) -> Any:
        """A pyarrow ChunkedArray."""
        table = self.table
        if name not in table.column_names:
            table = self.decoder.table([self.expected[name]])
        return table.column(name)


class _Memory(io.RawIOBase):
    """A file of which only some parts are there, in memory; slices are handed on without a copy."""

    def __init__(self, parts: Sequence[tuple[int, memoryview]] = (), size: int = 0) -> None:
        super().__init__()
        self._parts, self._size, self._at = parts, size, 0

    def view(self, start: int, length: int) -> memoryview:
        """Bytes of the file. OSError when they were not fetched."""
        for begin, data in self._parts:
            if begin <= start < begin + len(data):
                return data[start - begin : start - begin + length]
        raise OSError(f"bytes {start} to {start + length} are not those of the columns")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> Any:
        if size <= 0:
            return b""
        data = self.view(self._at, size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at
