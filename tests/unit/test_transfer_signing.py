"""Our signatures are those of the clouds' own clients; nothing here opens a connection."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.storage.http import sigv4
from isthmus.storage.http.blob import shared_key
from isthmus.storage.transfer.blob import _name, _parse
from isthmus.storage.transfer.crc import combine, combine_files
from isthmus.storage.transfer.s3 import decoded, encoded

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEYS = sigv4.Keys("AKIAIOSFODNN7EXAMPLE", "not-a-secret", "a/token+with=signs")
KEY = "bm90LWEtc2VjcmV0"  # not-a-secret


@pytest.mark.parametrize("key", ["a/b.bin", "uni ü/x+y &=%?#~.bin", "double//slash", "*'()"])
@pytest.mark.parametrize("query", [{}, {"partNumber": "3", "uploadId": "a/b+c=="}, {"uploads": ""}])
def test_s3_signatures_are_botocores(
    key: str, query: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    path = "/bucket" + sigv4.path_of(key)
    text = sigv4.query_of(query)
    url = f"http://store.test:9000{path}" + (f"?{text}" if text else "")
    request = AWSRequest("PUT", url, headers={"x-amz-checksum-crc32": "AAAAAA==", "If-Match": '"tag"'})
    request.context["payload_signing_enabled"] = False
    request.context["client_config"] = None
    for module in ("botocore.auth.get_current_datetime", "botocore.compat.get_current_datetime"):
        monkeypatch.setattr(module, lambda remove_tzinfo=True: NOW.replace(tzinfo=None), raising=False)
    signer = auth.S3SigV4Auth(Credentials(KEYS.access, KEYS.secret, KEYS.token), "s3", "eu-west-1")
    monkeypatch.setattr(signer, "_should_sha256_sign_payload", lambda request: False)
    signer.add_auth(request)
    headers = {"x-amz-checksum-crc32": "AAAAAA==", "If-Match": '"tag"'}
    ours = sigv4.sign("PUT", "store.test:9000", path, query, headers, keys=KEYS, region="eu-west-1", now=NOW)
    assert ours["x-amz-date"] == request.headers["X-Amz-Date"]
    assert ours["authorization"] == request.headers["Authorization"]


def test_a_link_is_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    monkeypatch.setattr(
        "botocore.auth.get_current_datetime", lambda remove_tzinfo=True: NOW.replace(tzinfo=None)
    )
    request = AWSRequest("GET", "https://bucket.s3.eu-west-1.amazonaws.com/a%20b.bin")
    credentials = Credentials(KEYS.access, KEYS.secret, KEYS.token)
    auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-1", expires=600).add_auth(request)
    ours = sigv4.presign(
        "bucket.s3.eu-west-1.amazonaws.com", "/a%20b.bin", keys=KEYS, region="eu-west-1", now=NOW, valid_s=600
    )
    assert parse_qs(urlsplit(ours).query) == parse_qs(urlsplit(request.url).query)


@pytest.mark.parametrize("query", [{}, {"comp": "block", "blockid": "QUJD+/=="}])
def test_blob_signatures_are_azures(query: dict[str, str]) -> None:
    shared = pytest.importorskip("azure.storage.blob._shared.authentication")
    from types import SimpleNamespace

    from azure.core.pipeline.transport import HttpRequest

    path = "/container/uni%20%C3%BC/x%2By.bin"
    headers = {
        "Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg==",
        "x-ms-date": "Fri, 02 Jan 2026 03:04:05 GMT",
        "x-ms-version": "2021-12-02",
        "x-ms-meta-a": "b",
        "If-Match": '"tag"',
    }
    url = f"https://account.blob.core.windows.net{path}" + (f"?{urlencode(query)}" if query else "")
    request = HttpRequest("PUT", url, headers=dict(headers))
    request.headers["Content-Length"] = "7"
    policy = shared.SharedKeyCredentialPolicy("account", KEY)
    message = SimpleNamespace(http_request=request, context=SimpleNamespace(transport=None))
    policy.on_request(message)
    ours = shared_key("PUT", "account", KEY, path, query, headers, 7)
    assert ours == request.headers["Authorization"]


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_the_crc_of_the_whole_comes_from_its_parts(pieces: list[bytes]) -> None:
    whole = zlib.crc32(b"".join(pieces))
    assert combine((zlib.crc32(piece), len(piece)) for piece in pieces) == whole


def test_the_crcs_of_many_files_at_once() -> None:
    chance = np.random.default_rng(5)
    files = [[chance.bytes(int(n)) for n in chance.integers(0, 90_000, count)] for count in (1, 5, 3, 1, 40)]
    pieces = [piece for file in files for piece in file]
    starts = np.cumsum([0, *(len(file) for file in files)])[:-1]
    found = combine_files([zlib.crc32(p) for p in pieces], [len(p) for p in pieces], starts)
    assert found.tolist() == [zlib.crc32(b"".join(file)) for file in files]


def test_terabytes_of_zeros_have_the_crc_that_zlib_would_say() -> None:
    """2^40 zeros by doubling: no byte is made."""
    piece, size = zlib.crc32(bytes(1 << 20)), 1 << 20
    while size < 1 << 40:
        piece, size = combine([(piece, size), (piece, size)]), size * 2
    megabyte = zlib.crc32(bytes(1 << 20))
    assert combine([(megabyte, 1 << 20)] * (1 << 10)) == zlib.crc32(bytes(1 << 30))
    assert piece == combine([(combine([(megabyte, 1 << 20)] * (1 << 10)), 1 << 30)] * (1 << 10))


def test_a_block_says_what_it_holds() -> None:
    assert _parse(_name("0123456789abcdef", 49_999, 0xDEADBEEF)) == ("0123456789abcdef", 49_999, 0xDEADBEEF)
    assert _parse(_name("0123456789abcdef", 0, None)) == ("0123456789abcdef", 0, None)
    assert _parse("QUJD") is None
    assert _parse("not base64") is None
    assert decoded(encoded(0xDEADBEEF)) == 0xDEADBEEF
    assert decoded("AAAA-3") is None
