"""Raw bytes of one width, decoded straight into rows: what most foreign files hold, faster than through arrow.

pyarrow appends each value to a buffer that it grows, because it cannot know that all are equally long; here the rows'
width is known. Whatever is not entirely regular (a null, another length, an odd encoding, damage) is left to pyarrow,
whose rows are then looked at one by one: this path returns None and never an error.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.storage.shards.foreign_arrays import Bytes, allocate
from isthmus.storage.shards.foreign_pages import DATA, DATA_V2, DICTIONARY, Page

_CODECS = {
    "UNCOMPRESSED": None,
    "SNAPPY": "snappy",
    "ZSTD": "zstd",
    "GZIP": "gzip",
    "LZ4": "lz4_raw",  # pyarrow's name in a footer for LZ4_RAW; a Hadoop-framed page fails and is left to pyarrow
    "BROTLI": "brotli",
}
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8
_MAX_BITS = 16  # of a dictionary's indices; more entries than rows can be are left to pyarrow


def plain_rows(
    chunk: memoryview,
    pages: list[Page],
    *,
    rows: int,
    width: int,
    codec: str,
    fixed: bool,
    optional: bool,
    lasts: bool,
    check: bool,
) -> Bytes | None:
    """The values of a flat column chunk, uint8 [rows, width]; None: not this simple.

    Args:
        lasts: the chunk's memory stays as it is, so that uncompressed values may be views of it.
        fixed: the column is of fixed-size binary, otherwise each value has its length before it.
        optional: the column may have nulls, and so has definition levels.
        check: compare the pages' checksums.
    """
    if codec not in _CODECS:
        return None
    try:
        lasts = lasts or _CODECS[codec] is not None
        return _Chunk(chunk, _CODECS[codec], rows, width, fixed, optional, lasts, check).decode(pages)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, pa.ArrowException):
        return None


class _Odd(ValueError):
    """Not as regular as this path needs."""


class _Chunk:
    def __init__(
        self,
        data: memoryview,
        codec: str | None,
        rows: int,
        width: int,
        fixed: bool,
        optional: bool,
        lasts: bool,
        check: bool,
    ) -> None:
        self._data, self._rows, self._width = data, rows, width
        self._codec = None if codec is None else pa.Codec(codec)
        self._fixed, self._optional, self._lasts, self._check = fixed, optional, lasts, check
        self._words: Bytes | None = None

    def decode(self, pages: list[Page]) -> Bytes:
        rows: Bytes | None = None
        done = 0
        for page in pages:
            body = self._data[page.start : page.start + page.packed]
            if self._check and page.crc is not None and zlib.crc32(body) != page.crc & 0xFFFFFFFF:
                raise _Odd
            if page.kind == DICTIONARY:
                values = self._unpack(body, page.unpacked)
                self._words = self._plain(values, page.fields[1])
            elif page.kind in (DATA, DATA_V2):
                values = self._page(page, body)
                if rows is None and len(values) == self._rows and self._lasts:
                    rows = values
                else:
                    rows = (
                        allocate(self._rows * self._width).reshape(self._rows, -1) if rows is None else rows
                    )
                    rows[done : done + len(values)] = values
                done += len(values)
        if done != self._rows or rows is None:
            raise _Odd
        return rows

    def _page(self, page: Page, body: memoryview) -> Bytes:
        """A data page's values, [count, width], as views where they lie one behind the other."""
        count, fields = page.fields[1], page.fields
        if page.kind == DATA:
            encoding = fields[2]
            values = self._unpack(body, page.unpacked)
            if self._optional:
                length = int.from_bytes(values[:4].tobytes(), "little")
                _all_ones(values[4 : 4 + length], count)
                values = values[4 + length :]
        else:
            encoding, levels = fields[4], fields.get(5, 0) + fields.get(6, 0)
            if fields[2] or fields.get(6, 0):
                raise _Odd
            packed = fields.get(7, True)
            size = page.unpacked - levels
            values = self._unpack(body[levels:], size) if packed else np.frombuffer(body[levels:], np.uint8)
        if encoding == _PLAIN:
            return self._plain(values, count)
        if (
            encoding not in (_PLAIN_DICTIONARY, _RLE_DICTIONARY)
            or self._words is None
            or values[0] > _MAX_BITS
        ):
            raise _Odd
        indices = hybrid(values[1:], int(values[0]), count)
        first = int(indices[0])
        if (indices == np.arange(first, first + count)).all():
            # Arrays hardly ever repeat: the dictionary is a page of them in their order.
            return self._words[first : first + count]
        # Not take(): it would copy the whole dictionary first where each value has its length before it.
        found = np.empty((count, self._width), np.uint8)
        for row, at in enumerate(indices.tolist()):
            found[row] = self._words[at]
        return found

    def _unpack(self, body: memoryview, size: int) -> Bytes:
        if self._codec is None or not size:
            return np.frombuffer(body, np.uint8)
        unpacked = self._codec.decompress(body, decompressed_size=size, asbytes=False)
        values = np.frombuffer(unpacked, np.uint8)
        if len(values) != size:
            raise _Odd
        return values

    def _plain(self, values: Bytes, count: int) -> Bytes:
        """Values one behind the other, [count, width]."""
        if self._fixed:
            return values.reshape(count, self._width)
        framed = values.reshape(count, 4 + self._width)
        if (np.ascontiguousarray(framed[:, :4]).view("<u4") != self._width).any():
            raise _Odd
        return framed[:, 4:]


def _all_ones(levels: Bytes, count: int) -> None:
    if not hybrid(levels, 1, count).all():
        raise _Odd


def hybrid(data: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    """`count` numbers of parquet's mix of runs and bit-packed groups (parquet-format, Encodings.md: RLE).

    Raises:
        ValueError: the data end before, or are none of it.
    """
    found = np.zeros(count, np.int64)
    done = at = 0
    while done < count and bits:
        head = shift = 0
        while True:
            if at >= len(data) or shift > 32:
                raise ValueError("the runs end before their values")
            byte = int(data[at])
            at += 1
            head |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if head & 1:
            size = (head >> 1) * bits
            numbers: Any = np.unpackbits(data[at : at + size], bitorder="little")
            usable = len(numbers) // bits
            numbers = numbers[: usable * bits].reshape(usable, bits) @ (1 << np.arange(bits))
            at += size
        else:
            width = (bits + 7) // 8
            value = int.from_bytes(data[at : at + width].tobytes(), "little")
            at += width
            numbers = np.full(min(head >> 1, count - done), value)
        numbers = numbers[: count - done]
        if not len(numbers):
            raise ValueError("a run of no values")
        found[done : done + len(numbers)] = numbers
        done += len(numbers)
    return found
