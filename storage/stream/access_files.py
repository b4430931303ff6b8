"""The files of a dataset as a cache needs them: their sizes, and what a whole one is checked against."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.errors import CorruptShard
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.layout import latent_sibling, text_sibling

_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class WholeFile:
    """One file: the blocks [first, end) of the index lie in it."""

    sibling: str
    """Empty for files that others made."""
    first: int
    end: int
    size: int
    """Bytes."""


def whole_files(dataset: Dataset, resolutions: Sequence[int] | None = None) -> dict[str, WholeFile]:
    """The files of a dataset by name.

    Args:
        resolutions: those whose latents are read; None: all.
    """
    index = dataset.index
    starts = np.flatnonzero(np.diff(index.shard, prepend=-1)).tolist()
    spans = list(zip(starts, [*starts[1:], len(index)], strict=True))
    if index.foreign is not None:
        sizes = index.foreign.file_bytes
        return {index.file(a, ""): WholeFile("", a, b, int(sizes[a])) for a, b in spans}
    wanted = [text_sibling(caption) for caption in range(dataset.spec.captions)]
    for resolution in dataset.spec.resolutions if resolutions is None else resolutions:
        wanted.append(latent_sibling(resolution))
    files = {}
    for sibling in wanted:
        try:
            sizes = index.sibling(sibling).file_bytes
        except KeyError:
            continue  # no image reaches this resolution
        for first, end in spans:
            if sizes[first]:
                files[index.file(first, sibling)] = WholeFile(sibling, first, end, int(sizes[first]))
    return files


def check_whole(dataset: Dataset, name: str, file: WholeFile, descriptor: int) -> None:
    """Checks a copy of a file against the index: size, every column chunk's checksum, the footer's.

    Of files that others made, the index vouches for the size and the footer only.

    Raises:
        CorruptShard: it differs; says where.
    """
    size = os.fstat(descriptor).st_size
    if size != file.size:
        raise CorruptShard(f"the file has {size:,} bytes, {file.size:,} in the index", shard=name)
    index = dataset.index
    last = file.end - 1
    if index.foreign is not None:
        footer, told = size - int(index.foreign.footer_bytes[last]), int(index.foreign.footer_crc32[last])
    else:
        ranges = index.sibling(file.sibling)
        footer, told = int(ranges.offset[last]) + ranges.size(last), int(ranges.footer_crc32[last])
        for block in range(file.first, file.end):
            start = int(ranges.offset[block])
            for column, length, crc in zip(
                ranges.columns, ranges.length[block].tolist(), ranges.crc32[block].tolist(), strict=True
            ):
                if _checksum(descriptor, start, length) != crc:
                    raise CorruptShard(
                        "its bytes have another checksum than the index lists",
                        shard=name,
                        row_group=int(index.row_group[block]),
                        column=column,
                    )
                start += length
    if _checksum(descriptor, footer, size - footer) != told:
        raise CorruptShard("its footer has another checksum than the index lists", shard=name)


def _checksum(descriptor: int, start: int, length: int) -> int:
    crc = 0
    for data in _pieces(descriptor, start, length):
        crc = zlib.crc32(data, crc)
    return crc


def _pieces(descriptor: int, start: int, length: int) -> Iterator[bytes]:
    while length:
        data = os.pread(descriptor, min(length, _STEP), start)
        if not data:
            return
        yield data
        start, length = start + len(data), length - len(data)
