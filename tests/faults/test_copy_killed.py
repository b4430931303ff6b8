"""`runs copy` and `fetch` are killed -9 while they copy: the same command brings the rest, and nothing half is there."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.storage.rundir import RunDirectory

MB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has finished, with a checkpoint of 96 MB in twelve files."""
    run = RunDirectory(tmp_path / "runs" / "one")
    facts = {
        "id": "one", "name": "tiny", "backend": "local", "created": 1.0, "recipe": {}, "recipe_hash": "x",
        "job_ids": ["one-01"], "native": {},
    }  # fmt: skip
    run.create("", facts)
    run.event("submitted", job_id="one-01")
    run.event("started", attempt=1)
    chance = random.Random(3)
    files = {}
    for number in range(12):
        data = chance.randbytes(8 * MB)
        run.write_file(f"checkpoints/step-00000010/part{number}", data)
        files[f"part{number}"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    run.commit_checkpoint(10, {"files": files})
    run.event("finished", exit_code=0)
    return run


@pytest.mark.faults
@pytest.mark.parametrize("verb", ["copy", "fetch"])
def test_a_copy_that_is_killed_goes_on(tmp_path: Path, run: RunDirectory, verb: str) -> None:
    target = RunDirectory(tmp_path / "there")
    words = ["runs", "copy", run.uri, "--to", target.uri, "--yes"]
    if verb == "fetch":
        words = ["fetch", run.uri, "--to", target.uri]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    kills = 0
    chance = random.Random(4)
    for _ in range(30):
        begun = {str(path) for path in (tmp_path / "there").rglob("*part*")}
        process = subprocess.Popen(
            [sys.executable, "-m", "isthmus", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if kills == 8:
            process.wait()  # on a busy machine it would be killed before it has done anything
        # Killed some time after it began to bring something new.
        while (
            process.poll() is None and {str(path) for path in (tmp_path / "there").rglob("*part*")} <= begun
        ):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        if process.poll() is not None:
            out, _ = process.communicate()
            assert process.returncode == 0, out.decode()
            if kills >= 2:
                break
            shutil.rmtree(tmp_path / "there")  # it was faster than we were
            continue
        process.kill()
        process.communicate()
        kills += 1
        whole = hashlib.sha256
        for path in (tmp_path / "there").rglob("part*"):
            source = Path(run.uri) / path.relative_to(tmp_path / "there")
            assert whole(path.read_bytes()).digest() == whole(source.read_bytes()).digest(), path
        if not all((tmp_path / "there" / f"checkpoints/step-00000010/part{n}").exists() for n in range(12)):
            assert target.checkpoints() == []
            assert not target.exists()
    assert kills >= 2
    assert target.checkpoints() == [10]
    assert target.exists()
    assert target.events("finished")
    assert list((tmp_path / "there").rglob("*.tmp")) == []
