"""Credentials that expire while a run reads: fetched anew, by obstore and by s3fs, from a profile's credential_process."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import faulty as faults
import numpy as np
import pytest

from isthmus.errors import StorageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_fsspec, open_library, open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import Ranges

if TYPE_CHECKING:
    from servers import Store

pytestmark = pytest.mark.faults
DATA = np.random.default_rng(6).bytes(500_000)
PROCESS = """
import json, sys, time, datetime
count = int(open(sys.argv[1]).read() or 0) + 1
open(sys.argv[1], "w").write(str(count))
until = datetime.datetime.fromtimestamp(time.time() + float(sys.argv[2]), datetime.timezone.utc)
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{count:05d}", "SecretAccessKey": "s", "SessionToken": "t",
                  "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")}))
"""


class Keys:
    """The keys that the profile's process gave out, numbered; the server accepts those from `oldest` on."""

    def __init__(self, counter: Path) -> None:
        self._counter = counter
        self.oldest = 0

    def given(self) -> int:
        return int(self._counter.read_text() or 0)

    def too_old(self, request: faults.Request) -> bool:
        key = re.search(r"Credential=KEY(\d+)/", request.header("Authorization"))
        return key is None or int(key[1]) < self.oldest


@pytest.fixture
def keys(tmp_path: Path, s3: Store, no_credentials: pytest.MonkeyPatch) -> Callable[[float], Keys]:
    """Makes a profile whose process gives out keys that live so long."""

    def make(lifetime_s: float) -> Keys:
        counter, script = tmp_path / "count", tmp_path / "process.py"
        counter.write_text("")
        script.write_text(PROCESS)
        config = tmp_path / "config"
        config.write_text(
            "[profile short]\nregion = us-east-1\n"
            f"credential_process = {sys.executable} {script} {counter} {lifetime_s}\n"
        )
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            no_credentials.delenv(name)
        no_credentials.setenv("AWS_CONFIG_FILE", str(config))
        no_credentials.setenv("AWS_PROFILE", "short")
        return Keys(counter)

    return make


@pytest.mark.parametrize(
    "open_one", [open_ranges, open_library, open_fsspec], ids=["direct", "obstore", "s3fs"]
)
def test_expired_keys_are_replaced_in_the_middle_of_a_run(
    open_one: Callable[..., Ranges],
    s3: Store,
    keys: Callable[[float], Keys],
    faulty: Callable[[Path | str], faults.FaultyServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3.put("a", DATA)
    profile = keys(3600)  # the keys say that they live long; the store stops to accept them
    server = faulty(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for method in ("GET", "HEAD"):
        server.fail(faults.expired(), times=10_000, when=profile.too_old, method=method)
    counters = Counters()
    ranges = open_one(s3.root, counters=counters)
    for _ in range(3):
        assert bytes(ranges.read("a", 5, 100_000)) == DATA[5:100_005]
        profile.oldest = profile.given() + 1
    assert bytes(ranges.read("a", 5, 100_000)) == DATA[5:100_005]
    assert profile.given() >= 4
    assert counters.count("retries") == 3

    profile.oldest = 10_000
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"does not accept the credentials \(40\d.*tried 2 times"
    ) as caught:
        ranges.read("a", 5, 100_000)
    assert time.monotonic() - began < 20
    assert "KEY0" not in str(caught.value)


def test_keys_are_asked_for_again_before_they_expire(
    s3: Store,
    keys: Callable[[float], Keys],
    faulty: Callable[[Path | str], faults.FaultyServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3.put("a", DATA)
    profile = keys(2)
    server = faulty(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    counters = Counters()
    ranges = open_ranges(s3.root, counters=counters, policy=RetryPolicy(budget_s=5))
    began = time.monotonic()
    while time.monotonic() - began < 3:
        profile.oldest = max(profile.given() - 1, 0)
        assert bytes(ranges.read("a", 5, 1000)) == DATA[5:1005]
        time.sleep(0.15)
    assert profile.given() >= 2


def test_no_credentials_end_in_a_line_that_says_where_they_are_looked_for(
    s3: Store, no_credentials: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        no_credentials.delenv(name)
    with pytest.raises(StorageError, match=r"no credentials were found \(set AWS_PROFILE"):
        open_ranges(s3.root).read("a", 0, 1)
    with pytest.raises(StorageError, match="no credentials were found"):
        open_fsspec(s3.root).read("a", 0, 1)
