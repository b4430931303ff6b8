"""Where a bucket is, and who may ask it: requests of S3 with their signatures, credentials looked up anew."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import NotInstalled, StorageError
from isthmus.storage.http import sigv4
from isthmus.storage.ranges.settings import S3, container_and_path

_CREDENTIALS_S = 30.0
"""Then boto3's chain is asked again, which holds its credentials in memory and renews them before they expire."""
_AGAIN_S = 5.0
"""After a chain that failed, while there are credentials of before."""
_SOON_S = 300.0
"""Credentials that expire within so long are asked for again each time."""


class S3Address:
    """A prefix of a bucket.

    Args:
        uri: s3://bucket/prefix.

    Raises:
        NotInstalled: boto3, which finds credentials, is missing, and the environment names none.
        StorageError: no credentials were found.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.bucket, self.prefix = container_and_path(uri)
        settings = S3.of()
        self.endpoint, self.anonymous = settings.endpoint, settings.anonymous
        self._lock = threading.Lock()
        self._keys: tuple[float, sigv4.Keys] | None = None
        self._provider: Any = None if self.anonymous else _provider(uri)
        self.region = settings.region or getattr(self._provider, "config", {}).get("region") or "us-east-1"
        self._place()

    def _place(self) -> None:
        if self.endpoint:
            self.server, self.root = (
                self.endpoint,
                urlsplit(self.endpoint).path.rstrip("/") + f"/{self.bucket}",
            )
        elif "." in self.bucket:  # the service's certificate covers one label
            self.server, self.root = f"https://s3.{self.region}.amazonaws.com", f"/{self.bucket}"
        else:
            self.server, self.root = f"https://{self.bucket}.s3.{self.region}.amazonaws.com", ""
        self.host = urlsplit(self.server).netloc.rpartition("@")[2]

    def key(self, name: str) -> str:
        """A file's key in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix and name else name or self.prefix

    def request(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        length: int = 0,
    ) -> tuple[str, dict[str, str]]:
        """See `Address.request`; an empty name is the bucket."""
        path = self.root + (sigv4.path_of(self.key(name)) if name else "/" if not self.root else "")
        sent = dict(headers or {})
        if not self.anonymous:
            sent = sigv4.sign(
                *(method, self.host, path, query or {}, sent),
                keys=self.credentials(),
                region=self.region,
                now=datetime.now(UTC),
            )
        return f"{path}?{sigv4.query_of(query)}" if query else path, sent

    def moved(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Address.moved`: the bucket lies in another region than was thought."""
        home = headers.get("x-amz-bucket-region")
        if status not in {301, 307, 400} or not home or home == self.region or self.endpoint is not None:
            return False
        with self._lock:
            self.region = home
            self._place()
        return True

    def presigned(self, name: str, valid_s: int) -> tuple[str, str]:
        """Scheme, and address without it, at which anybody may GET a file for a while."""
        path = self.root + sigv4.path_of(self.key(name))
        scheme = urlsplit(self.server).scheme
        if self.anonymous:
            return scheme, f"{self.host}{path}"
        signed = sigv4.presign(
            self.host,
            path,
            keys=self.credentials(),
            region=self.region,
            now=datetime.now(UTC),
            valid_s=valid_s,
        )
        return scheme, f"{self.host}{signed}"

    def refresh(self) -> bool:
        """See `Address.refresh`."""
        if self.anonymous:
            return False
        try:
            provider = _provider(self.uri)
        except StorageError:
            provider = self._provider  # what found them before may find them again in a moment
        with self._lock:
            self._provider, self._keys = provider, None
        return True

    def credentials(self) -> sigv4.Keys:
        """Those of now."""
        with self._lock:
            now = datetime.now(UTC).timestamp()
            if self._keys is None or now > self._keys[0]:
                try:
                    found = self._provider()
                except Exception:
                    if self._keys is None:
                        raise
                    # Theirs is a disturbance; whether those of before are too old, the store says.
                    self._keys = now + _AGAIN_S, self._keys[1]
                    return self._keys[1]
                keys = sigv4.Keys(found["access_key_id"], found["secret_access_key"], found.get("token"))
                good_until = now + _CREDENTIALS_S
                if expires := found.get("expires_at"):
                    good_until = min(good_until, expires.timestamp() - _SOON_S)
                self._keys = good_until, keys
            return self._keys[1]


def _provider(uri: str) -> Callable[[], Mapping[str, Any]]:
    """What finds credentials: boto3's chain, whose first place is the environment, which needs no boto3."""
    # Those that come out of a mounted file often end with a line break.
    named = {
        name: os.environ.get(name, "").strip() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    if all(named.values()):
        found = {name.removeprefix("AWS_").lower(): value for name, value in named.items()}
        token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN") or ""
        return lambda: {**found, "token": token.strip() or None}
    if importlib.util.find_spec("boto3") is None or importlib.util.find_spec("obstore") is None:
        raise NotInstalled(
            "s3:// with other than the environment's keys", extra="sagemaker", module="boto3 and obstore"
        )
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        provider: Callable[[], Mapping[str, Any]] = Boto3CredentialProvider()
    except ValueError:
        raise StorageError(
            "no credentials were found",
            where=uri,
            hint="set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true",
        ) from None
    return provider
