"""Files that are sent to real object stores in parts, and what a store that refuses does to them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyServer, expired, refused, reset, slow_down
from saving import IDENTITY, engine, step
from servers import Store, connection_string

from isthmus.core.recipe.schema import Checkpoint as Settings
from isthmus.core.train.checkpoint import Checkpoints, TrainerState, flat_state
from isthmus.core.train.saving_flight import send
from isthmus.core.train.weights import checksum
from isthmus.errors import StorageError
from isthmus.storage import filesystems, uploads
from isthmus.storage.ranges import clients
from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.faults

Faulty = Callable[[Any], FaultyServer]
FILES = {"large": os.urandom(11 << 20), "small": b"x" * 1000, "empty": b""}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest that S3 takes, so that a few megabytes are several parts."""
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)


@pytest.fixture(params=["obstore", "fsspec"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With obstore and as if it were not installed."""
    if request.param == "fsspec":
        monkeypatch.setattr(clients, "obstore_usable", lambda: False)
    return str(request.param)


def check(root: str, described: dict[str, dict[str, Any]]) -> None:
    """What is in the store is what was sent, and what was said of it."""
    files, path = filesystems.filesystem(root)
    files.invalidate_cache()
    for name, data in FILES.items():
        assert files.cat_file(f"{path}/step/{name}") == data, name
        assert described[name] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_s3(s3: Store, client: str) -> None:
    check(s3.root, send(uploads.Uploads(s3.root, budget_s=5), "step", FILES))


def test_blob(blob: Store, client: str) -> None:
    check(blob.root, send(uploads.Uploads(blob.root, budget_s=5), "step", FILES))


def test_parts_are_retried_one_by_one(
    s3: Store, client: str, faulty: Faulty, no_credentials: pytest.MonkeyPatch
) -> None:
    """A store that refuses some requests: the upload goes on, it does not start over for each."""
    server = faulty(s3.endpoint)
    no_credentials.setenv("AWS_ENDPOINT_URL", server.url)
    server.fail(slow_down(), times=2, method="PUT", match="large")
    server.fail(refused(500, "InternalError"), times=1, method="POST", match="large")
    if client == "obstore":
        server.fail(reset(0.0), times=1, method="PUT", match="large", after=3)
    check(s3.root, send(uploads.Uploads(s3.root, budget_s=30), "step", FILES))
    assert server.count("PUT", "large") > 3


def test_blocks_of_blob_are_retried(blob: Store, faulty: Faulty, no_credentials: pytest.MonkeyPatch) -> None:
    server = faulty(blob.endpoint.rpartition("/")[0])
    no_credentials.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        connection_string(f"{server.url}/{blob.endpoint.rpartition('/')[2]}"),
    )
    server.fail(refused(503, "ServerBusy"), times=3, method="PUT", match="large")
    check(blob.root, send(uploads.Uploads(blob.root, budget_s=30), "step", FILES))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (slow_down(), "the store asks to slow down"),
        (refused(403, "AccessDenied"), "denies access"),
        (expired(), "does not accept the credentials"),
    ],
)
def test_a_store_that_goes_on_refusing_is_one_line_within_the_budget(
    s3: Store, client: str, faulty: Faulty, no_credentials: pytest.MonkeyPatch, fault: Any, says: str
) -> None:
    server = faulty(s3.endpoint)
    no_credentials.setenv("AWS_ENDPOINT_URL", server.url)
    for method in ("PUT", "POST"):
        server.fail(fault, times=10**6, method=method)
    started = time.monotonic()
    with pytest.raises(StorageError, match=says) as caught:
        send(uploads.Uploads(s3.root, budget_s=0.5), "step", FILES)
    assert time.monotonic() - started < 20
    assert "\n" not in str(caught.value)
    assert s3.root in str(caught.value)


def test_no_bucket_is_one_line(s3: Store, client: str) -> None:
    with pytest.raises(StorageError, match="cannot write") as caught:
        send(uploads.Uploads("s3://no-such-bucket-here/data", budget_s=0.5), "step", FILES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["s3", "blob"])
def test_a_run_in_an_object_store_saves_and_resumes(
    request: pytest.FixtureRequest, place: str, tmp_path: Path
) -> None:
    store: Store = request.getfixturevalue(place)
    made, ema = engine("fsdp")
    saver = Checkpoints(
        RunDirectory(f"{store.root}/run"), made, ema, Settings.model_validate({"keep": 1}), None
    )
    for number in (1, 2):
        step(made, ema, number)
        saver.save(TrainerState(IDENTITY, step=number))
    assert saver.run.checkpoints() == [2]
    again, other = engine("ddp", seed=1)
    found = Checkpoints(saver.run, again, other, Settings(), None).load(IDENTITY)
    assert found is not None
    assert found.step == 2
    assert checksum(flat_state(again, other)) == checksum(flat_state(made, ema))
