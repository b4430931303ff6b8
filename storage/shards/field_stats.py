"""What a dataset's fields hold: counts of words, quantiles of numbers. One pass, 16 MB a field, whatever the rows.

Quantiles of up to a million numbers are exact. Those of more come from a histogram whose bins are floats with their last bits
cut off: a bin is at most 1/2048 of its value wide, whole numbers up to 4096 are exact, and nobody has to know the range before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.fields import scan
from isthmus.storage.shards.rewrite_source import source_of

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
EXACT = 1_000_000
"""Numbers that are kept until there are more."""
MAX_WORDS = 10_000
"""Different texts of a field that are told apart; what comes after so many is counted together."""
SHOWN = 20
HASHES = ("phash", "phash_colours")
"""Fields that the encoder makes of the pictures themselves: nobody wants to count them."""
_BITS = 20


class _Numbers:
    def __init__(self) -> None:
        self._few: list[NDArray[np.float64]] | None = []
        self._bins = np.zeros(1 << _BITS, np.int64)
        self._least, self._most, self._sum, self._count = np.inf, -np.inf, 0.0, 0

    def add(self, values: NDArray[np.float64]) -> None:
        told = values[~np.isnan(values)]
        if not len(told):
            return
        self._least, self._most = min(self._least, float(told.min())), max(self._most, float(told.max()))
        self._sum, self._count = self._sum + float(told.sum()), self._count + len(told)
        if self._few is not None:
            self._few.append(told)
            if self._count > EXACT:
                self._few = None
        with np.errstate(over="ignore"):
            bits = told.astype(np.float32).view(np.uint32)
        # The order of floats as whole numbers: negative ones turned round, positive ones above them.
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
        np.add.at(self._bins, ordered >> np.uint32(32 - _BITS), 1)

    def result(self) -> dict[str, Any]:
        if not self._count:
            return {"told": 0}
        ranks = [max(1, round(q * self._count)) for q in QUANTILES]
        if self._few is None:
            places = np.searchsorted(np.cumsum(self._bins), ranks, side="left")
            found = [min(max(_value(int(at)), self._least), self._most) for at in places]
        else:
            ordered = np.sort(np.concatenate(self._few))
            found = [float(ordered[rank - 1]) for rank in ranks]
        return {
            "told": self._count,
            "least": self._least,
            "most": self._most,
            "mean": self._sum / self._count,
            "exact": self._few is not None,
            "quantiles": {f"{q:g}": value for q, value in zip(QUANTILES, found, strict=True)},
        }


def _value(place: int) -> float:
    """The number in a bin that is nearest to zero."""
    ordered = np.uint32(place << (32 - _BITS))
    if ordered >> 31:
        bits = ordered & np.uint32((1 << 31) - 1)
    else:
        bits = ~(ordered | np.uint32((1 << (32 - _BITS)) - 1))
    return float(np.array([bits], np.uint32).view(np.float32)[0])


class _Words:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._others = self._told = 0

    def add(self, values: Sequence[str]) -> None:
        for word, count in Counter(values).items():
            if not word:
                continue
            self._told += count
            if word in self._counts or len(self._counts) < MAX_WORDS:
                self._counts[word] += count
            else:
                self._others += count

    def result(self) -> dict[str, Any]:
        # By count, then by the word, so that the same dataset gives the same answer.
        shown = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
        return {
            "told": self._told,
            "different": len(self._counts),
            "more_than_counted": bool(self._others),
            "most_frequent": dict(shown),
        }


def field_stats(dataset: Dataset, progress: Callable[[int], None] = lambda rows: None) -> dict[str, Any]:
    """Field -> its kind, how many samples it is told of, and what they hold; JSON-able.

    Args:
        progress: called with the rows of each block.

    Raises:
        CorruptShard: a file's bytes are not those that the index lists.
        StorageError: the store refuses.
    """
    fields = dataset.spec.fields
    looked = {
        told.name: _Numbers() if told.kind == "number" else _Words()
        for told in fields
        if told.name not in HASHES
    }
    if looked:
        for block, values in scan(source_of(dataset), list(looked)):
            for name, sums in looked.items():
                sums.add(values[name])  # type: ignore[arg-type]
            progress(int(dataset.index.rows[block]))
    rows = dataset.manifest.samples
    return {
        told.name: {"kind": told.kind}
        if told.name not in looked
        else {"kind": told.kind, **(own := looked[told.name].result()), "null": rows - own["told"]}
        for told in fields
    }
