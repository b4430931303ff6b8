"""Samples written by a thread behind the encoders, in order: a store that takes its time is no reason for a GPU to wait."""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.storage.shards import DatasetWriter, Sample

_WAITING = 128
"""Samples that wait to be written: some 50 MB of SDXL's at 512 px."""


class WriteBehind:
    """Hands samples to a writer in a thread of its own. A context manager: at its end all are handed over.

    An error of the writer is raised by the next :meth:`add`, or at the end.
    """

    def __init__(self, writer: DatasetWriter, waiting: int = _WAITING) -> None:
        self._writer = writer
        self._queue: queue.Queue[Sample | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="write shards", daemon=True)

    def add(self, sample: Sample) -> None:
        """Puts a sample behind those that wait; waits itself while there are too many."""
        if self._error is not None:
            raise self._error
        self._queue.put(sample)

    def _write(self) -> None:
        while (sample := self._queue.get()) is not None:
            if self._error is not None:
                continue  # nothing is written after a failure; whoever adds must not wait for ever
            try:
                self._writer.add(sample)
            except BaseException as error:  # noqa: BLE001  it is raised where samples are added
                self._error = error

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._error is None:
            self._error = error  # what waits is of a unit that will be begun again
        self._queue.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
