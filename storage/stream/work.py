"""What is done ahead of a step: the steps that wait for rows, the blocks that are read, and which row goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.shards.blocks import Block, Blocks, Bytes
from isthmus.storage.stream.batch import BatchBuffer, Layout
from isthmus.storage.stream.stage import BlockKey, StageReader

Int64 = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Job:
    """One step that was planned: its batch is complete when `left` is zero."""

    step: int
    stage: StageReader
    bucket: int
    start: int
    """The first row that it takes from every lane's line of the bucket, and"""
    share: int
    """how many."""
    layout: Layout
    left: int
    """Rows that are still to come."""
    buffer: BatchBuffer | None = None
    """None until the first window that the step takes rows from is opened."""
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class Step(Job):
    """One step whose rows are read one by one, from wherever they lie; `left` counts parts of it."""

    rows: Int64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """[rows, 2 columns + 4 + numbers] of each row: where each column's values start in a file; the numbers of these files; its
    source, block, caption and row in the block; and the layout's numbers."""
    keys: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    files: frozenset[int] = frozenset()
    """Numbers of the files that hold the rows, and perhaps others."""

    def key(self, slot: int) -> BlockKey:
        """The block that a row of the batch comes from."""
        first = 2 * len(self.layout.columns)
        source, block, caption = self.rows[slot, first : first + 3].tolist()
        return BlockKey(source, block, self.stage.resolution, caption)

    def row(self, slot: int) -> int:
        """Its row in the block."""
        return int(self.rows[slot, 2 * len(self.layout.columns) + 3])


@dataclass(eq=False, slots=True)
class Part:
    """Rows [first, stop) of a step's batch, read in one go."""

    step: Step
    first: int
    stop: int
    cold: bool = False
    """Not all of it was in the page cache."""

    @property
    def key(self) -> BlockKey:
        """The block of the first of them."""
        return self.step.key(self.first)

    def jobs(self) -> set[Job]:
        """The step that waits for it."""
        return {self.step}


Target = tuple[Job, int]
"""The step and the slot of its batch that a row goes to."""


@dataclass(eq=False, slots=True)
class Read:
    """Rows of a block that go straight into batches: row `first` + i to `targets[i]`, or nowhere (None)."""

    stage: StageReader
    key: BlockKey
    first: int
    targets: Sequence[Target | None]
    size: int
    """Bytes that are read, about."""

    @property
    def reader(self) -> Blocks:
        """What reads the block."""
        return self.stage.readers[self.key.source]

    def jobs(self) -> set[Job]:
        """The steps that wait for it."""
        return {target[0] for target in self.targets if target is not None}


@dataclass(eq=False, slots=True)
class Kept:
    """A whole block that stays in memory until each of its rows that this lane owns has been copied to its batch."""

    stage: StageReader
    key: BlockKey
    size: int
    """Bytes in memory."""
    left: int
    """Rows of the lane that were neither copied nor given up."""
    copies: list[tuple[int, Target]] = field(default_factory=list)
    """Rows whose target is known, to be copied when the block is there."""
    block: Block | None = None
    error: BaseException | None = None
    buffer: Bytes | None = None
    """The pooled memory that the block lies in, if it lies in any."""

    @property
    def reader(self) -> Blocks:
        """What reads the block."""
        return self.stage.readers[self.key.source]

    def jobs(self) -> set[Job]:
        """The steps that wait for it."""
        return {target[0] for _, target in self.copies}
