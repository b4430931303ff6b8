"""An HTTP server that misbehaves on demand: a folder, or another server, with faults. `servers` says how tests get one."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.client
import http.server
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]
    at: float = field(default_factory=time.monotonic)

    def header(self, name: str) -> str:
        """A header's value, whatever the case the client wrote its name in; empty without one."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), "")


@dataclass
class Answer:
    """What the server is about to say, and how it will misbehave while saying it."""

    status: int
    headers: dict[str, str]
    body: bytes
    send: int | None = None
    """Bytes of the body that are really sent; None: all."""
    then: str = "close"
    """What follows when not all are sent: close, reset, stall."""
    wait_s: float = 0.0
    """Before the first byte."""


Fault = Callable[[Answer], Answer]
_NAMES = {name.lower(): name for name in ("ETag", "Content-Range", "Content-Length")}
"""The names that faults change, as they write them: servers differ in their case."""


def refused(status: int, code: str = "", headers: dict[str, str] | None = None) -> Fault:
    """An error answer with the store's code for it, in the form of S3 (and, by a header, of Blob)."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>asked for by a test</Message></Error>".encode()
    extra = {
        "Content-Type": "application/xml",
        **({"x-ms-error-code": code} if code else {}),
        **(headers or {}),
    }
    return lambda answer: Answer(status, extra, body)


def slow_down(retry_after: float | None = None) -> Fault:
    """503 SlowDown."""
    return refused(503, "SlowDown", {} if retry_after is None else {"Retry-After": f"{retry_after:g}"})


def too_many(retry_after: float | None = None) -> Fault:
    """429."""
    return refused(429, "TooManyRequests", {} if retry_after is None else {"Retry-After": f"{retry_after:g}"})


def expired(status: int = 400) -> Fault:
    """ExpiredToken: S3 says it with 400, some other stores with 403."""
    return refused(status, "ExpiredToken")


def reset(after: float = 0.5) -> Fault:
    """The connection is reset after this share of the body."""
    return lambda answer: replace(answer, send=int(len(answer.body) * after), then="reset")


def truncated(keep: float = 0.5, *, honest: bool) -> Fault:
    """The body ends early; honest: Content-Length says so, otherwise it promises all and the connection is closed."""

    def cut(answer: Answer) -> Answer:
        kept = int(len(answer.body) * keep)
        return replace(answer, body=answer.body[:kept]) if honest else replace(answer, send=kept)

    return cut


def wrong_etag() -> Fault:
    """The headers of another version of the file."""
    return lambda answer: replace(answer, headers={**answer.headers, "ETag": '"another-version"'})


def wrong_length(change: int = 1) -> Fault:
    """Content-Range names another size of the whole file."""

    def lie(answer: Answer) -> Answer:
        span, _, size = answer.headers.get("Content-Range", "bytes 0-0/1").rpartition("/")
        return replace(answer, headers={**answer.headers, "Content-Range": f"{span}/{int(size) + change}"})

    return lie


def wrong_range(shift: int = 5) -> Fault:
    """Content-Range names bytes other than those asked for."""

    def lie(answer: Answer) -> Answer:
        first, last, size = map(int, re.findall(r"\d+", answer.headers.get("Content-Range", "bytes 0-0/1")))
        moved = f"bytes {first + shift}-{last + shift}/{size}"
        return replace(answer, headers={**answer.headers, "Content-Range": moved})

    return lie


def stall(after: float = 0.5) -> Fault:
    """Silence after this share of the body, until the client hangs up."""
    return lambda answer: replace(answer, send=int(len(answer.body) * after), then="stall")


def flipped(at: float = 0.5) -> Fault:
    """One byte of the body differs."""

    def flip(answer: Answer) -> Answer:
        body = bytearray(answer.body)
        body[int((len(body) - 1) * at)] ^= 0xFF
        return replace(answer, body=bytes(body))

    return flip


def late(seconds: float) -> Fault:
    """The first byte comes late."""
    return lambda answer: replace(answer, wait_s=seconds)


@dataclass
class _Rule:
    fault: Fault
    times: float
    match: str
    after: int
    method: str
    when: Callable[[Request], bool] | None


class FaultyServer:
    """A folder, or another server, with faults. Start it with `with`, or take it from the fixture `faulty`."""

    def __init__(self, source: Path | str) -> None:
        self.source = source
        self.requests: list[Request] = []
        self.port = 0
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._connections: set[socket.socket] = set()
        self._server: _Listener | None = None

    @property
    def url(self) -> str:
        """The address, also while it refuses connections."""
        return f"http://127.0.0.1:{self.port}"

    def fail(
        self,
        fault: Fault,
        *,
        times: float = 1,
        match: str = "",
        after: int = 0,
        method: str = "GET",
        when: Callable[[Request], bool] | None = None,
    ) -> None:
        """Adds a rule: the fault for so many requests of a method whose path contains `match`, after so many without it."""
        with self._lock:
            self._rules.append(_Rule(fault, times, match, after, method, when))

    def forgive(self) -> None:
        """Drops all rules."""
        with self._lock:
            self._rules.clear()

    def count(self, method: str = "GET", match: str = "") -> int:
        """How many requests of a method came for paths that contain `match`."""
        return sum(request.method == method and match in request.path for request in self.requests)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Inside the block the port refuses connections, and those that were open are cut."""
        self.down()
        try:
            yield
        finally:
            self.up()

    def up(self) -> None:
        """Listens, always on the same port."""
        self._stop.clear()
        self._server = _Listener(self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Refuses connections and cuts those that are open."""
        server, self._server = self._server, None
        if server is None:
            return
        self._stop.set()
        server.shutdown()
        server.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FaultyServer:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.method != request.method or rule.match not in request.path or rule.times <= 0:
                    continue
                if rule.when is not None and not rule.when(request):
                    continue
                if rule.after > 0:
                    rule.after -= 1
                    continue
                rule.times -= 1
                return rule.fault
        return None


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: FaultyServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", owner.port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Listener

    def log_message(self, *_: object) -> None:
        """Silent."""

    def setup(self) -> None:
        super().setup()
        with self.server.owner._lock:
            self.server.owner._connections.add(self.connection)

    def finish(self) -> None:
        with self.server.owner._lock:
            self.server.owner._connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle_expect_100(self) -> bool:
        """botocore waits for it before it sends a body."""
        go_on = super().handle_expect_100()
        self.wfile.flush()
        return go_on

    def _answer(self) -> None:
        owner = self.server.owner
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers.items()))
        fault = owner._fault_for(request)
        if isinstance(owner.source, str):
            answer = _ask(owner.source, request, sent)
        else:
            answer = _from_folder(owner.source, request)
        if fault is not None:
            answer = fault(answer)
        if answer.wait_s and owner._stop.wait(answer.wait_s):
            return
        self._send(answer, owner)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _send(self, answer: Answer, owner: FaultyServer) -> None:
        self.send_response_only(answer.status)
        known = {name.lower() for name in answer.headers}
        for name, value in answer.headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        if "date" not in known:
            self.send_header("Date", email.utils.formatdate(usegmt=True))
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        kept = answer.body if answer.send is None else answer.body[: answer.send]
        self.wfile.write(kept)
        self.wfile.flush()
        if answer.send is None:
            return
        self.close_connection = True
        if answer.then == "reset":
            # Time for the bytes to arrive: a reset overtakes what the client has not read yet.
            owner._stop.wait(0.05)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif answer.then == "stall":
            while not owner._stop.wait(0.02):
                self.connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    if not self.connection.recv(1):
                        return


def _from_folder(folder: Path, request: Request) -> Answer:
    """The folder as a plain web server shows it: ranges, ETag, If-Match, HEAD."""
    name = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path).lstrip("/")
    path = folder / name
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        return refused(404, "NoSuchKey")(Answer(404, {}, b""))
    status = path.stat()
    data = path.read_bytes()
    etag = (
        '"' + hashlib.md5(f"{status.st_ino} {status.st_mtime_ns} {status.st_size}".encode()).hexdigest() + '"'
    )
    headers = {
        "ETag": etag,
        "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if request.header("If-Match") not in {"", etag, "*"}:
        return Answer(412, {}, b"")
    if request.method == "HEAD":
        return Answer(200, {**headers, "Content-Length": str(len(data))}, b"")
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.header("Range"))
    if wanted is None:
        return Answer(200, headers, data)
    first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
    if first >= len(data):
        return Answer(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
    headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
    return Answer(206, headers, data[first : last + 1])


def _ask(upstream: str, request: Request, sent: bytes) -> Answer:
    """The same request to another server, its headers (and so its signature) untouched."""
    parts = urllib.parse.urlsplit(upstream)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name.lower() not in {"connection", "expect"}:
                connection.putheader(name, value)
        connection.endheaders(sent or None)
        response = connection.getresponse()
        headers = {_NAMES.get(name.lower(), name): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        connection.close()
