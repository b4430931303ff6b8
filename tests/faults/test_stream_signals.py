"""SIGTERM while a real process reads: it ends promptly, its threads are joined, and what it printed is whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from faulty import late, stall

from isthmus.storage.shards.synthetic import write_synthetic

pytestmark = pytest.mark.faults

RANK = """
import json, signal, sys, threading, time
from dataclasses import replace
from isthmus.errors import Preempted
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.shards import open_dataset
from isthmus.storage.stream import Plan, Segment
from isthmus.storage.stream.access import Access
from isthmus.storage.stream.owning import OwningLoader

job = json.loads(sys.argv[1])

def stop(number, frame):
    raise Preempted("evicted")

if job["handled"]:
    signal.signal(signal.SIGTERM, stop)
dataset = replace(open_dataset(job["uri"]), roots=(job["root"],))
policy = RetryPolicy(budget_s=60.0, stall_s=60.0)
loader = OwningLoader(
    [dataset], [1], seed=0, lanes=4, shuffle_window=64, stages=[64], plan=Plan((Segment(0, 0, 0, 8),)),
    access=[Access(dataset, policy=policy)], depth=job["depth"], memory_limit=job["limit"],
)
try:
    with loader:
        while True:
            if job["wait"]:
                print("reading", flush=True)
            batch = next(loader)
            if not job["wait"] and batch.step == 3:
                print("reading", flush=True)
except Preempted:
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("isthmus")]
    print(json.dumps(left), flush=True)
    sys.exit(75)
"""


def ended(job: dict[str, object]) -> tuple[int, float, str]:
    """Exit code, seconds from the signal to the end, and what was printed after it."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "reading\n", process.communicate()
        time.sleep(0.3)  # into the wait, or into the reads
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        out, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors, errors
        return process.returncode, time.monotonic() - began, out.removeprefix("reading\n")
    finally:
        process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("signals") / "data"
    write_synthetic(str(place), 256)
    return place


@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize("store", ["folder", "slow server", "silent server"])
def test_a_process_that_reads_ends_promptly_on_sigterm(folder, faulty, store, handled):
    root = str(folder)
    if store != "folder":
        server = faulty(folder)
        server.fail(late(0.2) if store == "slow server" else stall(), times=float("inf"), match="part-")
        root = server.url
    job = {
        "uri": str(folder),
        "root": root,
        "handled": handled,
        "depth": 8,
        "limit": 10_000_000,
        "wait": store == "silent server",
    }
    code, seconds, out = ended(job)
    assert seconds < 5
    if handled:
        assert code == 75
        assert json.loads(out.splitlines()[-1]) == []  # no thread is left behind
    else:
        assert code == -signal.SIGTERM
