"""What this node can still say of a process that died without a word: the kernel's counters, and its last stack."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.storage.rundir import RunDirectory

_log = logging.getLogger(__name__)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')


class KillCounter:
    """Counts processes that the kernel killed for want of memory, since it was made.

    Args:
        proc: the root of procfs.
        cgroup: this container's control group: version 2, or version 1's `memory` below it.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._before = self._count()

    def explain(self) -> str | None:
        """What the counters say of a SIGKILL, in words; None where there are none to ask."""
        now = self._count()
        if now is None or self._before is None:
            return None
        if now > self._before:
            return "the kernel killed it for want of memory" + self._limit()
        return "not by the kernel for want of memory: something on this machine sent it"

    def _count(self) -> int | None:
        for file in (self._cgroup / "memory.events", self._cgroup / "memory" / "memory.oom_control"):
            count = _field(file, "oom_kill")
            if count is not None:
                return count
        # Of the whole machine: other containers count too.
        return _field(self._proc / "vmstat", "oom_kill")

    def _limit(self) -> str:
        for name in ("memory.max", "memory/memory.limit_in_bytes"):
            try:
                limit = int((self._cgroup / name).read_text())
            except (OSError, ValueError):
                continue
            if limit < 1 << 60:  # version 1 writes a huge number for no limit
                return f" (the container's limit is {limit / 1e9:.1f} GB)"
        return ""


def last_place(file: Path) -> str | None:
    """Where the training thread was, from a fault handler's dump: `forward (attention.py:88)`; None without one."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    # The newest dump, its current thread: faulthandler lists the innermost call first.
    starts = [at for at, line in enumerate(lines) if line.startswith(("Current thread", "Thread"))]
    current = [at for at in starts if lines[at].startswith("Current thread")] or starts[-1:]
    for line in lines[current[-1] + 1 :] if current else []:
        match = _FRAME.match(line)
        if match:
            return f"{match['function']} ({Path(match['file']).name}:{match['line']})"
    return None


def _field(file: Path, name: str) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def keep_logs(run: RunDirectory, folder: Path, attempt: int, *, limit: float = 60.0) -> None:
    """Copies what ranks left in `folder` (stacks, flight recordings) into the run's `logs/attempt<n>/`.

    Never raises, and takes at most `limit` seconds: the run directory may be what is broken.
    """
    files = [path for kind in ("stack-*.txt", "flight_*") for path in sorted(folder.glob(kind))]
    # Read first: the folder goes away with the attempt.
    found = [(path.name, data) for path in files if (data := path.read_bytes())]

    def copy() -> None:
        try:
            for name, data in found:
                run.write_file(f"logs/attempt{attempt}/{name}", data)
        except Exception:  # noqa: BLE001
            _log.warning("what the ranks left could not be kept", exc_info=True)

    if found:
        thread = threading.Thread(target=copy, name="logs", daemon=True)
        thread.start()
        thread.join(timeout=limit)
