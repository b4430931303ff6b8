"""Free space where a run writes: its directory and a node's cache of shards, when they are on this machine's disks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.core.recipe.schema import Data, Recipe

if TYPE_CHECKING:
    from isthmus.storage.rundir import RunDirectory

LEAST_BYTES = 2_000_000_000
"""What `watchdog.disk_free: auto` asks for where no checkpoint's size is known."""
_CLEAR = 1.1
"""An alarm is over when so many times the bound is free: a disk at the bound alarms once."""


def cache_folder(data: Data) -> Path:
    """Where a node keeps copies of shards when `data.access` is download."""
    chosen = data.cache_directory or os.environ.get("ISTHMUS_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(tempfile.gettempdir()) / "isthmus-data"


def watched_places(recipe: Recipe, run: RunDirectory) -> dict[str, Path]:
    """What is written on this machine, by what it is."""
    places = {}
    local = run.local_path()
    if local is not None:
        places["the run directory"] = local
    if recipe.data.access == "download":
        places["the cache of shards"] = cache_folder(recipe.data)
    return places


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system that a path is, or would be, on; None where nobody can tell."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def cannot_fit(path: Path | None, needed: int) -> str | None:
    """What to say before a checkpoint of so many bytes is written to a folder where it has no room; else None."""
    free = None if path is None else free_bytes(path)
    if free is None or free >= needed:
        return None
    return (
        f"the checkpoint needs {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free at {path}: free some space, "
        "or lower checkpoint.keep"
    )


@dataclass(frozen=True, slots=True)
class LowDisk:
    """A place that runs out of space, or no longer does."""

    place: str
    path: Path
    free: int
    bound: int
    node: int
    over: bool = False

    @property
    def event_type(self) -> str:
        """Of the run directory's event."""
        return "note" if self.over else "alarm"

    def event_fields(self) -> dict[str, Any]:
        """The event's fields, with a `message` for people."""
        relation = "no longer below" if self.over else "below"
        message = (
            f"node {self.node}: {self.free / 1e9:.3g} GB are free for {self.place} ({self.path}), {relation} "
            f"{self.bound / 1e9:.3g} GB"
        )
        return {
            "metric": "disk_free", "value": self.free, "bound": self.bound, "node": self.node, "message": message,
        }  # fmt: skip


class DiskWatch:
    """Looks at free space now and then.

    Args:
        places: what is written where.
        least: bytes that should be free; auto: two checkpoints, at least `LEAST_BYTES`.
        node: for messages.
        checkpoint_bytes: of the newest checkpoint; asked every few minutes.
    """

    def __init__(
        self,
        places: Mapping[str, Path],
        least: int | str,
        *,
        node: int = 0,
        checkpoint_bytes: Callable[[], int | None] = lambda: None,
        refresh: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places, self._least, self._node = places, least, node
        self._checkpoint_bytes, self._refresh, self._clock = checkpoint_bytes, refresh, clock
        self._asked_at: float | None = None
        self._auto = LEAST_BYTES
        self._low: set[str] = set()

    def observe(self) -> list[LowDisk]:
        """What changed since the last look."""
        bound, changed = self._bound(), []
        for place, path in self._places.items():
            free = free_bytes(path)
            if free is None:
                continue
            if place in self._low and free >= _CLEAR * bound:
                self._low.remove(place)
                changed.append(LowDisk(place, path, free, bound, self._node, over=True))
            elif place not in self._low and free < bound:
                self._low.add(place)
                changed.append(LowDisk(place, path, free, bound, self._node))
        return changed

    def _bound(self) -> int:
        if isinstance(self._least, int):
            return self._least
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= self._refresh:
            self._asked_at = now
            self._auto = max(LEAST_BYTES, 2 * (self._checkpoint_bytes() or 0))
        return self._auto


def newest_checkpoint_bytes(run: RunDirectory) -> int | None:
    """Of the newest committed checkpoint; None before there is one."""
    steps = run.checkpoints()
    if not steps:
        return None
    size = run.read_commit(steps[-1]).get("bytes")
    return int(size) if isinstance(size, (int, float)) else None
