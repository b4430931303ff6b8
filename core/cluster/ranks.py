"""The ranks of one node: one torchrun, told to end when it is time, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.core.cluster.adapters import Cluster
from isthmus.core.cluster.joining import Attempt
from isthmus.core.cluster.signals import Signals
from isthmus.core.outcome import FOLDER_VARIABLE, read_outcomes
from isthmus.storage.rundir.process import ProcessId

_RENAMED = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Names of the flight recorder in the oldest torch that we take, and those before them. The older ones are read still, with a warning from every rank."""
_STOP_PATIENCE_S = 900.0
"""For the checkpoint of a stop that somebody requested: no machine is being taken away, so there is time."""
_ECHO_PATIENCE_S = 5.0
"""In which the ranks notice by themselves that those of another node are gone."""
_BARRIER_S = {True: 60.0, False: 5.0}
"""For which torchrun may wait for the other nodes' after its own ranks have ended: finished, or checkpointed early."""


def flight_recorder(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What makes a rank keep its last collectives in memory and write them down when one times out, as the environment has it.

    Args:
        folder: where to: `flight_RANK`.
        environ: what is set already, under whichever name, stays as it is.
    """
    wanted = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": str(folder / "flight_")}
    told = {name: value for name, value in wanted.items() if not {name, _RENAMED[name]} & environ.keys()}
    return {**told, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


class Ranks:
    """Starts the ranks of this node, and waits for them.

    Args:
        cluster: this node's place.
        processes: ranks of this node.
        command: what each runs: a module and its arguments.
        outcomes: a folder for what they say.
        attempt: what they are told they are part of.
        grace: seconds from SIGTERM to SIGKILL.
        signals: end the waiting.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        processes: int,
        command: Sequence[str],
        outcomes: Path,
        attempt: Attempt,
        grace: float,
        signals: Signals,
    ) -> None:
        self.cluster = cluster
        self.processes = processes
        self.outcomes = outcomes
        self.grace = grace
        self.signals = signals
        self.given_up = False
        """Set by others, with `signals.changed`: the ranks must not write any more."""
        self.stop_requested = False
        """Likewise: they shall checkpoint and end."""
        self.peers_failed = False
        """Likewise: another node's have failed."""
        self._report = outcomes / "torchrun.json"
        self._ended_at: float | None = None
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.core.cluster.elastic", str(os.getpid()), str(self._report)),
                *self._arguments(),
                # Without "--" torchrun's parser takes our --run for an abbreviation of its own --run-path.
                *("--module", "--", "isthmus.core.cluster.rank", *command),
            ],
            env=self._environment(attempt),
            # A terminal's Ctrl-C goes to its whole foreground group; the ranks shall hear of it once, from us.
            start_new_session=True,
        )

    def _arguments(self) -> list[str]:
        cluster = self.cluster
        arguments = [
            f"--nproc-per-node={self.processes}",
            "--max-restarts=0",  # a restart is a new attempt, with its own lease and events
            f"--shutdown-timeout={self._patience()}",
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

    def _environment(self, attempt: Attempt) -> Mapping[str, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        interface = self.cluster.interface if self.cluster.nodes > 1 else None
        return {
            "OMP_NUM_THREADS": str(max(1, cores // self.processes)),
            **flight_recorder(self.outcomes, os.environ),
            **(dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), interface) if interface else {}),
            **os.environ,
            **attempt.environment(),
            "ISTHMUS_GRACE_S": str(self._patience()),
            FOLDER_VARIABLE: str(self.outcomes),
        }

    def _patience(self) -> int:
        """Seconds from SIGTERM until torchrun kills the ranks: its default is 30, ours leaves the worker time to report."""
        return max(1, int(self.grace - min(5.0, self.grace / 5)))

    def wait(self) -> bool:
        """Until torchrun ends, or has had its time; returns whether a signal or a request asked for it."""
        threading.Thread(target=self._await_end, name="torchrun", daemon=True).start()
        deadline: float | None = None
        signalled = asked = False
        while self._process.poll() is None and not self.given_up:
            now = time.monotonic()
            if self.signals.received is not None and not signalled:
                signalled = True
                self._terminate()
                deadline = now + self.grace
            elif self.stop_requested and not (asked or signalled):
                asked = True
                self._ask()
                deadline = now + _STOP_PATIENCE_S
            elif self.peers_failed and deadline is None:
                deadline = now + _ECHO_PATIENCE_S
            if (deadline is not None and now >= deadline) or self._only_torchrun_waits():
                break
            # A second is how late an end of the ranks alone is noticed; all else wakes us.
            self.signals.changed.wait(1.0)
            self.signals.changed.clear()
        # A signal that came with torchrun's own end asked for it, too: as on a terminal.
        return signalled or asked or (self.signals.received is not None and not self.given_up)

    def _terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def _ask(self) -> None:
        """SIGTERM to the ranks themselves: torchrun would kill them after the grace of a machine that is taken away."""
        ranks = self._ranks()
        if len(ranks) < self.processes:
            self._terminate()  # some have not begun: there is nothing to save
            return
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.is_alive():
                    os.kill(rank.pid, signal.SIGTERM)

    def _ranks(self) -> list[ProcessId]:
        found = []
        for file in self.outcomes.glob("rank*.pid"):
            with contextlib.suppress(OSError, ValueError):
                found.append(ProcessId.from_json(json.loads(file.read_text())))
        return found

    def _only_torchrun_waits(self) -> bool:
        """Whether all ranks have had their say and ended, and torchrun waits for another node's that may be gone."""
        if self.cluster.nodes == 1:
            return False
        ranks = self._ranks()
        if len(ranks) < self.processes or any(rank.is_alive() for rank in ranks):
            return False
        said = read_outcomes(self.outcomes)
        if len(said) < self.processes:
            return False  # torchrun tells how they died
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > _BARRIER_S[all(one.status == "finished" for one in said)]

    def _await_end(self) -> None:
        self._process.wait()
        self.signals.changed.set()

    def kill(self) -> None:
        """Kills what is left of torchrun and the ranks, each of which leads a session of its own."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for rank in self._ranks():
            with contextlib.suppress(OSError):
                if rank.is_alive():
                    os.killpg(rank.pid, signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        """torchrun's word: `deaths`, as (rank, exit_code, time), and why it could not start them, as `error`."""
        try:
            found = json.loads(self._report.read_text())
        except (OSError, ValueError):
            return {"deaths": [], "error": None}
        return found if isinstance(found, dict) else {"deaths": [], "error": None}
