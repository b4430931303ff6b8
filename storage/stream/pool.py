"""The loader's memory: batches and blocks, reused, because fresh memory costs three times a copy (page faults)."""

from __future__ import annotations

import threading

from isthmus.storage.shards.blocks import Bytes
from isthmus.storage.stream.batch import Allocate, BatchBuffer, Layout, fresh

LOOSE = 1.5
"""A buffer is reused for what needs at least 1 / LOOSE of it."""


class Pool:
    """Hands out memory and takes it back.

    Args:
        allocate: makes a batch's memory.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.limit = 0
        """Bytes held in all: before it is passed, spare memory that does not fit what is asked for is let go."""
        self._lock = threading.Lock()
        self._batches: list[BatchBuffer] = []
        self._blocks: list[Bytes] = []
        self.used = 0
        """Bytes that are handed out, or stand in memory of a store's client."""
        self._spare = 0

    @property
    def bytes(self) -> int:
        """Handed out and spare."""
        with self._lock:
            return self.used + self._spare

    def take_batch(self, layout: Layout) -> BatchBuffer:
        """A batch's memory, laid out."""
        size = layout.bytes
        with self._lock:
            most = max(size, min(LOOSE * size, self.limit - self.used))
            fitting = [b for b in self._batches if size <= len(b.memory) <= most]
            if fitting:
                buffer = next((b for b in fitting if b.layout == layout), fitting[-1])
                self._batches.remove(buffer)
                self._spare -= len(buffer.memory)
                self.used += len(buffer.memory)
            else:
                buffer = None
                self._make_room(size)
                self.used += size
        if buffer is None:
            return BatchBuffer(self._allocate(size), layout)
        buffer.bind(layout)
        return buffer

    def give_batch(self, buffer: BatchBuffer) -> None:
        """Takes a batch's memory back."""
        with self._lock:
            self.used -= len(buffer.memory)
            self._spare += len(buffer.memory)
            self._batches.append(buffer)

    def count_block(self, size: int) -> None:
        """A block of this size is about to stand in memory of a store's client."""
        with self._lock:
            self._make_room(size)
            self.used += size

    def take_block(self, size: int) -> Bytes:
        """Memory for a block, of at least this size."""
        with self._lock:
            most = max(size, min(LOOSE * size, self.limit - self.used))
            fitting = [at for at, block in enumerate(self._blocks) if size <= len(block) <= most]
            if fitting:
                block = self._blocks.pop(fitting[-1])
                self._spare -= len(block)
                self.used += len(block)
                return block
            self._make_room(size)
            self.used += size
        return fresh(size)

    def give_block(self, size: int, block: Bytes | None) -> None:
        """Takes a block's memory back; None for one that was only counted."""
        with self._lock:
            if block is None:
                self.used -= size
                return
            self.used -= len(block)
            self._spare += len(block)
            self._blocks.append(block)

    def _make_room(self, size: int) -> None:
        """Lets go of spare memory until `size` more bytes fit."""
        while self._spare and self.used + self._spare + size > self.limit:
            gone = self._blocks.pop(0) if self._blocks else self._batches.pop(0).memory
            self._spare -= len(gone)
