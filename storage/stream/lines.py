"""The endless lines of samples, one for each bucket, cut into lanes and shuffled within windows.

A line is a bucket's epochs, one behind the other, the blocks of an epoch permuted. Lane l of L takes a contiguous
piece of every epoch; the rows of a piece are permuted within windows. All of it is closed form: which row is the
i-th of a lane depends on nothing that came before. Batch sizes are not known here; see
:mod:`isthmus.storage.stream.order`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.storage.stream.randomness import below, permutation

Int64 = NDArray[np.int64]

BLOCKS, WINDOW, PHASE, SCHEDULE, CAPTION = 1, 2, 3, 4, 5
"""What a random number is for: part of its key, after seed and stage."""


@dataclass(frozen=True, eq=False)
class SourceBlocks:
    """The blocks of one source that a stage reads."""

    bucket: Int64
    """[blocks] number of the bucket."""
    rows: Int64
    """[blocks]"""
    repeat: Fraction = Fraction(1)
    """Appearances in an epoch; of a fraction, floor((e + 1) r) - floor(e r) in epoch e."""

    def appearances_before(self, epoch: int) -> int:
        """Appearances in all epochs before this one."""
        return (epoch * self.repeat.numerator) // self.repeat.denominator


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Which rows, as parallel arrays."""

    source: Int64
    block: Int64
    """Within the source."""
    row: Int64
    """Within the block."""
    epoch: Int64
    appearance: Int64
    """Of the source within the epoch; above zero only for sources that repeat."""

    def __len__(self) -> int:
        return len(self.row)

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, one behind the other."""
        return Rows(
            np.concatenate([part.source for part in parts]),
            np.concatenate([part.block for part in parts]),
            np.concatenate([part.row for part in parts]),
            np.concatenate([part.epoch for part in parts]),
            np.concatenate([part.appearance for part in parts]),
        )


@dataclass(frozen=True, eq=False, slots=True)
class EpochLine:
    """One epoch of one bucket: its blocks as permuted."""

    source: Int64
    block: Int64
    appearance: Int64
    first: Int64
    """[blocks] position of each one's first row."""


@dataclass(frozen=True, eq=False, slots=True)
class LaneWindow:
    """Rows of a lane that are shuffled together: those that start at row `first` of the lane's line."""

    first: int
    epoch: int
    position: int
    """Of its first row in the epoch's line, from which its rows follow one another."""
    rest: int
    """Rows of the lane's piece of the epoch from `position` on, the window's own included."""
    shuffled: Int64
    """[rows] the lane's row `first` + i is the window's row shuffled[i]."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that follow one another both in an epoch's line and in a block."""

    source: int
    block: int
    """Within the source."""
    appearance: int
    row: int
    """The first, within the block."""
    count: int


