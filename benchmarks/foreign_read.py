"""The general path against pyarrow: rows of parquet files that others made, read by `ForeignReader` and by `read_row_group`.

The same files, columns and row groups, one thread each, taken in turns within one process; medians. Our reader also
fetches the bytes itself, checks page headers and footers, and hands out fp16 rows; pyarrow's figure is the table alone.

    python benchmarks/foreign_read.py [--json] [--rows 512] [--runs 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings

MAP = {
    "autoencoder": {"kind": "diffusers", "latent_channels": 4, "factor": 8, "scaling_factor": 0.13025},
    "text": {"clip": {"max_tokens": 77, "width": 768}},
    "bucket": "1:1",
    "null_text": "zeros",
    "columns": {
        "key": "key",
        "captions": [{"caption": "caption", "clip": {"tokens": "text"}}],
        "latents": {512: {"mean": "latent"}},
    },
}
COUNTED = {
    "binary, zstd, dictionary": ("binary", {"compression": "zstd"}),
    "binary, snappy, dictionary": ("binary", {"compression": "snappy"}),
    "fixed-size binary, zstd, dictionary": ("fixed", {"compression": "zstd"}),
    "binary, lz4, v2 pages": ("binary", {"compression": "lz4", "data_page_version": "2.0"}),
}
SHOWN = {
    "binary, uncompressed": ("binary", {"compression": "none", "use_dictionary": False}),
    "list<float16>, zstd": ("list16", {"compression": "zstd", "use_dictionary": False}),
    "list<float32>, zstd": ("list32", {"compression": "zstd", "use_dictionary": False}),
}
"""Latents as lists: pyarrow takes ten times as long to decode them, and fp32 is made fp16 on top."""


def make(path: Path, rows: int, layout: str, options: dict[str, Any]) -> None:
    """Rows as of the facts: fp16 latents [4, 64, 64] and text [77, 768], 151 KB a row, 64 a row group."""
    random = np.random.default_rng(0)

    def column(*shape: int) -> Any:
        values = random.standard_normal((rows, *shape), np.float32).astype(np.float16).reshape(rows, -1)
        if layout == "binary":
            return pa.array([row.tobytes() for row in values], pa.binary())
        if layout == "fixed":
            return pa.array([row.tobytes() for row in values], pa.binary(values.shape[1] * 2))
        numbers = values.ravel().astype(np.float16 if layout == "list16" else np.float32)
        offsets = np.arange(rows + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(offsets, pa.array(numbers))

    table = pa.table(
        {
            "key": [f"{number:09}" for number in range(rows)],
            "caption": [f"a picture of thing {number % 50}" for number in range(rows)],
            "latent": column(4, 64, 64),
            "text": column(77, 768),
        }
    )
    pq.write_table(table, path, row_group_size=64, **options)


def measure(folder: Path, runs: int) -> dict[str, float]:
    """Medians of both readers over the same file, samples/s, and their ratio."""
    dataset = open_dataset(str(folder))
    reader, rows = ForeignReader(dataset, 512), dataset.manifest.samples
    path = str(folder / "data.parquet")
    metadata = pq.read_metadata(path)
    names = ["key", "caption", "text", "latent"]

    def ours() -> None:
        for block in range(len(dataset.index)):
            reader.read(block)

    def theirs() -> None:
        file = pq.ParquetFile(path, metadata=metadata)
        for number in range(metadata.num_row_groups):
            file.read_row_group(number, columns=names, use_threads=False)

    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for run in range(runs + 1):
        for name, work in (("ours", ours), ("theirs", theirs)):
            started = time.perf_counter(), time.process_time()
            work()
            if run:  # the first warms the page cache and the allocator
                taken[name].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    found = {name: rows / statistics.median(wall for wall, _ in times) for name, times in taken.items()}
    ratios = [
        statistics.median(b[at] / a[at] for a, b in zip(taken["ours"], taken["theirs"], strict=True))
        for at in (0, 1)
    ]
    return {
        "samples_per_s": round(found["ours"]),
        "pyarrow_samples_per_s": round(found["theirs"]),
        "ratio": round(ratios[0], 3),
        "cpu_ratio": round(ratios[1], 3),
    }


def main() -> None:
    """Prints one line a layout, or a JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--runs", type=int, default=7)
    told = parser.parse_args()
    pa.set_cpu_count(1)
    layouts: dict[str, dict[str, float]] = {}
    for name, (layout, options) in {**COUNTED, **SHOWN}.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "data.parquet", told.rows, layout, options)
            index_files([folder], None, parse_settings(MAP))
            layouts[name] = measure(Path(folder), told.runs)
    result = {
        "foreign_ratio": min(layouts[name]["ratio"] for name in COUNTED),
        "pyarrow": pa.__version__,
        "rows": told.rows,
        "runs": told.runs,
        "layouts": layouts,
    }
    if told.json:
        print(json.dumps(result, indent=2))
        return
    for name, found in layouts.items():
        print(
            f"{name:<38} {found['samples_per_s']:>7} samples/s, pyarrow {found['pyarrow_samples_per_s']:>7}, "
            f"ratio {found['ratio']:.2f} (of CPU time {found['cpu_ratio']:.2f})"
        )
    print(f"foreign_ratio (zstd, dictionary, binary; the worst of these) {result['foreign_ratio']:.2f}")


if __name__ == "__main__":
    main()
