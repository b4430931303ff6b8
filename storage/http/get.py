"""One GET whose body the kernel puts where it belongs: into permuted slots of batches, with no copy in between.

The standard library speaks HTTP up to the end of the headers; the body is received from the socket itself, many pieces of
memory at a time. Less processor time than any library's client takes, with and without TLS (docs/streaming.md, "Figures").
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.storage.http.wire import MOST_ERROR_BYTES, Wire, refusal
from isthmus.storage.ranges.causes import Kind, ReadFailed

Check = Callable[[int, Mapping[str, str]], None]
"""Looks at an answer's status and headers (names in lower case) before a byte of it is kept; raises what is wrong."""

_MOST_VIEWS = 64
"""Pieces of memory that one call fills. The system's limit is 1,024; more than this saves nothing."""
_MOST_HINTS = 16
"""Answers of 102 or 103 before the one that counts."""
_MOST_AT_ONCE = 1 << 18
"""Bytes of a body in chunks."""
_GONE = (
    http.client.RemoteDisconnected,
    ConnectionResetError,
    BrokenPipeError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)
_WHOLE = sys.platform == "linux"
"""The kernel fills all of the memory before it wakes us, within a time limit of its own."""


class Get:
    """One GET. `run` is called once, by one thread; `cut` by any.

    Args:
        wire: to the server.
        stall_s: no byte for so long, and it is given up.
        limit_s: for the whole of it.
    """

    def __init__(self, wire: Wire, *, stall_s: float, limit_s: float) -> None:
        self._wire, self._stall_s, self._limit_s = wire, stall_s, limit_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False
        self._on_slow: Callable[[], None] | None = None
        self._slow_at = self._until = 0.0
        self.writing = False
        """Bytes may come into the caller's memory from now on."""

    def run(
        self,
        target: str,
        headers: Mapping[str, str],
        views: Sequence[memoryview],
        check: Check,
        *,
        slow_after_s: float | None = None,
        on_slow: Callable[[], None] | None = None,
    ) -> None:
        """Fills the views, one behind the other, with the body of the answer.

        Args:
            views: of bytes, none empty.
            on_slow: called once if the views are not full after `slow_after_s`; not at all without one.

        Raises:
            Refused: the answer is an error.
            ReadFailed, OSError, http.client.HTTPException: no whole answer; or what `check` raises.
        """
        now = time.monotonic()
        self._until = now + self._limit_s
        if on_slow is not None and slow_after_s is not None:
            self._on_slow, self._slow_at = on_slow, now + slow_after_s
        try:
            while True:
                connection, kept = self._wire.take()
                try:
                    good = self._run(connection, target, headers, views, check)
                except BaseException as error:
                    with self._lock:
                        self._socket = None
                    connection.close()
                    if self._cut:
                        raise ReadFailed(Kind.PASSING, "the read was cancelled") from error
                    if kept and not self.writing:
                        # One that the server closed meanwhile: the request did not begin. Or one that is dead.
                        self._wire.forget()
                        if isinstance(error, _GONE):
                            continue
                    raise
                with self._lock:
                    self._socket = None
                if good:
                    self._wire.give(connection)
                else:
                    connection.close()
                return
        finally:
            self._on_slow = None  # it leads back to who made this, and so to the caller's memory

    def cut(self) -> None:
        """Ends it: `run` raises soon, and not a byte is written after it has looked."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Of the plain socket: TLS's own would go on without its cipher.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(
        self,
        connection: http.client.HTTPConnection,
        target: str,
        headers: Mapping[str, str],
        views: Sequence[memoryview],
        check: Check,
    ) -> bool:
        """Whether the connection is good for another request."""
        if connection.sock is None:
            connection.connect()
        held: socket.socket = connection.sock
        held.settimeout(self._stall_s)
        with self._lock:
            if self._cut:
                raise ReadFailed(Kind.PASSING, "the read was cancelled")
            self._socket = held
        self._wire.begin(connection, "GET", target, headers)
        connection.endheaders()
        # Whatever goes wrong, the answer lets go of the socket, which it holds too.
        with contextlib.closing(self._answer(connection, held)) as response:
            found = {name.lower(): value for name, value in response.getheaders()}
            if response.status >= 300:
                raise refusal(response.status, found, response.read(MOST_ERROR_BYTES))
            check(response.status, found)
            with self._lock:
                if self._cut:
                    raise ReadFailed(Kind.PASSING, "the read was cancelled")
                self.writing = True
            if response.chunked:
                self._in_chunks(response, views)
            else:
                self._receive(response, held, views)
            held.settimeout(self._stall_s)
            return not response.will_close

    def _answer(self, connection: Any, held: socket.socket) -> http.client.HTTPResponse:
        """The answer, its headers read."""
        connection.response_class = functools.partial(
            _Answer, wait=lambda answer: self._first_byte(held, answer)
        )
        try:
            answer: http.client.HTTPResponse = connection.getresponse()
        finally:
            del connection.response_class
        return answer

    def _first_byte(self, held: socket.socket, answer: Any) -> None:
        """Waits for the answer to begin. What TLS says by itself, such as its session tickets, is none."""
        ready = select.poll()
        ready.register(held, select.POLLIN)
        secure = isinstance(held, ssl.SSLSocket)
        began = time.monotonic()
        held.settimeout(0)
        while True:
            if secure:
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer.peek(1)
                    break
            if ready.poll(1000 * self._wait_s()):
                if not secure:
                    break
                continue
            now = self._looked()
            if now >= self._until or now - began >= self._stall_s:
                raise ReadFailed(Kind.PASSING, f"no answer within {now - began:.0f} s")
        held.settimeout(self._stall_s)

    def _wait_s(self) -> float:
        """How long to wait for bytes before the clock is looked at."""
        now = time.monotonic()
        end = min(self._until, now + self._stall_s)
        return max(min(end, self._slow_at) - now if self._on_slow else end - now, 0.001)

    def _looked(self) -> float:
        """Now; says so when it is late."""
        now = time.monotonic()
        if self._on_slow and now >= self._slow_at:
            told, self._on_slow = self._on_slow, None
            told()
        return now

    def _receive(
        self, response: http.client.HTTPResponse, held: socket.socket, views: Sequence[memoryview]
    ) -> None:
        body: Any = response.fp  # what came with the headers lies in its buffer
        # When nothing does, it must not wait: that is for us to do, with an eye on the clock.
        held.settimeout(0)
        try:
            early = memoryview(body.peek())
        except ssl.SSLWantReadError:
            early = memoryview(b"")
        left = sum(view.nbytes for view in views)
        size = left
        if len(early) > left:
            raise ReadFailed(Kind.PASSING, "the answer holds more than was asked for")
        into = _Into(views)
        into.copy(early)
        left -= len(early)
        receive = self._receiver(held)
        last = time.monotonic()
        while left:
            count = receive(into)
            now = self._looked()
            if count is None:
                if now - last >= self._stall_s:
                    raise ReadFailed(Kind.PASSING, "no byte came within the limit")
            elif not count:
                raise ReadFailed(Kind.PASSING, f"the body ended early: {size - left:,} of {size:,} bytes")
            else:
                into.move(count)
                left -= count
                last = now
            if now >= self._until and left:
                raise ReadFailed(Kind.PASSING, f"no whole answer within {self._limit_s:.0f} s")

    def _receiver(self, held: socket.socket) -> Callable[[_Into], int | None]:
        """What fills the next views: the bytes that came, 0 at the end, None when none came in time."""
        flags = socket.MSG_WAITALL if _WHOLE else 0
        secure = isinstance(held, ssl.SSLSocket)
        limit_s = self._limit(held, secure)

        def receive(into: _Into) -> int | None:
            nonlocal limit_s
            if limit_s < self._stall_s and self._on_slow is None:
                limit_s = self._limit(held, secure)
            try:
                if secure:
                    return held.recv_into(into.first())
                return held.recvmsg_into(into.next(), 0, flags)[0]
            except (BlockingIOError, TimeoutError):
                return None

        return receive

    def _limit(self, held: socket.socket, secure: bool) -> float:
        """Sets how long one call may wait for bytes."""
        limit_s = self._wait_s()
        if secure or not _WHOLE:
            held.settimeout(limit_s)
        else:
            # Python's own limit would make the socket answer with whatever there is.
            held.settimeout(None)
            whole = int(limit_s)
            value = struct.pack("ll", whole, int((limit_s - whole) * 1e6))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        return limit_s

    def _in_chunks(self, response: http.client.HTTPResponse, views: Sequence[memoryview]) -> None:
        """A body whose length its sender did not know."""
        into, left = _Into(views), sum(view.nbytes for view in views)
        while left:
            data = response.read1(min(left, _MOST_AT_ONCE))
            if not data:
                raise ReadFailed(Kind.PASSING, "the body ended early")
            into.copy(memoryview(data))
            left -= len(data)
            if self._looked() >= self._until:
                raise ReadFailed(Kind.PASSING, f"no whole answer within {self._limit_s:.0f} s")
        if response.read(1):
            raise ReadFailed(Kind.PASSING, "the answer holds more than was asked for")


class _Answer(http.client.HTTPResponse):
    """An answer that is waited for in a way of the caller's."""

    def __init__(self, *arguments: Any, wait: Callable[[Any], None], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._wait: Callable[[Any], None] | None = wait

    def begin(self) -> None:
        """Reads the headers."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait(self.fp)
        super().begin()

    def _read_status(self) -> tuple[str, int, str]:
        """The status of the answer itself. What says that it is coming (102, 103) the library takes for an answer."""
        for _ in range(_MOST_HINTS):
            found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if not 101 < found[1] < 200:
                return found
            http.client.parse_headers(self.fp)
        raise http.client.BadStatusLine("no answer after many that say that it is coming")


class _Into:
    """The caller's memory, and how far it is filled."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views, self._at = views, 0
        self._part: memoryview | None = None
        """What is left of the view at `_at`, when a part of it is filled."""

    def first(self) -> memoryview:
        """The rest of the first view that is not full."""
        return self._part if self._part is not None else self._views[self._at]

    def next(self) -> list[memoryview]:
        """The next views to fill."""
        found = list(self._views[self._at : self._at + _MOST_VIEWS])
        if self._part is not None:
            found[0] = self._part
        return found

    def move(self, count: int) -> None:
        """So many bytes came."""
        views, at = self._views, self._at
        if self._part is not None:
            if count < self._part.nbytes:
                self._part = self._part[count:]
                return
            count -= self._part.nbytes
            self._part = None
            at += 1
        while count and count >= views[at].nbytes:
            count -= views[at].nbytes
            at += 1
        if count:
            self._part = views[at][count:]
        self._at = at

    def copy(self, data: memoryview) -> None:
        """Puts bytes into the next views."""
        while data:
            into = self.first()
            count = min(len(into), len(data))
            into[:count] = data[:count]
            self.move(count)
            data = data[count:]
