"""What the run directory tells a worker while its ranks run: a stop that was requested, another node that failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.core.cluster.joining import type_of
from isthmus.errors import IsthmusError
from isthmus.storage.rundir import RunDirectory

EVERY_S = 15.0
"""A request for a list, as often; nothing is read that is not one of the wanted events."""
_WANTED = ("stop-requested", "failed")


class EventWatch:
    """A thread that passes on the wanted events that come after the newest `started`. A context manager.

    A store that is away is asked again: nobody's training ends for that here.

    Args:
        run: the run directory.
        tell: gets each event, in this thread, at every look until it returns True.
        every: seconds between looks.
    """

    def __init__(
        self, run: RunDirectory, tell: Callable[[Mapping[str, Any]], bool], *, every: float = EVERY_S
    ) -> None:
        self._run = run
        self._tell = tell
        self._every = every
        self._stop = threading.Event()
        self._seen: set[str] | None = None
        self._thread = threading.Thread(target=self._look_until_stopped, name="events", daemon=True)

    def __enter__(self) -> EventWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _look_until_stopped(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(IsthmusError):
                self.look()

    def look(self) -> None:
        """One look. Raises StorageError."""
        names = self._run.file_names("events")
        if self._seen is None:
            begun = max((name for name in names if type_of(name) == "started"), default="")
            self._seen = {name for name in names if name <= begun}
        for name in names:
            if name in self._seen:
                continue
            if type_of(name) in _WANTED:
                event = self._run.read_event(name)
                if event is None or not self._tell(event):
                    continue
            self._seen.add(name)
