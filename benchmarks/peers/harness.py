"""Reads one case in this process and measures it: `python -m peers.harness CASE FOLDER`, one JSON line out.

Every reader yields dictionaries of torch tensors and lists. The consumer looks at one byte of each 4 KiB page of
every tensor, as a copy to a device would, and keeps nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.rows import ARRAYS, row

LISTING = "listing.json"
"""Beside files that are read over HTTP: `files`, their names, and for the plain clients `blocks`, their byte ranges."""

Batch = dict[str, Any]
"""`key` and `caption`: lists; `length`: [b]; and the tensors of `rows.ARRAYS`, fp16 [b, ...]."""


@dataclass(slots=True)
class Reader:
    """An opened case."""

    batches: Iterator[Batch]
    state: Callable[[int], Any] | None = None
    """Steps done -> what a later process needs to go on from there; None when the reader cannot go on."""
    whole: bool = True
    """Batches hold whole rows, so that their values can be compared; not so for the plain read of bytes."""
    close: Callable[[], object] = lambda: None
    stats: Callable[[], dict[str, Any]] = dict
    """What the reader says of itself at the end."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a case is asked for."""

    case: str
    folder: str
    """Path, or URL of the folder in a store."""
    workers: int
    batch: int
    state: Any = None
    depth: int | None = None
    """Reads in flight, for readers that let one choose."""


def touch(batch: Batch) -> None:
    """Reads a byte of every page of every tensor."""
    import torch

    for name in ARRAYS:
        batch[name].reshape(-1).view(torch.uint8)[::4096].sum()


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def pss() -> int:
    """Bytes of this process, shared pages counted by their share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class Check:
    """Compares the keys of all rows and the values of a few with what was written."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.repeated = 0

    def __call__(self, number: int, batch: Batch) -> None:
        """Looks at batch `number`; RuntimeError when a row is not what was written."""
        for key in batch["key"]:
            self.repeated += key in self.keys
            self.keys.add(key)
        if number >= 16:
            return
        at = number * 7 % len(batch["key"])
        wanted = row(int(batch["key"][at]))
        for name in ARRAYS:
            if batch[name][at].numpy().tobytes() != getattr(wanted, name).tobytes():
                raise RuntimeError(f"{name} of row {wanted.key} is not what was written")
        if batch["caption"][at] != wanted.caption or int(batch["length"][at]) != wanted.length:
            raise RuntimeError(f"caption or length of row {wanted.key} is not what was written")


def paced(reader: Reader, per_second: float, samples: int) -> dict[str, float]:
    """Share of the time that a consumer of `per_second` samples waits for data, after the first batch."""
    size = len(next(reader.batches)["key"])
    waits: list[float] = []
    began = time.perf_counter()
    while len(waits) * size < samples:
        time.sleep(size / per_second)  # the stand-in for a GPU at work
        asked = time.perf_counter()
        touch(next(reader.batches))
        waits.append(time.perf_counter() - asked)
    took = time.perf_counter() - began
    return {"wait_fraction": sum(waits) / took, "longest_wait_s": max(waits), "steps": len(waits)}


def measure(
    open_reader: Callable[[Request], Reader], request: Request, samples: int, check: bool
) -> dict[str, Any]:
    """Reads up to `samples` samples, or one epoch."""
    compare = Check() if check else None
    imported, used = pss(), cpu_seconds()
    began = time.perf_counter()
    reader = open_reader(request)
    count = first_count = 0
    first = 0.0
    for number, batch in enumerate(reader.batches):
        touch(batch)
        count += len(batch["key"])
        if number == 0:
            first, first_count = time.perf_counter() - began, count
        if compare is not None and reader.whole:
            compare(number, batch)
        if count >= samples:
            break
    took = time.perf_counter() - began
    found: dict[str, Any] = {
        "samples": count,
        "first_batch_s": first,
        "samples_per_s": (count - first_count) / (took - first) if count > first_count else None,
        "samples_per_s_over_all": count / took,
        "wall_s": took,
        "imported_bytes": imported,
    }
    if compare is not None and reader.whole:
        found |= {"different_keys": len(compare.keys), "repeated_keys": compare.repeated}
    found["stats"] = reader.stats()
    reader.close()
    del reader, batch
    # Workers have ended by now, so that their time is in the children's.
    found["cpu_s"] = cpu_seconds() - used
    return found


def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser(description="One case of benchmarks/stream.py.")
    parser.add_argument("module")
    parser.add_argument("case")
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1 << 40)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--make", type=int, metavar="ROWS", help="write the folder instead")
    parser.add_argument("--save", type=Path, help="keep the state after --samples here")
    parser.add_argument("--load", type=Path, help="go on from this state")
    parser.add_argument("--pace", type=float, help="consume so many samples a second, and report the waits")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    module = importlib.import_module(f"peers.{options.module}")
    if options.make is not None:
        module.make(options.case, Path(options.folder), options.make)
        return
    import torch

    torch.set_num_threads(1)
    module.load()
    state = pickle.loads(options.load.read_bytes()) if options.load else None
    request = Request(
        options.case, options.folder, options.workers, options.batch, state=state, depth=options.depth
    )
    if options.pace:
        reader = module.open_reader(request)
        found = paced(reader, options.pace, options.samples)
        reader.close()
    elif options.save:
        reader = module.open_reader(request)
        count = steps = 0
        for batch in reader.batches:
            count, steps = count + len(batch["key"]), steps + 1
            if count >= options.samples:
                break
        state = pickle.dumps(reader.state(steps))
        options.save.write_bytes(state)
        found = {"state_bytes": len(state), "samples": count}
    else:
        found = measure(module.open_reader, request, options.samples, options.check)
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some peers' threads outlive their loader


if __name__ == "__main__":
    main()
