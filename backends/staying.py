"""Staying with a run whose jobs go on by themselves: looks of the supervisor, and the jobs' logs beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice

from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Handle, LogLine
from isthmus.backends.supervisor import Look, Supervisor
from isthmus.errors import IsthmusError, PreflightRefused, UsageError

_LAST_LINES_S = 10.0
"""For the rest of an ended job's log."""
_PAUSES = (1.0, 60.0)
"""Seconds between tries of a log or a look that fails, from the first to the longest."""


class Tail:
    """A job's log, handed on by a thread; opened again, without what was shown, when the connection is lost.

    Args:
        skip: lines that were shown before.
    """

    def __init__(
        self,
        handle: Handle,
        write: Callable[[LogLine], None],
        say: Callable[[str], None],
        *,
        skip: int = 0,
    ) -> None:
        self.ended = threading.Event()
        self._handle, self._write, self._say, self._shown = handle, write, say, skip
        threading.Thread(target=self._run, name="tail", daemon=True).start()

    def _run(self) -> None:
        pause, told = _PAUSES[0], False
        try:
            while True:
                try:
                    # A backend of this thread's own: clients are not shared between threads.
                    lines = get_backend(self._handle.backend).logs(self._handle, follow=True)
                    for line in islice(lines, self._shown, None):
                        self._shown += 1
                        pause, told = _PAUSES[0], False
                        self._write(line)
                    return
                except (UsageError, PreflightRefused) as error:
                    self._say(f"no log: {error}")
                    return
                except IsthmusError as error:
                    if not told:
                        self._say(f"the log was lost, trying again: {error}")
                        told = True
                    time.sleep(pause)
                    pause = min(2 * pause, _PAUSES[1])
        finally:
            self.ended.set()


def stay(
    supervisor: Supervisor,
    say: Callable[[str], None],
    *,
    write: Callable[[LogLine], None] | None = None,
    on_look: Callable[[Look], None] = lambda look: None,
    interval: float = 30.0,
    skip: int = 0,
) -> Look:
    """Looks after the run until it is done; returns the last look.

    A look that fails because a store or a cloud is away is tried again; KeyboardInterrupt passes, and the run goes on.

    Args:
        say: gets what went wrong on the way.
        write: gets the lines of the newest job's log; None: no log.
        on_look: gets each look.
        interval: seconds between looks.
        skip: lines of the first job's log that were shown before.

    Raises:
        UsageError, PreflightRefused: nothing that time would mend.
    """
    tail: Tail | None = None
    job: object = None
    pause, told = _PAUSES[0], False
    while True:
        try:
            look = supervisor.look()
        except (UsageError, PreflightRefused):
            raise
        except IsthmusError as error:
            if not told:
                say(f"trying again: {error}")
                told = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
            continue
        pause, told = _PAUSES[0], False
        on_look(look)
        now = look.handle.native.get("job_id")
        if write is not None and now != job and look.status.state != "pending":
            tail, job = Tail(look.handle, write, say, skip=skip), now
            skip = 0
        if look.did == "done":
            if tail is not None:
                tail.ended.wait(_LAST_LINES_S)
            return look
        if tail is not None and not tail.ended.is_set():
            tail.ended.wait(interval)
        else:
            time.sleep(min(interval, 2.0 if write is not None else interval))
