"""Plain parquet that the peers read: one file with all columns, uncompressed, which is the fastest for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from peers import rows


def table(start: int, stop: int) -> Any:
    """Rows as an Arrow table; arrays are fixed-size binary."""
    found = list(rows.rows(start, stop))
    columns: dict[str, Any] = {
        "key": pa.array([row.key for row in found]),
        "caption": pa.array([row.caption for row in found]),
    }
    for name, shape in rows.ARRAYS.items():
        values = np.stack([getattr(row, name) for row in found])
        kind = pa.binary(2 * int(np.prod(shape)))
        columns[name] = pa.FixedSizeBinaryArray.from_buffers(kind, len(found), [None, pa.py_buffer(values)])
    columns["length"] = pa.array([row.length for row in found], pa.int32())
    return pa.table(columns)


def write_parquet(folder: Path, count: int) -> None:
    """Files of 2,560 rows in row groups of 64."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, start in enumerate(range(0, count, rows.SHARD_ROWS)):
        stop = min(start + rows.SHARD_ROWS, count)
        schema = table(start, start + 1).schema
        with pq.ParquetWriter(
            folder / f"part-{shard:05d}.parquet", schema, compression="none", use_dictionary=False
        ) as writer:
            for at in range(start, stop, 64):
                writer.write_table(table(at, min(at + 64, stop)), row_group_size=64)
