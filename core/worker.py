"""The process that a cloud starts once on each node: `python -m isthmus.core.worker --recipe FILE --run URI`.

It holds the run's lease (node 0), starts one torchrun, forwards signals, watches the node, and turns what the
ranks recorded into the exit code, one event and one line: 0 finished, 4 stopped, 75 preempted, 1 or 2 failed.
Imports no torch: it must be able to say why when torch is what is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.core.cluster import Cluster, failure_file, find_cluster
from isthmus.core.cluster.endings import better_word, record
from isthmus.core.cluster.hosts import wait_for_name
from isthmus.core.cluster.joining import Attempt, announce, join, stop_came_first, take_lease
from isthmus.core.cluster.meeting import agreed
from isthmus.core.cluster.ranks import Ranks
from isthmus.core.cluster.signals import Signals
from isthmus.core.cluster.watching import EVERY_S, EventWatch
from isthmus.core.outcome import EXIT_CODES, Death, Verdict, decide, read_outcomes
from isthmus.core.recipe import Recipe, load_recipe
from isthmus.core.recipe.dump import dump_recipe
from isthmus.core.recipe.mounted import parse_places, with_places
from isthmus.errors import IsthmusError, LeaseLost, NotInstalled
from isthmus.storage.rundir import Lease, RunDirectory
from isthmus.storage.rundir.process import die_with_parent

TRAINER = "isthmus.core.train"
ENCODER = "isthmus.core.encode.rank"
"""What the ranks of a recipe with `encode` run."""
LEASE_SECONDS = 60.0
STORE_PATIENCE_S = 30.0
"""For which the store may be away before the worker gives up; less than a lease lasts."""
_NODE_0_PATIENCE_S = 600.0
"""For which another node waits for node 0, beyond the time that a lease of a dead attempt may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one attempt on this node; returns the exit code."""
    options = _parser().parse_args(arguments)
    signals = Signals()
    if parent := os.environ.pop("ISTHMUS_PARENT", None):
        # Whoever restarts us is gone: checkpoint and end, so that a resume finds nobody here.
        die_with_parent(int(parent), how=signal.SIGTERM)
    try:
        worker = Worker(
            recipe=with_places(load_recipe(Path(options.recipe)).recipe, parse_places(options.place)),
            run=RunDirectory(options.run, patience=STORE_PATIENCE_S),
            cluster=options.cluster,
            job=options.job,
            module=options.module,
            grace=options.grace,
            lease_seconds=options.lease_seconds,
            lease_wait=options.lease_wait,
            look_every=options.look_every,
            signals=signals,
        )
        verdict = worker.attempt()
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _tell(failure_file(options.cluster, os.environ), str(error))
        return error.exit_code
    if verdict.status != "finished":
        print(f"isthmus: {verdict.status}" + (f": {verdict.cause}" if verdict.cause else ""), file=sys.stderr)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m isthmus.core.worker", description=__doc__)
    parser.add_argument("--recipe", required=True, help="the recipe, resolved for this backend")
    parser.add_argument("--run", required=True, help="URI of the run directory")
    parser.add_argument("--cluster", default="local", help="adapter of the container contract")
    parser.add_argument("--job", help="the cloud's name of this job; nodes join only attempts of the same")
    parser.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="where `place:NAME` of the recipe is in this container; may be repeated",
    )
    parser.add_argument(
        "--grace", type=float, help="seconds from SIGTERM to SIGKILL; default: the contract's"
    )
    parser.add_argument("--module", default=os.environ.get("ISTHMUS_TRAINER_MODULE"), help=argparse.SUPPRESS)
    parser.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--lease-wait", type=float, help=argparse.SUPPRESS)
    every = float(os.environ.get("ISTHMUS_LOOK_EVERY_S") or EVERY_S)
    parser.add_argument("--look-every", type=float, default=every, help=argparse.SUPPRESS)
    return parser


class Worker:
    """One attempt of a run on one node.

    Args:
        recipe: resolved for the backend, with this container's paths.
        run: where the run lives.
        cluster: name or import string of the adapter.
        job: the cloud's name of the job that this is a node of, where it has one.
        module: what each rank runs; None: what the recipe asks for, training or encoding.
        grace: seconds from SIGTERM to SIGKILL; None takes the contract's.
        lease_seconds: after which another attempt may take over from a dead one.
        lease_wait: how long to wait for another attempt's lease; None: until a dead one's has expired.
        look_every: seconds between looks at the run directory's events.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        run: RunDirectory,
        cluster: str,
        signals: Signals,
        job: str | None = None,
        module: str | None = None,
        grace: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        lease_wait: float | None = None,
        look_every: float = EVERY_S,
    ) -> None:
        self.recipe = recipe
        self.run = run
        self.job = job
        self.encodes = recipe.encode is not None
        self.module = module or (ENCODER if self.encodes else TRAINER)
        self.signals = signals
        self.cluster: Cluster = find_cluster(cluster)(self.recipe.compute.nodes, os.environ)
        self.processes = self.recipe.compute.gpus_per_node
        self.grace = self.cluster.grace if grace is None else grace
        self.lease_seconds = lease_seconds
        self.lease_wait = lease_seconds * 1.5 if lease_wait is None else lease_wait
        self.look_every = look_every
        self.lease_lost: str | None = None
        self._peer: Mapping[str, Any] | None = None
        self._ranks: Ranks | None = None

    def attempt(self) -> Verdict:
        """Runs the ranks to their end. Raises LeaseLost, StorageError, NotInstalled, UsageError, TrainingFailed."""
        if importlib.util.find_spec("torch") is None:
            raise NotInstalled("training", extra="train", module="torch")
        with contextlib.ExitStack() as stack:
            if stop_came_first(self.run):
                return Verdict("stopped", EXIT_CODES["stopped"], "stopped before it began")
            attempt = self._begin(stack)
            if attempt is None or self.signals.received is not None:
                return self._ended_early(attempt)
            if self.cluster.nodes > 1:
                wait_for_name(self.cluster.master_addr, self.signals.wanted)
            outcomes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-")))
            stack.enter_context(self._watch_node(outcomes, attempt))
            verdict = self._run_ranks(outcomes, attempt)
            attempt = agreed(outcomes) or attempt
            if self.lease_lost is not None:
                # Not ours to write in any more: no event.
                raise LeaseLost(self.lease_lost, where=self.run.uri)
            if self.cluster.nodes > 1:
                verdict = better_word(self.run, verdict, attempt, self.cluster.node_rank, self._peer)
            if verdict.status == "failed" and verdict.cause:
                _tell(self.cluster.failure_file, verdict.cause)
            record(self.run, verdict, attempt, self.cluster.node_rank)
        return verdict

    # -- before the ranks

    def _begin(self, stack: contextlib.ExitStack) -> Attempt | None:
        """Node 0 takes the lease and announces an attempt, the others join it; None when told to end before."""
        if self.cluster.node_rank != 0:
            wait = self.lease_wait + _NODE_0_PATIENCE_S
            return join(self.run, job=self.job, wait=wait, interrupted=self.signals.wanted)
        try:
            lease: Lease = take_lease(
                self.run, self.lease_seconds, self.lease_wait, self.signals.wanted, self._on_lease_lost
            )
        except LeaseLost:
            if self.signals.received is not None:
                return None
            raise
        stack.enter_context(lease)
        if stop_came_first(self.run):
            return None
        world_size = self.cluster.nodes * self.processes
        return announce(self.run, lease, job=self.job, nodes=self.cluster.nodes, world_size=world_size)

    def _on_lease_lost(self, why: str) -> None:
        # Called from the renewing thread. The ranks must stop writing now, not after a checkpoint.
        self.lease_lost = why
        if self._ranks is not None:
            self._ranks.given_up = True
        self.signals.changed.set()

    def _ended_early(self, attempt: Attempt | None) -> Verdict:
        if attempt is None and stop_came_first(self.run):
            return Verdict("stopped", EXIT_CODES["stopped"], "stopped before it began")
        verdict = Verdict("preempted", EXIT_CODES["preempted"], "evicted before it began")
        if attempt is not None:
            record(self.run, verdict, attempt, self.cluster.node_rank)
        return verdict

    @contextlib.contextmanager
    def _watch_node(self, outcomes: Path, attempt: Attempt) -> Iterator[None]:
        from isthmus.core.telemetry import watch

        stop = threading.Event()

        def look() -> None:
            joined = self._agreed_when(outcomes, attempt, stop)
            watch(
                self.run,
                self.cluster.node_rank,
                self.recipe.monitor,
                stop,
                recipe=self.recipe,
                attempt=joined.number,
            )

        thread = threading.Thread(target=look, name="telemetry", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=5)

    def _agreed_when(self, outcomes: Path, attempt: Attempt, stop: threading.Event) -> Attempt:
        """The attempt that this is; another node than the first knows it once its ranks have met the others."""
        while self.cluster.node_rank != 0 and not stop.is_set():
            if (found := agreed(outcomes)) is not None:
                return found
            stop.wait(1.0)
        return attempt

    # -- the ranks

    def _run_ranks(self, outcomes: Path, attempt: Attempt) -> Verdict:
        from isthmus.core.telemetry.deaths import KillCounter, keep_logs, last_place

        recipe_file = outcomes / "recipe.yaml"
        recipe_file.write_text(dump_recipe(self.recipe), encoding="utf-8")
        kills = KillCounter()
        ranks = self._ranks = Ranks(
            self.cluster,
            processes=self.processes,
            command=[self.module, "--recipe", str(recipe_file), "--run", self.run.uri],
            outcomes=outcomes,
            attempt=attempt,
            grace=self.grace,
            signals=self.signals,
        )
        ranks.given_up = self.lease_lost is not None  # lost before there was anybody to tell
        with EventWatch(self.run, lambda event: self._hear(event, outcomes, attempt), every=self.look_every):
            try:
                signalled = ranks.wait()
            finally:
                ranks.kill()
        attempt = agreed(outcomes) or attempt
        report = ranks.report()
        deaths = [
            Death(
                **death, place=last_place(outcomes / f"stack-rank{death['rank']}.txt"), memory=kills.explain()
            )
            for death in report["deaths"]
        ]
        keep_logs(self.run, outcomes, attempt.number)
        return decide(
            read_outcomes(outcomes),
            deaths,
            ranks=self.processes,
            signalled=signalled,
            stop_requested=self._stop_requested(attempt.number),
            launcher_error=report["error"],
        )

    def _hear(self, event: Mapping[str, Any], outcomes: Path, attempt: Attempt) -> bool:
        """What the run directory has to say, in the thread that looks; False: not to be judged yet."""
        assert self._ranks is not None
        node = self.cluster.node_rank
        if event["type"] == "stop-requested":
            # Node 0's ranks tell the others'. One with a `reason` is the ranks' own: the budget, of which they know.
            # Ranks that encode tell each other nothing.
            if self.encodes or (node == 0 and "reason" not in event):
                print("isthmus: a stop was requested", file=sys.stderr, flush=True)
                self._ranks.stop_requested = True
        elif int(event.get("node", 0)) != node:
            ours = attempt if node == 0 else agreed(outcomes)
            if ours is None:
                return False
            if event.get("attempt") == ours.number:
                self._peer = self._peer or event
                self._ranks.peers_failed = True
        self.signals.changed.set()
        return True

    def _stop_requested(self, attempt: int) -> bool:
        for event in reversed(self.run.events()):
            if event["type"] == "stop-requested":
                return True
            if event["type"] == "started" and event.get("attempt") == attempt:
                return False
        return False


def _tell(file: Path | None, cause: str) -> None:
    """Where a cloud takes the cause from, the first 1024 characters count."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.write_text(" ".join(cause.split())[:1024], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
