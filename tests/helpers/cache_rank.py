"""One process of a node that reads through a cache folder; run by tests. Arguments: a JSON object.

store: folder with the files; cache, limit, piece: of the cache; order: file numbers to read, `block` bytes at a time;
pace: seconds between reads; delay: seconds that the store takes for a request; passes: how often it reads the order.
Prints a line when it has joined, and at the end `{"reads", "wrong", "cache_hits", "cache_misses", "threads"}`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from isthmus.storage.ranges.cache import Cache, CachedRanges
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_ranges


class Slow:
    """A store with a delay."""

    def __init__(self, root: str, delay: float) -> None:
        self._ranges, self._delay = open_ranges(root), delay
        self.uri, self.max_depth, self.direct = root, 8, True

    def scatter(self, *arguments: object, **options: object) -> None:
        time.sleep(self._delay)
        self._ranges.scatter(*arguments, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self._ranges.close()


def content(number: int, size: int) -> bytes:
    """What file `number` holds."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()


def name(number: int) -> str:
    return f"file-{number:03d}.bin"


def main() -> None:
    settings = json.loads(sys.argv[1])
    store = Path(settings["store"])
    sizes = {path.name: path.stat().st_size for path in sorted(store.glob("*.bin"))}
    counters = Counters()
    fill = Slow(str(store), settings["delay"])
    cache = Cache(
        Path(settings["cache"]),
        settings.get("dataset", "test"),
        sizes,
        lambda _: fill,
        limit=settings["limit"],
        counters=counters,
        piece_bytes=settings["piece"],
    )
    ranges = CachedRanges(Slow(str(store), 0), cache)
    reads, block = [], settings["block"]
    for number in settings["order"] * settings.get("passes", 1):
        size = sizes[name(number)]
        reads += [(name(number), at, min(block, size - at)) for at in range(0, size, block)]
    cache.expect([(file, length) for file, _, length in reads], {}, anew=True)
    print(json.dumps({"joined": cache.folder is not None}), flush=True)
    wrong = 0
    for file, start, length in reads:
        got = ranges.read(file, start, length, file_bytes=sizes[file])
        wrong += bytes(got) != content(int(file[5:8]), sizes[file])[start : start + length]
        time.sleep(settings["pace"])
    fill.close()
    cache.close()
    found = counters.snapshot()
    print(
        json.dumps(
            {
                "reads": len(reads),
                "wrong": wrong,
                **{key: found[key] for key in ("cache_hits", "cache_misses")},
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
