"""HTTP for the emulated services: routes, Azure's envelope, tokens, faults. Knows nothing of what the operations do."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from isthmus.emulators.azureml.faults import MESSAGES, Faults
from isthmus.emulators.azureml.identity import Tokens
from isthmus.emulators.azureml.rules import Refused, refuse


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked; `names` are the groups of the route's pattern."""

    method: str
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]
    base: str
    """The server's own address."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; the body is sent as JSON, None as nothing."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Response]


@dataclass(frozen=True, slots=True)
class Route:
    """An operation by its name, such as jobs.put, which faults refer to."""

    operation: str
    method: str
    pattern: re.Pattern[str]
    handler: Handler
    open: bool = False
    """Needs no token (it has a secret of its own)."""
    versioned: bool = True
    """Azure Resource Manager's: needs an api-version."""


def route(operation: str, method: str, pattern: str, handler: Handler, **options: bool) -> Route:
    """A route; {name} in the pattern stands for one part of the path. Paths are compared without case, as ARM does."""
    expression = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
    return Route(operation, method, re.compile(expression + "/?", re.IGNORECASE), handler, **options)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it was met, for tests: what was asked, and the status (None: the connection was broken)."""

    operation: str
    method: str
    path: str
    query: Mapping[str, str]
    status: int | None


class Server:
    """Serves routes on 127.0.0.1 from threads of its own until `stop`."""

    def __init__(
        self,
        routes: list[Route],
        *,
        port: int = 0,
        tokens: Tokens,
        faults: Faults,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.routes, self.tokens, self.faults = routes, tokens, faults
        self.seen: list[Seen] = []
        self._server = _Listener(("127.0.0.1", port), _handler_for(self), tls)
        self.port = int(self._server.server_address[1])
        self.address = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True, name="azureml-web"
        )
        self._thread.start()

    def stop(self) -> None:
        """Answers nothing more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route of a request.

        Raises:
            Refused: there is none.
        """
        for candidate in self.routes:
            if candidate.method == method and (match := candidate.pattern.fullmatch(path)):
                return candidate, {name: unquote(text) for name, text in match.groupdict().items() if text}
        raise refuse("not-emulated", f"The emulator knows no {method} {path}")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self._tls is not None:
            # The handshake comes with the first read, in the connection's own thread: no client holds up another.
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _handler_for(server: Server) -> type[BaseHTTPRequestHandler]:
    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 120
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: `Server.seen` keeps what tests ask for."""

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            query = {
                name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
            }
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = re.sub("//+", "/", parts.path)
            operation, response, broken = self._answer(path, query, raw)
            server.seen.append(
                Seen(operation, self.command, path, query, None if broken else response.status)
            )
            if broken:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(response)

        def _answer(self, path: str, query: Mapping[str, str], raw: bytes) -> tuple[str, Response, bool]:
            operation = "unknown"
            try:
                found, names = server.find(self.command, path)
                operation = found.operation
                fault = server.faults.take(operation)
                if fault is not None and isinstance(fault.kind, int):
                    code, message = MESSAGES.get(fault.kind, ("ServiceError", "an error on purpose"))
                    after = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
                    return (
                        operation,
                        Response(fault.kind, {"error": {"code": code, "message": message}}, after),
                        False,
                    )
                if fault is not None and fault.kind == "drop-before":
                    return operation, Response(), True
                response = self._call(found, names, path, query, raw)
                return operation, response, fault is not None
            except Refused as refused:
                return operation, Response(refused.rule.status, refused.body(), _challenge(refused)), False
            except Exception as error:  # noqa: BLE001 - a client must see that it was us, not a broken connection
                said = f"the emulator failed: {type(error).__name__}: {error}"
                return (
                    operation,
                    Response(500, {"error": {"code": "InternalServerError", "message": said}}),
                    False,
                )

        def _call(
            self, found: Route, names: Mapping[str, str], path: str, query: Mapping[str, str], raw: bytes
        ) -> Response:
            if not found.open:
                if why := server.tokens.why_not(self.headers.get("Authorization")):
                    raise refuse("token", why)
                if found.versioned and not query.get("api-version"):
                    raise refuse("api-version", "The api-version query parameter (?api-version=) is required")
            try:
                body = json.loads(raw) if raw else None
            except ValueError:
                raise refuse("body", "The body is not JSON") from None
            headers = {name.lower(): value for name, value in self.headers.items()}
            return found.handler(Request(self.command, path, names, query, body, headers, server.address))

        def _send(self, response: Response) -> None:
            data = b"" if response.body is None else json.dumps(response.body).encode()
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("x-ms-request-id", uuid.uuid4().hex)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _serve

    return Exchange


def _challenge(refused: Refused) -> dict[str, str]:
    if refused.rule.status != 401:
        return {}
    return {
        "WWW-Authenticate": f'Bearer authorization_uri="https://login.windows.net/", error="invalid_token", '
        f'error_description="{refused.message}"'
    }
