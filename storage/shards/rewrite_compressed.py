"""Rewritten rows as compressed parquet: one file a shard, read through a column map as files of others are.

Smaller, and slower to read than our own layout, which compresses nothing: for keeping and moving. Rewriting without
compression gives our own layout back, to the bit.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import UsageError
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.shards.files import Recorder
from isthmus.storage.shards.foreign_footers import Footer
from isthmus.storage.shards.foreign_index import ForeignFile, dump_foreign_index
from isthmus.storage.shards.foreign_map import (
    CaptionColumns,
    ColumnMap,
    FieldColumn,
    LatentColumns,
    TextColumns,
    Values,
)
from isthmus.storage.shards.index import shard_file
from isthmus.storage.shards.layout import CROP_COLUMNS, FIELDS, SIZE_COLUMNS, Column, table
from isthmus.storage.shards.manifest import COLUMNS_VERSION
from isthmus.storage.shards.spec import DatasetSpec

CODECS = ("none", "zstd", "lz4", "snappy")
SIBLING = "all"
"""Between a shard's number and `.parquet`."""
_FILE = ("file_bytes", "footer_bytes", "footer_crc32")


def spec_of(spec: DatasetSpec, size_classes: Sequence[int], where: str) -> DatasetSpec:
    """The spec of compressed files, all rows of which have all resolutions.

    Raises:
        UsageError: the rows are of several size classes.
    """
    if len(size_classes) != 1:
        raise UsageError(
            f"compressed files hold one size class, there are {', '.join(map(str, sorted(size_classes)))}",
            where=where,
            hint="`isthmus data split --by size-class` first, then each part; or --compression none",
        )
    return DatasetSpec(
        spec.autoencoder,
        spec.text,
        spec.resolutions_of(size_classes[0]),
        spec.captions,
        spec.buckets,
        spec.fields,
    )


def stored_name(sibling: str, column: str) -> str:
    """What a sibling's column is called beside those of other siblings: `text1/caption` is `caption1`."""
    if sibling == FIELDS:
        return column
    if sibling.endswith("px"):
        return f"{column}_{sibling}"
    return column + sibling.removeprefix("text")


def column_map(spec: DatasetSpec) -> ColumnMap:
    """Which column of the files is what."""
    captions = []
    for number in range(spec.captions):
        end = str(number or "")
        text = {
            encoder.name: TextColumns(
                tokens=Values(f"{encoder.name}_tokens{end}"),
                length=f"{encoder.name}_length{end}",
                pooled=None if encoder.pooled_width is None else Values(f"{encoder.name}_pooled{end}"),
            )
            for encoder in spec.text
        }
        captions.append(CaptionColumns(f"caption{end}", text))
    return ColumnMap(
        captions=tuple(captions),
        latents={
            r: LatentColumns(Values(f"latent_mean_{r}px"), Values(f"latent_logvar_{r}px"))
            for r in spec.resolutions
        },
        key="key",
        source="source",
        original_size=(SIZE_COLUMNS[0], SIZE_COLUMNS[1]),
        crop=(CROP_COLUMNS[0], CROP_COLUMNS[1], CROP_COLUMNS[2], CROP_COLUMNS[3]),
        flipped="flipped",
        fields={told.name: FieldColumn(told.name, told.kind) for told in spec.fields},
    )


def write_file(
    uri: str,
    shard: str,
    bucket: str,
    spec: DatasetSpec,
    codec: str,
    columns: Mapping[str, Sequence[Column]],
    groups: Sequence[Callable[[], Mapping[str, Mapping[str, Any]]]],
) -> Any:
    """Writes a shard's file.

    Args:
        columns: sibling -> its columns.
        groups: what gives the values of each row group: sibling -> column -> values.

    Returns:
        Its rows of the index, a pyarrow table.
    """
    named = [
        (sibling, column, Column(stored_name(sibling, column.name), column.kind, column.shape))
        for sibling, own in columns.items()
        for column in own
        if column.name != "key" or sibling == "text"
    ]
    schema = pa.schema([column.arrow() for _, _, column in named])
    name = shard_file(shard, SIBLING)
    where = join(uri, name)
    store, root = filesystem(uri)
    with storage_errors("write", where):
        file = store.open(f"{root}/{name}", "wb")
    try:
        recorder = Recorder(file)
        writer = pq.ParquetWriter(
            recorder,
            schema,
            version="2.6",
            compression=codec,
            use_dictionary=False,
            write_statistics=False,
            store_schema=False,
            write_page_checksum=True,
        )
        about = {"schema_version": COLUMNS_VERSION, "bucket": bucket, "columns": column_map(spec).to_json()}
        writer.add_key_value_metadata({"isthmus": json.dumps(about, sort_keys=True)})
        for give in groups:
            values = give()
            flat = {column.name: values[sibling][own.name] for sibling, own, column in named}
            rows = len(flat["key"])
            with storage_errors("write", where):
                writer.write_table(
                    table([column for _, _, column in named], flat, schema), row_group_size=rows
                )
            recorder.take()  # only the footer is kept
        with storage_errors("write", where):
            writer.close()
            file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.close()
        raise
    return _record(bytes(recorder.take()), recorder.position, name, bucket, column_map(spec).names())


def _record(tail: bytes, file_bytes: int, name: str, bucket: str, names: Sequence[str]) -> Any:
    """A file's rows of the index, from its end."""
    size = int.from_bytes(tail[-8:-4], "little") + 8
    data = tail[len(tail) - size :]
    footer = Footer(data, name)
    groups = range(footer.metadata.num_row_groups)
    numbers: dict[str, Any] = {
        "row_group": list(groups),
        "rows": [footer.metadata.row_group(group).num_rows for group in groups],
        "file_bytes": [file_bytes] * len(groups),
        "footer_bytes": [size] * len(groups),
        "footer_crc32": [zlib.crc32(data)] * len(groups),
    }
    for column in names:
        chunks = [footer.chunks(group, column) for group in groups]
        numbers[f"{column}/stored"] = [sum(chunk.stored for chunk in parts) for parts in chunks]
        numbers[f"{column}/decoded"] = [sum(chunk.decoded for chunk in parts) for parts in chunks]
    arrays = {told: pa.array(values, pa.int64()) for told, values in numbers.items()}
    return pa.table({"shard": [name] * len(groups), "bucket": [bucket] * len(groups), **arrays})


def dump(records: Sequence[Any], spec: DatasetSpec) -> tuple[bytes, dict[tuple[str, str], tuple[int, int]]]:
    """The index file of these files, and (shard, sibling) -> size and checksum of the footer."""
    columns = column_map(spec)
    names = columns.names()
    files, footers = [], {}
    for record in records:
        shard = str(record["shard"][0])
        file_bytes, footer_bytes, crc32 = (int(record[name][0].as_py()) for name in _FILE)
        files.append(
            ForeignFile(
                shard=shard,
                file_bytes=file_bytes,
                footer_bytes=footer_bytes,
                footer_crc32=crc32,
                row_group=record["row_group"].to_numpy(),
                rows=record["rows"].to_numpy(),
                bucket=record["bucket"].to_pylist(),
                stored=np.stack([record[f"{name}/stored"].to_numpy() for name in names], axis=1),
                decoded=np.stack([record[f"{name}/decoded"].to_numpy() for name in names], axis=1),
            )
        )
        footers[shard.partition(".")[0], SIBLING] = file_bytes, crc32
    return dump_foreign_index(files, columns, spec.resolutions[-1]), footers
