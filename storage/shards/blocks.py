"""Reads blocks: whole, with checksums checked and columns as views of memory, or rows of them straight into batches."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard, StorageError
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced, Ranges
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.layout import (
    Column,
    columns_of,
    decode_bools,
    decode_strings,
    latent_sibling,
    page_header,
    text_sibling,
)

Bytes = NDArray[np.uint8]

_WRONG = "its bytes have another checksum than the index lists"
MAX_GAP = 1 << 16
"""Bytes that are read and thrown away rather than asked for around."""


@dataclass(slots=True)
class Block:
    """The columns of one block, as one caption and one resolution give them."""

    rows: int
    fixed: dict[str, Bytes] = field(default_factory=dict)
    """Column -> [rows, bytes of a row]: little-endian fp16 in C-order."""
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Column -> [rows], int32 or bool."""
    strings: dict[str, list[str]] = field(default_factory=dict)
    """Column -> rows strings."""

    def take(self, column: Column, chunk: Bytes) -> None:
        """Decodes a column chunk. ValueError when it does not hold the block's rows."""
        if column.width is not None:
            values = chunk[len(chunk) - self.rows * column.width :].reshape(self.rows, column.width)
            if column.kind == "bytes":
                self.fixed[column.name] = values
            else:
                # A copy: the chunk may lie in memory that the next part of the block is read into.
                self.numbers[column.name] = values.copy().view("<i4")[:, 0]
            return
        view = chunk.data
        header, length = page_header(view[:4096])
        page = view[header:]
        if len(page) != length:
            raise ValueError("the page does not fill its column chunk")
        if column.kind == "string":
            self.strings[column.name] = decode_strings(page, self.rows)
        else:
            self.numbers[column.name] = decode_bools(page, self.rows)


class Blocks(Protocol):
    """Reads the blocks of a dataset at one resolution; safe to share between threads."""

    fills: bool
    """`read` fills the memory that it is given; else a block stands in memory of its own."""

    def direct(self, block: int) -> bool:
        """Whether rows of a block can be read into the caller's memory without a copy."""

    def files(self, block: int, caption: int = 0) -> list[tuple[str, int]]:
        """The files that a block is read from, and the bytes that are read of each."""

    def size(self, block: int, caption: int = 0) -> int:
        """Bytes of a block in memory."""

    def read(self, block: int, caption: int = 0, *memory: Bytes) -> Block:
        """A whole block, in the memory that is given if the reader fills it."""


def block_reader(
    dataset: Dataset,
    resolution: int,
    *,
    check: bool = True,
    ranges: Callable[[str], Ranges] | None = None,
) -> Blocks:
    """The reader that suits a dataset's files: ours, or those that others made."""
    if dataset.manifest.columns is not None:
        from isthmus.storage.shards.foreign import ForeignReader

        return ForeignReader(dataset, resolution, ranges, check=check)
    from isthmus.storage.shards.rows import RowReader

    return RowReader(dataset, resolution, check=check, ranges=ranges)


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns that lie one behind the other in a sibling file."""

    sibling: str
    columns: tuple[Column, ...]
    first: int
    """Position of the first of them among the sibling's columns."""


