"""Does what was planned: reads rows straight into batches, or a block whole, and copies its rows where they go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.storage.shards.blocks import Block, BlockReader
from isthmus.storage.stream.work import Read, Target

_NOWHERE = memoryview(bytearray(1 << 20))
"""Rows that no step takes are read into here, on top of each other; never read from."""


def scatter(read: Read) -> None:
    """Reads the rows of `read` into the batches of its targets."""
    targets = read.targets
    layout = next(target[0].layout for target in targets if target is not None)
    slots: dict[str, Sequence[memoryview]] = {}
    # Once a row, not once a row and column: this runs for every sample that is trained on.
    places = [None if target is None else (target[0].buffer.slots, target[1]) for target in targets]  # type: ignore[union-attr]
    for column, (name, width) in enumerate(layout.columns):
        nowhere = _NOWHERE[:width] if width <= len(_NOWHERE) else memoryview(bytearray(width))
        slots[name] = [nowhere if place is None else place[0][column][place[1]] for place in places]
    key, reader = read.key, read.reader
    assert isinstance(reader, BlockReader)  # only these fill memory
    block = reader.scatter(key.block, key.caption, range(read.first, read.first + len(targets)), slots)
    _small(block, [(row, target) for row, target in enumerate(targets) if target is not None])


def copy(block: Block, copies: Sequence[tuple[int, Target]]) -> None:
    """Copies rows of a block that is in memory into batches."""
    if not copies:
        return
    for name, _ in copies[0][1][0].layout.columns:
        values = block.fixed[name]
        for row, (job, slot) in copies:
            assert job.buffer is not None
            job.buffer.arrays[name][slot] = values[row]
    _small(block, copies)


def _small(block: Block, copies: Sequence[tuple[int, Target]]) -> None:
    """Numbers and strings of rows."""
    names = copies[0][1][0].layout.numbers
    numbers = np.stack([block.numbers[name] for name in names], axis=1)
    keys, captions = block.strings["key"], block.strings["caption"]
    for row, (job, slot) in copies:
        buffer = job.buffer
        assert buffer is not None
        buffer.numbers[slot] = numbers[row]
        buffer.keys[slot] = keys[row]
        buffer.captions[slot] = captions[row]
