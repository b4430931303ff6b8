"""Runs a case in a fresh process on a quiet machine, and watches what it uses."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
QUIET_CORES = 0.25
FOREIGN_CORES = 0.3


@dataclass(slots=True)
class Machine:
    """How cases are run here."""

    lock: Path | None = None
    """A file that is locked while cases of one round run, for benchmarks that share a machine."""
    wait_s: float = 20.0
    """How long a run waits for other programs to be idle."""
    tries: int = 3
    """How often a run is made when others disturb it."""
    held: bool = False
    """The lock is held already."""
    limit_s: float = 300.0
    """How long a run may take."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the lock; within it, asked for again, it is held as it is."""
        if self.lock is None or self.held:
            yield
            return
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.held = True
            try:
                yield
            finally:
                self.held = False

    def run(
        self,
        python: str,
        arguments: list[str],
        *,
        warm: Path | None = None,
        watch: bool = False,
        environment: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The JSON that `peers.harness` printed, with what was seen from outside; `error` when it failed.

        Args:
            warm: a folder that is read first, so that it is in the page cache.
            watch: sample the memory of the process and its children; costs it a little speed.

        A run beside which others used more than 0.3 cores is repeated, and the quietest is taken.
        """
        best: dict[str, Any] = {}
        for _ in range(self.tries):
            # Nothing is timed while memory is watched.
            with contextlib.nullcontext() if watch else self.turn():
                found = self._once(python, arguments, warm, watch, environment)
            if "error" in found:
                return found
            if not best or found["foreign_cores"] < best["foreign_cores"]:
                best = found
            if watch or best["foreign_cores"] < FOREIGN_CORES:
                break
        return best

    def _once(
        self,
        python: str,
        arguments: list[str],
        warm: Path | None,
        watch: bool,
        environment: dict[str, str] | None,
    ) -> dict[str, Any]:
        if warm is not None:
            read_all(warm)
        if not watch:
            wait_until_quiet(self.wait_s)
        before, own_before, began = busy_seconds(), _children_seconds(), time.monotonic()
        process = subprocess.Popen(
            [python, "-m", "peers.harness", *arguments],
            cwd=HERE,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        peak = {"pss_bytes": 0, "private_bytes": 0}
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, stop))
        if watch:
            watcher.start()
        try:
            out, errors = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            for pid in reversed(tree(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.communicate()
            return {"error": f"did not end within {self.limit_s:.0f} s"}
        finally:
            stop.set()
            if watch:
                watcher.join()
        took = time.monotonic() - began
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            return {"error": (errors.strip().splitlines() or ["no output"])[-1][:300]}
        found: dict[str, Any] = json.loads(lines[-1])
        own = _children_seconds() - own_before
        found["foreign_cores"] = max(0.0, (busy_seconds() - before - own) / took)
        if watch:
            found |= {f"peak_{name}": value for name, value in peak.items()}
        return found

    def make(self, python: str, arguments: list[str]) -> None:
        """Runs a module's writer. RuntimeError when it fails."""
        done = subprocess.run(
            [python, "-m", "peers.harness", *arguments],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()[-800:]}")


def busy_seconds() -> float:
    """Seconds that the machine's cores have worked since it started, time taken by its host included."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(values[:3]) + sum(values[5:8])) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit_s: float) -> None:
    """Until less than a quarter of a core is in use, or the limit has passed; the run then says what it saw."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(0.7)
        if (busy_seconds() - before) / 0.7 < QUIET_CORES:
            return


def read_all(folder: Path) -> None:
    """Brings a folder's files into the page cache."""
    buffer = memoryview(bytearray(1 << 22))
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def facts() -> dict[str, Any]:
    """What a reader of the figures must know of the machine."""
    processors = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processors[0] if processors else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _watch(pid: int, peak: dict[str, int], stop: threading.Event) -> None:
    while not stop.wait(0.1):
        shared = private = 0
        for one in tree(pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name == "Pss":
                        shared += 1024 * int(value.split()[0])
                    elif name in ("Pss_Anon", "Pss_Shmem"):
                        private += 1024 * int(value.split()[0])
        peak["pss_bytes"] = max(peak["pss_bytes"], shared)
        peak["private_bytes"] = max(peak["private_bytes"], private)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
