"""HTTP for bulk bytes: kept connections, bodies sent from and received into the caller's memory, no copy in between.

The standard library's client takes less of the processor than any other that we measured (docs/streaming.md, "Figures"), and
what reads and copies need of S3 and Blob is a dozen requests. It shows an answer's headers, so a Retry-After is obeyed.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import select
import ssl
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from isthmus.storage.ranges.causes import Cause, Kind, ReadFailed, by_status

_SLICE = 256 << 10
"""Bytes received at once, and sent at once where a limit on the bandwidth counts them: what fits a core's cache."""
_DAMAGED = {"BadDigest", "Md5Mismatch", "Crc64Mismatch", "XAmzContentChecksumMismatch", "InvalidDigest"}
"""How stores say that a body is not that of its checksum."""
MOST_ERROR_BYTES = 1 << 16
_IDLE_S = 30.0
"""For which a connection is kept. Firewalls forget those that are silent for minutes, stores hang up after less."""
_MOST_BODY_BYTES = 64 << 20
"""Of an answer that is kept in memory: a page of a listing."""


class Refused(ReadFailed):
    """A store answered with an error."""

    def __init__(self, status: int, code: str, headers: Mapping[str, str]) -> None:
        super().__init__(Kind.FINAL, f"the store refused the request ({status} {code})")
        self.status, self.code, self.headers = status, code, headers
        if code in _DAMAGED:
            self.cause = Cause(Kind.PASSING, f"the bytes changed on the way ({status} {code})")
            return
        self.cause = by_status(status, code, headers.get("retry-after")) or Cause(
            Kind.FINAL, f"the store answered {status} {code}".rstrip()
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    crc32: int = 0
    """Of what went into the caller's memory, taken while it was in the processor's cache."""


class Wire:
    """Connections to one host.

    Args:
        address: scheme, host and port, such as https://account.blob.core.windows.net.
        stall_s: no byte for so long, also while a connection is made, and a request is given up.
        pace: called with a number of bytes before they go out or after they came in; it sleeps to keep a bandwidth.
    """

    def __init__(self, address: str, stall_s: float, pace: Callable[[int], None] | None = None) -> None:
        parts = urlsplit(address)
        self.host = parts.netloc.rpartition("@")[2]
        self._secure = parts.scheme == "https"
        self._name, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._proxy = _proxy_of(self.host, parts.scheme)
        self._stall_s, self._pace = stall_s, pace
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._context = _tls() if self._secure else None

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview | bytes | None = None,
        into: memoryview | None = None,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        """One request.

        Args:
            target: path and query, quoted.
            into: memory that an answer of success fills exactly.
            accept: statuses of refusal that the caller wants to see instead of an error.

        Raises:
            Refused: the store's answer is an error.
            ReadFailed, OSError, http.client.HTTPException: no whole answer.
        """
        while True:
            connection, kept = self.take()
            try:
                return self._ask(connection, method, target, headers, body, into, accept)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                connection.close()
                # A kept connection that the server closed meanwhile; the request did not begin.
                if not kept:
                    raise
            except BaseException:
                connection.close()
                raise

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection for one request, and whether it was used before; a new one is not connected yet."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not _readable(connection.sock):
                return connection, True
            # Silent for so long that what lies between may have forgotten it; or it hung up, or says what nobody asked.
            connection.close()
        return self._connect(), False

    def give(self, connection: http.client.HTTPConnection) -> None:
        """A connection whose answer was read to its end is kept for the next request."""
        with self._lock:
            if not self._closed:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def forget(self) -> None:
        """Closes the connections that are not in use: one of them turned out to be dead, and the others may be."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def begin(
        self, connection: http.client.HTTPConnection, method: str, target: str, headers: Mapping[str, str]
    ) -> None:
        """Begins a request; `endheaders` sends it."""
        via = self._proxy
        if via is not None and not self._secure:
            target = f"http://{self.host}{target}"
            headers = {**headers, **via[2]}
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", self.host)
            connection.putheader("Accept-Encoding", "identity")
            for name, value in headers.items():
                connection.putheader(name, value)
        except (ValueError, http.client.InvalidURL):
            # Its words would show what was to be sent.
            raise ReadFailed(
                Kind.FINAL, "the address or the credentials hold a character that no request may"
            ) from None

    def close(self) -> None:
        """Closes the connections that are not in use; those in use are closed when they are given back."""
        with self._lock:
            self._closed = True
        self.forget()

    def _connect(self) -> http.client.HTTPConnection:
        via = self._proxy
        host, port = (via[0], via[1]) if via else (self._name, self._port)
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=self._stall_s, context=self._context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._stall_s)
        if via and self._secure:
            connection.set_tunnel(self._name, self._port, headers=via[2])
        return connection

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview | bytes | None,
        into: memoryview | None,
        accept: tuple[int, ...],
    ) -> Answer:
        self.begin(connection, method, target, headers)
        if body is not None or method in {"PUT", "POST"}:
            connection.putheader("Content-Length", str(memoryview(body or b"").nbytes))
        try:
            connection.endheaders()
            if body is not None:
                self._send(connection, memoryview(body))
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server may refuse before it has read all: its answer says why.
            try:
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                raise error from None
        else:
            response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        if response.status >= 300 and response.status not in accept:
            text = response.read(MOST_ERROR_BYTES)
            connection.close()
            raise refusal(response.status, found, text)
        data, crc = b"", 0
        if into is not None and response.status < 300:
            crc = self._receive(response, into)
        elif method != "HEAD":
            data = response.read(_MOST_BODY_BYTES)
        if response.will_close or not response.isclosed():
            connection.close()
        else:
            self.give(connection)
        return Answer(response.status, found, data, crc)

    def _send(self, connection: http.client.HTTPConnection, body: memoryview) -> None:
        if self._pace is None:
            connection.send(body)
            return
        for start in range(0, len(body), _SLICE):
            piece = body[start : start + _SLICE]
            self._pace(len(piece))
            connection.send(piece)

    def _receive(self, response: http.client.HTTPResponse, into: memoryview) -> int:
        done = crc = 0
        while done < len(into):
            piece = into[done : done + _SLICE]
            count = response.readinto(piece)
            if not count:
                raise ReadFailed(Kind.PASSING, f"the body ended early: {done:,} of {len(into):,} bytes")
            if self._pace is not None:
                self._pace(count)
            crc = zlib.crc32(piece[:count], crc)
            done += count
        if response.read(1):
            raise ReadFailed(Kind.PASSING, "the answer holds more than was asked for")
        return crc


def refusal(status: int, headers: dict[str, str], body: bytes) -> Refused:
    """An answer that is an error. A bucket's region may be in its body alone: it is put among the headers."""
    if region := re.search(rb"<Region>([\w-]{1,40})</Region>", body):
        headers.setdefault("x-amz-bucket-region", region[1].decode())
    return Refused(status, headers.get("x-ms-error-code") or error_code(body), headers)


def error_code(body: bytes) -> str:
    """The store's word for an error, from its XML."""
    found = re.search(rb"<Code>(\w{1,60})</Code>", body)
    return found[1].decode() if found else ""


def _readable(held: Any) -> bool:
    """Whether something came on a connection that nobody asks anything of."""
    if held is None:
        return True
    ready = select.poll()
    ready.register(held, select.POLLIN)
    return bool(ready.poll(0))


def _proxy_of(host: str, scheme: str) -> tuple[str, int, dict[str, str]] | None:
    """The environment's proxy for a host: its host and port, and the headers that it wants."""
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    headers = {}
    if via.username:
        who = f"{unquote(via.username)}:{unquote(via.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(who.encode()).decode()}"
    return via.hostname or "", via.port or 8080, headers


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if bundle := os.environ.get(name):
            with contextlib.suppress(OSError, ssl.SSLError):
                context.load_verify_locations(bundle)
    return context
