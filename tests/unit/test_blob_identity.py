"""Blobs read by an identity's token, judged by Azurite over TLS: it looks at audience, issuer and times of the token."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from azure.core.credentials import AccessToken
from servers import AZURITE_ACCOUNT, AZURITE_KEY, azurite_command, free_port, running
from tls import certificate

from isthmus.errors import StorageError
from isthmus.storage.http import blob as addresses
from isthmus.storage.identity import Identity
from isthmus.storage.ranges.direct import DirectRanges
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy

DATA = np.random.default_rng(9).bytes(300_000)


def token(audience: str) -> str:
    """A token as an identity gives it; Azurite does not look at the signature."""
    tenant = "00000000-0000-0000-0000-000000000001"
    now = int(time.time())
    claims = {"aud": audience, "iss": f"https://sts.windows.net/{tenant}/", "iat": now - 60, "nbf": now - 60}
    parts = [{"alg": "RS256", "typ": "JWT"}, {**claims, "exp": now + 3600, "tid": tenant}]
    return ".".join(
        base64.urlsafe_b64encode(text).rstrip(b"=").decode()
        for text in (*(json.dumps(part).encode() for part in parts), b"signature")
    )


@pytest.fixture
def identity(
    tmp_path: Path, no_credentials: pytest.MonkeyPatch
) -> Iterator[tuple[str, Callable[[str], None], list[int]]]:
    """The root of a container that knows identities; what lets the next identity be for an audience; how often one was asked."""
    command = azurite_command()
    if command is None:
        pytest.skip("Azurite is missing: `make system` installs it where there is npm")
    from azure.storage.blob import BlobServiceClient

    (tmp_path / "store").mkdir()
    pair = certificate(tmp_path)
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    options += ["--disableTelemetry", "--location", str(tmp_path / "store"), "--oauth", "basic"]
    options += ["--cert", str(pair[0]), "--key", str(pair[1])]
    endpoint = f"https://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
    asked: list[int] = []
    audience = ["https://storage.azure.com"]

    class Login:
        """Somebody who is logged in."""

        def get_token(self, *scopes: str, **_: object) -> AccessToken:
            asked.append(1)
            return AccessToken(token(audience[0]), int(time.time()) + 3600)

    known = Identity(Login)
    no_credentials.setattr(addresses, "_identity", lambda: known)
    no_credentials.setenv("AWS_CA_BUNDLE", str(pair[0]))
    no_credentials.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"AccountName={AZURITE_ACCOUNT};BlobEndpoint={endpoint}"
    )
    with running([*command, *options], port):
        service = BlobServiceClient(endpoint, credential=AZURITE_KEY, connection_verify=str(pair[0]))
        service.create_container("data").upload_blob("set/x y", DATA)

        def hand_out(name: str) -> None:
            audience[0] = name
            known.forget()

        yield "az://data/set", hand_out, asked


def test_an_identity_s_token_reads_and_one_of_another_audience_does_not(
    identity: tuple[str, Callable[[str], None], list[int]],
) -> None:
    root, hand_out, asked = identity
    ranges = open_ranges(root, policy=RetryPolicy(budget_s=5))
    assert isinstance(ranges, DirectRanges)
    for start in (0, 1000):
        assert (
            bytes(ranges.read("x y", start, 200_000, file_bytes=len(DATA))) == DATA[start : start + 200_000]
        )
    assert len(asked) == 1
    ranges.close()

    hand_out("https://management.azure.com")
    refused = open_ranges(root, policy=RetryPolicy(budget_s=60))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"does not accept the credentials|denies access") as caught:
        refused.read("x y", 0, 10)
    assert time.monotonic() - began < 20
    assert len(asked) == 3  # looked up anew, once
    assert "eyJ" not in str(caught.value)
