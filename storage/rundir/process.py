"""Is that process still the same one? A process id alone may have been reused."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


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
