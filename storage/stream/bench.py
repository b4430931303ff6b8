"""How fast a place delivers a dataset's batches: for fixed numbers of reads in flight, and for the adaptive one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.shards.blocks import block_reader
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.stream.depth import usable_cores
from isthmus.storage.stream.loader import Loader

DEPTHS = (1, 2, 4, 8, 16, 32)
ENOUGH = 0.9
"""A depth that reaches this share of the best is enough."""
BUSY = 0.85
"""Share of the cores' time from which on the processor is what limits."""
ONE_CORE = 0.9
"""Cores' worth of time from which on one interpreter may be what limits."""
STILL_GROWING = 1.15
"""What the deepest must have over the one before it, for more depth to promise more."""

MakeLoader = Callable[[int | None, int], Loader]
"""(reads in flight, or None to adapt them; first step) -> a loader that was not used yet."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of the loader, as fast as it goes."""

    depth: int | None
    """Reads in flight; None: adaptive."""
    depth_reached: int
    """Reads in flight that were allowed at the end."""
    first_batch_s: float
    """From making the loader to its first batch; not part of what follows."""
    seconds: float
    samples: int
    bytes: int
    samples_per_s: float
    megabytes_per_s: float
    latency_s: dict[str, float]
    """p50, p90, p99 and max of block reads, those before the first batch included."""
    cpu_s_per_gb: float | None
    """Processor seconds of this process for 1e9 bytes; None when nothing was read."""
    cores_busy: float
    """Processor seconds a second."""
    resident_bytes: int
    retries: int
    throttled: int
    hedged: int
    cache_hits: int
    cache_misses: int
    requests: int = 0
    next_step: int = 0
    """To go on from, so that another run reads other blocks."""


def measure(
    make_loader: MakeLoader,
    depth: int | None,
    seconds: float,
    start_step: int,
    ready: Callable[[], None] = lambda: None,
) -> tuple[Measurement, int]:
    """Drains a loader for `seconds` after its first batch.

    Args:
        ready: called when the first batch is there; what is measured begins when it returns.

    Returns:
        What was measured, and the step to go on from, so that the next run reads other blocks.
    """
    began = time.perf_counter()
    with make_loader(depth, start_step) as loader:
        batch = next(loader)
        first_batch_s = time.perf_counter() - began
        ready()
        before, processor, began = loader.stats(), time.process_time(), time.perf_counter()
        samples, taken = 0, 0.0
        while taken < seconds:
            batch = next(loader)
            samples += len(batch)
            taken = time.perf_counter() - began
        processor = time.process_time() - processor
        after = loader.stats()
    read = after["bytes"] - before["bytes"]
    return (
        Measurement(
            depth=depth,
            depth_reached=int(after["depth"]),
            first_batch_s=first_batch_s,
            seconds=taken,
            samples=samples,
            bytes=int(read),
            samples_per_s=samples / taken,
            megabytes_per_s=read / taken / 1e6,
            latency_s=dict(after["latency_s"]),
            cpu_s_per_gb=processor / read * 1e9 if read else None,
            cores_busy=processor / taken,
            resident_bytes=int(after["resident_bytes"]),
            **{
                name: int(after[name] - before[name])
                for name in ("retries", "throttled", "hedged", "cache_hits", "cache_misses", "requests")
            },
            next_step=batch.step + 1,
        ),
        batch.step + 1,
    )


def sweep(
    make_loader: MakeLoader, depths: Sequence[int | None], seconds: float, *, start_step: int = 0
) -> Iterator[Measurement]:
    """One measurement for each depth, each reading on where the one before stopped."""
    if not depths or seconds <= 0:
        raise UsageError("a bench needs a depth and a time above zero")
    step = start_step
    for depth in depths:
        measured, step = measure(make_loader, depth, seconds, step)
        yield measured


def row_bytes(dataset: Dataset, resolution: int) -> float:
    """Bytes that a sample of a dataset takes at a resolution, the mean over some of its blocks."""
    reader, blocks = block_reader(dataset, resolution), _some(dataset, resolution)
    return sum(reader.size(block, 0) for block in blocks) / sum(
        int(dataset.index.rows[block]) for block in blocks
    )


