"""One rank that loads through a cache folder; run by tests. Arguments: a JSON object.

uri, cache, limit: of the dataset and the cache (no cache: read in place); rank, world, steps, pace (seconds a step).
Prints a line when it starts, then `{"digests": one of each batch, "cache_hits", "cache_misses", "brought"}`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.shards import open_dataset
from isthmus.storage.stream import Batch, Loader, Plan, Segment
from isthmus.storage.stream.access import Access


def digest(batch: Batch) -> str:
    """Of all that a batch holds."""
    found = hashlib.sha256(json.dumps([batch.step, batch.bucket, batch.keys, batch.captions]).encode())
    arrays = [batch.latent_mean, batch.latent_logvar, batch.original_size, batch.crop, batch.flipped]
    for name in sorted(batch.text):
        arrays += [batch.text[name].tokens, batch.text[name].length]
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def copies(settings: dict[str, Any]) -> list[Path]:
    """Files that are whole in the cache's folder."""
    found = Path(settings.get("cache") or "/nowhere").glob("copies/*/*")
    return [path for path in found if not path.name.endswith("%part")]


def load(settings: dict[str, Any]) -> dict[str, Any]:
    """The batches of a rank."""
    dataset = open_dataset(settings["uri"])
    mode = "download" if settings.get("cache") else "stream"
    policy = RetryPolicy(budget_s=20, first_delay_s=0.01, max_delay_s=0.1, stall_s=2)
    access = Access(
        dataset,
        mode,
        cache_dir=settings.get("cache"),
        cache_limit=settings.get("limit"),
        policy=policy,
        resolutions=[64],
        passes=3.0,
    )
    digests = []
    with Loader(
        [dataset],
        [1],
        seed=7,
        lanes=4,
        shuffle_window=32,
        stages=[64],
        plan=Plan((Segment(0, 0, 0, 8),)),
        rank=settings["rank"],
        world_size=settings["world"],
        access=[access],
        memory_limit=300_000,
        wait_limit=30.0,
    ) as loader:
        for batch in islice(loader, settings["steps"]):
            digests.append(digest(batch))
            time.sleep(settings.get("pace", 0.0))
        deadline = time.monotonic() + 30
        while len(copies(settings)) < settings.get("copies", 0) and time.monotonic() < deadline:
            time.sleep(0.02)  # files are brought behind the reader's back
    access.close()
    counts = {name: access.counters.count(name) for name in ("cache_hits", "cache_misses")}
    return {"digests": digests, **counts, "brought": access.counters.count("cache_brought_bytes")}


if __name__ == "__main__":
    print("started", flush=True)
    print(json.dumps(load(json.loads(sys.argv[1]))), flush=True)
