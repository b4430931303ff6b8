"""Worker processes as the nodes of one job, on loopback addresses, with the variables that Azure ML sets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import free_port

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.dump import dump_recipe
from isthmus.storage.rundir import RunDirectory


def small_recipe(place: Path, *, nodes: int = 2) -> Path:
    """A recipe of so many nodes of one process each, for a stub of the trainer."""
    overrides = [f"compute.nodes={nodes}", "compute.gpus_per_node=1"]
    recipe = place / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe("quickstart", overrides=overrides).recipe))
    return recipe


class Nodes:
    """The nodes of one job; started one by one, on 127.0.0.1, 127.0.0.2, ...

    Args:
        place: for the run directory and the logs.
        recipe: of `count` nodes with one process each.
        plan: what the stub does on each rank; None runs the real trainer.
        job: the job's name.
    """

    def __init__(
        self,
        place: Path,
        recipe: Path,
        *,
        plan: Mapping[str, str] | None = None,
        job: str = "job-01",
        count: int = 2,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.run = RunDirectory(place / "run")
        self.ready = place / "ready"
        self.ready.mkdir(exist_ok=True)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.job = job
        self._place, self._recipe, self._plan, self._count = place, recipe, plan, count
        self._extra = extra
        self._port = free_port()

    def start(self, node: int, **environ: str) -> subprocess.Popen[str]:
        """Starts the worker of a node."""
        stub = () if self._plan is None else ("--module", "isthmus.core.rehearsal")
        self.log(node).parent.mkdir(exist_ok=True)
        with self.log(node).open("w") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "isthmus.core.worker", "--recipe", str(self._recipe)),
                    *(
                        "--run",
                        self.run.uri,
                        "--cluster",
                        "azureml",
                        "--job",
                        self.job,
                        "--look-every",
                        "0.5",
                    ),
                    *(*stub, *self._extra),
                ],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._port),
                    "NODE_RANK": str(node),
                    "AZUREML_NODE_COUNT": str(self._count),
                    "ISTHMUS_REHEARSAL": json.dumps(self._plan or {}),
                    "ISTHMUS_REHEARSAL_READY": str(self.ready),
                    **environ,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.processes[node] = process
        return process

    def log(self, node: int) -> Path:
        """What a node printed."""
        return self._place / f"logs-{self.job}" / f"node{node}.txt"

    def pid_of(self, rank: int, attempt: int = 1) -> int:
        """The process id of a rank of the stub, once it is ready."""
        file = self.ready / f"rank{rank}-attempt{attempt}"
        self.wait_for(lambda: file.exists() and bool(file.read_text()))
        return int(file.read_text())

    def wait_for(self, what: Callable[[], bool], within: float = 90.0) -> None:
        """Until it is so; an AssertionError with the logs when a worker has ended, or it takes too long."""
        deadline = time.monotonic() + within
        while not what():
            alive = all(process.poll() is None for process in self.processes.values())
            assert alive, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """What all nodes printed."""
        return "\n".join(f"--- node {node}\n{self.log(node).read_text()}" for node in self.processes)

    def end(self, within: float = 120.0) -> dict[int, int]:
        """Exit codes, once all have ended."""
        deadline = time.monotonic() + within
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a node has not ended:\n{self.logs()}") from None
        return {node: process.returncode for node, process in sorted(self.processes.items())}

    def events(self, *types: str) -> list[dict[str, Any]]:
        """The run's events of those types, or all."""
        return [event for event in self.run.events() if not types or event["type"] in types]

    def kill(self) -> None:
        """Leaves nothing behind."""
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


@contextmanager
def nodes(place: Path, recipe: Path, **options: Any) -> Iterator[Nodes]:
    """The nodes of a job, killed at the end."""
    made = Nodes(place, recipe, **options)
    try:
        yield made
    finally:
        made.kill()
