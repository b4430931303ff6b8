"""_index.parquet: one row for each block, with the byte ranges and checksums of its column chunks.

Columns: ``shard``, ``row_group``, ``rows``, ``bucket``, ``size_class``; then for each sibling file, such as
``256px``: ``256px/offset`` (of the row group's first byte), ``256px/file_bytes``, ``256px/footer_crc32`` (of what
follows the last row group), and for each of its columns in file order ``256px/latent_mean/length`` and ``.../crc32``
(column chunks lie one behind the other, so lengths give the ranges). A sibling that a block lacks has zeros.

CRC-32 (zlib): any tool can check it, and here it runs at 4 GB/s, several times what a rank reads; it is there
against accidents, and the sha256 of the index, which the manifest holds, makes the whole tamper-evident up to
32 bits a chunk.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.storage.shards.foreign_index import ForeignFiles, parse_foreign_files, wrong_name
from isthmus.storage.shards.layout import (
    MAX_CHUNK_BYTES,
    MAX_PAGE_HEADER,
    MAX_ROWS_PER_GROUP,
    columns_of,
    siblings,
)
from isthmus.storage.shards.manifest import Manifest

Int64 = NDArray[np.int64]

_SHARD_NAME = re.compile(r"part-[0-9]{5,9}")


@dataclass(slots=True)
class SiblingIndex:
    """Where one sibling's bytes are, for every block; zeros where a block has no such sibling."""

    columns: tuple[str, ...]
    """In file order."""
    offset: Int64
    """[blocks] of the row group's first byte in the file."""
    file_bytes: Int64
    """[blocks] size of the file."""
    footer_crc32: Int64
    """[blocks] checksum of the file's bytes behind its last row group."""
    length: Int64
    """[blocks, columns] bytes of each column chunk."""
    crc32: Int64
    """[blocks, columns]"""

    def start(self, block: int, column: int) -> int:
        """The file offset of a block's column chunk."""
        return int(self.offset[block] + self.length[block, :column].sum())

    def size(self, block: int) -> int:
        """Bytes of the block's row group."""
        return int(self.length[block].sum())


@dataclass(slots=True)
class Index:
    """The blocks of a dataset, in the order of its shards."""

    shard_names: tuple[str, ...]
    shard: Int64
    """[blocks] position in `shard_names`."""
    row_group: Int64
    """[blocks] within the shard's files."""
    rows: Int64
    """[blocks]"""
    bucket: Int64
    """[blocks] position in `spec.buckets`."""
    size_class: Int64
    """[blocks] pixels."""
    _file: bytes = field(repr=False)
    """The index file: a stage needs the columns of two siblings, which are decoded when they are asked for."""
    foreign: ForeignFiles | None = field(default=None, repr=False)
    """Of files made by others, which have no siblings: a shard is one file."""
    _siblings: dict[str, SiblingIndex] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def file(self, block: int, sibling: str) -> str:
        """The name of the file that holds a block's sibling; of a foreign dataset the one file that holds all."""
        shard = self.shard_names[int(self.shard[block])]
        return shard if self.foreign is not None else shard_file(shard, sibling)

    def sibling(self, name: str) -> SiblingIndex:
        """The byte ranges and checksums of one sibling of all blocks.

        Raises:
            KeyError: the dataset has no such sibling.
            DataError: a checksum is missing; everything else was checked when the index was parsed.
        """
        if name not in self._siblings:
            try:
                self._siblings[name] = _read_sibling(self._file, name, checksums=True)
            except ValueError as error:
                raise DataError(f"not a valid index: {error}") from None
        return self._siblings[name]


def _read_sibling(data: bytes, name: str, *, checksums: bool) -> SiblingIndex:
    """One sibling's columns of the index; without `checksums` their arrays are empty."""
    file = pq.ParquetFile(pa.BufferReader(data))
    types = {field.name: field.type for field in file.schema_arrow if field.name.startswith(f"{name}/")}
    columns = tuple(column.split("/")[1] for column in types if column.endswith("/length"))
    if not columns:
        raise KeyError(name)
    crc32 = [f"{name}/footer_crc32", *(f"{name}/{column}/crc32" for column in columns)]
    if not all(pa.types.is_integer(types[column]) for column in crc32):
        raise ValueError(f"the checksums of sibling {name} are not whole numbers")
    wanted = [column for column in types if checksums or column not in crc32]
    table = file.read(columns=wanted, use_threads=False)
    none = np.zeros(0, np.int64)
    # One column of the index behind the other: side by side they would take longer to copy than to decode.
    return SiblingIndex(
        columns=columns,
        offset=_numbers(table, f"{name}/offset"),
        file_bytes=_numbers(table, f"{name}/file_bytes"),
        footer_crc32=_numbers(table, crc32[0]) if checksums else none,
        length=np.stack([_numbers(table, f"{name}/{column}/length") for column in columns]).T,
        crc32=np.stack([_numbers(table, column) for column in crc32[1:]]).T if checksums else none[:, None],
    )


