"""Datasets as pyarrow reads them, file by file: what rewriting must not change."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from isthmus.storage.shards.spec import AutoencoderSpec, DatasetSpec, EncoderSpec
from isthmus.storage.shards.synthetic import write_synthetic

SPEC = DatasetSpec(
    autoencoder=AutoencoderSpec("patch_pca", "synthetic", 4, 8, 0.5, 0.0),
    text=(EncoderSpec("clip_l", 4, 6, 5, "synthetic"), EncoderSpec("t5", 3, 8, None, "synthetic")),
    resolutions=(32, 64),
    captions=2,
    buckets=("1:1", "2:1"),
)
"""Two captions, two encoders, two resolutions, two buckets."""


def write(folder: Path, samples: int = 60, **changes: Any) -> Path:
    """A dataset of every kind of row, out of order: two buckets and two size classes."""
    options: dict[str, Any] = {
        "bucket_of": lambda number: "2:1" if number % 3 == 0 else "1:1",
        "size_class_of": lambda number: 32 if number % 5 == 0 else 64,
        "rows_per_shard": 16,
        "rows_per_group": 4,
        "prompts": ("a red heart", "a blue square"),
        **changes,
    }
    write_synthetic(str(folder), samples, options.pop("spec", SPEC), **options)
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Key -> everything that is stored of the sample, by sibling and column; its bucket and size class."""
    found: dict[str, dict[str, Any]] = {}
    index = pq.read_table(folder / "_index.parquet").to_pylist()
    kinds = {row["shard"]: (row["bucket"], row["size_class"]) for row in index}
    for shard, (bucket, size_class) in kinds.items():
        for path in sorted(folder.glob(f"{shard}.*.parquet")):
            sibling = path.name.split(".")[1]
            for row in pq.read_table(path).to_pylist():
                sample = found.setdefault(row["key"], {"bucket": bucket, "size_class": size_class})
                for column, value in row.items():
                    assert f"{sibling}/{column}" not in sample, f"{row['key']} is there twice"
                    sample[f"{sibling}/{column}"] = value
    return found


def files_of(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of all files below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
