"""Threads that bring files into a cache folder ahead of need, in pieces, without anyone waiting for them."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from isthmus.errors import IsthmusError
from isthmus.storage.filesystems import REASONS
from isthmus.storage.ranges.cache_folder import Part
from isthmus.storage.ranges.spec import Ranges

PIECE_BYTES = 16 << 20
PIECES_IN_FLIGHT = 4
"""Of one process. With the pieces' size this is the memory that bringing files takes: 64 MB."""
FILES_AT_ONCE = 2
"""Of one process: the next file begins while the last pieces of the one before are under way."""
LOOK_EVERY_S = 0.25
"""At most so often is there a look for the next file; less often, up to `LOOK_AT_LEAST_S`, while there is none."""
LOOK_AT_LEAST_S = 2.0
AFTER_TROUBLE_S = 600.0
"""After the disk refused, nothing is brought for so long; after a file could not be brought, not that file."""


class Work(Protocol):
    """What the threads work for."""

    def take(self) -> Part | None:
        """The next file to bring, with its room reserved. OSError: the folder cannot be used."""
        ...

    def store(self, name: str) -> Ranges:
        """Where a file comes from."""
        ...

    def finish(self, part: Part) -> None:
        """Checks a file that is complete and gives it to all. DataError: it is damaged. OSError: as `take`."""
        ...

    def abandon(self, part: Part) -> None:
        """Gives up a file."""
        ...

    def brought(self, size: int) -> None:
        """So many bytes came from the store."""
        ...


@dataclass(eq=False, slots=True)
class _Coming:
    """A file on its way."""

    part: Part
    pieces: deque[tuple[int, int]]
    """Start and length of those that no thread has taken."""
    left: int
    """Pieces that are not complete."""
    failed: bool = False
    busy: set[int] = field(default_factory=set)
    """Threads at work on it."""


