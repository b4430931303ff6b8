"""Blob that reads from S3, or from another account, by itself.

Azurite knows no Put Block From URL, so a server of ours stands before it that does what the service does with one: it
fetches the range from the address that it was given, with nothing else in hand, and puts the block into Azurite under the
name that was asked for. What is tested with it is ours: the address, its signature, ranges, and the way back without it.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import faulty as module
import pytest
from faulty import Answer, FaultyServer, Request, refused
from servers import AZURITE_ACCOUNT, AZURITE_KEY, Store, connection_string
from transfers import MIB, QUICK, contents, copied, fetched, make_tree

from isthmus.errors import DataError
from isthmus.storage.http.blob import shared_key
from isthmus.storage.transfer.copy import Copy

pytestmark = pytest.mark.faults
SIZES = {"one.bin": 17 * MIB + 3, "two.bin": 1000, "a b/ü+&.bin": 50}


@pytest.fixture
def service(
    blob: Store, faulty: Callable[[Path | str], FaultyServer], monkeypatch: pytest.MonkeyPatch
) -> FaultyServer:
    """Azurite, with Put Block From URL."""
    upstream = blob.endpoint.partition(f"/{AZURITE_ACCOUNT}")[0]
    server = faulty(upstream)
    original = module._ask

    def ask(address: str, request: Request, sent: bytes) -> Answer:
        source = request.header("x-ms-copy-source")
        if address != upstream or "comp=block&" not in request.path or not source:
            return original(address, request, sent)
        wanted = {"Range": request.header("x-ms-source-range")}
        if request.header("x-ms-source-if-match"):
            wanted["If-Match"] = request.header("x-ms-source-if-match")
        try:
            with urllib.request.urlopen(urllib.request.Request(source, headers=wanted)) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            return refused(error.code, "CannotVerifyCopySource")(Answer(0, {}, b""))
        parts = urlsplit(request.path)
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        query = dict(parse_qsl(parts.query))
        headers["Authorization"] = shared_key(
            "PUT", AZURITE_ACCOUNT, AZURITE_KEY, parts.path, query, headers, len(data)
        )
        headers |= {"Content-Length": str(len(data)), "Host": urlsplit(upstream).netloc}
        return original(address, replace(request, headers=headers), data)

    monkeypatch.setattr(module, "_ask", ask)
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", connection_string(f"{server.url}/{AZURITE_ACCOUNT}")
    )
    return server


def test_blob_fetches_from_s3_by_itself(
    tmp_path: Path, s3: Store, blob: Store, service: FaultyServer
) -> None:
    tree = make_tree(tmp_path / "source", SIZES)
    copied(tree, s3.root, tmp_path / "state")
    _, done = copied(s3.root, blob.root, tmp_path / "state")
    assert fetched(blob, "data") == contents(tree)
    assert (done.by_service, done.parts_sent) == (6, 0)
    # Of the large file S3 tells a checksum, which nobody can compare with what Blob holds: it is said so.
    assert done.checked == {"service": 3}
    _, done = copied(s3.root, blob.root + "-again", tmp_path / "state", replace(QUICK, checksum=True))
    assert done.checked == {"read back": 3}
    assert not [r for r in service.requests if "X-Amz-Signature" in r.path]


def test_blob_fetches_from_blob_by_itself(tmp_path: Path, blob: Store, service: FaultyServer) -> None:
    tree = make_tree(tmp_path / "source", SIZES)
    copied(tree, blob.root, tmp_path / "state")
    _, done = copied(blob.root, blob.root + "-copy", tmp_path / "state")
    assert fetched(blob, "data-copy") == contents(tree)
    assert (done.by_service, done.parts_sent) == (6, 0)


def test_a_source_that_is_replaced_while_the_service_reads_it(
    tmp_path: Path, s3: Store, blob: Store, service: FaultyServer
) -> None:
    tree = make_tree(tmp_path / "source", SIZES)
    copied(tree, s3.root, tmp_path / "state")
    with Copy(s3.root, blob.root, QUICK, tmp_path / "state") as copy:
        plan = copy.plan()
        s3.put("one.bin", bytes(17 * MIB + 3))
        with pytest.raises(DataError, match="replaced while it was copied"):
            copy.run(plan)
    assert "one.bin" not in fetched(blob, "data")


def test_where_the_service_cannot_the_bytes_pass_here(
    tmp_path: Path, s3: Store, blob: Store, service: FaultyServer
) -> None:
    """After two parts that it fetched, it is no longer allowed to: the rest of the file is sent."""
    tree = make_tree(tmp_path / "source", SIZES)
    copied(tree, s3.root, tmp_path / "state")
    service.fail(
        refused(403, "CannotVerifyCopySource"),
        times=100,
        method="PUT",
        after=2,
        when=lambda request: bool(request.header("x-ms-copy-source")),
    )
    _, done = copied(s3.root, blob.root, tmp_path / "state", replace(QUICK, parallel=1))
    assert fetched(blob, "data") == contents(tree)
    assert done.by_service == 2
    assert done.parts_sent == 4
