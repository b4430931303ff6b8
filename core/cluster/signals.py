"""What ends an attempt from outside, told to whoever waits."""

from __future__ import annotations

import signal
import threading
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Remembers that this process was told to end, and tells whoever wants to know."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.wanted = threading.Event()
        """Set for good once a signal has come."""
        self.changed = threading.Event()
        """Set whenever there is something to look at; whoever looks clears it first."""
        for number in WATCHED:
            signal.signal(number, self._handle)
        # start.py becomes us with these blocked, so that none gets lost on the way.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or signum
        self.wanted.set()
        self.changed.set()
