"""What `status` says of a job of this machine that has just been started."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.backends.local.backend import LocalBackend
from isthmus.backends.spec import Handle
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import ProcessId


def test_a_job_whose_processes_start_is_no_job_that_waits(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "runs" / "one"))
    run.event("submitted", job_id="one-01")
    keeper = ProcessId.of(os.getpid())
    assert keeper is not None
    handle = Handle(
        backend="local", run_id="one", run_uri=run.uri, native={"job_id": "one-01", **keeper.to_json()}
    )
    found = LocalBackend().status(handle)
    assert found.state == "pending"
    assert found.detail is not None
    assert found.detail.startswith("its processes are starting, for ")
    run.event("started", attempt=1)
    found = LocalBackend().status(handle)
    assert (found.state, found.attempt, found.detail) == ("running", 1, None)