class BlockReader:
    """Reads the blocks of a dataset at one resolution; safe to share between threads.

    Args:
        dataset: what to read.
        resolution: names the latents' sibling.
        check: compare checksums while reading whole blocks.
        ranges: file name -> the reader of its bytes; by default one for each of the dataset's roots.
    """

    fills = True

    def __init__(
        self,
        dataset: Dataset,
        resolution: int,
        *,
        check: bool = True,
        ranges: Callable[[str], Ranges] | None = None,
    ) -> None:
        self.dataset, self.resolution, self.check = dataset, resolution, check
        self._ranges = ranges or dataset.ranges
        self._parts_of: dict[tuple[int, int], tuple[_Part, ...]] = {}
        self._scratch = threading.local()

    def direct(self, block: int) -> bool:
        """Whether a part of the block's rows can be read into the caller's memory without a copy."""
        name = self.dataset.index.file(block, latent_sibling(self.resolution))
        return self._ranges(name).direct

    def _parts(self, block: int, caption: int) -> tuple[_Part, ...]:
        """What to read: of the first caption all text columns; of a further one its own, and the sample's from `text`."""
        bucket = int(self.dataset.index.bucket[block])
        if (bucket, caption) not in self._parts_of:
            spec = self.dataset.spec
            shape = self.dataset.manifest.latent_shapes[spec.buckets[bucket]][self.resolution]
            text = columns_of(spec, "text")
            latents = columns_of(spec, latent_sibling(self.resolution), shape)
            parts = [_Part(latent_sibling(self.resolution), tuple(latents[1:]), 1)]
            if caption == 0:
                parts.append(_Part("text", tuple(text), 0))
            else:
                sample = next(at for at, column in enumerate(text) if column.name == "flipped") + 1
                further = columns_of(spec, text_sibling(caption))
                parts.append(_Part("text", tuple(text[:sample]), 0))
                parts.append(_Part(text_sibling(caption), tuple(further[1:]), 1))
            self._parts_of[bucket, caption] = tuple(parts)
        return self._parts_of[bucket, caption]

    def files(self, block: int, caption: int = 0) -> list[tuple[str, int]]:
        """The files that a block is read from, and the bytes that are read of each."""
        index = self.dataset.index
        return [
            (index.file(block, part.sibling), sum(self._lengths(block, part)))
            for part in self._parts(block, caption)
        ]

    def size(self, block: int, caption: int = 0) -> int:
        """Bytes that :meth:`read` needs for a block."""
        return sum(sum(self._lengths(block, part)) for part in self._parts(block, caption))

    def _lengths(self, block: int, part: _Part) -> list[int]:
        """Bytes of each column chunk."""
        lengths = self.dataset.index.sibling(part.sibling).length
        found: list[int] = lengths[block, part.first : part.first + len(part.columns)].tolist()
        return found

    def read(self, block: int, caption: int = 0, *memory: Bytes) -> Block:
        """Reads a whole block.

        Args:
            block: position in the dataset's index.
            caption: which of the captions.
            memory: one buffer of at least :meth:`size` bytes, of which the result's columns are views; fresh memory
                without it.

        Raises:
            CorruptShard: a checksum differs, also when read again, or the bytes are not what the index says.
            StorageError: the store refuses.
        """
        result = Block(int(self.dataset.index.rows[block]))
        at = 0
        for part in self._parts(block, caption):
            lengths = self._lengths(block, part)
            size = sum(lengths)
            into = memory[0][at : at + size] if memory else None
            at += size
            data = self._read_part(block, part, size, into)
            wrong = self._wrong_column(block, part, lengths, data)
            if wrong is not None:
                # Damage on the way, or in a cache, is not there when it is read again.
                self._discard(block, part)
                data = self._read_part(block, part, size, into)
                wrong = self._wrong_column(block, part, lengths, data)
            if wrong is not None:
                raise self._corrupt(_WRONG, block, part, wrong)
            start = 0
            for column, length in zip(part.columns, lengths, strict=True):
                self._take(result, block, part, column, data[start : start + length])
                start += length
        return result

    def _read_part(self, block: int, part: _Part, size: int, into: Bytes | None) -> Bytes:
        start = self.dataset.index.sibling(part.sibling).start(block, part.first)
        with self._place(block, part) as (name, ranges, file_bytes):
            if into is not None:
                ranges.scatter(name, start, [into.data], file_bytes=file_bytes)
                return into
            return np.frombuffer(ranges.read(name, start, size, file_bytes=file_bytes), np.uint8)

    def _wrong_column(self, block: int, part: _Part, lengths: Sequence[int], data: Bytes) -> str | None:
        """The first column whose checksum differs."""
        if not self.check:
            return None
        told = self.dataset.index.sibling(part.sibling).crc32
        start = 0
        for number, (column, length) in enumerate(zip(part.columns, lengths, strict=True)):
            if zlib.crc32(data[start : start + length].data) != int(told[block, part.first + number]):
                return column.name
            start += length
        return None

    def scatter(
        self,
        block: int,
        caption: int,
        rows: range,
        slots: Mapping[str, Sequence[memoryview]],
    ) -> Block:
        """Reads rows of a block, those of fixed width straight into the caller's memory.

        Args:
            rows: which, without gaps. Checksums are compared, if at all, where these are all of the block's.
            slots: fixed-width column -> for each row, where its bytes go; no two in the same place if checksums are compared.

        Returns the rows' numbers and strings.

        Raises:
            CorruptShard, StorageError: as :meth:`read`.
        """
        result = Block(int(self.dataset.index.rows[block]))
        check = self.check and len(rows) == result.rows
        for part in self._parts(block, caption):
            lengths = self._lengths(block, part)
            start = self.dataset.index.sibling(part.sibling).start(block, part.first)
            # Small columns are decoded from memory of this thread's; so are, if anybody looks, the headers of others.
            small = self._small(
                sum(
                    length - (result.rows * c.width if c.kind == "bytes" and c.width else 0)
                    for c, length in zip(part.columns, lengths, strict=True)
                )
            )
            pieces: list[tuple[int, Sequence[memoryview], int]] = []  # offset, views, bytes
            chunks: list[tuple[Column, Sequence[memoryview]]] = []
            used = 0
            for column, length in zip(part.columns, lengths, strict=True):
                views: Sequence[memoryview] = ()
                if column.kind == "bytes":
                    assert column.width is not None
                    size = len(rows) * column.width
                    first = length - (result.rows - rows.start) * column.width
                    views = slots[column.name]
                    if check:
                        views = [small[used : used + first].data, *views]
                        used, size, first = used + first, length, 0
                    pieces.append((start + first, views, size))
                elif column.name != "source":
                    views = [small[used : used + length].data]
                    pieces.append((start, views, length))
                    used += length
                chunks.append((column, views))
                start += length
            wrong = self._fill(block, part, pieces, chunks if check else ())
            if wrong is not None:
                self._discard(block, part)
                wrong = self._fill(block, part, pieces, chunks)
            if wrong is not None:
                raise self._corrupt(_WRONG, block, part, wrong)
            for column, views in chunks:
                if column.kind != "bytes" and views:
                    self._take(result, block, part, column, np.frombuffer(views[0], np.uint8))
        for strings in result.strings:
            result.strings[strings] = result.strings[strings][rows.start : rows.stop]
        for number in result.numbers:
            result.numbers[number] = result.numbers[number][rows.start : rows.stop]
        result.rows = len(rows)
        return result

    def _fill(
        self,
        block: int,
        part: _Part,
        pieces: Sequence[tuple[int, Sequence[memoryview], int]],
        chunks: Sequence[tuple[Column, Sequence[memoryview]]],
    ) -> str | None:
        """Reads pieces of a part; the first column, of those given with all their bytes, whose checksum differs."""
        with self._place(block, part) as (name, ranges, file_bytes):
            for offset, views in self._joined(pieces):
                ranges.scatter(name, offset, views, file_bytes=file_bytes)
        told = self.dataset.index.sibling(part.sibling).crc32
        for number, (column, pieces_of_it) in enumerate(chunks):
            crc = 0
            for piece in pieces_of_it:
                crc = zlib.crc32(piece, crc)
            if pieces_of_it and crc != int(told[block, part.first + number]):
                return column.name
        return None

    def _joined(
        self, pieces: Sequence[tuple[int, Sequence[memoryview], int]]
    ) -> Iterator[tuple[int, list[memoryview]]]:
        """Reads of neighbouring pieces in one go, small gaps read into nowhere."""
        nowhere = self._nowhere()
        begin, end, views = pieces[0][0], pieces[0][0], list[memoryview]()
        for offset, more, size in pieces:
            gap = offset - end
            if gap > MAX_GAP:
                yield begin, views
                begin, views = offset, []
            elif gap:
                views.append(nowhere[:gap])
            views.extend(more)
            end = offset + size
        yield begin, views

    def _small(self, size: int) -> Bytes:
        """This thread's memory for the columns that are decoded at once."""
        kept: Bytes | None = getattr(self._scratch, "small", None)
        if kept is None or len(kept) < size:
            kept = self._scratch.small = np.empty(max(size, 1 << 16), np.uint8)
        return kept

    def _nowhere(self) -> memoryview:
        kept: memoryview | None = getattr(self._scratch, "nowhere", None)
        if kept is None:
            kept = self._scratch.nowhere = memoryview(bytearray(MAX_GAP))
        return kept

    def _take(self, result: Block, block: int, part: _Part, column: Column, chunk: Bytes) -> None:
        try:
            result.take(column, chunk)
        except ValueError as error:
            raise self._corrupt(f"unreadable: {error}", block, part, column.name) from None

    def _discard(self, block: int, part: _Part) -> None:
        """A damaged copy on this node is not read again."""
        name = self.dataset.index.file(block, part.sibling)
        discard = getattr(self._ranges(name), "discard", None)
        if discard is not None:
            discard(name)

    def _corrupt(self, message: str, block: int, part: _Part, column: str | None = None) -> CorruptShard:
        index = self.dataset.index
        return CorruptShard(
            message,
            shard=index.file(block, part.sibling),
            row_group=int(index.row_group[block]),
            column=column,
        )

    @contextlib.contextmanager
    def _place(self, block: int, part: _Part) -> Iterator[tuple[str, Ranges, int]]:
        """A part's file, its reader and its size. Errors of reading get the shard and the row group."""
        index = self.dataset.index
        name = index.file(block, part.sibling)
        try:
            yield name, self._ranges(name), int(index.sibling(part.sibling).file_bytes[block])
        except FileNotFoundError:
            raise self._corrupt("the file is missing", block, part) from None
        except FileCutShort as error:
            raise self._corrupt(f"the file is cut short: {error.message}", block, part) from None
        except FileReplaced as error:
            raise self._corrupt(error.message, block, part) from None
        except StorageError as error:
            message = f"cannot read shard {name}, row group {int(index.row_group[block])}: {error.message}"
            raise StorageError(message, where=error.where, hint=error.hint) from error
