"""The loader: an endless iterator over a rank's batches, and what each step of the run holds.

Its whole state is the plan and the step to start from; a position costs the same anywhere in an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import TracebackType
from typing import Any

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.local import LocalRanges
from isthmus.storage.ranges.many import available
from isthmus.storage.shards.blocks import block_reader
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.spec import TextColumn
from isthmus.storage.stream.access import Access, Fit, rows_apart
from isthmus.storage.stream.batch import Allocate, Batch, allocate_touched
from isthmus.storage.stream.depth import Depth, usable_cores
from isthmus.storage.stream.describe import Describer, RowPlace
from isthmus.storage.stream.gather import Gatherer
from isthmus.storage.stream.memory import Need
from isthmus.storage.stream.order import Order, StepPlace, check_world_size
from isthmus.storage.stream.plan import Plan, Segment
from isthmus.storage.stream.prefetch import Prefetcher
from isthmus.storage.stream.rows import RowPlanner
from isthmus.storage.stream.stage import BlockKey, StageReader, common_encoders
from isthmus.storage.stream.windows import Cut, Planner
from isthmus.storage.stream.work import Job, Kept, Read

LEAST_DEPTH = 3
"""Reads in flight to start with, of a page-cached disk: two that copy, and one that gets ready meanwhile."""

GATHER_DEPTH = 1, max(1, min(4, usable_cores() - 1))
"""The same at least and at most where rows are gathered: what reads a disk ahead is the system, copying keeps a core busy,
and who waits for a step helps."""


class Loader:
    """Batches of step `start_step`, `start_step` + 1, ... for one rank, read ahead by threads of this process.

    Args:
        datasets: the sources, opened.
        repeats: how often each appears in an epoch.
        seed: of the run.
        lanes: L; world size | L | global batch size.
        shuffle_window: rows that are shuffled together, over all ranks and buckets.
        stages: the resolution of each stage, pixels.
        plan: batch size and stage of each step.
        rank: of `world_size` ranks.
        memory_limit: bytes for blocks and batches on this rank.
        start_step: the first global step to deliver.
        access: how each dataset's files are reached; by default straight from where they are. Those that are given
            are the caller's to close.
        depth: reads in flight; by default it adapts to the store and the pace of the caller.
        check: compare checksums while reading; blocks are then read whole, and copied.
        wait_limit: seconds that `next` waits for a batch before it raises StorageError.
        allocate: makes the batches' buffers; pinned memory comes in here.

    Raises:
        WorldSizeError: the ranks cannot share the lanes.
        UsageError: the order needs more memory than the limit; the message shows the arithmetic.
        DatasetMismatch: the datasets do not fit each other, or lack a stage's resolution.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        repeats: Sequence[Fraction | int],
        *,
        seed: int,
        lanes: int,
        shuffle_window: int,
        stages: Sequence[int],
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        memory_limit: int = 4_000_000_000,
        start_step: int = 0,
        access: Sequence[Access] | None = None,
        depth: int | None = None,
        check: bool = True,
        wait_limit: float = 600.0,
        allocate: Allocate = allocate_touched,
    ) -> None:
        if not datasets or len(datasets) != len(repeats):
            raise UsageError(f"{len(datasets)} datasets and {len(repeats)} repeats")
        if (depth is not None and depth < 1) or start_step < 0 or not 0 <= rank < world_size:
            raise UsageError(f"depth {depth}, start_step {start_step}, rank {rank} of {world_size}")
        self.datasets = tuple(datasets)
        self._encoders = common_encoders(datasets)
        self._repeats = [Fraction(repeat) for repeat in repeats]
        if any(repeat <= 0 for repeat in self._repeats):
            raise UsageError("a source's repeat must be above zero")
        self._order_settings = {"seed": seed, "lanes": lanes, "shuffle_window": shuffle_window}
        self.lanes, self._resolutions, self._check = lanes, tuple(stages), check
        self.rank, self.world_size, self._memory_limit = rank, world_size, memory_limit
        names = {bucket for dataset in datasets for bucket in dataset.manifest.rows}
        names |= {bucket for dataset in datasets for bucket in dataset.spec.buckets}
        self._buckets = tuple(sorted(names))
        self._counters = access[0].counters if access else Counters()
        self._access = list(access or (Access(dataset, counters=self._counters) for dataset in datasets))
        self._owned = not access
        self._stages: dict[int, StageReader] = {}
        self._orders: dict[Segment, Order] = {}
        self._need_of: dict[Segment, Need] = {}
        self._largest_block = 1
        self._lock = threading.RLock()
        """Of plan, orders and lines, whose caches the planning thread and `describe` share."""
        self._depth, self._wait_limit, self._allocate = depth, wait_limit, allocate
        self._before: dict[str, float] = {}
        self._describer: Describer | None = None
        self._plan = self._accept(plan)
        self._prefetcher = self._start(start_step)

    def _start(self, step: int) -> Gatherer | Prefetcher:
        lanes = self.lanes // self.world_size
        stores = [
            access.ranges(dataset.index.file(0, "text"))
            for access, dataset in zip(self._access, self.datasets, strict=True)
        ]
        least = LEAST_DEPTH if all(store.direct for store in stores) else LEAST_DEPTH + 1
        most = max(store.max_depth for store in stores)
        mine = range(self.rank * lanes, (self.rank + 1) * lanes)
        depth = Depth(least, most, self._depth)
        if not self._check and available() and all(map(rows_apart, self._access)):
            depth = Depth(*GATHER_DEPTH, self._depth)
            return Gatherer(
                RowPlanner(self._place, mine, self._local, step, self._lock),
                counters=self._counters,
                name=self._block_name,
                ahead=self._look_ahead,
                capacity=self._capacity,
                depth=depth,
                wait_limit=self._wait_limit,
                allocate=self._allocate,
                start_step=step,
            )
        return Prefetcher(
            Planner(self._place, mine, self._may_cut, step, self._lock),
            name=self._block_name,
            ahead=self._look_ahead,
            expect=self._expect,
            capacity=self._capacity,
            depth=depth,
            wait_limit=self._wait_limit,
            allocate=self._allocate,
            start_step=step,
        )

    def _local(self, source: int, name: str) -> LocalRanges:
        ranges = self._access[source].ranges(name)
        assert isinstance(ranges, LocalRanges)  # rows_apart says so
        return ranges

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next step's batch; its arrays are valid until the next-but-one is requested.

        Raises:
            CorruptShard: a block that the step needs is damaged; names shard, row group and column.
            StorageError: the store refused, or the batch did not come in time.
        """
        return self._batch(self._prefetcher.next())

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops and joins the threads; reads in flight are given up."""
        self._prefetcher.stop()
        if self._owned:
            for access in self._access:
                access.close()
        self._prefetcher.close()

    def extend(self, plan: Plan) -> None:
        """Follows a plan with segments appended; what was read ahead under the old plan is read again.

        The batches that were delivered stay valid as they would have.

        Raises:
            UsageError: it changes a step that was delivered already (a rewind needs a new loader).
        """
        delivered = self._prefetcher.wanted
        old, new = self._plan.timeline, plan.timeline
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        changed = min(
            [segment.first_step for line in (old, new) for segment in line[same : same + 1]], default=None
        )
        if changed is None:
            return
        if changed < delivered:
            raise UsageError(
                f"the plan changes step {changed}, but step {delivered - 1} was delivered already"
            )
        self._accept(plan)
        self._prefetcher.close()
        for name in ("wait_s", "steps", "split_blocks"):
            self._before[name] = self._before.get(name, 0) + self._prefetcher.stats()[name]
        with self._lock:
            self._plan = plan
            self._orders.clear()
        self._prefetcher = self._start(delivered)

    def memory_bytes(self, world_size: int | None = None) -> int:
        """Bytes that the order needs on a rank of `world_size` (default: this loader's): the largest of the stages."""
        return max(need.bytes for need in self._needs(self._plan, world_size or self.world_size))

    @property
    def fits(self) -> list[Fit]:
        """How much of each source the node's cache has room for; only of sources that are cached."""
        return [access.fit for access in self._access if access.fit is not None]

    @property
    def resident_bytes(self) -> int:
        """Bytes of batches and blocks that are in memory now."""
        return self._prefetcher.resident_bytes

    def stats(self) -> dict[str, Any]:
        """Figures since the start: what the counters of the stores say, and

        depth (reads in flight that are allowed now), in_flight, ready_steps, resident_bytes, wait_s (seconds spent in
        `next`), steps, split_blocks (blocks of which this rank read a part, counted at each part but the first), and
        read_bytes_wasted (bytes read of rows that this rank's lanes do not own).
        """
        found: dict[str, Any] = dict(self._counters.snapshot())
        for name, value in self._prefetcher.stats().items():
            found[name] = value + self._before.get(name, 0)
        return found

    def waiting_for(self) -> str:
        """What the next batch waits for, in words: the block that is being read, and for how long."""
        return self._prefetcher.waiting_for()

    def describe(self, step: int) -> list[RowPlace]:
        """Where every sample of a step's global batch comes from, in the order of positions."""
        with self._lock:
            if self._describer is None or self._describer.plan is not self._plan:
                # Lines of its own: the planning thread uses the caches of the loader's.
                self._describer = Describer(
                    self.datasets,
                    self._repeats,
                    stages=self._resolutions,
                    plan=self._plan,
                    **self._order_settings,
                )
            return list(self._describer.step(step).rows)

    def _accept(self, plan: Plan) -> Plan:
        for segment in plan.timeline:
            what = f"stages[{segment.stage}]."
            if segment.stage >= len(self._resolutions):
                raise UsageError(
                    f"the plan has stage {segment.stage}, there are {len(self._resolutions)} stages"
                )
            check_world_size(self.world_size, self.lanes, segment.global_batch_size, what=what)
            self._stage(segment.stage).check_memory(
                self._memory_limit, self.world_size, segment.global_batch_size
            )
        return plan

    def _needs(self, plan: Plan, world_size: int) -> list[Need]:
        return [
            self._stage(segment.stage).need(world_size, segment.global_batch_size)
            for segment in plan.timeline
        ]

    def _stage(self, number: int) -> StageReader:
        if number not in self._stages:
            resolution = self._resolutions[number]
            stage = StageReader(
                number,
                resolution,
                self.datasets,
                self._repeats,
                self._buckets,
                readers=[
                    block_reader(dataset, resolution, check=self._check, ranges=access.ranges)
                    for dataset, access in zip(self.datasets, self._access, strict=True)
                ],
                **self._order_settings,
            )
            self._stages[number] = stage
        return self._stages[number]

    def _order(self, step: int) -> tuple[StageReader, Order]:
        segment = self._plan.segment_at(step)
        stage = self._stage(segment.stage)
        if segment not in self._orders:
            self._orders[segment] = Order(stage.lines, self._plan.stage_segments(segment))
        return stage, self._orders[segment]

    def _place(self, step: int) -> tuple[StageReader, StepPlace]:
        stage, order = self._order(step)
        return stage, order.place(step)

    def _may_cut(self, stage: StageReader, source: int) -> Cut | None:
        reader = stage.readers[source]
        if not reader.fills:
            return None
        if self._check:
            return "whole"
        return "rows" if reader.direct(stage.block(source, 0)) else "blocks"

    def _capacity(self, step: int) -> int:
        """Room for the window in use and the next one, so that reading is spread evenly, and for reads in flight."""
        segment = self._plan.segment_at(step)
        need = self._need_of.get(segment)
        if need is None:
            need = self._stage(segment.stage).need(self.world_size, segment.global_batch_size)
            self._need_of[segment] = need
        flying = self._prefetcher.depth.value * max(
            share.beyond * share.row for share in need.shares.values()
        )
        return min(self._memory_limit, 2 * need.bytes + flying)

    def _look_ahead(self, step: int) -> int:
        """Steps of two shuffle windows and some: a bucket's share of the steps is not even."""
        segment = self._plan.segment_at(step)
        rows = min(self._order_settings["shuffle_window"], self._stage(segment.stage).rows)
        return 32 + 2 * (rows // segment.global_batch_size)

    def _expect(self, work: Sequence[Read | Kept]) -> None:
        """Tells each source's access what will be read of its files."""
        for source, access in enumerate(self._access):
            reads = [
                read
                for item in work
                if item.key.source == source
                for read in item.reader.files(item.key.block, item.key.caption)
            ]
            if reads:
                access.expect(reads)

    def _block_name(self, key: BlockKey) -> str:
        index = self.datasets[key.source].index
        file = index.file(key.block, f"{key.resolution}px")
        return f"{file}, row group {index.row_group[key.block]}"

    def _batch(self, job: Job) -> Batch:
        buffer, rows, stage = job.buffer, job.layout.rows, job.stage
        assert buffer is not None
        bucket = stage.buckets[job.bucket]
        first = self.rank * rows
        numbers, at, shape = buffer.numbers, job.layout.number_at, stage.latent_shapes[bucket]

        return Batch(
            step=job.step,
            stage=stage.number,
            bucket=bucket,
            keys=buffer.keys,
            positions=np.arange(first, first + rows, dtype=np.int64),
            latent_mean=buffer.shaped("latent_mean", shape),
            latent_logvar=buffer.shaped("latent_logvar", shape),
            text={
                encoder.name: TextColumn(
                    tokens=buffer.shaped(f"{encoder.name}_tokens", (encoder.max_tokens, encoder.width)),
                    length=numbers[:, at[f"{encoder.name}_length"]].copy(),
                    pooled=None
                    if encoder.pooled_width is None
                    else buffer.shaped(f"{encoder.name}_pooled", (encoder.pooled_width,)),
                )
                for encoder in self._encoders
            },
            captions=buffer.captions,
            original_size=numbers[:, :2].copy(),
            crop=numbers[:, 2:6].copy(),
            flipped=numbers[:, at["flipped"]] != 0,
        )
