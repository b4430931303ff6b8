"""Blob storage by its several spellings: `az://container@account.blob.core.windows.net/path` and the https of a job's input."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from isthmus.errors import UsageError

SUFFIX = "core.windows.net"
_SCHEMES = ("az", "abfs", "abfss")
_HTTPS = re.compile(r"https://([a-z0-9-]+)\.(?:blob|dfs)\.([a-z0-9.-]+)/([^/]+)/?(.*)", re.IGNORECASE)
_CONTAINER = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")


@dataclass(frozen=True, slots=True)
class Blob:
    """A folder in a blob container."""

    account: str
    container: str
    path: str
    suffix: str = SUFFIX
    """Of the cloud: core.windows.net, or a sovereign cloud's."""

    @property
    def https(self) -> str:
        """As a `uri_folder` input takes it, percent-encoded, with a slash at the end."""
        path = quote(self.path.strip("/"), safe="/-._~")
        return f"https://{self.account}.blob.{self.suffix}/{self.container}/" + (f"{path}/" if path else "")


def blob_of(uri: str, default_account: str | None = None) -> Blob | None:
    """The blob folder that a URI means; None when it is no URI of Blob storage.

    Args:
        uri: az://, abfs:// or abfss://, with or without an account, or https of a blob or dfs endpoint.
        default_account: of a URI without one.

    Raises:
        UsageError: no account, or a container's name that cannot be.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return None
    if scheme in _SCHEMES:
        place, _, path = rest.partition("/")
        container, at, host = place.partition("@")
        account, _, domain = host.partition(".") if at else (default_account or "", "", "")
        if not account:
            hint = f"write {scheme}://{container}@ACCOUNT.blob.{SUFFIX}/{path}, or set backends.azure.storage_account"
            raise UsageError("names no storage account", where=uri, hint=hint)
        suffix = re.sub(r"^(blob|dfs)\.", "", domain) or SUFFIX
        found = Blob(account, container, path.strip("/"), suffix)
    else:
        match = _HTTPS.fullmatch(uri)
        if match is None:
            return None
        found = Blob(match[1], match[3], unquote(match[4]).strip("/"), match[2])
    if not _CONTAINER.fullmatch(found.container):
        hint = "3 to 63 lower-case letters, digits and single dashes"
        raise UsageError(f"`{found.container}` is no container's name", where=uri, hint=hint)
    return found
