"""The sibling with what else is told of the samples: its pages, which may hold nulls, and a reader of it alone.

A null is NaN in memory, or an empty text: neither can be stored otherwise. Whoever looks at few columns of all rows reads
the files in pieces of some megabytes (:func:`scan`), not chunk by chunk, which of ten million rows would be many requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard
from isthmus.storage.shards.blocks import Block, Bytes
from isthmus.storage.shards.layout import FIELDS, Column, columns_of, decode_strings, page_of

if TYPE_CHECKING:
    from isthmus.storage.shards.rewrite_source import Source

RUN_BYTES = 4 << 20
"""That are read at once."""
THREADS = 4


def take(block: Block, column: Column, chunk: Bytes) -> None:
    """Decodes a column chunk of any kind into a block. ValueError when it does not hold the block's rows."""
    if not column.kind.endswith("?"):
        block.take(column, chunk)
        return
    told, values = split_page(page_of(chunk.data), block.rows)
    count = int(told.sum())
    if column.kind == "number?":
        if len(values) != 8 * count:
            raise ValueError("the page does not hold one number for each row that has one")
        numbers = np.full(block.rows, np.nan)
        numbers[told] = np.frombuffer(values, "<f8")
        block.numbers[column.name] = numbers
        return
    words = decode_strings(values, count)
    if count < block.rows:
        rest = iter(words)
        words = [next(rest) if there else "" for there in told.tolist()]
    block.strings[column.name] = words


def split_page(page: memoryview, rows: int) -> tuple[NDArray[np.bool_], memoryview]:
    """Which rows of a page of nullable values are told, [rows], and the values of those.

    Reads the definition levels of one bit that parquet puts before the values (its RLE / bit-packed hybrid).

    Raises:
        ValueError: the levels do not fit the rows.
    """
    size = int.from_bytes(page[:4], "little")
    levels, at, parts, left = page[4 : 4 + size], 0, list[NDArray[np.uint8]](), rows
    if len(levels) < size or len(page) < 4:
        raise ValueError("the page ends within its definition levels")
    while left > 0:
        head, at = _varint(levels, at)
        if head & 1:
            packed = np.frombuffer(levels[at : at + (head >> 1)], np.uint8)
            if len(packed) < head >> 1 or not head >> 1:
                raise ValueError("the definition levels are cut short")
            part = np.unpackbits(packed, bitorder="little")[:left]
            at += head >> 1
        else:
            if at >= len(levels) or levels[at] > 1 or not head >> 1:
                raise ValueError("the definition levels are cut short")
            part = np.full(min(head >> 1, left), levels[at], np.uint8)
            at += 1
        parts.append(part)
        left -= len(part)
    told = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return told.astype(np.bool_), page[4 + size :]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 35:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("the definition levels are cut short")


def scan(
    source: Source, names: Sequence[str], convert: Callable[[Column, Bytes, int], object] | None = None
) -> Iterator[tuple[int, dict[str, object]]]:
    """Some fields of every block, in order: the block's number, and field -> values.

    Args:
        convert: of our own layout: column, its chunk (checked) and rows -> values. By default, and of files that others
            made: numbers [rows] with NaN, or a list of text.

    Raises:
        CorruptShard: the bytes are not those that the index lists.
        StorageError: the store refuses.
    """
    from isthmus.storage.shards.rewrite_source import in_order

    if source.dataset.manifest.columns is not None:
        blocks = range(len(source.dataset.index))
        yield from in_order(lambda number: (number, source.small(number, names)), blocks, THREADS)
        return
    index, spec = source.dataset.index, source.dataset.spec
    ranges = index.sibling(FIELDS)
    columns = [(at, column) for at, column in enumerate(columns_of(spec, FIELDS)) if column.name in names]
    sizes = ranges.length.sum(axis=1)

    def read(run: range) -> list[tuple[int, dict[str, object]]]:
        start = int(ranges.offset[run.start])
        last = run.stop - 1
        stop = int(ranges.offset[last]) + int(sizes[last])
        for attempt in range(2):
            data = source.piece(run.start, FIELDS, start, stop - start)
            wrong = _wrong(source, data, run, start, [at for at, _ in columns])
            if wrong is None:
                break
            if attempt:  # a checksum that differs twice is not the way's fault
                raise CorruptShard(
                    "its bytes have another checksum than the index lists",
                    shard=index.file(wrong[0], FIELDS),
                    row_group=int(index.row_group[wrong[0]]),
                    column=ranges.columns[wrong[1]],
                )
        found = []
        for number in run:
            rows = int(index.rows[number])
            values: dict[str, object] = {}
            for at, column in columns:
                begin = ranges.start(number, at) - start
                chunk = data[begin : begin + int(ranges.length[number, at])]
                try:
                    values[column.name] = (convert or _values)(column, chunk, rows)
                except ValueError as error:
                    raise CorruptShard(
                        f"unreadable: {error}",
                        shard=index.file(number, FIELDS),
                        row_group=int(index.row_group[number]),
                        column=column.name,
                    ) from None
            found.append((number, values))
        return found

    for part in in_order(read, _runs(source), THREADS, ahead=2):
        yield from part


def _values(column: Column, chunk: Bytes, rows: int) -> object:
    block = Block(rows)
    take(block, column, chunk)
    return block.numbers[column.name] if column.name in block.numbers else block.strings[column.name]


def _wrong(
    source: Source, data: Bytes, run: range, start: int, columns: Sequence[int]
) -> tuple[int, int] | None:
    """The first block and column whose bytes have another checksum than the index lists."""
    ranges = source.dataset.index.sibling(FIELDS)
    for number in run:
        for at in columns:
            begin = ranges.start(number, at) - start
            chunk = data[begin : begin + int(ranges.length[number, at])]
            if zlib.crc32(chunk.data) != int(ranges.crc32[number, at]):
                return number, at
    return None


def _runs(source: Source) -> Iterator[range]:
    """Blocks of one file that lie one behind the other, up to `RUN_BYTES` of them."""
    index = source.dataset.index
    ranges = index.sibling(FIELDS)
    sizes, shards, offsets = ranges.length.sum(axis=1).tolist(), index.shard.tolist(), ranges.offset.tolist()
    first, size = 0, 0
    for number in range(len(index)):
        if number > first and (
            shards[number] != shards[first]
            or size + sizes[number] > RUN_BYTES
            or offsets[number] != offsets[number - 1] + sizes[number - 1]
        ):
            yield range(first, number)
            first, size = number, 0
        size += sizes[number]
    yield range(first, len(index))
