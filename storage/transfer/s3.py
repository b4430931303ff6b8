"""S3 as a place of copies: listings, ranges, uploads in parts that CRC-32 guards, and copies that S3 makes by itself."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from isthmus.errors import StorageError
from isthmus.storage.http import sigv4
from isthmus.storage.http.s3 import S3Address
from isthmus.storage.http.wire import Answer, Refused, Wire, error_code
from isthmus.storage.ranges.causes import Kind, ReadFailed
from isthmus.storage.transfer.spec import MIB, Arrived, Changed, Entry, Limits, Link, Place, Unsupported

_LINK_S = 6 * 3600
_CRC_TYPE = {"x-amz-checksum-type": "FULL_OBJECT"}


class S3Place:
    """A prefix of a bucket.

    Args:
        uri: s3://bucket/prefix.
        pace: see `Wire`.

    Raises:
        NotInstalled: boto3, which finds credentials, is missing.
        StorageError: no credentials were found.
    """

    kind = "s3"
    limits = Limits(largest_part=5 << 30, most_parts=10_000, smallest_part=5 * MIB, largest_file=5 << 40)

    def __init__(self, uri: str, *, stall_s: float = 60.0, pace: Callable[[int], None] | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.at = S3Address(uri)
        self._stall_s, self._pace = stall_s, pace
        self.wire = Wire(self.at.server, stall_s, pace)
        self._moving = threading.Lock()

    def entries(self) -> Iterator[Entry]:
        """See `Place`."""
        query = {"list-type": "2", "encoding-type": "url", "max-keys": "1000"}
        base = f"{self.at.prefix}/" if self.at.prefix else ""
        if base:
            query["prefix"] = base
        while True:
            page = _xml(self._ask("GET", "", query).body)
            for item in page.findall("Contents"):
                key = unquote(item.findtext("Key") or "")
                if key.endswith("/") or not key.startswith(base):
                    continue
                yield Entry(
                    key[len(base) :],
                    int(item.findtext("Size") or 0),
                    (item.findtext("ETag") or "").strip('"'),
                    datetime.fromisoformat(
                        item.findtext("LastModified") or "1970-01-01T00:00:00+00:00"
                    ).timestamp(),
                )
            following = page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") != "true" or not following:
                return
            query["continuation-token"] = following

    def find(self, name: str) -> Entry | None:
        """See `Place`."""
        answer = self._ask("HEAD", name, headers={"x-amz-checksum-mode": "ENABLED"}, accept=(404,))
        return None if answer.status == 404 else _entry(name, answer.headers)

    def read(self, entry: Entry, start: int, view: memoryview) -> int:
        """See `Place`."""
        where = f"{self.uri}/{entry.name}"
        # Of a whole file, the store also tells its checksum.
        whole = len(view) == entry.size
        span = (
            {"x-amz-checksum-mode": "ENABLED"}
            if whole
            else {"range": f"bytes={start}-{start + len(view) - 1}"}
        )
        headers = {**span, "if-match": f'"{entry.version}"'}
        try:
            answer = self._ask("GET", entry.name, headers=headers, into=view)
        except Refused as error:
            if error.status in {404, 412, 416}:
                raise Changed(where) from error
            raise
        check_range(answer.headers, start, len(view), entry.size, where)
        if answer.headers.get("etag", "").strip('"') not in {"", entry.version}:
            raise Changed(where)
        told = _entry(entry.name, answer.headers).crc32 if whole else None
        if told is not None and told != answer.crc32:
            raise ReadFailed(Kind.PASSING, "the bytes that came are not those of the store's checksum")
        return answer.crc32

    def put(self, name: str, view: memoryview, crc32: int) -> Entry:
        """See `Place`."""
        headers = {"x-amz-checksum-crc32": encoded(crc32)}
        answer = self._ask("PUT", name, headers=headers, body=view)
        tag = answer.headers.get("etag", "").strip('"')
        self._check(name, tag, view, crc32, answer.headers.get("x-amz-checksum-crc32"))
        return Entry(name, len(view), tag, crc32=crc32)

    def begin(self, name: str, token: str, crc32: int | None) -> str:
        """See `Place`."""
        headers = {"x-amz-checksum-algorithm": "CRC32", **_CRC_TYPE}
        found = _xml(self._ask("POST", name, {"uploads": ""}, headers=headers).body).findtext("UploadId")
        if not found:
            raise ReadFailed(Kind.PASSING, "the store named no upload")
        return found

    def arrived(self, name: str, upload: str) -> dict[int, Arrived] | None:
        """See `Place`."""
        found: dict[int, Arrived] = {}
        query = {"uploadId": upload, "max-parts": "1000"}
        while True:
            answer = self._ask("GET", name, query, accept=(404,))
            if answer.status == 404:
                return None
            page = _xml(answer.body)
            for part in page.findall("Part"):
                crc = part.findtext("ChecksumCRC32")
                found[int(part.findtext("PartNumber") or 0) - 1] = Arrived(
                    int(part.findtext("Size") or 0),
                    (part.findtext("ETag") or "").strip('"'),
                    decoded(crc) if crc else None,
                )
            marker = page.findtext("NextPartNumberMarker")
            if page.findtext("IsTruncated") != "true" or not marker:
                return found
            query["part-number-marker"] = marker

    def send(self, name: str, upload: str, number: int, start: int, view: memoryview, crc32: int) -> Arrived:
        """See `Place`."""
        query = {"partNumber": str(number + 1), "uploadId": upload}
        headers = {"x-amz-checksum-crc32": encoded(crc32)}
        answer = self._ask("PUT", name, query, headers=headers, body=view)
        tag = answer.headers.get("etag", "").strip('"')
        self._check(name, tag, view, crc32, answer.headers.get("x-amz-checksum-crc32"))
        return Arrived(len(view), tag, crc32)

    def finish(self, name: str, upload: str, parts: Sequence[Arrived], crc32: int | None) -> Entry:
        """See `Place`."""
        rows = []
        for number, part in enumerate(parts, 1):
            crc = f"<ChecksumCRC32>{encoded(part.crc32)}</ChecksumCRC32>" if part.crc32 is not None else ""
            rows.append(
                f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{escape(part.tag)}&quot;</ETag>{crc}</Part>"
            )
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        headers = dict(_CRC_TYPE) if crc32 is not None else {}
        if crc32 is not None:
            headers["x-amz-checksum-crc32"] = encoded(crc32)
        answer = self._ask("POST", name, {"uploadId": upload}, headers=headers, body=body, accept=(404,))
        if answer.status == 404:
            # Finished by an earlier try whose answer was lost?
            there = self.find(name)
            if there is not None and self.holds(there, parts):
                return there
            raise Refused(404, error_code(answer.body), answer.headers)
        # This one request may fail after its status was sent: then the body says so.
        if b"<Error>" in answer.body:
            code = _xml(answer.body).findtext("Code") or ""
            raise Refused(500 if code in {"InternalError", ""} else 400, code, answer.headers)
        entry = self.find(name)
        if entry is None:
            raise ReadFailed(Kind.PASSING, "the file is not there after it was finished")
        total = sum(part.size for part in parts)
        whole = entry.crc32 if entry.crc32 is not None else None
        if entry.size != total or (None not in (whole, crc32) and whole != crc32):
            raise StorageError(
                "what the store made of the parts is not the file",
                where=f"{self.uri}/{name}",
                hint="copy again",
            )
        return entry

    def holds(self, entry: Entry, parts: Sequence[Arrived]) -> bool:
        """See `Place`. By its ETag: the MD5 of the parts' MD5s, and their number."""
        try:
            digest = hashlib.md5(b"".join(bytes.fromhex(part.tag) for part in parts)).hexdigest()
        except ValueError:
            return False
        return entry.version == f"{digest}-{len(parts)}" and entry.size == sum(part.size for part in parts)

    def abandon(self, name: str, upload: str) -> None:
        """See `Place`."""
        self._ask("DELETE", name, {"uploadId": upload}, accept=(404,))

    def delete(self, name: str) -> None:
        """See `Place`."""
        self._ask("DELETE", name, accept=(404,))

    def link(self, name: str, *, to: Place) -> Link | None:
        """See `Place`."""
        if isinstance(to, S3Place):
            # Credentials of one service for both: S3 itself looks whether they may read the source.
            same = (self.at.endpoint or "") == (to.at.endpoint or "")
            return Link(sigv4.path_of(f"{self.at.bucket}/{self.at.key(name)}")) if same else None
        if to.kind != "azure":
            return None
        scheme, place = self.at.presigned(name, _LINK_S)
        return Link(f"{scheme}://{place}", conditional=False)

    def fetch(
        self, name: str, upload: str, number: int, link: Link, entry: Entry, start: int, size: int
    ) -> Arrived:
        """See `Place`."""
        headers = {
            "x-amz-copy-source": link.url,
            "x-amz-copy-source-range": f"bytes={start}-{start + size - 1}",
            "x-amz-copy-source-if-match": f'"{entry.version}"',
        }
        query = {"partNumber": str(number + 1), "uploadId": upload}
        try:
            answer = self._ask("PUT", name, query, headers=headers)
        except Refused as error:
            if error.status == 412:
                raise Changed(f"{entry.name}") from error
            if error.status in {400, 403, 404, 405, 501}:
                raise Unsupported(error.cause.words) from None
            raise
        found = _xml(answer.body)
        tag = (found.findtext("ETag") or "").strip('"')
        if found.tag == "Error" or not tag:
            raise Unsupported("the store did not copy the part")
        crc = found.findtext("ChecksumCRC32")
        return Arrived(size, tag, decoded(crc) if crc else None)

    def settle(self) -> None:
        """See `Place`. The service has it."""

    def refresh(self) -> bool:
        """See `Place`."""
        return self.at.refresh()

    def close(self) -> None:
        """See `Place`."""
        self.wire.close()

    def _check(self, name: str, tag: str, view: memoryview, crc32: int, echoed: str | None) -> None:
        """That the store holds what was sent: it says the CRC-32, or else its ETag is the MD5."""
        if echoed is not None:
            good = decoded(echoed) == crc32
        elif len(tag) == 32:
            good = hashlib.md5(view, usedforsecurity=False).hexdigest() == tag
        else:
            return  # encrypted with a key of its own: neither is told; the whole file is looked at in the end
        if not good:
            raise ReadFailed(Kind.PASSING, "the store holds other bytes than were sent")

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
        for again in (True, False):
            wire = self.wire
            target, sent = self.at.request(method, name, query, headers)
            try:
                return wire.ask(method, target, sent, body, into, accept)
            except Refused as error:
                with self._moving:
                    # Another thread's answer may have said so before.
                    if not again or (self.wire is wire and not self.at.moved(error.status, error.headers)):
                        raise
                    if self.wire is wire:
                        self.wire = Wire(self.at.server, self._stall_s, self._pace)
        raise AssertionError


