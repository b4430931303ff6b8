"""Byte ranges of any fsspec file system: memory://, http:// by aiohttp, s3:// by s3fs, az:// by adlfs, and others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from isthmus.storage.ranges.causes import Kind, ReadFailed
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.loop import Work, wait
from isthmus.storage.ranges.paths import checked
from isthmus.storage.ranges.retry import Retry, RetryPolicy
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced

_SLOWEST_BYTES_PER_S = 1_000_000
_IDENTITY = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")
_HINT = "a dataset must not change while it is read: verify it, and start again"


class OtherRanges:
    """`Ranges` by `cat_file(path, start=, end=)` of an fsspec file system.

    fsspec tells neither how far a read is nor which version of a file the bytes are of. So a read has a limit as a whole
    (`stall_s`, and a second for each megabyte), and the file's size and ETag are asked for beside each read.
    """

    direct = False
    max_depth = 32

    def __init__(
        self,
        uri: str,
        connect: Callable[[], tuple[Any, str]],
        policy: RetryPolicy,
        counters: Counters,
        *,
        store: str,
    ) -> None:
        self.uri = uri
        self._connect = connect
        self._policy, self._counters = policy, counters
        self._retry = Retry(uri, policy, counters, store=store)
        self._first: dict[str, tuple[object, ...]] = {}
        self._in_flight: set[Work[Any]] = set()
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._open()

    def read(self, name: str, start: int, length: int, *, file_bytes: int | None = None) -> memoryview:
        """See `Ranges.read`."""
        checked(name, self.uri)
        return self._retry.run(
            name, lambda: self._attempt(name, start, length, file_bytes), refresh=self._refresh
        )

    def scatter(
        self, name: str, start: int, views: Sequence[memoryview], *, file_bytes: int | None = None
    ) -> None:
        """See `Ranges.scatter`."""
        data = self.read(name, start, sum(view.nbytes for view in views), file_bytes=file_bytes)
        copy_into(views, data)

    def close(self) -> None:
        """See `Ranges.close`."""
        self._retry.close()
        with self._lock:
            in_flight = list(self._in_flight)
        for work in in_flight:
            work.cancel()

    def _refresh(self) -> bool:
        """A new file system, which looks up its credentials anew, unless another thread has just made one."""
        with self._lock:
            if self._filesystem is self._mine.filesystem:
                self._open()
        return True

    def _open(self) -> None:
        filesystem, path = self._connect()
        asynchronous = bool(getattr(filesystem, "async_impl", False))
        information = filesystem._info if asynchronous else filesystem.info
        # Some file systems cache listings: a replaced file would look like the old one.
        takes = inspect.signature(information).parameters
        self._fresh: dict[str, Any] = {"refresh": True} if "refresh" in takes else {}
        self._asynchronous = asynchronous
        self._filesystem, self._path = filesystem, path.rstrip("/")

    def _attempt(self, name: str, start: int, length: int, file_bytes: int | None) -> memoryview:
        self._mine.filesystem = self._filesystem
        path = f"{self._path}/{name}" if self._path else name
        end = start + length
        if self._asynchronous:
            information, data = self._wait(path, start, end)
        else:
            information = self._filesystem.info(path, **self._fresh)
            data = self._filesystem.cat_file(path, start=start, end=end) if length else b""
        self._check(name, information, file_bytes)
        self._counters.add("bytes", len(data))
        if len(data) == length:
            return memoryview(data)
        size = information.get("size")
        if isinstance(size, int) and size < end:
            raise FileCutShort(
                f"the file ends at byte {size:,}, {end:,} were to be read", where=f"{self.uri}/{name}"
            )
        raise ReadFailed(Kind.PASSING, f"the answer has {len(data):,} bytes, {length:,} were asked for")

    async def _both(self, path: str, start: int, end: int) -> tuple[dict[str, Any], bytes]:
        information = asyncio.ensure_future(self._filesystem._info(path, **self._fresh))
        try:
            data = await self._filesystem._cat_file(path, start=start, end=end) if end > start else b""
        except Exception as error:
            # A range behind the end is refused in many ways; the size says it in one. Otherwise the answer to the read
            # says more than that to HEAD, which has no body.
            await asyncio.wait([information])
            known = information.exception() is None and information.result().get("size")
            if isinstance(known, int) and 0 < known < end:
                return information.result(), b""
            raise error
        finally:
            if not information.done():
                await asyncio.wait([information])
        return information.result(), data

    def _wait(self, path: str, start: int, end: int) -> tuple[dict[str, Any], bytes]:
        limit_s = self._policy.stall_s + (end - start) / _SLOWEST_BYTES_PER_S
        work = Work(asyncio.wait_for(self._both(path, start, end), limit_s), self._filesystem.loop)
        with self._lock:
            self._in_flight.add(work)
        try:
            if self._retry.closed:
                work.cancel()
            return wait(work, limit_s + 30)
        except concurrent.futures.CancelledError:
            raise ReadFailed(Kind.FINAL, "the read was cancelled") from None
        except TimeoutError as error:
            raise ReadFailed(Kind.PASSING, f"no answer within {limit_s:.0f} s") from error
        finally:
            with self._lock:
                self._in_flight.discard(work)

    def _check(self, name: str, information: dict[str, Any], file_bytes: int | None) -> None:
        where = f"{self.uri}/{name}"
        size = information.get("size")
        if file_bytes is not None and size is not None and size != file_bytes:
            raise FileReplaced(
                f"the file has {size:,} bytes, {file_bytes:,} in the index", where=where, hint=_HINT
            )
        seen = (size, *(str(information[key]) for key in _IDENTITY if key in information))
        if self._first.setdefault(name, seen) != seen:
            raise FileReplaced("the file was replaced while it was being read", where=where, hint=_HINT)


def copy_into(views: Sequence[memoryview], data: memoryview | bytes) -> None:
    """Copies bytes into views, one behind the other."""
    source = memoryview(data).cast("B")
    done = 0
    for view in views:
        target = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        target[:] = source[done : done + target.nbytes]
        done += target.nbytes
