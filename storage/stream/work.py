"""What is done ahead of a step: the steps that wait for rows, the blocks that are read, and which row goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.storage.shards.blocks import Block, Blocks, Bytes
from isthmus.storage.stream.batch import BatchBuffer, Layout
from isthmus.storage.stream.stage import BlockKey, StageReader


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
