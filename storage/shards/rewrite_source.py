"""What is rewritten: the blocks of a dataset, sibling by sibling, or only the small columns of their rows."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CorruptShard, StorageError
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced
from isthmus.storage.shards.blocks import Block, Bytes
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.fields import take
from isthmus.storage.shards.foreign import Decoder, ForeignReader
from isthmus.storage.shards.foreign_arrays import field_rows, flag_rows, number_rows, text_rows
from isthmus.storage.shards.foreign_block import Expected
from isthmus.storage.shards.layout import CROP_COLUMNS, FIELDS, SIZE_COLUMNS, Column, columns_of

T = TypeVar("T")
R = TypeVar("R")


class Source:
    """A dataset of our own layout. Safe to share between threads."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        index = dataset.index
        self.first: NDArray[np.int64] = np.concatenate([[0], np.cumsum(index.rows)])
        """[blocks + 1] rows before each block."""
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Samples."""
        return int(self.first[-1])

    def read(self, block: int, sibling: str) -> Block:
        """All columns of one sibling of a block, each compared with its checksum.

        Raises:
            CorruptShard: the bytes are not those that the index lists.
            StorageError: the store refuses.
        """
        return self._read(block, sibling, None)

    def piece(self, block: int, sibling: str, start: int, size: int) -> Bytes:
        """Bytes of the file of a block's sibling, as they are. Raises as :meth:`read` does."""
        return self._bytes(block, sibling, self.dataset.index.file(block, sibling), start, size)

    def small(self, block: int, names: Collection[str]) -> dict[str, Any]:
        """Columns that are not arrays: numbers and flags as numpy has them, text as a list."""
        index, spec, rows = self.dataset.index, self.dataset.spec, int(self.dataset.index.rows[block])
        found: dict[str, Any] = {}
        by_sibling: dict[str, list[str]] = {}
        fields = {told.name for told in spec.fields}
        for name in names:
            if name == "bucket":
                found[name] = [spec.buckets[int(index.bucket[block])]] * rows
            elif name == "size_class":
                found[name] = np.full(rows, index.size_class[block])
            elif name in fields:
                by_sibling.setdefault(FIELDS, []).append(name)
            elif name.startswith("caption") and name != "caption":
                by_sibling.setdefault(f"text{name.removeprefix('caption')}", []).append(name)
            else:
                by_sibling.setdefault("text", []).append(name)
        for sibling, wanted in by_sibling.items():
            captions = sibling != FIELDS
            stored = ["caption" if captions and name.startswith("caption") else name for name in wanted]
            content = self._small(block, sibling, stored)
            for name, column in zip(wanted, stored, strict=True):
                values: Any = content.strings.get(column)
                if values is None:
                    values = content.numbers[column]
                    values = values.astype(np.int64) if values.dtype == np.int32 else values
                found[name] = values
        return found

    def _small(self, block: int, sibling: str, columns: list[str]) -> Block:
        return self._read(block, sibling, set(columns))

    def _read(self, block: int, sibling: str, wanted: set[str] | None) -> Block:
        index, spec = self.dataset.index, self.dataset.spec
        if sibling == FIELDS and not spec.fields:
            # Merged with datasets that tell more of their samples.
            return self._read(block, "text", {"key"})
        with self._lock:
            ranges = index.sibling(sibling)
        shape = None
        if sibling.endswith("px"):
            bucket = spec.buckets[int(index.bucket[block])]
            shape = self.dataset.manifest.latent_shapes[bucket][int(sibling.removesuffix("px"))]
        columns = columns_of(spec, sibling, shape)
        lengths = ranges.length[block].tolist()
        result = Block(int(index.rows[block]))
        start, run = int(ranges.offset[block]), list[int]()
        for at, column in enumerate([*columns, None]):
            if column is not None and (wanted is None or column.name in wanted):
                run.append(at)
            elif run:
                begin = start + sum(lengths[: run[0]])
                self._take(result, block, sibling, [columns[i] for i in run], run[0], begin, lengths)
                run = []
        return result

    def _take(
        self,
        result: Block,
        block: int,
        sibling: str,
        columns: Sequence[Column],
        first: int,
        start: int,
        lengths: Sequence[int],
    ) -> None:
        """Reads columns that lie one behind the other; a second time when a checksum differs, which may be the way's."""
        index = self.dataset.index
        told = index.sibling(sibling).crc32[block]
        name, row_group = index.file(block, sibling), int(index.row_group[block])
        own = lengths[first : first + len(columns)]
        for attempt in range(2):
            data = self._bytes(block, sibling, name, start, sum(own))
            chunks, at = [], 0
            for length in own:
                chunks.append(data[at : at + length])
                at += length
            wrong = [i for i, c in enumerate(chunks) if zlib.crc32(c.data) != int(told[first + i])]
            if not wrong:
                break
            if attempt:
                message = "its bytes have another checksum than the index lists"
                blamed = columns[wrong[0]].name
                raise CorruptShard(message, shard=name, row_group=row_group, column=blamed)
        for column, chunk in zip(columns, chunks, strict=True):
            try:
                take(result, column, chunk)
            except ValueError as error:
                raise CorruptShard(
                    f"unreadable: {error}", shard=name, row_group=row_group, column=column.name
                ) from None

    def _bytes(self, block: int, sibling: str, name: str, start: int, size: int) -> Bytes:
        index = self.dataset.index
        row_group = int(index.row_group[block])
        with self._lock:
            ranges = self.dataset.ranges(name)
        file_bytes = int(index.sibling(sibling).file_bytes[block])
        try:
            return np.frombuffer(ranges.read(name, start, size, file_bytes=file_bytes), np.uint8)
        except FileNotFoundError:
            raise CorruptShard("the file is missing", shard=name, row_group=row_group) from None
        except FileCutShort as error:
            message = f"the file is cut short: {error.message}"
            raise CorruptShard(message, shard=name, row_group=row_group) from None
        except FileReplaced as error:
            raise CorruptShard(error.message, shard=name, row_group=row_group) from None
        except StorageError as error:
            message = f"cannot read shard {name}, row group {row_group}: {error.message}"
            raise StorageError(message, where=error.where, hint=error.hint) from error


