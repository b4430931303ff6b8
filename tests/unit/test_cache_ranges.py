"""Reading through a cache folder: right bytes whatever happens to the folder, and what is left behind is cleaned up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from isthmus.errors import CorruptShard, StorageError, UsageError
from isthmus.storage.ranges import cache_folder
from isthmus.storage.ranges.cache import Cache, CachedRanges
from isthmus.storage.ranges.cache_folder import CacheFolder
from isthmus.storage.ranges.cache_locks import is_held
from isthmus.storage.ranges.open import open_ranges

SIZE = 100_000
FILES = {f"{letter}.bin": bytes([number]) * SIZE for number, letter in enumerate("abcd", 1)}


@pytest.fixture
def store() -> Iterator[str]:
    memory, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for name, content in FILES.items():
        memory.pipe_file(f"{root}/{name}", content)
    yield f"memory:/{root}"
    memory.rm(root, recursive=True)


Opener = Callable[..., CachedRanges]


@pytest.fixture
def opened(store: str, tmp_path: Path) -> Iterator[Opener]:
    """Opens caches on one folder, and closes them."""
    caches = []

    def make(limit: int | None = 10 * SIZE, folder: Path | None = None, dataset: str = "data", **more):
        remote = open_ranges(store)
        cache = Cache(
            folder or tmp_path / "cache",
            dataset,
            {name: len(content) for name, content in FILES.items()},
            lambda _: remote,
            limit=limit,
            piece_bytes=30_000,
            **more,
        )
        caches.append(cache)
        return CachedRanges(remote, cache)

    yield make
    for cache in caches:
        cache.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def warned(pattern: str) -> Iterator[None]:
    """One warning like this comes, from whichever thread."""
    with pytest.warns(RuntimeWarning, match=pattern) as found:  # noqa: PT031 - it waits for the warning, too
        yield
        until(lambda: len(found) > 0)


def copies(folder: Path) -> set[str]:
    return {path.name for path in (folder / "copies").glob("*/*") if not path.name.endswith("%part")}


def read(ranges: CachedRanges, name: str = "a.bin") -> None:
    """Reads a file in three views; its bytes must be right."""
    memory = bytearray(SIZE)
    view = memoryview(memory)
    ranges.scatter(name, 0, [view[:10], view[10:40_000], view[40_000:]], file_bytes=SIZE)
    assert memory == FILES[name]


def counts(ranges: CachedRanges) -> tuple[float, float]:
    counters = ranges._cache.counters
    return counters.count("cache_hits"), counters.count("cache_misses")


def expect(ranges: CachedRanges, *names: str) -> None:
    """These are read now, and once more some day."""
    ranges._cache.expect([(name, SIZE) for name in names], dict.fromkeys(names, 1.0))


def test_what_is_expected_is_brought_and_read_from_the_folder(opened: Opener, tmp_path: Path) -> None:
    ranges = opened()
    assert ranges.direct
    read(ranges)
    assert counts(ranges) == (0, 1)
    expect(ranges, "a.bin", "b.bin")
    until(lambda: copies(tmp_path / "cache") == {"a.bin", "b.bin"})
    # Whoever brought a file holds it for a moment after it has its name, in which a read goes to the store.
    until(lambda: not any(is_held(path) for path in (tmp_path / "cache" / "copies").glob("*/*.bin")))
    read(ranges)
    read(ranges, "b.bin")
    assert counts(ranges) == (2, 1)
    assert ranges._cache.counters.count("cache_brought_bytes") == 2 * SIZE
    assert bytes(ranges.read("a.bin", 5, 7)) == FILES["a.bin"][5:12]
    # Another process finds them there, and brings none.
    other = opened()
    read(other)
    assert counts(other) == (1, 0)


def test_a_file_that_is_not_to_be_kept_is_read_as_without_a_cache(opened: Opener, store: str) -> None:
    ranges = opened()
    with pytest.raises(FileNotFoundError):
        ranges.read("z.bin", 0, 1)
    fsspec.filesystem("memory").pipe_file(f"{store.removeprefix('memory:/')}/e.bin", b"12345")
    assert bytes(ranges.read("e.bin", 1, 3)) == b"234"


@pytest.mark.parametrize("damage", ["write", "truncate", "remove"])
def test_a_copy_that_was_touched_is_not_read(opened: Opener, tmp_path: Path, damage: str) -> None:
    ranges = opened()
    expect(ranges, "a.bin")
    until(lambda: copies(tmp_path / "cache") == {"a.bin"})
    path = next((tmp_path / "cache" / "copies").glob("*/a.bin"))
    if damage == "remove":
        path.unlink()
    else:
        with open(path, "r+b") as file:
            file.write(b"x") if damage == "write" else file.truncate(10)
    read(ranges)
    assert counts(ranges) == (0, 1)


def test_a_copy_whose_bytes_are_wrong_is_discarded_and_left_alone(opened: Opener, tmp_path: Path) -> None:
    ranges = opened()
    expect(ranges, "a.bin", "b.bin")
    until(lambda: copies(tmp_path / "cache") == {"a.bin", "b.bin"})
    ranges.discard("a.bin")
    assert copies(tmp_path / "cache") == {"b.bin"}
    expect(ranges, "a.bin", "c.bin")
    until(lambda: "c.bin" in copies(tmp_path / "cache"))
    read(ranges)
    assert counts(ranges) == (0, 1)
    assert copies(tmp_path / "cache") == {"b.bin", "c.bin"}


def test_what_does_not_verify_is_not_kept(opened: Opener, tmp_path: Path) -> None:
    def verify(name: str, descriptor: int) -> None:
        assert os.pread(descriptor, SIZE, 0) == FILES[name]
        if name == "a.bin":
            raise CorruptShard("its bytes have another checksum", shard=name)

    with warned(r"not kept in the cache: shard a.bin: its bytes"):
        ranges = opened(verify=verify)
        expect(ranges, "a.bin", "b.bin")
        until(lambda: copies(tmp_path / "cache") == {"b.bin"})
    read(ranges)


def test_the_limit_holds_and_never_needed_copies_go(opened: Opener, tmp_path: Path) -> None:
    ranges = opened(limit=2 * SIZE)
    expect(ranges, "a.bin", "b.bin")
    until(lambda: copies(tmp_path / "cache") == {"a.bin", "b.bin"})
    read(ranges)
    expect(ranges, "c.bin")
    until(lambda: copies(tmp_path / "cache") == {"b.bin", "c.bin"})  # b is still expected, a was read
    # Another process with a smaller limit: the smaller counts.
    smaller = opened(limit=SIZE)
    expect(smaller, "d.bin", "c.bin", "c.bin", "c.bin")
    until(lambda: copies(tmp_path / "cache") == {"c.bin"})
    read(smaller, "d.bin")


def test_a_limit_below_the_largest_file_is_refused_with_both_numbers(opened: Opener) -> None:
    with pytest.raises(UsageError, match=r"99,999 bytes is smaller than the largest file, a.bin of 100,000"):
        opened(limit=99_999)


def test_without_a_limit_all_processes_hold_to_the_first_ones(tmp_path: Path) -> None:
    first = CacheFolder(tmp_path, "data", None)
    status = os.statvfs(tmp_path)
    assert first.limit == pytest.approx(0.75 * status.f_bavail * status.f_frsize, rel=0.05)
    second = CacheFolder(tmp_path, "data", None)
    assert second.limit == first.limit
    third = CacheFolder(tmp_path, "data", 1000)
    assert (third.limit, CacheFolder(tmp_path, "data", None).limit) == (1000, 1000)
    for folder in (first, second, third):
        folder.close()


def test_another_dataset_never_answers_and_makes_way(opened: Opener, tmp_path: Path) -> None:
    old = opened(limit=2 * SIZE, dataset="old")
    expect(old, "a.bin", "b.bin")
    until(lambda: len(copies(tmp_path / "cache")) == 2)
    new = opened(limit=2 * SIZE, dataset="new")
    read(new)
    assert counts(new) == (0, 1)
    expect(new, "a.bin")
    time.sleep(0.1)  # the other process is alive and needs its own, as much as this one
    assert not list((tmp_path / "cache" / "copies" / "new").iterdir())
    old._cache.close()
    until(lambda: (tmp_path / "cache" / "copies" / "new" / "a.bin").exists())
    assert len(copies(tmp_path / "cache")) <= 2


def test_what_dead_processes_left_is_removed(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "copies" / "data").mkdir(parents=True)
    (folder / "readers").mkdir()
    (folder / "copies" / "data" / "a.bin%part").write_bytes(bytes(10 * SIZE))
    for name in ("dead", "dead.plan", "gone.plan", "gone.fresh"):
        (folder / "readers" / name).write_bytes(b'{"limit": 1}')
    ranges = opened(limit=SIZE)
    assert ranges._cache.folder is not None
    assert ranges._cache.folder.limit == SIZE
    expect(ranges, "a.bin")
    until(lambda: copies(folder) == {"a.bin"})
    assert not list(folder.rglob("dead*"))
    assert not list(folder.rglob("gone*"))


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_folder_that_cannot_be_used_is_a_warning(opened: Opener, tmp_path: Path, when: str) -> None:
    folder = tmp_path / "cache"
    with warned(r"cache folder .*/cache: .*; what is not in it is read from"):
        if when == "before":
            folder.write_text("a file")
        ranges = opened()
        if when == "later":
            shutil.rmtree(folder)
            folder.write_text("a file")
        expect(ranges, "a.bin")
        read(ranges)
        time.sleep(0.1)
    read(ranges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(ranges, "b.bin")
        read(ranges, "b.bin")
    assert counts(ranges) == (0, 3)


def test_a_folder_that_is_removed_is_made_again(opened: Opener, tmp_path: Path) -> None:
    ranges = opened()
    expect(ranges, "a.bin")
    until(lambda: copies(tmp_path / "cache") == {"a.bin"})
    (tmp_path / "cache").rename(tmp_path / "gone")  # at once, whatever is being written there
    read(ranges)
    expect(ranges, "b.bin")
    until(lambda: copies(tmp_path / "cache") == {"b.bin"})
    second = opened(limit=SIZE)  # which learns that the first is there
    expect(second, "b.bin")
    time.sleep(0.1)
    expect(ranges, "c.bin")
    time.sleep(0.4)
    assert len(copies(tmp_path / "cache")) == 1


def test_a_ledger_that_somebody_keeps_is_named_and_no_read_waits(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "LOCK_PATIENCE_S", 1.0)
    ranges = opened()
    assert ranges._cache.folder is not None
    with (
        warned(r"another process held .*/ledger for 1 s"),
        ranges._cache.folder.locked(),
    ):
        expect(ranges, "a.bin")
        began = time.monotonic()
        read(ranges)
        assert time.monotonic() - began < 1.0
        until(lambda: ranges._cache._filler._blocked > 0)  # set after the warning


def test_closing_while_files_come_leaves_none_half_way(opened: Opener, tmp_path: Path, store: str) -> None:
    ranges = opened()
    expect(ranges, *FILES)
    until(lambda: any((tmp_path / "cache" / "copies").glob("*/*")))
    ranges._cache.stop()
    ranges.close()
    ranges._cache.close()
    assert not list((tmp_path / "cache").rglob("*%part"))
    assert not list((tmp_path / "cache" / "readers").iterdir())
    with pytest.raises(StorageError, match="closed"):
        ranges.read("d.bin", 0, 1, file_bytes=SIZE - 1)


@pytest.mark.root
def test_a_full_disk_is_a_warning_and_reading_goes_on(opened: Opener, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        folder = disk / "cache"
        with warned(r"cache folder .*: the disk is full; what is not in it"):
            ranges = opened(folder=folder)
            expect(ranges, *FILES)
            until(lambda: len(copies(folder)) == 2 and not list(folder.rglob("*%part")))
            time.sleep(0.3)
        assert len(copies(folder)) == 2
        assert not list(folder.rglob("*%part"))
        for name in FILES:
            read(ranges, name)
        assert counts(ranges) == (2, 2)
        ranges._cache.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
