"""One HTTP endpoint for all services: training jobs and quotas are ours, the rest (S3, STS, IAM, ECR, logs, ...) is moto's."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

from isthmus.emulators.faults import Faults
from isthmus.emulators.sagemaker.errors import SERVER_SIDE, ServiceError
from isthmus.emulators.sagemaker.permissions import Denied, simulated

Wsgi = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]
Answer = Callable[[str, dict[str, Any], str], dict[str, Any] | None]
"""Operation, request, region -> its answer; None when it is moto's."""
STATUS = {400: "Bad Request", 403: "Forbidden", 404: "Not Found", 429: "Too Many Requests"}
STATUS |= {500: "Internal Server Error", 503: "Service Unavailable"}
CODES = {
    403: "AccessDeniedException",
    429: "ThrottlingException",
    500: "InternalFailure",
    503: "ServiceUnavailable",
}
S3_CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}
# S3 tells these with a status of their own; a JSON service tells every refusal with 400.
S3_STATUS = {code: status for status, code in S3_CODES.items()}
SCOPE = re.compile(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")


class Front:
    """The WSGI application: what fails on purpose, what is ours, what goes to moto.

    Args:
        sagemaker: answers the operations of SageMaker that are ours.
        quotas: answers Service Quotas about SageMaker.
        control: answers POST /emulator/<verb>, for whoever drives the emulator from another process.
        streams: names of the log streams of a group that begin with a prefix: group, prefix, region.
    """

    def __init__(
        self,
        *,
        faults: Faults,
        denied: Denied,
        region: str,
        sagemaker: Answer,
        quotas: Answer,
        control: Callable[[str, dict[str, Any]], dict[str, Any]],
        streams: Callable[[str, str, str], list[str]],
    ) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.moto: Wsgi = DomainDispatcherApplication(create_backend_app)
        self._faults = faults
        self._denied = denied
        self._region = region
        self._ours = {"SageMaker": sagemaker, "ServiceQuotasV20190624": quotas}
        self._control = control
        self._streams = streams

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        if environ["PATH_INFO"].startswith("/emulator/"):
            return self._controlled(environ, start_response)
        operation = self._operation(environ)
        how = self._faults.take(operation)
        if how == "drop-before":
            return dropped(environ)
        if how == "drop-after":
            # The effect happens, the answer does not arrive.
            for _ in self._answer(operation, environ, lambda *_: lambda _: None):
                pass
            return dropped(environ)
        if how is not None:
            return failed(environ, start_response, how)
        return self._answer(operation, environ, start_response)

    def _operation(self, environ: WSGIEnvironment) -> str:
        target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
        if target:
            return target.rpartition(".")[2]
        if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
            return parse_qs(body(environ).decode("utf-8", "replace")).get("Action", ["?"])[0]
        return f"{self._scope(environ)[1]}:{environ['REQUEST_METHOD']}"

    def _scope(self, environ: WSGIEnvironment) -> tuple[str, str]:
        """Region and service that a request is signed for."""
        found = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        return (found[1], found[2]) if found else (self._region, "s3")

    def _answer(
        self, operation: str, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        api = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[0]
        region = self._scope(environ)[0]
        if api in self._ours:
            try:
                answer = self._ours[api](operation, json.loads(body(environ) or b"{}"), region)
            except ServiceError as error:
                return told(start_response, error)
            if answer is not None:
                return replied(start_response, answer)
        elif operation == "SimulatePrincipalPolicy":
            form = parse_qs(body(environ).decode())
            text = simulated(self._denied, listed(form, "ActionNames"), listed(form, "ResourceArns"))
            return replied(start_response, text.encode(), "text/xml")
        elif operation == "FilterLogEvents":
            # moto looks at the names of streams only.
            request = json.loads(body(environ))
            if prefix := request.pop("logStreamNamePrefix", None):
                request["logStreamNames"] = self._streams(request["logGroupName"], prefix, region)
                if not request["logStreamNames"]:
                    return replied(start_response, {"events": [], "searchedLogStreams": []})
                renew(environ, json.dumps(request).encode())
        return self.moto(environ, start_response)

    def _controlled(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            request = json.loads(body(environ) or b"{}")
            answer = self._control(environ["PATH_INFO"].removeprefix("/emulator/"), request)
        except ServiceError as error:
            return told(start_response, error)
        return replied(start_response, answer)


def body(environ: WSGIEnvironment) -> bytes:
    """A request's body; it can be read again."""
    data: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(data)
    return data


def renew(environ: WSGIEnvironment, data: bytes) -> None:
    """Puts another body in place."""
    environ["wsgi.input"] = io.BytesIO(data)
    environ["CONTENT_LENGTH"] = str(len(data))


def listed(form: dict[str, list[str]], name: str) -> list[str]:
    """A list parameter of the query protocol."""
    return [values[0] for key, values in form.items() if key.startswith(f"{name}.member.")]


def replied(
    start_response: StartResponse,
    content: dict[str, Any] | bytes,
    kind: str = "application/x-amz-json-1.1",
    status: str = "200 OK",
) -> list[bytes]:
    """An answer."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = [("Content-Type", kind), ("Content-Length", str(len(data))), ("x-amzn-RequestId", "emulated")]
    start_response(status, headers)
    return [data]


def told(start_response: StartResponse, error: ServiceError) -> list[bytes]:
    """An error in the JSON protocol."""
    content = {"__type": error.code, "message": error.message, "Message": error.message}
    return replied(start_response, content, status=f"{error.status} {STATUS.get(error.status, 'Error')}")


def failed(environ: WSGIEnvironment, start_response: StartResponse, how: str | int) -> list[bytes]:
    """The answer to a request that fails on purpose, in the words of its service."""
    if environ.get("HTTP_X_AMZ_TARGET"):
        code = CODES.get(how, "InternalFailure") if isinstance(how, int) else how
        error = ServiceError(code, "Rate exceeded" if "Throttling" in code else f"Emulated {code}.")
        error.status = how if isinstance(how, int) else SERVER_SIDE.get(code, 400)
        return told(start_response, error)
    code = S3_CODES.get(how, "InternalError") if isinstance(how, int) else how
    status = how if isinstance(how, int) else S3_STATUS.get(how, 400)
    text = f"<Error><Code>{code}</Code><Message>Emulated {code}.</Message></Error>"
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        # The query protocol (STS, IAM); EC2 has a form of its own.
        ec2 = "/ec2/" in environ.get("HTTP_AUTHORIZATION", "")
        text = (
            f"<Response><Errors>{text}</Errors></Response>"
            if ec2
            else f"<ErrorResponse>{text}</ErrorResponse>"
        )
    return replied(
        start_response, text.encode(), "application/xml", f"{status} {STATUS.get(status, 'Error')}"
    )


def dropped(environ: WSGIEnvironment) -> list[bytes]:
    """Closes the connection without a word."""
    connection = environ.get("werkzeug.socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("dropped on purpose")


class Listener:
    """The application at one address of this machine, until closed."""

    def __init__(self, app: Wsgi, address: str, port: int = 0) -> None:
        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from werkzeug.serving import make_server

        self._server = make_server(address, port, app, threaded=True, request_handler=MotoRequestHandler)
        self.port: int = self._server.server_port
        self.url = f"http://{address}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; requests under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
