"""Tokens: who gets one (the client, and each job's container), and whether one is still good."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

TENANT = "11111111-2222-3333-4444-555555555555"


@dataclass
class Identity:
    """Somebody who can ask for tokens with a secret of its own."""

    client_id: str
    any_client_id: bool = False
    """Takes whatever client id the caller names: a user-assigned identity whose id only Azure knows."""
    needs_client_id: bool = False
    """A machine that has only user-assigned identities gives no token to those that name none."""


@dataclass
class Tokens:
    """Issues access tokens and knows them again.

    `lifetime` in seconds; changing it holds for the tokens to come.
    """

    lifetime: float = 3600.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[str, float] = field(default_factory=dict)
    _identities: dict[str, Identity] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def register(self, identity: Identity) -> str:
        """A secret with which that identity can ask."""
        secret = secrets.token_hex(16)
        with self._lock:
            self._identities[secret] = identity
        return secret

    def forget(self, secret: str) -> None:
        """That secret is of no use any more."""
        with self._lock:
            self._identities.pop(secret, None)

    def token(self, secret: str, resource: str, client_id: str | None) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the managed-identity endpoint."""
        with self._lock:
            identity = self._identities.get(secret)
            self.requests.append(
                {"resource": resource, "client_id": client_id, "known": identity is not None}
            )
        if identity is None:
            return 401, {"statusCode": 401, "message": "the secret is not known"}
        if not resource:
            return 400, {"statusCode": 400, "message": "resource is missing"}
        if client_id is None and identity.needs_client_id:
            return 400, {
                "statusCode": 400,
                "message": "No managed identity: name the client id of a user-assigned one",
            }
        if client_id not in (None, identity.client_id) and not identity.any_client_id:
            return 400, {"statusCode": 400, "message": "Identity not found"}
        expires = time.time() + self.lifetime
        token = self._issue(resource, client_id or identity.client_id, expires)
        return 200, {
            "access_token": token,
            "expires_on": str(int(expires)),
            "resource": resource,
            "token_type": "Bearer",
            "client_id": client_id or identity.client_id,
        }

    def _issue(self, resource: str, client_id: str, expires: float) -> str:
        claims = {
            "aud": resource,
            "iss": f"https://sts.windows.net/{TENANT}/",
            "exp": int(expires),
            "iat": int(time.time()),
            "appid": client_id,
            "oid": client_id,
            "tid": TENANT,
            "jti": uuid.uuid4().hex,
        }
        # In a JWT's shape, since clients look inside; the signature is none.
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        text = ".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
        )
        token = f"{text}.{secrets.token_urlsafe(8)}"
        with self._lock:
            self._known[token] = expires
        return token

    def why_not(self, authorization: str | None) -> str | None:
        """What is wrong with a request's Authorization header, or None."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return "The access token is missing or invalid."
        with self._lock:
            expires = self._known.get(token)
        if expires is None:
            return "The access token is invalid."
        if expires <= time.time():
            return "The access token expiry is at an earlier time than the current time."
        return None

    def expire_all(self) -> None:
        """Every token that was given out so far is no longer good."""
        with self._lock:
            self._known = dict.fromkeys(self._known, 0.0)
