"""What goes wrong while reading reaches the caller's next(), names its place, and never hangs."""

from __future__ import annotations

import threading
import warnings
from itertools import islice

import numpy as np
import pytest
from faulty import flipped

from isthmus.errors import CorruptShard, DataError, StorageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.blocks import BlockReader
from isthmus.storage.shards.layout import columns_of
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment


@pytest.fixture
def data(tmp_path):
    write_synthetic(str(tmp_path / "data"), 64)
    return tmp_path / "data"


def make(data, **options) -> Loader:
    settings = {
        "seed": 0,
        "lanes": 4,
        "shuffle_window": 16,
        "stages": [64],
        "plan": Plan((Segment(0, 0, 0, 8),)),
        "wait_limit": 20.0,
    }
    return Loader([open_dataset(str(data))], [1], **(settings | options))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("isthmus-loader")}


def drain(loader: Loader, steps: int = 40) -> int:
    """Batches that came before an error, which goes on to the caller."""
    with loader:
        for batch in islice(loader, steps):
            last = batch.step
    return last


def test_a_flipped_byte_names_shard_row_group_and_column_and_comes_at_the_step_that_needs_it(data):
    dataset = open_dataset(str(data))
    path = data / dataset.index.file(3, "64px")
    at = dataset.index.sibling("64px").start(3, 2) + 60
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    with make(data) as loader:
        first = next(
            step
            for step in range(40)
            if any(
                (place.shard, place.row_group) == (path.name, dataset.index.row_group[3])
                for place in loader.describe(step)
            )
        )
    path.write_bytes(content)
    with make(data) as loader:
        got = [batch.step for batch in islice(loader, first)]
        assert got == list(range(first))
        for _ in range(2):  # and again: a loader that failed does not go on
            with pytest.raises(CorruptShard) as raised:
                next(loader)
    error = raised.value
    assert (error.shard, error.row_group, error.column) == (path.name, 3, "latent_logvar")
    assert str(error).startswith(
        f"shard {path.name}, row group 3, column latent_logvar: its bytes have another checksum"
    )
    assert not threads()
    assert drain(make(data, check=False)) == 39


@pytest.mark.parametrize("column", ["latent_mean", "latent_logvar", "t5_tokens", "key"])
def test_checksums_of_rows_that_go_straight_into_batches(data, column):
    dataset = open_dataset(str(data))
    reader, rows = BlockReader(dataset, 64), int(dataset.index.rows[3])
    whole = reader.read(3)
    into = {name: np.zeros((rows, values.shape[1]), np.uint8) for name, values in whole.fixed.items()}
    order = np.random.default_rng(0).permutation(rows)
    slots = {name: [memory[row].data for row in order] for name, memory in into.items()}
    found = reader.scatter(3, 0, range(rows), slots)
    assert found.strings == {
        name: whole.strings[name] for name in ("key", "caption")
    }  # `source` is not delivered
    for name, memory in into.items():
        assert (memory[order] == whole.fixed[name]).all()
    sibling = "64px" if column.startswith("latent") else "text"
    names = [one.name for one in columns_of(dataset.spec, sibling, (4, 8, 8))]
    start = dataset.index.sibling(sibling).start(3, names.index(column))
    path = data / dataset.index.file(3, sibling)
    for offset in (1, 60):  # in the page's header, too
        content = bytearray(path.read_bytes())
        content[start + offset] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptShard, match=f"row group 3, column {column}: its bytes have another"):
            BlockReader(open_dataset(str(data)), 64).scatter(3, 0, range(rows), slots)
        content[start + offset] ^= 1
        path.write_bytes(content)


