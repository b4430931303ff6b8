"""The process that a cloud starts once on each node: `python -m isthmus.core.worker --recipe FILE --run URI`.

It holds the run's lease (node 0), starts one torchrun, forwards signals, watches the node, and turns what the
ranks recorded into the exit code, one event and one line: 0 finished, 4 stopped, 75 preempted, 1 or 2 failed.
Imports no torch: it must be able to say why when torch is what is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from isthmus.core.cluster import Cluster, find_cluster
from isthmus.core.outcome import EXIT_CODES, FOLDER_VARIABLE, Death, Verdict, decide, read_outcomes
from isthmus.core.recipe import Recipe, load_recipe
from isthmus.errors import IsthmusError, LeaseLost, NotInstalled, StorageError, UsageError
from isthmus.storage.rundir import Lease, RunDirectory
from isthmus.storage.rundir.process import ProcessId, die_with_parent

TRAINER = "isthmus.core.train"
LEASE_SECONDS = 60.0
STORE_PATIENCE_S = 30.0
"""For which the store may be away before the worker gives up; less than a lease lasts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one attempt on this node; returns the exit code."""
    options = _parser().parse_args(arguments)
    signals = Signals()
    if parent := os.environ.pop("ISTHMUS_PARENT", None):
        # Whoever restarts us is gone: checkpoint and end, so that a resume finds nobody here.
        die_with_parent(int(parent), how=signal.SIGTERM)
    try:
        worker = Worker(
            recipe_file=options.recipe,
            run=RunDirectory(options.run, patience=STORE_PATIENCE_S),
            cluster=options.cluster,
            module=options.module,
            grace=options.grace,
            lease_seconds=options.lease_seconds,
            lease_wait=options.lease_wait,
            signals=signals,
        )
        verdict = worker.attempt()
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if verdict.status != "finished":
        print(f"isthmus: {verdict.status}" + (f": {verdict.cause}" if verdict.cause else ""), file=sys.stderr)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m isthmus.core.worker", description=__doc__)
    parser.add_argument("--recipe", required=True, help="the recipe, resolved for this backend")
    parser.add_argument("--run", required=True, help="URI of the run directory")
    parser.add_argument("--cluster", default="local", help="adapter of the container contract")
    parser.add_argument(
        "--grace", type=float, help="seconds from SIGTERM to SIGKILL; default: the contract's"
    )
    parser.add_argument(
        "--module", default=os.environ.get("ISTHMUS_TRAINER_MODULE", TRAINER), help=argparse.SUPPRESS
    )
    parser.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--lease-wait", type=float, help=argparse.SUPPRESS)
    return parser


class Signals:
    """Remembers that this process was told to end, and tells whoever wants to know."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.wanted = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or signum
        self.wanted.set()


