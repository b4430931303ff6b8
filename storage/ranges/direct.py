"""Byte ranges of s3://, az:// and http(s):// received straight into the caller's memory, each read in its caller's thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from isthmus.errors import IsthmusError, NotInstalled, StorageError
from isthmus.storage.http.address import Address, WebAddress, address_of
from isthmus.storage.http.get import Get
from isthmus.storage.http.wire import Refused, Wire
from isthmus.storage.ranges.causes import Kind, ReadFailed
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.pace import Pace
from isthmus.storage.ranges.paths import checked
from isthmus.storage.ranges.retry import Retry, RetryPolicy
from isthmus.storage.ranges.spec import Ranges
from isthmus.storage.ranges.versions import Versions

_SLOWEST_BYTES_PER_S = 100_000
"""A connection that is slower than this for a whole read is given up: the store is as good as stalled."""
_CONNECT_S = 10.0


class DirectRanges:
    """`Ranges` of an object store or a web server, over connections of our own.

    The answer's headers say which file it is of: the ETag that was seen first under a name (without one, the time of
    change) must stay, the size must be the index's. A Retry-After is obeyed.

    Args:
        instead: the reader that takes over where this one cannot go: a web server that sends us elsewhere, credentials that
            only another library finds. None: there is no other.
    """

    direct = False
    max_depth = 64

    def __init__(
        self,
        uri: str,
        policy: RetryPolicy,
        counters: Counters,
        *,
        store: str,
        instead: Callable[[], Ranges] | None = None,
    ) -> None:
        self.uri = uri
        self._policy, self._counters, self._instead = policy, counters, instead
        self._retry = Retry(uri, policy, counters, store=store)
        self._pace, self._versions = Pace(policy), Versions(uri)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        """Held while credentials are looked up, which may take long: closing does not wait for it."""
        self._address: Address | None = None
        self._wire: Wire | None = None
        self._other: Ranges | None = None
        self._age = 0
        """How often credentials were looked up anew."""
        self._in_flight: set[Get] = set()
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
        if self._other is None:
            into = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]
            into = [view for view in into if view.nbytes] if not all(into) else into
            length = sum(map(len, into))
            if not length:
                return
            try:
                self._retry.run(
                    name, lambda: self._attempt(name, start, length, into, file_bytes), refresh=self._refresh
                )
                return
            except _Elsewhere:
                pass
        assert self._other is not None
        self._other.scatter(name, start, views, file_bytes=file_bytes)

    def close(self) -> None:
        """See `Ranges.close`."""
        if os.getpid() != self._process:
            return  # the connections of a child after a fork are its parent's
        self._retry.close()
        with self._lock:
            in_flight, wire, other = list(self._in_flight), self._wire, self._other
        for get in in_flight:
            get.cut()
        if wire is not None:
            wire.close()
        if other is not None:
            other.close()

    def _attempt(
        self, name: str, start: int, length: int, views: Sequence[memoryview], file_bytes: int | None
    ) -> None:
        try:
            address, wire = self._connected()
        except NotInstalled as error:
            raise self._elsewhere(error) from error
        slow_after_s = self._pace.slow_after_s(length)
        read = _Read(self, address, wire, name, start, length, views, file_bytes)
        began = time.monotonic()
        try:
            read.run(slow_after_s)
        except Refused as error:
            if error.status in {301, 302, 303, 307, 308, 400} and self._moved(address, wire, error):
                raise ReadFailed(Kind.PASSING, "the bucket lies in another region") from error
            if 300 <= error.status < 400:
                if isinstance(address, WebAddress):
                    raise self._elsewhere(ReadFailed(Kind.FINAL, "the server sends us elsewhere")) from error
                # A bucket that was just made, say: for a while its requests go to another door.
                raise ReadFailed(Kind.PASSING, f"the store sends us elsewhere ({error.status})") from error
            if error.status == 416:
                # The file does not have the range: it says what it has, here or when asked.
                told = error.headers.get("content-range", "").rpartition("/")[2]
                headers: Mapping[str, str] = error.headers
                if not told.isdigit():
                    target, sent = address.request("HEAD", name)
                    headers = wire.ask("HEAD", target, sent).headers
                    told = headers.get("content-length", "")
                if told.isdigit():
                    version = headers.get("etag") or headers.get("last-modified", "")
                    self._versions.check(name, int(told), version, start + length, file_bytes)
            raise
        self._pace.served(length, time.monotonic() - began)
        self._counters.add("bytes", length)

    def _connected(self) -> tuple[Address, Wire]:
        """Who is asked, made by the first read."""
        if os.getpid() != self._process:
            raise StorageError(
                "this reader was opened in another process", where=self.uri, hint="open one after the fork"
            )
        with self._looking:
            self._mine.age = self._age
            address = self._address = self._address or address_of(self.uri)
        with self._lock:
            if self._wire is None:
                # A `Get` has limits of its own: this one is for making connections.
                self._wire = Wire(address.server, min(self._policy.stall_s, _CONNECT_S))
            return address, self._wire

    def _moved(self, address: Address, wire: Wire, error: Refused) -> bool:
        """Whether another server is to be asked, as this answer says, or another thread's before it."""
        with self._lock:
            if self._wire is wire:
                if not address.moved(error.status, error.headers):
                    return False
                self._wire = None
        wire.forget()
        return True

    def _refresh(self) -> bool:
        """Looks up credentials anew, unless another thread has since this one's were refused."""
        with self._looking:
            if self._address is None:
                return False
            if self._mine.age == self._age:
                if not self._address.refresh():
                    return False
                self._age += 1
            return True

    def _elsewhere(self, why: IsthmusError | ReadFailed) -> Exception:
        """Lets the other reader take over from now on; what to raise."""
        if self._instead is None:
            return why
        with self._lock:
            self._other = self._other or self._instead()
        return _Elsewhere()

    def begun(self, get: Get) -> None:
        """A request is in flight: `close` will cut it."""
        with self._lock:
            self._in_flight.add(get)
        if self._retry.closed:
            get.cut()

    def ended(self, get: Get) -> None:
        """It is not any more."""
        with self._lock:
            self._in_flight.discard(get)


