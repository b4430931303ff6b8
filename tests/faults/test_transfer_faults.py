"""Stores that misbehave while `data copy` reads from them and writes to them: what it survives, and what it says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import faulty as module
import pytest
from faulty import (
    Answer,
    Fault,
    FaultyServer,
    Request,
    expired,
    refused,
    reset,
    slow_down,
    stall,
    too_many,
    truncated,
)
from servers import Store, connection_string
from transfers import MIB, QUICK, contents, copied, fetched, make_tree, planned

from isthmus.errors import DataError, StorageError
from isthmus.storage.transfer.copy import Copy

pytestmark = pytest.mark.faults
Serve = Callable[[Path | str], FaultyServer]
SIZES = {"one.bin": 16 * MIB, "two.bin": 1000, "three.bin": 6 * MIB}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "source", SIZES)


@pytest.fixture(params=["s3", "azure"])
def store(request: pytest.FixtureRequest) -> Store:
    """A bucket or a container."""
    found: Store = request.getfixturevalue("s3" if request.param == "s3" else "blob")
    return found


@pytest.fixture
def between(store: Store, faulty: Serve, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    """A server that misbehaves before the store; the environment leads through it."""
    server = faulty(store.endpoint.partition("/devstoreaccount1")[0])
    if store.root.startswith("s3://"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    else:
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING", connection_string(server.url + "/devstoreaccount1")
        )
    return server


PASSING = [
    pytest.param(slow_down(0.05), id="503"),
    pytest.param(too_many(), id="429"),
    pytest.param(refused(500, "InternalError"), id="500"),
    pytest.param(reset(0.0), id="reset"),
]


@pytest.mark.parametrize("fault", PASSING)
def test_uploads_survive(
    fault: Fault, tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    for method in ("PUT", "POST", "HEAD"):
        between.fail(fault, times=2, method=method, after=1)
    _, done = copied(tree, store.root, tmp_path / "state")
    assert fetched(store, "data") == contents(tree)
    assert done.counts["retries"] >= (2 if fault is not PASSING[3].values[0] else 0)


@pytest.mark.parametrize(
    "fault",
    [
        *PASSING,
        pytest.param(truncated(honest=False), id="truncated"),
        pytest.param(truncated(honest=True), id="short"),
    ],
)
def test_downloads_survive(
    fault: Fault, tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    for name, data in contents(tree).items():
        store.put(name, data)
    between.fail(fault, times=3, match=".bin", after=1)
    copied(store.root, tmp_path / "target", tmp_path / "state")
    assert contents(tmp_path / "target") == contents(tree)


def test_a_store_that_falls_silent_is_asked_again(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    for name, data in contents(tree).items():
        store.put(name, data)
    between.fail(stall(), times=2, match=".bin")
    copied(store.root, tmp_path / "target", tmp_path / "state", replace(QUICK, stall_s=2.0, budget_s=60.0))
    assert contents(tmp_path / "target") == contents(tree)


def test_a_listing_survives(tree: Path, tmp_path: Path, store: Store, between: FaultyServer) -> None:
    store.put("one.bin", b"x")
    between.fail(slow_down(), times=2, match="list")
    assert len(planned(store.root, tmp_path / "target", tmp_path / "state").items) == 1


def test_bytes_that_changed_on_the_way_are_sent_again(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's body is changed between us and the store: the store's own check finds it."""
    wrong: list[int] = []

    original = module._ask

    def damaged(upstream: str, request: Request, sent: bytes) -> Answer:
        if len(sent) > MIB and len(wrong) < 2:
            wrong.append(len(sent))
            sent = bytes([sent[0] ^ 1]) + sent[1:]
        return original(upstream, request, sent)

    monkeypatch.setattr(module, "_ask", damaged)
    copied(tree, store.root, tmp_path / "state")
    assert len(wrong) == 2
    assert fetched(store, "data") == contents(tree)


