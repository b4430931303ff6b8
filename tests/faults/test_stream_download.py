"""The loader in download mode: the same keys as in place, also when the cache's disk is full, gone, or damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from itertools import islice
from pathlib import Path

import fsspec
import pytest
from streams import QUICK, keys_of, loader_of, threads_left, undisturbed

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream.access import Access

pytestmark = pytest.mark.faults
STEPS = 100


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """512 rows in 16 shards, 640 KB."""
    place = tmp_path_factory.mktemp("written") / "data"
    write_synthetic(str(place), 512)
    return place


@pytest.fixture(scope="module")
def expected(written) -> list[list[str]]:
    return undisturbed(str(written), steps=STEPS)


@pytest.fixture
def remote(written, request):
    """The dataset in a store that is not local."""
    memory, root = fsspec.filesystem("memory"), f"/{request.node.name.replace('[', '-').rstrip(']')}"
    for path in written.iterdir():
        memory.pipe_file(f"{root}/{path.name}", path.read_bytes())
    yield open_dataset(f"memory:/{root}")
    memory.rm(root, recursive=True)


def download(dataset: Dataset, cache: Path, **options: object) -> Access:
    return Access(dataset, "download", cache_dir=cache, policy=QUICK, **options)


def keys(dataset: Dataset, access: Access, check: bool = True) -> list[list[str]]:
    try:
        return keys_of(loader_of(dataset, access=[access], check=check, memory_limit=150_000), STEPS)
    finally:
        assert not threads_left()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("limit", [None, 100_000])
def test_download_delivers_the_keys_of_reading_in_place(remote, expected, tmp_path, limit, check):
    access = download(remote, tmp_path / "cache", cache_limit=limit)
    assert keys(remote, access, check) == expected
    stats = access.counters.snapshot()
    assert stats["cache_hits"] + stats["cache_misses"] > 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_cache_disk_that_is_full_is_a_warning_and_the_order_stays(remote, expected, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if subprocess.run(command, check=False, capture_output=True, timeout=20).returncode:
        pytest.skip("this container may not mount")
    try:
        access = download(remote, small, cache_limit=10_000_000)  # more than there is
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with loader_of(remote, access=[access], memory_limit=150_000) as loader:
                assert [list(batch.keys) for batch in islice(loader, STEPS)] == expected
                deadline = time.monotonic() + 10
                while time.monotonic() < deadline and not any(
                    "cache folder" in str(w.message) for w in caught
                ):
                    time.sleep(0.02)  # the cache is filled behind the reader's back
        (line,) = [str(warning.message) for warning in caught if "cache folder" in str(warning.message)]
        assert "the disk is full" in line
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=False, timeout=20)


def test_a_cache_folder_that_is_removed_while_it_is_used_changes_nothing(remote, expected, tmp_path):
    access = download(remote, tmp_path / "cache")
    loader = loader_of(remote, access=[access], memory_limit=150_000)
    got = []
    with loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in islice(loader, STEPS):
            got.append(list(batch.keys))
            if batch.step in (5, 60):
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert got == expected


def test_a_damaged_copy_is_fetched_again(remote, expected, tmp_path):
    assert keys(remote, download(remote, tmp_path / "cache")) == expected
    copies = [path for path in (tmp_path / "cache").rglob("part-*.parquet*") if path.is_file()]
    assert copies
    for path in copies:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
    access = download(remote, tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert keys(remote, access) == expected


def test_a_limit_below_the_largest_file_is_refused(remote, tmp_path):
    with pytest.raises(UsageError, match="largest file"):
        download(remote, tmp_path / "cache", cache_limit=1000)


def test_a_shard_that_the_store_lacks_is_named(remote, tmp_path):
    fsspec.filesystem("memory").rm(f"{remote.uri.removeprefix('memory:/')}/part-00002.64px.parquet")
    access = download(remote, tmp_path / "cache")
    with pytest.raises(
        CorruptShard, match=r"shard part-00002.64px.parquet, row group \d: the file is missing"
    ):
        keys(remote, access)
