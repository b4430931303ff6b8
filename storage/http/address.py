"""A root's URI -> who is asked for its files, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import quote, urlsplit

from isthmus.storage.ranges.settings import AZURE_SCHEMES

SCHEMES = ("s3", *AZURE_SCHEMES, "http", "https")


class Address(Protocol):
    """The files below a root, as requests of a server. Shared by threads."""

    server: str
    """Scheme, host and port; what follows them is no matter."""

    def request(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        length: int = 0,
    ) -> tuple[str, dict[str, str]]:
        """A request for a file: its path and query, quoted, and its headers, those given included, authorised as of now.

        Args:
            name: below the root.
            length: bytes of the request's body.
        """

    def moved(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether a refusal says that another server is to be asked, which `server` then is."""

    def refresh(self) -> bool:
        """Looks credentials up anew; False: there are none."""


class WebAddress:
    """The files below an address of a web server, which anybody may read."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.server = f"{parts.scheme}://{parts.netloc}"
        # What is quoted stays as it is.
        self._root = quote(parts.path.rstrip("/"), safe="/%-_.~!$&'()*+,;=:@")

    def request(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        length: int = 0,
    ) -> tuple[str, dict[str, str]]:
        """See `Address.request`."""
        return f"{self._root}/{quote(name, safe='/-_.~')}", dict(headers or {})

    def moved(self, status: int, headers: Mapping[str, str]) -> bool:
        """See `Address.moved`. Never."""
        return False

    def refresh(self) -> bool:
        """See `Address.refresh`. There are none."""
        return False


def address_of(uri: str) -> Address:
    """Of a URI whose scheme is one of `SCHEMES`.

    Raises:
        NotInstalled: what finds the credentials is missing.
        UsageError: nobody names the storage account.
        StorageError: no credentials were found.
    """
    scheme = urlsplit(uri).scheme
    if scheme == "s3":
        from isthmus.storage.http.s3 import S3Address

        return S3Address(uri)
    if scheme in AZURE_SCHEMES:
        from isthmus.storage.http.blob import BlobAddress

        return BlobAddress(uri)
    return WebAddress(uri)
