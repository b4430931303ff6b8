"""Every fault of a store, in front of every client: ridden out with the right bytes, or ended in one clear line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import faulty as faults
import numpy as np
import pytest

from isthmus.errors import StorageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_fsspec, open_library, open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import FileReplaced, Ranges

if TYPE_CHECKING:
    from servers import Store

pytestmark = pytest.mark.faults
DATA = np.random.default_rng(5).bytes(3_000_000)
START, LENGTH = 1000, 2_500_000
Server = Callable[[Path | str], faults.FaultyServer]


class Client(NamedTuple):
    """A reader behind a faulty server."""

    server: faults.FaultyServer
    root: str
    open: Callable[..., Ranges]
    name: str

    @property
    def shows_headers(self) -> bool:
        """An answer says itself of which file it is."""
        return self.name.endswith(("direct", "obstore"))


CLIENTS = [
    *("http-direct", "http-obstore", "http-aiohttp", "s3-direct", "s3-obstore", "s3-s3fs"),
    *("blob-direct", "blob-obstore"),
    # The Blob client reads on by itself, with a second's pause each time: ten seconds in all.
    pytest.param("blob-adlfs", marks=pytest.mark.slow),
]


@pytest.fixture(params=CLIENTS)
def client(
    request: pytest.FixtureRequest, tmp_path: Path, faulty: Server, monkeypatch: pytest.MonkeyPatch
) -> Client:
    """Each client, in front of it a server that misbehaves on demand: over a folder, moto or Azurite."""
    kind, _, library = request.param.partition("-")
    open_one = {"direct": open_ranges, "obstore": open_library}.get(library, open_fsspec)
    if kind == "http":
        (tmp_path / "a").write_bytes(DATA)
        server = faulty(tmp_path)
        return Client(server, server.url, open_one, request.param)
    store: Store = request.getfixturevalue("s3" if kind == "s3" else "blob")
    store.put("a", DATA)
    if kind == "s3":
        server = faulty(store.endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    else:
        from servers import AZURITE_ACCOUNT, connection_string

        server = faulty(store.endpoint.removesuffix(f"/{AZURITE_ACCOUNT}"))
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING", connection_string(f"{server.url}/{AZURITE_ACCOUNT}")
        )
    return Client(server, store.root, open_one, request.param)


def ranged(request: faults.Request) -> bool:
    """A request for bytes, not one for a file's size."""
    return bool(request.header("Range") or request.header("x-ms-range"))


def test_what_passes_is_ridden_out(client: Client) -> None:
    counters = Counters()
    policy = RetryPolicy(budget_s=20, first_delay_s=0.02, stall_s=0.7, hedge=False)
    ranges = client.open(client.root, policy=policy, counters=counters)
    ridden = {
        "503": faults.slow_down(),
        "503 with Retry-After": faults.slow_down(retry_after=0.1),
        "429": faults.too_many(),
        "500": faults.refused(500, "InternalError"),
        "reset": faults.reset(),
        "truncated, the length says so": faults.truncated(honest=True),
        "truncated": faults.truncated(honest=False),
        "stall": faults.stall(),
        "stall before the first byte": faults.late(1.2),
        "late": faults.late(0.2),
    }
    if client.shows_headers:
        ridden["another range"] = faults.wrong_range()
    if not client.name.startswith("http"):
        ridden["expired"] = faults.expired()
        ridden["expired, with 403"] = faults.expired(403)
    for name, fault in ridden.items():
        client.server.fail(fault, when=ranged)
        data = ranges.read("a", START, LENGTH, file_bytes=len(DATA))
        assert bytes(data) == DATA[START : START + LENGTH], name
    assert counters.count("throttled") == 3
    # fsspec's clients wait longer for a first byte, and adlfs reads on by itself where a body was cut.
    assert counters.count("retries") >= len(ridden) - (1 if client.shows_headers else 5)
    client.server.down()
    threading.Timer(0.3, client.server.up).start()
    assert bytes(ranges.read("a", START, LENGTH)) == DATA[START : START + LENGTH]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.slow_down(), "the store asks to slow down (503"),
        (faults.refused(500, "InternalError"), "the store failed (500"),
        (faults.reset(), ""),
    ],
    ids=["503", "500", "reset"],
)
def test_what_does_not_pass_ends_in_one_line(client: Client, fault: faults.Fault, words: str) -> None:
    policy = RetryPolicy(budget_s=0.3, first_delay_s=0.02, max_delay_s=0.1, stall_s=5, hedge=False)
    ranges = client.open(client.root, policy=policy)
    client.server.fail(fault, times=10_000, when=ranged)
    with pytest.raises(StorageError) as caught:
        ranges.read("a", START, LENGTH, file_bytes=len(DATA))
    line = str(caught.value)
    assert line.startswith(f"{client.root}/a: cannot read: {words}")
    assert " times in " in line
    assert_plain(line)


