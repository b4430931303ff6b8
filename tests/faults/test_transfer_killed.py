"""`data copy` is killed -9 at random moments: no part that arrived is sent again, and the end is the same bytes.

A proxy of ours stands before the store and writes down every request that carries bytes and what the store answered.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty import Answer, FaultyServer, Request
from servers import Store, connection_string
from transfers import MIB, contents, fetched, make_tree

KILLS = 20
SIZES = {
    "part-00000.bin": 53 * MIB + 7,
    "part-00001.bin": 40 * MIB,
    **{f"small/{n}": 1000 * n for n in range(1, 9)},
    "manifest.json": 0,
}
PROGRAM = """
import sys
from pathlib import Path
from isthmus.storage.transfer.copy import Copy, Options
source, target, state = sys.argv[1:]
options = Options(part_bytes=5 << 20, parallel=3, budget_s=10.0, bandwidth=40e6)
with Copy(source, target, options, Path(state)) as copy:
    done = copy.run(copy.plan())
print(done.parts_sent, done.parts_there)
"""


class Watched(FaultyServer):
    """Also remembers which requests the store has accepted."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.accepted: list[str] = []
        self.lost = 0

    def _fault_for(self, request: Request) -> Callable[[Answer], Answer] | None:
        super()._fault_for(request)
        part = "partNumber=" in request.path or "comp=block&" in request.path
        whole = request.method == "PUT" and "?" not in request.path
        if request.method != "PUT" or not (part or whole):
            return None

        def remember(answer: Answer) -> Answer:
            if answer.status in {200, 201}:
                self.accepted.append(request.path.partition("&sig=")[0])
            return answer

        return remember


def _kill_often(
    source: str, target: str, state: Path, environment: dict[str, str], began: Callable[[], bool]
) -> int:
    """Kills copies at random moments after they began to send; then lets one end. Returns how many were killed."""
    chance = random.Random(11)
    words = [sys.executable, "-c", PROGRAM, source, target, str(state)]
    kills = 0
    for _ in range(KILLS):
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            deadline = time.monotonic() + 30
            while process.poll() is None and not began() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.25))
            kills += process.poll() is None
            process.kill()
            process.communicate()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return kills


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "azure"])
def test_twenty_kills_send_no_part_twice(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Twenty processes are started and killed: half a minute."""
    store: Store = request.getfixturevalue("s3" if kind == "s3" else "blob")
    tree = make_tree(tmp_path / "source", SIZES)
    with Watched(store.endpoint.partition("/devstoreaccount1")[0]) as proxy:
        address = proxy.url + ("/devstoreaccount1" if kind == "azure" else "")
        own = (
            {"AWS_ENDPOINT_URL": address}
            if kind == "s3"
            else {"AZURE_STORAGE_CONNECTION_STRING": connection_string(address)}
        )
        environment = {**os.environ, **store.environment, **own}
        before = [0]

        def began() -> bool:
            """Whether this process has asked for more than the listings."""
            now = len(proxy.requests)
            if now > before[0] + 2:
                before[0] = now
                return True
            return False

        kills = _kill_often(str(tree), store.root, tmp_path / "state", environment, began)
        assert kills >= KILLS // 2
        # A request that was cut off by the kill may have been taken by the store after all: the proxy gives whole bodies
        # only, so what it counts as accepted the store has.
        sent = [path for path in proxy.accepted if not path.endswith("manifest.json")]
        parts = [_part(path) for path in sent if "?" in path]
        again = len(parts) - len(set(parts))
        assert again == 0, [part for part in set(parts) if parts.count(part) > 1]
        assert len(parts) == 11 + 8
    assert fetched(store, "data") == contents(tree)


def _part(path: str) -> tuple[str, str]:
    """The file and the part of a request: of Blob the block's name, of S3 the number."""
    name, _, query = path.partition("?")
    fields = dict(pair.partition("=")[::2] for pair in query.split("&"))
    return name, fields.get("partNumber") or fields["blockid"]


@pytest.mark.faults
@pytest.mark.slow
def test_a_download_that_is_killed_goes_on(tmp_path: Path, s3: Store) -> None:
    """Twenty processes are started and killed: half a minute. Parts on the disk are not fetched again."""
    tree = make_tree(tmp_path / "source", SIZES)
    for name, data in contents(tree).items():
        s3.put(name, data)
    target = tmp_path / "target"
    with FaultyServer(s3.endpoint) as proxy:
        environment = {**os.environ, **s3.environment, "AWS_ENDPOINT_URL": proxy.url}
        before = [0]

        def began() -> bool:
            now = sum(r.method == "GET" and "?" not in r.path for r in proxy.requests)
            if now > before[0]:
                before[0] = now
                return True
            return False

        kills = _kill_often(s3.root, str(target), tmp_path / "state", environment, began)
        assert kills >= KILLS // 2
        reads = [
            (r.path, r.header("Range")) for r in proxy.requests if r.method == "GET" and "?" not in r.path
        ]
    assert contents(target) == contents(tree)
    # What was on its way when a kill came (three threads) is asked for once more, nothing else.
    assert len(reads) - len(set(reads)) <= 3 * kills
    assert not [name for name in contents(target) if name.endswith(".isthmus-part")]
