"""Certificates and small servers that speak TLS, chunks, redirects and CONNECT, for tests."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import ipaddress
import re
import selectors
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key, as PEM files; good for an hour."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


class Files(http.server.ThreadingHTTPServer):
    """Serves ranges of one body under every path, in a way that a test chooses.

    Attributes:
        chunked: the body comes in chunks, its length is not told.
        elsewhere: an address that every request is sent to instead.
        ignores_ranges: every answer is the whole body.
        hangs_up: the connection is closed after each answer, which does not say so.
        stalls: so many of the next answers stop at a share `stalls_at` of the body, until `release` is set.
        before: called with each request's handler before it answers; True: it has answered itself.
        log: path and headers of each request.
    """

    daemon_threads = True

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = body
        self.chunked = self.ignores_ranges = self.hangs_up = False
        self.elsewhere = ""
        self.before: Callable[[Any], bool | None] = lambda handler: None
        self.connections = self.stalls = 0
        self.stalls_at = 0.5
        self.release = threading.Event()
        self.log: list[tuple[str, dict[str, str]]] = []

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Counts connections."""
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no error of ours."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Files

    def do_GET(self) -> None:
        """One answer."""
        server = self.server
        server.log.append((self.path, dict(self.headers.items())))
        if server.before(self):
            return
        if server.elsewhere:
            self.send_response(302)
            self.send_header("Location", server.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last or len(server.body) - 1) + 1
        if server.ignores_ranges:
            start, end = 0, len(server.body)
        body = server.body[start:end]
        self.send_response(200 if server.ignores_ranges else 206)
        if not server.ignores_ranges:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(server.body)}")
        self.send_header("ETag", '"one"')
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, len(body), 70_000):
                piece = body[at : at + 70_000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if server.stalls:
                server.stalls -= 1
                self.wfile.write(body[: int(len(body) * server.stalls_at)])
                server.release.wait(60)
            else:
                self.wfile.write(body)
        self.close_connection = server.hangs_up

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def files(body: bytes, pair: tuple[Path, Path] | None = None) -> Iterator[tuple[Files, str]]:
    """A `Files` server and its address, with TLS if a certificate is given."""
    server = Files(body)
    if pair is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server, f"{'https' if pair else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()


class _Tunnel(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        """CONNECT, or a whole address; then bytes both ways."""
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += self.request.recv(4096)
        method, target, _ = asked.split(b" ", 2)
        server: Any = self.server
        who = re.search(rb"(?i)proxy-authorization: basic (\S+)", asked)
        server.asked.append(
            (method.decode(), target.decode(), base64.b64decode(who[1]).decode() if who else "")
        )
        if server.refusals:
            server.refusals -= 1
            self.request.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            return
        place = target if method == b"CONNECT" else target.removeprefix(b"http://").partition(b"/")[0]
        host, _, port = place.decode().rpartition(":")
        with socket.create_connection((host, int(port))) as other, selectors.DefaultSelector() as waiting:
            if method == b"CONNECT":
                self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                other.sendall(asked.replace(b"http://" + place, b"", 1))
            ends = [self.request, other]
            for end in ends:
                waiting.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select():
                    end: Any = key.fileobj
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if end is self.request and method != b"CONNECT":
                        data = data.replace(b"http://" + place, b"", 1)
                    ends[ends.index(end) - 1].sendall(data)


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, Any]]:
    """An HTTP proxy: its address; the server, whose `asked` holds (method, target, who) and `refusals` how often it is busy."""
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Tunnel)
    server.daemon_threads = True
    server.asked, server.refusals = [], 0
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", server
    finally:
        server.shutdown()
        server.server_close()
