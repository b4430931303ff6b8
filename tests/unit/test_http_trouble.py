"""What a network, a cloud's doors and a machine's environment do to reads, and what reads leave behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tls import Files, certificate, files

from isthmus.errors import DataError, NotInstalled, StorageError, UsageError
from isthmus.storage.http import s3
from isthmus.storage.http.wire import Wire
from isthmus.storage.ranges import direct
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.settings import S3, AzureAccount, container_and_path
from isthmus.storage.ranges.spec import Ranges

DATA = np.random.default_rng(8).bytes(3_000_000)


@pytest.fixture
def web() -> Iterator[tuple[Files, str]]:
    with files(DATA) as served:
        yield served


@pytest.mark.parametrize("status", [301, 307, 400])
@pytest.mark.parametrize("told", ["header", "body"])
def test_all_threads_follow_a_bucket_to_its_region(
    web: tuple[Files, str], no_credentials: pytest.MonkeyPatch, status: int, told: str
) -> None:
    server, address = web
    no_credentials.setenv("AWS_ACCESS_KEY_ID", "key\n")  # as mounted files have it
    no_credentials.setenv("AWS_SECRET_ACCESS_KEY", "secret\n")
    no_credentials.setenv("AWS_REGION", "us-east-1")

    def place(self: s3.S3Address) -> None:
        self.server, self.root, self.host = address, f"/{self.bucket}", address.partition("://")[2]

    no_credentials.setattr(s3.S3Address, "_place", place)
    together = threading.Barrier(8)

    def elsewhere(handler: Any) -> bool | None:
        if "/us-east-1/" not in handler.headers["Authorization"]:
            return None
        together.wait(20)
        body = b"<Error><Code>X</Code><Region>eu-west-1</Region></Error>" if told == "body" else b""
        handler.send_response(status)
        if told == "header":
            handler.send_header("x-amz-bucket-region", "eu-west-1")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    server.before = elsewhere
    ranges = open_ranges("s3://bucket/data", policy=RetryPolicy(budget_s=20, first_delay_s=0.01))
    right: list[bool] = []

    def read(start: int) -> None:
        right.append(bytes(ranges.read("a", start, 1000)) == DATA[start : start + 1000])

    threads = [threading.Thread(target=read, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 8


def test_reads_leave_nothing_that_only_the_collector_finds(web: tuple[Files, str]) -> None:
    server, root = web
    ranges = open_ranges(root, policy=RetryPolicy(budget_s=20, first_delay_s=0.001))
    for start in range(20):
        ranges.read("a", start, 1_000_000)

    def busy(handler: Any) -> bool | None:
        server.before = lambda _: None
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.0 503 Busy\r\n\r\n")
        return True

    gc.collect()
    gc.disable()
    try:
        kept = []
        for start in range(10):
            server.before = busy
            memory = np.zeros(1_000_000, np.uint8)
            kept.append(weakref.ref(memory))
            ranges.scatter("a", start, [memory.data])
            del memory
        assert [one() for one in kept] == [None] * 10
    finally:
        gc.enable()


def test_connections_that_the_network_forgot_cost_one_wait_and_not_the_budget(web: tuple[Files, str]) -> None:
    server, root = web
    counters = Counters()
    ranges = open_ranges(root, counters=counters, policy=RetryPolicy(budget_s=60, stall_s=5, hedge=False))
    together, over = threading.Barrier(12), threading.Event()
    server.before = lambda _: together.wait(20) and None
    threads = [threading.Thread(target=ranges.read, args=("a", start, 1000)) for start in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    old = server.connections
    assert old == 12

    def silent(handler: Any) -> bool | None:
        if server.connections == old:
            over.wait(30)  # a connection of before: nothing comes
            return True
        return None

    server.before = silent
    try:
        assert bytes(ranges.read("a", 7, 1000)) == DATA[7:1007]
    finally:
        over.set()
    assert counters.count("retries") == 1  # of twelve that are dead, one was waited for


def test_an_answer_that_nobody_asked_for_is_nobody_s(web: tuple[Files, str]) -> None:
    server, root = web
    wire = Wire(root, 5)
    ranges = open_ranges(root)
    ranges._wire = wire  # type: ignore[attr-defined]

    def twice(handler: Any) -> bool | None:
        server.before = lambda _: None
        for start, wait_s in ((5, 0), (6, 0.05)):
            time.sleep(wait_s)
            head = f"HTTP/1.1 206 OK\r\nContent-Range: bytes {start}-{start + 999}/{len(DATA)}\r\nContent-Length: 1000\r\n\r\n"
            handler.wfile.write(head.encode() + DATA[:1000] if wait_s else head.encode() + DATA[5:1005])
        return True

    server.before = twice
    assert bytes(ranges.read("a", 5, 1000)) == DATA[5:1005]
    time.sleep(0.3)
    assert bytes(ranges.read("a", 6, 1000)) == DATA[6:1006]


def test_a_new_tls_connection_whose_answer_is_late_gets_a_second_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pair[0]))
    with files(DATA, pair) as (server, root):
        counters = Counters()
        ranges = open_ranges(root, counters=counters, policy=RetryPolicy(stall_s=20))
        for start in range(20):
            ranges.read("a", start, 100_000)
        ranges._wire.forget()  # type: ignore[attr-defined]
        late = threading.Event()

        def wait(handler: Any) -> bool | None:
            server.before = lambda _: None
            return late.wait(30)

        server.before = wait
        began = time.monotonic()
        assert bytes(ranges.read("a", 9, 100_000)) == DATA[9:100_009]
        assert time.monotonic() - began < 5
        late.set()
        assert (counters.count("hedged"), counters.count("retries")) == (1, 0)


def test_keys_that_cannot_be_renewed_for_a_moment_go_on(no_credentials: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def provider(uri: str) -> Any:
        def ask() -> dict[str, str]:
            given.append(1)
            if len(given) == 2:
                raise RuntimeError("the service is busy")
            return {"access_key_id": f"key{len(given)}", "secret_access_key": "s"}

        return ask

    no_credentials.setattr(s3, "_provider", provider)
    address = s3.S3Address("s3://bucket/data")
    assert address.credentials().access == "key1"
    address._keys = (0.0, address.credentials())
    assert address.credentials().access == "key1"
    assert len(given) == 2
    address._keys = (0.0, address.credentials())
    assert address.credentials().access == "key3"
    assert address.refresh()
    assert address.credentials().access == "key4"


def test_no_secret_is_in_what_is_said_of_one_that_cannot_be_sent(
    web: tuple[Files, str], no_credentials: pytest.MonkeyPatch
) -> None:
    no_credentials.setenv("AWS_ENDPOINT_URL", web[1])
    no_credentials.setenv("AWS_ACCESS_KEY_ID", "key")
    no_credentials.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    no_credentials.setenv("AWS_SESSION_TOKEN", "SECRET\nTOKEN")
    for text in ("sig=SECRET TOKEN", "sig=SECRETé"):
        no_credentials.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName=a;BlobEndpoint={web[1]}/a;SharedAccessSignature={text}",
        )
        for root in ("s3://bucket/data", "az://container/data"):
            began = time.monotonic()
            with pytest.raises(StorageError, match="hold a character that no request may") as caught:
                open_ranges(root).read("a", 0, 1)
            assert time.monotonic() - began < 1
            error: BaseException | None = caught.value
            while error is not None:
                assert "SECRET" not in str(error)
                error = error.__cause__
    with pytest.raises(UsageError, match="not base64"):
        AzureAccount.of("az://c/d", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=no key"})
    with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL: .*begin it with http://"):
        S3.of({"AWS_ENDPOINT_URL": "127.0.0.1:9000"})


def test_roots_with_other_characters(web: tuple[Files, str]) -> None:
    server, root = web
    for folder, sent in (("a b", "a%20b"), ("datas\u00e4t", "datas%C3%A4t"), ("a%20b", "a%20b")):
        assert bytes(open_ranges(f"{root}/{folder}").read("x y", 5, 5)) == DATA[5:10]
        assert server.log[-1][0] == f"/{sent}/x%20y"
    assert container_and_path("s3://bucket/a#b/c?d/") == ("bucket", "a#b/c?d")
    assert container_and_path("abfss://c@account.dfs.core.windows.net/x/y") == ("c", "x/y")


@pytest.mark.parametrize(("hints", "good"), [(1, True), (5, True), (40, False)])
def test_answers_that_say_that_one_is_coming_are_passed_over(
    web: tuple[Files, str], hints: int, good: bool
) -> None:
    server, address = web

    def early(handler: Any) -> None:
        for number in range(hints):
            handler.wfile.write(
                f"HTTP/1.1 {102 + number % 2} Soon\r\nLink: </style.css>; rel=preload\r\n\r\n".encode()
            )

    server.before = early
    ranges = open_ranges(address, policy=RetryPolicy(budget_s=0.2, first_delay_s=0.05))
    if good:
        for start in range(3):
            assert bytes(ranges.read("a", start, 1000)) == DATA[start : start + 1000]
    else:
        with pytest.raises(StorageError):
            ranges.read("a", 0, 1000)
    ranges.close()


@pytest.mark.parametrize("root", ["file", "http"])
def test_a_name_with_half_a_character_is_refused(web: tuple[Files, str], tmp_path: Path, root: str) -> None:
    uri = web[1] if root == "http" else f"file://{tmp_path}"
    ranges = open_ranges(uri, policy=RetryPolicy(budget_s=0.2, first_delay_s=0.05))
    with pytest.raises(DataError, match="no name of a file below this root"):
        ranges.read("part-\ud800.parquet", 0, 10)
    ranges.close()


def test_a_whole_file_that_the_server_compresses_is_refused(web: tuple[Files, str]) -> None:
    server, root = web

    def packed(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 1000)
        return True

    server.before = packed
    with pytest.raises(StorageError, match="does not answer range requests"):
        open_ranges(root).read("a", 0, 1000)
    assert server.log[-1][1]["Accept-Encoding"] == "identity"


def test_where_only_another_library_finds_credentials_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(DATA)

    def nobody(uri: str) -> Any:
        raise NotInstalled("s3:// with other than the environment's keys", extra="sagemaker", module="boto3")

    monkeypatch.setattr(direct, "address_of", nobody)
    opened: list[int] = []

    def instead() -> Ranges:
        opened.append(1)
        return open_ranges(str(tmp_path))

    ranges = direct.DirectRanges(
        "s3://bucket/data", RetryPolicy(), Counters(), store="s3://bucket", instead=instead
    )
    for start in (0, 5):
        assert bytes(ranges.read("a", start, 1000)) == DATA[start : start + 1000]
    assert opened == [1]
    alone = direct.DirectRanges("s3://bucket/data", RetryPolicy(), Counters(), store="s3://bucket")
    with pytest.raises(NotInstalled, match="boto3"):
        alone.read("a", 0, 1)
