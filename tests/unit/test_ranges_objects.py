"""Object stores: the same bytes through every client, slow reads, closing, processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import faulty as faults
import numpy as np
import pytest

from isthmus.errors import StorageError
from isthmus.storage.filesystems import filesystem
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.direct import DirectRanges
from isthmus.storage.ranges.objects import ObjectRanges
from isthmus.storage.ranges.open import open_fsspec, open_library, open_ranges
from isthmus.storage.ranges.other import OtherRanges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced, Ranges

if TYPE_CHECKING:
    from servers import StartNginx, Store

DATA = np.random.default_rng(3).bytes(5_000_000)
Server = Callable[[Path | str], faults.FaultyServer]


def same_answers(ranges: Ranges) -> None:
    """Reads, permuted scatter, a file's end, a missing file: what every reader must say alike."""
    assert bytes(ranges.read("x/a", 0, 4, file_bytes=len(DATA))) == DATA[:4]
    assert bytes(ranges.read("x/a", 4_999_990, 10)) == DATA[-10:]
    rows = np.zeros((40, 100_000), np.uint8)
    order = np.random.default_rng(4).permutation(40)
    ranges.scatter("x/a", 123, [memoryview(rows[row]) for row in order], file_bytes=len(DATA))
    assert rows[order].tobytes() == DATA[123:4_000_123]
    for start in (4_999_999, 6_000_000):
        with pytest.raises(FileCutShort, match="ends at byte 5,000,000"):
            ranges.read("x/a", start, 2)
    with pytest.raises(FileReplaced, match=r"5,000,000 bytes, 5,000,001 in the index"):
        ranges.read("x/a", 0, 2, file_bytes=5_000_001)
    with pytest.raises(FileNotFoundError):
        ranges.read("x/b", 0, 1)


def test_s3_reads_alike_directly_through_obstore_and_s3fs(s3: Store) -> None:
    s3.put("x/a", DATA)
    fast, library, general = open_ranges(s3.root), open_library(s3.root), open_fsspec(s3.root)
    assert isinstance(fast, DirectRanges)
    assert isinstance(library, ObjectRanges)
    assert isinstance(general, OtherRanges)
    for ranges in (fast, library, general):
        same_answers(ranges)
    store, path = filesystem(s3.root)
    assert store.cat_file(f"{path}/x/a", start=0, end=9) == DATA[:9]
    s3.put("x/a", DATA[::-1])
    for ranges in (fast, library, general):
        with pytest.raises(FileReplaced, match="replaced while it was being read"):
            ranges.read("x/a", 0, 4)


def test_blob_reads_alike_directly_through_obstore_and_adlfs_and_with_the_account_in_the_uri(
    blob: Store,
) -> None:
    blob.put("x/a", DATA)
    long = f"abfss://{blob.bucket}@devstoreaccount1.dfs.core.windows.net/data"
    for root in (blob.root, long):
        for open_one in (open_ranges, open_library, open_fsspec):
            same_answers(open_one(root))
    store, path = filesystem(long)
    assert store.cat_file(f"{path}/x/a", start=0, end=9) == DATA[:9]
    ranges = [open_ranges(blob.root), open_library(blob.root), open_fsspec(blob.root)]
    for one in ranges:
        one.read("x/a", 0, 4)
    blob.put("x/a", DATA[::-1])
    for one in ranges:
        with pytest.raises(FileReplaced, match="replaced while it was being read"):
            one.read("x/a", 0, 4)


def test_a_web_server_and_a_folder_read_alike(tmp_path: Path, nginx: StartNginx) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").write_bytes(DATA)
    url = nginx(tmp_path)
    for ranges in (open_ranges(url), open_library(url), open_fsspec(url), open_ranges(str(tmp_path))):
        same_answers(ranges)


@pytest.fixture
def server(tmp_path: Path, faulty: Server) -> faults.FaultyServer:
    (tmp_path / "a").write_bytes(DATA)
    return faulty(tmp_path)


