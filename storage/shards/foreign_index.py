"""_index.parquet of files made by others: one row for each row group, and what is needed to find and check its footer.

Columns: ``shard`` (the file's name below its root), ``row_group``, ``rows``, ``bucket``, ``size_class``;
``file_bytes``, ``footer_bytes`` and ``footer_crc32`` (of the file's end: the footer, its length and the magic), so that
a reader fetches a footer in one request and sees when a file was replaced; and for each column that is read
``<column>/stored`` and ``<column>/decoded``, bytes as the footer has them. The file's own metadata holds the column map
under ``isthmus.columns``, so that the sha256 of the index, the dataset's fingerprint, covers the map too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from isthmus.storage.shards.foreign_map import ColumnMap

Int64 = NDArray[np.int64]

MAX_FOOTER_BYTES = 1 << 28
COLUMNS_KEY = b"isthmus.columns"


@dataclass(frozen=True, slots=True)
class ForeignFiles:
    """What an index of foreign files says beyond the blocks themselves."""

    file_bytes: Int64
    """[blocks] size of the file."""
    footer_bytes: Int64
    """[blocks] from the footer's start to the file's end."""
    footer_crc32: Int64
    """[blocks] of these bytes."""
    columns: tuple[str, ...]
    """The columns that are read."""
    stored: Int64
    """[blocks, columns] bytes in the file, compressed as they are."""
    decoded: Int64
    """[blocks, columns] bytes without compression, as the footer claims."""

    def of(self, block: int, columns: Sequence[str]) -> tuple[int, int]:
        """Bytes stored and decoded of some columns of a block."""
        at = [self.columns.index(name) for name in columns]
        return int(self.stored[block, at].sum()), int(self.decoded[block, at].sum())


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """What the index says of one file, as arrays: there may be hundreds of thousands of row groups."""

    shard: str
    file_bytes: int
    footer_bytes: int
    footer_crc32: int
    row_group: Int64
    """[groups]"""
    rows: Int64
    """[groups]"""
    bucket: Sequence[str]
    """[groups]"""
    stored: Int64
    """[groups, columns], in the order of `columns.names()`."""
    decoded: Int64
    """[groups, columns]"""


def dump_foreign_index(files: Sequence[ForeignFile], columns: ColumnMap, size_class: int) -> bytes:
    """The index file of these files' row groups."""
    counts = [len(file.rows) for file in files]

    def repeated(values: Sequence[Any], kind: Any) -> Any:
        return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(files)), counts)))

    arrays: dict[str, Any] = {
        "shard": repeated([file.shard for file in files], pa.string()),
        "row_group": pa.array(np.concatenate([file.row_group for file in files]), pa.int32()),
        "rows": pa.array(np.concatenate([file.rows for file in files]), pa.int32()),
        "bucket": pa.array([bucket for file in files for bucket in file.bucket], pa.string()),
        "size_class": pa.array(np.full(sum(counts), size_class), pa.int32()),
        "file_bytes": repeated([file.file_bytes for file in files], pa.int64()),
        "footer_bytes": repeated([file.footer_bytes for file in files], pa.int64()),
        "footer_crc32": repeated([file.footer_crc32 for file in files], pa.uint32()),
    }
    for at, name in enumerate(columns.names()):
        arrays[f"{name}/stored"] = pa.array(np.concatenate([file.stored[:, at] for file in files]))
        arrays[f"{name}/decoded"] = pa.array(np.concatenate([file.decoded[:, at] for file in files]))
    table = pa.table(arrays)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({COLUMNS_KEY: _text_of(columns)})
    return sink.getvalue()


def parse_foreign_files(data: bytes, columns: ColumnMap, blocks: int) -> ForeignFiles:
    """The part of an index file that only foreign datasets have. ValueError when it contradicts the manifest."""
    file = pq.ParquetFile(pa.BufferReader(data))
    told = (file.metadata.metadata or {}).get(COLUMNS_KEY, b"")
    if told.decode(errors="replace") != _text_of(columns):
        raise ValueError("its column map is not the manifest's")
    names = columns.names()
    wanted = ["file_bytes", "footer_bytes", "footer_crc32"]
    wanted += [f"{name}/{part}" for name in names for part in ("stored", "decoded")]
    table = file.read(columns=wanted, use_threads=False)
    found: Mapping[str, Int64] = {name: _numbers(table, name) for name in table.column_names}
    files = ForeignFiles(
        file_bytes=found["file_bytes"],
        footer_bytes=found["footer_bytes"],
        footer_crc32=found["footer_crc32"],
        columns=tuple(names),
        stored=np.stack([found[f"{name}/stored"] for name in names]).T,
        decoded=np.stack([found[f"{name}/decoded"] for name in names]).T,
    )
    if len(files.file_bytes) != blocks:
        raise ValueError(f"it lists {len(files.file_bytes)} blocks, the manifest {blocks}")
    wrong = (files.footer_bytes < 12) | (files.footer_bytes > MAX_FOOTER_BYTES)
    wrong |= files.footer_bytes > files.file_bytes - 4
    wrong |= (files.stored < 0).any(axis=1) | (files.stored > files.file_bytes[:, None]).any(axis=1)
    wrong |= (files.decoded < 0).any(axis=1) | (files.decoded > 1 << 40).any(axis=1)
    if wrong.any():
        raise ValueError(f"the sizes of block {int(np.argmax(wrong))} are impossible")
    return files


def wrong_name(name: str) -> str | None:
    """Why a file's name may not stand in an index; None when it may. Nothing leads out of the root."""
    if not name or len(name) > 1024:
        return "is empty or too long"
    if name.startswith("/") or "\\" in name or any(ord(letter) < 32 for letter in name):
        return "is absolute, or has a backslash or control character"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leads out of the dataset's root"
    return None


def _text_of(columns: ColumnMap) -> str:
    return json.dumps(columns.to_json(), sort_keys=True, ensure_ascii=True)


def _numbers(table: Any, name: str) -> Int64:
    column = table[name]
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError(f"column {name} is not whole numbers")
    return np.asarray(column.to_numpy().astype(np.int64))