class _Elsewhere(IsthmusError):
    """Another reader is to read; never leaves this file."""

    def __init__(self) -> None:
        super().__init__("elsewhere")


class _Read:
    """One try of a read: a request, and a second one when the first is slow."""

    def __init__(
        self,
        reader: DirectRanges,
        address: Address,
        wire: Wire,
        name: str,
        start: int,
        length: int,
        views: Sequence[memoryview],
        file_bytes: int | None,
    ) -> None:
        self.reader, self.address, self.wire, self.name = reader, address, wire, name
        self.start, self.length, self.views, self.file_bytes = start, length, views, file_bytes
        self._limit_s = reader._policy.stall_s + length / _SLOWEST_BYTES_PER_S
        self._first = self._get()
        self._second: Get | None = None
        self._thread: threading.Thread | None = None
        self._won = False
        self._failure: BaseException | None = None

    def _get(self) -> Get:
        return Get(self.wire, stall_s=self.reader._policy.stall_s, limit_s=self._limit_s)

    def run(self, slow_after_s: float | None) -> None:
        """The read. Nothing writes into the caller's memory after this has returned."""
        self.reader.begun(self._first)
        try:
            self._ask(self._first, slow_after_s)
        except BaseException as error:
            if self._thread is None:
                raise
            # What is wrong with the file itself is an answer; a connection that failed is none yet.
            if isinstance(error, Exception) and not isinstance(error, IsthmusError):
                self._thread.join()
            self._end_second()
            if self._won:
                self.reader._counters.add("hedges_won")
                return
            raise (self._failure if isinstance(self._failure, IsthmusError) else error) from None
        else:
            self._end_second()
        finally:
            self.reader.ended(self._first)
            self._failure = None  # its traceback leads back here, and to the caller's memory

    def _ask(self, get: Get, slow_after_s: float | None = None) -> None:
        span = f"bytes={self.start}-{self.start + self.length - 1}"
        target, headers = self.address.request("GET", self.name, headers={"Range": span})
        get.run(target, headers, self.views, self._check, slow_after_s=slow_after_s, on_slow=self._slow)

    def _check(self, status: int, headers: Mapping[str, str]) -> None:
        """That the answer is of the range and the file that were asked for."""
        end = self.start + self.length
        span, _, whole = headers.get("content-range", "").removeprefix("bytes ").partition("/")
        length = headers.get("content-length", "")
        if status != 206:
            coded = headers.get("content-encoding", "identity") != "identity"
            if self.start or length != str(self.length) or coded:
                raise ReadFailed(Kind.FINAL, "the server does not answer range requests")
            whole, span = length, f"0-{end - 1}"
        if whole.isdigit():
            version = headers.get("etag") or headers.get("last-modified", "")
            self.reader._versions.check(self.name, int(whole), version, end, self.file_bytes)
        if span != f"{self.start}-{end - 1}" or (length and length != str(self.length)):
            raise ReadFailed(Kind.PASSING, "the answer is of another range than was asked for")

    def _slow(self) -> None:
        if self._second is not None or not self.reader._pace.may_hedge():
            return
        thread = threading.Thread(target=self._run_second, name="isthmus-hedge", daemon=True)
        self._second = self._get()
        try:
            thread.start()
        except RuntimeError:  # no thread is left: the first goes on alone
            self._second = None
            return
        self._thread = thread
        self.reader._counters.add("hedged")
        self.reader._counters.add("requests")

    def _run_second(self) -> None:
        assert self._second is not None
        self.reader.begun(self._second)
        try:
            self._ask(self._second)
            self._won = True
        except BaseException as error:  # noqa: BLE001 - the first's caller raises it
            self._failure = error
        finally:
            self.reader.ended(self._second)
        if self._won or isinstance(self._failure, IsthmusError):
            self._first.cut()

    def _end_second(self) -> None:
        if self._second is None or self._thread is None:
            return
        self._second.cut()
        if self._second.writing:  # else it will not begin to
            self._thread.join()
