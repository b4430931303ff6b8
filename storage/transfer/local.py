"""This machine's disks as a place of copies: a file appears whole, and is on the disk before a manifest vouches for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus.errors import StorageError, UsageError
from isthmus.storage import filesystems
from isthmus.storage.transfer.spec import Arrived, Changed, Entry, Limits, Link, Place, Unsupported

_SUFFIX = ".isthmus-part"
_SLICE = 256 << 10
"""Bytes read at once: what fits a core's cache until their checksum is taken."""


class LocalPlace:
    """A folder."""

    kind = "local"
    limits = Limits(largest_part=1 << 40, most_parts=1 << 40)

    def __init__(self, uri: str) -> None:
        self.path = filesystems.local_path(uri)
        self.uri = str(self.path)
        self._lock = threading.Lock()
        self._unsynced: list[str] = []

    def entries(self) -> Iterator[Entry]:
        """See `Place`. Links to files count as files; links to folders are not followed."""
        with filesystems.storage_errors("list", self.uri):
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(
                    "it is no folder", where=self.uri, hint="name the folder that holds the file"
                )
            for folder, folders, names in os.walk(self.path, onerror=_raise):
                folders.sort()
                for name in names:
                    path = Path(folder) / name
                    try:
                        status = path.stat()
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield _entry(path.relative_to(self.path).as_posix(), status)

    def find(self, name: str) -> Entry | None:
        """See `Place`."""
        try:
            return _entry(name, (self.path / name).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, entry: Entry, start: int, view: memoryview) -> int:
        """See `Place`."""
        where = f"{self.uri}/{entry.name}"
        try:
            descriptor = os.open(self.path / entry.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Changed(where, "the file was removed while it was copied") from None
        try:
            if _entry(entry.name, os.fstat(descriptor)).version != entry.version:
                raise Changed(where)
            crc = _fill(descriptor, start, view, where)
            # Written to meanwhile: what was read may be half of each.
            if _entry(entry.name, os.fstat(descriptor)).version != entry.version:
                raise Changed(where)
            return crc
        finally:
            os.close(descriptor)

    def put(self, name: str, view: memoryview, crc32: int) -> Entry:
        """See `Place`."""
        upload = self.begin(name, f"{crc32:08x}-{len(view)}", crc32)
        self.send(name, upload, 0, 0, view, crc32)
        return self.finish(name, upload, (), crc32)

    def begin(self, name: str, token: str, crc32: int | None) -> str:
        """See `Place`."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tag = hashlib.sha256(token.encode()).hexdigest()[:12]
        temporary = path.with_name(f".{path.name[:180]}.{tag}{_SUFFIX}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.close(descriptor)
        return temporary.relative_to(self.path).as_posix()

    def arrived(self, name: str, upload: str) -> dict[int, Arrived] | None:
        """See `Place`. A file does not say which of its parts were written: the journal does."""
        return {} if (self.path / upload).exists() else None

    def send(self, name: str, upload: str, number: int, start: int, view: memoryview, crc32: int) -> Arrived:
        """See `Place`."""
        descriptor = os.open(self.path / upload, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], start + done)
        finally:
            os.close(descriptor)
        return Arrived(len(view), "", crc32)

    def finish(self, name: str, upload: str, parts: Sequence[Arrived], crc32: int | None) -> Entry:
        """See `Place`."""
        temporary, path = self.path / upload, self.path / name
        if parts:
            os.truncate(temporary, sum(part.size for part in parts))
        temporary.replace(path)
        entry = self.find(name)
        if entry is None:
            raise StorageError("the file was removed as soon as it was written", where=f"{self.uri}/{name}")
        with self._lock:
            self._unsynced.append(name)
        return entry

    def settle(self) -> None:
        """See `Place`."""
        with self._lock:
            names, self._unsynced = self._unsynced, []
        with ThreadPoolExecutor(8, thread_name_prefix="sync") as pool:
            list(pool.map(self._sync, names))

    def _sync(self, name: str) -> None:
        with (
            filesystems.storage_errors("write", f"{self.uri}/{name}"),
            contextlib.suppress(FileNotFoundError),
        ):
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read_back(self, upload: str, start: int, view: memoryview) -> int:
        """Bytes of a file that is not finished; returns their CRC-32."""
        descriptor = os.open(self.path / upload, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _fill(descriptor, start, view, f"{self.uri}/{upload}")
        finally:
            os.close(descriptor)

    def holds(self, entry: Entry, parts: Sequence[Arrived]) -> bool:
        """See `Place`. A disk does not tell."""
        return False

    def abandon(self, name: str, upload: str) -> None:
        """See `Place`."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / upload).unlink()

    def delete(self, name: str) -> None:
        """See `Place`. Folders that this empties go, too."""
        path = self.path / name
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.path or any(folder.iterdir()):
                return
            folder.rmdir()

    def link(self, name: str, *, to: Place) -> Link | None:
        """See `Place`."""
        return None

    def fetch(
        self, name: str, upload: str, number: int, link: Link, entry: Entry, start: int, size: int
    ) -> Arrived:
        """See `Place`."""
        raise Unsupported("a disk does not fetch")

    def refresh(self) -> bool:
        """See `Place`."""
        return False

    def close(self) -> None:
        """See `Place`."""


def is_part(name: str) -> bool:
    """Whether a name is that of a file of ours that is not finished."""
    return name.endswith(_SUFFIX) and name.rpartition("/")[2].startswith(".")


def _entry(name: str, status: os.stat_result) -> Entry:
    version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
    return Entry(name, status.st_size, version, status.st_mtime)


def _fill(descriptor: int, start: int, view: memoryview, where: str) -> int:
    done = crc = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + _SLICE]], start + done)
        if not count:
            raise Changed(where, "the file became shorter while it was copied")
        crc = zlib.crc32(view[done : done + count], crc)
        done += count
    return crc


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
