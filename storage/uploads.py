"""Whole files from memory to any store: retried within a budget, in parallel parts where the store takes parts.

An object store is written by obstore where it is installed: the memory goes out as it is, without a copy, in parts
that are each tried again on their own. Otherwise fsspec writes, through a buffer of its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import StorageError
from isthmus.files import temporary_beside
from isthmus.storage import filesystems
from isthmus.storage.ranges import clients
from isthmus.storage.ranges.causes import Cause, ReadFailed
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import connect
from isthmus.storage.ranges.retry import Retry, RetryPolicy

PART_BYTES = 16 << 20
"""Of an upload in parts."""
PARTS_AT_ONCE = 8
"""Parts of one file on the way at the same time."""
_PIECE = 8 << 20
_RETRIES = 3
"""Of a part, by a client of fsspec. Then the file starts over, as often as the budget allows."""
_STALL_S = 120.0
"""A part gets no answer while it is being sent; this is for the whole of one, at 1 MB/s and eight at once."""


class Uploads:
    """Writes files below a root. Safe to use from several threads; no file appears half written in an object store.

    Args:
        root: a folder or prefix; made when the first file is written.
        budget_s: how long a write that fails is tried again, from its first failure.

    Raises:
        StorageError, UsageError: no credentials, or a storage account that nobody names.
    """

    def __init__(self, root: str, *, budget_s: float) -> None:
        self.root = root.rstrip("/")
        self.local = filesystems.is_local(root)
        policy = RetryPolicy(budget_s=budget_s, stall_s=_STALL_S)
        parts = urlsplit(root)
        # Its own gate: a store that wants fewer writes must not hold up the reads of training data.
        gate = f"write {parts.scheme}://{parts.netloc}"
        self._retry = _WriteRetry(self.root, policy, Counters(), store=gate)
        self._folder: Path | None = filesystems.local_path(root) if self.local else None
        self._client: Any = None
        self._prefix = ""
        # Made here, in the thread of the caller: a client that is made lazily would be made by several threads.
        scheme = filesystems.scheme_of(root)
        if scheme in clients.OBJECT_SCHEMES and clients.obstore_usable():
            try:
                self._client, self._prefix = clients.connect(root, policy, writing=True)
            except ReadFailed as error:
                raise StorageError(
                    f"cannot write: {error.cause.words}", where=root, hint=error.cause.hint
                ) from error
        elif not self.local:
            self._files, self._prefix = connect(root, policy, retries=_RETRIES)

    def put(self, name: str, data: memoryview | bytes) -> None:
        """Creates or replaces a file. On a file system its bytes are on the disk when this returns.

        Raises:
            StorageError: refused for good, or still failing after the budget; one line with the cause.
        """
        try:
            self._retry.run(name, lambda: self._put(name, data), refresh=self._refresh)
        except FileNotFoundError as error:
            raise StorageError("cannot write: there is no such place", where=f"{self.root}/{name}") from error

    def _put(self, name: str, data: memoryview | bytes) -> None:
        if self._folder is not None:
            _write(self._folder / name, data)
        elif self._client is not None:
            import obstore

            # Read once: a refresh of another thread may replace it.
            client, path = self._client, f"{self._prefix}/{name}".lstrip("/")
            obstore.put(client, path, data, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
        else:
            self._put_fsspec(f"{self._prefix.rstrip('/')}/{name}", memoryview(data))

    def _put_fsspec(self, path: str, data: memoryview) -> None:
        if len(data) <= PART_BYTES:
            self._files.pipe_file(path, bytes(data))
            return
        options: dict[str, Any] = {"block_size": PART_BYTES}
        if filesystems.scheme_of(self.root) not in {"memory", "file"}:
            options["max_concurrency"] = PARTS_AT_ONCE
        file = self._files.open(path, "wb", **options)
        try:
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE])
        except BaseException:
            # close() would finish the upload with what is there so far.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    def _refresh(self) -> bool:
        """Looks credentials up anew, after the store refused those that we have."""
        if self._client is None:
            return False
        self._client, self._prefix = clients.connect(self.root, self._retry.policy, writing=True)
        return True


class _WriteRetry(Retry):
    def _given_up(self, name: str, cause: Cause, tries: int, seconds: float) -> StorageError:
        how_often = "" if tries == 1 else f", tried {tries} times in {seconds:.0f} s"
        return StorageError(
            f"cannot write: {cause.words}{how_often}", where=f"{self.uri}/{name}", hint=cause.hint
        )


def _write(path: Path, data: memoryview | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    left = memoryview(data)
    # Whole or not at all, as in an object store: whoever else writes the same file is not mixed into it.
    with temporary_beside(path) as temporary:
        with temporary.open("wb", buffering=0) as file:
            while left:
                written = file.write(left[:_PIECE])
                if not written:
                    raise OSError(28, "short write")
                left = left[written:]
            os.fsync(file.fileno())
        temporary.replace(path)
