"""Where a container is, and who may ask it: requests of Azure Blob by account key, SAS or identity."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import importlib.util
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode, urlsplit

from isthmus.errors import NotInstalled
from isthmus.storage import identity
from isthmus.storage.ranges.settings import AzureAccount, container_and_path

_VERSION = "2021-12-02"
_SCOPE = "https://storage.azure.com/.default"
_SOON_S = 300.0


class BlobAddress:
    """A prefix of a container.

    Args:
        uri: az://container@account.blob.core.windows.net/prefix, abfss://..., or az://container/prefix with the account in
            the environment.

    Raises:
        UsageError: nobody names the storage account.
        NotInstalled: azure-identity is missing, and there is no key and no SAS.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.container, self.prefix = container_and_path(uri)
        self.account = AzureAccount.of(uri)
        parts = urlsplit(self.account.endpoint)
        self.server, self.host = f"{parts.scheme}://{parts.netloc}", parts.netloc
        self.root = parts.path.rstrip("/") + f"/{self.container}"
        self._lock = threading.Lock()
        self._bearer: tuple[float, str] | None = None
        self._identity: identity.Identity | None = None
        if not (self.account.key or self.account.sas or self.account.anonymous):
            self._identity = _identity()

    def key(self, name: str) -> str:
        """A file's name in the container."""
        return f"{self.prefix}/{name}" if self.prefix and name else name

    def path(self, name: str) -> str:
        """A file's path of an address; of an empty name, the container's."""
        key = self.key(name)
        return self.root + (quote("/" + key, safe="/-_.~") if key else "")

    def request(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        length: int = 0,
    ) -> tuple[str, dict[str, str]]:
        """See `Address.request`; an empty name is the container."""
        path, account = self.path(name), self.account
        sent = {
            **(headers or {}),
            "x-ms-date": email.utils.formatdate(usegmt=True),
            "x-ms-version": _VERSION,
        }
        target = path + (f"?{urlencode(query)}" if query else "")
        if account.key:
            sent["Authorization"] = shared_key(
                method, account.name, account.key, path, query or {}, sent, length
            )
        elif account.sas:
            target += ("&" if query else "?") + account.sas
        elif not account.anonymous:
            sent["Authorization"] = f"Bearer {self.token()}"
        return target, sent

    def moved(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Address.moved`. Never."""
        return False

    def refresh(self) -> bool:
        """See `Address.refresh`."""
        if self._identity is None:
            self.account = AzureAccount.of(self.uri)
            return bool(self.account.key or self.account.sas)
        with self._lock:
            self._bearer = None
        self._identity.forget()
        return True

    def token(self) -> str:
        """The identity's, as of now."""
        assert self._identity is not None
        with self._lock:
            now = time.time()
            if self._bearer is None or self._bearer[0] - now < _SOON_S:
                try:
                    found = self._identity.get_token(_SCOPE)
                except Exception:
                    if self._bearer is None or self._bearer[0] <= now:
                        raise
                    return self._bearer[1]  # a disturbance, and this one is good for a while
                self._bearer = found.expires_on, found.token
            return self._bearer[1]

    def shared_access(self, name: str, hours: int) -> str:
        """A signature with which one blob may be read for some hours, by the account's key."""
        now = datetime.now(UTC)
        starts, ends = ((now + timedelta(hours=h)).strftime("%Y-%m-%dT%H:%M:%SZ") for h in (-0.25, hours))
        fields = {"sp": "r", "st": starts, "se": ends, "sv": "2020-12-06", "sr": "b"}
        text = "\n".join(
            [
                *("r", starts, ends, f"/blob/{self.account.name}/{self.container}/{self.key(name)}"),
                *("", "", "", fields["sv"], "b", "", "", "", "", "", "", ""),
            ]
        )
        return urlencode({**fields, "sig": _hmac(self.account.key or "", text)})


def shared_key(
    method: str,
    account: str,
    key: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    length: int,
) -> str:
    """The Authorization header of Blob's Shared Key scheme, as its manual has it ("Authorize with Shared Key")."""
    known = {name.lower(): value for name, value in headers.items()}
    lines = [method, "", "", str(length or ""), known.get("content-md5", ""), known.get("content-type", "")]
    lines += ["", "", known.get("if-match", ""), "", "", known.get("range", "")]
    lines += [f"{name}:{known[name]}" for name in sorted(known) if name.startswith("x-ms-")]
    resource = f"/{account}{path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
    return f"SharedKey {account}:{_hmac(key, chr(10).join([*lines, resource]))}"


def _hmac(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()


def _identity() -> identity.Identity:
    if importlib.util.find_spec("azure") is None or importlib.util.find_spec("azure.identity") is None:
        raise NotInstalled("az:// with your own identity", extra="azure", module="azure-identity")
    return identity.shared()
