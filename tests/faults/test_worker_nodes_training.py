"""The real trainer on two workers as two nodes: an eviction of one is one of all, and a kill is named by its own node."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes import Nodes, nodes
from training import figures, recipe_data, rows, trained, write_recipe

from isthmus.backends.settle import settle

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def two_nodes(data: str, **changes: Any) -> dict[str, Any]:
    """The tiny recipe on two nodes of one process each."""
    return recipe_data(data, compute__nodes=2, compute__gpus_per_node=1, **changes)


def at_step(job: Nodes, step: int, attempt: int) -> None:
    """Until a row of that step is in the metrics."""
    folder = job.run.local_path("metrics/train")
    assert folder is not None

    def reached() -> bool:
        parts = sorted(folder.glob(f"*attempt{attempt}-*.jsonl"))
        lines = [line for part in parts for line in part.read_text().splitlines() if line.endswith("}")]
        return bool(lines) and json.loads(lines[-1])["step"] >= step

    job.wait_for(reached)


def test_sigterm_to_node_1_alone_is_a_checkpoint_of_all_and_the_next_job_goes_on(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: three launches of two processes. Compared bit for bit with one node of two processes, undisturbed."""
    changes: dict[str, Any] = {"stages__0__steps": 80, "checkpoint__every": 1000}
    whole = trained(write_recipe(tmp_path, recipe_data(latents["dit"], **changes)), tmp_path / "whole")
    data = two_nodes("place:data0", **changes)
    recipe = write_recipe(tmp_path, data, "two.yaml")
    place = ("--place", f"data0={latents['dit']}")

    with nodes(tmp_path, recipe, job="job-01", extra=place) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(0)
        job.start(1)
        at_step(job, 5, 1)
        job.processes[1].send_signal(signal.SIGTERM)
        # Node 0 has no signal of its own, and its torchrun would wait five minutes for node 1's.
        assert job.end(60) == {0: 75, 1: 75}, job.logs()
        (step,) = job.run.checkpoints()
        assert 5 <= step < 80
        assert settle("failed", job.events(), exit_code=75, job_id="job-01").state == "preempted"

    with nodes(tmp_path, recipe, job="job-02", extra=place) as job:
        job.run.event("submitted", backend="azure", job_id="job-02")
        job.start(0)
        job.start(1)
        assert job.end(90) == {0: 0, 1: 0}, job.logs()
        assert settle("finished", job.events(), job_id="job-02").state == "finished"
    assert figures(rows(tmp_path / "run")) == figures(whole)
    nodes_seen = {kind for kind in job.run.metric_kinds() if kind.startswith("system")}
    assert nodes_seen == {"system-node0", "system-node1"}


def test_kill_9_of_node_1s_rank_is_named_by_node_1(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: two launches. Node 0's rank only knows that its peer is gone, and both nodes end at once."""
    recipe = write_recipe(tmp_path, two_nodes(latents["dit"], stages__0__steps=2000))
    with nodes(tmp_path, recipe) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(0)
        job.start(1)
        at_step(job, 3, 1)
        children = psutil.Process(job.processes[1].pid).children(recursive=True)
        (rank,) = [child for child in children if child.environ().get("RANK") == "1"]
        rank.kill()
        assert job.end(60) == {0: 1, 1: 1}, job.logs()
        status = settle("failed", job.events(), cause="exit code 1", job_id="job-01")
        assert str(status.cause).startswith("rank 1 was killed by signal 9 (SIGKILL)"), job.events("failed")
        assert job.run.lease_token() is None


@pytest.mark.parametrize("dead", [0, 1])
def test_a_machine_that_is_gone_is_to_be_resumed(latents: dict[str, str], tmp_path: Path, dead: int) -> None:
    """Slow: a launch of two processes, and the patience with a node that may still say why."""
    recipe = write_recipe(tmp_path, two_nodes(latents["dit"], stages__0__steps=2000))
    with nodes(tmp_path, recipe) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(0)
        job.start(1)
        at_step(job, 3, 1)
        job.processes[dead].kill()  # its torchrun and rank die with it
        assert job.end(100) == {dead: -9, 1 - dead: 75}, job.logs()
        status = settle("failed", job.events(), cause="exit code 1", job_id="job-01")
        assert (status.state, status.exit_code) == ("preempted", 75)
        assert "lost contact with another rank" in str(status.cause)
        assert str(status.cause).endswith("no word from its node, whose machine may be gone")


def test_a_stop_ends_both_nodes(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: a launch of two processes. Nobody sends a signal: node 0 looks, and the ranks agree."""
    recipe = write_recipe(tmp_path, two_nodes(latents["dit"], stages__0__steps=2000))
    with nodes(tmp_path, recipe) as job:
        job.run.event("submitted", backend="azure", job_id="job-01")
        job.start(0)
        job.start(1)
        at_step(job, 3, 1)
        job.run.event("stop-requested", by="user")
        assert job.end(60) == {0: 4, 1: 4}, job.logs()
        assert len(job.run.checkpoints()) >= 1
        assert settle("stopped", job.events(), job_id="job-01").state == "stopped"