class ForeignSource(Source):
    """A dataset of files that others made: its rows as the column map gives them."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._readers = {
            resolution: ForeignReader(dataset, resolution) for resolution in dataset.spec.resolutions
        }

    def _read(self, block: int, sibling: str, wanted: set[str] | None) -> Block:
        if sibling == FIELDS and wanted is None:
            wanted = {"key", *(told.name for told in self.dataset.spec.fields)}
        if wanted is not None:
            return self._decoded(block, sibling, wanted)
        if sibling.endswith("px"):
            return self._readers[int(sibling.removesuffix("px"))].read(block, 0)
        caption = int(sibling.removeprefix("text") or 0)
        content = self._readers[self.dataset.spec.resolutions[0]].read(block, caption)
        if caption == 0:
            content.strings["source"] = self._decoded(block, "text", {"source"}).strings["source"]
        return content

    def _decoded(self, block: int, sibling: str, wanted: set[str]) -> Block:
        """Small columns alone, with what stands for those that the files do not have."""
        told, dataset = self.dataset.manifest.columns, self.dataset
        assert told is not None
        index, rows = dataset.index, int(dataset.index.rows[block])
        words = told.captions[0 if sibling == FIELDS else int(sibling.removeprefix("text") or 0)]
        fields = told.fields if sibling == FIELDS else {}
        shapes = dataset.manifest.latent_shapes[dataset.spec.buckets[int(index.bucket[block])]]
        height, width = (side * dataset.spec.autoencoder.factor for side in shapes[max(shapes)][1:])
        sizes = dict.fromkeys((*SIZE_COLUMNS, *CROP_COLUMNS), 0)
        sizes |= {"original_height": height, "original_width": width}
        sizes |= {"crop_height": height, "crop_width": width}
        named = dict(zip(SIZE_COLUMNS, told.original_size or (None, None), strict=True))
        named |= dict(zip(CROP_COLUMNS, told.crop or (None,) * 4, strict=True))
        named |= {"key": told.key, "caption": words.caption, "source": told.source, "flipped": told.flipped}
        named |= {name: own.column for name, own in fields.items()}
        name, row_group = index.file(block, ""), int(index.row_group[block])
        block_of = Block(rows)
        read = {column: named[column] for column in wanted if named.get(column) is not None}
        table = self._table(block, name, row_group, rows, {str(value) for value in read.values()})
        for column in wanted:
            there = table.column(read[column]) if column in read else None
            try:
                if column in fields:
                    kept = block_of.numbers if fields[column].kind == "number" else block_of.strings
                    kept[column] = field_rows(there, fields[column].kind)
                elif column == "key":
                    block_of.strings[column] = (
                        [f"{name}#{row_group}:{row}" for row in range(rows)]
                        if there is None
                        else text_rows(there)
                    )
                elif column in ("caption", "source"):
                    block_of.strings[column] = [""] * rows if there is None else text_rows(there, null="")
                elif column == "flipped":
                    block_of.numbers[column] = np.zeros(rows, np.bool_) if there is None else flag_rows(there)
                elif column in sizes:
                    block_of.numbers[column] = (
                        np.full(rows, sizes[column], np.int32) if there is None else number_rows(there, 0)
                    )
                else:
                    # How many tokens of a row are valid may be told by the tokens alone.
                    caption = int(sibling.removeprefix("text") or 0)
                    full = self._readers[dataset.spec.resolutions[0]].read(block, caption)
                    block_of.numbers[column] = full.numbers[column]
            except ValueError as error:
                raise CorruptShard(str(error), shard=name, row_group=row_group, column=column) from None
        return block_of

    def _table(self, block: int, name: str, row_group: int, rows: int, columns: set[str]) -> Any:
        if not columns:
            return None
        foreign, told = self.dataset.index.foreign, self.dataset.manifest.columns
        assert foreign is not None
        assert told is not None
        texts = {told.key, told.source, *(words.caption for words in told.captions)}
        texts |= {own.column for own in told.fields.values() if own.kind == "text"}
        expected = [Expected(column, "text" if column in texts else "number") for column in sorted(columns)]
        footer = self._readers[self.dataset.spec.resolutions[0]].footer(block)
        decoder = Decoder(footer, name, row_group, rows, expected)
        file_bytes = int(foreign.file_bytes[block])
        with self._lock:
            ranges = self.dataset.ranges(name)
        try:
            decoder.fetch(ranges, file_bytes - int(foreign.footer_bytes[block]), file_bytes)
        except FileNotFoundError:
            raise CorruptShard("the file is missing", shard=name, row_group=row_group) from None
        return decoder.decode()[0]


def source_of(dataset: Dataset) -> Source:
    """The source that suits a dataset's files."""
    return Source(dataset) if dataset.manifest.columns is None else ForeignSource(dataset)


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int, *, ahead: int = 4) -> Iterator[R]:
    """`function` of each item in order, several at once; `ahead` results a thread wait at most."""
    with ThreadPoolExecutor(threads, thread_name_prefix="isthmus-rewrite") as pool:
        waiting: deque[Future[R]] = deque()
        left, more = iter(items), True
        try:
            while True:
                while more and len(waiting) < ahead * threads:
                    try:
                        item = next(left)
                    except StopIteration:
                        more = False
                    else:
                        waiting.append(pool.submit(function, item))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