def test_what_is_final_ends_at_once(client: Client) -> None:
    ranges = client.open(client.root, policy=RetryPolicy(budget_s=60, stall_s=5, hedge=False))
    ranges.read("a", 0, 10, file_bytes=len(DATA))
    began = time.monotonic()
    client.server.fail(faults.refused(403, "AccessDenied"), times=10_000)
    client.server.fail(faults.refused(403, "AccessDenied"), times=10_000, method="HEAD")
    with pytest.raises(StorageError, match="the store denies access") as caught:
        ranges.read("a", START, LENGTH)
    assert_plain(str(caught.value))
    client.server.forgive()
    client.server.fail(faults.refused(404, "NoSuchKey"), times=10_000)
    client.server.fail(faults.refused(404, "NoSuchKey"), times=10_000, method="HEAD")
    with pytest.raises(FileNotFoundError):
        ranges.read("a", START, LENGTH)
    assert time.monotonic() - began < 10


def test_another_version_of_a_file_is_told(client: Client) -> None:
    # fsspec does not show the headers of a range's answer: its reader asks for them beside, by HEAD.
    method = "GET" if client.shows_headers else "HEAD"
    for index, (fault, words) in enumerate(
        [(faults.wrong_etag(), "replaced"), (longer(method), "3,000,001 bytes, 3,000,000 in the index")]
    ):
        ranges = client.open(client.root)
        ranges.read("a", 0, 10, file_bytes=len(DATA))
        client.server.fail(fault, method=method)
        with pytest.raises(FileReplaced, match=words):
            ranges.read("a", index, LENGTH, file_bytes=len(DATA))


def longer(method: str) -> faults.Fault:
    """Another size of the whole file, in the header that tells it."""
    if method == "GET":
        return faults.wrong_length()
    return lambda answer: faults.replace(
        answer, headers={**answer.headers, "Content-Length": str(len(DATA) + 1)}
    )


def assert_plain(line: str) -> None:
    """One line for a person: no dump of a library, no signature, no key."""
    assert "\n" not in line
    assert len(line) < 300
    for word in ("Debug", "Error {", "sig=", "Signature", "Credential=", "AKIA", "Eby8v", "?"):
        assert word not in line


def test_flipped_bytes_are_the_checksum_s_to_find(tmp_path: Path, faulty: Server) -> None:
    (tmp_path / "a").write_bytes(DATA)
    server = faulty(tmp_path)
    server.fail(faults.flipped())
    ranges = open_ranges(server.url)
    assert bytes(ranges.read("a", 0, 1000)) != DATA[:1000]
    assert bytes(ranges.read("a", 0, 1000)) == DATA[:1000]


def test_many_threads_ride_out_a_storm(tmp_path: Path, faulty: Server) -> None:
    """Sixteen threads, every third request fails in one of five ways: all bytes right, nothing hangs."""
    (tmp_path / "a").write_bytes(DATA)
    server = faulty(tmp_path)
    counters = Counters()
    ranges = open_ranges(
        server.url, policy=RetryPolicy(budget_s=60, first_delay_s=0.01, stall_s=0.5), counters=counters
    )
    storm = [
        faults.slow_down(),
        faults.reset(),
        faults.truncated(honest=True),
        faults.stall(),
        faults.late(0.3),
    ]
    for index in range(60):
        server.fail(storm[index % 5], after=3 * index)
    wrong: list[int] = []

    def read(seed: int) -> None:
        memory = np.zeros(300_000, np.uint8)
        for start in np.random.default_rng(seed).integers(2_700_000, size=12):
            ranges.scatter("a", int(start), [memoryview(memory)[:1234], memoryview(memory)[1234:]])
            if memory.tobytes() != DATA[start : start + 300_000]:
                wrong.append(int(start))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert counters.count("bytes") == 16 * 12 * 300_000
    assert counters.count("retries") > 20
