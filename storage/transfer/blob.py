"""Azure Blob as a place of copies: blocks whose names say what they hold, so that those that arrived are known by listing."""

from __future__ import annotations

import base64
import email.utils
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import unquote
from xml.etree import ElementTree

from isthmus.errors import StorageError
from isthmus.storage.http.blob import BlobAddress
from isthmus.storage.http.wire import Answer, Refused, Wire
from isthmus.storage.transfer.crc import combine
from isthmus.storage.transfer.s3 import check_range
from isthmus.storage.transfer.spec import MIB, Arrived, Changed, Entry, Limits, Link, Place, Unsupported

_CRC = "isthmuscrc32"
"""Metadata of a blob: the CRC-32 of the whole, in hexadecimal digits."""
_LINK_H = 6


class BlobPlace:
    """A prefix of a container.

    Args:
        uri: az://container@account.blob.core.windows.net/prefix, abfss://..., or az://container/prefix with the account in
            the environment.
        pace: see `Wire`.

    Raises:
        UsageError: nobody names the storage account.
        NotInstalled: azure-identity is missing, and there is no key and no SAS.
    """

    kind = "azure"
    limits = Limits(largest_part=4000 * MIB, most_parts=50_000, largest_file=4000 * MIB * 50_000)

    def __init__(self, uri: str, *, stall_s: float = 60.0, pace: Callable[[int], None] | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.at = BlobAddress(uri)
        self.wire = Wire(self.at.server, stall_s, pace)

    def entries(self) -> Iterator[Entry]:
        """See `Place`."""
        base = f"{self.at.prefix}/" if self.at.prefix else ""
        query = {"restype": "container", "comp": "list", "include": "metadata", "maxresults": "5000"}
        if base:
            query["prefix"] = base
        while True:
            page = ElementTree.fromstring(self._ask("GET", "", query).body)
            for blob in page.iter("Blob"):
                entry = _listed(blob, base)
                if entry is not None:
                    yield entry
            marker = page.findtext("NextMarker")
            if not marker:
                return
            query["marker"] = marker

    def find(self, name: str) -> Entry | None:
        """See `Place`."""
        answer = self._ask("HEAD", name, accept=(404,))
        if answer.status == 404:
            return None
        headers = answer.headers
        moment = headers.get("last-modified")
        return Entry(
            name,
            int(headers.get("content-length") or 0),
            headers.get("etag", "").strip('"'),
            email.utils.parsedate_to_datetime(moment).timestamp() if moment else 0.0,
            _hexadecimal(headers.get(f"x-ms-meta-{_CRC}")),
        )

    def read(self, entry: Entry, start: int, view: memoryview) -> int:
        """See `Place`."""
        where = f"{self.uri}/{entry.name}"
        headers = {"x-ms-range": f"bytes={start}-{start + len(view) - 1}", "If-Match": f'"{entry.version}"'}
        try:
            answer = self._ask("GET", entry.name, headers=headers, into=view)
        except Refused as error:
            if error.status in {404, 412, 416}:
                raise Changed(where) from error
            raise
        check_range(answer.headers, start, len(view), entry.size, where)
        return answer.crc32

    def put(self, name: str, view: memoryview, crc32: int) -> Entry:
        """See `Place`."""
        headers = {
            "x-ms-blob-type": "BlockBlob",
            "Content-MD5": _md5(view),
            f"x-ms-meta-{_CRC}": f"{crc32:08x}",
        }
        answer = self._ask("PUT", name, headers=headers, body=view)
        return Entry(name, len(view), answer.headers.get("etag", "").strip('"'), crc32=crc32)

    def begin(self, name: str, token: str, crc32: int | None) -> str:
        """See `Place`. Blob knows no uploads, only blocks; ours carry the token in their names."""
        return hashlib.sha256(token.encode()).hexdigest()[:16]

    def arrived(self, name: str, upload: str) -> dict[int, Arrived] | None:
        """See `Place`."""
        query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
        answer = self._ask("GET", name, query, accept=(404,))
        if answer.status == 404:
            return {}
        found = {}
        strange = False
        for block in ElementTree.fromstring(answer.body).iter("Block"):
            text = block.findtext("Name") or ""
            mine = _parse(text)
            strange |= mine is None
            if mine is not None and mine[0] == upload:
                found[mine[1]] = Arrived(int(block.findtext("Size") or 0), text, mine[2])
        if strange and self.find(name) is None:
            # Blocks of another tool, whose names are of another length: the service would refuse ours beside them.
            self._ask("PUT", name, headers={"x-ms-blob-type": "BlockBlob"}, body=b"")
            return {}
        return found

    def send(self, name: str, upload: str, number: int, start: int, view: memoryview, crc32: int) -> Arrived:
        """See `Place`."""
        block = _name(upload, number, crc32)
        # The service compares the hash before it keeps the block.
        headers = {"Content-MD5": _md5(view)}
        self._ask("PUT", name, {"comp": "block", "blockid": block}, headers=headers, body=view)
        return Arrived(len(view), block, crc32)

    def finish(self, name: str, upload: str, parts: Sequence[Arrived], crc32: int | None) -> Entry:
        """See `Place`."""
        blocks = "".join(f"<Uncommitted>{part.tag}</Uncommitted>" for part in parts)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode()
        headers = {f"x-ms-meta-{_CRC}": f"{crc32:08x}"} if crc32 is not None else {}
        try:
            answer = self._ask("PUT", name, {"comp": "blocklist"}, headers=headers, body=body)
        except Refused as error:
            # Finished by an earlier try whose answer was lost?
            there = self.find(name) if error.status == 400 else None
            if there is not None and self.holds(there, parts):
                return there
            raise
        entry = self.find(name)
        tag = answer.headers.get("etag", "").strip('"')
        if entry is None or entry.size != sum(part.size for part in parts) or entry.version != tag:
            raise StorageError(
                "what the store made of the blocks is not the file",
                where=f"{self.uri}/{name}",
                hint="copy again",
            )
        return entry

    def holds(self, entry: Entry, parts: Sequence[Arrived]) -> bool:
        """See `Place`. By the CRC-32 that ours have as metadata."""
        known = [(part.crc32, part.size) for part in parts if part.crc32 is not None]
        same = entry.size == sum(part.size for part in parts) and len(known) == len(parts)
        return same and entry.crc32 is not None and entry.crc32 == combine(known)

    def abandon(self, name: str, upload: str) -> None:
        """See `Place`. Blocks without a file cannot be dropped: the service does after a week."""

    def delete(self, name: str) -> None:
        """See `Place`."""
        self._ask("DELETE", name, accept=(404,))

    def link(self, name: str, *, to: Place) -> Link | None:
        """See `Place`."""
        if not isinstance(to, BlobPlace):
            return None
        account, url = self.at.account, f"{self.at.server}{self.at.path(name)}"
        if account.anonymous:
            return Link(url)
        if account.sas:
            return Link(f"{url}?{account.sas}")
        if account.key:
            return Link(f"{url}?{self.at.shared_access(name, _LINK_H)}")
        return Link(url, {"x-ms-copy-source-authorization": f"Bearer {self.at.token()}"})

    def fetch(
        self, name: str, upload: str, number: int, link: Link, entry: Entry, start: int, size: int
    ) -> Arrived:
        """See `Place`."""
        block = _name(upload, number, None)
        headers = {
            "x-ms-copy-source": link.url,
            "x-ms-source-range": f"bytes={start}-{start + size - 1}",
            **link.headers,
        }
        if link.conditional:
            headers["x-ms-source-if-match"] = f'"{entry.version}"'
        try:
            self._ask("PUT", name, {"comp": "block", "blockid": block}, headers=headers)
        except Refused as error:
            if error.status == 412:
                raise Changed(entry.name) from error
            if error.status in {400, 401, 403, 404, 405, 409, 501} or error.code in {
                "NotImplemented",
                "APINotImplemented",
            }:
                raise Unsupported(error.cause.words) from None
            raise
        return Arrived(size, block)

    def settle(self) -> None:
        """See `Place`. The service has it."""

    def refresh(self) -> bool:
        """See `Place`."""
        return self.at.refresh()

    def close(self) -> None:
        """See `Place`."""
        self.wire.close()

    def _ask(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes | None = None,
        into: memoryview | None = None,
        accept: tuple[int, ...] = (),
    ) -> Answer:
        length = memoryview(body).nbytes if body is not None else 0
        target, sent = self.at.request(method, name, query, headers, length)
        return self.wire.ask(method, target, sent, body, into, accept)


def _md5(view: memoryview) -> str:
    return base64.b64encode(hashlib.md5(view, usedforsecurity=False).digest()).decode()


def _name(upload: str, number: int, crc32: int | None) -> str:
    """A block's id: the upload, its number, and the CRC-32 of what it holds; dashes where the service read it by itself."""
    crc = "--------" if crc32 is None else f"{crc32:08x}"
    return base64.b64encode(f"{upload}{number:06d}{crc}".encode()).decode()


def _parse(block: str) -> tuple[str, int, int | None] | None:
    try:
        text = base64.b64decode(block, validate=True).decode("ascii")
        if len(text) != 30:
            return None
        crc = text[22:]
        return text[:16], int(text[16:22]), None if crc == "--------" else int(crc, 16)
    except ValueError:
        return None


def _hexadecimal(text: str | None) -> int | None:
    try:
        return int(text, 16) if text and len(text) == 8 else None
    except ValueError:
        return None


def _listed(blob: ElementTree.Element, base: str) -> Entry | None:
    holder = blob.find("Name")
    key = (holder.text or "") if holder is not None else ""
    if holder is not None and holder.get("Encoded") == "true":
        key = unquote(key)
    properties = blob.find("Properties")
    if properties is None or not key.startswith(base) or key.endswith("/") or key == base:
        return None
    metadata = {item.tag.lower(): item.text for item in blob.find("Metadata") or ()}
    if metadata.get("hdi_isfolder") == "true" or properties.findtext("ResourceType") == "directory":
        return None
    moment = properties.findtext("Last-Modified")
    return Entry(
        key[len(base) :],
        int(properties.findtext("Content-Length") or 0),
        (properties.findtext("Etag") or "").strip('"'),
        email.utils.parsedate_to_datetime(moment).timestamp() if moment else 0.0,
        _hexadecimal(metadata.get(_CRC)),
    )
