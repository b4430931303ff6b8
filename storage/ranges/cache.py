"""Byte ranges through a bounded folder of whole files, shared by the processes of a node.

No read waits for the cache. A file that is there is read from it; of one that is not, the range is read from the store
at once, whoever may be bringing the file meanwhile: a rank that waited for another's 1.5 GB would idle for seconds,
and the range costs 10 MB of a transfer that is many times that. What is brought, and what makes way for it, follows
what the ranks said they will read next (`expect`), by the rules of :mod:`isthmus.storage.ranges.cache_policy`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.ranges.cache_fill import PIECE_BYTES, Filler
from isthmus.storage.ranges.cache_folder import LONGEST_NAME, CacheFolder, Part, stored_name
from isthmus.storage.ranges.cache_policy import Plan, Upcoming
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import _preadv_all
from isthmus.storage.ranges.spec import Ranges

ANNOUNCE_EVERY_S = 1.0
"""How often the others are told how far this process is."""
BROUGHT = "cache_brought_bytes"
"""Counter: bytes that were fetched into the folder, beyond those that `bytes` counts."""

Verify = Callable[[str, int], None]
"""Checks the file of a name that an open descriptor holds. DataError: it is not what it should be."""


class Cache:
    """One process's use of a cache folder for one dataset. Safe to share between threads.

    A folder that cannot be used (read-only, no locks, gone, its disk full) is no error: one warning, and reads go to
    the store.

    Args:
        folder: shared by all processes of the node, on a disk of its own.
        dataset: names the dataset and its version.
        sizes: the files that may be kept -> their bytes.
        store: where a file comes from; its readers are this cache's own, which `close` closes.
        limit: bytes of all copies in the folder; None: 0.75 of what is free.
        verify: checks a file before anyone reads it.
        counters: `cache_hits` and `cache_misses` count reads, `cache_brought_bytes` what was fetched for later ones.
        piece_bytes: read from the store in one go when a file is brought.

    Raises:
        UsageError: the limit is smaller than the largest file.
    """

    def __init__(
        self,
        folder: Path,
        dataset: str,
        sizes: Mapping[str, int],
        store: Callable[[str], Ranges],
        *,
        limit: int | None = None,
        verify: Verify | None = None,
        counters: Counters | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if limit is not None and largest is not None and limit < sizes[largest]:
            raise UsageError(
                f"a cache limit of {limit:,} bytes is smaller than the largest file, {largest} of "
                f"{sizes[largest]:,} bytes",
                where=str(folder),
                hint=f"raise it to {sizes[largest]:,} or more, or read with access: stream",
            )
        self.counters = counters if counters is not None else Counters()
        self.sizes = {name: size for name, size in sizes.items() if len(stored_name(name)) <= LONGEST_NAME}
        self._dataset, self._store, self._verify = dataset, store, verify
        self._lock = threading.Lock()
        self._line, self._line_bytes, self._done = Plan(dataset), 0, 0
        """A long list of what will be read, its bytes, and how many of them were."""
        self._next = Upcoming()
        self._rest: dict[str, float] = {}
        self._announced = 0.0
        self._filler = Filler(self, str(folder), piece_bytes=piece_bytes)
        self.folder: CacheFolder | None = None
        """None when it cannot be used."""
        try:
            self.folder = CacheFolder(folder, dataset, limit)
            self._filler.start()
        except OSError as error:
            self._filler.trouble(error)

    def expect(
        self, reads: Sequence[tuple[str, int]], rest: Mapping[str, float], *, anew: bool = False
    ) -> None:
        """What this process will read next. Cheap: others do the work.

        Args:
            reads: file and bytes, in order, behind what was expected before and not read yet.
            rest: ending of a file's name -> how often such a file is read in whole after these reads, by all processes.
            anew: the reads replace what was expected before.
        """
        with self._lock:
            if anew:
                self._line, self._done = Plan(self._dataset).then(reads, {}), 0
                self._line_bytes = int(self._line.size.sum())
                self._next.clear()
            else:
                self._next.add(reads)
            self._rest = dict(rest)
        self._filler.wake()

    @contextlib.contextmanager
    def hold(self, name: str, file_bytes: int | None) -> Iterator[int | None]:
        """The descriptor of a copy while the block runs; None when the file is not in the folder."""
        size = self.sizes.get(name)
        if self.folder is None or size is None or file_bytes not in (None, size):
            yield None
            return
        with self.folder.hold(name, size) as descriptor:
            yield descriptor

    def read(self, name: str, size: int) -> None:
        """So many bytes of a file were read, from the copy or the store."""
        with self._lock:
            if not self._next.made(name, size):
                # Never beyond the list: what was expected after it would seem to lie behind.
                self._done = min(self._done + size, self._line_bytes)

    def discard(self, name: str) -> None:
        """Removes a copy whose bytes turned out to be wrong, and does not bring it again for a while."""
        if self.folder is not None and name in self.sizes:
            self._filler.refuse(name)
            self.folder.remove(name)

    def stop(self) -> None:
        """Brings no further file; what is under way ends when its store is closed."""
        self._filler.stop()

    def close(self, limit_s: float = 10.0) -> None:
        """Leaves the folder; the copies stay for the next."""
        self.stop()
        self._filler.join(limit_s)
        if self.folder is not None:
            self.folder.close()

    # --- for the threads of the filler ---

    def take(self) -> Part | None:
        """See `cache_fill.Work`."""
        if self.folder is None:
            return None
        with self._lock:
            line, reads, rest = replace(self._line, done=self._done), self._next.left(), self._rest
        mine = line.then(reads, rest)
        now = time.monotonic()
        if self._announced < now - ANNOUNCE_EVERY_S:
            self.folder.announce(mine)
            self._announced = now
        near = mine.ahead()
        seen = set(near)
        later = (
            [name for name in self.sizes if name not in seen and mine.times_after(name)] if mine.rest else []
        )
        wanted = [(name, self.sizes[name]) for name in [*near, *later] if name in self.sizes]
        return self.folder.reserve(wanted, mine, unless=self._filler.refuses)

    def store(self, name: str) -> Ranges:
        """See `cache_fill.Work`."""
        return self._store(name)

    def finish(self, part: Part) -> None:
        """See `cache_fill.Work`."""
        assert self.folder is not None
        if self._verify is not None:
            self._verify(part.name, part.descriptor)
        self.folder.publish(part)

    def abandon(self, part: Part) -> None:
        """See `cache_fill.Work`."""
        CacheFolder.abandon(part)

    def brought(self, size: int) -> None:
        """See `cache_fill.Work`."""
        self.counters.add(BROUGHT, size)


class CachedRanges:
    """`Ranges` of one root of a dataset: from the cache where it has the file, from the store where not.

    Args:
        remote: the root.
        cache: shared by the dataset's roots.
    """

    direct = True

    def __init__(self, remote: Ranges, cache: Cache) -> None:
        self.uri, self.max_depth = remote.uri, remote.max_depth
        self.remote, self._cache = remote, cache

    def read(self, name: str, start: int, length: int, *, file_bytes: int | None = None) -> memoryview:
        """See `Ranges.read`."""
        memory = np.empty(length, np.uint8).data
        self.scatter(name, start, [memory], file_bytes=file_bytes)
        return memory

    def scatter(
        self, name: str, start: int, views: Sequence[memoryview], *, file_bytes: int | None = None
    ) -> None:
        """See `Ranges.scatter`."""
        wanted = sum(view.nbytes for view in views)
        if self._from_copy(name, start, views, wanted, file_bytes):
            self._cache.counters.add("cache_hits")
        else:
            self._cache.counters.add("cache_misses")
            self.remote.scatter(name, start, views, file_bytes=file_bytes)
        self._cache.read(name, wanted)

    def discard(self, name: str) -> None:
        """Its bytes turned out to be wrong: the next read comes from the store."""
        self._cache.discard(name)

    def close(self) -> None:
        """Closes the root; the cache is its owner's."""
        self.remote.close()

    def _from_copy(
        self, name: str, start: int, views: Sequence[memoryview], wanted: int, file_bytes: int | None
    ) -> bool:
        began = time.monotonic()
        with self._cache.hold(name, file_bytes) as descriptor:
            if descriptor is None:
                return False
            try:
                done = _preadv_all(descriptor, views, start, wanted)
            except OSError:
                done = -1
        if done != wanted:
            if start + wanted <= self._cache.sizes[name]:
                self._cache.discard(name)  # the disk returned an error, or less than the file has
            return False
        self._cache.counters.add("requests")
        self._cache.counters.add("bytes", done)
        self._cache.counters.observe(time.monotonic() - began)
        return True
