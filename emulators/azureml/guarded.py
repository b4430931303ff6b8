"""Helpers of the emulator that are processes of their own; each ends with it, even when it is killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.errors import StorageError


class Guarded:
    """A command under guard.py.

    Args:
        command: to run.
        environment: its whole environment.
        log: a file for what it says.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self.command = list(command)
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=dict(environment),
                # A group of its own: Ctrl-C on a terminal ends the emulator, which ends the rest in order.
                process_group=0,
            )

    def stop(self) -> None:
        """Ends it and waits."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        """The end of its log, on one line."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return " ".join(line for line in lines[-5:] if line)

    def await_port(self, port: int, *, limit_s: float = 60) -> None:
        """Returns when it listens on 127.0.0.1.

        Raises:
            StorageError: it does not within the limit, or it ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StorageError(f"{Path(self.command[0]).name} did not start: {self.said()}")
            time.sleep(0.03)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
