"""The three ways to a dataset's files: the same bits through each, and what a cache is told of the files."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import foreign
import fsspec
import numpy as np
import pytest

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.spec import AutoencoderSpec, DatasetSpec, EncoderSpec
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream import Batch, Loader, Plan, Segment
from isthmus.storage.stream.access import Access
from isthmus.storage.stream.access_files import check_whole, whole_files

SPEC = DatasetSpec(
    autoencoder=AutoencoderSpec("patch_pca", "synthetic", 4, 8, 0.5, 0.0),
    text=(EncoderSpec("t5", 3, 8, None, "synthetic"),),
    resolutions=(32, 64),
    captions=2,
    buckets=("1:1", "2:1"),
)
ROWS, STEPS = 96, 30


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "latents"
    write_synthetic(
        str(root),
        ROWS,
        SPEC,
        bucket_of=lambda number: "2:1" if number % 3 == 0 else "1:1",
        size_class_of=lambda number: 32 if number % 5 == 0 else None,
        rows_per_shard=16,
        rows_per_group=4,
    )
    return root


@pytest.fixture
def remote(local: Path) -> Iterator[str]:
    memory, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for path in local.iterdir():
        memory.pipe_file(f"{root}/{path.name}", path.read_bytes())
    yield f"memory:/{root}"
    memory.rm(root, recursive=True)


def bits(batch: Batch) -> tuple[Any, ...]:
    """All that a batch holds, copied."""
    text = [(name, text.tokens.tobytes(), text.length.tobytes()) for name, text in sorted(batch.text.items())]
    arrays = (batch.latent_mean, batch.latent_logvar, batch.original_size, batch.crop, batch.flipped)
    return (
        batch.step,
        batch.bucket,
        list(batch.keys),
        list(batch.captions),
        text,
        [np.ascontiguousarray(array).tobytes() for array in arrays],
    )


def batches(dataset: Dataset, access: Access, *, check: bool) -> list[tuple[Any, ...]]:
    with Loader(
        [dataset],
        [1],
        seed=5,
        lanes=4,
        shuffle_window=16,
        stages=[64],
        plan=Plan((Segment(0, 0, 0, 8),)),
        access=[access],
        check=check,
        wait_limit=20.0,
        memory_limit=200_000,
    ) as loader:
        return [bits(batch) for batch in islice(loader, STEPS)]


def filled(access: Access, files: int) -> None:
    """Waits until so many files are in the cache."""
    assert access._cache is not None
    assert access._cache.folder is not None
    folder = access._cache.folder
    deadline = time.monotonic() + 10
    while sum(not path.name.endswith("%part") for path in (folder.path / "copies").glob("*/*")) < files:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("check", [True, False])
def test_stream_mount_and_download_give_the_same_bits(
    local: Path, remote: str, tmp_path: Path, check: bool
) -> None:
    mounted, stored = open_dataset(str(local)), open_dataset(remote)
    access = Access(mounted, "mount")
    expected = batches(mounted, access, check=check)
    access.close()
    access = Access(stored, "stream")
    assert batches(stored, access, check=check) == expected
    access.close()
    hits = []
    for _ in range(2):  # while the cache fills, and when it has
        access = Access(stored, "download", cache_dir=tmp_path, cache_limit=10**7, resolutions=[64])
        assert batches(stored, access, check=check) == expected
        filled(access, len(whole_files(stored, [64])))
        hits.append((access.counters.count("cache_hits"), access.counters.count("cache_misses")))
        access.close()
    assert hits[1][0] > 0
    assert hits[1][1] == 0
    # And with room for some of the files only.
    some = sum(file.size for file in whole_files(stored).values()) // 3
    access = Access(stored, "download", cache_dir=tmp_path, cache_limit=some)
    assert batches(stored, access, check=check) == expected
    access.close()


def test_a_copy_is_checked_against_all_that_the_index_says(local: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(local))
    files = whole_files(dataset)
    assert {path.name for path in local.glob("part-*.parquet")} == set(files)
    assert not [name for name in whole_files(dataset, [32]) if ".64px." in name]
    name, file = next((name, file) for name, file in files.items() if ".64px." in name)
    content = (local / name).read_bytes()
    assert file.size == len(content)
    index = dataset.index.sibling("64px")
    footer = int(index.offset[file.end - 1]) + index.size(file.end - 1)
    for at, message in (
        (index.start(file.first + 1, 2) + 9, r"row group 1, column latent_logvar: its bytes have another"),
        (footer + 5, "its footer has another checksum"),
        (None, f"the file has {file.size - 1:,} bytes, {file.size:,} in the index"),
    ):
        damaged = bytearray(content)
        if at is None:
            damaged.pop()
        else:
            damaged[at] ^= 1
        (tmp_path / "copy").write_bytes(damaged)
        with open(tmp_path / "copy", "rb") as copy, pytest.raises(CorruptShard, match=message):
            check_whole(dataset, name, file, copy.fileno())
    with open(local / name, "rb") as whole:
        check_whole(dataset, name, file, whole.fileno())


def test_the_part_that_fits_is_told(remote: str, local: Path, tmp_path: Path) -> None:
    dataset = open_dataset(remote)
    sizes = [file.size for file in whole_files(dataset, [64]).values()]
    access = Access(dataset, "download", cache_dir=tmp_path, cache_limit=sum(sizes) // 2, resolutions=[64])
    assert access.fit is not None
    assert access.fit.needed == sum(sizes)
    assert "50% of the dataset's" in str(access.fit)
    assert "the rest is read from the store in every epoch" in str(access.fit)
    access.close()
    access = Access(dataset, "download", cache_dir=tmp_path, cache_limit=10**9)
    assert "of the dataset fit" in str(access.fit)
    access.close()
    assert Access(dataset, "stream").fit is None
    assert Access(open_dataset(str(local)), "download", cache_dir=tmp_path).fit is None


def test_a_mode_or_a_limit_that_cannot_be_is_refused(remote: str, tmp_path: Path) -> None:
    dataset = open_dataset(remote)
    with pytest.raises(UsageError, match="access is stream, mount or download, not copy"):
        Access(dataset, "copy")
    with pytest.raises(UsageError, match=r"a cache limit of 100 bytes is smaller than the largest file"):
        Access(dataset, "download", cache_dir=tmp_path, cache_limit=100)


def test_several_roots_each_serve_their_files_and_only_remote_ones_are_cached(
    local: Path, remote: str, tmp_path: Path
) -> None:
    memory, path = fsspec.filesystem("memory"), remote.removeprefix("memory:/")
    here = tmp_path / "here"
    here.mkdir()
    for file in local.glob("part-0000[02].*"):
        (here / file.name).write_bytes(file.read_bytes())
        memory.rm(f"{path}/{file.name}")
    dataset = open_dataset([remote, str(here)])
    access = Access(dataset, "download", cache_dir=tmp_path / "cache", cache_limit=10**7, resolutions=[64])
    whole = open_dataset(str(local))
    plain = Access(whole)
    assert batches(dataset, access, check=True) == batches(whole, plain, check=True)
    far = [name for name in whole_files(dataset, [64]) if not (here / name).exists()]
    filled(access, len(far))
    assert {path.name for path in (tmp_path / "cache" / "copies").glob("*/*")} == set(far)
    assert access.ranges("part-00000.text.parquet").uri == str(here)
    plain.close()
    access.close()


def test_files_of_which_too_little_is_read_are_not_brought(remote: str, tmp_path: Path) -> None:
    """A node of many reads a little of every file in each epoch."""
    dataset = open_dataset(remote)
    access = Access(
        dataset, "download", cache_dir=tmp_path, cache_limit=10**7, resolutions=[64], passes=1 / 16
    )
    files = [(name, file.size) for name, file in whole_files(dataset, [64]).items()]
    access.expect([(name, size // 4) for name, size in files])
    time.sleep(0.3)
    assert not list((tmp_path / "copies").glob("*/*"))
    access.expect(files * 2, anew=True)
    filled(access, len(files))
    access.close()


def test_files_that_others_made_are_kept_and_checked_by_size_and_footer(tmp_path: Path) -> None:
    folder, root = tmp_path / "foreign", f"/{uuid.uuid4().hex}"
    for number in range(3):
        rows = foreign.table(foreign.samples(24, first=24 * number))
        foreign.write(folder / f"sub/file{number}.parquet", rows, row_group_size=8)
    index_files([str(folder)], None, parse_settings(foreign.mapped()))
    local, memory = open_dataset(str(folder)), fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    dataset = open_dataset(f"memory:/{root}")
    plain = Access(local)
    expected = batches(local, plain, check=True)
    plain.close()
    for _ in range(2):
        access = Access(dataset, "download", cache_dir=tmp_path / "cache", cache_limit=10**7)
        assert batches(dataset, access, check=True) == expected
        filled(access, 3)
        misses = access.counters.count("cache_misses")
        access.close()
    assert misses == 0
    files = whole_files(dataset)
    name = "sub/file1.parquet"
    damaged = bytearray((folder / name).read_bytes())
    damaged[-12] ^= 1
    (tmp_path / "copy").write_bytes(damaged)
    with open(tmp_path / "copy", "rb") as copy, pytest.raises(CorruptShard, match="its footer has another"):
        check_whole(dataset, name, files[name], copy.fileno())
    memory.rm(root, recursive=True)
