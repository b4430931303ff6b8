"""Blocks and rows drawn from a dataset: by a seed and the dataset's fingerprint alone, so that a second look sees the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.stream.randomness import below, permutation


def draw_blocks(dataset: Dataset, rows: int, seed: int, among: NDArray[np.bool_] | None = None) -> list[int]:
    """Blocks that together hold at least `rows` rows, in index order; all of them where there are no more rows.

    Each kind of block (bucket and size class) is drawn from once before chance alone decides, as long as there is room.

    Args:
        among: [blocks] those that may be drawn; None: all.
    """
    index = dataset.index
    order = permutation(len(index), seed, int(dataset.fingerprint[:12], 16))
    if among is not None:
        order = order[among[order]]
    if not len(order):
        return []
    kinds = index.bucket[order] * (1 << 20) + index.size_class[order]
    firsts = np.sort(np.unique(kinds, return_index=True)[1])
    order = np.concatenate([order[firsts], np.delete(order, firsts)])
    enough = int(np.searchsorted(np.cumsum(index.rows[order]), rows)) + 1
    found: list[int] = np.sort(order[:enough]).tolist()
    return found


def draw_rows(
    dataset: Dataset, rows: int, seed: int, among: NDArray[np.bool_] | None = None
) -> list[tuple[int, int]]:
    """(block, row) of so many rows, each from a block of its own while there are enough blocks; in index order."""
    index = dataset.index
    counts = index.rows if among is None else np.where(among, index.rows, 0)
    rows = min(rows, int(counts.sum()))
    key = int(dataset.fingerprint[:12], 16)
    blocks = draw_blocks(dataset, _until(counts, rows), seed, among)
    chosen: Sequence[int] = np.array(blocks)[permutation(len(blocks), seed, key, 1)].tolist()
    found: list[tuple[int, int]] = []
    turn = 0
    while len(found) < rows:
        for block in chosen:
            have = int(index.rows[block])
            if turn < have and len(found) < rows:
                start = below(have, seed, key, 2, block)
                # Later rows of the same block lie far from the first: neighbours look alike where sources are sorted.
                found.append((block, (start + turn * _stride(have)) % have))
        turn += 1
    return sorted(found)


def _until(counts: NDArray[np.int64], rows: int) -> int:
    """Rows to ask `draw_blocks` for, so that it draws about `rows` blocks."""
    present = counts[counts > 0]
    return int(min(counts.sum(), rows * present.max())) if len(present) else 0


def _stride(rows: int) -> int:
    """About 0.62 of the rows and without a common divisor: its multiples visit each row once, the first ones far apart."""
    stride = max(1, round(rows * 0.618))
    while np.gcd(stride, rows) != 1:
        stride += 1
    return stride