class Filler:
    """The threads of one process.

    Args:
        work: what they do.
        folder: for messages.
        piece_bytes: read from the store in one go.
    """

    def __init__(self, work: Work, folder: str, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._work, self._folder, self._piece_bytes = work, folder, piece_bytes
        self._changed = threading.Condition()
        self._coming: list[_Coming] = []
        self._stopped = self._looking = False
        self._next_look, self._last_look, self._blocked = math.inf, 0.0, 0.0
        self._pause = LOOK_EVERY_S
        self._refused: dict[str, float] = {}
        self._warned: set[str] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads."""
        self._threads = [
            threading.Thread(target=self._run, name=f"isthmus-cache-{number}", daemon=True)
            for number in range(PIECES_IN_FLIGHT)
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be a file to bring."""
        with self._changed:
            self._pause = LOOK_EVERY_S
            self._next_look = min(self._next_look, max(time.monotonic(), self._last_look + self._pause))
            self._changed.notify()

    def refuses(self, name: str) -> bool:
        """Whether a file could not be brought a while ago."""
        return self._refused.get(name, 0.0) > time.monotonic()

    def refuse(self, name: str) -> None:
        """Leaves a file alone for a while."""
        self._refused[name] = time.monotonic() + AFTER_TROUBLE_S

    def trouble(self, error: OSError) -> None:
        """The folder cannot be used: one warning, and nothing is brought for a while."""
        reason = REASONS.get(error.errno or 0) or " ".join(str(error).split()) or type(error).__name__
        self._say(
            reason,
            f"cache folder {self._folder}: {reason}; what is not in it is read from the store, more slowly",
        )
        with self._changed:
            self._blocked = time.monotonic() + AFTER_TROUBLE_S

    def _say(self, what: str, message: str) -> None:
        with self._changed:
            if what in self._warned:
                return
            self._warned.add(what)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def stop(self) -> None:
        """Ends the threads after the piece that each is at; their reads end early when the store is closed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, limit_s: float) -> None:
        """Waits for the threads, gives up the files that were on their way."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = {thread.ident for thread in self._threads if thread.is_alive()}
        if alive:
            names = [coming.part.name for coming in self._coming if coming.busy & alive]
            warnings.warn(
                f"{len(alive)} threads did not stop within {limit_s:g} s, still bringing {', '.join(names)} "
                f"into {self._folder}",
                RuntimeWarning,
                stacklevel=2,
            )
        for coming in [coming for coming in self._coming if not coming.busy & alive]:
            self._work.abandon(coming.part)
            self._coming.remove(coming)

    # --- the threads ---

    def _run(self) -> None:
        memory = np.empty(0, np.uint8)
        me = threading.get_ident()
        try:
            while True:
                with self._changed:
                    piece = self._next_piece(me)
                    while piece is None and not self._stopped and not self._may_look():
                        self._changed.wait(self._patience())
                        piece = self._next_piece(me)
                    if self._stopped:
                        return
                    self._looking = self._looking or piece is None
                if piece is None:
                    self._look()
                    continue
                coming, start, length = piece
                if len(memory) < length:
                    memory = np.empty(length, np.uint8)
                self._bring(coming, start, memory[:length].data)
                self._done(coming, me)
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would look like a full cache
            self.stop()
            self._say(repr(error), f"cache folder {self._folder}: no file is brought any more: {error!r}")

    def _next_piece(self, me: int) -> tuple[_Coming, int, int] | None:
        """The next piece of the first file that has one, marked as taken."""
        for coming in self._coming:
            if coming.pieces and not self._stopped:
                coming.busy.add(me)
                return coming, *coming.pieces.popleft()
        return None

    def _may_look(self) -> bool:
        due = time.monotonic() >= max(self._next_look, self._blocked)
        return due and not self._looking and len(self._coming) < FILES_AT_ONCE

    def _patience(self) -> float | None:
        if self._looking or len(self._coming) >= FILES_AT_ONCE:
            return None  # whoever is at it notifies
        wait = max(self._next_look, self._blocked) - time.monotonic()
        return max(0.001, wait) if wait < math.inf else None

    def _look(self) -> None:
        part = None
        try:
            part = self._work.take()
            if part is not None and part.size:
                # All of its room now: a disk that is full says so before anything is fetched.
                os.posix_fallocate(part.descriptor, 0, part.size)
        except OSError as error:
            if part is not None:
                self._work.abandon(part)
                part = None
            self.trouble(error)
        with self._changed:
            self._looking, self._last_look = False, time.monotonic()
            if part is not None:
                step = self._piece_bytes
                pieces = [(at, min(step, part.size - at)) for at in range(0, part.size, step)] or [(0, 0)]
                self._coming.append(_Coming(part, deque(pieces), len(pieces)))
                self._pause = LOOK_EVERY_S
                self._next_look = self._last_look
            else:
                self._next_look = self._last_look + self._pause
                self._pause = min(2 * self._pause, LOOK_AT_LEAST_S)
            self._changed.notify_all()

    def _bring(self, coming: _Coming, start: int, memory: memoryview) -> None:
        """One piece, from the store into the file."""
        if coming.failed:
            return
        part = coming.part
        try:
            self._work.store(part.name).scatter(part.name, start, [memory], file_bytes=part.size)
        except (IsthmusError, FileNotFoundError):
            # A read that needs this file meets the same in the store, and says it where it matters.
            self._give_up(coming)
            return
        try:
            while memory:
                written = os.pwrite(part.descriptor, memory, start)
                memory, start = memory[written:], start + written
                self._work.brought(written)
        except OSError as error:
            self._give_up(coming)
            self.trouble(error)

    def _give_up(self, coming: _Coming) -> None:
        self.refuse(coming.part.name)
        with self._changed:
            coming.failed = True
            coming.left -= len(coming.pieces)
            coming.pieces.clear()

    def _done(self, coming: _Coming, me: int) -> None:
        """A piece is complete, or failed; the last of a file completes it."""
        with self._changed:
            coming.left -= 1
            last = coming.left == 0
            if not last:
                coming.busy.discard(me)
        if not last:
            return
        if coming.failed:
            self._work.abandon(coming.part)
        else:
            self._finish(coming.part)
        with self._changed:
            coming.busy.discard(me)
            self._coming.remove(coming)
            self._next_look = min(self._next_look, time.monotonic() + self._pause)
            self._changed.notify_all()

    def _finish(self, part: Part) -> None:
        try:
            self._work.finish(part)
        except IsthmusError as error:
            self.refuse(part.name)
            self._work.abandon(part)
            self._say(part.name, f"not kept in the cache: {error}")
        except OSError as error:
            self._work.abandon(part)
            self.trouble(error)
