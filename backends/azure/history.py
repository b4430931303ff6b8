"""Run history of an Azure ML workspace: why a job ended, and where its nodes' logs are. Plain azure-core, public REST."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from isthmus.backends.azure.errors import azure_errors
from isthmus.backends.azure.target import Workspace

SCOPE = "https://management.azure.com/.default"
ARM = "https://management.azure.com"


class History:
    """GETs of the workspace's run history, and of the log files it points to.

    Args:
        workspace: which.
        discovery: the workspace's discovery URL, which names the service's address in its region.
        credential: gives the credential.
        transport: of azure-core, for tests.
    """

    def __init__(
        self,
        workspace: Workspace,
        discovery: str,
        credential: Callable[[], Any],
        *,
        transport: Any = None,
    ) -> None:
        from azure.core.pipeline import Pipeline
        from azure.core.pipeline.policies import (
            BearerTokenCredentialPolicy,
            HeadersPolicy,
            RetryPolicy,
        )
        from azure.core.pipeline.transport import RequestsTransport

        self._workspace = workspace
        self._discovery = discovery
        self._base: str | None = None
        transport = transport or RequestsTransport(connection_timeout=20, read_timeout=60)

        def pipeline(*more: Any) -> Any:
            # Policies of its own: one that two pipelines share goes on with the later one's.
            retry = RetryPolicy(retry_total=3, retry_backoff_factor=0.4, retry_backoff_max=5)
            return Pipeline(transport, [HeadersPolicy(), retry, *more])

        self._signed = pipeline(BearerTokenCredentialPolicy(credential(), SCOPE))
        # A SAS signs itself; a token beside it would be refused.
        self._plain = pipeline()

    def _get(self, pipeline: Any, url: str, doing: str, headers: dict[str, str] | None = None) -> Any:
        from azure.core.exceptions import HttpResponseError
        from azure.core.rest import HttpRequest

        with azure_errors(doing):
            response = pipeline.run(HttpRequest("GET", url, headers=headers)).http_response
            if response.status_code >= 400 and response.status_code != 416:
                response.body()
                raise HttpResponseError(response=response)
            return response

    def base(self) -> str:
        """The service's address."""
        if self._base is None:
            response = self._get(self._plain, self._discovery, f"find {self._workspace.name}'s services")
            self._base = str(json.loads(response.body())["history"]).rstrip("/")
        return self._base

    def details(self, job: str) -> dict[str, Any]:
        """Of a job: `status`, `error`, `warnings`, `logFiles` (name -> URL with a SAS that ends after hours)."""
        url = f"{self.base()}/history/v1.0{self._workspace.arm_id}/runs/{job}/details"
        found = json.loads(self._get(self._signed, url, f"details of {job}").body())
        return found if isinstance(found, dict) else {}

    def read(self, url: str, offset: int, name: str) -> tuple[bytes, int | None]:
        """What a log file has from `offset` on, and its size where the store tells it. Asks for no byte twice."""
        response = self._get(self._plain, url, f"log {name}", {"Range": f"bytes={offset}-"})
        total = str(response.headers.get("Content-Range", "")).rpartition("/")[2]
        size = int(total) if total.isdigit() else None
        if response.status_code == 416:
            return b"", size
        data = bytes(response.body())
        if response.status_code == 200:
            # A store that knows no ranges sends the whole.
            return data[offset:], len(data)
        return data, size

    def arm(self, path: str, doing: str) -> dict[str, Any]:
        """A GET of Azure Resource Manager."""
        base = (os.environ.get("AZUREML_DEV_URL_MFE") or ARM).rstrip("/")
        found = json.loads(self._get(self._signed, base + path, doing).body())
        return found if isinstance(found, dict) else {}
