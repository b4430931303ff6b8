"""The strings and numbers of a block, read by themselves: a few kilobytes beside megabytes of arrays.

What `BlockReader.read` decodes column by column, here in few steps, since it is done for every block that is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.shards.layout import Column, decode_bools, decode_strings, page_of


@dataclass(frozen=True, eq=False, slots=True)
class Small:
    """Of all rows of a block."""

    keys: list[str]
    captions: list[str]
    numbers: dict[str, NDArray[np.int32]]
    """Column -> [rows]"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Columns that lie close to each other in a file, read in one go."""

    start: int
    """Offset in the file."""
    length: int
    columns: tuple[tuple[Column, int, int], ...]
    """Each with the offset of its chunk in the stretch, and the chunk's bytes."""


def stretches(columns: Sequence[Column], lengths: Sequence[int], start: int, *, gap: int) -> list[Stretch]:
    """The stretches of the small columns among `columns`, whose chunks lie one behind the other from `start` on.

    Args:
        gap: bytes that are read rather than asked for around.
    """
    found: list[tuple[int, int, list[tuple[Column, int, int]]]] = []
    at = start
    for column, length in zip(columns, lengths, strict=True):
        if column.kind != "bytes" and column.name != "source":
            if found and at - found[-1][1] <= gap:
                begin, _, members = found.pop()
            else:
                begin, members = at, []
            members.append((column, at - begin, length))
            found.append((begin, at + length, members))
        at += length
    return [Stretch(begin, end - begin, tuple(members)) for begin, end, members in found]


@dataclass(frozen=True, slots=True)
class SmallPlace:
    """A stretch of a file."""

    file: str
    size: int
    """Bytes of the file, as the index has it."""
    stretch: Stretch


class NotValues(ValueError):
    """The bytes are not what the index says."""

    def __init__(self, message: str, file: str, column: str) -> None:
        super().__init__(message)
        self.file, self.column = file, column


def decode_small(places: Sequence[SmallPlace], bytes_of: Sequence[memoryview], rows: int) -> Small:
    """What was read at `places`. NotValues when it does not hold `rows` rows."""
    strings: dict[str, list[str]] = {}
    numbers: dict[str, NDArray[np.int32]] = {}
    for place, data in zip(places, bytes_of, strict=True):
        for column, at, length in place.stretch.columns:
            try:
                values = _decode(column, data[at : at + length], rows)
            except ValueError as error:
                raise NotValues(str(error), place.file, column.name) from None
            if isinstance(values, list):
                strings[column.name] = values
            else:
                numbers[column.name] = values
    return Small(strings["key"], strings["caption"], numbers)


def _decode(column: Column, chunk: memoryview, rows: int) -> list[str] | NDArray[np.int32]:
    """The values of a chunk. ValueError when it does not hold the block's rows."""
    if column.kind == "int32":
        if len(chunk) < 4 * rows:
            raise ValueError("the column chunk is shorter than its values")
        return np.frombuffer(chunk, "<i4", rows, len(chunk) - 4 * rows)
    page = page_of(chunk)
    if column.kind == "string":
        return decode_strings(page, rows)
    return decode_bools(page, rows).astype(np.int32)
