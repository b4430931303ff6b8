"""What rows gathered from a page-cached file cost without a loader: the floor under `stream.py`'s ratio to `readinto`.

    python benchmarks/gather_limit.py [--json] [--gigabytes G]

Two threads fill batches of 64 rows (values of 32 KB, 32 KB and 118 KB, each from a random place of one file) with the
system call that the loader makes, many reads at once, into 1 to 8 buffers in turn. Nothing is planned, decoded,
handed over or looked at. Beside it `readinto` of the same file, front to back, into one buffer of a batch's size.

Prints GB/s, processor seconds a GB, and the ratio to `readinto`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from isthmus.storage.ranges.many import ManyReads
from isthmus.storage.stream.batch import allocate_touched

WIDTHS = (32_768, 32_768, 118_272)
ROWS, PLANS, THREADS = 64, 40, 2
BATCH_BYTES = ROWS * sum(WIDTHS)
BUFFERS = (1, 2, 3, 4, 5, 8)


def used_s() -> float:
    """Processor seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def read_through(path: Path, wanted: int) -> dict[str, float]:
    """`readinto`, front to back, again from the front, into one buffer."""
    view, done = memoryview(np.ones(BATCH_BYTES, np.uint8)), 0
    began, used = time.perf_counter(), used_s()
    with path.open("rb", buffering=0) as file:
        while done < wanted:
            got = file.readinto(view) or 0
            done += got
            if not got:
                file.seek(0)
    took = time.perf_counter() - began
    return {"gb_per_s": done / took / 1e9, "cpu_s_per_gb": (used_s() - used) / done * 1e9}


def gather(path: Path, wanted: int, count: int) -> dict[str, float]:
    """Batches into `count` buffers in turn."""
    size, random = path.stat().st_size, np.random.default_rng(0)
    widths = np.array(WIDTHS)
    lengths = np.repeat(widths, ROWS)
    starts = np.concatenate([[0], np.cumsum(widths * ROWS)[:-1]])
    places = (starts[:, None] + widths[:, None] * np.arange(ROWS)).reshape(-1)
    # As in a shard, values follow a header of some bytes.
    plans = [
        np.concatenate([random.integers(0, size // width - 1, ROWS) * width + 37 for width in WIDTHS])
        for _ in range(PLANS)
    ]
    addresses = [buffer.__array_interface__["data"][0] for buffer in buffers(count)]
    steps = iter(range(wanted // BATCH_BYTES))
    lock = threading.Lock()
    with path.open("rb") as file:
        descriptors = np.full(len(lengths), file.fileno())

        def work() -> None:
            many = ManyReads()
            while True:
                with lock:
                    step = next(steps, None)
                if step is None:
                    return
                many.read(descriptors, places + addresses[step % count], lengths, plans[step % PLANS])

        began, used = time.perf_counter(), used_s()
        threads = [threading.Thread(target=work) for _ in range(min(THREADS, count))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    took, done = time.perf_counter() - began, wanted // BATCH_BYTES * BATCH_BYTES
    return {"gb_per_s": done / took / 1e9, "cpu_s_per_gb": (used_s() - used) / done * 1e9}


_kept: list[np.ndarray] = []


def buffers(count: int) -> list[np.ndarray]:
    """The first of the buffers that all counts share, so that all have the same memory."""
    while len(_kept) < count:
        _kept.append(allocate_touched(BATCH_BYTES))
    return _kept[:count]


def main() -> None:
    """Measures, three times in turn, and prints medians."""
    parser = argparse.ArgumentParser(description="The floor under the loader's ratio to readinto.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--gigabytes", type=float, default=20.0, help="read in each run")
    options = parser.parse_args()
    wanted = int(options.gigabytes * 1e9)
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        with path.open("wb") as file:
            for _ in range(16):
                file.write(os.urandom(64 << 20))
        for _ in range(3):
            limit = read_through(path, wanted)
            runs.setdefault("readinto", []).append(limit)
            for count in BUFFERS:
                found = gather(path, wanted, count)
                found["ratio"] = found["gb_per_s"] / limit["gb_per_s"]
                runs.setdefault(f"{count} buffers", []).append(found)
    medians = {
        name: {key: float(np.median([run[key] for run in of])) for key in of[0]} for name, of in runs.items()
    }
    if options.json:
        print(json.dumps(medians, indent=2))
        return
    for name, figures in medians.items():
        ratio = f", {figures['ratio']:.2f} of readinto" if "ratio" in figures else ""
        print(f"{name}: {figures['gb_per_s']:.1f} GB/s, {figures['cpu_s_per_gb']:.3f} s/GB{ratio}")


if __name__ == "__main__":
    main()
