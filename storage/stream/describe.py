"""Which rows of which shards a step holds, from manifest and index alone: no threads, no byte of a shard is read.

The loader's own ``describe`` says the same of a run that is going on; this is for looking at a run from outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.filesystems import filesystem, storage_errors
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.stream.mix import Mix, long_run_shares, mix_of
from isthmus.storage.stream.order import Order, check_world_size
from isthmus.storage.stream.plan import Plan, Segment
from isthmus.storage.stream.stage import StageReader, common_encoders


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


@dataclass(frozen=True, slots=True)
class StepDescription:
    """One global step, or one rank's part of it."""

    step: int
    stage: int
    resolution: int
    """Pixels."""
    bucket: str
    segment: Segment
    """Of the plan, that the step belongs to."""
    rows: tuple[RowPlace, ...]
    """In the order of positions."""
    source_of_row: tuple[int, ...]
    """For each row, the number of its source among the datasets."""

    def rows_by_source(self) -> dict[int, int]:
        """Source -> rows of this step."""
        counts: dict[int, int] = defaultdict(int)
        for source in self.source_of_row:
            counts[source] += 1
        return dict(counts)


class Describer:
    """Describes any step of a run; the arguments are the loader's, in the same meaning.

    Args:
        datasets: the sources, opened.
        repeats: how often each appears in an epoch.
        stages: the resolution of each stage, pixels.
        plan: batch size and stage of each step.
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
    ) -> None:
        common_encoders(datasets)
        self.datasets, self.plan = tuple(datasets), plan
        self._repeats = [Fraction(repeat) for repeat in repeats]
        self._resolutions = tuple(stages)
        self._seed, self._lanes, self._shuffle_window = seed, lanes, shuffle_window
        names = {bucket for dataset in datasets for bucket in dataset.manifest.rows}
        names |= {bucket for dataset in datasets for bucket in dataset.spec.buckets}
        self._buckets = tuple(sorted(names))
        self._stages: dict[int, StageReader] = {}
        self._orders: dict[Segment, Order] = {}

    def step(self, step: int, rank: int = 0, world_size: int = 1) -> StepDescription:
        """The rows of a global step on one rank; rank 0 of 1 is the global batch.

        Raises:
            WorldSizeError: so many ranks cannot share the lanes.
            UsageError: there is no such step or rank.
        """
        if step < 0 or not 0 <= rank < world_size:
            raise UsageError(f"no step {step} on rank {rank} of {world_size}")
        segment = self.plan.segment_at(step)
        check_world_size(world_size, self._lanes, segment.global_batch_size)
        stage = self._stage(segment.stage)
        found = self._order(segment).step(step, rank, world_size)
        columns = (
            found.rows.source,
            found.rows.block,
            found.rows.row,
            found.rows.epoch,
            found.rows.appearance,
        )
        rows = tuple(
            self._place(stage, position, *row)
            for position, *row in zip(
                found.positions.tolist(), *(column.tolist() for column in columns), strict=True
            )
        )
        return StepDescription(
            step=step,
            stage=segment.stage,
            resolution=stage.resolution,
            bucket=stage.buckets[found.bucket],
            segment=segment,
            rows=rows,
            source_of_row=tuple(found.rows.source.tolist()),
        )

    def shares(self, stage: int) -> tuple[Fraction, ...]:
        """Of each source, the share of a stage's rows that its repeat asks for; they sum to 1."""
        return long_run_shares(self._stage(stage).lines)

    def mix(self, first: int, stop: int) -> Mix:
        """The rows that the global steps [first, stop) hold of each source."""
        return mix_of(self.plan, self._order, first, stop)

    def keys(self, described: StepDescription) -> list[str]:
        """The keys of a step's rows; reads one column of each block that they lie in.

        Raises:
            CorruptShard: a file is missing or is not what the index says.
            StorageError: the store refuses.
        """
        wanted: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for at, (source, place) in enumerate(zip(described.source_of_row, described.rows, strict=True)):
            wanted[source, place.shard, place.row_group].append(at)
        keys = [""] * len(described.rows)
        for (source, shard, row_group), places in wanted.items():
            column = _read_keys(self.datasets[source], shard, row_group)
            for at in places:
                row = described.rows[at].row
                if row >= len(column):
                    message = f"has {len(column)} rows, the index says more than {row}"
                    raise CorruptShard(message, shard=shard, row_group=row_group)
                keys[at] = column[row]
        return keys

    def _stage(self, number: int) -> StageReader:
        if number not in self._stages:
            if number >= len(self._resolutions):
                raise UsageError(f"the plan has stage {number}, there are {len(self._resolutions)} stages")
            self._stages[number] = StageReader(
                number,
                self._resolutions[number],
                self.datasets,
                self._repeats,
                self._buckets,
                seed=self._seed,
                lanes=self._lanes,
                shuffle_window=self._shuffle_window,
            )
        return self._stages[number]

    def _order(self, segment: Segment) -> Order:
        if segment not in self._orders:
            lines = self._stage(segment.stage).lines
            self._orders[segment] = Order(lines, self.plan.stage_segments(segment))
        return self._orders[segment]

    def _place(
        self,
        stage: StageReader,
        position: int,
        source: int,
        number: int,
        row: int,
        epoch: int,
        appearance: int,
    ) -> RowPlace:
        index, block = self.datasets[source].index, stage.block(source, number)
        return RowPlace(
            position=position,
            source=self.datasets[source].uri,
            shard=index.file(block, f"{stage.resolution}px"),
            row_group=int(index.row_group[block]),
            row=row,
            epoch=epoch,
            appearance=appearance,
            caption=stage.caption(source, number, epoch, appearance),
        )


def _read_keys(dataset: Dataset, shard: str, row_group: int) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    uri, foreign = dataset.file_uri(shard), dataset.manifest.columns
    name = "key" if foreign is None else foreign.key
    store, path = filesystem(uri)
    try:
        with storage_errors("read", uri), store.open(path, "rb") as opened:
            file = pq.ParquetFile(opened)
            if name is None:
                rows = file.metadata.row_group(row_group).num_rows
                return [f"{shard}#{row_group}:{row}" for row in range(rows)]
            table = file.read_row_group(row_group, columns=[name], use_threads=False)
            return [str(key) for key in table.column(name).to_pylist()]
    except FileNotFoundError:
        raise CorruptShard("the file is missing", shard=shard, row_group=row_group) from None
    except (pa.ArrowException, KeyError, IndexError) as error:
        raise CorruptShard(f"has no readable keys: {error}", shard=shard, row_group=row_group) from None
