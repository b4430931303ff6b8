"""Bodies received straight into slots: TLS, chunks, redirects, proxies, servers that hang up, reads that are cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tls import Files, certificate, files, proxy

from isthmus.errors import StorageError
from isthmus.storage.http.get import Get, _Into
from isthmus.storage.http.s3 import S3Address
from isthmus.storage.http.wire import Wire
from isthmus.storage.ranges.causes import ReadFailed
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.direct import DirectRanges
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy

DATA = np.random.default_rng(8).bytes(3_000_000)
ONCE = RetryPolicy(budget_s=0, stall_s=5)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate and its key."""
    return certificate(tmp_path)


@pytest.fixture
def web() -> Iterator[tuple[Files, str]]:
    with files(DATA) as served:
        yield served


def scattered(root: str, policy: RetryPolicy = ONCE, counters: Counters | None = None) -> None:
    """Permuted slots of odd sizes hold the range's bytes."""
    ranges = open_ranges(root, policy=policy, counters=counters)
    assert isinstance(ranges, DirectRanges)
    for start in (0, 777):
        memory = np.zeros((130, 20_011), np.uint8)
        order = np.random.default_rng(start).permutation(130)
        ranges.scatter("a", start, [memory[row].data for row in order], file_bytes=len(DATA))
        assert memory[order].tobytes() == DATA[start : start + memory.size]
    assert bytes(ranges.read("a", 5, 3)) == DATA[5:8]
    ranges.close()


def test_over_tls_with_a_bundle_that_the_environment_names(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(DATA, pair) as (server, root):
        with pytest.raises(StorageError, match=r"certificate is not trusted .*AWS_CA_BUNDLE") as caught:
            scattered(root, RetryPolicy(budget_s=60))
        assert "tried" not in str(caught.value)
        assert server.log == []
        monkeypatch.setenv("AWS_CA_BUNDLE", str(pair[0]))
        scattered(root)
        before = server.connections
        scattered(root)
        assert server.connections == before + 1  # one for three reads


@pytest.mark.parametrize("at", [0, 0.5], ids=["behind the headers", "half-way"])
@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_a_body_that_stops_gets_a_second_request_whose_answer_wins(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, secure: bool, at: float
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pair[0]))
    with files(DATA, pair if secure else None) as (server, root):
        server.stalls_at = at
        counters = Counters()
        ranges = open_ranges(root, counters=counters, policy=RetryPolicy(stall_s=30))
        for start in range(20):
            ranges.read("a", start, 2_000_000)
        server.stalls = 1
        began = time.monotonic()
        assert bytes(ranges.read("a", 9, 2_000_000)) == DATA[9:2_000_009]
        assert time.monotonic() - began < 10
        assert (counters.count("hedged"), counters.count("hedges_won"), counters.count("retries")) == (
            1,
            1,
            0,
        )
        # Closing cuts what stalls, half-way in a body and in the second request's, too.
        server.stalls = 2
        threading.Timer(1, ranges.close).start()
        began = time.monotonic()
        with pytest.raises(StorageError, match="closed"):
            ranges.read("a", 9, 2_000_000)
        assert time.monotonic() - began < 5


def test_a_body_in_chunks(web: tuple[Files, str]) -> None:
    web[0].chunked = True
    scattered(web[1])


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_a_server_that_hangs_up_after_each_answer_costs_no_retry(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pair[0]))
    with files(DATA, pair if secure else None) as (server, root):
        server.hangs_up = True
        counters = Counters()
        for _ in range(5):
            scattered(root, counters=counters)
        assert counters.count("retries") == 0


def test_a_redirect_is_followed_by_the_library_s_client_from_then_on(web: tuple[Files, str]) -> None:
    pytest.importorskip("obstore")
    with files(DATA) as (door, root):
        door.elsewhere = web[1]
        scattered(root)
        assert len(web[0].log) == 3
        assert [path for path, _ in door.log] == ["/a"] * 4  # once by us


def test_a_redirect_without_another_client_is_said() -> None:
    with files(DATA) as (door, root):
        door.elsewhere = "http://127.0.0.1:9"
        ranges = DirectRanges(root, ONCE, Counters(), store=root)
        with pytest.raises(StorageError, match="sends us elsewhere"):
            ranges.read("a", 0, 10)


def test_a_server_without_ranges_is_refused_but_for_whole_files(web: tuple[Files, str]) -> None:
    web[0].ignores_ranges = True
    ranges = open_ranges(web[1], policy=RetryPolicy(budget_s=60))
    assert bytes(ranges.read("a", 0, len(DATA))) == DATA
    with pytest.raises(StorageError, match="does not answer range requests"):
        ranges.read("a", 5, 10)


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_a_proxy_of_the_environment_is_used(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pair[0]))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with files(DATA, pair if secure else None) as (_, root), proxy() as (address, through):
        monkeypatch.setenv("https_proxy" if secure else "http_proxy", f"http://me:se%40cret@{address}")
        scattered(root)
        place = root.rpartition("/")[2]
        first = ("CONNECT", place) if secure else ("GET", f"http://{place}/a")
        assert through.asked == [(*first, "me:se@cret")]
        # One that is busy is asked again, and its words are plain.
        through.refusals = 1
        counters = Counters()
        scattered(root, RetryPolicy(budget_s=20, first_delay_s=0.01), counters)
        assert counters.count("retries") == 1
        through.refusals = 1000
        with pytest.raises(StorageError, match=r"\(503") as caught:
            scattered(root)
        assert "se%40cret" not in str(caught.value)


def test_cut_while_the_answer_has_not_begun(web: tuple[Files, str], monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(Files, "finish_request", lambda *_: held.wait(20))
    get = Get(Wire(web[1], 30), stall_s=30, limit_s=60)
    threading.Timer(0.3, get.cut).start()
    memory = np.zeros(10, np.uint8)
    began = time.monotonic()
    with pytest.raises(ReadFailed, match="cancelled"):
        get.run("/a", {}, [memory.data], lambda *_: None)
    held.set()
    assert time.monotonic() - began < 5
    assert not get.writing
    with pytest.raises(ReadFailed, match="cancelled"):  # cut before it began
        get.run("/a", {}, [memory.data], lambda *_: None)


def test_a_bucket_of_another_region_is_asked_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    address = S3Address("s3://bucket/data")
    assert address.server == "https://bucket.s3.us-east-1.amazonaws.com"
    assert not address.moved(403, {"x-amz-bucket-region": "eu-west-1"})
    assert address.moved(301, {"x-amz-bucket-region": "eu-west-1"})
    assert address.server == "https://bucket.s3.eu-west-1.amazonaws.com"
    assert address.request("GET", "a b") == ("/data/a%20b", {})
    assert not address.moved(301, {"x-amz-bucket-region": "eu-west-1"})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.data())
def test_views_fill_in_order_whatever_comes_at_once(sizes: list[int], data: st.DataObject) -> None:
    memory = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum(sizes)
    into = _Into([memory[end - size : end].data for end, size in zip(ends, sizes, strict=True)])
    source = np.arange(len(memory), dtype=np.uint8)
    done = 0
    while done < len(memory):
        views = into.next()
        assert views[0] == into.first()
        room = sum(map(len, views))
        count = data.draw(st.integers(1, room))
        if count == len(memory) - done and count % 2:
            into.copy(source[done : done + count].data)
        else:
            left = count
            for view in views:
                size = min(len(view), left)
                at = done + count - left
                view[:size] = source[at : at + size].data
                left -= size
            into.move(count)
        done += count
    assert (memory == source).all()
