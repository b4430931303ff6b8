"""What a copy has done, written down as it goes: after a kill at any moment the next one goes on from here.

A line a fact, each of them JSON, appended before the next step relies on it; a line that a kill cut off is ignored. What
the store itself can tell (the parts of an upload, the names of blocks) is asked of it, so a lost line costs no second
sending: at most a part is read again to know its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.errors import StorageError, UsageError
from isthmus.storage.transfer.spec import Arrived


@dataclass(slots=True)
class Started:
    """A file whose parts are on their way."""

    size: int
    source: str
    """The source's version."""
    part_bytes: int
    upload: str
    parts: dict[int, Arrived] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """A file that was copied and checked: while both sides still have these versions, they are the same."""

    size: int
    source: str
    target: str
    crc32: int | None


class Journal:
    """The journal of copies from one place to another.

    Args:
        folder: where journals of this machine are kept.
        source: URI, and
        target: URI: there is one journal for each pair.
        dry: it is only read, even while another process writes it.

    Raises:
        UsageError: another process copies between the two.
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, source: str, target: str, *, dry: bool = False) -> None:
        key = hashlib.sha256(f"{source}\n{target}".encode()).hexdigest()[:16]
        self.path = folder / key / "journal.jsonl"
        self.started: dict[str, Started] = {}
        self.done: dict[str, Done] = {}
        self._lock = threading.Lock()
        self._about = {"from": source, "to": target}
        self._file: Any = None
        self._held: int | None = None
        if not dry:
            self._hold(target)
        for fact in self._facts():
            self._apply(fact)
        if not dry:
            self._file = self._rewritten()

    def _hold(self, target: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held = os.open(self.path.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"cannot keep a journal: {error.strerror}", where=str(self.path)) from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._held)
            raise UsageError(
                "another process is copying between these two places",
                where=target,
                hint="wait for it, or end it",
            ) from None

    def start(self, name: str, started: Started) -> None:
        """Before the first part is sent."""
        self.started[name] = started
        self._append(_started(name, started), sync=True)

    def part(self, name: str, number: int, arrived: Arrived) -> None:
        """After the store has a part."""
        self.started[name].parts[number] = arrived
        self._append(
            {"part": name, "n": number, "size": arrived.size, "tag": arrived.tag, "crc": arrived.crc32}
        )

    def lose(self, name: str) -> None:
        """What was sent of a file is of no use."""
        self.started.pop(name, None)
        self._append({"lost": name})

    def finish(self, name: str, done: Done) -> None:
        """After a file is there and was checked."""
        self.started.pop(name, None)
        self.done[name] = done
        self._append(_done(name, done))

    def close(self) -> None:
        """Lets another process copy between the two."""
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self._file.close()
                os.close(held)

    def _append(self, fact: dict[str, Any], *, sync: bool = False) -> None:
        line = (json.dumps(fact, separators=(",", ":")) + "\n").encode()
        with self._lock:
            try:
                self._file.write(line)
                if sync:
                    os.fdatasync(self._file.fileno())
            except OSError as error:
                raise StorageError(f"cannot write: {error.strerror}", where=str(self.path)) from error

    def _facts(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            for line in file:
                # The last line may be half a line; nothing behind it was written by us.
                with contextlib.suppress(ValueError):
                    fact = json.loads(line)
                    if isinstance(fact, dict):
                        yield fact

    def _apply(self, fact: dict[str, Any]) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if "file" in fact:
                self.started[fact["file"]] = Started(
                    int(fact["size"]), str(fact["source"]), int(fact["part_bytes"]), str(fact["upload"])
                )
            elif "part" in fact:
                arrived = Arrived(int(fact["size"]), str(fact["tag"]), fact["crc"])
                self.started[fact["part"]].parts[int(fact["n"])] = arrived
            elif "lost" in fact:
                self.started.pop(fact["lost"], None)
            elif "done" in fact:
                self.started.pop(fact["done"], None)
                self.done[fact["done"]] = Done(
                    int(fact["size"]), str(fact["source"]), str(fact["target"]), fact["crc"]
                )

    def _rewritten(self) -> Any:
        """The journal without what is over, open for more."""
        temporary = self.path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                for fact in self._all():
                    file.write((json.dumps(fact, separators=(",", ":")) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            return self.path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"cannot write: {error.strerror}", where=str(self.path)) from error

    def _all(self) -> Iterator[dict[str, Any]]:
        yield {"copy": self._about}
        for name, done in self.done.items():
            yield _done(name, done)
        for name, started in self.started.items():
            yield _started(name, started)
            for number, part in started.parts.items():
                yield {"part": name, "n": number, "size": part.size, "tag": part.tag, "crc": part.crc32}


def _started(name: str, started: Started) -> dict[str, Any]:
    return {
        "file": name,
        "size": started.size,
        "source": started.source,
        "part_bytes": started.part_bytes,
        "upload": started.upload,
    }


def _done(name: str, done: Done) -> dict[str, Any]:
    return {"done": name, "size": done.size, "source": done.source, "target": done.target, "crc": done.crc32}
