"""Rows gathered one by one from a disk: the same batches as by windows, and the same errors at the same steps."""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from isthmus.errors import CorruptShard
from isthmus.storage.ranges import local
from isthmus.storage.ranges import many as many_module
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import LocalRanges
from isthmus.storage.ranges.many import ManyReads, available
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import FileReplaced
from isthmus.storage.shards import DatasetSpec, open_dataset
from isthmus.storage.shards.layout import page_header, page_of
from isthmus.storage.shards.synthetic import TINY, write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment, gather
from isthmus.storage.stream.gather import Gatherer
from isthmus.storage.stream.prefetch import Prefetcher

pytestmark = pytest.mark.skipif(not available(), reason="the system offers no asynchronous I/O")
SPEC = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 2, TINY.buckets)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """120 samples: two buckets, two captions."""
    place = tmp_path_factory.mktemp("gather") / "data"
    write_synthetic(str(place), 120, SPEC, bucket_of=lambda number: "2:1" if number % 5 == 0 else "1:1")
    return place


def make(folder: Path, *more: Path, gather: bool = True, **options) -> Loader:
    plan = Plan((Segment(0, 0, 0, 8),))
    plan = plan.append(plan.next_segment(40, stage=1, global_batch_size=4))
    settings = {"seed": 3, "lanes": 4, "shuffle_window": 40, "stages": [32, 64], "plan": plan, "check": False}
    sources = [open_dataset(str(place)) for place in (folder, *more)]
    with pytest.MonkeyPatch.context() as patch:
        if not gather:
            patch.setattr(local, "APART", frozenset())  # as on a mount
        loader = Loader(sources, [Fraction(2, 3)] * len(sources), **(settings | options))
    assert isinstance(loader._prefetcher, Gatherer if gather else Prefetcher)
    return loader


def bits(loader: Loader, steps: int) -> list[tuple[object, ...]]:
    with loader:
        return [
            (
                *(batch.step, batch.stage, batch.bucket, tuple(batch.keys), tuple(batch.captions)),
                *(array.tobytes() for array in (batch.latent_mean, batch.latent_logvar, batch.positions)),
                *(array.tobytes() for array in (batch.original_size, batch.crop, batch.flipped)),
                *(
                    part.tobytes()
                    for column in batch.text.values()
                    for part in (column.tokens, column.length)
                ),
                *(
                    b"" if column.pooled is None else column.pooled.tobytes()
                    for column in batch.text.values()
                ),
            )
            for batch in islice(loader, steps)
        ]


def test_batches_are_those_of_reading_by_windows_bit_for_bit(written, tmp_path):
    write_synthetic(str(tmp_path / "more"), 50, SPEC, seed=5, prefix="m")
    for options in ({}, {"rank": 1, "world_size": 2}, {"start_step": 33}, {"shuffle_window": 7}):
        roots = (written, tmp_path / "more")
        assert bits(make(*roots, **options), 60) == bits(make(*roots, gather=False, **options), 60)


def test_with_checksums_or_on_a_mount_blocks_are_read(written):
    with Loader(
        [open_dataset(str(written))],
        [1],
        seed=0,
        lanes=2,
        shuffle_window=8,
        stages=[32],
        plan=Plan((Segment(0, 0, 0, 4),)),
    ) as loader:
        assert isinstance(loader._prefetcher, Prefetcher)


def test_memory_is_a_few_batches_and_borders_are_counted(written, monkeypatch):
    # Batches as small as these would be read far ahead before they fill what may wait.
    monkeypatch.setattr(gather, "READY_BYTES", 0)
    with make(written, depth=2) as loader:
        for _ in islice(loader, 40):
            assert loader.resident_bytes <= 6 * 8 * 2000
        assert loader.stats()["split_blocks"] > 0
        assert loader.stats()["bytes"] > 0


