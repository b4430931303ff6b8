"""The first process of a node: starts the container's processes, passes signals on, reports how they end, leaves nothing behind.

A script of its own, stdlib only, told what to do on standard input and answering in JSON lines on standard output:

    python node_init.py SPEC.json        "start", "term", and the end of input: kill everything and end

In a process namespace it is process 1 and the kernel ends the rest with it; elsewhere it becomes the reaper of its orphans
and kills what descends from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36


def main(spec_file: str) -> int:
    """Serves one node until the end of input."""
    spec = json.loads(Path(spec_file).read_text())
    _settle_in(spec)
    # SIGTERM is for the container; this process ends when its input does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    os.set_blocking(readable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable)
    _say(ready=True)
    running: dict[int, int] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0, readable], [], [])
        if readable in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(readable, 4096)
            _reap(running)
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                _kill_all()
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line == b"start":
                    running = {_spawn(process): i for i, process in enumerate(spec["processes"])}
                    _say(pids=list(running))
                elif line == b"term":
                    for pid in running:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGTERM)


def _settle_in(spec: dict[str, Any]) -> None:
    if os.getpid() == 1:
        socket.sethostname(spec["hostname"])
        subprocess.run(["mount", "--bind", spec["hosts_file"], "/etc/hosts"], check=True)
        for source, target in spec["binds"]:
            subprocess.run(["mount", "--bind", source, target], check=True)
        # No name server is reachable from here: say so at once, whatever this machine's own is.
        resolver = Path(spec["hosts_file"]).with_name("resolv.conf")
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        subprocess.run(
            ["mount", "--bind", str(resolver), "/etc/resolv.conf"], check=False, capture_output=True
        )
    else:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _spawn(process: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(process["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.chdir(process["cwd"])
        os.execve(process["argv"][0], process["argv"], process["env"])
    except BaseException as error:  # noqa: BLE001 - whatever it is, the child must not go on as its parent
        os.write(2, f"{error}\n".encode())
    os._exit(127)


def _reap(running: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in running:
            _say(exit=running.pop(pid), code=os.waitstatus_to_exitcode(status))


def _kill_all() -> None:
    if os.getpid() == 1:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        return
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants(root: int) -> list[int]:
    """Living processes that descend from one, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - a list of names is what is wanted
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def _say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
