"""The folder in which a node's processes keep copies of files: what is there, who is there, and room for more.

The file system is the only ledger. Room that is reserved is a file of its final size; what is in use is locked, and
the operating system lets go of a lock when its process dies, however it dies. So a kill leaves nothing to repair but
files that nobody holds, and whoever looks next removes those.

::

    ledger                        locked for a moment by whoever makes room, publishes or removes
    readers/<id>                  one of each process that uses the folder, locked while it lives; its limit
    readers/<id>.plan             what it will read next
    copies/<dataset>/<file>       a verified copy; locked (shared) for as long as a read of it takes
    copies/<dataset>/<file>%part  on its way here; locked by who brings it

A copy's time of change is its seal, set when it was verified: whatever writes into the file breaks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from isthmus.storage.ranges.cache_locks import entries, is_at, is_held, lock, remove_unheld
from isthmus.storage.ranges.cache_policy import Forecast, Plan, latest_first, make_way

LEDGER, READERS, COPIES, PART = "ledger", "readers", "copies", "%part"
LONGEST_NAME = 200
"""Bytes of a file's name as it stands in the folder."""
FREE_SHARE = 0.75
"""Part of the free space that a folder takes when no limit is given."""
LOCK_PATIENCE_S = 30.0
"""How long to wait for the ledger, which is held for milliseconds: beyond, its holder is stopped or the disk hangs."""

TRIES = 64
"""So many files that are not worth it, and those that are needed later are not looked at: the ledger is held meanwhile."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A file in the folder."""

    path: Path
    dataset: str
    name: str
    size: int
    part: bool
    """Still on its way."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file that this process brings; its descriptor holds the lock."""

    path: Path
    name: str
    size: int
    descriptor: int


