"""Keys of whole datasets: which come twice, and a stable share of them. 24 bytes a row are held, whatever the keys' length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.storage.shards.rewrite_plan import LEFT_OUT
from isthmus.storage.shards.rewrite_source import Source, in_order

Parts = NDArray[np.uint8]
Progress = Callable[[int, int], None] | None
"""Called with the rows looked at and all rows."""


def later_duplicates(sources: Sequence[Source], *, threads: int, progress: Progress = None) -> list[Parts]:
    """For each source 0 where a row's key is the first of its name, and `LEFT_OUT` where it came before.

    Two keys are taken as one when their 128-bit hashes agree.
    """
    total = sum(source.rows for source in sources)
    words = np.empty((total, 2), np.uint64)
    at = 0
    for source in sources:

        def hashed(block: int, source: Source = source) -> NDArray[np.uint64]:
            keys = source.small(block, ("key",))["key"]
            data = b"".join(hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys)
            return np.frombuffer(data, np.uint64).reshape(-1, 2)

        for found in in_order(hashed, range(len(source.dataset.index)), threads):
            words[at : at + len(found)] = found
            at += len(found)
            if progress is not None:
                progress(at, total)
    later = _later(words)
    parts, first = [], 0
    for source in sources:
        part = np.zeros(source.rows, np.uint8)
        part[later[first : first + source.rows]] = LEFT_OUT
        parts.append(part)
        first += source.rows
    return parts


def _later(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which rows are equal to an earlier one; [rows]."""
    later = np.zeros(len(words), np.bool_)
    # Stable, so that of equal ones the first row comes first.
    order = np.argsort(words[:, 0], kind="stable")
    same = words[order[1:], 0] == words[order[:-1], 0]
    # Few, unless a dataset is merged with itself: those whose first halves agree, by their second halves.
    suspects = np.flatnonzero(np.concatenate([same, [False]]) | np.concatenate([[False], same]))
    if not len(suspects):
        return later
    rows = np.sort(order[suspects])
    pairs = np.lexsort((rows, words[rows, 1], words[rows, 0]))
    ordered = words[rows[pairs]]
    equal = (ordered[1:] == ordered[:-1]).all(axis=1)
    later[rows[pairs[1:][equal]]] = True
    return later


def refuse_duplicates(sources: Sequence[Source], parts: Sequence[Parts]) -> None:
    """UsageError when a key comes twice; names the first of them and where they are."""
    count = sum(int((part == LEFT_OUT).sum()) for part in parts)
    if not count:
        return
    told: list[str] = []
    for source, part in zip(sources, parts, strict=True):
        for row in np.flatnonzero(part == LEFT_OUT)[: 3 - len(told)].tolist():
            block = int(np.searchsorted(source.first, row, side="right")) - 1
            key = source.small(block, ("key",))["key"][row - int(source.first[block])]
            told.append(f"{key!r} in {source.dataset.uri}")
    raise UsageError(
        f"{count} keys come a second time: {', '.join(told)}{', ...' if count > len(told) else ''}",
        hint="--duplicates skip keeps the first of each",
    )


def share_of_key(key: str, seed: int) -> float:
    """Where a key lies in [0, 1): the first 52 bits of SHA-256 of `SEED:KEY`, whatever else a dataset holds."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 12) / (1 << 52)


def by_hash(
    source: Source, shares: Sequence[Fraction], seed: int, *, threads: int, progress: Progress = None
) -> Parts:
    """The part of each row: the one whose share of [0, 1) its key falls into."""
    ends = np.array([float(sum(shares[: at + 1])) for at in range(len(shares))])
    ends[-1] = 1.0

    def drawn(block: int) -> Parts:
        places = [share_of_key(key, seed) for key in source.small(block, ("key",))["key"]]
        return np.searchsorted(ends, places, side="right").astype(np.uint8)

    return collect(source, drawn, threads=threads, progress=progress)


def collect(
    source: Source, function: Callable[[int], Parts], *, threads: int, progress: Progress = None
) -> Parts:
    """`function` of every block, one behind the other; [rows]."""
    parts = np.empty(source.rows, np.uint8)
    at = 0
    for found in in_order(function, range(len(source.dataset.index)), threads):
        parts[at : at + len(found)] = found
        at += len(found)
        if progress is not None:
            progress(at, source.rows)
    return parts
