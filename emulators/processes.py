"""Hosts as plain processes of this machine, each with a loopback address: for those without root or outside Linux.

What is missing, compared to namespaces: an entry point that is PID 1, mounts, a network of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from isthmus.emulators.hosts import Container, Privileges, exit_code

MARK = "ISTHMUS_EMULATED_HOST"
"""In the environment of every process of a host; tells which are left when the entry point has gone."""


class ProcessHost:
    """A host: a process group and whatever was started from it."""

    def __init__(self, name: str, container: Container) -> None:
        self.name = self.address = name
        self._mark = uuid.uuid4().hex
        # A path of its own that is short enough for the sockets that are made below it.
        self._temporary = tempfile.mkdtemp(prefix="host-")
        environment = {"HOME": str(container.home), "TMPDIR": self._temporary, MARK: self._mark}
        container.home.mkdir(parents=True, exist_ok=True)
        path = {**environment, **container.environment}
        command = [shutil.which(container.command[0], path=path.get("PATH")) or container.command[0]]
        self._process = subprocess.Popen(
            [*command, *container.command[1:]],
            env=path,
            cwd=container.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout
        self.pid: int | None = self._process.pid

    def poll(self) -> int | None:
        """See `Host`."""
        code = self._process.poll()
        if code is None:
            return None
        self._kill_left()  # a container ends with its first process
        return exit_code(code)

    def signal(self, number: int) -> None:
        """See `Host`."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """See `Host`."""
        self.signal(signal.SIGKILL)
        self._kill_left()

    def close(self) -> None:
        """See `Host`."""
        self.kill()
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _kill_left(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes whose environment bears a host's mark; none where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def free_port() -> int:
    """A port that nobody on this machine listens at now, at whatever address."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Loopback:
    """A cluster of plain processes: host i is 127.0.`net`.`i + 1`, and that is its name, too."""

    privileges: Privileges = "processes"

    def __init__(self, count: int, net: int) -> None:
        self.names: Sequence[str] = [f"127.0.{net}.{index + 1}" for index in range(count)]
        self.gateway: str | None = "127.0.0.1"
        self._hosts: list[ProcessHost] = []

    def start(self, containers: Sequence[Container]) -> Sequence[ProcessHost]:
        """See `Cluster`."""
        for name, container in zip(self.names, containers, strict=True):
            self._hosts.append(ProcessHost(name, container))
        return list(self._hosts)

    def close(self) -> None:
        """See `Cluster`."""
        for host in self._hosts:
            host.close()
