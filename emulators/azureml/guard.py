"""Runs a command that must not outlive whoever started it: ends it when standard input ends. A script of its own, stdlib only.

python guard.py COMMAND...
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

PATIENCE_S = 5.0
"""From SIGTERM to SIGKILL."""


def main(command: list[str]) -> int:
    """Returns the command's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    alive = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for number, _ in poll.poll():
            if number == alive:
                return child.wait()
            if not os.read(0, 4096):
                child.terminate()
                try:
                    return child.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
