"""Copies of files between two places of any kind: resumable, each whole or not there, and checked by hash or size."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import DataError, IsthmusError, StorageError
from isthmus.files import temporary_beside
from isthmus.storage import filesystems
from isthmus.storage.rundir.patience import persistently
from isthmus.storage.rundir.process import ProcessId

_PIECE = 8 << 20
_AT_ONCE = 4
_RETRY_S = 120.0
"""For which a file that fails is tried again, from its first failure."""


@dataclass(frozen=True, slots=True)
class Item:
    """A file that is to be copied."""

    name: str
    """Below the root, with forward slashes."""
    size: int
    sha256: str | None = None
    """Of its bytes, where somebody wrote that down; then they must be these."""
    fixed: bool = True
    """It never changes once it is there, so one of the same size at the target is it."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did."""

    files: int
    bytes: int
    kept: int
    """Files that were there already."""
    gone: tuple[str, ...] = ()
    """Names that the source had when it was listed, and no longer had when they were read."""


class Tree:
    """The files below a root. Safe to use from several threads.

    Raises:
        NotInstalled, UsageError, StorageError: as `filesystems.filesystem`, and as the store refuses.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/") or "/"
        self._files, path = filesystems.filesystem(self.uri)
        self._root = str(path).rstrip("/")
        self.local: Path | None = filesystems.local_path(uri) if filesystems.is_local(uri) else None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name -> bytes of all files, or of those below a folder; hidden ones and temporary ones are left out."""
        root = f"{self._root}/{folder}".rstrip("/")
        self._files.invalidate_cache()
        try:
            with filesystems.storage_errors("list", self.uri):
                found: Mapping[str, Mapping[str, Any]] = self._files.find(root, detail=True)
        except FileNotFoundError:
            return {}
        names = {
            str(path)[len(self._root) :].lstrip("/"): int(row["size"] or 0) for path, row in found.items()
        }
        return {
            name: size
            for name, size in sorted(names.items())
            if not any(part.startswith(".") and part != ".metadata" for part in name.split("/"))
        }

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a file. Raises FileNotFoundError, StorageError."""
        with (
            filesystems.storage_errors("read", f"{self.uri}/{name}"),
            self._files.open(f"{self._root}/{name}", "rb") as stream,
        ):
            while piece := stream.read(_PIECE):
                yield piece

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        """Creates or replaces a file; it appears whole, when all pieces were there. Raises StorageError."""
        with filesystems.storage_errors("write", f"{self.uri}/{name}"):
            if self.local is not None:
                _write_local(self.local / name, pieces)
                return
            file = self._files.open(f"{self._root}/{name}", "wb", block_size=_PIECE)
            try:
                for piece in pieces:
                    file.write(piece)
            except BaseException:
                # close() would finish the upload with what is there so far.
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True
                raise
            file.close()


def copy(
    source: Tree,
    target: Tree,
    items: Sequence[Item],
    *,
    on_file: Callable[[Item, bool], None] = lambda item, kept: None,
) -> Copied:
    """Copies the files that are not there yet.

    A file with a known hash counts as there only when its bytes have that hash, so a copy that was cut off goes on where it
    was.

    Args:
        on_file: called after each, with whether it was there already; from several threads, one at a time.

    Raises:
        DataError: the source's bytes are not those that were written down.
        PlaceNotFound: the target's bucket is not there.
        StorageError: a store refused, past the retries.
    """
    there = target.sizes()
    lock = threading.Lock()
    done = {"files": 0, "bytes": 0, "kept": 0}
    gone: list[str] = []

    def one(item: Item) -> None:
        kept = item.fixed and there.get(item.name) == item.size
        if kept and item.sha256 is not None:
            kept = persistently(lambda: _hash(target, item.name), _RETRY_S) == item.sha256
        if not kept:
            try:
                persistently(lambda: _copy(source, target, item), _RETRY_S)
            except _Gone:
                with lock:
                    gone.append(item.name)
                return
        with lock:
            done["kept" if kept else "files"] += 1
            done["bytes"] += 0 if kept else item.size
            on_file(item, kept)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy") as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return Copied(done["files"], done["bytes"], done["kept"], tuple(sorted(gone)))


class _Gone(IsthmusError):
    """The source no longer has the file."""


def _copy(source: Tree, target: Tree, item: Item) -> None:
    # Anew at each try.
    digest, size = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        try:
            for piece in source.pieces(item.name):
                digest.update(piece)
                size += len(piece)
                yield piece
        except FileNotFoundError:
            raise _Gone(item.name) from None
        # Before the last byte is let go: a file that is not the one written down must not appear.
        if item.sha256 is not None and digest.hexdigest() != item.sha256:
            raise DataError(
                "its bytes are not the ones that were written",
                where=f"{source.uri}/{item.name}",
                hint="copy an older checkpoint: this one is damaged",
            )
        if size < item.size:
            raise StorageError(f"read {size} of {item.size} bytes", where=f"{source.uri}/{item.name}")

    target.write(item.name, pieces())


def _hash(tree: Tree, name: str) -> str:
    digest = hashlib.sha256()
    for piece in tree.pieces(name):
        digest.update(piece)
    return digest.hexdigest()


def _write_local(path: Path, pieces: Iterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        # Of a copy that was killed.
        number = left.name[len(path.name) + 2 :].partition("-")[0]
        if number.isdigit() and ProcessId.of(int(number)) is None:
            left.unlink(missing_ok=True)
    with temporary_beside(path) as temporary:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
