"""AWS Signature Version 4 for S3: as headers of a request, or within an address that another service may read.

Source: the service's manual, "Authenticating Requests (AWS Signature Version 4)". Bodies are not signed: their CRC-32 goes
along, which the service checks, and TLS guards them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
_SAFE = "-_.~"


@dataclass(frozen=True, slots=True)
class Keys:
    """What S3 knows somebody by."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def path_of(key: str) -> str:
    """A key as a path of an address."""
    return quote("/" + key, safe="/" + _SAFE)


def query_of(query: Mapping[str, str]) -> str:
    """A query as it is signed and sent."""
    return "&".join(
        sorted(f"{quote(name, safe=_SAFE)}={quote(value, safe=_SAFE)}" for name, value in query.items())
    )


def sign(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    *,
    keys: Keys,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """The headers of a signed request, those given included.

    Args:
        path: quoted, see `path_of`.
        headers: only names that are safe to sign: x-amz-*, If-Match, Range ...
        now: in UTC.
    """
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {
        **{name.lower(): " ".join(value.split()) for name, value in headers.items()},
        "host": host,
        "x-amz-content-sha256": UNSIGNED,
        "x-amz-date": stamp,
    }
    if keys.token:
        signed["x-amz-security-token"] = keys.token
    names = ";".join(sorted(signed))
    canonical = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    request = "\n".join([method, path, query_of(query), canonical, names, UNSIGNED])
    scope, signature = _signature(request, keys, region, stamp)
    del signed["host"]
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def presign(host: str, path: str, *, keys: Keys, region: str, now: datetime, valid_s: int) -> str:
    """Path and query at which anybody may GET an object for a while."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    query = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{keys.access}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(valid_s),
        "X-Amz-SignedHeaders": "host",
        **({"X-Amz-Security-Token": keys.token} if keys.token else {}),
    }
    request = "\n".join(["GET", path, query_of(query), f"host:{host}\n", "host", UNSIGNED])
    _, signature = _signature(request, keys, region, stamp)
    return f"{path}?{query_of(query)}&X-Amz-Signature={signature}"


def _signature(request: str, keys: Keys, region: str, stamp: str) -> tuple[str, str]:
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in (stamp[:8], region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return scope, key.hex()
