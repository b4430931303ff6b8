"""The loader over files that are missing, replaced, cut, or on a mount that goes away; and over very little data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from streams import BRIEF, keys_of, loader_of, threads_left, undisturbed

from isthmus.errors import CorruptShard, DataError, StorageError, UsageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.manifest import INDEX, MANIFEST, SideFile
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment

pytestmark = pytest.mark.faults
STEPS = 60

TIGHT = {"memory_limit": 128_000, "depth": 1}
"""A fifth of the dataset: most of it is read after the fault."""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """512 rows in 16 shards, 640 KB."""
    place = tmp_path_factory.mktemp("written") / "data"
    write_synthetic(str(place), 512)
    return place


@pytest.fixture
def data(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "data"))


@pytest.fixture(scope="module")
def expected(written) -> list[list[str]]:
    return undisturbed(str(written), steps=STEPS)


def run(loader: Loader, at: int, fault: Callable[[], object]) -> list[list[str]]:
    """The keys of the steps, with something happening after step `at`."""
    keys = []
    with loader:
        for batch in islice(loader, STEPS):
            keys.append(list(batch.keys))
            if batch.step == at:
                fault()
    return keys


def error_of(
    loader: Loader,
    kind: type[Exception] | tuple[type[Exception], ...],
    at: int = -1,
    fault: Callable[[], object] = lambda: None,
) -> str:
    """The one line that the loader ends with."""
    with pytest.raises(kind) as raised:
        run(loader, at, fault)
    line = str(raised.value)
    assert "\n" not in line
    assert not threads_left()
    return line


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_a_damaged_file_is_named_with_its_row_group_at_the_step_that_needs_it(data, expected, how, check):
    path = data / "part-00003.64px.parquet"
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1500] if how == "cut" else content + b"more")
    dataset, done = open_dataset(str(data)), []
    with pytest.raises(CorruptShard) as raised, loader_of(dataset, BRIEF, check=check) as loader:
        done.extend(list(batch.keys) for batch in loader)
    line = str(raised.value)
    assert re.match(r"shard part-00003.64px.parquet, row group \d: .*(missing|cut short|\d bytes)", line), (
        line
    )
    assert done == expected[: len(done)]
    with loader_of(dataset, BRIEF, check=check) as loader:
        shards = {place.shard for place in loader.describe(len(done))}
    assert path.name in shards  # not before it is needed, and not later


@pytest.mark.parametrize("check", [True, False])
def test_a_shard_that_is_replaced_while_it_is_read_is_found(data, tmp_path, check):
    """By one of the same name and length, as a job that encodes again would."""
    write_synthetic(str(tmp_path / "other"), 512, seed=1)

    def replace_shards() -> None:
        for path in data.glob("part-*.64px.parquet"):
            (tmp_path / "other" / path.name).replace(path)

    loader = loader_of(open_dataset(str(data)), BRIEF, check=check, **TIGHT)
    line = error_of(loader, CorruptShard, 2, replace_shards)
    told = "another checksum" if check else "was replaced"
    assert re.match(rf"shard part-000\d\d.64px.parquet, row group \d.*({told}|was replaced)", line), line


def test_flipped_bytes_are_found_with_checksums_on_and_named_by_column(data, expected):
    dataset = open_dataset(str(data))
    path = data / dataset.index.file(5, "64px")
    content = bytearray(path.read_bytes())
    content[dataset.index.sibling("64px").start(5, 1) + 100] ^= 1
    path.write_bytes(content)
    line = error_of(loader_of(dataset), CorruptShard)
    place = f"shard {path.name}, row group {dataset.index.row_group[5]}, column latent_mean: "
    assert line.startswith(place + "its bytes have another checksum")
    assert keys_of(loader_of(dataset, check=False), STEPS) == expected  # off as asked


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_that_goes_away_and_returns_is_waited_for(data, expected, check):
    away = data.with_name("away")

    def go() -> None:
        data.rename(away)
        threading.Timer(0.7, lambda: away.rename(data)).start()

    loader = loader_of(open_dataset(str(data)), check=check, **TIGHT)
    assert run(loader, 2, go) == expected
    # Without checks rows are gathered from files that stay open: those that were open before can go on.
    assert loader.stats()["retries"] > 0 or not check


def test_a_folder_that_stays_away_is_an_error_that_says_how_long_it_was_tried(data):
    loader = loader_of(open_dataset(str(data)), BRIEF, **TIGHT)
    began = time.monotonic()
    line = error_of(loader, StorageError, 2, lambda: data.rename(data.with_name("away")))
    assert time.monotonic() - began < 5
    assert re.search(r"shard part-000\d\d.\w+.parquet, row group \d: .*gone.*tried \d+ times", line), line


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_mount_that_goes_away_and_returns_is_waited_for(written, expected, tmp_path):
    """A file system of its own, as a store's mount is; without it an empty folder answers."""
    store, point = tmp_path / "store", tmp_path / "mount"
    store.mkdir()
    point.mkdir()

    def call(*command: str) -> bool:
        return subprocess.run(command, check=False, timeout=20, capture_output=True).returncode == 0

    def mount() -> bool:
        return call("mount", "--bind", str(store), str(point))

    back = threading.Timer(0.7, mount)

    def go() -> None:
        call("umount", "--lazy", str(point))
        back.start()

    if not call("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(store)):
        pytest.skip("this container may not mount")
    try:
        shutil.copytree(written, store, dirs_exist_ok=True)
        assert mount()
        loader = loader_of(open_dataset(str(point)), **TIGHT)
        assert run(loader, 2, go) == expected
        assert loader.stats()["retries"] > 0
    finally:
        if back.ident is not None:
            back.join()  # or it would mount behind the test's back
        call("umount", "--lazy", str(point))
        call("umount", "--lazy", str(store))


def test_a_dataset_that_is_deleted_while_it_is_read_is_missing(data):
    loader = loader_of(open_dataset(str(data)), BRIEF, **TIGHT)
    line = error_of(loader, (CorruptShard, StorageError), 2, lambda: shutil.rmtree(data))
    assert re.search(r"shard part-000\d\d.\w+.parquet, row group \d", line), line


# --- very little data ---


def test_one_row_fills_every_batch(tmp_path):
    write_synthetic(str(tmp_path / "data"), 1)
    keys = keys_of(loader_of(open_dataset(str(tmp_path / "data"))), 20)
    assert keys == [["s0"] * 8] * 20


@pytest.mark.parametrize("rows", [2, 5, 7, 9])
def test_fewer_rows_than_a_batch_come_equally_often(tmp_path, rows):
    write_synthetic(str(tmp_path / "data"), rows)
    keys = keys_of(loader_of(open_dataset(str(tmp_path / "data")), lanes=8), 30)
    counted = Counter(key for step in keys for key in step)
    assert set(counted) == {f"s{number}" for number in range(rows)}
    assert max(counted.values()) - min(counted.values()) <= 8  # lanes stand a row apart at most


def test_a_bucket_smaller_than_a_batch_is_trained_as_often_as_its_rows_say(tmp_path):
    write_synthetic(
        str(tmp_path / "data"), 67, bucket_of=lambda number: "2:1" if number in (20, 40, 60) else "1:1"
    )
    with loader_of(open_dataset(str(tmp_path / "data"))) as loader:
        steps = [(batch.bucket, list(batch.keys)) for batch in islice(loader, 200)]
    counted = Counter(key for _, keys in steps for key in keys)
    rare = {f"s{number}" for number in (20, 40, 60)}
    assert all((bucket == "2:1") == (key in rare) for bucket, keys in steps for key in keys)
    assert len(counted) == 67
    # 1600 rows are 23.9 epochs; a bucket's steps come in whole batches.
    assert all(abs(counted[key] - 1600 / 67) <= 4 for key in counted)


def test_an_empty_dataset_is_refused_when_it_is_written_and_when_it_is_read(tmp_path, data):
    with pytest.raises(UsageError, match="a dataset needs at least one"):
        write_synthetic(str(tmp_path / "empty"), 0)
    # One that something else made: an index without blocks.
    manifest = open_dataset(str(data)).manifest
    pq.write_table(pq.read_table(data / INDEX).slice(0, 0), data / INDEX, store_schema=False)
    files = {**manifest.files, INDEX: SideFile.of((data / INDEX).read_bytes())}
    empty = replace(manifest, samples=0, rows={}, shards=0, blocks=0, size=0, files=files)
    (data / MANIFEST).write_bytes(empty.dump())
    with pytest.raises((DataError, UsageError), match=r"no source has|no sample|empty"):
        loader_of(open_dataset(str(data))).close()


def test_a_stage_that_no_image_reaches_is_refused(tmp_path):
    write_synthetic(str(tmp_path / "data"), 9, size_class_of=lambda number: 32)
    with pytest.raises(UsageError, match="stage 0: no source has images that reach 64 px"):
        loader_of(open_dataset(str(tmp_path / "data"))).close()


def test_a_row_group_larger_than_the_memory_limit_is_refused_with_the_arithmetic(tmp_path):
    write_synthetic(str(tmp_path / "data"), 64, rows_per_group=32)
    dataset = open_dataset(str(tmp_path / "data"))
    block = sum(dataset.index.sibling(name).size(0) for name in ("64px", "text"))
    with pytest.raises(UsageError) as raised:
        loader_of(dataset, lanes=1, plan=Plan((Segment(0, 0, 0, 1),)), memory_limit=block - 100).close()
    assert re.search(
        r"stage 0 needs .* \d+ of a block.*data.memory_limit is .* KB \(raise data.memory_limit to",
        str(raised.value),
    ), str(raised.value)
