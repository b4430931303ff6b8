"""Metrics: line-delimited JSON in parts.

A file system gets one part for each writer, appended to and flushed line by line, so that a kill loses at most
the line being written. An object store cannot append: there a new part appears every few seconds.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.storage.rundir.store import Store, storage_error


class MetricsWriter:
    """Writes rows of one kind; safe to use from several threads.

    Args:
        store: the run directory's store.
        kind: such as `train`, `validation`, `system-node0`.
        writer: tells writers of one kind apart in the part's name.
        part_seconds: on an object store, the age at which buffered rows become a part.
    """

    def __init__(self, store: Store, kind: str, *, writer: str = "main", part_seconds: float = 15.0) -> None:
        self._store = store
        self._kind = kind
        self._writer = writer
        self._part_seconds = part_seconds
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._buffered_since = time.monotonic()
        self._torn = False
        self._path = store.local_path(self._part_name())
        self._file: Any = None

    def _part_name(self) -> str:
        return (
            f"metrics/{self._kind}/{time.time_ns() // 1000:017d}-{self._writer}-{secrets.token_hex(2)}.jsonl"
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row; `time` (seconds since 1970, UTC) is added when absent. Raises StorageError."""
        line = json.dumps({"time": time.time(), **row}, default=_plain, separators=(",", ":"))
        with self._lock:
            if self._path is not None:
                self._append(line)
                return
            if not self._buffer:
                self._buffered_since = time.monotonic()
            self._buffer.append(line)
            if time.monotonic() - self._buffered_since >= self._part_seconds:
                self._flush_part()

    def _append(self, line: str) -> None:
        assert self._path is not None
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered: one write a line, nothing left behind in this process when it is killed.
                self._file = self._path.open("ab", buffering=0)
            # After a write that failed half way (disk full), the next line starts on its own.
            data = (("\n" if self._torn else "") + line + "\n").encode()
            self._torn = True
            if self._file.write(data) != len(data):
                raise OSError(28, "short write")
            self._torn = False
        except OSError as error:
            raise storage_error(error, str(self._path), "write") from error

    def _flush_part(self) -> None:
        if self._buffer:
            self._store.write(self._part_name(), ("\n".join(self._buffer) + "\n").encode())
            self._buffer.clear()

    def flush(self) -> None:
        """Makes every row so far visible to readers."""
        with self._lock:
            self._flush_part()

    def close(self) -> None:
        """Flushes; further rows open a new part."""
        self.flush()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    # numpy and torch scalars, without importing either.
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def read_rows(store: Store, kind: str) -> Iterator[dict[str, Any]]:
    """All rows of a kind in the order written; a line torn by a kill is left out."""
    folder = f"metrics/{kind}"
    for name in store.names(folder):
        data = store.read(f"{folder}/{name}")
        for line in (data or b"").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def last_attempt(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a step: one a step, of the last attempt that did it, by step. Rows without a step: all, first."""
    plain: list[dict[str, Any]] = []
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "step" not in row:
            plain.append(row)
            continue
        known = by_step.get(row["step"])
        if known is None or row.get("attempt", 0) >= known.get("attempt", 0):
            by_step[row["step"]] = row
    return plain + [by_step[step] for step in sorted(by_step)]
