"""Foreign files that lie or are damaged: an error with a place, never a crash and never memory without bound."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus.errors import CorruptShard, IsthmusError
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_pages import walk
from isthmus.storage.shards.foreign_settings import parse_settings


def indexed(folder: Path, table: Any, **options: Any) -> Dataset:
    foreign.write(folder / "x.parquet", table, **options)
    index_files([str(folder)], None, parse_settings(foreign.MAP), replace=True)
    return open_dataset(str(folder))


def raised(work: Callable[[], object]) -> IsthmusError | None:
    """The error of ours that `work` ends in; any other passes."""
    try:
        work()
    except IsthmusError as error:
        return error
    return None


def test_a_replaced_or_cut_file_is_told_from_a_damaged_one(tmp_path):
    dataset = indexed(tmp_path, foreign.table(foreign.samples(8)))
    path = tmp_path / "x.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CorruptShard, match=r"shard x.parquet, row group 0"):
        ForeignReader(dataset, 64).read(0)
    path.write_bytes(whole[:-100] + bytes(92) + whole[-8:])
    with pytest.raises(CorruptShard, match=r"its footer is not the one that was indexed") as error:
        ForeignReader(open_dataset(str(tmp_path)), 64).read(0)
    assert "isthmus data index" in (error.value.hint or "")
    path.unlink()
    with pytest.raises(CorruptShard, match=r"shard x.parquet, row group 0: the file is missing"):
        ForeignReader(open_dataset(str(tmp_path)), 64).read(0)


@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_flipped_bytes_end_in_an_error_with_a_place_or_in_other_values(tmp_path, compression):
    random = np.random.default_rng(0)
    table = foreign.table(foreign.samples(8), foreign.as_list16)
    dataset = indexed(tmp_path, table, compression=compression)
    path = tmp_path / "x.parquet"
    whole = path.read_bytes()
    assert dataset.index.foreign is not None
    data_end = len(whole) - int(dataset.index.foreign.footer_bytes[0])
    failed = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for at in random.integers(4, data_end, random.integers(1, 4)):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        # A reader opens a file once and takes a later one for another: a fresh dataset for each.
        error = raised(lambda: ForeignReader(open_dataset(str(tmp_path)), 64).read(0))
        if error is not None:
            failed += 1
            assert str(error).startswith("shard x.parquet, row group 0")
    assert failed


def test_damaged_footers_are_refused_while_indexing(tmp_path):
    random = np.random.default_rng(1)
    path = foreign.write(tmp_path / "x.parquet", foreign.table(foreign.samples(4)))
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    settings = parse_settings(foreign.MAP)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in random.integers(footer, len(whole), random.integers(1, 5)):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        error = raised(lambda: index_files([str(tmp_path)], None, settings, replace=True))
        assert "\n" not in str(error)
    for content in (b"", b"PAR1", b"PAR1" + bytes(20) + b"PARE", whole[:-1], whole[-500:]):
        path.write_bytes(content)
        with pytest.raises(IsthmusError, match=r"x\.parquet"):
            index_files([str(tmp_path)], None, settings, replace=True)


def test_a_page_checksum_that_differs_is_found(tmp_path):
    table = foreign.table(foreign.samples(8))
    dataset = indexed(
        tmp_path,
        table,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        write_statistics=False,
    )
    path = tmp_path / "x.parquet"
    data = bytearray(path.read_bytes())
    mean = foreign.samples(1)[0].latents[64][0].tobytes()
    data[data.index(mean) + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShard, match=r"column latent: cannot be decoded: .*CRC"):
        ForeignReader(dataset, 64).read(0)
    ForeignReader(dataset, 64, check=False).read(0)


BOMB = """
import resource, sys
import foreign
from isthmus.errors import CorruptShard
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.foreign import ForeignReader
reader = ForeignReader(open_dataset(sys.argv[1]), 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    reader.read(0)
    print("read")
except CorruptShard as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("column", "layout", "copies", "limit"),
    [
        ("latent", foreign.as_binary, 1, 40_000),
        ("latent", foreign.as_list32, 1, 40_000),
        ("text", foreign.as_binary, 64, 600_000),
        ("latent", foreign.as_binary, 64, 600_000),
    ],
)
def test_a_bomb_is_refused_before_it_unpacks(tmp_path, column, layout, copies, limit):
    """A few kilobytes that unpack to gigabytes: values of zeros, a list without end, one value 4096 times."""
    rows = foreign.samples(64)
    good = foreign.table(rows, layout, text=pa.array([row.captions[0].encode() for row in rows]))
    good = pa.concat_tables([good] * copies)
    dataset = indexed(tmp_path, good, compression="zstd", row_group_size=4096)
    if copies > 1:
        # As pyarrow writes categories: the value once, in the dictionary's page.
        values = pa.DictionaryArray.from_arrays(np.zeros(len(good), np.int32), [b"x" * (1 << 20)])
    else:
        value = [0.0] * (1 << 22) if layout is foreign.as_list32 else bytes(1 << 25)
        values = pa.array([value, value, *good[column].to_pylist()[2:]], good[column].type)
    bomb = good.set_column(good.column_names.index(column), column, values)
    options = {"compression": "zstd", "row_group_size": 4096, "store_schema": False}
    path = foreign.write(tmp_path / "x.parquet", bomb, **options)
    data = path.read_bytes()
    assert len(data) < 1 << 22
    # The index is made to fit, as if these files had been indexed: only reading stands in the way.
    footer = int.from_bytes(data[-8:-4], "little") + 8
    fake(tmp_path, dataset, len(good), len(data), footer, zlib.crc32(data[-footer:]))
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(foreign.__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    said, kilobytes = done.stdout.splitlines()
    assert said.startswith("shard x.parquet, row group 0")
    assert "it claims" in said or "take more than" in said
    assert int(kilobytes) < limit


def fake(folder: Path, dataset: Dataset, rows: int, size: int, footer: int, crc: int) -> None:
    """Writes the index and the manifest anew, with another file's size and footer."""
    from dataclasses import replace

    from isthmus.storage.shards.foreign_index import ForeignFile, dump_foreign_index
    from isthmus.storage.shards.manifest import INDEX, MANIFEST, SideFile

    assert dataset.manifest.columns is not None
    names = dataset.manifest.columns.names()
    none, one = np.zeros((1, len(names)), np.int64), np.array([rows])
    file = ForeignFile("x.parquet", size, footer, crc, none[:, 0], one, ["1:1"], none, none)
    index = dump_foreign_index([file], dataset.manifest.columns, 64)
    manifest = replace(dataset.manifest, files={**dataset.manifest.files, INDEX: SideFile.of(index)})
    (folder / INDEX).write_bytes(index)
    (folder / MANIFEST).write_bytes(manifest.dump())


def test_page_headers_of_any_bytes_end_in_an_error(tmp_path):
    random = np.random.default_rng(2)
    path = foreign.write(tmp_path / "x.parquet", foreign.table(foreign.samples(8)), use_dictionary=True)
    chunk = pq.read_metadata(path).row_group(0).column(2)
    start = chunk.dictionary_page_offset
    data = path.read_bytes()[start : start + chunk.total_compressed_size]
    pages = walk(memoryview(data))
    assert pages.values == 8
    assert pages.decoded > pages.dictionary > 0
    for _ in range(2000):
        damaged = bytearray(data)
        for at in random.integers(0, 60, 3):
            damaged[at] = random.integers(256)
        with contextlib.suppress(ValueError):
            walk(memoryview(damaged))
    for length in range(1, 60):
        with pytest.raises(ValueError, match="page"):
            walk(memoryview(data[:length]))
