"""A batch as the trainer gets it, and the buffers that its arrays live in."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.shards.spec import Float16, Int32, TextColumn

Bytes = NDArray[np.uint8]
Allocate = Callable[[int], Bytes]
"""Bytes -> a fresh buffer; a trainer with a GPU passes one that gives pinned memory."""


@dataclass(slots=True)
class Batch:
    """The samples of one step on one rank, b of them, all of one bucket.

    The arrays are views of reused buffers: valid until the next-but-one batch is requested.
    """

    step: int
    """Global step, counted over all stages."""
    stage: int
    bucket: str
    keys: list[str]
    positions: NDArray[np.int64]
    """[b] of each sample in the global batch: the counter of its noise."""
    latent_mean: Float16
    """[b, C, H, W] unscaled."""
    latent_logvar: Float16
    """[b, C, H, W] unscaled."""
    text: dict[str, TextColumn]
    """Encoder -> the embeddings of `captions`."""
    captions: list[str]
    original_size: Int32
    """[b, 2] height, width of the image file."""
    crop: Int32
    """[b, 4] top, left, height, width of what was encoded."""
    flipped: NDArray[np.bool_]
    """[b]"""

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Layout:
    """How a batch lies in its buffer: column by column, each on a fresh cache line."""

    columns: tuple[tuple[str, int], ...]
    """Fixed-width columns: name and bytes of a row."""
    numbers: tuple[str, ...]
    """Columns of small whole numbers."""
    rows: int

    @cached_property
    def bytes(self) -> int:
        """Of the buffer."""
        return sum(_padded(width * self.rows) for _, width in self.columns)

    @cached_property
    def widths(self) -> NDArray[np.int64]:
        """[columns] bytes of a row."""
        return np.array([width for _, width in self.columns], np.int64)

    @cached_property
    def row_bytes(self) -> int:
        """Of a row's columns."""
        return sum(width for _, width in self.columns)

    @cached_property
    def number_at(self) -> dict[str, int]:
        """Column of small numbers -> its place among them."""
        return {name: at for at, name in enumerate(self.numbers)}

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """[columns * rows] bytes of each value of so many rows, column by column; made once for a number of rows."""
        found = self._lengths.get(rows)
        if found is None:
            found = self._lengths[rows] = np.repeat(self.widths, rows)
        return found

    @cached_property
    def _lengths(self) -> dict[int, NDArray[np.int64]]:
        return {}

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """[columns, rows] where each row's values start in the buffer."""
        starts = np.cumsum([0, *(_padded(width * self.rows) for _, width in self.columns[:-1])])
        return np.asarray(starts[:, None] + self.widths[:, None] * np.arange(self.rows), np.int64)


class BatchBuffer:
    """The memory of one batch; reused, because fresh memory costs three times the copy (page faults)."""

    def __init__(self, memory: Bytes, layout: Layout) -> None:
        self.memory = memory
        self.address: int = memory.__array_interface__["data"][0]
        self.bind(layout)

    def bind(self, layout: Layout) -> None:
        """Makes room for a batch; `memory` must hold `layout.bytes`."""
        self.keys: list[str] = [""] * layout.rows
        self.captions: list[str] = [""] * layout.rows
        if getattr(self, "layout", None) == layout:
            return
        self.layout = layout
        self.arrays: dict[str, Bytes] = {}
        """Column -> [rows, bytes of a row]."""
        self._shaped: dict[tuple[str, tuple[int, ...]], Float16] = {}
        self._slots: list[Sequence[memoryview]] | None = None
        at = 0
        for name, width in layout.columns:
            array = self.memory[at : at + width * layout.rows].reshape(layout.rows, width)
            self.arrays[name] = array
            at += _padded(width * layout.rows)
        self.numbers = np.zeros((layout.rows, len(layout.numbers)), np.int32)

    @property
    def slots(self) -> list[Sequence[memoryview]]:
        """For each column of the layout, the memory of every row."""
        found = self._slots
        if found is None:
            found = []
            for name, width in self.layout.columns:
                view, rows = self.arrays[name].reshape(-1).data, range(self.layout.rows)
                found.append([view[row * width : (row + 1) * width] for row in rows])
            self._slots = found  # whole: several threads read into one batch
        return found

    def shaped(self, name: str, shape: tuple[int, ...]) -> Float16:
        """A column as [rows, *shape] of fp16; made once for a buffer, since every step asks for it."""
        found = self._shaped.get((name, shape))
        if found is None:
            found = self.arrays[name].view(np.float16).reshape(self.layout.rows, *shape)
            self._shaped[name, shape] = found
        return found


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def fresh(size: int) -> Bytes:
    """Memory in a mapping of its own, which the system has back as soon as it is let go.

    The heap keeps what it was given back, in one arena for each thread, and once megabytes were freed to it, it serves
    the next megabytes from there: with sixteen reads in flight a process grew by a hundred megabytes.
    """
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)


def allocate_touched(size: int) -> Bytes:
    """Plain memory whose pages are there already, so that a later copy does not fault them in."""
    memory = fresh(size)
    memory.fill(1)
    return memory