def _entry(name: str, headers: Mapping[str, str]) -> Entry:
    crc = headers.get("x-amz-checksum-crc32")
    whole = (
        crc is not None
        and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
        and "-" not in crc
    )
    moment = headers.get("last-modified")
    return Entry(
        name,
        int(headers.get("content-length") or 0),
        headers.get("etag", "").strip('"'),
        email.utils.parsedate_to_datetime(moment).timestamp() if moment else 0.0,
        decoded(crc) if whole and crc else None,
    )


def _xml(body: bytes) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise ReadFailed(Kind.PASSING, "the store's answer is not XML") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def encoded(crc32: int) -> str:
    """A CRC-32 as S3 writes it."""
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


def decoded(text: str) -> int | None:
    """A CRC-32 from how S3 writes it; None of anything else."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return int.from_bytes(data, "big") if len(data) == 4 else None


def check_range(headers: Mapping[str, str], start: int, count: int, size: int, where: str) -> None:
    """That an answer is of the range and the file that were asked for. Raises Changed, ReadFailed."""
    told = headers.get("content-range", "")
    span, _, whole = told.removeprefix("bytes ").partition("/")
    if whole.isdigit() and int(whole) != size:
        raise Changed(where, f"the file has {int(whole):,} bytes, {size:,} when it was listed")
    if told and span != f"{start}-{start + count - 1}":
        raise ReadFailed(Kind.PASSING, "the answer is of another range than was asked for")
