"""Data wait of a stand-in rank that is paced like an A100, and the loader's plain throughput.

    python benchmarks/paced_reader.py [--json]

Writes full-size rows of SDXL at 256 px (latent 4x32x32 mean and log-variance, text 77x2048 and pooled 1280: 335 KB a
row) to a temporary folder, and reads them three ways:

- paced: a rank that takes a batch, "trains" on it for as long as an A100 would at 71 images a second, and takes the
  next. The share of its time that it spends in ``next()`` is the data wait; the target is below 2 %.
- plain: the loader as fast as it goes, checksums and all, against
- readinto: a plain read of the same bytes into one reused buffer, which is the machine's limit.

Plain and readinto alternate, so that their ratio does not depend on the hour. `--cold` drops the data from the page
cache before the paced run (``posix_fadvise``), so that it reads from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.shards.synthetic import SDXL_256, write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment

IMAGES_PER_SECOND = 71.0
"""SDXL's UNet at 256 px on an A100 80 GB at 28 % of its peak, the utilisation that was published for SD2."""
TARGET = 0.02
LANES, BATCH, WINDOW = 8, 16, 512


def make_loader(dataset: Dataset, *, threads: int, start_step: int = 0) -> Loader:
    """One rank of a world of one, with the lanes that a rank of a small cluster owns."""
    return Loader(
        [dataset],
        [1],
        seed=0,
        lanes=LANES,
        shuffle_window=WINDOW,
        stages=[256],
        plan=Plan((Segment(0, 0, 0, BATCH),)),
        depth=threads,
        start_step=start_step,
    )


def paced(dataset: Dataset, seconds: float, threads: int) -> dict[str, float]:
    """Share of the time spent waiting for data, after the first batch, whose wait is given by itself."""
    step_seconds = BATCH / IMAGES_PER_SECOND
    began = time.perf_counter()
    with make_loader(dataset, threads=threads) as loader:
        next(loader)
        first = time.perf_counter() - began
        waits, began, steps = [], time.perf_counter(), max(2, round(seconds / step_seconds))
        for _ in range(steps):
            time.sleep(step_seconds)  # the stand-in for a GPU at work
            asked = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - asked)
        took = time.perf_counter() - began
    return {
        "data_wait_fraction": sum(waits) / took,
        "longest_wait_s": max(waits),
        "first_batch_s": first,
        "images_per_s": steps * BATCH / took,
        "steps": steps,
    }


def plain(dataset: Dataset, samples: int, threads: int) -> float:
    """Samples a second as fast as the loader goes, from the second batch on."""
    with make_loader(dataset, threads=threads) as loader:
        next(loader)
        began = time.perf_counter()
        count = sum(len(batch) for batch in islice(loader, samples // BATCH))
        return count / (time.perf_counter() - began)


def readinto(dataset: Dataset, folder: Path) -> float:
    """Samples a second of reading the shards' files front to back into one reused buffer."""
    buffer = memoryview(np.ones(1 << 23, np.uint8))
    began = time.perf_counter()
    for path in sorted(folder.glob("part-*.parquet")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return dataset.manifest.samples / (time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Drops the files from the page cache, as far as the kernel obliges."""
    for path in folder.glob("part-*.parquet"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> int:
    """Measures, prints, and returns 1 when the data wait misses its target."""
    parser = argparse.ArgumentParser(description="Data wait of a paced rank, and the loader's throughput.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--samples", type=int, default=2048, help="rows of 335 KB to write")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the paced run")
    parser.add_argument("--threads", type=int, default=2, help="threads of the loader")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of plain and readinto")
    parser.add_argument("--folder", type=Path, help="where the temporary data goes")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before the paced run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="isthmus-paced-", dir=options.folder))
    try:
        data = folder / "data"
        write_synthetic(str(data), options.samples, SDXL_256, rows_per_shard=512, rows_per_group=32)
        dataset = open_dataset(str(data))
        if options.cold:
            forget(data)
        result: dict[str, object] = {
            "row_kilobytes": dataset.manifest.size / dataset.manifest.samples / 1000,
            "cold": options.cold,
            "threads": options.threads,
            "paced": paced(dataset, options.seconds, options.threads),
        }
        pairs = [
            (readinto(dataset, data), plain(dataset, options.samples, options.threads))
            for _ in range(options.repeats)
        ]
        result["loader_samples_per_s"] = statistics.median(loader for _, loader in pairs)
        result["readinto_samples_per_s"] = statistics.median(limit for limit, _ in pairs)
        result["ratio"] = statistics.median(loader / limit for limit, loader in pairs)
    finally:
        shutil.rmtree(folder)
    wait = result["paced"]
    assert isinstance(wait, dict)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"data wait      {100 * wait['data_wait_fraction']:.2f} % at {wait['images_per_s']:.1f} images/s "
            f"(target < {100 * TARGET:g} %); longest {1000 * wait['longest_wait_s']:.1f} ms, "
            f"first batch {wait['first_batch_s']:.2f} s\n"
            f"loader         {result['loader_samples_per_s']:.0f} samples/s of {result['row_kilobytes']:.0f} KB\n"
            f"plain readinto {result['readinto_samples_per_s']:.0f} samples/s; ratio {result['ratio']:.2f}"
        )
    return 0 if wait["data_wait_fraction"] < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
