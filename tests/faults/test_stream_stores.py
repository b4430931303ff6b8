"""The loader over S3 and Blob whose answers go wrong, whose credentials expire, and whose name does not resolve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from faulty import FaultyServer, expired, refused, reset, slow_down
from streams import BRIEF, STEPS, keys_of, loader_of, threads_left, undisturbed

from isthmus.errors import StorageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.synthetic import write_synthetic

if TYPE_CHECKING:
    from servers import Store

pytestmark = pytest.mark.faults
Server = Callable[[Path | str], FaultyServer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("stores") / "data"
    write_synthetic(str(place), 64)
    return place


@pytest.fixture(scope="module")
def expected(folder) -> list[list[str]]:
    return undisturbed(str(folder))


def upload(folder: Path, store: Store) -> None:
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())


def behind(faulty: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    """A server that the store is reached through from now on."""
    origin = "/".join(store.endpoint.split("/")[:3])  # without the account, which Blob has in its paths
    server = faulty(origin)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value.replace(origin, server.url))
    return server


@pytest.mark.parametrize("kind", ["s3", "blob"])
def test_a_dataset_in_a_store_delivers_the_same_keys_through_faults(
    request: pytest.FixtureRequest, folder, expected, faulty: Server, monkeypatch, kind: str
) -> None:
    store: Store = request.getfixturevalue(kind)
    upload(folder, store)
    server = behind(faulty, store, monkeypatch)
    server.fail(slow_down(retry_after=0.1), times=2, match="part-", after=2)
    server.fail(reset(), times=2, match="part-00001", after=1)
    server.fail(refused(500, "InternalError"), times=1, match="part-00000")
    loader = loader_of(open_dataset(store.root))
    assert keys_of(loader) == expected
    assert server.count(match="part-") > 0
    assert loader.stats()["retries"] >= 4
    assert not threads_left()


SCRIPT = """
import json, sys
print(json.dumps({"Version": 1, "AccessKeyId": open(sys.argv[1]).read(), "SecretAccessKey": "s", "SessionToken": "t",
                  "Expiration": "2999-01-01T00:00:00Z"}))
"""


def test_credentials_that_expire_in_the_middle_of_an_epoch_are_fetched_anew(
    s3: Store, folder, expected, faulty: Server, monkeypatch, tmp_path: Path
) -> None:
    upload(folder, s3)
    server = behind(faulty, s3, monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    key, script, config = tmp_path / "key", tmp_path / "process.py", tmp_path / "config"
    key.write_text("FIRSTKEY")
    script.write_text(SCRIPT)
    config.write_text(
        f"[profile short]\nregion = us-east-1\ncredential_process = {sys.executable} {script} {key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "short")

    def of_key(name: str) -> Callable[[object], bool]:
        return lambda request: f"Credential={name}/" in request.header("Authorization")  # type: ignore[attr-defined]

    dataset = open_dataset(s3.root)
    loader = loader_of(dataset, memory_limit=128_000, depth=1)
    got = []
    with loader:
        for batch in islice(loader, STEPS):
            got.append(list(batch.keys))
            if batch.step == 3:
                key.write_text("SECONDKEY")
                server.fail(expired(), times=float("inf"), when=of_key("FIRSTKEY"))
    assert got == expected
    assert loader.stats()["retries"] >= 1
    # And when no key is good any more, it is said, with the place and without the key.
    server.fail(expired(), times=float("inf"), match="part-")
    with pytest.raises(StorageError) as raised:
        keys_of(loader_of(dataset, replace(BRIEF, stall_s=10.0)))
    line = str(raised.value)
    assert re.search(r"shard part-0000\d.\w+.parquet, row group \d: .*credentials", line), line
    assert "KEY" not in line


NAME = """
import sys, threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
import subprocess
sys.path.insert(0, sys.argv[4])
from streams import QUICK, STEPS, loader_of
from isthmus.storage.shards import open_dataset

hosts, port, folder = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
usual = Path("/etc/hosts").read_text()
hosts.write_text(usual)
subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
dataset = replace(open_dataset(folder), roots=(f"http://a-store.invalid:{port}",))
away = float(sys.argv[5])
policy = replace(QUICK, budget_s=away + 20)
loader = loader_of(dataset, policy, wait_limit=away + 30)
threading.Timer(away, hosts.write_text, [usual + "127.0.0.1 a-store.invalid\\n"]).start()
with loader:
    for batch in islice(loader, STEPS):
        print(*batch.keys)
assert loader.stats()["retries"] > 1
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a hosts file of its own needs root")
@pytest.mark.parametrize("away", [1.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_name_that_does_not_resolve_for_a_while_is_waited_for(
    folder, expected, faulty: Server, tmp_path, away
):
    helpers = Path(__file__).parents[1] / "helpers"
    arguments = [str(tmp_path / "hosts"), str(faulty(folder).port), str(folder), str(helpers), str(away)]
    command = ["unshare", "--mount", sys.executable, "-c", NAME, *arguments]
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make a mount namespace")
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == expected


def test_a_name_that_never_resolves_ends_within_the_budget(folder):
    dataset = replace(open_dataset(str(folder)), roots=("http://a-store.invalid:1",))
    with pytest.raises(StorageError, match=r"shard part-0000\d.\w+.parquet, row group \d: .*tried \d+ times"):
        keys_of(loader_of(dataset, BRIEF))
