"""What a refusal means, told from the real errors of every client, and nothing secret in the words."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from isthmus.errors import StorageError, UsageError
from isthmus.storage.filesystems import filesystem, scheme_of, storage_errors
from isthmus.storage.ranges.causes import Kind, cause_of, redacted
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.settings import S3, AzureAccount, options_of


def botocore_error(code: str, status: int, headers: dict[str, str] | None = None) -> Exception:
    from botocore.exceptions import ClientError

    answer: Any = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}},
    }
    return ClientError(answer, "GetObject")


def translated(error: Exception) -> BaseException:
    from s3fs.errors import translate_boto_error

    result: BaseException = translate_boto_error(error)
    return result


def azure_error(status: int, code: str) -> Exception:
    from azure.core.exceptions import HttpResponseError

    error = HttpResponseError("m")
    error.status_code, error.error_code = status, code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (botocore_error("SlowDown", 503, {"retry-after": "7"}), Kind.THROTTLED, "slow down (503 SlowDown)"),
        (translated(botocore_error("SlowDown", 503)), Kind.THROTTLED, "slow down"),
        (translated(botocore_error("ExpiredToken", 400)), Kind.DENIED, "credentials (400 ExpiredToken)"),
        (translated(botocore_error("AccessDenied", 403)), Kind.DENIED, "denies access (403 AccessDenied)"),
        (translated(botocore_error("NoSuchKey", 404)), Kind.MISSING, "no such file"),
        (botocore_error("InternalError", 500), Kind.PASSING, "the store failed (500 InternalError)"),
        (azure_error(503, "ServerBusy"), Kind.THROTTLED, "slow down (503 ServerBusy)"),
        (azure_error(403, "AuthenticationFailed"), Kind.DENIED, "credentials"),
        (azure_error(404, "BlobNotFound"), Kind.MISSING, "no such file"),
        (azure_error(500, "InternalError"), Kind.PASSING, "failed"),
        (socket.gaierror(-2, "Name or service not known"), Kind.PASSING, "host name cannot be resolved"),
        (OSError(errno.ESTALE, "x"), Kind.PASSING, "the mount went away"),
        (OSError(errno.ENOTCONN, "x"), Kind.PASSING, "the mount went away"),
        (OSError(errno.EIO, "x"), Kind.PASSING, "I/O error"),
        (OSError(errno.EINTR, "x"), Kind.PASSING, "interrupted"),
        (OSError(errno.ETIMEDOUT, "x"), Kind.PASSING, "timed out"),
        (OSError(errno.ENOSPC, "x"), Kind.FINAL, "the disk is full"),
        (PermissionError(errno.EACCES, "x"), Kind.FINAL, "permission denied"),
        (ConnectionResetError(errno.ECONNRESET, "x"), Kind.PASSING, "connection was reset"),
    ],
)
def test_the_errors_of_every_client(error: BaseException, kind: Kind, words: str) -> None:
    cause = cause_of(error)
    assert cause is not None
    assert cause.kind is kind
    assert words in cause.words


def test_retry_after_is_seen_through_s3fs() -> None:
    cause = cause_of(translated(botocore_error("SlowDown", 503, {"retry-after": "7"})))
    assert cause is not None
    assert cause.retry_after_s == 7


def test_clients_that_cannot_connect() -> None:
    from aiohttp import ClientConnectionError, ClientPayloadError, ServerDisconnectedError
    from azure.core.exceptions import IncompleteReadError, ServiceRequestError
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    for error in (
        EndpointConnectionError(endpoint_url="http://x"),
        ConnectTimeoutError(endpoint_url="http://x"),
        ServiceRequestError("x"),
        IncompleteReadError("x"),
        ServerDisconnectedError(),
        ClientPayloadError(),
        ClientConnectionError(),
    ):
        cause = cause_of(error)
        assert cause is not None, error
        assert cause.kind is Kind.PASSING, error


def test_no_refusal_has_no_cause() -> None:
    assert cause_of(KeyError("x")) is None
    assert cause_of(TypeError("x")) is None


def test_a_name_that_does_not_resolve_ends_in_one_line() -> None:
    ranges = open_ranges(
        "http://no-such-host.invalid/data", policy=RetryPolicy(budget_s=0.2, first_delay_s=0.02)
    )
    with pytest.raises(
        StorageError, match=r"^http://no-such-host.invalid/data/a: cannot read: .*tried"
    ) as seen:
        ranges.read("a", 0, 1)
    assert "cannot be resolved" in str(seen.value)


def test_secrets_are_cut_out() -> None:
    text = (
        "GET https://user:pw@store/x?sig=abc&se=1 failed: AccountKey=Eby8v; Authorization: Bearer abc.def "
        '{"token": "xyz"} AKIAIOSFODNN7EXAMPLE\nDebug'
    )
    line = redacted(text)
    for secret in ("pw", "abc", "Eby8v", "xyz", "AKIA", "\n"):
        assert secret not in line


def test_storage_errors_is_one_line_for_every_client() -> None:
    with (
        pytest.raises(StorageError, match="s3://b/x: cannot read: the store denies access"),
        storage_errors("read", "s3://b/x"),
    ):
        raise translated(botocore_error("AccessDenied", 403))
    with pytest.raises(FileNotFoundError), storage_errors("read", "az://c/x"):
        raise azure_error(404, "BlobNotFound")
    with pytest.raises(KeyError), storage_errors("read", "az://c/x"):
        raise KeyError("x")
    with pytest.raises(UsageError, match="that"), storage_errors("read", "az://c/x"):
        raise UsageError("that")


def test_an_address_that_holds_a_secret_is_no_root() -> None:
    for uri in ("https://user:secret@host/data", "https://host/data?sig=secret"):
        with pytest.raises(UsageError, match="cannot be a root") as caught:
            open_ranges(uri)
        assert "secret" not in str(caught.value)


def test_http_is_a_scheme() -> None:
    assert scheme_of("https://host/data") == "https"
    store, path = filesystem("http://host/data")
    assert path == "http://host/data"
    assert store.async_impl


def test_an_azure_account_comes_from_the_uri_or_the_environment() -> None:
    string = "DefaultEndpointsProtocol=https;AccountName=mine;AccountKey=a2V5;EndpointSuffix=core.windows.net"
    mine = AzureAccount.of("az://c/x", {"AZURE_STORAGE_CONNECTION_STRING": string})
    assert (mine.name, mine.endpoint, mine.key) == ("mine", "https://mine.blob.core.windows.net", "a2V5")
    assert "a2V5" not in repr(mine)
    uri = "abfss://c@other.dfs.core.windows.net/x"
    other = AzureAccount.of(uri, {"AZURE_STORAGE_ACCOUNT_NAME": "mine"})
    assert (other.name, other.endpoint, other.key) == ("other", "https://other.blob.core.windows.net", None)
    with pytest.raises(UsageError, match="the key in the environment is of the storage account mine"):
        AzureAccount.of(uri, {"AZURE_STORAGE_CONNECTION_STRING": string})
    with pytest.raises(UsageError, match="the storage account is not known"):
        AzureAccount.of("az://c/x", {})
    signed = AzureAccount.of(
        "az://c/x", {"AZURE_STORAGE_ACCOUNT_NAME": "mine", "AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=abc"}
    )
    assert signed.sas == "sv=1&sig=abc"
    assert "abc" not in repr(signed)
    emulator = AzureAccount.of("az://c/x", {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"})
    assert emulator.endpoint == "http://127.0.0.1:10000/devstoreaccount1"


def test_s3_is_reached_as_the_environment_says() -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_ENDPOINT_URL_S3": "http://b",
        "AWS_DEFAULT_REGION": "r",
    }
    assert S3.of(environment) == S3("http://b", "r", anonymous=False)
    assert options_of("s3://b/x", environment) == {
        "endpoint_url": "http://b",
        "client_kwargs": {"region_name": "r"},
    }
    assert options_of("/a/folder", environment) == {}