def test_what_one_call_does_not_deliver_is_read_again(written, monkeypatch):
    """Injected: every third read comes short, and each third call fails as a whole."""
    told, calls, read = bits(make(written), 30), [0], ManyReads.read

    def short(self, *arguments, wait=True):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise OSError(5, "Input/output error")
        got = read(self, *arguments, wait=wait)
        got[::3] = -5
        return got

    monkeypatch.setattr(ManyReads, "read", short)
    assert bits(make(written), 30) == told
    assert calls[0] > 20


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """What the consumer read itself: whether it waited for a disk, and bytes; 0 for what it left to a thread."""
    found: list[tuple[bool, int]] = []
    gather_part = Gatherer._gather

    def watched(self, part, *, wait=True):
        size = gather_part(self, part, wait=wait)
        if threading.current_thread() is threading.main_thread():
            found.append((wait, size))
        return size

    monkeypatch.setattr(Gatherer, "_gather", watched)
    return found


def slow_threads(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """The loader's threads take their time, so that the consumer has to wait."""
    read = Gatherer._read

    def late(self, part):
        time.sleep(seconds)
        read(self, part)

    monkeypatch.setattr(Gatherer, "_read", late)


def test_who_waits_for_a_step_helps_and_never_waits_for_a_disk(written, monkeypatch, helped):
    told = bits(make(written, gather=False), 60)
    slow_threads(monkeypatch)
    monkeypatch.setattr(gather, "READY_BYTES", 0)
    assert bits(make(written), 60) == told
    assert sum(size > 0 for _, size in helped) > 10
    assert not any(wait for wait, _ in helped)


def test_with_a_depth_that_was_set_no_more_is_in_flight(written, monkeypatch, helped):
    slow_threads(monkeypatch, 0.005)
    monkeypatch.setattr(gather, "READY_BYTES", 0)
    most = 0
    with make(written, depth=1) as loader:
        begin = Gatherer._begin

        def counted(self, part):
            nonlocal most
            begin(self, part)
            most = max(most, len(self._state.active))

        monkeypatch.setattr(Gatherer, "_begin", counted)
        for _ in islice(loader, 40):
            pass
    assert most == 1


def test_what_is_not_in_the_page_cache_is_left_to_the_threads(written, monkeypatch, helped):
    """Injected: the system would have to wait for the disk, for each third read; after that the consumer tries seldom."""
    told, read = bits(make(written), 60), ManyReads.read
    slow_threads(monkeypatch, 0.005)

    def cold(self, descriptors, addresses, lengths, offsets, *, wait=True):
        got = read(self, descriptors, addresses, lengths, offsets, wait=wait)
        if not wait:
            got[::3] = -11
        return got

    helped.clear()
    monkeypatch.setattr(gather, "READY_BYTES", 0)
    monkeypatch.setattr(ManyReads, "read", cold)
    assert bits(make(written), 60) == told
    assert 1 <= len(helped) <= 6
    assert not any(size for _, size in helped)


def test_an_interrupt_while_it_helps_loses_nothing(written, monkeypatch):
    told = bits(make(written), 30)
    gather_part, interrupts = Gatherer._gather, [0]
    slow_threads(monkeypatch)
    monkeypatch.setattr(gather, "READY_BYTES", 0)

    def interrupted(self, part, *, wait=True):
        if not wait and interrupts[0] < 3:
            interrupts[0] += 1
            raise KeyboardInterrupt
        return gather_part(self, part, wait=wait)

    monkeypatch.setattr(Gatherer, "_gather", interrupted)
    seen = []
    with make(written) as loader:
        while len(seen) < 30:
            try:
                batch = next(loader)
            except KeyboardInterrupt:
                continue
            seen.append((batch.step, tuple(batch.keys), batch.latent_mean.tobytes()))
    assert interrupts[0] == 3
    assert seen == [(step[0], step[3], step[5]) for step in told]


@pytest.mark.parametrize("sibling", ["text", "32px"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_damaged_file_ends_the_run_at_the_first_step_that_needs_it(written, tmp_path, sibling, how):
    shutil.copytree(written, tmp_path / "data")
    told = bits(make(written), 30)
    path = sorted((tmp_path / "data").glob(f"part-*.{sibling}.parquet"))[1]
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 700)
    loader, done = make(tmp_path / "data"), []
    with pytest.raises(CorruptShard, match=rf"shard {path.name}, row group \d"), loader:
        done.extend(tuple(batch.keys) for batch in loader)
    assert done == [step[3] for step in told[: len(done)]]
    with make(written) as loader:
        shards = [{place.shard.split(".")[0] for place in loader.describe(step)} for step in range(30)]
    first = next(step for step in range(30) if path.name.split(".")[0] in shards[step])
    # A text file is not needed for its sake alone where another caption's is read: never too early.
    assert len(done) >= first
    if sibling == "32px":
        assert len(done) == first


def test_many_reads_at_once_are_those_of_pread(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    descriptor, memory, many = os.open(path, os.O_RDONLY), np.zeros(4000, np.uint8), ManyReads(16)
    base, count = memory.__array_interface__["data"][0], 40
    starts = np.arange(count) * 97
    lengths = np.full(count, 50)
    descriptors = np.full(count, descriptor)
    descriptors[7] = 9999  # is not open
    starts[20] = 256 * 64 - 10  # ends early
    starts[21] = 256 * 64
    try:
        got = many.read(descriptors, base + 50 * np.arange(count), lengths, starts)
        there = many.read(descriptors[:4], np.full(4, base), lengths[:4], starts[:4], wait=False)
    finally:
        many.close()
        many.close()
        os.close(descriptor)
    assert got[7] == -9
    assert got[20:22].tolist() == [10, 0]
    assert set(got.tolist()) == {50, -9, 10, 0}
    assert there.tolist() == [50] * 4  # just written: in the page cache
    content = path.read_bytes()
    for at in set(range(1, count)) - {7, 20, 21}:
        assert memory[50 * at : 50 * at + 50].tobytes() == content[starts[at] : starts[at] + 50]


def test_answers_of_reads_that_were_interrupted_are_nobody_s(tmp_path, monkeypatch):
    """Injected: an interrupt between the reads and their answers."""
    (tmp_path / "file").write_bytes(bytes(range(256)))
    descriptor, memory = os.open(tmp_path / "file", os.O_RDONLY), np.zeros(200, np.uint8)
    base, call = memory.__array_interface__["data"][0], many_module._call

    def read(count: int, length: int) -> list[int]:
        places, lengths = np.arange(count) * length, np.full(count, length)
        with many_module.many_reads() as many:
            return many.read(np.full(count, descriptor), base + places, lengths, places).tolist()

    def interrupted(number, *arguments, **options):
        done = call(number, *arguments, **options)
        if number == many_module._CALLS[platform.machine()][3]:
            raise KeyboardInterrupt
        return done

    try:
        assert read(3, 10) == [10] * 3
        with monkeypatch.context() as patch:
            patch.setattr(many_module, "_call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read(8, 20)
        assert read(4, 7) == [7] * 4
    finally:
        os.close(descriptor)


def test_held_files_are_checked_and_given_back(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 100)
    ranges = LocalRanges(f"file://{tmp_path}", tmp_path, RetryPolicy(), Counters())
    files = [(name, 100) for name in "abc"]
    held = ranges.hold(files)
    assert [os.pread(file.descriptor, 3, 0) for file in held] == [b"xxx"] * 3
    ranges.release(held)
    with pytest.raises(FileReplaced, match="99 in the index"):
        ranges.hold([("a", 99)])
    (tmp_path / "new").write_bytes(b"y" * 100)
    (tmp_path / "new").replace(tmp_path / "b")
    found = None
    for _ in range(4):  # the one whose check is oldest is looked at each time
        try:
            ranges.release(ranges.hold(files))
        except FileNotFoundError as error:
            found = error
    assert found is not None
    ranges.close()
    assert not any(str(link.resolve()).startswith(str(tmp_path)) for link in Path("/proc/self/fd").iterdir())


def test_the_page_of_a_chunk_is_what_its_header_says(written):
    """The short way to a page and the long one, over every column chunk; and chunks that are none."""
    for path in sorted(written.glob("part-*.parquet")):
        content, groups = memoryview(path.read_bytes()), pq.ParquetFile(path).metadata
        for group in map(groups.row_group, range(groups.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                start = column.data_page_offset
                chunk = content[start : start + column.total_compressed_size]
                header, length = page_header(chunk)
                assert header + length == len(chunk)
                assert page_of(chunk) == chunk[header:]
                for wrong in (chunk[: header - 2], chunk[5:], chunk[:1]):
                    with pytest.raises(ValueError, match="page"):
                        page_of(wrong)