def requests_per_row(dataset: Dataset, resolution: int) -> float:
    """Requests that a sample costs, about: one for each file that its block is read from, shared by the block's rows."""
    reader, blocks = block_reader(dataset, resolution), _some(dataset, resolution)
    asked = sum(len(reader.files(block, 0)) for block in blocks)
    return asked / sum(int(dataset.index.rows[block]) for block in blocks)


def _some(dataset: Dataset, resolution: int) -> list[int]:
    """At most 64 blocks that have a resolution, evenly from all of them."""
    blocks = np.flatnonzero(dataset.index.size_class >= resolution)
    if not len(blocks):
        raise UsageError(f"no images that reach {resolution} px", where=dataset.uri)
    some: list[int] = blocks[np.linspace(0, len(blocks) - 1, min(len(blocks), 64)).astype(np.int64)].tolist()
    return some


def verdict(measured: Sequence[Measurement], *, local: bool, cores: int | None = None) -> dict[str, Any]:
    """What the measurements amount to.

    Args:
        local: the data lies on a disk or a mount of this machine.
        cores: that this process may use.

    Returns:
        `best_depth` (None: adaptive), `best_megabytes_per_s`, `best_samples_per_s`, `enough_depth` (the smallest fixed
        one that reaches ENOUGH of the best; None when there is none), `adaptive_share` of the best, `limit` (cpu,
        throttling, latency, errors, store or disk) and `sentence`.
    """
    cores = cores or usable_cores()
    best = max(measured, key=lambda one: one.samples_per_s)
    fixed = sorted((one for one in measured if one.depth is not None), key=lambda one: one.depth or 0)
    enough = next((one for one in fixed if one.samples_per_s >= ENOUGH * best.samples_per_s), None)
    adaptive = next((one for one in measured if one.depth is None), None)
    limit, why = _limit(best, fixed, cores, local)
    reached = f"{best.megabytes_per_s:,.0f} MB/s and {best.samples_per_s:,.0f} samples/s"
    parts = []
    if enough is not None:
        share = enough.samples_per_s / best.samples_per_s
        reads = "read in flight reaches" if enough.depth == 1 else "reads in flight reach"
        parts.append(
            f"{enough.depth} {reads} {enough.megabytes_per_s:,.0f} MB/s and "
            f"{enough.samples_per_s:,.0f} samples/s, {100 * share:.0f} % of the best"
        )
    else:
        parts.append(f"the best is {reached}")
    if adaptive is not None and fixed:
        share = adaptive.samples_per_s / best.samples_per_s
        parts.append(f"`auto` reaches {100 * share:.0f} % with {adaptive.depth_reached}")
    return {
        "best_depth": best.depth,
        "best_megabytes_per_s": best.megabytes_per_s,
        "best_samples_per_s": best.samples_per_s,
        "enough_depth": enough.depth if enough else None,
        "adaptive_share": adaptive.samples_per_s / best.samples_per_s if adaptive else None,
        "limit": limit,
        "sentence": "; ".join(parts) + f"; {why}.",
    }


def _limit(best: Measurement, fixed: Sequence[Measurement], cores: int, local: bool) -> tuple[str, str]:
    if best.throttled:
        return "throttling", f"the store limits: it throttled {best.throttled} requests"
    if best.cores_busy >= BUSY * cores:
        return "cpu", f"the processor limits: {best.cores_busy:.1f} of {cores} cores were busy"
    if best.retries:
        return "errors", f"the store limits: {best.retries} requests failed and were tried again"
    deepest = fixed[-2:]
    if len(deepest) == 2 and deepest[1].samples_per_s > STILL_GROWING * deepest[0].samples_per_s:
        gain = 100 * (deepest[1].samples_per_s / deepest[0].samples_per_s - 1)
        return "latency", (
            f"latency limits: {deepest[1].depth} reads in flight still gave {gain:.0f} % more than {deepest[0].depth}"
        )
    if best.cores_busy >= ONE_CORE and cores > 1:
        return "process", (
            f"this process limits: it kept {best.cores_busy:.1f} of {cores} cores busy, and small rows cost the "
            "interpreter, of which a process has one"
        )
    busy = f"more reads in flight add nothing, and {best.cores_busy:.1f} of {cores} cores were busy"
    return (
        ("disk", f"the disk or its page cache limits: {busy}")
        if local
        else ("store", f"the store or the network limits: {busy}")
    )


def as_json(measured: Measurement) -> dict[str, Any]:
    """A measurement as JSON data."""
    return asdict(measured)