def test_credentials_that_expire_half_way_are_looked_up_anew(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    between.fail(expired(), times=1, method="PUT", after=2)
    copied(tree, store.root, tmp_path / "state")
    assert fetched(store, "data") == contents(tree)


def test_credentials_that_stay_expired_end_it_and_the_next_copy_goes_on(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    one = replace(QUICK, parallel=1)
    between.fail(expired(), times=1000, method="PUT", after=2)
    with pytest.raises(StorageError, match="does not accept the credentials"):
        copied(tree, store.root, tmp_path / "state", one)
    between.forgive()
    between.requests.clear()
    _, done = copied(tree, store.root, tmp_path / "state", one)
    # The third the store took, and its answer was lost.
    assert done.parts_there == 3
    assert fetched(store, "data") == contents(tree)


def test_a_store_that_stays_away_is_given_up_after_the_budget(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    with Copy(str(tree), store.root, replace(QUICK, budget_s=0.6), tmp_path / "state") as copy:
        plan = copy.plan()
        with between.away():
            began = time.monotonic()
            with pytest.raises(StorageError, match=r"cannot write: the connection was .*tried"):
                copy.run(plan)
            assert time.monotonic() - began < 10
        assert copy.run(plan).files == 3
    assert fetched(store, "data") == contents(tree)


def test_a_source_that_is_replaced_while_it_is_read(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    for name, data in contents(tree).items():
        store.put(name, data)
    (tree / "manifest.json").write_text("{}")
    store.put("manifest.json", b"{}")
    target = tmp_path / "target"
    with Copy(store.root, str(target), QUICK, tmp_path / "state") as copy:
        plan = copy.plan()
        store.put("one.bin", bytes(16 * MIB))
        with pytest.raises(DataError, match="replaced while it was copied") as caught:
            copy.run(plan)
    assert caught.value.where == f"{store.root}/one.bin"
    # The others came, and the name that says that all is there did not.
    assert sorted(name for name in contents(target) if not name.startswith(".")) == ["three.bin", "two.bin"]
    (tree / "one.bin").write_bytes(bytes(16 * MIB))
    copied(store.root, target, tmp_path / "state")
    assert contents(target) == contents(tree)


def test_a_file_here_that_is_replaced_while_it_is_read(tree: Path, tmp_path: Path, store: Store) -> None:
    with Copy(str(tree), store.root, QUICK, tmp_path / "state") as copy:
        plan = copy.plan()
        (tree / "one.bin").write_bytes(bytes(16 * MIB))
        (tree / "two.bin").unlink()
        with pytest.raises(DataError, match="and 1 more of 3 files"):
            copy.run(plan)
    assert sorted(fetched(store, "data")) == ["three.bin"]
    _, done = copied(tree, store.root, tmp_path / "state")
    assert done.files == 1
    assert fetched(store, "data") == contents(tree)


def test_parts_that_arrived_are_not_sent_again_even_if_nobody_wrote_that_down(
    tree: Path, tmp_path: Path, store: Store, between: FaultyServer
) -> None:
    """The journal loses its lines about parts, as if a kill had come before each of them."""
    between.fail(refused(400, "Never"), times=1000, method="PUT", after=3)
    with pytest.raises(StorageError):
        copied(tree, store.root, tmp_path / "state", replace(QUICK, parallel=1))
    (journal,) = (tmp_path / "state").rglob("journal.jsonl")
    lines = [line for line in journal.read_text().splitlines() if '"part":' not in line]
    journal.write_text("\n".join(lines) + '\n{"part": "one.b')
    between.forgive()
    between.requests.clear()
    _, done = copied(tree, store.root, tmp_path / "state")
    assert done.parts_there == 4
    assert fetched(store, "data") == contents(tree)


@pytest.mark.root
def test_a_full_disk_is_said_and_half_a_file_is_not_there(tree: Path, tmp_path: Path) -> None:
    import subprocess

    if os.geteuid() != 0:
        pytest.skip("needs root, for a small tmpfs")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(StorageError, match="disk is full"):
            copied(tree, small / "t", tmp_path / "state")
        assert "one.bin" not in contents(small / "t")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.slow
def test_memory_is_what_was_allowed(tmp_path: Path, s3: Store) -> None:
    """A process copies 160 MiB in buffers of 20 MiB: its memory stays within that and what Python takes. moto is slow."""
    import subprocess
    import sys

    make_tree(tmp_path / "source", {"x": 160 * MIB})
    program = (
        "import resource, sys; from pathlib import Path; from isthmus.storage.transfer.copy import Copy, Options\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "a, b, s = sys.argv[1:]\n"
        "with Copy(a, b, Options(part_bytes=5 << 20, memory=20 << 20, parallel=64), Path(s)) as c:\n"
        "    p = c.plan(); before = peak(); c.run(p); print(peak() - before)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "source"), s3.root, str(tmp_path / "state")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 + 20
