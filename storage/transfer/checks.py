"""Whether what arrived is what was meant: by the dataset's index, by the store's own word, by reading it again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from isthmus.errors import DataError, StorageError
from isthmus.storage.transfer.local import LocalPlace
from isthmus.storage.transfer.plan import Item
from isthmus.storage.transfer.spec import Arrived, Changed, Entry, Place
from isthmus.storage.transfer.work import SideRetry


class Checks:
    """The checks of one copy.

    Args:
        reads: how requests of the source are tried, and
        target_reads: those of the destination.
        read_back: every file that was written is read again and compared.
    """

    def __init__(
        self,
        source: Place,
        target: Place,
        reads: SideRetry,
        target_reads: SideRetry,
        *,
        read_back: bool,
        step: int,
    ) -> None:
        self.source, self.target = source, target
        self._reads, self._target_reads = reads, target_reads
        self._read_back, self._step = read_back, step

    def vouched(self, item: Item, crc: int | None) -> None:
        """That the source's bytes are those that its dataset's index tells, before they appear anywhere."""
        if item.crc32 is not None and crc is not None and crc != item.crc32:
            raise DataError(
                "its bytes are not those that the dataset's index vouches for",
                where=f"{self.source.uri}/{item.entry.name}",
                hint="`isthmus data verify` says which row group; nothing was written under its name",
            )

    def unchanged(self, entry: Entry) -> None:
        """That the source is still the one that was listed, where the store that read it could not be told which."""
        found = self._reads.run(entry.name, lambda: self.source.find(entry.name), refresh=self.source.refresh)
        if found is None or found.version != entry.version:
            raise Changed(f"{self.source.uri}/{entry.name}")

    def damaged(
        self, target: LocalPlace, upload: str, parts: Mapping[int, Arrived], buffer: memoryview
    ) -> list[int]:
        """The parts of a file on a disk that are not what was written: of a machine that lost power, say."""
        wrong = []
        for number, part in sorted(parts.items()):
            view = buffer[: part.size]
            if target.read_back(upload, number * self._step, view) != part.crc32:
                wrong.append(number)
        return wrong

    def whole(self, item: Item, made: Entry, crc: int | None, buffer: memoryview) -> tuple[str, int | None]:
        """How a file that is there was found to be right, and its CRC-32 where somebody knows it.

        Args:
            made: what the destination says of it.
            crc: of the bytes that passed through here; None: the store fetched some by itself.
            buffer: memory to read into.

        Returns:
            `checksum`: of the whole, as the destination, the source's index or the source's store tells it; `parts`: each
            part was received and kept without an error; `service`: the store copied by itself and told none; `read back`.

        Raises:
            StorageError: it is not the file that was meant.
        """
        name, told, wanted = item.entry.name, made.crc32, crc if crc is not None else item.crc32
        if wanted is None and told is not None:
            found = self._reads.run(name, lambda: self.source.find(name), refresh=self.source.refresh)
            wanted = found.crc32 if found is not None and found.version == item.entry.version else None
        how = "checksum" if None not in (wanted, told) else "parts" if crc is not None else "service"
        if isinstance(self.target, LocalPlace) and item.crc32 is not None:
            how = "checksum"
        if self._read_back:
            told = self.read_all(self.target, made, buffer)
            wanted = wanted if wanted is not None else self.read_all(self.source, item.entry, buffer)
            how = "read back"
        if None not in (wanted, told) and wanted != told:
            raise StorageError(
                "the destination has other bytes than were sent",
                where=f"{self.target.uri}/{name}",
                hint="copy again",
            )
        return how, wanted if wanted is not None else told

    def read_all(self, place: Place, entry: Entry, buffer: memoryview) -> int:
        """The CRC-32 of a file, by reading it."""
        retry = self._reads if place is self.source else self._target_reads
        crc = 0
        memory = buffer[: self._step] if len(buffer) else memoryview(bytearray(min(entry.size, self._step)))
        for start in range(0, entry.size, max(len(memory), 1)):
            view = memory[: min(len(memory), entry.size - start)]
            retry.run(entry.name, lambda: place.read(entry, start, view), refresh=place.refresh)  # noqa: B023
            crc = zlib.crc32(view, crc)
        return crc