def test_bytes_that_were_flipped_on_the_way_are_read_again(data, faulty, monkeypatch):
    with make(data, shuffle_window=64) as loader:
        wanted = [(list(batch.keys), batch.latent_mean.copy()) for batch in islice(loader, 30)]
    straight = []
    scatter = BlockReader.scatter
    monkeypatch.setattr(BlockReader, "scatter", lambda *arguments: straight.append(1) or scatter(*arguments))
    server = faulty(data)
    hit = []
    for after in (3, 9, 14):
        server.fail(lambda answer: hit.append(1) or flipped(0.9)(answer), match=".64px.parquet", after=after)
    loader = make(server.url, shuffle_window=64)
    with loader:
        for batch, (keys, latents) in zip(loader, wanted, strict=False):
            assert list(batch.keys) == keys
            assert (batch.latent_mean == latents).all()
    assert straight
    assert len(hit) == 3


def test_a_missing_or_truncated_file_is_named(data):
    path = data / "part-00001.text.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with pytest.raises(
        CorruptShard,
        match=r"shard part-00001.text.parquet, row group \d: the file has 2,000 bytes, [\d,]+ in the index",
    ):
        drain(make(data))
    path.unlink()
    with pytest.raises(
        CorruptShard, match=r"shard part-00001.text.parquet, row group \d: the file is missing"
    ):
        drain(make(data))
    assert not threads()


def test_a_store_that_refuses_is_a_storage_error(data, monkeypatch):
    def refuse(self, block, caption, buffer):
        raise StorageError("cannot read: no permission", where="the store")

    monkeypatch.setattr(BlockReader, "read", refuse)
    with pytest.raises(StorageError, match="the store: cannot read: no permission"):
        drain(make(data))


def test_an_error_in_planning_and_a_bug_in_a_thread_reach_the_caller(data, monkeypatch):
    from isthmus.storage.stream import loader as module
    from isthmus.storage.stream.prefetch import Prefetcher

    def fail(self, step):
        raise RuntimeError("planning failed")

    with monkeypatch.context() as patch:
        patch.setattr(module.Loader, "_place", fail)
        with pytest.raises(RuntimeError, match="planning failed"):
            drain(make(data))

    def bug(self, jobs):
        raise RuntimeError("a bug under the lock")

    with monkeypatch.context() as patch:
        patch.setattr(Prefetcher, "_arrived", bug)
        with pytest.raises(RuntimeError, match="a bug under the lock"):
            drain(make(data))
    assert not threads()


def test_a_read_that_hangs_is_given_up_with_its_name_and_close_does_not_hang(data, monkeypatch):
    release, entered = threading.Event(), threading.Event()

    def hang(self, block, caption, buffer):
        entered.set()
        release.wait(60)
        raise DataError("too late")

    monkeypatch.setattr(BlockReader, "read", hang)
    loader = make(data, wait_limit=0.3)
    assert entered.wait(20)
    with pytest.raises(
        StorageError, match=r"step 0 did not come within 0.3 s; waiting for part-0000\d.64px.parquet"
    ):
        next(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader._prefetcher.close(timeout=0.2)
    assert any("did not stop within 0.2 s, still reading part-0000" in str(one.message) for one in caught)
    with pytest.raises(StorageError, match="the loader is closed"):
        next(loader)
    release.set()
    loader.close()
    assert not threads()


def test_close_joins_the_threads_at_any_time_and_next_says_so(data):
    for steps in (0, 1, 7):
        loader = make(data, depth=3)
        for _ in islice(loader, steps):
            pass
        loader.close()
        loader.close()
        assert not threads()
        with pytest.raises(StorageError, match="the loader is closed"):
            next(loader)


def test_close_from_another_thread_ends_a_wait(data, monkeypatch):
    release, raised = threading.Event(), []

    def hang(self, block, caption, buffer):
        release.wait(60)
        raise DataError("too late")

    monkeypatch.setattr(BlockReader, "read", hang)
    loader = make(data)

    def consume() -> None:
        try:
            next(loader)
        except StorageError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader._prefetcher.close(timeout=0.1)
    consumer.join(20)
    assert not consumer.is_alive()
    assert "closed" in str(raised[0])
    release.set()
    loader.close()
