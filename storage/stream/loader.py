"""The loader: an endless iterator over a rank's batches, and what each step of the run holds.

Its whole state is the plan and the step to start from; a position costs the same anywhere in an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import TracebackType

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.shards.blocks import Block, BlockReader, Bytes
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.layout import CROP_COLUMNS, SIZE_COLUMNS
from isthmus.storage.shards.spec import Float16, TextColumn
from isthmus.storage.stream.batch import Allocate, Batch, BatchBuffer, allocate_touched
from isthmus.storage.stream.memory import Need
from isthmus.storage.stream.order import Order, StepRows, check_world_size
from isthmus.storage.stream.plan import Plan, Segment
from isthmus.storage.stream.prefetch import Job, Prefetcher, Source
from isthmus.storage.stream.stage import BlockKey, Part, StageReader, common_encoders


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where one sample of a step comes from."""

    position: int
    """In the global batch."""
    source: str
    """URI of the dataset."""
    shard: str
    """The latents' file."""
    row_group: int
    row: int
    epoch: int
    appearance: int
    caption: int
    """Which of the sample's captions."""


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
        threads: that read ahead.
        check: compare checksums while reading.
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
        threads: int = 2,
        check: bool = True,
        wait_limit: float = 600.0,
        allocate: Allocate = allocate_touched,
    ) -> None:
        if not datasets or len(datasets) != len(repeats):
            raise UsageError(f"{len(datasets)} datasets and {len(repeats)} repeats")
        if threads < 1 or start_step < 0 or not 0 <= rank < world_size:
            raise UsageError(f"threads {threads}, start_step {start_step}, rank {rank} of {world_size}")
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
        self._stages: dict[int, StageReader] = {}
        self._readers: dict[tuple[int, int], BlockReader] = {}
        self._orders: dict[Segment, Order] = {}
        self._lock = (
            threading.Lock()
        )  # of plan and orders, whose caches a planning thread and `describe` share
        self._plan = self._accept(plan)
        self._prefetcher = Prefetcher(
            Source(
                plan=self._job,
                size=lambda key: self._reader(key).size(key.block, key.caption),
                read=lambda key, buffer: self._reader(key).read(key.block, key.caption, buffer),
                look_ahead=self._look_ahead,
                name=self._block_name,
            ),
            start_step=start_step,
            capacity=self._capacity(),
            threads=threads,
            wait_limit=wait_limit,
            allocate=allocate,
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next step's batch; its arrays are valid until the next-but-one is requested.

        Raises:
            CorruptShard: a block that the step needs is damaged; names shard, row group and column.
            StorageError: the store refused, or the batch did not come in time.
        """
        return self._prefetcher.next()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops and joins the threads."""
        self._prefetcher.close()

    def extend(self, plan: Plan) -> None:
        """Follows a plan with segments appended; steps that were made ready under the old plan are made again.

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
        with self._lock:
            self._plan = plan
            self._orders.clear()
        self._prefetcher.capacity = self._capacity()
        self._prefetcher.drop_from(changed)

    def memory_bytes(self, world_size: int | None = None) -> int:
        """Bytes that the order needs on a rank of `world_size` (default: this loader's): the largest of the stages."""
        return max(need.bytes for need in self._needs(self._plan, world_size or self.world_size))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks that are in memory now."""
        return self._prefetcher.resident_bytes

    def describe(self, step: int) -> list[RowPlace]:
        """Where every sample of a step's global batch comes from, in the order of positions."""
        stage, rows = self._rows(step, 0, 1)
        places = []
        for at, position in enumerate(rows.positions.tolist()):
            source, number = int(rows.rows.source[at]), int(rows.rows.block[at])
            epoch, appearance = int(rows.rows.epoch[at]), int(rows.rows.appearance[at])
            index, block = self.datasets[source].index, stage.block(source, number)
            places.append(
                RowPlace(
                    position=position,
                    source=self.datasets[source].uri,
                    shard=index.file(block, f"{stage.resolution}px"),
                    row_group=int(index.row_group[block]),
                    row=int(rows.rows.row[at]),
                    epoch=epoch,
                    appearance=appearance,
                    caption=stage.caption(source, number, epoch, appearance),
                )
            )
        return places

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
            stage = StageReader(
                number,
                self._resolutions[number],
                self.datasets,
                self._repeats,
                self._buckets,
                **self._order_settings,
            )
            for source, dataset in enumerate(self.datasets):
                key = source, stage.resolution
                self._readers.setdefault(key, BlockReader(dataset, stage.resolution, check=self._check))
            self._stages[number] = stage
        return self._stages[number]

    def _rows(self, step: int, rank: int, world_size: int) -> tuple[StageReader, StepRows]:
        with self._lock:
            segment = self._plan.segment_at(step)
            stage = self._stage(segment.stage)
            if segment not in self._orders:
                self._orders[segment] = Order(stage.lines, self._plan.stage_segments(segment))
            return stage, self._orders[segment].step(step, rank, world_size)

    def _reader(self, key: BlockKey) -> BlockReader:
        return self._readers[key.source, key.resolution]

    def _capacity(self) -> int:
        """Room for the window in use and the next one, so that reading is spread evenly; less if memory is short."""
        needs = self._needs(self._plan, self.world_size)
        blocks, batches = (
            max(need.bytes - need.batches for need in needs),
            max(need.batches for need in needs),
        )
        return min(self._memory_limit - batches, 2 * blocks)

    def _look_ahead(self, step: int) -> int:
        """Steps of one shuffle window: what a new window needs is read while the one before it is used."""
        segment = self._plan.segment_at(step)
        rows = min(self._order_settings["shuffle_window"], self._stage(segment.stage).rows)
        return 2 + min(rows // segment.global_batch_size, 256)

    def _block_name(self, key: BlockKey) -> str:
        index = self.datasets[key.source].index
        file = index.file(key.block, f"{key.resolution}px")
        return f"{file}, row group {index.row_group[key.block]}"

    def _job(self, step: int) -> Job:
        stage, rows = self._rows(step, self.rank, self.world_size)
        parts = stage.parts(rows)
        return Job(step, parts, partial(self._build, step, stage, rows, parts))

    def _build(
        self,
        step: int,
        stage: StageReader,
        rows: StepRows,
        parts: Sequence[Part],
        blocks: Sequence[Block],
        buffer: BatchBuffer,
    ) -> Batch:
        count = len(rows.positions)
        bucket = stage.buckets[rows.bucket]

        def array(column: str, shape: tuple[int, ...]) -> Float16:
            return _gather(buffer, column, (count, *shape), parts, blocks)

        def numbers(columns: Sequence[str]) -> np.ndarray:
            out = buffer.array(columns[0], (count, len(columns)), np.int32)
            for part, block in zip(parts, blocks, strict=True):
                for at, column in enumerate(columns):
                    out[part.slots, at] = block.numbers[column][part.rows]
            return out

        keys, captions = [""] * count, [""] * count
        flipped = buffer.array("flipped", (count,), np.bool_)
        for part, block in zip(parts, blocks, strict=True):
            flipped[part.slots] = block.numbers["flipped"][part.rows]
            for slot, row in zip(part.slots, part.rows, strict=True):
                keys[slot] = block.strings["key"][row]
                captions[slot] = block.strings["caption"][row]
        text = {
            encoder.name: TextColumn(
                tokens=array(f"{encoder.name}_tokens", (encoder.max_tokens, encoder.width)),
                length=numbers([f"{encoder.name}_length"])[:, 0],
                pooled=(
                    None
                    if encoder.pooled_width is None
                    else array(f"{encoder.name}_pooled", (encoder.pooled_width,))
                ),
            )
            for encoder in self._encoders
        }
        return Batch(
            step=step,
            stage=stage.number,
            bucket=bucket,
            keys=keys,
            positions=rows.positions,
            latent_mean=array("latent_mean", stage.latent_shapes[bucket]),
            latent_logvar=array("latent_logvar", stage.latent_shapes[bucket]),
            text=text,
            captions=captions,
            original_size=numbers(SIZE_COLUMNS),
            crop=numbers(CROP_COLUMNS),
            flipped=flipped,
        )


def _gather(
    buffer: BatchBuffer, column: str, shape: tuple[int, ...], parts: Sequence[Part], blocks: Sequence[Block]
) -> Float16:
    """An fp16 column of the batch, its rows copied out of the blocks."""
    width = 2 * int(np.prod(shape[1:]))
    # As bytes: values lie unaligned behind the page header, and numpy copies unaligned fp16 one by one.
    out: Bytes = buffer.array(column, (shape[0], width), np.uint8)
    for part, block in zip(parts, blocks, strict=True):
        values = block.fixed[column]
        for slot, row in zip(part.slots, part.rows, strict=True):
            out[slot] = values[row]
    return out.view(np.float16).reshape(shape)
