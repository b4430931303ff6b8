"""A batch as the trainer gets it, and the buffers that its arrays live in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

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


class BatchBuffer:
    """The memory of one batch; reused, because fresh memory costs three times the copy (page faults)."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._arrays: dict[str, Bytes] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The buffer `name` as an array of this shape; grows when it must."""
        size = prod(shape) * np.dtype(dtype).itemsize
        kept = self._arrays.get(name)
        if kept is None or len(kept) < size:
            kept = self._arrays[name] = self._allocate(size)
        view: NDArray[Any] = kept[:size].view(dtype).reshape(shape)
        return view


def allocate_touched(size: int) -> Bytes:
    """Plain memory whose pages are there already, so that a later copy does not fault them in."""
    return np.full(size, 1, np.uint8)
