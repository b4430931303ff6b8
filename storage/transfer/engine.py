"""Carries out a plan: many parts at once in bounded memory, each checked, each written down, each file whole or not there.

Threads of this process each own one buffer: memory is threads x bytes of a part, whatever the files. Parts of the files
that are begun go first, so few files are unfinished at any moment.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from isthmus.errors import DataError, IsthmusError, StorageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.transfer.checks import Checks
from isthmus.storage.transfer.crc import combine
from isthmus.storage.transfer.journal import Done, Journal, Started
from isthmus.storage.transfer.local import LocalPlace
from isthmus.storage.transfer.plan import Item
from isthmus.storage.transfer.spec import Arrived, Changed, Entry, Place, Unsupported
from isthmus.storage.transfer.work import FileWork, Progress, SideRetry, WriteRetry

Result = TypeVar("Result")


class Engine:
    """One copy.

    Args:
        parallel: threads, each with a buffer of `part_bytes`.
        by_service: whether a store may fetch files by itself where it can.
        read_back: every file that was written is read again and compared.
        policy: how long a request is tried.
    """

    def __init__(
        self,
        source: Place,
        target: Place,
        journal: Journal,
        *,
        parallel: int,
        part_bytes: int,
        by_service: bool,
        read_back: bool,
        policy: RetryPolicy,
    ) -> None:
        self.source, self.target, self.journal = source, target, journal
        self.parallel, self.part_bytes = parallel, part_bytes
        self.progress = Progress()
        self.counters = Counters()
        self._by_service = by_service
        self._reads = SideRetry(source.uri, policy, self.counters, store=f"copy from {source.uri}")
        self._writes = WriteRetry(target.uri, policy, self.counters, store=f"copy to {target.uri}")
        looks = SideRetry(target.uri, policy, self.counters, store=f"copy to {target.uri}")
        self._checks = Checks(source, target, self._reads, looks, read_back=read_back, step=part_bytes)
        self._retries = (self._reads, self._writes, looks)
        self._wake = threading.Condition()
        self._waiting: deque[Item] = deque()
        self._active: list[FileWork] = []
        self._opening = 0
        self._stopped: BaseException | None = None

    def run(self, items: Sequence[Item], on_progress: Callable[[Progress], None]) -> None:
        """Copies the files.

        Args:
            on_progress: called about once a second, and in the end, in the caller's thread.

        Raises:
            IsthmusError: the first failure that ends it all: a store that refuses for good, a full disk. What is wrong
                with single files is in `progress.failures`.
        """
        self._waiting.extend(items)
        self._stopped = None
        count = max(min(self.parallel, sum(self._parts(item) for item in items)), 1)
        threads = [
            threading.Thread(target=self._work, daemon=True, name=f"copy-{number}") for number in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)
                    if thread.is_alive():
                        on_progress(self.progress)
            on_progress(self.progress)  # even of what ended before anybody looked
        except BaseException as error:
            self._stop(error)
            # Whatever they are in the middle of ends by itself; the journal needs none of it.
            for thread in threads:
                thread.join(2.0)
            raise
        if self._stopped is not None:
            raise self._stopped

    def _parts(self, item: Item) -> int:
        return max(-(-item.entry.size // self.part_bytes), 1)

    def _work(self) -> None:
        buffer = memoryview(b"")
        while True:
            task = self._next()
            if task is None:
                return
            item = task if isinstance(task, Item) else task[0].item
            if len(buffer) < min(self.part_bytes, item.entry.size):
                # Pages of its own, which go back when it is dropped.
                buffer = memoryview(mmap.mmap(-1, min(self.part_bytes, item.entry.size)))
            try:
                if isinstance(task, Item):
                    self._open(task, buffer)
                else:
                    self._part(task[0], task[1], buffer)
            except (DataError, FileNotFoundError) as error:
                self._fail(task, error)
            except BaseException as error:  # noqa: BLE001 - it ends the copy, in the caller's thread
                self._stop(error)
                return
            finally:
                if isinstance(task, Item):
                    with self._wake:
                        self._opening -= 1
                        self._wake.notify_all()

    def _next(self) -> Item | tuple[FileWork, int] | None:
        with self._wake:
            while self._stopped is None:
                for file in self._active:
                    if file.todo:
                        return file, file.todo.popleft()
                if self._waiting:
                    self._opening += 1
                    return self._waiting.popleft()
                if not self._active and not self._opening:
                    return None
                self._wake.wait(1.0)
            return None

    def _stop(self, error: BaseException) -> None:
        with self._wake:
            self._stopped = self._stopped or error
            self._wake.notify_all()
        for retry in self._retries:
            retry.close()

    def _fail(self, task: Item | tuple[FileWork, int], error: Exception) -> None:
        """One file cannot be copied; the others can."""
        item = task if isinstance(task, Item) else task[0].item
        told = (
            error
            if isinstance(error, IsthmusError)
            else Changed(f"{self.source.uri}/{item.entry.name}", "the file was removed while it was copied")
        )
        with self._wake:
            first = isinstance(task, Item) or not task[0].failed
            if not isinstance(task, Item):
                task[0].failed = True
                task[0].todo.clear()
                if task[0] in self._active:
                    self._active.remove(task[0])
            if first:
                self.progress.failures.append(told)
            self._wake.notify_all()

    # One file

    def _open(self, item: Item, buffer: memoryview) -> None:
        entry = item.entry
        if item.crc32 is None and self.source.kind == "s3" and entry.size > self.part_bytes:
            # A listing of S3 tells no checksums, one file does.
            found = self._reads.run(
                entry.name, lambda: self.source.find(entry.name), refresh=self.source.refresh
            )
            if found is not None and found.version == entry.version and found.crc32 is not None:
                item = replace(item, crc32=found.crc32)
        elif item.crc32 is None and entry.crc32 is not None:
            item = replace(item, crc32=entry.crc32)
        link = self.source.link(entry.name, to=self.target) if self._by_service else None
        if entry.size <= self.part_bytes and not (link and entry.size):
            self.forget(entry.name)
            self._whole(item, buffer[: entry.size])
            return
        file = self._resumed(item) or self._begun(item)
        file.link = link
        with self._wake:
            file.todo.extend(number for number in range(file.parts) if number not in file.arrived)
            file.left = len(file.todo)
            self.progress.parts_there += len(file.arrived)
            if file.todo:
                self._active.append(file)
                self._wake.notify_all()
        if not file.left:
            self._finish(file, buffer)

    def _whole(self, item: Item, view: memoryview) -> None:
        entry = item.entry
        crc = self._read(entry, 0, view) if entry.size else 0
        self._checks.vouched(item, crc)
        made = self._write(entry.name, lambda: self.target.put(entry.name, view, crc))
        with self._wake:
            self.progress.bytes += entry.size
            self.progress.parts_sent += 1
        self._done(item, made, crc, view)

    def _resumed(self, item: Item) -> FileWork | None:
        """What an earlier run has begun, if it is of the same source and the store still has it."""
        entry, name = item.entry, item.entry.name
        started = self.journal.started.get(name)
        if started is None:
            return None
        same = (started.size, started.source, started.part_bytes) == (
            entry.size,
            entry.version,
            self.part_bytes,
        )
        there = self._write(name, lambda: self.target.arrived(name, started.upload)) if same else None
        if there is None:
            self.forget(name)
            return None
        file = FileWork(item, started.upload, self._parts(item), None)
        for number, known in started.parts.items() if isinstance(self.target, LocalPlace) else ():
            # The disk may have lost them with the power: they are read back in the end.
            if known.size == self._size(file, number):
                file.arrived[number] = known
                file.old.add(number)
        for number, part in there.items():
            noted = started.parts.get(number)
            if not 0 <= number < file.parts or part.size != self._size(file, number):
                continue
            if part.crc32 is not None:
                file.arrived[number] = part
            elif noted is not None and noted.tag == part.tag:
                file.arrived[number] = noted
            else:
                file.unproven[number] = part
        return file

    def forget(self, name: str) -> None:
        """Drops what an earlier run has begun of a file and nobody will finish."""
        started = self.journal.started.get(name)
        if started is not None:
            self._write(name, lambda: self.target.abandon(name, started.upload))
            self.journal.lose(name)

    def _begun(self, item: Item) -> FileWork:
        entry = item.entry
        token = f"{self.source.uri}\n{entry.name}\n{entry.version}\n{entry.size}\n{self.part_bytes}"
        upload = self._write(entry.name, lambda: self.target.begin(entry.name, token, item.crc32))
        self.journal.start(entry.name, Started(entry.size, entry.version, self.part_bytes, upload))
        return FileWork(item, upload, self._parts(item), None)

    def _size(self, file: FileWork, number: int) -> int:
        return min(self.part_bytes, file.item.entry.size - number * self.part_bytes)

    def _part(self, file: FileWork, number: int, buffer: memoryview) -> None:
        entry, start, size = file.item.entry, number * self.part_bytes, self._size(file, number)
        arrived = self._fetched(file, number, start, size)
        sent = arrived is None
        if arrived is None:
            view = buffer[:size]
            crc = self._read(entry, start, view)
            there = file.unproven.get(number)
            # It arrived, and the kill came before that was written down: known by its MD5.
            if there is not None and hashlib.md5(view, usedforsecurity=False).hexdigest() == there.tag:
                arrived, sent = Arrived(size, there.tag, crc), False
            else:
                arrived = self._write(
                    entry.name, lambda: self.target.send(entry.name, file.upload, number, start, view, crc)
                )
        self.journal.part(entry.name, number, arrived)
        with self._wake:
            file.arrived[number] = arrived
            file.left -= 1
            last = file.left == 0 and not file.failed
            self.progress.bytes += size
            self.progress.parts_sent += sent
            self.progress.parts_there += not sent and file.link is None
        if last:
            self._finish(file, buffer)

    def _fetched(self, file: FileWork, number: int, start: int, size: int) -> Arrived | None:
        """A part that the store took by itself; None when it cannot."""
        link, entry = file.link, file.item.entry
        if link is None or not self._by_service:
            return None
        try:
            arrived = self._write(
                entry.name,
                lambda: self.target.fetch(entry.name, file.upload, number, link, entry, start, size),
            )
        except Unsupported:
            # Then it can none of them, and the bytes go through us.
            self._by_service = False
            return None
        with self._wake:
            self.progress.by_service += 1
        return arrived

    def _finish(self, file: FileWork, buffer: memoryview) -> None:
        item, name = file.item, file.item.entry.name
        parts = [file.arrived[number] for number in range(file.parts)]
        crc: int | None = None
        if all(part.crc32 is not None for part in parts):
            crc = combine((part.crc32 or 0, part.size) for part in parts)
        try:
            if file.link is not None and not file.link.conditional:
                self._checks.unchanged(item.entry)
            self._checks.vouched(item, crc)
        except DataError:
            self.forget(name)
            raise
        if isinstance(self.target, LocalPlace) and self._once_more(file, self.target, buffer):
            return
        made = self._write(name, lambda: self.target.finish(name, file.upload, parts, crc))
        with self._wake:
            if file in self._active:
                self._active.remove(file)
            self._wake.notify_all()
        self._done(item, made, crc, buffer)

    def _once_more(self, file: FileWork, target: LocalPlace, buffer: memoryview) -> bool:
        """Whether a disk gave back other bytes than were written, and these parts are on their way again."""
        old = {number: file.arrived[number] for number in file.old if number in file.arrived}
        wrong = self._checks.damaged(target, file.upload, old, buffer)
        if wrong and file.again:
            raise StorageError(
                "the disk gives back other bytes than were written",
                where=f"{target.uri}/{file.item.entry.name}",
            )
        with self._wake:
            file.again, file.left = True, len(wrong)
            file.old.clear()
            file.unproven.clear()
            file.todo.extend(wrong)
            if wrong and file not in self._active:
                self._active.append(file)
            self._wake.notify_all()
        return bool(wrong)

    def _done(self, item: Item, made: Entry, crc: int | None, buffer: memoryview) -> None:
        try:
            how, known = self._checks.whole(item, made, crc, buffer)
        except StorageError:
            self.journal.lose(item.entry.name)
            raise
        self.journal.finish(item.entry.name, Done(item.entry.size, item.entry.version, made.version, known))
        with self._wake:
            self.progress.files += 1
            self.progress.checked[how] += 1

    def _read(self, entry: Entry, start: int, view: memoryview) -> int:
        return self._reads.run(
            entry.name, lambda: self.source.read(entry, start, view), refresh=self.source.refresh
        )

    def _write(self, name: str, attempt: Callable[[], Result]) -> Result:
        try:
            return self._writes.run(name, attempt, refresh=self.target.refresh)
        except FileNotFoundError as error:
            raise StorageError(
                "cannot write: there is no such place",
                where=f"{self.target.uri}/{name}",
                hint="make it first",
            ) from error
