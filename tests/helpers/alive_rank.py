"""A rank that exchanges with its peers under the watchdog, and stalls as ALIVE_STALL says; run by the worker.

ALIVE_STALL is `RANK:HOW`, with HOW one of `data`, `compute`, `stopped` (SIGSTOP), `blocked` (native code that keeps
Python's lock), `fail` (an error that only this rank meets) and `none`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.core.train.agreement import lost_peer
from isthmus.core.train.control import Signals
from isthmus.core.train.stall import COMPUTE, DATA, REDUCE
from isthmus.core.train.watchdog import Beat, Watchdog, connect_store
from isthmus.errors import StorageError, TrainingFailed
from isthmus.storage.rundir import RunDirectory


def stall_in_data() -> None:
    """Where a batch would be waited for."""
    time.sleep(600)


def stall_in_compute() -> None:
    """Where a model would run."""
    time.sleep(600)


def main() -> None:
    """Steps until the stall."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    who, how = os.environ["ALIVE_STALL"].split(":")
    mine = how if int(who) == rank else "none"
    run = RunDirectory(sys.argv[sys.argv.index("--run") + 1])
    beat = Beat()
    watchdog = Watchdog(
        beat,
        float(os.environ.get("ALIVE_LIMIT", "2")),
        run,
        rank=rank,
        world_size=size,
        attempt=os.environ["ISTHMUS_ATTEMPT"],
        connect=connect_store,
    )
    watchdog.start()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        for step in range(1, 30):
            beat.step, beat.phase = step, DATA
            beat.doing = lambda: "part-00001, row group 2, which has been read for 2.0 s"
            last = step == 5
            if last and mine == "data":
                stall_in_data()
            beat.phase = COMPUTE
            if last and mine == "compute":
                stall_in_compute()
            if last and mine == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if last and mine == "blocked":
                ctypes.PyDLL(None).sleep(600)
            if last and mine == "fail":
                raise StorageError("cannot read: the disk is gone", where="part-00001")
            dist.all_reduce(torch.ones(8))
            beat.phase = REDUCE
            dist.all_reduce(torch.ones(1))
    except StorageError as error:
        watchdog.tell(str(error))
        raise
    except RuntimeError as error:
        told = watchdog.heard()
        if lost_peer(error) is None or told is None:
            raise
        raise TrainingFailed(f"rank {told['rank']} failed: {told['cause']}") from None
    watchdog.stop()


if __name__ == "__main__":
    with Signals():
        main()
