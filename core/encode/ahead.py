"""Pictures decoded, resized and cropped by threads, ahead of the encoders and in the source's order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from isthmus.core.encode.pictures import Unusable
from isthmus.core.encode.prepare import Prepared, prepare
from isthmus.core.encode.sources import ImageRecord, Rejected

if TYPE_CHECKING:
    from isthmus.core.encode.buckets import BucketTable
    from isthmus.core.encode.pieces import Pending

_RAW_BYTES = 256 * 2**20
"""Undecoded pictures that wait; a single one may be larger."""


def default_threads(processes: int = 1, *, on_gpu: bool = False) -> int:
    """How many decode for a process, of its share of the machine's cores, at most 32: 100 megapixels take 300 MB in each.

    Encoders on a GPU leave all cores but one, which hands them their work, but no less than two where there are two: that
    one mostly waits. Encoders on the CPU need half of them.

    Args:
        processes: that encode on this machine.
    """
    share = len(os.sched_getaffinity(0)) // processes
    if on_gpu:
        return max(1, min(32, max(min(share, 2), share - 1)))
    return max(1, min(16, share // 2))


def prepared(
    items: Iterator[ImageRecord | Pending | Rejected],
    table: BucketTable,
    *,
    threads: int,
    ahead: int,
    phash: bool = False,
) -> Iterator[Prepared | Rejected]:
    """Prepares pictures in `threads` while a further thread reads the source.

    Args:
        items: read in a thread of its own; an error in it comes out here, at its place.
        ahead: pictures that are read before they are asked for, at most.
        phash: hash them.
    """
    ready: queue.Queue[Future[Prepared | Rejected] | None] = queue.Queue(max(1, ahead))
    room = _Room(_RAW_BYTES)
    stop = threading.Event()

    def work(item: ImageRecord | Pending | Rejected) -> Prepared | Rejected:
        if isinstance(item, Rejected):
            return item
        try:
            record = item if isinstance(item, ImageRecord) else item.load()
            return prepare(record, table, phash=phash)
        except Unusable as problem:
            return Rejected(key=item.key, reason=problem.reason, detail=problem.detail)
        finally:
            room.give(getattr(item, "size", 0))

    def put(future: Future[Prepared | Rejected] | None) -> None:
        while not stop.is_set():
            try:
                ready.put(future, timeout=0.1)
            except queue.Full:
                continue
            return

    def feed(pool: ThreadPoolExecutor) -> None:
        try:
            for item in items:
                if not room.take(getattr(item, "size", 0), stop):
                    return
                put(pool.submit(work, item))
        except BaseException as error:  # noqa: BLE001  it is raised again where the pictures are asked for
            failed: Future[Prepared | Rejected] = Future()
            failed.set_exception(error)
            put(failed)
        put(None)

    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        feeder = threading.Thread(target=feed, args=(pool,), name="read source", daemon=True)
        feeder.start()
        try:
            while (future := ready.get()) is not None:
                yield future.result()
        finally:
            stop.set()
            feeder.join()
            pool.shutdown(cancel_futures=True)


class _Room:
    """Bytes that may wait at the same time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._changed = limit, 0, threading.Condition()

    def take(self, size: int, stop: threading.Event) -> bool:
        with self._changed:
            while self._used and self._used + size > self._limit:
                if stop.is_set():
                    return False
                self._changed.wait(0.1)
            self._used += size
        return not stop.is_set()

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify()
