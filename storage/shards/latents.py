"""One column of a block, without the rest of its row: latents are a twentieth of what text takes."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard
from isthmus.storage.shards.blocks import Bytes, block_reader
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.layout import decode_strings, latent_sibling, page_header
from isthmus.storage.shards.whole_reads import read_range


def read_means(dataset: Dataset, block: int, resolution: int) -> NDArray[np.float16]:
    """The latents' means of a block, [rows, C, H, W], checksum compared. Safe to call from several threads.

    Raises:
        CorruptShard: the bytes are not what the index says.
        StorageError: the store refuses.
    """
    index = dataset.index
    shape = dataset.manifest.latent_shapes[dataset.spec.buckets[int(index.bucket[block])]][resolution]
    rows = int(index.rows[block])
    if index.foreign is not None:
        values = block_reader(dataset, resolution).read(block).fixed["latent_mean"]
    else:
        width = 2 * int(np.prod(shape))
        chunk = _chunk(dataset, block, latent_sibling(resolution), "latent_mean")
        values = chunk[len(chunk) - rows * width :]
    return np.ascontiguousarray(values).view("<f2").reshape(rows, *shape)


def read_keys(dataset: Dataset, block: int, resolution: int) -> list[str]:
    """The keys of a block's rows.

    Raises:
        CorruptShard: the bytes are not what the index says.
        StorageError: the store refuses.
    """
    index = dataset.index
    if index.foreign is not None:
        return block_reader(dataset, resolution).read(block).strings["key"]
    sibling = latent_sibling(resolution)
    chunk = _chunk(dataset, block, sibling, "key")
    try:
        header, _ = page_header(chunk[:4096].data)
        return decode_strings(chunk[header:].data, int(index.rows[block]))
    except ValueError as error:
        raise CorruptShard(
            f"unreadable: {error}",
            shard=index.file(block, sibling),
            row_group=int(index.row_group[block]),
            column="key",
        ) from None


def _chunk(dataset: Dataset, block: int, sibling: str, column: str) -> Bytes:
    index, ranges = dataset.index, dataset.index.sibling(sibling)
    number = ranges.columns.index(column)
    name, row_group = index.file(block, sibling), int(index.row_group[block])
    found = np.empty(int(ranges.length[block, number]), np.uint8)
    read_range(dataset, name, ranges.start(block, number), found, row_group)
    if zlib.crc32(found.data) != int(ranges.crc32[block, number]):
        raise CorruptShard(
            "its bytes have another checksum than the index lists",
            shard=name,
            row_group=row_group,
            column=column,
        )
    return found
