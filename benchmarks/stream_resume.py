"""Whether a resume costs more when there is ten times as much data: small rows, so that the disk need not hold much."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
from stream_disk import median

from isthmus.storage.shards import DatasetWriter, TextColumn
from isthmus.storage.shards.synthetic import TINY, sample

BATCH, REPEATS = 64, 5


def resume_at_scale(folder: Path, rows: int) -> dict[str, Any]:
    """Seconds to the first batch at 90 % of an epoch, of `rows` rows of 1 KB and of ten times as many."""
    counts = {"rows": rows, "ten_times": 10 * rows}
    times: dict[str, list[float]] = {name: [] for name in counts}
    for count in counts.values():
        _write(folder / f"small-{count}", count)
    for turn in range(REPEATS + 1):
        for name, count in counts.items():
            took = _first_batch(folder / f"small-{count}", int(0.9 * count) // BATCH)
            if turn:  # the first pays for imports
                times[name].append(took)
    found: dict[str, Any] = {
        name: {"rows": count, "resumed_start_s": median(times[name])} for name, count in counts.items()
    }
    found["ratio"] = found["ten_times"]["resumed_start_s"] / found["rows"]["resumed_start_s"]
    return found


def _write(folder: Path, count: int) -> None:
    one = pickle.dumps(sample(TINY, 0))
    with DatasetWriter(str(folder), TINY, rows_per_shard=4096, rows_per_group=64) as writer:
        for number in range(count):
            each = pickle.loads(one)
            each.key = str(number)
            writer.add(each)
        text = {
            encoder.name: TextColumn(
                np.zeros((1, encoder.max_tokens, encoder.width), np.float16),
                np.ones(1, np.int32),
                None if encoder.pooled_width is None else np.zeros((1, encoder.pooled_width), np.float16),
            )
            for encoder in TINY.text
        }
        writer.finish(text)


def _first_batch(folder: Path, step: int) -> float:
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream import Loader, Plan, Segment

    began = time.perf_counter()
    with Loader(
        [open_dataset(str(folder))],
        [1],
        seed=0,
        lanes=8,
        shuffle_window=1024,
        stages=[64],
        plan=Plan((Segment(0, 0, 0, BATCH),)),
        check=False,
        start_step=step,
    ) as loader:
        next(loader)
        return time.perf_counter() - began
