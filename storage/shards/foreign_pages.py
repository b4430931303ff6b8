"""What the pages of a column chunk say they hold, read from their headers before anything is decoded.

A footer's and a page's claims are only claims: a few kilobytes of zstd can unpack to gigabytes, a run-length code of
eight bytes can stand for billions of values, and a decoder allocates what it is told. Walking the headers (thrift's
compact protocol, parquet-format) costs microseconds a page and bounds what decoding can allocate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
"""Kinds of pages."""
_ABOUT = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}  # where a header says more about a page of this kind
_MAX_DEPTH = 4
_INTEGERS = (4, 5, 6)  # i16, i32, i64
_USUAL_HEADER, _MAX_HEADER = 128, 1 << 20  # statistics in a header may hold whole values


@dataclass(frozen=True, slots=True)
class Page:
    """One page, as its header describes it."""

    kind: int
    start: int
    """Offset in the chunk of what follows the header."""
    packed: int
    """Bytes in the file."""
    unpacked: int
    """Bytes without compression."""
    crc: int | None
    fields: dict[int, Any]
    """Of the header's part for this kind, by their number in parquet.thrift."""


@dataclass(frozen=True, slots=True)
class Pages:
    """A column chunk, as its page headers describe it."""

    pages: list[Page]
    values: int
    """Of all data pages; of a list column its elements, and one for each row that has none."""
    decoded: int
    """Bytes of all pages without compression."""
    dictionary: int
    """Bytes of the dictionary page without compression, 0 when there is none."""


def walk(chunk: memoryview) -> Pages:
    """Reads the page headers of a column chunk.

    Raises:
        ValueError: they are not page headers, or a page reaches beyond the chunk.
    """
    at = values = decoded = dictionary = 0
    pages = []
    while at < len(chunk):
        end, fields = _header(chunk, at)
        kind, unpacked, packed = _number(fields, 1), _number(fields, 2), _number(fields, 3)
        start = at + end
        at = start + packed
        if at > len(chunk):
            raise ValueError("a page reaches beyond its column chunk")
        decoded += unpacked
        if kind == INDEX:
            continue
        if kind not in _ABOUT:
            raise ValueError(f"a page is of unknown kind {kind}")
        about = fields.get(_ABOUT[kind])
        if not isinstance(about, dict):
            raise ValueError(f"a page header lacks field {_ABOUT[kind]}")
        if kind == DICTIONARY:
            dictionary += unpacked
        else:
            values += _number(about, 1)
        crc = fields.get(4)
        pages.append(Page(kind, start, packed, unpacked, crc if isinstance(crc, int) else None, about))
    return Pages(pages, values, decoded, dictionary)


def _header(chunk: memoryview, at: int) -> tuple[int, dict[int, Any]]:
    """The header at `at`: its length, and its fields."""
    for size in (_USUAL_HEADER, _MAX_HEADER):
        # As bytes, which are faster to index than a view.
        try:
            return _struct(bytes(chunk[at : at + size]), 0, 0)
        except IndexError:
            continue
    raise ValueError("a page header is cut short")


def _number(fields: dict[int, Any], field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a page header lacks field {field}")
    return value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number in a page header is too long")


def _struct(data: bytes, at: int, depth: int) -> tuple[int, dict[int, Any]]:
    """End of the struct at `at`, and its fields that are integers or structs, by id."""
    if depth > _MAX_DEPTH:
        raise ValueError("a page header is nested too deep")
    fields: dict[int, Any] = {}
    identifier = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return at, fields
        kind = head & 15
        if head > 15:
            identifier += head >> 4
        else:
            raw, at = _varint(data, at)
            identifier = (raw >> 1) ^ -(raw & 1)
        if kind in _INTEGERS:
            raw = data[at]
            at += 1
            if raw > 0x7F:
                raw, at = _varint(data, at - 1)
            fields[identifier] = (raw >> 1) ^ -(raw & 1)
        elif kind == 12:
            at, fields[identifier] = _struct(data, at, depth + 1)
        elif kind == 8:  # binary
            length, at = _varint(data, at)
            at += length
        elif kind == 3:
            at += 1
        elif kind in (1, 2):
            fields[identifier] = kind == 1
        else:
            raise ValueError(f"a field of unknown kind {kind} in a page header")