def shard_file(shard: str, sibling: str) -> str:
    """``part-00017.256px.parquet``."""
    return f"{shard}.{sibling}.parquet"


@dataclass(slots=True)
class BlockEntry:
    """One row of the index, as the writer fills it in."""

    shard: str
    row_group: int
    rows: int
    bucket: str
    size_class: int
    offset: dict[str, int] = field(default_factory=dict)
    """By sibling."""
    length: dict[tuple[str, str], int] = field(default_factory=dict)
    """By sibling and column."""
    crc32: dict[tuple[str, str], int] = field(default_factory=dict)


def dump_index(
    blocks: Sequence[BlockEntry],
    columns: Mapping[str, Sequence[str]],
    footers: Mapping[tuple[str, str], tuple[int, int]],
) -> bytes:
    """The index file of these blocks.

    Args:
        blocks: in shard and row group order.
        columns: sibling -> its columns in file order.
        footers: (shard, sibling) -> (bytes of the file, checksum of its footer).
    """
    return dump_table(index_table(blocks, columns, footers))


def index_table(
    blocks: Sequence[BlockEntry],
    columns: Mapping[str, Sequence[str]],
    footers: Mapping[tuple[str, str], tuple[int, int]],
) -> Any:
    """The rows of the index for these blocks, a pyarrow table; see :func:`dump_index`."""
    arrays: dict[str, Any] = {
        "shard": pa.array([b.shard for b in blocks], pa.string()),
        "row_group": pa.array([b.row_group for b in blocks], pa.int32()),
        "rows": pa.array([b.rows for b in blocks], pa.int32()),
        "bucket": pa.array([b.bucket for b in blocks], pa.string()),
        "size_class": pa.array([b.size_class for b in blocks], pa.int32()),
    }
    for sibling, names in columns.items():
        ends = [footers.get((b.shard, sibling), (0, 0)) for b in blocks]
        arrays[f"{sibling}/offset"] = pa.array([b.offset.get(sibling, 0) for b in blocks], pa.int64())
        arrays[f"{sibling}/file_bytes"] = pa.array([size for size, _ in ends], pa.int64())
        arrays[f"{sibling}/footer_crc32"] = pa.array([crc for _, crc in ends], pa.uint32())
        for name in names:
            key = (sibling, name)
            arrays[f"{sibling}/{name}/length"] = pa.array([b.length.get(key, 0) for b in blocks], pa.int64())
            arrays[f"{sibling}/{name}/crc32"] = pa.array([b.crc32.get(key, 0) for b in blocks], pa.uint32())
    return pa.table(arrays)


def dump_table(table: Any) -> bytes:
    """The index file whose rows are those of a table."""
    sink = io.BytesIO()
    # Checksums do not repeat: as a dictionary they would take twice the time and the room.
    repeating = [name for name in table.column_names if not name.endswith("crc32")]
    pq.write_table(table, sink, compression="zstd", use_dictionary=repeating, store_schema=False)
    return sink.getvalue()


def parse_index(data: bytes, manifest: Manifest, where: str) -> Index:
    """The index in `data`, checked against the manifest; nothing in it can lead outside the dataset's root.

    Raises:
        DataError: it is damaged or contradicts the manifest; says where.
    """
    try:
        return _parse(data, manifest)
    except (ValueError, KeyError, OverflowError, pa.ArrowException) as error:
        raise DataError(f"not a valid index: {error}", where=where) from None


