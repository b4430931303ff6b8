"""Loaders for tests of what goes wrong while reading: short waits, and the keys of an undisturbed loader to compare with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Any

from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.stream import Loader, Plan, Segment
from isthmus.storage.stream.access import Access
from isthmus.storage.stream.owning import OwningLoader

QUICK = RetryPolicy(budget_s=20.0, first_delay_s=0.01, max_delay_s=0.1, stall_s=0.4)
"""Rides out what passes within seconds."""
BRIEF = RetryPolicy(budget_s=0.5, first_delay_s=0.01, max_delay_s=0.1, stall_s=0.4)
"""Gives up soon."""
STEPS = 24
"""Three epochs of 64 rows in batches of 8."""


def loader_of(dataset: Dataset | Sequence[Dataset], policy: RetryPolicy = QUICK, **options: Any) -> Loader:
    """A loader of one rank over datasets of `write_synthetic`, at 64 pixels in batches of 8 from four lanes."""
    datasets = [dataset] if isinstance(dataset, Dataset) else list(dataset)
    settings: dict[str, Any] = {
        "seed": 0,
        "lanes": 4,
        "shuffle_window": 16,
        "stages": [64],
        "plan": Plan((Segment(0, 0, 0, 8),)),
        "wait_limit": 20.0,
        "access": [Access(one, policy=policy) for one in datasets],
    }
    return OwningLoader(datasets, [1] * len(datasets), **(settings | options))


def keys_of(loader: Loader, steps: int = STEPS) -> list[list[str]]:
    """The keys of the first steps; closes the loader, also when a step raises."""
    with loader:
        return [list(batch.keys) for batch in islice(loader, steps)]


def undisturbed(root: str, steps: int = STEPS, **options: Any) -> list[list[str]]:
    """What a loader delivers when nothing goes wrong."""
    return keys_of(loader_of(open_dataset(root), **options), steps)


def threads_left() -> list[str]:
    """Names of loader threads that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("isthmus-loader")]
