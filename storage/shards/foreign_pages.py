"""What the pages of a column chunk say they hold, read from their headers before anything is decoded.

A footer's and a page's claims are only claims: a few kilobytes of zstd can unpack to gigabytes, a run-length code of
eight bytes can stand for billions of values, and a decoder allocates what it is told. Walking the headers (thrift's
compact protocol, parquet-format) costs microseconds a page and bounds what decoding can allocate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_MAX_DEPTH = 4
_MAX_HEADER = 1 << 20  # statistics in a header may hold whole values


@dataclass(frozen=True, slots=True)
class Pages:
    """A column chunk, as its page headers describe it."""

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
    while at < len(chunk):
        try:
            end, fields = _struct(chunk[at : at + _MAX_HEADER], 0, 0)
        except IndexError:
            raise ValueError("a page header is cut short") from None
        kind, unpacked, packed = (_number(fields, field) for field in (1, 2, 3))
        at += end + packed
        if at > len(chunk):
            raise ValueError("a page reaches beyond its column chunk")
        decoded += unpacked
        if kind == _DICTIONARY:
            dictionary += unpacked
        elif kind in (_DATA, _DATA_V2):
            values += _number(_inner(fields, 5 if kind == _DATA else 8), 1)
        elif kind != _INDEX:
            raise ValueError(f"a page is of unknown kind {kind}")
    return Pages(values, decoded, dictionary)


def _number(fields: dict[int, Any], field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a page header lacks field {field}")
    return value


def _inner(fields: dict[int, Any], field: int) -> dict[int, Any]:
    value = fields.get(field)
    if not isinstance(value, dict):
        raise ValueError(f"a page header lacks field {field}")
    return value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
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


def _struct(data: memoryview, at: int, depth: int) -> tuple[int, dict[int, Any]]:
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
        kind, step = head & 15, head >> 4
        if step:
            identifier += step
        else:
            raw, at = _varint(data, at)
            identifier = (raw >> 1) ^ -(raw & 1)
        if kind in (4, 5, 6):  # i16, i32, i64
            raw, at = _varint(data, at)
            fields[identifier] = (raw >> 1) ^ -(raw & 1)
        elif kind == 12:
            at, fields[identifier] = _struct(data, at, depth + 1)
        elif kind == 8:  # binary
            length, at = _varint(data, at)
            at += length
        elif kind == 3:
            at += 1
        elif kind not in (1, 2):  # true, false
            raise ValueError(f"a field of unknown kind {kind} in a page header")