class Lines:
    """The lines of one stage.

    Args:
        sources: what the stage reads.
        seed: of the run.
        stage: number of the stage; every stage has its own lines.
        lanes: L, independent of the world size.
        window: rows that are shuffled together, over all lanes and buckets.
    """

    def __init__(
        self, sources: Sequence[SourceBlocks], *, seed: int, stage: int, lanes: int, window: int
    ) -> None:
        if lanes < 1 or window < 1:
            raise UsageError(f"lanes {lanes} and shuffle_window {window} must be at least 1")
        self.sources, self.lanes, self.window = tuple(sources), lanes, window
        self._key = (seed, stage)
        buckets = {int(bucket) for source in sources for bucket in np.unique(source.bucket)}
        self.buckets: tuple[int, ...] = tuple(sorted(buckets))
        """Numbers of the buckets that have rows."""
        if not self.buckets:
            raise UsageError("no source has a row for this stage")
        self._blocks = {
            bucket: [np.flatnonzero(source.bucket == bucket) for source in sources] for bucket in self.buckets
        }
        self._rows = {
            bucket: [int(source.rows[at].sum()) for source, at in zip(sources, blocks, strict=True)]
            for bucket, blocks in self._blocks.items()
        }
        self.lane_window = self.lane_windows(window)
        """Bucket -> rows of a lane that are shuffled together."""
        self._epochs: OrderedDict[tuple[int, int], EpochLine] = OrderedDict()
        self._windows: dict[tuple[int, int], tuple[int, int, Int64]] = {}
        self._spans: dict[tuple[int, int], tuple[int, int, int]] = {}

    def permutation(self, count: int, *key: int) -> Int64:
        """A permutation keyed by seed, stage and `key`. All shuffling goes through here."""
        return permutation(count, *self._key, *key)

    def phase(self, bucket: int, limit: int) -> int:
        """A bucket's seeded offset in [0, limit)."""
        return below(limit, *self._key, PHASE, bucket)

    def caption(self, source: int, block: int, epoch: int, appearance: int, captions: int) -> int:
        """Which of a block's captions is read in this appearance."""
        if captions == 1:
            return 0
        return below(captions, *self._key, CAPTION, source, block, epoch, appearance)

    def rows_before(self, bucket: int, epoch: int) -> int:
        """R(e): rows of a bucket in all epochs before this one."""
        return sum(self.source_rows_before(bucket, epoch))

    def source_rows_before(self, bucket: int, epoch: int) -> list[int]:
        """The same of each source."""
        return [
            rows * source.appearances_before(epoch)
            for rows, source in zip(self._rows[bucket], self.sources, strict=True)
        ]

    def lane_windows(self, window: int) -> dict[int, int]:
        """Bucket -> its share of a window, as rows of one lane."""
        # Long-run shares: an epoch of a source with a fractional repeat may lack the source.
        period = lcm(*(source.repeat.denominator for source in self.sources))
        rows = {bucket: self.rows_before(bucket, period) for bucket in self.buckets}
        total = sum(rows.values())
        return {bucket: max(1, window * count // total // self.lanes) for bucket, count in rows.items()}

    def most_rows(self, bucket: int) -> int:
        """No epoch of the bucket has more rows than this."""
        return sum(
            rows * -(-source.repeat.numerator // source.repeat.denominator)
            for rows, source in zip(self._rows[bucket], self.sources, strict=True)
        )

    def lane_before(self, bucket: int, epoch: int, lane: int) -> int:
        """C_l(e) = floor((R(e) + l) / L); over the lanes these sum to R(e) (Hermite's identity)."""
        return (self.rows_before(bucket, epoch) + lane) // self.lanes

    def lane_rows(self, bucket: int, lane: int, start: int, stop: int) -> Rows:
        """The rows [start, stop) of a lane's endless line of this bucket."""
        window = self.lane_window[bucket]
        parts = []
        while start < stop:
            epoch, begin, end = self._span(bucket, lane, start)
            number, within = divmod(start - begin, window)
            length = min(window, end - begin - number * window)
            count = min(stop - start, length - within)
            shuffled = self._window(bucket, lane, epoch, number, length)[within : within + count]
            parts.append(
                self._at(bucket, epoch, self._lane_start(bucket, epoch, lane) + number * window + shuffled)
            )
            start += count
        return parts[0] if len(parts) == 1 else Rows.concatenate(parts)

    def window_at(self, bucket: int, lane: int, at: int) -> LaneWindow:
        """The shuffle window that holds a lane's row `at`."""
        window = self.lane_window[bucket]
        epoch, begin, end = self._span(bucket, lane, at)
        number = (at - begin) // window
        first = begin + number * window
        shuffled = self._window(bucket, lane, epoch, number, min(window, end - first))
        position = self._lane_start(bucket, epoch, lane) + number * window
        return LaneWindow(first, epoch, position, end - first, shuffled)

    def runs(self, bucket: int, epoch: int, position: int, count: int) -> list[Run]:
        """The blocks that hold the rows [position, position + count) of an epoch's line."""
        line = self.epoch_line(bucket, epoch)
        at = int(np.searchsorted(line.first, position, side="right")) - 1
        end, runs = position + count, []
        while position < end:
            first = int(line.first[at])
            stop = min(end, int(line.first[at + 1]) if at + 1 < len(line.first) else end)
            if stop > position:  # a block without rows takes no place
                runs.append(
                    Run(
                        int(line.source[at]),
                        int(line.block[at]),
                        int(line.appearance[at]),
                        position - first,
                        stop - position,
                    )
                )
            position, at = stop, at + 1
        return runs

    def _span(self, bucket: int, lane: int, at: int) -> tuple[int, int, int]:
        """The epoch that holds a lane's row `at`, and the lane's rows [begin, end) that lie in it."""
        span = self._spans.get((bucket, lane))
        if span is None or not span[1] <= at < span[2]:
            low = self.epoch_of(bucket, lane, at)
            span = low, self.lane_before(bucket, low, lane), self.lane_before(bucket, low + 1, lane)
            self._spans[bucket, lane] = span
        return span

    def epoch_of(self, bucket: int, lane: int, at: int) -> int:
        """The epoch that holds a lane's row `at`."""
        low, high = 0, 1
        while self.lane_before(bucket, high, lane) <= at:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.lane_before(bucket, middle, lane) <= at:
                low = middle
            else:
                high = middle
        return low

    def _lane_start(self, bucket: int, epoch: int, lane: int) -> int:
        """Where a lane's piece of an epoch starts: the pieces of the lanes below it, summed in closed form."""

        def below_lane(rows: int) -> int:  # sum of floor((rows + j) / L) over j < lane
            whole, rest = divmod(rows, self.lanes)
            return lane * whole + max(0, rest + lane - self.lanes)

        return below_lane(self.rows_before(bucket, epoch + 1)) - below_lane(self.rows_before(bucket, epoch))

    def window_order(self, bucket: int, lane: int, epoch: int, number: int, length: int) -> Int64:
        """[length] the order of the rows of a window, the lane's `number`-th in the epoch."""
        return self.permutation(length, WINDOW, bucket, epoch, lane, number)

    def _window(self, bucket: int, lane: int, epoch: int, number: int, length: int) -> Int64:
        kept = self._windows.get((bucket, lane))
        if kept is None or kept[:2] != (epoch, number):
            shuffled = self.window_order(bucket, lane, epoch, number, length)
            kept = self._windows[bucket, lane] = (epoch, number, shuffled)
        return kept[2]

    def _at(self, bucket: int, epoch: int, positions: Int64) -> Rows:
        """The rows at these positions of an epoch's line."""
        line = self.epoch_line(bucket, epoch)
        at = np.searchsorted(line.first, positions, side="right") - 1
        return Rows(
            source=line.source[at],
            block=line.block[at],
            row=positions - line.first[at],
            epoch=np.full(len(at), epoch, np.int64),
            appearance=line.appearance[at],
        )

    def epoch_line(self, bucket: int, epoch: int) -> EpochLine:
        """An epoch's blocks in the order in which the line holds them."""
        key = bucket, epoch
        if key not in self._epochs:
            self._epochs[key] = self._shuffle_blocks(bucket, epoch)
            # Lanes may straddle two epochs of every bucket; more are kept for buckets smaller than a batch.
            while len(self._epochs) > 4 * len(self.buckets):
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(key)
        return self._epochs[key]

    def _shuffle_blocks(self, bucket: int, epoch: int) -> EpochLine:
        sources, blocks, appearances, rows = [], [], [], []
        for number, (source, at) in enumerate(zip(self.sources, self._blocks[bucket], strict=True)):
            times = source.appearances_before(epoch + 1) - source.appearances_before(epoch)
            sources.append(np.full(times * len(at), number, np.int64))
            blocks.append(np.tile(at, times))
            appearances.append(np.repeat(np.arange(times, dtype=np.int64), len(at)))
            rows.append(np.tile(source.rows[at], times))
        order = self.permutation(sum(map(len, blocks)), BLOCKS, bucket, epoch)
        sizes = np.concatenate(rows)[order]
        return EpochLine(
            source=np.concatenate(sources)[order],
            block=np.concatenate(blocks)[order],
            appearance=np.concatenate(appearances)[order],
            first=np.cumsum(sizes) - sizes,
        )
