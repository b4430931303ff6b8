"""That an answer is of the file that the index describes and that was read before."""

from __future__ import annotations

from isthmus.storage.ranges.spec import FileCutShort, FileReplaced

_HINT = "a dataset must not change while it is read: verify it, and start again"


class Versions:
    """What was first seen under each name of a root: its ETag, or without one its time of change, must stay."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._first: dict[str, str] = {}

    def check(self, name: str, size: int, version: str, end: int, file_bytes: int | None) -> None:
        """Looks at what an answer says of its file.

        Args:
            size: of the whole file.
            version: its ETag, or its time of change; empty when the store tells neither.
            end: of the bytes that are read.
            file_bytes: the index's size, if it is known.

        Raises:
            FileReplaced: it is another file, or of another size than `file_bytes`.
            FileCutShort: it ends before `end`.
        """
        where = f"{self.uri}/{name}"
        if file_bytes is not None and size != file_bytes:
            raise FileReplaced(
                f"the file has {size:,} bytes, {file_bytes:,} in the index", where=where, hint=_HINT
            )
        if version and self._first.setdefault(name, version) != version:
            raise FileReplaced("the file was replaced while it was being read", where=where, hint=_HINT)
        if size < end:
            raise FileCutShort(f"the file ends at byte {size:,}, {end:,} were to be read", where=where)
