"""A stand-in for the trainer: the same contract with the worker, no model, no torch.

`ISTHMUS_TRAINER_MODULE=isthmus.core.rehearsal` has the worker start it. The conformance suite and the tests of
everything around the trainer run it. What each rank does comes as JSON in ISTHMUS_REHEARSAL, such as
{"0": "finish", "1": "kill", "*": "wait"}, or with a list for a rank one word an attempt; a rank says that it is
ready by a file in the folder ISTHMUS_REHEARSAL_READY, if there is one. `wait` answers SIGTERM as the trainer does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

from isthmus.core.outcome import write_outcome
from isthmus.errors import StorageError, UsageError
from isthmus.storage.rundir import RunDirectory


def main() -> int:
    """Does what ISTHMUS_REHEARSAL says; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--run", required=True)
    options = parser.parse_args()
    rank = os.environ["RANK"]
    plan = json.loads(os.environ.get("ISTHMUS_REHEARSAL", "{}"))
    told = plan.get(rank, plan.get("*", "finish"))
    attempt = int(os.environ["ISTHMUS_ATTEMPT"])
    if isinstance(told, list):
        told = told[min(attempt, len(told)) - 1]

    evicted = threading.Event()
    if told != "deaf":
        signal.signal(signal.SIGTERM, lambda *_: evicted.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = RunDirectory(options.run)
    # One write, so that the lines of several ranks do not mix.
    os.write(1, f"rank {rank} attempt {attempt}: {told}\n".encode())
    if rank == "0":
        run.event("note", threads=os.environ["OMP_NUM_THREADS"], usd=os.environ.get("ISTHMUS_USD_PER_HOUR"))
    if ready := os.environ.get("ISTHMUS_REHEARSAL_READY"):
        Path(ready, f"rank{rank}-attempt{attempt}").write_text(str(os.getpid()))

    if told == "finish":
        write_outcome("finished")
        return 0
    if told == "preempt":
        write_outcome("preempted")
        return 75
    if told == "fail":
        raise StorageError("cannot write: the disk is full", where="checkpoints/step-00000010")
    if told == "usage":
        raise UsageError("no such column", where="shard 3")
    if told == "crash":
        raise RuntimeError("boom")
    if told == "exit":
        os._exit(7)  # without a word
    if told == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    evicted.wait()
    if rank == "0":
        run.commit_checkpoint(attempt, {"files": {}}, token=os.environ["ISTHMUS_LEASE_TOKEN"])
    started = [event for event in run.events() if event["type"] in ("started", "stop-requested")]
    stopped = started[-1]["type"] == "stop-requested"
    write_outcome("stopped" if stopped else "preempted")
    return 4 if stopped else 75


if __name__ == "__main__":
    sys.exit(main())