class Worker:
    """One attempt of a run on one node.

    Args:
        recipe_file: resolved for the backend.
        run: where the run lives.
        cluster: name or import string of the adapter.
        module: what each rank runs.
        grace: seconds from SIGTERM to SIGKILL; None takes the contract's.
        lease_seconds: after which another attempt may take over from a dead one.
        lease_wait: how long to wait for another attempt's lease; None: until a dead one's has expired.
    """

    def __init__(
        self,
        *,
        recipe_file: str,
        run: RunDirectory,
        cluster: str,
        signals: Signals,
        module: str = TRAINER,
        grace: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        lease_wait: float | None = None,
    ) -> None:
        self.recipe_file = recipe_file
        self.recipe: Recipe = load_recipe(Path(recipe_file)).recipe
        self.run = run
        self.module = module
        self.signals = signals
        self.cluster: Cluster = find_cluster(cluster)(self.recipe.compute.nodes, os.environ)
        self.processes = self.recipe.compute.gpus_per_node
        self.grace = self.cluster.grace if grace is None else grace
        self.lease_seconds = lease_seconds
        self.lease_wait = lease_seconds * 1.5 if lease_wait is None else lease_wait
        self.lease_lost: str | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None

    def attempt(self) -> Verdict:
        """Runs the ranks to their end. Raises LeaseLost, StorageError, NotInstalled, UsageError."""
        if importlib.util.find_spec("torch") is None:
            raise NotInstalled("training", extra="train", module="torch")
        with contextlib.ExitStack() as stack:
            if self.cluster.node_rank == 0:
                lease = stack.enter_context(self._lease())
                if stopped := self._stop_came_first():
                    return stopped
                attempt, token = self._announce(lease), lease.token
            else:
                attempt, token = self._join()
            outcomes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-")))
            stack.enter_context(self._watch_node(attempt))
            verdict = self._run_ranks(outcomes, attempt, token)
            if self.lease_lost is not None:
                # Not ours to write in any more: no event.
                raise LeaseLost(self.lease_lost, where=self.run.uri)
            self._record(verdict, attempt)
        return verdict

    # -- before the ranks

    def _lease(self) -> Lease:
        deadline = time.monotonic() + self.lease_wait
        owner = f"{platform.node()}:{os.getpid()}"
        while True:
            # In short waits, so that a signal ends the waiting too.
            wait = min(1.0, max(0.0, deadline - time.monotonic()))
            try:
                return self.run.lease(self.lease_seconds, owner, wait, on_lost=self._on_lease_lost)
            except LeaseLost:
                if time.monotonic() >= deadline or self.signals.wanted.is_set():
                    raise

    def _on_lease_lost(self, why: str) -> None:
        # Called from the renewing thread. The ranks must stop writing now, not after a checkpoint.
        self.lease_lost = why
        self.signals.wanted.set()

    def _stop_came_first(self) -> Verdict | None:
        """A stop that was requested while nobody ran: a cloud's own restart must not undo it."""
        for event in reversed(self.run.events()):
            if event["type"] == "stop-requested":
                return Verdict("stopped", EXIT_CODES["stopped"], "stopped before it began")
            if event["type"] in ("submitted", "started"):
                return None
        return None

    def _announce(self, lease: Lease) -> int:
        attempt = len(self.run.events("started")) + 1
        if self.run.exists():
            self.run.update_run_json(attempts=attempt)
        self.run.event(
            "started",
            attempt=attempt,
            host=platform.node(),
            nodes=self.cluster.nodes,
            world_size=self.cluster.nodes * self.processes,
            lease=lease.token,
        )
        return attempt

    def _join(self) -> tuple[int, str]:
        """Attempt and lease token of node 0, once it has announced an attempt under the lease in force."""
        deadline = time.monotonic() + self.lease_wait + 600
        while time.monotonic() < deadline:
            token = self.run.lease_token()
            for event in reversed(self.run.events("started")):
                if token is not None and event.get("lease") == token:
                    return int(event["attempt"]), token
            if self.signals.wanted.wait(2.0):
                break
        raise UsageError("node 0 has not begun", where=self.run.uri, hint="its log may say why")

    @contextlib.contextmanager
    def _watch_node(self, attempt: int) -> Iterator[None]:
        from isthmus.core.telemetry import watch

        stop = threading.Event()
        thread = threading.Thread(
            target=watch,
            args=(self.run, self.cluster.node_rank, self.recipe.monitor, stop),
            kwargs={"recipe": self.recipe, "attempt": attempt},
            name="telemetry",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=5)

    # -- the ranks

    def _run_ranks(self, outcomes: Path, attempt: int, token: str) -> Verdict:
        from isthmus.core.telemetry.deaths import KillCounter, keep_logs, last_place

        report = outcomes / "torchrun.json"
        kills = KillCounter()
        self._torchrun = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.core.cluster.elastic", str(os.getpid()), str(report)),
                *self._torchrun_arguments(),
                # Without "--" torchrun's parser takes our --run for an abbreviation of its own --run-path.
                *("--module", "--", "isthmus.core.cluster.rank", self.module),
                *("--recipe", self.recipe_file, "--run", self.run.uri),
            ],
            env=self._environment(outcomes, attempt, token),
            # A terminal's Ctrl-C goes to its whole foreground group; the ranks shall hear of it once, from us.
            start_new_session=True,
        )
        try:
            signalled = self._wait(outcomes)
        finally:
            self._kill(outcomes)
        data: dict[str, Any] = {"deaths": [], "error": None}
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(report.read_text())
        deaths = [
            Death(
                **death, place=last_place(outcomes / f"stack-rank{death['rank']}.txt"), memory=kills.explain()
            )
            for death in data["deaths"]
        ]
        keep_logs(self.run, outcomes, attempt)
        return decide(
            read_outcomes(outcomes),
            deaths,
            ranks=self.processes,
            signalled=signalled,
            stop_requested=self._stop_requested(attempt),
            launcher_error=data["error"],
        )

    def _torchrun_arguments(self) -> list[str]:
        cluster = self.cluster
        arguments = [
            f"--nproc-per-node={self.processes}",
            "--max-restarts=0",  # a restart is a new attempt, with its own lease and events
            f"--shutdown-timeout={self._ranks_grace()}",
        ]
        if cluster.nodes == 1:
            return [*arguments, "--standalone", f"--local-addr={cluster.master_addr}"]
        return [
            *arguments,
            f"--nnodes={cluster.nodes}",
            f"--node-rank={cluster.node_rank}",
            f"--master-addr={cluster.master_addr}",
            f"--master-port={cluster.master_port}",
        ]

    def _environment(self, outcomes: Path, attempt: int, token: str) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        flight = str(outcomes / "flight_")
        return {
            "OMP_NUM_THREADS": str(max(1, cores // self.processes)),
            # What each rank's last collectives were, kept in memory and written when one times out; newer and older names.
            **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
            **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), flight),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            **os.environ,
            "ISTHMUS_ATTEMPT": str(attempt),
            "ISTHMUS_LEASE_TOKEN": token,
            "ISTHMUS_GRACE_S": str(self._ranks_grace()),
            FOLDER_VARIABLE: str(outcomes),
        }

    def _ranks_grace(self) -> int:
        """Seconds from SIGTERM until torchrun kills the ranks: its default is 30, ours leaves the worker time to report."""
        return max(1, int(self.grace - min(5.0, self.grace / 5)))

    def _wait(self, outcomes: Path) -> bool:
        """Until torchrun ends, or was ended; returns whether a signal asked for it."""
        assert self._torchrun is not None
        process = self._torchrun
        ended = threading.Thread(target=self._await_end, name="torchrun", daemon=True)
        ended.start()
        self.signals.wanted.wait()
        if self.lease_lost is not None:
            return False
        if self.signals.received is None:
            return False  # it ended by itself
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while ended.is_alive() and self.lease_lost is None and time.monotonic() < deadline:
            ended.join(0.2)
        return True

    def _await_end(self) -> None:
        assert self._torchrun is not None
        self._torchrun.wait()
        self.signals.wanted.set()

    def _kill(self, outcomes: Path) -> None:
        """Kills what is left of torchrun and the ranks, each of which leads a session of its own."""
        assert self._torchrun is not None
        if self._torchrun.poll() is None:
            self._torchrun.kill()
            self._torchrun.wait()
        for file in outcomes.glob("rank*.pid"):
            with contextlib.suppress(OSError, ValueError):
                rank = ProcessId.from_json(json.loads(file.read_text()))
                if rank.is_alive():
                    os.killpg(rank.pid, signal.SIGKILL)

    # -- after the ranks

    def _stop_requested(self, attempt: int) -> bool:
        for event in reversed(self.run.events()):
            if event["type"] == "stop-requested":
                return True
            if event["type"] == "started" and event.get("attempt") == attempt:
                return False
        return False

    def _record(self, verdict: Verdict, attempt: int) -> None:
        if verdict.status == "failed" and verdict.cause and self.cluster.failure_file is not None:
            with contextlib.suppress(OSError):
                self.cluster.failure_file.write_text(verdict.cause[:1024])
        if self.cluster.node_rank != 0 and verdict.status != "failed":
            return  # one event a run; but each node tells what failed on it
        fields: dict[str, Any] = {"attempt": attempt, "exit_code": verdict.exit_code}
        if verdict.cause:
            fields["cause"] = verdict.cause
        if verdict.rank is not None:
            fields["rank"] = verdict.rank
        if self.cluster.node_rank != 0:
            fields["node"] = self.cluster.node_rank
        try:
            self.run.event(verdict.status, **fields)
        except StorageError as error:
            # The cause matters more than that it could not be written down: the disk may be what is full.
            print(f"warning: how it ended is not recorded: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