@pytest.mark.parametrize("open_one", [open_ranges, open_library], ids=["direct", "obstore"])
def test_a_slow_read_gets_a_second_request_and_the_first_answer_wins(
    server: faults.FaultyServer, open_one: Callable[..., Ranges]
) -> None:
    counters = Counters()
    ranges = open_one(server.url, counters=counters)
    for index in range(20):
        ranges.read("a", index * 1000, 100_000)
    server.fail(faults.late(20))
    began = time.monotonic()
    assert bytes(ranges.read("a", 500, 100_000)) == DATA[500:100_500]
    assert time.monotonic() - began < 5
    assert counters.count("hedged") == 1
    assert counters.count("hedges_won") == 1
    # Second requests are a share of the whole: after one more, a slow read must wait.
    took = []
    for _ in range(2):
        server.fail(faults.late(0.7))
        began = time.monotonic()
        ranges.read("a", 500, 100_000)
        took.append(time.monotonic() - began)
    assert took[1] >= 0.7
    assert counters.count("hedged") == 2


def test_close_during_a_stall_returns_at_once_and_hangs_up(server: faults.FaultyServer) -> None:
    for open_one in (open_ranges, open_library, open_fsspec):
        ranges = open_one(server.url, policy=RetryPolicy(stall_s=60))
        server.fail(faults.stall(), times=4)
        said: list[str] = []

        def read(ranges: Ranges = ranges, said: list[str] = said) -> None:
            with pytest.raises(StorageError, match="closed") as caught:
                ranges.read("a", 0, 3_000_000)
            said.append(str(caught.value))

        threads = [threading.Thread(target=read) for _ in range(4)]
        before = server.count()
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while server.count() < before + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        ranges.close()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - began < 2
        assert len(said) == 4
        assert said[0].startswith(f"{server.url}/a: ")


def test_a_process_with_reads_in_flight_ends(server: faults.FaultyServer) -> None:
    server.fail(faults.stall(), times=9)
    script = (
        "import sys, threading, time\n"
        "from isthmus.storage.ranges.open import open_ranges\n"
        "ranges = open_ranges(sys.argv[1])\n"
        "threading.Thread(target=ranges.read, args=('a', 0, 3_000_000), daemon=True).start()\n"
        "time.sleep(0.5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, server.url], timeout=30, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def read_in_child(url: str) -> None:
    """Runs in a child process; exit code 0 when the bytes are right."""
    right = bytes(open_ranges(url).read("a", 10, 100_000)) == DATA[10:100_010]
    os._exit(0 if right else 1)


def test_a_spawned_child_reads(server: faults.FaultyServer) -> None:
    open_ranges(server.url).read("a", 0, 10)
    child = multiprocessing.get_context("spawn").Process(target=read_in_child, args=(server.url,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_forked_child_reads_with_a_loop_of_its_own_while_the_parent_goes_on(
    server: faults.FaultyServer,
) -> None:
    ranges = open_ranges(server.url)
    stop = threading.Event()
    wrong: list[int] = []

    def read_on() -> None:
        while not stop.is_set():
            if bytes(ranges.read("a", 77, 50_000)) != DATA[77:50_077]:
                wrong.append(1)

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs must not outlive the test
            with pytest.raises(StorageError, match="another process"):
                ranges.read("a", 0, 10)
            read_in_child(server.url)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert bytes(ranges.read("a", 77, 50_000)) == DATA[77:50_077]


def test_a_read_needs_little_memory_besides_its_own(tmp_path: Path, nginx: StartNginx) -> None:
    psutil = pytest.importorskip("psutil")
    size = 64_000_000
    with (tmp_path / "big").open("wb") as file:
        file.truncate(size)
    ranges = open_ranges(nginx(tmp_path, bytes_per_s=100e6))
    memory = np.ones(size, np.uint8)
    ranges.scatter("big", 0, [memoryview(memory)[:1000]])
    process = psutil.Process()
    before = process.memory_info().rss
    highest = 0
    thread = threading.Thread(target=ranges.scatter, args=("big", 0, [memoryview(memory)]))
    thread.start()
    while thread.is_alive():
        highest = max(highest, process.memory_info().rss - before)
        time.sleep(0.005)
    assert not memory.any()
    assert highest < 24_000_000
