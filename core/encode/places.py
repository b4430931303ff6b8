"""Where a source's files lie: any store of :mod:`isthmus.storage.filesystems`, listed in a fixed order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import DataError, UsageError
from isthmus.storage.filesystems import filesystem, is_local, join, local_path, storage_errors

_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source."""

    name: str
    """Below the source's root."""
    size: int
    """In bytes."""
    version: str
    """Changes when the file is replaced: the store's ETag, else its time of change; empty where neither is told."""


class Place:
    """The files below a URI, or those that a pattern such as `https://host/{000..199}.tar` names.

    Args:
        origin: the URI of what is mounted or was copied to `uri`; names, and the references in rows, are then those of the
            origin, and the times of change of a copy tell nothing.

    Raises:
        UsageError: there is nothing, or the pattern is no pattern.
    """

    def __init__(self, uri: str, origin: str | None = None) -> None:
        self._origin = origin.rstrip("/") if origin else None
        self._pattern = _NUMBERS.search(uri)
        self.uri = uri.rstrip("/")
        single = uri.rpartition("/")[2]
        # A file is the one file of its folder; only http has no folders to list.
        self.root = uri.rpartition("/")[0] if self._pattern or "." in single else self.uri
        if self._pattern and self._pattern.start() < len(self.root):
            raise UsageError("numbers in braces belong in the file's name", where=uri)
        self.store, self._path = filesystem(self.root or ".")
        self._roots = str(local_path(self.root or ".").resolve()) if is_local(self.root or ".") else ""

    @property
    def name(self) -> str:
        """The last part of the URI, without any credentials in it."""
        return urlsplit(self._origin or self.root).path.rstrip("/").rpartition("/")[2] or "source"

    def files(self) -> list[File]:
        """All files, by name; hidden ones and what begins with `_` left out."""
        with storage_errors("list", self.uri):
            try:
                return sorted(self._files(), key=lambda file: file.name)
            except FileNotFoundError:
                raise UsageError("there is no such place", where=self.uri) from None

    def _files(self) -> Iterator[File]:
        if self._pattern:
            first, last = self._pattern.groups()
            if not int(first) <= int(last) < int(first) + _MAX_FILES:
                raise UsageError("the numbers in braces run from a smaller to a larger", where=self.uri)
            for number in range(int(first), int(last) + 1):
                name = _NUMBERS.sub(str(number).zfill(len(first)), self.uri, count=1)
                yield self._file(name.removeprefix(f"{self.root}/"))
            return
        self.store.invalidate_cache()
        if self.root != self.uri:
            path = filesystem(self.uri)[1]
            if self.store.isfile(path):
                yield self._file(self.uri.removeprefix(f"{self.root}/"))
                return
            self.root, self._path = self.uri, path
            self._roots = str(local_path(self.uri).resolve()) if self._roots else ""
        if urlsplit(self.uri).scheme in ("http", "https"):
            raise UsageError(
                "a web server does not list its files",
                where=self.uri,
                hint="name them: https://host/data/{000..199}.tar",
            )
        if not self.store.isdir(self._path):
            raise FileNotFoundError(self.uri)
        for path, info in self.store.find(self._path, detail=True).items():
            name = str(path)[len(self._path) :].lstrip("/")
            if not any(part.startswith((".", "_")) for part in name.split("/")):
                yield self._named(name, info)

    def _file(self, name: str) -> File:
        try:
            return self._named(name, self.store.info(f"{self._path}/{name}"))
        except FileNotFoundError:
            raise UsageError("there is no such file", where=join(self.root, name)) from None

    def _named(self, name: str, info: Any) -> File:
        file = _file(name, info)
        return file if self._origin is None else File(file.name, file.size, "")

    @contextmanager
    def open(self, file: File) -> Iterator[Any]:
        """The file, to be read and searched; DataError when it was replaced since it was listed."""
        uri = join(self.root, file.name)
        with storage_errors("read", uri):
            try:
                self.check_same(file)
                with self.store.open(f"{self._path}/{file.name}", "rb") as opened:
                    yield opened
                self.check_same(file)
            except FileNotFoundError:
                raise DataError("the source changed: the file is gone", where=uri) from None

    def check_same(self, file: File) -> None:
        """Raises DataError when a file is no longer the one that was listed."""
        self.store.invalidate_cache()
        now = self._named(file.name, self.store.info(f"{self._path}/{file.name}"))
        if now != file:
            raise DataError(
                "the source changed while it was encoded",
                where=join(self.root, file.name),
                hint="encode a copy that nobody writes to, and start over with --restart",
            )

    def read(self, name: str, limit: int) -> bytes:
        """A small file whole. FileNotFoundError, or ValueError when it lies outside the root or exceeds `limit`."""
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError("it lies outside the source")
        path = f"{self._path}/{name}"
        if self._roots:
            resolved = local_path(path).resolve()
            if not resolved.is_relative_to(self._roots):
                raise ValueError("it lies outside the source")
        with storage_errors("read", join(self.root, name)), self.store.open(path, "rb") as opened:
            data = opened.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"over {limit} bytes")
        return bytes(data)

    def within(self, reference: str) -> str:
        """The name below the root of a path or URL that a row holds. ValueError when it leads elsewhere."""
        if "://" not in reference and not reference.startswith("/"):
            return reference.removeprefix("./")
        root = self._origin or (self.root if "://" in self.root else str(local_path(self.root or ".")))
        if not reference.startswith(root.rstrip("/") + "/"):
            raise ValueError("it lies outside the source")
        return reference[len(root.rstrip("/")) + 1 :]


def _file(name: str, info: Any) -> File:
    version = next((info[key] for key in ("etag", "ETag", "mtime", "last_modified") if info.get(key)), "")
    return File(name, int(info.get("size") or 0), str(version))
