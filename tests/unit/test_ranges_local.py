"""Byte ranges of folders: the right bytes in the right places, of the file that the index means."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import DataError, StorageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import LocalRanges
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced

QUICK = RetryPolicy(budget_s=0.4, first_delay_s=0.02)
DATA = np.random.default_rng(1).bytes(400_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_bytes(DATA)
    return tmp_path / "root"


def test_reads_a_range_and_scatters_it_over_more_views_than_one_call_takes(folder: Path) -> None:
    counters = Counters()
    ranges = open_ranges(str(folder), counters=counters)
    assert ranges.direct
    assert bytes(ranges.read("a", 10, 1000, file_bytes=len(DATA))) == DATA[10:1010]
    rows = np.zeros((3000, 100), np.uint8)
    order = np.random.default_rng(2).permutation(3000)
    ranges.scatter("a", 7, [memoryview(rows[row]) for row in order])
    assert rows[order].tobytes() == DATA[7:300_007]
    assert ranges.read("a", 5, 0).nbytes == 0
    assert counters.count("bytes") == 301_000
    assert bytes(open_ranges(f"file://{folder}").read("a", 0, 3)) == DATA[:3]


def test_short_reads_are_read_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def at_most_777(descriptor: int, views: list[memoryview], offset: int) -> int:
        buffer = bytearray(777)
        count = whole(descriptor, [buffer], offset)
        done = 0
        for view in views:
            part = min(view.nbytes, count - done)
            view[:part] = buffer[done : done + part]
            done += part
        return done

    monkeypatch.setattr(os, "preadv", at_most_777)
    out = np.zeros(10_000, np.uint8)
    views = [memoryview(out)[start : start + 333] for start in range(0, 10_000, 333)]
    open_ranges(str(folder)).scatter("a", 11, views)
    assert out.tobytes() == DATA[11:10_011]


def test_what_is_wrong_with_a_file_is_said_at_once(folder: Path) -> None:
    ranges = open_ranges(str(folder))
    with pytest.raises(FileNotFoundError, match="no such file"):
        ranges.read("b", 0, 1)
    with pytest.raises(FileCutShort, match=r"ends at byte 400,000, 400,001 were to be read"):
        ranges.read("a", 399_999, 2)
    with pytest.raises(FileReplaced, match=r"400,000 bytes, 400,001 in the index"):
        ranges.read("a", 0, 1, file_bytes=400_001)


@pytest.mark.parametrize("name", ["", "/a", "../a", "x/../a", "x//a", "./a", "x\\a", "a\0"])
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(DataError, match="no name of a file"):
        open_ranges(str(folder)).read(name, 0, 1)


def test_a_file_replaced_or_rewritten_while_it_is_read_is_told(folder: Path) -> None:
    ranges = open_ranges(str(folder))
    ranges.read("a", 0, 10)
    (folder / "new").write_bytes(DATA[::-1])
    (folder / "new").replace(folder / "a")
    with pytest.raises(FileReplaced, match="replaced while it was being read"):
        ranges.read("a", 0, 10)

    ranges = open_ranges(str(folder))
    ranges.read("a", 0, 10)
    with (folder / "a").open("r+b") as file:
        file.write(b"other")
    os.utime(folder / "a", ns=(1, 1))
    with pytest.raises(FileReplaced):
        ranges.read("a", 0, 10)

    ranges = open_ranges(str(folder))
    ranges.read("a", 0, 10)
    (folder / "a").unlink()
    with pytest.raises(FileNotFoundError):
        ranges.read("a", 0, 10)


def test_more_files_than_stay_open_are_read_by_many_threads(folder: Path) -> None:
    for index in range(150):
        (folder / f"f{index}").write_bytes(index.to_bytes(2, "little") * 5000)
    ranges = open_ranges(str(folder))
    wrong: list[int] = []

    def work(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(150, size=400):
            if bytes(ranges.read(f"f{index}", 500, 2000)) != int(index).to_bytes(2, "little") * 1000:
                wrong.append(int(index))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []

    def open_here() -> int:
        return sum(str(link.resolve()).startswith(str(folder)) for link in Path("/proc/self/fd").iterdir())

    assert 0 < open_here() <= 64
    ranges.close()
    assert open_here() == 0


def test_a_folder_that_goes_away_and_returns_is_waited_for(folder: Path) -> None:
    counters = Counters()
    ranges = open_ranges(str(folder), policy=RetryPolicy(budget_s=10, first_delay_s=0.02), counters=counters)
    folder.rename(folder.parent / "away")
    timer = threading.Timer(0.2, (folder.parent / "away").rename, [folder])
    timer.start()
    assert bytes(ranges.read("a", 0, 5)) == DATA[:5]
    assert counters.count("retries") > 0


def test_a_folder_that_stays_away_ends_in_one_line(folder: Path) -> None:
    ranges = open_ranges(str(folder), policy=QUICK)
    folder.rename(folder.parent / "away")
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"root/a: cannot read: the folder itself is gone.*tried \d+ times"
    ):
        ranges.read("a", 0, 5)
    assert 0.3 < time.monotonic() - began < 5


def test_close_wakes_a_read_that_waits(folder: Path) -> None:
    ranges = open_ranges(str(folder), policy=RetryPolicy(budget_s=60, first_delay_s=30))
    folder.rename(folder.parent / "away")
    threading.Timer(0.1, ranges.close).start()
    began = time.monotonic()
    with pytest.raises(StorageError, match="closed"):
        ranges.read("a", 0, 5)
    assert time.monotonic() - began < 5
    ranges.close()
    with pytest.raises(StorageError, match="closed"):
        ranges.read("a", 0, 5)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux lists them")
def test_files_are_closed_when_nobody_knows_them_any_more(folder: Path) -> None:
    """A dataset that was looked at is dropped without a word by most who look at one."""

    def opened() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.readlink().is_relative_to(folder) for link in links)

    for number in range(100):
        (folder / f"f{number}").write_bytes(DATA[:10])
    ranges = open_ranges(str(folder))
    assert isinstance(ranges, LocalRanges)
    for number in range(100):
        ranges.read(f"f{number}", 0, 10)
    assert opened() == 64
    held = ranges.hold([("a", len(DATA))])
    del ranges
    gc.collect()
    assert opened() == 1  # in use
    assert os.pread(held[0].descriptor, 5, 0) == DATA[:5]
    del held
    gc.collect()
    assert opened() == 0


def test_a_folder_that_is_back_before_anybody_looks_is_not_a_missing_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file could not be opened, and it is there when that is looked into."""
    counters, usual = Counters(), os.open
    ranges = open_ranges(str(folder), policy=QUICK, counters=counters)

    def away_once(path: Path, flags: int) -> int:
        monkeypatch.setattr(os, "open", usual)
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "open", away_once)
    assert bytes(ranges.read("a", 0, 5)) == DATA[:5]
    assert counters.count("retries") == 1
    with pytest.raises(FileNotFoundError):
        ranges.read("z", 0, 5)
