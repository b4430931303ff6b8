"""Ten million rows in 10,000 shards and 160,000 row groups: opened, ordered and a late step found, in time and memory.

Each measurement runs in a process of its own, which counts from after its imports. Only index and manifest are made:
finding a step reads nothing else.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from large_index import SD3, SDXL, write_large_index

from isthmus.errors import DataError
from isthmus.storage.shards.index import Index, parse_index
from isthmus.storage.shards.synthetic import TINY, write_synthetic

MEASURE = """
import json, sys, time
from fractions import Fraction
from isthmus.storage.shards import open_dataset
from isthmus.storage.stream import Order, Segment
from isthmus.storage.stream.stage import StageReader

def megabytes():
    return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1]) / 1024

folder, resolution, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before, began, spent = megabytes(), time.perf_counter(), time.process_time()

def first_position(share):
    stage = StageReader(
        0, resolution, [dataset], [Fraction(1)], sorted(dataset.spec.buckets), seed=1, lanes=128, shuffle_window=16384
    )
    order = Order(stage.lines, [Segment(0, 0, 0, 1024)])
    started = time.perf_counter()
    rows = order.step(int(share * stage.rows) // 1024, world_size - 1, world_size)
    return len(rows.positions), time.perf_counter() - started

dataset = open_dataset(folder)
found, _ = first_position(0.9)
seconds, spent = time.perf_counter() - began, time.process_time() - spent
costs = {share: min(first_position(share)[1] for _ in range(5)) for share in (0.01, 0.99)}
print(json.dumps({
    "seconds": seconds, "processor": spent, "megabytes": megabytes() - before, "rows": found, "samples": dataset.manifest.samples,
    "blocks": len(dataset.index), "early": costs[0.01], "late": costs[0.99],
}))
"""


@pytest.mark.parametrize(
    ("spec", "resolution", "world_size"), [(SDXL, 256, 1), (SD3, 512, 128)], ids=["sdxl", "sd3"]
)
def test_ten_million_rows_are_ready_within_two_seconds_and_500_megabytes(
    tmp_path, spec, resolution, world_size
):
    manifest = write_large_index(tmp_path, spec, shards=10_000, groups=16, rows=[62, 63])
    assert manifest.samples == 10_000_000
    runs = []
    for _ in range(3):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(resolution), str(world_size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
        if runs[-1]["seconds"] < 1.5:
            break
    # Beside other tests a process waits for the cores: then the processor time counts, which all its threads add to.
    found = min(runs, key=lambda run: min(run["seconds"], run["processor"]))
    print(f"\n{found}")
    assert (found["samples"], found["blocks"]) == (10_000_000, 160_000)
    assert found["rows"] == 1024 // world_size
    assert min(found["seconds"], found["processor"]) < 2.0
    assert found["megabytes"] < 500
    # The first position of a fresh order: 1 % or 99 % of an epoch on.
    assert found["late"] < 1.5 * found["early"] + 0.005


def test_the_index_of_the_maker_is_what_the_writer_would_write(tmp_path):
    """The same columns, types and options as dump_index gives, so that the large index stands for a real one."""
    spec = replace(TINY, captions=2)
    write_synthetic(
        str(tmp_path / "real"),
        60,
        spec,
        bucket_of=lambda number: TINY.buckets[number % 2],
        size_class_of=lambda number: TINY.resolutions[number // 2 % 2],
    )
    write_large_index(tmp_path / "made", spec, shards=18, groups=2, rows=[8])
    real, made = (
        pq.ParquetFile(io.BytesIO((tmp_path / name / "_index.parquet").read_bytes()))
        for name in ("real", "made")
    )
    assert made.schema_arrow.equals(real.schema_arrow)
    for number in range(made.metadata.num_columns):
        one, other = (file.metadata.row_group(0).column(number) for file in (made, real))
        assert (one.path_in_schema, one.compression) == (other.path_in_schema, other.compression)
        assert ("RLE_DICTIONARY" in one.encodings) == ("RLE_DICTIONARY" in other.encodings), (
            one.path_in_schema
        )


def test_checksums_are_read_when_they_are_needed_and_must_be_there(tmp_path):
    manifest = write_synthetic(str(tmp_path), 20)
    table = pq.read_table(tmp_path / "_index.parquet")
    at = table.column_names.index("64px/latent_mean/crc32")
    column = table[at].to_pylist()
    missing = table.set_column(at, table.column_names[at], pa.array([None, *column[1:]], pa.uint32()))
    words = table.set_column(at, table.column_names[at], pa.array(["a"] * len(column)))

    def parse(changed: pa.Table) -> Index:
        sink = io.BytesIO()
        pq.write_table(changed, sink)
        return parse_index(sink.getvalue(), manifest, "here")

    index = parse(missing)
    assert index.sibling("text").columns[0] == "key"
    with pytest.raises(
        DataError, match="not a valid index: column 64px/latent_mean/crc32 is not whole numbers"
    ):
        index.sibling("64px")
    with pytest.raises(
        DataError, match="here: not a valid index: the checksums of sibling 64px are not whole"
    ):
        parse(words)
