"""A loader that closes the accesses which were made for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.storage.stream.access import Access
from isthmus.storage.stream.loader import Loader


class OwningLoader(Loader):
    """A :class:`Loader` whose accesses end with it: reads in flight are given up, a cache keeps its copies."""

    def __init__(self, *arguments: Any, access: Sequence[Access], **settings: Any) -> None:
        self._owned_access = tuple(access)
        try:
            super().__init__(*arguments, access=access, **settings)
        except BaseException:
            self._close_access()
            raise

    def close(self) -> None:
        """Gives up reads in flight, stops and joins the threads."""
        self._close_access()
        super().close()

    def _close_access(self) -> None:
        for access in self._owned_access:
            access.close()
