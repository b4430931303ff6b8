"""Reads blocks: byte ranges from the store into a buffer, checksums checked, columns as views of the buffer."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard
from isthmus.storage.filesystems import filesystem, is_local, local_path, storage_errors
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


@dataclass(slots=True)
class Block:
    """The columns of one block, as one caption and one resolution give them."""

    rows: int
    fixed: dict[str, Bytes] = field(default_factory=dict)
    """Column -> [rows, bytes of a row]: views of the buffer; little-endian fp16 in C-order."""
    numbers: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Column -> [rows], int32 or bool."""
    strings: dict[str, list[str]] = field(default_factory=dict)
    """Column -> rows strings."""

    def take(self, column: Column, chunk: Bytes) -> None:
        """Decodes a column chunk. ValueError when it does not hold the block's rows."""
        if column.kind == "bytes":
            assert column.width is not None
            values = chunk[len(chunk) - self.rows * column.width :]
            self.fixed[column.name] = values.reshape(self.rows, column.width)
            return
        view = chunk.data
        header, length = page_header(view[:4096])
        page = view[header:]
        if len(page) != length:
            raise ValueError("the page does not fill its column chunk")
        if column.kind == "string":
            self.strings[column.name] = decode_strings(page, self.rows)
        elif column.kind == "bool":
            self.numbers[column.name] = decode_bools(page, self.rows)
        else:
            self.numbers[column.name] = np.frombuffer(page, "<i4", self.rows).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Range:
    """Columns that lie one behind the other in a sibling file, read in one go."""

    sibling: str
    columns: tuple[Column, ...]
    first: int
    """Position of the first of them among the sibling's columns."""


class BlockReader:
    """Reads the blocks of a dataset at one resolution; safe to share between threads.

    Args:
        dataset: what to read.
        resolution: names the latents' sibling.
        check: compare checksums while reading.
    """

    def __init__(self, dataset: Dataset, resolution: int, *, check: bool = True) -> None:
        self.dataset, self.resolution, self.check = dataset, resolution, check
        self._plans: dict[tuple[int, int], tuple[_Range, ...]] = {}

    def _ranges(self, block: int, caption: int) -> tuple[_Range, ...]:
        """What to read: of the first caption all text columns; of a further one its own, and the sample's from `text`."""
        bucket = int(self.dataset.index.bucket[block])
        if (bucket, caption) not in self._plans:
            spec = self.dataset.spec
            shape = self.dataset.manifest.latent_shapes[spec.buckets[bucket]][self.resolution]
            text = columns_of(spec, "text")
            latents = columns_of(spec, latent_sibling(self.resolution), shape)
            ranges = [_Range(latent_sibling(self.resolution), tuple(latents[1:]), 1)]
            if caption == 0:
                ranges.append(_Range("text", tuple(text), 0))
            else:
                sample = next(at for at, column in enumerate(text) if column.name == "flipped") + 1
                further = columns_of(spec, text_sibling(caption))
                ranges.append(_Range("text", tuple(text[:sample]), 0))
                ranges.append(_Range(text_sibling(caption), tuple(further[1:]), 1))
            self._plans[bucket, caption] = tuple(ranges)
        return self._plans[bucket, caption]

    def size(self, block: int, caption: int = 0) -> int:
        """Bytes that :meth:`read` needs for a block."""
        index = self.dataset.index
        return sum(
            int(index.sibling(part.sibling).length[block, part.first : part.first + len(part.columns)].sum())
            for part in self._ranges(block, caption)
        )

    def read(self, block: int, caption: int, buffer: Bytes) -> Block:
        """Reads a block into `buffer`, of which the result's columns are views.

        Args:
            block: position in the dataset's index.
            caption: which of the captions.
            buffer: at least :meth:`size` bytes.

        Raises:
            CorruptShard: a checksum differs or the bytes are not what the index says.
            StorageError: the store refuses.
        """
        index = self.dataset.index
        result = Block(int(index.rows[block]))
        row_group = int(index.row_group[block])
        at = 0
        for part in self._ranges(block, caption):
            ranges = index.sibling(part.sibling)
            lengths = ranges.length[block, part.first : part.first + len(part.columns)].tolist()
            name = index.file(block, part.sibling)
            into = buffer[at : at + sum(lengths)]
            read_range(self.dataset, name, ranges.start(block, part.first), into, row_group)
            at += len(into)
            start = 0
            for number, (column, length) in enumerate(zip(part.columns, lengths, strict=True)):
                chunk = into[start : start + length]
                start += length
                told = int(ranges.crc32[block, part.first + number])
                if self.check and zlib.crc32(chunk.data) != told:
                    raise CorruptShard(
                        "its bytes have another checksum than the index lists",
                        shard=name,
                        row_group=row_group,
                        column=column.name,
                    )
                try:
                    result.take(column, chunk)
                except ValueError as error:
                    raise CorruptShard(
                        f"unreadable: {error}", shard=name, row_group=row_group, column=column.name
                    ) from None
        return result


def read_range(dataset: Dataset, name: str, start: int, into: Bytes, row_group: int | None = None) -> None:
    """Fills `into` with a file's bytes from `start` on; CorruptShard when the file is missing or too short."""
    uri = dataset.file_uri(name)
    try:
        with storage_errors("read", uri):
            got = _read_local(uri, start, into) if is_local(uri) else _read_remote(uri, start, into)
    except FileNotFoundError:
        raise CorruptShard("the file is missing", shard=name, row_group=row_group) from None
    if got != len(into):
        raise CorruptShard(
            f"the file is cut short: {got} of {len(into)} bytes at offset {start}",
            shard=name,
            row_group=row_group,
        )


def _read_local(uri: str, start: int, into: Bytes) -> int:
    view = into.data
    done = 0
    with open(local_path(uri), "rb", buffering=0) as file:
        while done < len(view):
            got = os.preadv(file.fileno(), [view[done:]], start + done)
            if not got:
                break
            done += got
    return done


def _read_remote(uri: str, start: int, into: Bytes) -> int:
    store, path = filesystem(uri)
    data = store.cat_file(path, start=start, end=start + len(into))
    into[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def read_blocks(dataset: Dataset, resolution: int, blocks: Sequence[int], caption: int = 0) -> list[Block]:
    """These blocks, each in a fresh buffer: for tools and tests, not for training."""
    reader = BlockReader(dataset, resolution)
    return [reader.read(block, caption, np.empty(reader.size(block, caption), np.uint8)) for block in blocks]
