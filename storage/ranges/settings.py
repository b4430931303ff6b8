"""Where a store is and who may read it: one reading of the environment, for every client of every store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import UsageError

AZURE_SCHEMES = ("az", "abfs", "abfss")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TRUE = {"1", "true", "t", "yes"}
# Azurite's own account: the same on every machine, printed in its manual.
_EMULATOR = (
    "AccountName=devstoreaccount1;"
    "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
    "BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1"
)


@dataclass(frozen=True, slots=True)
class S3:
    """How S3 is reached. Credentials are not among it: boto3's chain finds and refreshes them."""

    endpoint: str | None
    region: str | None
    anonymous: bool

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> S3:
        """From AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_SKIP_SIGNATURE."""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise UsageError(
                "the endpoint of S3 is no address",
                where="AWS_ENDPOINT_URL_S3" if environment.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL",
                hint="begin it with http:// or https://",
            )
        return S3(
            endpoint=endpoint,
            region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None,
            anonymous=environment.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE,
        )


@dataclass(frozen=True, slots=True)
class AzureAccount:
    """A storage account, and what opens it; neither key nor SAS: an identity does. Secrets stay out of its repr."""

    name: str
    endpoint: str
    """Of the Blob service, such as https://name.blob.core.windows.net."""
    key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)
    anonymous: bool = False

    @staticmethod
    def of(uri: str, environment: Mapping[str, str] = os.environ) -> AzureAccount:
        """The account that a URI names (abfss://container@account.dfs...), else the environment's.

        Raises:
            UsageError: neither names one, or the environment's secret is of another account than the URI's.
        """
        where = account_host(uri)
        text = environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
        parts = _connection_string(text)
        name = parts.get("accountname") or environment.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        # Those that come out of a mounted file often end with a line break.
        key = (parts.get("accountkey") or environment.get("AZURE_STORAGE_ACCOUNT_KEY") or "").strip() or None
        sas = (
            parts.get("sharedaccesssignature") or environment.get("AZURE_STORAGE_SAS_TOKEN") or ""
        ).strip() or None
        if key and not _BASE64.fullmatch(key):
            raise UsageError(
                "the storage account's key is not base64",
                where="AZURE_STORAGE_ACCOUNT_KEY",
                hint="copy it again",
            )
        endpoint = parts.get("blobendpoint", "").rstrip("/")
        if not endpoint and name:
            protocol = parts.get("defaultendpointsprotocol", "https")
            endpoint = f"{protocol}://{name}.blob.{parts.get('endpointsuffix', 'core.windows.net')}"
        if not name and endpoint:
            name = (urlsplit(endpoint).hostname or "").partition(".")[0]
        if where:
            if (key or sas) and name and name != where.partition(".")[0]:
                raise UsageError(
                    f"the key in the environment is of the storage account {name}",
                    where=uri,
                    hint="name that account, or unset the key to read with your own identity",
                )
            name = where.partition(".")[0]
            if not parts:
                endpoint = "https://" + where.replace(".dfs.", ".blob.", 1)
        if not name:
            raise UsageError(
                "the storage account is not known",
                where=uri,
                hint="set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING, "
                "or write abfss://container@account.dfs.core.windows.net/...",
            )
        anonymous = environment.get("AZURE_STORAGE_ANON", "").lower() in _TRUE
        return AzureAccount(name, endpoint, key, sas.lstrip("?") if sas else None, anonymous)


def account_host(uri: str) -> str:
    """`account.dfs.core.windows.net` of abfss://container@account.dfs.core.windows.net/path, else empty."""
    _, at, host = urlsplit(uri).netloc.rpartition("@")
    return host if at else ""


def container_and_path(uri: str) -> tuple[str, str]:
    """The bucket or container of a URI, and the path in it without slashes at its ends."""
    netloc, _, path = uri.partition("://")[2].partition("/")  # names may hold ? and #
    return netloc.rpartition("@")[0] or netloc, path.strip("/")


def options_of(uri: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What s3fs and adlfs need beyond what they find themselves, so that they read what obstore reads.

    Raises:
        UsageError: see `AzureAccount.of`.
    """
    scheme = urlsplit(uri).scheme
    if scheme == "s3":
        settings = S3.of(environment)
        options: dict[str, Any] = {}
        if settings.endpoint:
            options["endpoint_url"] = settings.endpoint
        if settings.region:
            options["client_kwargs"] = {"region_name": settings.region}
        if settings.anonymous:
            options["anon"] = True
        return options
    if scheme in AZURE_SCHEMES:
        account = AzureAccount.of(uri, environment)
        if account.key:
            return {
                "connection_string": f"AccountName={account.name};AccountKey={account.key};"
                f"BlobEndpoint={account.endpoint};"
            }
        options = {"account_name": account.name, "account_host": account.endpoint.partition("://")[2]}
        if account.sas:
            options["sas_token"] = account.sas
        else:
            options["anon"] = account.anonymous
        return options
    return {}


def _connection_string(text: str) -> dict[str, str]:
    """The parts of an Azure connection string, names in lower case."""
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    named = {name.strip().lower(): value.strip() for name, value in parts.items()}
    if named.get("usedevelopmentstorage", "").lower() == "true":
        return _connection_string(_EMULATOR)
    return named
