"""What one stage reads: its blocks in every dataset, its lines, and what a step needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np

from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.shards.blocks import Blocks, block_reader
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.layout import CROP_COLUMNS, SIZE_COLUMNS
from isthmus.storage.shards.spec import EncoderSpec
from isthmus.storage.stream.batch import Layout
from isthmus.storage.stream.lines import Lines, SourceBlocks
from isthmus.storage.stream.memory import Need, need_of, refuse


class BlockKey(NamedTuple):
    """What is read in one go: a block at one resolution with one caption."""

    source: int
    block: int
    """Position in the dataset's index."""
    resolution: int
    caption: int


class StageReader:
    """One stage over its datasets.

    Args:
        number: of the stage.
        resolution: pixels; the stage reads the size classes at or above it.
        datasets: the sources, with
        repeats: their appearances in an epoch.
        buckets: names of all datasets' buckets; a bucket's place here is its number in the order.
        readers: of each dataset's blocks at this resolution.
    """

    def __init__(
        self,
        number: int,
        resolution: int,
        datasets: Sequence[Dataset],
        repeats: Sequence[Fraction],
        buckets: Sequence[str],
        *,
        seed: int,
        lanes: int,
        shuffle_window: int,
        readers: Sequence[Blocks] | None = None,
    ) -> None:
        self.number, self.resolution, self.datasets = number, resolution, tuple(datasets)
        self.readers = tuple(readers or (block_reader(dataset, resolution) for dataset in datasets))
        self.buckets = tuple(buckets)
        self.latent_shapes = self._shapes()
        self._blocks = []
        sources = []
        self._block_rows: dict[int, int] = {}
        self._sources: dict[int, list[int]] = {}
        self._row_bytes: dict[int, int] = {}
        for dataset, repeat, reader in zip(datasets, repeats, self.readers, strict=True):
            index = dataset.index
            here = np.flatnonzero(index.size_class >= resolution)
            numbers = np.array([self.buckets.index(name) for name in dataset.spec.buckets], np.int64)
            bucket, rows = numbers[index.bucket[here]], index.rows[here]
            self._blocks.append(here)
            sources.append(SourceBlocks(bucket, rows, repeat))
            for name in np.unique(bucket):
                self._sources.setdefault(int(name), []).append(len(sources) - 1)
                blocks = here[bucket == name]
                largest = int(blocks[np.argmax(index.rows[blocks])])
                row = max(
                    -(-reader.size(largest, caption) // int(index.rows[largest]))
                    for caption in range(min(2, dataset.spec.captions))
                )
                self._row_bytes[int(name)] = max(row, self._row_bytes.get(int(name), 0))
                most = max(int(index.rows[largest]), self._block_rows.get(int(name), 0))
                self._block_rows[int(name)] = most
        self.rows = sum(int(source.rows.sum()) for source in sources)
        """Rows of all sources, each counted once."""
        if not self.rows:
            raise UsageError(f"stage {number}: no source has images that reach {resolution} px")
        self.lines = Lines(sources, seed=seed, stage=number, lanes=lanes, window=shuffle_window)
        self._captions: dict[tuple[int, int, int, int], int] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}

    def _shapes(self) -> dict[str, tuple[int, int, int]]:
        """Bucket -> latent shape at the stage's resolution; the same in all datasets."""
        shapes: dict[str, tuple[int, int, int]] = {}
        for dataset in self.datasets:
            if self.resolution not in dataset.spec.resolutions:
                stored = ", ".join(f"{resolution} px" for resolution in dataset.spec.resolutions)
                raise DatasetMismatch(
                    f"stage {self.number} reads {self.resolution} px, the dataset holds {stored}",
                    where=dataset.uri,
                )
            for bucket, by_resolution in dataset.manifest.latent_shapes.items():
                shape = by_resolution.get(self.resolution)
                if shape is not None and shapes.setdefault(bucket, shape) != shape:
                    raise DatasetMismatch(
                        f"bucket {bucket} has latents {list(shape)} at {self.resolution} px, "
                        f"{list(shapes[bucket])} in {self.datasets[0].uri}",
                        where=dataset.uri,
                    )
        return shapes

    def need(self, world_size: int, global_batch_size: int, window: int | None = None) -> Need:
        """The memory that the stage needs on a rank."""
        rows = global_batch_size // world_size
        padded = {bucket: -(-self.layout(bucket, rows).bytes // rows) for bucket in self._row_bytes}
        return need_of(
            self.number,
            self.lines,
            block_rows=self._block_rows,
            row_bytes={bucket: max(size, padded[bucket]) for bucket, size in self._row_bytes.items()},
            world_size=world_size,
            global_batch_size=global_batch_size,
            window=window,
        )

    def check_memory(self, limit: int, world_size: int, global_batch_size: int) -> Need:
        """The memory that the stage needs; UsageError when it is above the limit."""
        need = self.need(world_size, global_batch_size)
        if need.bytes <= limit:
            return need
        low, high = 0, self.lines.window  # the largest window that fits lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if self.need(world_size, global_batch_size, middle).bytes <= limit:
                low = middle
            else:
                high = middle
        raise refuse(need, limit, world_size=world_size, lanes=self.lines.lanes, smaller_window=low or None)

    def block(self, source: int, number: int) -> int:
        """The position in the dataset's index of a source's block, as the order numbers them."""
        return int(self._blocks[source][number])

    def caption(self, source: int, number: int, epoch: int, appearance: int) -> int:
        """Which caption of a block an appearance reads."""
        captions = self.datasets[source].spec.captions
        if captions == 1:
            return 0
        key = source, number, epoch, appearance
        if key not in self._captions:
            if len(self._captions) > 1 << 16:
                self._captions.clear()
            self._captions[key] = self.lines.caption(*key, captions)
        return self._captions[key]

    def key(self, source: int, number: int, epoch: int, appearance: int) -> BlockKey:
        """What an appearance reads of a source's block, as the order numbers them."""
        return BlockKey(
            source,
            self.block(source, number),
            self.resolution,
            self.caption(source, number, epoch, appearance),
        )

    def block_rows(self, source: int, number: int) -> int:
        """Rows of a source's block, as the order numbers them."""
        return int(self.datasets[source].index.rows[self._blocks[source][number]])

    def block_bytes(self, bucket: int) -> int:
        """Bytes of the largest block of a bucket."""
        return self._block_rows[bucket] * self._row_bytes[bucket]

    def sources_of(self, bucket: int) -> list[int]:
        """The sources that have rows of a bucket."""
        return self._sources[bucket]

    def size(self, key: BlockKey) -> int:
        """Bytes of a block in memory."""
        return self.readers[key.source].size(key.block, key.caption)

    def layout(self, bucket: int, rows: int) -> Layout:
        """How a batch of this many rows of a bucket lies in memory."""
        if (bucket, rows) not in self._layouts:
            shape = self.latent_shapes[self.buckets[bucket]]
            columns = [(name, 2 * prod(shape)) for name in ("latent_mean", "latent_logvar")]
            encoders = self.datasets[0].spec.text
            for encoder in encoders:
                columns.append((f"{encoder.name}_tokens", 2 * encoder.max_tokens * encoder.width))
                if encoder.pooled_width is not None:
                    columns.append((f"{encoder.name}_pooled", 2 * encoder.pooled_width))
            numbers = (*SIZE_COLUMNS, *CROP_COLUMNS, "flipped", *(f"{e.name}_length" for e in encoders))
            self._layouts[bucket, rows] = Layout(tuple(columns), numbers, rows)
        return self._layouts[bucket, rows]


def common_encoders(datasets: Sequence[Dataset]) -> tuple[EncoderSpec, ...]:
    """The text encoders of all datasets. DatasetMismatch when they, or the autoencoders, differ."""
    first = datasets[0]
    for other in datasets[1:]:
        ours = {encoder.name: encoder for encoder in first.spec.text}
        theirs = {encoder.name: encoder for encoder in other.spec.text}
        if ours != theirs or first.spec.autoencoder != other.spec.autoencoder:
            raise DatasetMismatch(f"made with other encoders than {first.uri}", where=other.uri)
    return first.spec.text
