"""Reads for tools and tests, into memory of their own; training reads by `stream`."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.errors import CorruptShard
from isthmus.storage.ranges.spec import FileCutShort
from isthmus.storage.shards.blocks import Block, BlockReader, Bytes
from isthmus.storage.shards.dataset import Dataset


def read_range(dataset: Dataset, name: str, start: int, into: Bytes, row_group: int | None = None) -> None:
    """Fills `into` with a file's bytes from `start` on; CorruptShard when the file is missing or too short."""
    try:
        dataset.ranges(name).scatter(name, start, [into.data])
    except FileNotFoundError:
        raise CorruptShard("the file is missing", shard=name, row_group=row_group) from None
    except FileCutShort as error:
        raise CorruptShard(
            f"the file is cut short: {error.message}", shard=name, row_group=row_group
        ) from None


def read_blocks(dataset: Dataset, resolution: int, blocks: Sequence[int], caption: int = 0) -> list[Block]:
    """These blocks, each in fresh memory: for tools and tests, not for training."""
    reader = BlockReader(dataset, resolution)
    return [reader.read(block, caption) for block in blocks]
