"""How much memory the order needs on a rank, known before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from isthmus.errors import UsageError
from isthmus.storage.stream.lines import Lines

BATCHES = 4
"""Batches that count beside the windows: two that the trainer may look at, two for blocks in flight."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one bucket needs on a rank."""

    lanes: int
    """L / W."""
    window: int
    """Rows of a lane that are shuffled together."""
    beyond: int
    """Rows of its largest block, as a window that ends inside a block may need its other rows too, and of two steps, as
    whole batches are allocated where a window begins and ends."""
    row: int
    """Bytes of a row."""

    @property
    def bytes(self) -> int:
        """lanes x (window + beyond) x row."""
        return self.lanes * (self.window + self.beyond) * self.row


@dataclass(frozen=True, slots=True)
class Need:
    """What a stage needs on a rank."""

    stage: int
    shares: Mapping[int, Share]
    """By bucket."""
    batches: int
    """Bytes of the batch buffers."""

    @property
    def bytes(self) -> int:
        """Of the blocks in use and the batch buffers."""
        return sum(share.bytes for share in self.shares.values()) + self.batches

    @property
    def windows(self) -> int:
        """Of one window of every bucket."""
        return sum(share.lanes * share.window * share.row for share in self.shares.values())


def need_of(
    stage: int,
    lines: Lines,
    *,
    block_rows: Mapping[int, int],
    row_bytes: Mapping[int, int],
    world_size: int,
    global_batch_size: int,
    window: int | None = None,
) -> Need:
    """The memory of a stage.

    Args:
        block_rows: bucket -> rows of its largest block.
        row_bytes: bucket -> bytes of its largest row.
        window: another shuffle window than that of `lines`, to see what it would need.
    """
    windows = lines.lane_window if window is None else lines.lane_windows(window)
    shares = {}
    for bucket in lines.buckets:
        rows = min(windows[bucket], ceil(lines.most_rows(bucket) / lines.lanes))
        beyond = block_rows[bucket] + 2 * (global_batch_size // lines.lanes)
        shares[bucket] = Share(lines.lanes // world_size, rows, beyond, row_bytes[bucket])
    batches = BATCHES * (global_batch_size // world_size) * max(row_bytes.values())
    return Need(stage, shares, batches)


def refuse(need: Need, limit: int, *, world_size: int, lanes: int, smaller_window: int | None) -> UsageError:
    """The error for a need above the limit: the arithmetic, and the nearest change that fits."""
    terms = " + ".join(
        f"{share.lanes} lanes x ({share.window} rows of the window + {share.beyond} of a block and two steps) x {_size(share.row)}"
        for share in need.shares.values()
    )
    changes = [f"raise data.memory_limit to {_size(need.bytes, up=True)}"]
    if smaller_window is not None:
        changes.append(f"lower data.shuffle_window to {smaller_window}")
    more = [size for size in range(world_size + 1, lanes + 1) if lanes % size == 0]
    if more:
        changes.append(f"use {more[0]} or more ranks")
    return UsageError(
        f"stage {need.stage} needs {_size(need.bytes)} on each of {world_size} ranks: {terms} + "
        f"{_size(need.batches)} of batches; data.memory_limit is {_size(limit)}",
        hint=", or ".join(changes),
    )


def _size(size: int, *, up: bool = False) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{ceil(10 * size / factor) / 10:g} {unit}" if up else f"{size / factor:.3g} {unit}"
    return f"{size} B"
