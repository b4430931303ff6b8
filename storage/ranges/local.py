"""Byte ranges of files on this machine: disks, and mounts of stores (FastFile, blobfuse), which come and go."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isthmus.storage.ranges.causes import Kind, ReadFailed
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.paths import checked
from isthmus.storage.ranges.retry import Retry, RetryPolicy
from isthmus.storage.ranges.spec import FileCutShort, FileReplaced

_IOVECS = 1024  # IOV_MAX of Linux
_NBYTES = operator.attrgetter("nbytes")
CHECK_S = 0.25
"""How old the check of a file that is held may be."""
_OPEN_FILES = 64
APART = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"})
"""File systems of disks and memory that this machine's own page cache stands before."""
_FIRST_SEEN_LIMIT = 1_000_000  # names; a dataset has thousands of shards


class _Seen(NamedTuple):
    """What tells a file from another of the same name."""

    inode: int
    modified_ns: int
    size: int


class Held:
    """An open file and how many reads use it; closed when nobody does and it left the cache, or when nobody knows it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.users, self.dropped = descriptor, 0, False
        self.checked = 0.0
        """When it was last found to be the file that the index describes."""
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # the system does that

    def close(self) -> None:
        """Closes it, once."""
        self._close()


class _Descriptors:
    """Open files by name, a small LRU. A file that is in use is closed after its last reader."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, Held] = OrderedDict()

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[int]:
        """The descriptor of a file, which stays open as long as the block runs."""
        file = self.take(name)
        try:
            yield file.descriptor
        except OSError:
            # A descriptor of a mount that went away never works again.
            self.drop(name)
            raise
        finally:
            self.give((file,))

    def give(self, files: Sequence[Held]) -> None:
        """Takes files back."""
        with self._lock:
            for file in files:
                file.users -= 1
            unused = [file for file in files if file.dropped and not file.users]
        for file in unused:
            file.close()

    def drop(self, name: str) -> None:
        """Forgets a file: the next read opens it again."""
        with self._lock:
            file = self._files.pop(name, None)
        if file is not None:
            self._discard([file])

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
        self._discard(files)

    def take(self, name: str) -> Held:
        """A file, open until it is given back."""
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                file.users += 1
                return file
        # Opening may take long on a mount: not under the lock.
        opened = Held(os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC))
        dropped = []
        with self._lock:
            other = self._files.get(name)
            if other is not None:
                other.users += 1
                dropped.append(opened)
            else:
                self._files[name] = opened
                opened.users += 1
                while len(self._files) > self.limit:
                    dropped.append(self._files.popitem(last=False)[1])
        self._discard(dropped)
        return other or opened

    def _discard(self, files: list[Held]) -> None:
        for file in files:
            with self._lock:
                file.dropped = True
                unused = not file.users
            if unused:
                file.close()


