"""A transport for azure-core that records what the real client sends and answers from a table: no network, no server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests
from azure.core.credentials import AccessToken
from azure.core.pipeline.transport import RequestsTransport, RequestsTransportResponse
from azure.core.rest._requests_basic import RestRequestsTransportResponse

from isthmus.backends.azure.client import AzureClient
from isthmus.backends.azure.target import Workspace


@dataclass
class Request:
    """One that was sent."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any


@dataclass
class Answer:
    """What comes back."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Answer | Exception | None]


class Wire(RequestsTransport):
    """Asks its handlers in order; the first that answers counts, and 404 when none does.

    Jobs that are PUT are kept, and answered to GET.
    """

    def __init__(self, *handlers: Handler) -> None:
        super().__init__()
        self.handlers = [*handlers, self._keep]
        self.sent: list[Request] = []
        self.jobs: dict[str, dict[str, Any]] = {}

    def _keep(self, request: Request) -> Answer | None:
        name = request.path.rpartition("/")[2]
        if "/jobs/" in request.path and request.method == "PUT":
            properties = {**request.body["properties"], "status": "Starting"}
            self.jobs[name] = {"id": request.path, "name": name, "properties": properties}
            return Answer(201, self.jobs[name])
        if "/jobs/" in request.path and request.method == "GET" and name in self.jobs:
            return Answer(200, self.jobs[name])
        return None

    def send(self, request: Any, **options: Any) -> Any:
        parts = urlsplit(request.url)
        text = request.body if hasattr(request, "body") else request.content
        headers = {name.lower(): value for name, value in request.headers.items()}
        told = Request(
            request.method, parts.path, parse_qs(parts.query), headers, json.loads(text) if text else None
        )
        self.sent.append(told)
        found = next((answer for handler in self.handlers if (answer := handler(told)) is not None), None)
        if isinstance(found, Exception):
            raise found
        if found is None:
            found = Answer(404, {"error": {"code": "NotFound", "message": f"no {parts.path}"}})
        return _response(request, found)


def _response(request: Any, answer: Answer) -> Any:
    made = requests.Response()
    made.status_code = answer.status
    raw = isinstance(answer.body, bytes)
    made._content = (
        answer.body if raw else json.dumps(answer.body).encode() if answer.body is not None else b""
    )
    made._content_consumed = True  # type: ignore[attr-defined]
    made.raw = _Raw(made._content)
    made.headers["Content-Type"] = "text/plain" if raw else "application/json"
    made.headers.update(answer.headers)
    made.reason = "answered"
    if type(request).__module__.startswith("azure.core.rest"):
        return RestRequestsTransportResponse(request=request, internal_response=made)
    return RequestsTransportResponse(request, made)


class _Raw:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reason = "answered"
        self.enforce_content_length = False

    def stream(self, size: int, decode_content: bool = False) -> Any:
        yield self.data

    def read(self, *_: Any, **__: Any) -> bytes:
        data, self.data = self.data, b""
        return data

    def close(self) -> None: ...
    def release_conn(self) -> None: ...


class Credential:
    """Gives a token that no service would take; counts."""

    def __init__(self) -> None:
        self.asked = 0

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        self.asked += 1
        return AccessToken("not-a-token", int(time.time()) + 3600)


WORKSPACE = Workspace(
    subscription="00000000-0000-0000-0000-000000000001", resource_group="training", name="images"
)


def client_on(wire: Wire, workspace: Workspace = WORKSPACE) -> AzureClient:
    """A client of ours whose requests go to the wire."""
    return AzureClient(workspace, credential=Credential(), transport=wire)
