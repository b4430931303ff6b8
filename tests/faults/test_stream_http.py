"""The loader over HTTP while the server misbehaves: ridden out with the order intact, or one line that names the place."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import islice

import pytest
from faulty import (
    expired,
    flipped,
    late,
    refused,
    reset,
    slow_down,
    stall,
    too_many,
    truncated,
    wrong_etag,
    wrong_length,
    wrong_range,
)
from streams import BRIEF, QUICK, keys_of, loader_of, threads_left, undisturbed

from isthmus.errors import CorruptShard, StorageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.synthetic import write_synthetic

pytestmark = pytest.mark.faults
PLACE = r"part-0000\d\.(64px|text)\.parquet, row group \d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("http") / "data"
    write_synthetic(str(place), 64)
    return place


@pytest.fixture(scope="module")
def expected(folder):
    return undisturbed(str(folder))


@pytest.fixture
def server(folder, faulty):
    return faulty(folder)


def remote(folder, server):
    """The dataset at the server's address."""
    return replace(open_dataset(str(folder)), roots=(server.url,))


PASSING = {
    "503 SlowDown": slow_down(),
    "503 SlowDown, Retry-After": slow_down(retry_after=0.2),
    "429, Retry-After": too_many(retry_after=0.2),
    "500": refused(500, "InternalError"),
    "reset before the body": reset(0.0),
    "reset within the body": reset(0.5),
    "truncated": truncated(honest=False),
    "truncated, and says so": truncated(honest=True),
    "other bytes than asked for": wrong_range(),
    "silence within the body": stall(0.5),
    "silence before the body": stall(0.0),
    "late": late(0.2),
    "a flipped byte": flipped(),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_ridden_out_with_the_order_intact(folder, server, expected, name):
    if name == "a flipped byte":  # a block that is flipped again when it is read again counts as damaged
        server.fail(PASSING[name], match="part-", after=3)
    else:
        server.fail(PASSING[name], times=2, match="part-", after=3)
        server.fail(PASSING[name], times=2, match="part-00001", after=2)
    began = time.monotonic()
    loader = loader_of(remote(folder, server))
    assert keys_of(loader) == expected
    assert time.monotonic() - began < 15
    assert not threads_left()
    if name not in ("late", "a flipped byte"):
        assert loader.stats()["retries"] >= 2


def test_the_whole_dataset_is_opened_and_read_over_http(server, expected):
    assert keys_of(loader_of(open_dataset(server.url))) == expected


def test_an_endpoint_that_cannot_be_reached_for_a_while_is_waited_for(folder, server, expected):
    loader = loader_of(remote(folder, server), memory_limit=128_000)
    with loader:
        got = [list(next(loader).keys) for _ in range(3)]
        back = threading.Timer(1.0, server.up)
        server.down()
        back.start()
        got += [list(next(loader).keys) for _ in range(len(expected) - 3)]
        back.join()
    assert got == expected
    assert loader.stats()["retries"] > 0


FINAL = {
    "503 for good": (slow_down(), StorageError, r"slow down \(503"),
    "reset for good": (reset(0.0), StorageError, "connection"),
    "truncated for good": (truncated(honest=False), (StorageError, CorruptShard), ""),
    "silence for good": (stall(), StorageError, ""),
    "denied": (refused(403, "AccessDenied"), StorageError, "denies access"),
    "expired": (expired(), StorageError, "credentials"),
    "missing": (refused(404, "NoSuchKey"), CorruptShard, "the file is missing"),
    "another version": (wrong_etag(), (StorageError, CorruptShard), ""),
    "another length": (wrong_length(), (StorageError, CorruptShard), "bytes"),
    "flipped": (flipped(), CorruptShard, "another checksum"),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_does_not_pass_ends_in_one_line_that_names_shard_row_group_and_cause(
    folder, server, expected, name
):
    fault, kind, cause = FINAL[name]
    server.fail(fault, times=float("inf"), match="part-00001", after=1)
    began = time.monotonic()
    got: list[list[str]] = []
    # A busy machine is no silent store.
    policy = BRIEF if name == "silence for good" else replace(BRIEF, stall_s=8.0)
    loader = loader_of(remote(folder, server), policy)
    with pytest.raises(kind) as raised, loader:
        got.extend(list(batch.keys) for batch in loader)
    assert time.monotonic() - began < 10
    assert got == expected[: len(got)]  # what came before is in order
    line = str(raised.value)
    assert "\n" not in line
    assert len(line) < 400
    assert "shard part-00001" in line, line
    assert "row group" in line, line
    import re

    assert re.search(cause, line), line
    assert not threads_left()


def test_an_unreachable_endpoint_ends_within_the_budget_and_says_for_how_long_it_was_tried(folder, server):
    dataset = remote(folder, server)
    server.down()
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"row group \d.*tried \d+ times in \d"):
        keys_of(loader_of(dataset, BRIEF))
    assert time.monotonic() - began < 5


def test_a_wait_for_a_batch_has_a_limit_of_its_own_that_names_what_it_waits_for(folder, server):
    server.fail(stall(), times=float("inf"), match="part-")
    patient = replace(QUICK, stall_s=60.0, budget_s=60.0)
    loader = loader_of(remote(folder, server), patient, wait_limit=0.5)
    with loader:
        with pytest.raises(StorageError, match=r"step 0 did not come within 0.5 s; waiting for part-0000\d"):
            next(loader)
        began = time.monotonic()
    assert time.monotonic() - began < 5  # closing does not wait for the silent server
    assert not threads_left()


@pytest.mark.parametrize("window", [16, 64])
def test_values_over_http_are_those_of_the_folder_whole_blocks_straight_into_batches_or_kept(
    folder, server, window
):
    """Without checksums, blocks that lie in one window are read into their slots; at 64 rows most of them do."""

    def figures(root: str, **options):
        with loader_of(open_dataset(root), shuffle_window=window, **options) as loader:
            return [
                (list(b.keys), b.latent_mean.tobytes(), b.text["clip_l"].tokens.tobytes(), b.crop.tolist())
                for b in islice(loader, 24)
            ]

    plain = figures(str(folder))
    assert figures(server.url, check=False) == plain
    for fault in (reset(), slow_down(), truncated(honest=True)):
        server.fail(fault, times=2, match="part-", after=2)
    assert figures(server.url, check=False) == plain
