"""What each rank is doing, a line for each phase, for tests that interrupt a run at a chosen moment.

Off unless ISTHMUS_TRACE_PHASES is set: 1 writes `logs/phases-rank<r>.jsonl` in the run directory (when that is on a
file system), any other value names a folder. A line has time (seconds since 1970), rank, pid, step and phase, and is
in the file when the phase begins. The phases:

    staged          the state of a step is copied; training goes on
    writing         this rank's files are on their way
    uploaded        this rank's files are complete
    before-commit   rank 0: all files are complete, COMMITTED comes next
    committed       rank 0: the checkpoint counts
    pruning         rank 0: older checkpoints are removed, if there are any to remove
    stage-change    a stage is entered
    validating      validation begins

ISTHMUS_HOLD_PHASES, such as `before-commit=0.5,pruning=0.2`, makes a phase last at least so many seconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Protocol

_VARIABLE = "ISTHMUS_TRACE_PHASES"
_HOLD = "ISTHMUS_HOLD_PHASES"


class _Place(Protocol):
    def local_path(self, name: str = "") -> Path | None: ...


_file: int | None = None
_rank = 0
_held: dict[str, float] = {}


def start_tracing(run: _Place, rank: int) -> Path | None:
    """Begins to trace this process where the environment asks for it; returns the file, or None when it does not."""
    global _file, _rank
    stop_tracing()
    told = os.environ.get(_VARIABLE, "")
    if told in {"", "0"}:
        return None
    folder = run.local_path("logs") if told == "1" else Path(told)
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"phases-rank{rank}.jsonl"
    # One write a line, straight to the kernel: a kill at any moment leaves whole lines.
    _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _rank = rank
    for part in filter(None, os.environ.get(_HOLD, "").split(",")):
        phase, _, seconds = part.partition("=")
        _held[phase.strip()] = float(seconds)
    return path


def stop_tracing() -> None:
    """Closes the file."""
    global _file
    if _file is not None:
        os.close(_file)
    _file = None
    _held.clear()


def phase(name: str, step: int) -> None:
    """This rank enters a phase of global step `step`."""
    if _file is None:
        return
    row = {"time": time.time(), "rank": _rank, "pid": os.getpid(), "step": step, "phase": name}
    os.write(_file, (json.dumps(row) + "\n").encode())
    if name in _held:
        time.sleep(_held[name])
