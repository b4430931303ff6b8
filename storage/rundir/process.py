"""Processes of this machine: is that one still the same, a child that must not outlive its parent, and how to end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "ISTHMUS_RANKS_PARENT"
"""Environment variable: the process id that a rank's parent must have."""


@dataclass(frozen=True)
class ProcessId:
    """A process id with the moment the process started, in the system's own units (clock ticks or seconds)."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The running process of that id, or None. A zombie does not run."""
        started = _start_time(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def current(cls) -> ProcessId:
        """This process."""
        own = cls.of(os.getpid())
        return own if own is not None else cls(os.getpid(), 0.0)

    @classmethod
    def from_json(cls, data: dict[str, float]) -> ProcessId:
        """Reads what `to_json` wrote."""
        return cls(int(data["pid"]), float(data["started"]))

    def to_json(self) -> dict[str, float]:
        """For a record."""
        return {"pid": self.pid, "started": self.started}

    def is_alive(self) -> bool:
        """Whether this very process still runs, not another one that got its id."""
        return _start_time(self.pid) == self.started


def _start_time(pid: int) -> float | None:
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The command's name is in parentheses and may hold anything, so the fields start after the last one.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    state, _, started = result.stdout.strip().partition(" ")
    if result.returncode != 0 or not started or state.startswith("Z"):
        return None
    from datetime import datetime

    return datetime.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y").timestamp()


def die_with_parent(parent: int | None = None, *, how: signal.Signals = signal.SIGKILL) -> None:
    """Has this process killed when its parent ends, however that ends. Call it first thing.

    Orphans of a trainer would train on, unseen, beside the next attempt.

    Linux does it at once (PR_SET_PDEATHSIG); elsewhere a thread looks every second.

    Args:
        parent: the parent's id, when known: closes the gap before this call.
        how: the signal.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(expected, how), name="parent", daemon=True).start()
    if os.getppid() != expected:
        os.kill(os.getpid(), how)


def _watch(parent: int, how: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), how)


_last_word: list[int] = []
"""The exit code, once it is known."""
_registered: list[bool] = []


def to_the_end(main: Callable[[], int]) -> int:
    """What `main` returns, for sys.exit; the process ends with it whatever native threads do meanwhile.

    Threads of libraries (gloo's, pyarrow's) let go of Python's objects when they get to it. After the interpreter's end has
    begun that aborts the process, with all of its work done: torch 2.13 did so in one of some fifty runs of two ranks on two
    busy cores, after the last exchange. So when threads were waited for, and all other libraries have done what they
    do at exit, the process ends there, and the system takes back the rest.

    Call it once, before anything else: what is registered with `atexit` before this is not run. Within a program that was
    called so itself (runpy), the outer one's code counts.
    """
    if not _registered:
        _registered.append(True)
        atexit.register(_end)
    _last_word.clear()
    code = main()
    _last_word[:] = [code]
    return code


def _end() -> None:
    if not _last_word:
        return  # an exception's, whose traceback comes yet
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_last_word[0])
