"""Two workers as two nodes of one job: real torchruns that meet, real kills, leases that dead attempts left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from nodes import nodes, small_recipe

from isthmus.backends.settle import settle
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir import lease as leases

pytestmark = pytest.mark.faults


def dead_attempt(run: RunDirectory, job: str, ttl: float = 6.0) -> str:
    """What an attempt leaves whose machines were switched off: a `started`, and a lease that is in force for a while."""
    lease = leases.Lease(run._store, owner="dead:1", ttl=ttl)
    assert lease._create(1)
    # As another machine's: whether that process is alive cannot be seen from here.
    name = "lease/0001.json"
    data = run._store.read(name)
    assert data is not None
    run._store.write(name, data.replace(leases.this_machine().encode(), b"another-machine"))
    run.event("submitted", backend="azure", job_id=job)
    run.event("started", attempt=1, host="dead", nodes=2, world_size=2, lease=lease.token, job=job)
    return lease.token


def test_both_finish_and_the_killed_ranks_node_names_the_cause(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    with nodes(tmp_path, recipe, plan={"*": "finish"}) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(1)  # the order in which nodes begin is nobody's to choose
        job.start(0)
        assert job.end() == {0: 0, 1: 0}, job.logs()
        assert [event["type"] for event in job.events()] == ["submitted", "started", "note", "finished"]
        (started,) = job.events("started")
        assert (started["job"], started["nodes"], started["world_size"]) == ("job-01", 2, 2)
        assert settle("finished", job.events(), job_id="job-01").state == "finished"


@pytest.mark.slow
def test_kill_9_of_node_1s_rank_ends_both_with_its_cause(tmp_path: Path) -> None:
    """Slow: two torchruns, and the patience with ranks that have not noticed."""
    recipe = small_recipe(tmp_path)
    with nodes(tmp_path, recipe, plan={"*": "wait"}) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(0)
        job.start(1)
        job.pid_of(0)
        began = time.monotonic()
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.end() == {0: 1, 1: 1}, job.logs()
        # The stub has no collective that would fail: node 0 hears it from the run directory.
        assert time.monotonic() - began < 40
        failed = job.events("failed")
        assert {event.get("node", 0) for event in failed} == {0, 1}
        assert all(event["cause"].startswith("rank 1 was killed by signal 9") for event in failed), failed
        status = settle("failed", job.events(), cause="AlgorithmError", job_id="job-01")
        assert (status.state, status.exit_code) == ("failed", 1)
        assert str(status.cause).startswith("rank 1 was killed by signal 9 (SIGKILL)")


@pytest.mark.slow
@pytest.mark.parametrize("same_job", [False, True])
def test_a_stale_lease_is_not_joined(tmp_path: Path, same_job: bool) -> None:
    """Of another job, and of this very job, which its cloud started again; node 1 begins first. Slow: waits for a lease."""
    recipe = small_recipe(tmp_path)
    with nodes(
        tmp_path, recipe, plan={"*": "wait"}, job="job-02", extra=("--lease-seconds", "6", "--grace", "20")
    ) as job:
        stale = dead_attempt(job.run, "job-02" if same_job else "job-01")
        if not same_job:
            job.run.event("submitted", backend="azure", job_id="job-02")
        job.start(1)
        time.sleep(1.0)
        job.start(0)
        for rank in (0, 1):
            job.pid_of(rank, attempt=2)  # each rank says which attempt it was told
        assert not list(job.ready.glob("*-attempt1"))
        assert job.run.lease_token() not in (None, stale)
        for process in job.processes.values():
            process.send_signal(signal.SIGTERM)
        assert job.end() == {0: 75, 1: 75}, job.logs()
        assert job.run.checkpoints() == [2], "committed under the new lease"
        status = settle("failed", job.events(), exit_code=75, job_id="job-02")
        assert (status.state, status.attempt) == ("preempted", 2)


def test_a_stop_is_heard_from_the_run_directory(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, nodes=1)
    with nodes(tmp_path, recipe, plan={"*": "wait"}, count=1) as job:
        job.start(0)
        job.pid_of(0)
        job.run.event("stop-requested", by="user")
        assert job.end() == {0: 4}, job.logs()
        assert job.events()[-1]["type"] == "stopped"
        assert job.run.checkpoints() == [1]
        again = job.start(0)
        assert again.wait(60) == 4, "a cloud's own restart does not undo a stop"
