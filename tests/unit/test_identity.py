"""One identity for a process: nobody is looked for once, a token is asked for once, and nothing waits longer than its limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError

from isthmus.cli.app import main
from isthmus.errors import StorageError
from isthmus.storage import identity
from isthmus.storage.filesystems import filesystem
from isthmus.storage.identity import AsyncIdentity, Identity, NoLogin
from isthmus.storage.rundir.store import open_store


class Chain:
    """A credential that tells how often it was asked."""

    def __init__(self, *, lasts_s: float = 3600.0) -> None:
        self.asked = 0
        self.lasts_s = lasts_s
        self.found = True
        self.hangs = threading.Event()
        self.hangs.set()

    def get_token(self, *scopes: str, **_: object) -> AccessToken:
        self.asked += 1
        self.hangs.wait(20)
        if not self.found:
            raise ClientAuthenticationError("failed to retrieve a token from the included credentials")
        return AccessToken(f"{self.asked} {scopes[0]}", int(time.time() + self.lasts_s))


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    made.hangs.set()


def test_a_token_is_asked_for_once_until_it_ends(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Identity(lambda: chain)
    assert {one.get_token("a").token for _ in range(3)} == {"1 a"}
    assert asyncio.run(AsyncIdentity(one).get_token("b")).token == "2 b"
    assert one.get_token("a", claims="more").token == "3 a"  # never from memory
    one.forget()
    assert one.get_token("a").token == "4 a"
    monkeypatch.setenv("AZURE_CLIENT_ID", "somebody else")
    assert one.get_token("a").token == "5 a"
    chain.lasts_s = 10.0
    one.forget()
    assert [one.get_token("a").token for _ in range(2)] == ["6 a", "7 a"]


def test_nobody_is_looked_for_once_and_later_failures_are_a_disturbance(chain: Chain) -> None:
    one = Identity(lambda: chain)
    chain.found = False
    for _ in range(3):
        with pytest.raises(NoLogin, match="nobody is logged in to Azure"):
            one.get_token("a")
    assert chain.asked == 1
    chain.found = True
    one.forget()
    one.get_token("a")
    chain.found = False
    for _ in range(2):
        # Whoever tries again, as the clients of Blob do, may succeed.
        with pytest.raises(ClientAuthenticationError):
            one.get_token("b")
    assert chain.asked == 4


def test_a_login_that_hangs_is_waited_for_so_long_and_not_again(chain: Chain) -> None:
    one = Identity(lambda: chain, limit_s=0.2)
    chain.hangs.clear()
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(NoLogin, match=r"did not answer within 0\.2 s"):
            one.get_token("a")
    assert time.monotonic() - began < 2
    assert chain.asked == 1


@pytest.mark.usefixtures("no_credentials")
def test_a_doctor_without_a_login_asks_once_for_all_places(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(identity, "_SHARED", Identity(lambda: chain))
    chain.found = False
    place = "az://data@nobodys.blob.core.windows.net"
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "sdxl-progressive", "--backend", "azure", "--set", f"run_directory={place}/runs"])
    out = capsys.readouterr().out
    assert ended.value.code == 3
    assert (
        out.count("nobody is logged in to Azure") >= 6
    )  # workspace, run directory and data of two destinations
    assert out.count("az login") >= 6
    # Blob's own client would try four times at each place, 15 to 45 seconds apart.
    assert time.monotonic() - began < 20
    assert chain.asked == 1
    with pytest.raises(StorageError, match="nobody is logged in to Azure") as caught:
        open_store(f"{place}/x").read("run.json")
    assert "az login" in str(caught.value.hint)
    filesystem(f"{place}/y")
    assert chain.asked == 1
