"""How a dataset's files are reached: in the store, on a mount, or through a bounded cache on the node."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.errors import UsageError
from isthmus.storage.filesystems import is_local
from isthmus.storage.ranges.cache import Cache, CachedRanges
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import LocalRanges
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import Ranges
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.stream.access_files import check_whole, whole_files

Mode = Literal["stream", "mount", "download"]
MODES: tuple[Mode, ...] = ("stream", "mount", "download")
RECENT_READS = 1024
"""A kind of file (a resolution, a caption) that none of so many reads asked for is not needed any more."""
_DEFAULT = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Fit:
    """How much of a dataset has room in the cache."""

    folder: str
    limit: int
    """Bytes that the folder may hold, for all datasets and ranks."""
    needed: int
    """Bytes of the dataset's files at the resolutions that are read."""

    @property
    def part(self) -> float:
        """Of the dataset, at most 1."""
        return min(1.0, self.limit / self.needed) if self.needed else 1.0

    def __str__(self) -> str:
        room = f"cache folder {self.folder} has room for {self.limit / 1e9:,.1f} GB"
        if self.part == 1:
            return f"{room}: all {self.needed / 1e9:,.1f} GB of the dataset fit"
        return (
            f"{room}, {self.part:.0%} of the dataset's {self.needed / 1e9:,.1f} GB; "
            "the rest is read from the store in every epoch"
        )


class Access:
    """How the files of one dataset are reached by one rank; the same bytes in every mode. Shared by its threads.

    Args:
        dataset: opened where it is; its roots may be several, each with a part of the files.
        mode: `stream` and `mount` read in place; `download` keeps whole files in `cache_dir`, but of roots that are
            local, which are read in place.
        cache_dir: shared by the node's ranks and, one after the other, its runs.
        cache_limit: bytes of the folder for all of them; None: 0.75 of what is free when the first rank comes.
        policy: how long a read is tried.
        counters: where reads are counted.
        resolutions: those that are read, pixels; None: any.
        passes: how often the node reads the dataset in what is left of the run. Below 0.5, files are brought only for
            what is expected of them.

    Raises:
        UsageError: no such mode, or the limit is smaller than the largest file.
    """

    def __init__(
        self,
        dataset: Dataset,
        mode: str = "stream",
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        policy: RetryPolicy = _DEFAULT,
        counters: Counters | None = None,
        resolutions: Sequence[int] | None = None,
        passes: float = 1.0,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"access is {', '.join(MODES[:-1])} or {MODES[-1]}, not {mode}")
        self.dataset, self.mode = dataset, mode
        self.counters = counters if counters is not None else Counters()
        self._passes = passes
        self._cache: Cache | None = None
        self._fit: Fit | None = None
        self._lock = threading.Lock()
        self._expected = 0
        self._kinds: dict[str, int] = {}
        """Kind of file -> the last expected read that was of it."""
        remote = [root for root in dataset.roots if not is_local(root)] if mode == "download" else []
        self._sources: dict[str, Ranges] = {root: open_ranges(root, policy=policy) for root in remote}
        """What files are brought through: their pieces are not reads that a step waits for, and not counted so."""
        if remote:
            folder = (
                Path(cache_dir) if cache_dir is not None else Path(tempfile.gettempdir()) / "isthmus-cache"
            )
            self._cache = self._open_cache(folder, cache_limit, resolutions)
        self._roots = {root: self._open(root, policy) for root in dataset.roots}

    def _open(self, root: str, policy: RetryPolicy) -> Ranges:
        ranges = open_ranges(root, policy=policy, counters=self.counters)
        return CachedRanges(ranges, self._cache) if self._cache and root in self._sources else ranges

    def _open_cache(self, folder: Path, limit: int | None, resolutions: Sequence[int] | None) -> Cache:
        dataset = self.dataset
        files = {
            name: file
            for name, file in whole_files(dataset, resolutions).items()
            if self._root(name) in self._sources
        }
        # The manifest's hash names the copies: another version of the dataset never answers for this one.
        cache = Cache(
            folder,
            hashlib.sha256(dataset.manifest.dump()).hexdigest()[:32],
            {name: file.size for name, file in files.items()},
            lambda name: self._sources[self._root(name)],
            limit=limit,
            verify=lambda name, descriptor: check_whole(dataset, name, files[name], descriptor),
            counters=self.counters,
        )
        if cache.folder is not None:
            needed = sum(file.size for file in files.values())
            self._fit = Fit(str(folder), cache.folder.limit, needed)
        return cache

    def _root(self, name: str) -> str:
        return self.dataset.places.get(name, self.dataset.roots[0])

    @property
    def fit(self) -> Fit | None:
        """How much of the dataset the cache has room for, to be shown at the start; None without a cache."""
        return self._fit

    def ranges(self, name: str) -> Ranges:
        """The reader of the root that holds a file."""
        return self._roots[self._root(name)]

    @property
    def places(self) -> tuple[Ranges, ...]:
        """The readers of all roots."""
        return tuple(self._roots.values())

    def expect(self, reads: Sequence[tuple[str, int]], *, anew: bool = False) -> None:
        """What this rank will read next, in order: files, and the bytes of each. Costs microseconds a read.

        Args:
            reads: behind what was expected before and not read yet; the further ahead, the better the cache's choice.
            anew: instead of it.
        """
        if self._cache is None:
            return
        with self._lock:
            for name, _ in reads:
                self._kinds[self._kind(name)] = self._expected = self._expected + 1
            recent = [kind for kind, last in self._kinds.items() if last > self._expected - RECENT_READS]
        self._cache.expect(reads, self._rest(recent), anew=anew)

    def _kind(self, name: str) -> str:
        """The ending that tells a dataset's kinds of files apart: ``.256px.parquet``. Others' files are of one kind."""
        return "" if self.dataset.index.foreign is not None else "." + ".".join(name.split(".")[-2:])

    def _rest(self, kinds: Iterable[str]) -> dict[str, float]:
        # One of the captions is drawn for each block, so a caption's file is read in part only.
        texts = self.dataset.spec.captions
        return {kind: self._passes / (texts if kind.startswith(".text") else 1) for kind in kinds}

    def close(self) -> None:
        """Gives up what is in flight; copies stay in the cache for the next run."""
        if self._cache is not None:
            self._cache.stop()
        for ranges in [*self._sources.values(), *self._roots.values()]:
            ranges.close()
        if self._cache is not None:
            self._cache.close()


def rows_apart(access: Access) -> bool:
    """Whether rows of a dataset may be read one by one at no cost: our layout, on disks of this machine."""
    ours = access.dataset.manifest.columns is None
    return ours and all(isinstance(place, LocalRanges) and place.apart for place in access.places)