def _parse(data: bytes, manifest: Manifest) -> Index:
    file = pq.ParquetFile(pa.BufferReader(data))
    if file.metadata.num_rows != manifest.blocks:
        raise ValueError(f"it lists {file.metadata.num_rows} blocks, the manifest {manifest.blocks}")
    table = file.read(columns=["shard", "row_group", "rows", "bucket", "size_class"], use_threads=False)
    shards = table["shard"].combine_chunks().dictionary_encode()
    buckets = table["bucket"].combine_chunks().dictionary_encode()
    named = buckets.dictionary.to_pylist()
    unknown = sorted(set(map(str, named)) - set(manifest.spec.buckets))
    if unknown or buckets.null_count:
        raise ValueError(f"bucket {unknown[0] if unknown else None!r} is not in the manifest")
    numbers = np.array([manifest.spec.buckets.index(name) for name in named], np.int64)
    index = Index(
        shard_names=tuple(shards.dictionary.to_pylist()),
        shard=shards.indices.to_numpy().astype(np.int64),
        row_group=_numbers(table, "row_group"),
        rows=_numbers(table, "rows"),
        bucket=numbers[buckets.indices.to_numpy()],
        size_class=_numbers(table, "size_class"),
        _file=data,
    )
    _check_blocks(index, manifest)
    if manifest.columns is not None:
        index.foreign = parse_foreign_files(data, manifest.columns, len(index))
        return index
    sizes = [int(size_class) for size_class in np.unique(index.size_class)]
    for sibling in dict.fromkeys(name for size in sizes for name in siblings(manifest.spec, size)):
        # Not kept: most siblings are of other resolutions and captions than what is read next.
        ranges = _read_sibling(data, sibling, checksums=False)
        having = [size for size in sizes if sibling in siblings(manifest.spec, size)]
        _check_sibling(index, manifest, np.isin(index.size_class, having), sibling, ranges)
    return index


def _check_blocks(index: Index, manifest: Manifest) -> None:
    for name in index.shard_names:
        wrong = None if _SHARD_NAME.fullmatch(str(name)) else "is not like part-00017"
        if manifest.columns is not None:
            wrong = wrong_name(str(name))
        if wrong:
            raise ValueError(f"shard name {str(name)[:60]!r} {wrong}")
    if len(index.shard_names) != manifest.shards:
        raise ValueError(f"it lists {len(index.shard_names)} shards, the manifest {manifest.shards}")
    if ((index.rows < 1) | (index.rows > MAX_ROWS_PER_GROUP)).any():
        raise ValueError(f"a block's rows are not within 1 to {MAX_ROWS_PER_GROUP}")
    fresh = np.diff(index.shard, prepend=-1) != 0
    if (index.shard[fresh] != np.arange(fresh.sum())).any():
        raise ValueError("the blocks of a shard do not lie together")
    counted = np.arange(len(index)) - np.flatnonzero(fresh)[np.cumsum(fresh) - 1] if len(index) else fresh
    # Files of others may have empty row groups, which the index leaves out.
    wrong_order = index.row_group != counted if manifest.columns is None else index.row_group < counted
    if wrong_order.any() or (np.diff(index.row_group)[~fresh[1:]] < 1).any():
        raise ValueError("the row groups of a shard are not numbered from zero")
    for number, bucket in enumerate(manifest.spec.buckets):
        for size_class in np.unique(index.size_class):
            rows = int(index.rows[(index.bucket == number) & (index.size_class == size_class)].sum())
            told = manifest.rows.get(bucket, {}).get(int(size_class), 0)
            if rows != told:
                raise ValueError(
                    f"bucket {bucket}, size class {size_class}: it has {rows} rows, the manifest {told}"
                )
    if int(index.rows.sum()) != manifest.samples:
        raise ValueError(f"it has {int(index.rows.sum())} rows, the manifest {manifest.samples}")


def _check_sibling(
    index: Index, manifest: Manifest, here: NDArray[np.bool_], name: str, ranges: SiblingIndex
) -> None:
    """Every chunk of the sibling lies within its file, one behind the other, and has room for its rows.

    Args:
        here: [blocks] those that have the sibling.
    """
    widths = np.zeros((len(manifest.spec.buckets), len(ranges.columns)), np.int64)
    for number in np.unique(index.bucket[here]):
        shape = None
        if name.endswith("px"):
            shape = manifest.latent_shapes[manifest.spec.buckets[number]][int(name.removesuffix("px"))]
        columns = columns_of(manifest.spec, name, shape)
        if ranges.columns != tuple(column.name for column in columns):
            raise ValueError(f"the columns of sibling {name} are not those of the manifest")
        widths[number] = [column.width or 0 for column in columns]
    wrong = ranges.offset < 4
    end = ranges.offset.copy()
    for at, length in enumerate(ranges.length.T):  # column by column, as they lie in memory
        width = widths[index.bucket, at]
        wrong |= (length < 8) | (length > MAX_CHUNK_BYTES)
        header = length - index.rows * width
        wrong |= (width > 0) & ((header < 1) | (header > MAX_PAGE_HEADER))
        end += length
    wrong = here & (wrong | (end + 12 > ranges.file_bytes))
    if wrong.any():
        block = int(np.argmax(wrong))
        raise ValueError(
            f"the byte ranges of {index.file(block, name)}, row group {index.row_group[block]}, do not fit its rows"
        )


def _numbers(table: Any, name: str) -> Int64:
    column = table[name]
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"column {name} is not whole numbers")
    return np.asarray(column.to_numpy().astype(np.int64))
