"""The lease: one holder, a fencing token that grows, takeover of an expired or dead holder. Real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from isthmus.errors import LeaseLost
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir import lease as leases
from isthmus.storage.rundir.process import ProcessId

HOLD = (
    "import sys; from isthmus.storage.rundir import RunDirectory\n"
    "run = RunDirectory(sys.argv[1])\n"
    "with run.lease(float(sys.argv[2]), 'holder') as lease:\n"
    "    print(lease.token, flush=True); sys.stdin.readline()\n"
)


def hold(place: Path, ttl: float) -> tuple[subprocess.Popen[str], str]:
    """A process that holds the lease until its stdin closes, and its token."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place), str(ttl)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture(params=["file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run directory on each kind of store."""
    return RunDirectory(tmp_path if request.param == "file" else f"memory://{uuid.uuid4().hex}")


def test_it_is_released_on_exit_and_the_token_grows(run: RunDirectory) -> None:
    with run.lease(60, "first") as first:
        assert run.lease_token() == first.token
        run.check_token(first.token)
    assert run.lease_token() is None
    with run.lease(60, "second") as second:
        assert int(second.token.split("-")[0]) == int(first.token.split("-")[0]) + 1
        with pytest.raises(LeaseLost, match="second holds it"):
            run.check_token(first.token)


def test_a_second_one_is_refused_with_owner_and_age(run: RunDirectory) -> None:
    with run.lease(60, "host-a:17"):
        with pytest.raises(LeaseLost, match=r"host-a:17 holds it \(renewed \d+ s ago\)") as caught:
            run.lease(60, "host-b:1", wait=0.05)
        assert "\n" not in str(caught.value)


def test_a_fenced_attempt_commits_no_checkpoint(run: RunDirectory) -> None:
    with run.lease(60, "first") as first:
        run.commit_checkpoint(1, {}, token=first.token)
    with run.lease(60, "second"), pytest.raises(LeaseLost):
        run.commit_checkpoint(2, {}, token=first.token)
    assert run.checkpoints() == [1]


def test_it_is_renewed_while_held(run: RunDirectory) -> None:
    with run.lease(3.0, "holder") as lease:
        with pytest.raises(LeaseLost):
            run.lease(3.0, "other", wait=4.5)
        lease.check()


def test_the_holder_learns_that_it_was_taken_over(run: RunDirectory) -> None:
    told = threading.Event()
    reasons: list[str] = []

    def on_lost(why: str) -> None:
        reasons.append(why)
        told.set()

    with run.lease(0.3, "sleeper", on_lost=on_lost) as lease:
        # What a taker does once it finds the lease expired, without its having to.
        taker = leases.Lease(run._store, owner="taker", ttl=60)
        assert taker._create(2)
        assert told.wait(10)
        with pytest.raises(LeaseLost, match="taker holds it"):
            lease.check()
    assert "taker" in reasons[0]
    assert run.lease_token() == taker.token, "a lost lease releases nothing"


def test_two_processes_exclude_each_other(tmp_path: Path) -> None:
    process, token = hold(tmp_path, 60)
    run = RunDirectory(tmp_path)
    assert run.lease_token() == token
    with pytest.raises(LeaseLost, match="holder holds it"):
        run.lease(60, "me")
    process.communicate("\n")
    with run.lease(60, "me") as lease:
        assert lease.token.startswith("0002-")


def test_waiting_gets_it_when_the_holder_lets_go(tmp_path: Path) -> None:
    process, _ = hold(tmp_path, 60)
    timer = threading.Timer(0.3, lambda: process.communicate("\n"))
    timer.start()
    with RunDirectory(tmp_path).lease(60, "me", wait=30) as lease:
        assert lease.token.startswith("0002-")
    timer.join()


@pytest.mark.faults
def test_a_killed_holder_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    process, _ = hold(tmp_path, 3600)
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    with RunDirectory(tmp_path).lease(60, "me") as lease:
        assert lease.token.startswith("0002-")
    assert time.monotonic() - began < 30


@pytest.mark.faults
def test_a_killed_holder_elsewhere_is_replaced_after_its_expiry(tmp_path: Path) -> None:
    process, _ = hold(tmp_path, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = tmp_path / "lease" / "0001.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "machine": "another"}))
    run = RunDirectory(tmp_path)
    with pytest.raises(LeaseLost):
        run.lease(60, "me")
    with run.lease(60, "me", wait=20) as lease:
        assert lease.token.startswith("0002-")


@pytest.mark.faults
def test_a_takeover_has_one_winner_among_processes(tmp_path: Path) -> None:
    process, _ = hold(tmp_path, 3600)
    process.send_signal(signal.SIGKILL)
    process.wait()
    program = (
        "import sys; from isthmus.errors import LeaseLost; from isthmus.storage.rundir import RunDirectory\n"
        "run = RunDirectory(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()\n"
        "try: lease = run.lease(60, 'taker')\n"
        "except LeaseLost: print('lost', flush=True)\n"
        "else: print('won', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for _ in range(4)
    ]  # fmt: skip
    for taker in takers:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("\n")
    words = [taker.stdout.readline().strip() for taker in takers if taker.stdout]
    for taker in takers:
        taker.communicate("\n")
    assert sorted(words) == ["lost", "lost", "lost", "won"]


def test_a_reused_process_id_is_not_the_same_process() -> None:
    own = ProcessId.current()
    assert own.is_alive()
    assert not ProcessId(own.pid, own.started - 1).is_alive()
    child = subprocess.Popen(["true"])
    child.wait()
    assert ProcessId.of(child.pid) is None
