"""How an attempt ended: what each rank says, what the launcher of the ranks saw, and the one verdict over them.

Each rank writes `outcome-rank<r>.json` into the folder named by `ISTHMUS_OUTCOME_DIR`. The exit code of torchrun
cannot tell: it is 1 for whatever a rank returns.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from isthmus.files import replace_file

Ending = Literal["finished", "preempted", "stopped", "failed"]
EXIT_CODES: dict[Ending, int] = {"finished": 0, "preempted": 75, "stopped": 4, "failed": 1}

FOLDER_VARIABLE = "ISTHMUS_OUTCOME_DIR"
_ECHO_SECONDS = 5.0
"""A peer of a rank that died says "connection closed" within this time; only an older word is an earlier cause."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank said before it ended."""

    rank: int
    status: Ending
    exit_code: int
    cause: str | None
    time: float
    """Seconds since 1970."""
    culprit: int | None = None
    """The rank to blame, where it is another one."""
    decisive: bool = False
    """Said by one who had looked at all ranks: it counts before anything else that ranks say."""
    echo: bool = False
    """It only says that another rank is gone, so any other word counts before it."""


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's exit that torchrun saw; `exit_code` is minus the signal's number when a signal killed it."""

    rank: int
    exit_code: int
    time: float
    place: str | None = None
    """Where its Python code was, when the fault handler could write that down."""
    memory: str | None = None
    """Of a SIGKILL: what the kernel's counters say of memory."""

    def describe(self) -> str:
        """For a message: the rank and the signal or the exit code."""
        place = f" in {self.place}" if self.place else ""
        if self.exit_code >= 0:
            return f"rank {self.rank} exited with {self.exit_code}{place} and did not say why; its log may"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = "unknown"
        hint = f"; {self.memory or 'out of memory?'}" if -self.exit_code == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by signal {-self.exit_code} ({name}){place}{hint}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the attempt ended, with the first cause in time over the ranks."""

    status: Ending
    exit_code: int
    cause: str | None = None
    rank: int | None = None
    at: float | None = None
    """When a failure's cause happened, seconds since 1970: of several nodes the first one counts."""
    echo: bool = False
    """The cause only says that a rank of another node is gone; that node knows why."""


def write_outcome(
    status: Ending,
    *,
    cause: str | None = None,
    exit_code: int | None = None,
    culprit: int | None = None,
    decisive: bool = False,
    echo: bool = False,
) -> None:
    """Records how this rank ended; the first word of a rank stays. Does nothing outside of a worker."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    rank = int(os.environ.get("RANK", "0"))
    code = EXIT_CODES[status] if exit_code is None else exit_code
    path = Path(folder) / f"outcome-rank{rank}.json"
    if path.exists():
        return
    outcome = Outcome(rank, status, code, cause, time.time(), culprit, decisive, echo)
    replace_file(path, json.dumps(asdict(outcome)))


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes in a folder, by time; an unreadable one is left out."""
    found = []
    for path in folder.glob("outcome-rank*.json"):
        try:
            data = json.loads(path.read_text())
            found.append(
                Outcome(
                    rank=int(data["rank"]),
                    status=cast(Ending, data["status"]),
                    exit_code=int(data["exit_code"]),
                    cause=data.get("cause"),
                    time=float(data["time"]),
                    culprit=data.get("culprit"),
                    decisive=bool(data.get("decisive")),
                    echo=bool(data.get("echo")),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.time)


def decide(
    outcomes: Sequence[Outcome],
    deaths: Sequence[Death],
    *,
    ranks: int,
    signalled: bool,
    stop_requested: bool,
    launcher_error: str | None = None,
) -> Verdict:
    """The verdict of one node's worker.

    Args:
        outcomes: what the ranks of this node said.
        deaths: exits other than 0 in the order in which torchrun saw them, its own teardown's last.
        ranks: how many there were.
        signalled: the worker was told to end (SIGTERM, SIGINT) before the ranks did.
        stop_requested: somebody asked this attempt to stop.
        launcher_error: why torchrun could not start the ranks, when it could not.
    """
    said = {outcome.rank for outcome in outcomes}
    silent = [death for death in deaths if death.rank not in said]
    graceful: Ending = "stopped" if stop_requested else "preempted"
    ended_gracefully = any(outcome.status in ("preempted", "stopped") for outcome in outcomes)
    failures = sorted((o for o in outcomes if o.status == "failed"), key=lambda o: (o.echo, o.time))

    if signalled and (ended_gracefully or not failures):
        # Ranks that were killed after the signal, or had not yet begun, lost nothing that a resume does not redo.
        finished = len(outcomes) == ranks and all(o.status == "finished" for o in outcomes)
        if not finished:
            cause = silent[0].describe() if silent and not ended_gracefully else None
            return Verdict(graceful, EXIT_CODES[graceful], cause)
    told = next((outcome for outcome in outcomes if outcome.decisive), None)
    if told is not None:
        return Verdict(told.status, told.exit_code, told.cause, told.culprit, told.time)
    first = failures[0] if failures else None
    # torchrun's own teardown kills the survivors of a death, so only its first death counts.
    if (
        silent
        and silent[0] == deaths[0]
        and (first is None or first.echo or first.time > silent[0].time - _ECHO_SECONDS)
    ):
        return Verdict("failed", 1, silent[0].describe(), silent[0].rank, silent[0].time)
    if first is not None:
        code = first.exit_code if first.exit_code in (1, 2) else 1
        rank = first.rank if first.culprit is None else first.culprit
        cause = first.cause or f"rank {first.rank} failed"
        return Verdict("failed", code, cause, rank, first.time, first.echo)
    if any(outcome.status == "stopped" for outcome in outcomes):
        return Verdict("stopped", EXIT_CODES["stopped"], _first_cause(outcomes, "stopped"))
    if ended_gracefully:
        return Verdict(graceful, EXIT_CODES[graceful], _first_cause(outcomes, "preempted"))
    if len(outcomes) == ranks and all(outcome.status == "finished" for outcome in outcomes):
        return Verdict("finished", 0)
    if launcher_error:
        return Verdict("failed", 1, launcher_error)
    missing = sorted(set(range(ranks)) - said) if len(said) < ranks else []
    return Verdict(
        "failed", 1, f"no word from {len(missing) or 'some'} of {ranks} ranks; the log may say why"
    )


def _first_cause(outcomes: Sequence[Outcome], status: Ending) -> str | None:
    return next((outcome.cause for outcome in outcomes if outcome.status == status and outcome.cause), None)