class CacheFolder:
    """One process's membership in a cache folder, for one dataset. Safe to share between threads.

    Args:
        path: the folder; made when it is not there.
        dataset: names the dataset's copies; another dataset's, or another version's, never answer to it.
        limit: bytes of all copies of all processes; None: `FREE_SHARE` of what is free, or what the others hold to.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, path: Path, dataset: str, limit: int | None) -> None:
        self.path, self.dataset = path, dataset
        self._id = uuid.uuid4().hex
        self._others: dict[str, tuple[int, Plan]] = {}
        self._reader = -1
        self._make()
        with self.locked():
            copies = self.scan()
            limits = [reader["limit"] for reader in self._living()]
            if limit is None:
                status = os.statvfs(path)
                free = status.f_bavail * status.f_frsize + sum(copy.size for copy in copies)
                limit = min(limits, default=int(FREE_SHARE * free))
            self._own_limit = limit
            self.limit = min([limit, *limits])
            """Bytes that the folder may hold: the smallest of the limits of those who use it."""
            self._join()

    def _make(self) -> None:
        (self.path / COPIES / self.dataset).mkdir(parents=True, exist_ok=True)
        (self.path / READERS).mkdir(exist_ok=True)

    def _join(self) -> None:
        """Makes this process known to the others; again, when somebody removed the folder. Holding the ledger only."""
        path = self.path / READERS / self._id
        if self._reader >= 0:
            if is_at(self._reader, path):
                return
            os.close(self._reader)
        self._reader = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._reader, fcntl.LOCK_EX)
        os.write(self._reader, json.dumps({"limit": self._own_limit, "dataset": self.dataset}).encode())

    def close(self) -> None:
        """Leaves the folder; the copies stay."""
        for name in (f"{self._id}.plan", self._id):
            with contextlib.suppress(OSError):
                (self.path / READERS / name).unlink()
        with contextlib.suppress(OSError):
            os.close(self._reader)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the ledger.

        Raises:
            TimeoutError: another process did not let go of it.
        """
        path = self.path / LEDGER
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                lock(descriptor, LOCK_PATIENCE_S, str(path))
                if is_at(descriptor, path):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the folder was removed and made again while we waited
        try:
            yield
        finally:
            os.close(descriptor)

    def scan(self) -> list[Copy]:
        """The files of the folder, without those that dead processes left half-way. Holding the ledger only."""
        found = []
        for dataset in entries(self.path / COPIES):
            if not dataset.is_dir(follow_symlinks=False):
                continue
            for entry in entries(dataset.path):
                with contextlib.suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    path, part = Path(entry.path), entry.name.endswith(PART)
                    if part and remove_unheld(path):
                        continue
                    size = entry.stat(follow_symlinks=False).st_size
                    name = unquote(entry.name.removesuffix(PART))
                    found.append(Copy(path, dataset.name, name, size, part))
        return found

    def place(self, name: str) -> Path:
        """Where the copy of a file lies."""
        return self.path / COPIES / self.dataset / stored_name(name)

    @contextlib.contextmanager
    def hold(self, name: str, size: int) -> Iterator[int | None]:
        """The descriptor of a file's copy, which nobody gives up meanwhile; None when there is none, or it is damaged."""
        path = self.place(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            intact = False
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                intact = status.st_size == size and status.st_mtime_ns == self._seal(name)
                if not intact:
                    self.remove(name)
            yield descriptor if intact and status.st_nlink else None
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Removes a copy that is damaged, whoever reads it."""
        with contextlib.suppress(OSError):
            self.place(name).unlink()

    def reserve(
        self, wanted: Sequence[tuple[str, int]], mine: Plan, *, unless: Callable[[str], bool]
    ) -> Part | None:
        """Makes room for the first of the files that is worth it and that nobody brings already.

        Args:
            wanted: file and size, in the order of need.
            mine: what this process will read.
            unless: files that are not to be taken now.

        Raises:
            OSError: the folder cannot be used.
        """
        self._make()
        forecast = Forecast([mine, *self._plans()])
        with self.locked():
            self._join()
            self.limit = min([self._own_limit, *(reader["limit"] for reader in self._living())])
            copies = self.scan()
            room = self.limit - sum(copy.size for copy in copies)
            kept = [
                (copy, forecast.of(copy.dataset, copy.name, copy.size), copy.size)
                for copy in copies
                if not copy.part
            ]
            kept = latest_first(kept)
            while room < 0 and kept:  # another process came with a smaller limit
                copy, _, size = kept.pop(0)
                room += size if remove_unheld(copy.path) else 0
            there = {copy.path for copy, _, _ in kept}
            coming = {Path(str(copy.path).removesuffix(PART)) for copy in copies if copy.part}
            tries = 0
            for name, size in wanted:
                path = self.place(name)
                if path in there or path in coming or unless(name):
                    continue
                victims = make_way(forecast.of(self.dataset, name, size), size, room, kept)
                if victims is None:
                    tries += 1
                    if tries == TRIES:
                        break
                    continue
                for victim in victims:
                    if remove_unheld(victim.path):
                        room += victim.size
                kept = [item for item in kept if item[0] not in victims]
                if room >= size:  # else somebody reads a victim just now
                    return self._begin(path, name, size)
        return None

    def _begin(self, path: Path, name: str, size: int) -> Part:
        part = path.with_name(path.name + PART)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            part.unlink(missing_ok=True)
            raise
        return Part(part, name, size, descriptor)

    def publish(self, part: Part) -> None:
        """Makes a file that is complete and verified a copy for all.

        Raises:
            OSError: the folder cannot be used.
        """
        seal = self._seal(part.name)
        os.utime(part.descriptor, ns=(seal, seal))
        os.fsync(part.descriptor)
        with self.locked():
            # Under the ledger: a scan that sees neither the old name nor the new one would find too much room.
            part.path.rename(self.place(part.name))
        os.close(part.descriptor)

    @staticmethod
    def abandon(part: Part) -> None:
        """Gives up a file that will not be completed."""
        with contextlib.suppress(OSError):
            if is_at(part.descriptor, part.path):
                part.path.unlink()
        with contextlib.suppress(OSError):
            os.close(part.descriptor)

    def _seal(self, name: str) -> int:
        # Whole seconds between 2001 and 2018: every file system keeps them, and no clock writes them.
        return (10**9 + zlib.crc32(f"{self.dataset}/{name}".encode()) % (1 << 29)) * 10**9

    # --- the processes that use the folder ---

    def announce(self, plan: Plan) -> None:
        """Tells the others what this process will read.

        Raises:
            OSError: the folder cannot be used.
        """
        self._make()
        head = {
            "dataset": plan.dataset,
            "names": list(plan.names),
            "rest": dict(plan.rest),
            "done": plan.done,
        }
        target = self.path / READERS / f"{self._id}.plan"
        fresh = target.with_suffix(".fresh")
        fresh.write_bytes(
            json.dumps(head).encode() + b"\n" + plan.file.tobytes() + plan.size.astype(np.int64).tobytes()
        )
        fresh.rename(target)

    def _plans(self) -> list[Plan]:
        """What the other living processes will read."""
        plans, known = [], {}
        for entry in entries(self.path / READERS):
            identifier, _, kind = entry.name.partition(".")
            if kind != "plan" or identifier == self._id or not is_held(self.path / READERS / identifier):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                written = entry.stat().st_mtime_ns
                kept = self._others.get(identifier)
                if kept is None or kept[0] != written:
                    kept = written, _parse_plan(Path(entry.path).read_bytes())
                known[identifier] = kept
                plans.append(kept[1])
        self._others = known
        return plans

    def _living(self) -> list[dict[str, Any]]:
        """What the other living processes said when they came; what dead ones left is removed. Holding the ledger only."""
        living = []
        found = entries(self.path / READERS)
        for entry in found:
            if "." in entry.name or entry.name == self._id:
                continue
            path = Path(entry.path)
            if remove_unheld(path):
                continue
            with contextlib.suppress(OSError, ValueError):
                living.append({"limit": int(json.loads(path.read_bytes())["limit"])})
        for entry in found:
            identifier, dot, _ = entry.name.partition(".")
            if dot and not (self.path / READERS / identifier).exists():
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
        return living


def stored_name(name: str) -> str:
    """A file's name as it stands in the folder: one level, whatever folders the dataset has."""
    return quote(name, safe="")


def _parse_plan(data: bytes) -> Plan:
    line, _, arrays = data.partition(b"\n")
    head = json.loads(line)
    count = len(arrays) // 12
    files = np.frombuffer(arrays, np.int32, count)
    if count and not 0 <= int(files.min()) <= int(files.max()) < len(head["names"]):
        raise ValueError("not a plan")
    sizes = np.frombuffer(arrays, np.int64, count, offset=4 * count)
    return Plan(head["dataset"], head["names"], files, sizes, head["rest"], int(head["done"]))
