"""Byte ranges of s3://, az:// and http(s):// through obstore, on the one event loop of the process: where `direct` cannot go."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus.errors import IsthmusError, StorageError
from isthmus.storage.ranges import clients
from isthmus.storage.ranges.causes import Kind, ReadFailed, is_range_refusal
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.loop import Work, event_loop, wait
from isthmus.storage.ranges.pace import Pace
from isthmus.storage.ranges.paths import checked
from isthmus.storage.ranges.retry import Retry, RetryPolicy
from isthmus.storage.ranges.versions import Versions

_CHUNK = 512 << 10
"""Bytes that are copied at once. The body is streamed: a read needs some three times as much memory besides the
caller's, which 64 reads in flight make 100 MB. Measured from 256 KB to 2 MB, smaller ones cost more of the processor
only below this."""
_SLOWEST_BYTES_PER_S = 100_000
"""A connection that is slower than this for a whole read is given up: the store is as good as stalled."""


class ObjectRanges:
    """`Ranges` of an object store or a web server.

    The answer's own headers say which file it is of: the ETag that was seen first under a name (without one, the time of
    change) must stay, the size must be the index's. obstore shows no answer's headers when it reports an error, so a
    store's Retry-After is not seen: all threads that read from it back off together instead, for a pause that doubles.
    """

    direct = False
    max_depth = 64

    def __init__(self, uri: str, policy: RetryPolicy, counters: Counters, *, store: str) -> None:
        self.uri = uri
        self._policy, self._counters = policy, counters
        self._retry = Retry(uri, policy, counters, store=store)
        self._pace = Pace(policy)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._client: Any = None
        self._prefix = ""
        self._versions = Versions(uri)
        self._in_flight: set[Work[None]] = set()
        self._mine = threading.local()

    def read(self, name: str, start: int, length: int, *, file_bytes: int | None = None) -> memoryview:
        """See `Ranges.read`."""
        memory = np.empty(length, np.uint8).data
        self.scatter(name, start, [memory], file_bytes=file_bytes)
        return memory

    def scatter(
        self, name: str, start: int, views: Sequence[memoryview], *, file_bytes: int | None = None
    ) -> None:
        """See `Ranges.scatter`."""
        checked(name, self.uri)
        targets = [np.frombuffer(view, np.uint8) for view in views if view.nbytes]
        length = sum(target.nbytes for target in targets)
        if length:
            self._retry.run(
                name, lambda: self._attempt(name, start, length, targets, file_bytes), refresh=self._refresh
            )

    def close(self) -> None:
        """See `Ranges.close`."""
        self._retry.close()
        with self._lock:
            in_flight = list(self._in_flight)
        for work in in_flight:
            work.cancel()

    def _attempt(
        self, name: str, start: int, length: int, targets: list[np.ndarray[Any, Any]], file_bytes: int | None
    ) -> None:
        client, path = self._connected(name)
        self._mine.client = client
        limit_s = self._policy.stall_s + length / _SLOWEST_BYTES_PER_S
        read = _Read(self, client, path, name, start, length, targets, file_bytes)
        work = Work(read.within(limit_s), event_loop())
        with self._lock:
            self._in_flight.add(work)
        try:
            if self._retry.closed:
                work.cancel()
            wait(work, limit_s + 30)
        except concurrent.futures.CancelledError:
            raise ReadFailed(Kind.FINAL, "the read was cancelled") from None
        except concurrent.futures.TimeoutError as error:
            raise ReadFailed(Kind.PASSING, f"no answer within {limit_s:.0f} s") from error
        finally:
            with self._lock:
                self._in_flight.discard(work)
        self._counters.add("bytes", length)

    def _connected(self, name: str) -> tuple[Any, str]:
        """The client, made by the first read, and the path of a file in it."""
        if os.getpid() != self._process:
            raise StorageError(
                "this reader was opened in another process", where=self.uri, hint="open one after the fork"
            )
        with self._lock:
            if self._client is None:
                self._client, self._prefix = clients.connect(self.uri, self._policy)
            return self._client, f"{self._prefix}/{name}" if self._prefix else name

    def _refresh(self) -> bool:
        """Forgets the client whose credentials this thread saw refused; the next try looks them up anew."""
        with self._lock:
            if self._client is self._mine.client:
                self._client = None
        return True

    def check(self, name: str, meta: Any, end: int, file_bytes: int | None) -> None:
        """See `Versions.check`."""
        version = str(meta["e_tag"] or meta["last_modified"])
        self._versions.check(name, int(meta["size"]), version, end, file_bytes)


class _Read:
    """One try of a read, on the loop: a request, and a second one when the first is slow."""

    def __init__(
        self,
        reader: ObjectRanges,
        client: Any,
        path: str,
        name: str,
        start: int,
        length: int,
        targets: list[np.ndarray[Any, Any]],
        file_bytes: int | None,
    ) -> None:
        self.reader, self.client, self.path, self.name = reader, client, path, name
        self.start, self.length, self.targets, self.file_bytes = start, length, targets, file_bytes

    async def within(self, limit_s: float) -> None:
        """The read, with a limit."""
        pace = self.reader._pace
        began = time.monotonic()
        slow_after_s = pace.slow_after_s(self.length)
        try:
            async with asyncio.timeout(limit_s):
                if slow_after_s is None:
                    await self._request()
                else:
                    await self._hedged(slow_after_s)
        except TimeoutError as error:
            raise ReadFailed(Kind.PASSING, f"no whole answer within {limit_s:.0f} s") from error
        pace.served(self.length, time.monotonic() - began)

    async def _hedged(self, slow_after_s: float) -> None:
        first = asyncio.create_task(self._request())
        running = {first}
        try:
            done, _ = await asyncio.wait(running, timeout=slow_after_s)
            if not done and self.reader._pace.may_hedge():
                self.reader._counters.add("hedged")
                self.reader._counters.add("requests")
                running.add(asyncio.create_task(self._request()))
            failure: BaseException | None = None
            waiting = set(running)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        if task is not first:
                            self.reader._counters.add("hedges_won")
                        return
                    # What is wrong with the file itself is an answer; a connection that failed is none yet.
                    waiting = set() if isinstance(error, IsthmusError) else waiting
                    failure = error
            assert failure is not None
            raise failure
        finally:
            # Neither may write into the caller's memory after this.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _request(self) -> None:
        import obstore

        end = self.start + self.length
        try:
            answer = await obstore.get_async(self.client, self.path, options={"range": (self.start, end)})
        except Exception as error:
            # A range that the file does not have is refused before the file's size is told: ask for it.
            if is_range_refusal(error):
                meta = await obstore.head_async(self.client, self.path)
                self.reader.check(self.name, meta, end, self.file_bytes)
            raise
        self.reader.check(self.name, answer.meta, end, self.file_bytes)
        sink = _Sink(self.targets)
        if self.length <= _CHUNK:
            sink.write(await answer.bytes_async())
        else:
            async for chunk in answer.stream(min_chunk_size=_CHUNK):
                sink.write(chunk)
                del chunk  # or it would stay while the next one comes
        if sink.written != self.length:
            raise ReadFailed(Kind.PASSING, f"the body ended early: {sink.written:,} of {self.length:,} bytes")


class _Sink:
    """Bytes into the caller's views, one behind the other. numpy copies without the interpreter's lock."""

    def __init__(self, targets: list[np.ndarray[Any, Any]]) -> None:
        self._targets, self._index, self._offset = targets, 0, 0
        self.written = 0

    def write(self, chunk: Any) -> None:
        """Copies a chunk to where the last one ended; what is more than the views hold is only counted."""
        source = np.frombuffer(chunk, np.uint8)
        done = 0
        while done < source.nbytes and self._index < len(self._targets):
            target = self._targets[self._index]
            count = min(target.nbytes - self._offset, source.nbytes - done)
            target[self._offset : self._offset + count] = source[done : done + count]
            done += count
            self._offset += count
            if self._offset == target.nbytes:
                self._index, self._offset = self._index + 1, 0
        self.written += source.nbytes
