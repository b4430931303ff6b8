"""obstore's clients of S3, Blob and web servers, set up from the environment. Made lazily; nothing here touches a network."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from isthmus.storage.ranges.causes import Cause, Kind, ReadFailed
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.settings import AZURE_SCHEMES, S3, AzureAccount, container_and_path

OBJECT_SCHEMES = ("s3", *AZURE_SCHEMES, "http", "https")

_used_in: int | None = None
# obstore asks for credentials again five minutes before they expire: with this it asks botocore each half minute,
# which holds them in memory and fetches new ones a quarter of an hour before the old ones expire.
_ASK_AGAIN = timedelta(minutes=5, seconds=30)


def obstore_usable() -> bool:
    """Whether obstore is installed and was not used by this process before a fork: its threads do not survive one."""
    return importlib.util.find_spec("obstore") is not None and _used_in in {None, os.getpid()}


def connect(uri: str, policy: RetryPolicy, *, writing: bool = False) -> tuple[Any, str]:
    """A new client for a root, with credentials looked up anew, and the path of the root in it.

    Args:
        writing: the client tries each request again by itself: an upload in parts must not start over for one of them.

    Raises:
        UsageError: the environment does not say which storage account.
        ReadFailed: no credentials were found.
    """
    global _used_in
    _used_in = os.getpid()
    scheme = urlsplit(uri).scheme
    if scheme == "s3":
        return _s3(uri, policy, writing)
    if scheme in AZURE_SCHEMES:
        return _azure(uri, policy, writing)
    from obstore.store import HTTPStore

    return HTTPStore.from_url(uri, **_common(policy, plain=scheme == "http")), ""


def _common(policy: RetryPolicy, *, plain: bool, writing: bool = False) -> dict[str, Any]:
    """Limits and retries of a client: where it reads ours decide, so it makes none of its own.

    Args:
        plain: HTTP without TLS is allowed, because the user wrote the address so.
    """
    stall = timedelta(seconds=policy.stall_s)
    retries: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(0)}
    if writing:
        # Then ours begin: they know credentials that have expired, and have the last word.
        own = timedelta(seconds=min(policy.budget_s, 60.0))
        retries = {"max_retries": 1000 if policy.budget_s else 0, "retry_timeout": own}
    return {
        "retry_config": retries,
        "client_options": {
            "allow_http": plain,
            "connect_timeout": min(stall, timedelta(seconds=10)),
            "read_timeout": stall,
            # The whole of a request is limited by its reader, who knows how many bytes it asked for.
            "timeout": timedelta(days=1),
        },
    }


def _s3(uri: str, policy: RetryPolicy, writing: bool) -> tuple[Any, str]:
    from obstore.store import S3Store

    bucket, path = container_and_path(uri)
    settings = S3.of()
    options: dict[str, Any] = {}
    region = settings.region
    if settings.anonymous:
        options["skip_signature"] = True
    elif importlib.util.find_spec("boto3") is not None:
        import obstore.auth.boto3 as boto3_credentials

        # No session given: obstore makes a new one, which looks through boto3's whole chain (environment, profiles,
        # credential_process, web identity, container, instance).
        try:
            provider = boto3_credentials.Boto3CredentialProvider(ttl=_ASK_AGAIN)
        except ValueError:
            raise NoCredentials from None
        options["credential_provider"] = provider
        region = region or provider.config.get("region")
    if settings.endpoint:
        options["endpoint"] = settings.endpoint
    plain = (settings.endpoint or "").startswith("http://")
    if writing and not plain:
        options["unsigned_payload"] = (
            True  # TLS guards it; another hash of every byte would cost the trainer's CPU
        )
    client = S3Store(
        bucket, region=region or "us-east-1", **options, **_common(policy, plain=plain, writing=writing)
    )
    return client, path


def _azure(uri: str, policy: RetryPolicy, writing: bool) -> tuple[Any, str]:
    from obstore.store import AzureStore

    container, path = container_and_path(uri)
    account = AzureAccount.of(uri)
    options: dict[str, Any] = {"account_name": account.name, "endpoint": account.endpoint}
    if account.key:
        options["account_key"] = account.key
    elif account.sas:
        options["sas_key"] = account.sas
    elif account.anonymous:
        options["skip_signature"] = True
    elif importlib.util.find_spec("azure") and importlib.util.find_spec("azure.identity"):
        import obstore.auth.azure as azure_credentials

        options["credential_provider"] = azure_credentials.AzureCredentialProvider()
    plain = account.endpoint.startswith("http://")
    return AzureStore(container, **options, **_common(policy, plain=plain, writing=writing)), path


class NoCredentials(ReadFailed):
    """boto3 looked everywhere and found none."""

    def __init__(self) -> None:
        super().__init__(Kind.FINAL, "no credentials were found")
        self.cause = Cause(
            Kind.FINAL,
            "no credentials were found",
            hint="set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true",
        )