class LocalRanges:
    """`Ranges` of a folder of this machine, by `preadv` straight into the caller's memory.

    A file must stay the one that this process opened first under its name: same size and time of change, and on file
    systems whose inode numbers mean something (not FUSE, which makes them up as it goes) the same inode.

    A read that hangs in the kernel (a dead mount) cannot be cancelled by any means of a process; the caller's own limit
    has to name it. A mount that answers with errors, or is gone for a while, is waited for as the policy says.
    """

    direct = True
    max_depth = 32

    def __init__(self, uri: str, folder: Path, policy: RetryPolicy, counters: Counters) -> None:
        self.uri = uri
        self._folder = folder
        self._counters = counters
        self._retry = Retry(uri, policy, counters, store=f"file://{folder}")
        self._files = _Descriptors(folder, _OPEN_FILES)
        self._first: dict[str, _Seen] = {}
        self._first_lock = threading.Lock()
        self._device = _device(folder)
        kind = _kind(folder)
        self._inodes_count = not kind.startswith("fuse")
        self.apart = kind in APART
        """Rows that lie apart may be read one by one: the page cache stands before the disk, and reads ahead when told.
        Not so on a mount of a store or over a network, where each read may be a request."""

    def read(self, name: str, start: int, length: int, *, file_bytes: int | None = None) -> memoryview:
        """See `Ranges.read`."""
        memory = np.empty(length, np.uint8).data
        self.scatter(name, start, [memory], file_bytes=file_bytes)
        return memory

    def scatter(
        self, name: str, start: int, views: Sequence[memoryview], *, file_bytes: int | None = None
    ) -> None:
        """See `Ranges.scatter`."""
        checked(name, self.uri)
        wanted = sum(map(_NBYTES, views))
        self._retry.run(name, lambda: self._attempt(name, start, views, wanted, file_bytes))

    def hold(self, files: Sequence[tuple[str, int]]) -> list[Held]:
        """Files (name, and bytes as the index has them) that stay open until they are given to :meth:`release`.

        They are checked as `scatter` checks them when they were opened, then every quarter of a second, and whichever was
        not checked for longest: one that was replaced meanwhile is read as it was. Nothing is tried again.

        Raises:
            OSError, DataError: as it comes; `scatter` says what it means, or rides it out.
        """
        held: list[Held] = []
        self._files.limit = max(self._files.limit, 2 * len(files))
        try:
            held += [self._files.take(checked(name, self.uri)) for name, _ in files]
            oldest = min((file.checked for file in held), default=0.0)
            now = time.monotonic()
            for file, (name, file_bytes) in zip(held, files, strict=True):
                if file.checked > oldest and now - file.checked < CHECK_S:
                    continue
                status = os.fstat(file.descriptor)
                if status.st_nlink == 0:
                    raise FileNotFoundError(name)
                self._check(name, status, file_bytes)
                file.checked = now
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Sequence[Held]) -> None:
        """The files are used no more."""
        self._files.give(held)

    def close(self) -> None:
        """See `Ranges.close`."""
        self._retry.close()
        self._files.clear()

    def _attempt(
        self, name: str, start: int, views: Sequence[memoryview], wanted: int, file_bytes: int | None
    ) -> None:
        try:
            with self._files.using(name) as descriptor:
                status = os.fstat(descriptor)
                if status.st_nlink == 0:
                    # Deleted or replaced by a rename while it was open: ask who answers to the name now.
                    status = (self._folder / name).stat()
                    self._check(name, status, file_bytes)
                    self._files.drop(name)
                self._check(name, status, file_bytes)
                done = _preadv_all(descriptor, views, start, wanted)
        except FileNotFoundError:
            self._root_is_there()
            if (self._folder / name).exists():
                raise ReadFailed(Kind.PASSING, "the folder was gone for a moment") from None
            raise
        self._counters.add("bytes", done)
        if done == wanted:
            return
        if start + wanted > status.st_size:
            raise FileCutShort(
                f"the file ends at byte {status.st_size:,}, {start + wanted:,} were to be read",
                where=f"{self.uri}/{name}",
            )
        self._files.drop(name)
        raise ReadFailed(Kind.PASSING, "the file system returned fewer bytes than the file has")

    def _check(self, name: str, status: os.stat_result, file_bytes: int | None) -> None:
        """That the file is the one the index describes, and the one that was read before."""
        where = f"{self.uri}/{name}"
        if file_bytes is not None and status.st_size != file_bytes:
            raise FileReplaced(
                f"the file has {status.st_size:,} bytes, {file_bytes:,} in the index", where=where, hint=_HINT
            )
        inode = status.st_ino if self._inodes_count else 0
        seen = _Seen(inode, status.st_mtime_ns, status.st_size)
        first = self._first.get(name)
        if first is None:
            with self._first_lock:
                if len(self._first) >= _FIRST_SEEN_LIMIT:
                    self._first.pop(next(iter(self._first)))
                first = self._first.setdefault(name, seen)
        if seen != first:
            self._files.drop(name)
            raise FileReplaced("the file was replaced while it was being read", where=where, hint=_HINT)

    def _root_is_there(self) -> None:
        """Raises ReadFailed when not a file is missing but the whole root: a mount that went away."""
        if _device(self._folder) is None:
            raise ReadFailed(Kind.PASSING, "the folder itself is gone or cannot be read")
        # Below a mount that is gone lies an empty folder, on another device.
        if self._device is not None and _device(self._folder) != self._device:
            raise ReadFailed(Kind.PASSING, "the mount went away")


_HINT = "a dataset must not change while it is read: verify it, and start again"


def _preadv_all(descriptor: int, views: Sequence[memoryview], start: int, wanted: int) -> int:
    """Fills the views, `wanted` bytes, from an offset on; returns the bytes read, fewer only at the end of the file."""
    if len(views) <= _IOVECS:
        count = os.preadv(descriptor, views, start)
        if count in (wanted, 0):
            return count  # nearly always: what follows looks at every view
    views = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]
    done, first, skip = 0, 0, 0
    while first < len(views):
        group = list(views[first : first + _IOVECS])
        if skip:
            group[0] = group[0].cast("B")[skip:]
        count = os.preadv(descriptor, group, start + done)
        if count == 0 and any(view.nbytes for view in group):
            return done
        done += count
        count += skip
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        skip = count
    return done


def _device(folder: Path) -> int | None:
    """The device that a folder lies on; None when it is not there or cannot be listed."""
    try:
        with os.scandir(folder):
            return folder.stat().st_dev
    except OSError:
        return None


def _kind(folder: Path) -> str:
    """The kind of file system that a folder lies on; empty when it cannot be told."""
    kind, longest = "", -1
    try:
        path = str(folder.resolve())
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, rest = line.partition(" - ")
            point = fields.split(" ")[4].encode().decode("unicode_escape")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                kind, longest = rest.split(" ")[0], len(point)
    except (OSError, IndexError, UnicodeError):
        return ""
    return kind
