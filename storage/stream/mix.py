"""The realised mix of sources: how many rows of each source a range of steps holds, without walking the steps.

Whole epochs of all lanes are closed form. The epochs that a range begins and ends in are counted piece by piece:
whole shuffle windows from one table of an epoch's blocks, the last window of a lane by its own permutation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.stream.lines import Int64, Lines
from isthmus.storage.stream.order import Order
from isthmus.storage.stream.plan import Plan, Segment


@dataclass(frozen=True, slots=True)
class Mix:
    """The rows that steps [first, stop) hold of each source, in the order of the sources."""

    first: int
    stop: int
    rows: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the rows; zeros where there are none."""
        total = sum(self.rows)
        return tuple(rows / total if total else 0.0 for rows in self.rows)


def long_run_shares(lines: Lines) -> tuple[Fraction, ...]:
    """What share of a stage's rows each source has over a whole period of its repeats."""
    period = lcm(*(source.repeat.denominator for source in lines.sources))
    rows = [int(source.rows.sum()) * source.appearances_before(period) for source in lines.sources]
    return tuple(Fraction(count, sum(rows)) for count in rows)


def mix_of(plan: Plan, order_of: Callable[[Segment], Order], first: int, stop: int) -> Mix:
    """The realised mix of the global steps [first, stop), whatever stages they are of.

    Args:
        order_of: segment of the plan's timeline -> the order of its stage up to that segment.

    Raises:
        UsageError: not a range of steps.
    """
    if not 0 <= first <= stop:
        raise UsageError(f"steps {first} to {stop} are not a range")
    line = plan.timeline
    rows = None
    for at, segment in enumerate(line):
        begin = max(first, segment.first_step)
        end = stop if at + 1 == len(line) else min(stop, line[at + 1].first_step)
        if begin < end or (rows is None and at + 1 == len(line)):
            found = rows_of_steps(order_of(segment), begin, max(begin, end))
            rows = found if rows is None else rows + found
    assert rows is not None
    return Mix(first, stop, tuple(rows.tolist()))


def rows_of_steps(order: Order, first: int, stop: int) -> Int64:
    """[sources] rows of each source in the steps [first, stop), which are all of the order's stage."""
    total = np.zeros(len(order.lines.sources), np.int64)
    for begin, end in _unbroken(order, first, stop):
        before, after = order.rows_taken(begin), order.rows_taken(end - 1, after=True)
        for bucket in order.lines.buckets:
            if before[bucket] != after[bucket]:
                total += rows_before(order.lines, bucket, after[bucket] // order.lines.lanes)
                total -= rows_before(order.lines, bucket, before[bucket] // order.lines.lanes)
    return total


def _unbroken(order: Order, first: int, stop: int) -> list[tuple[int, int]]:
    """The steps [first, stop) in ranges within which no sample is skipped and the batch size stays."""
    ends = {stop}
    for segment in order.segments:
        ends.add(segment.first_step)
        skipped = 0
        for start, end in segment.skipped:
            whole = segment.global_batch_size
            ends.add(segment.first_step + (start - segment.first_sample) // whole - skipped)
            skipped += (end - start) // whole
    borders = [first, *sorted(end for end in ends if first < end < stop), stop]
    return [(a, b) for a, b in pairwise(borders) if a < b]


def rows_before(lines: Lines, bucket: int, reach: int) -> Int64:
    """[sources] rows of each source among the first `reach` rows of every lane of a bucket's line."""
    lanes = np.arange(lines.lanes, dtype=np.int64)
    # The last lane is the first to enter an epoch.
    epoch = lines.epoch_of(bucket, lines.lanes - 1, reach)
    counts = np.array(lines.source_rows_before(bucket, epoch), np.int64)
    begin = (lines.rows_before(bucket, epoch) + lanes) // lines.lanes
    while (begin < reach).any():
        end = (lines.rows_before(bucket, epoch + 1) + lanes) // lines.lanes
        if (begin < end).any():
            taken = np.maximum(np.minimum(reach, end) - begin, 0)
            counts += _in_epoch(lines, bucket, epoch, taken, end - begin)
        begin, epoch = end, epoch + 1
    return counts


def _in_epoch(lines: Lines, bucket: int, epoch: int, taken: Int64, piece: Int64) -> Int64:
    """[sources] rows of each source in the first taken[l] of the piece[l] rows that lane l has of an epoch."""
    line = lines.epoch_line(bucket, epoch)
    number = len(lines.sources)
    # before[s, b]: rows of source s in the blocks before block b of the epoch's line.
    sizes = np.diff(line.first, append=piece.sum())
    before = np.zeros((number, len(sizes) + 1), np.int64)
    for source in range(number):
        np.cumsum(np.where(line.source == source, sizes, 0), out=before[source, 1:])

    def upto(position: Int64) -> Int64:
        """[sources, positions] rows of each source before these positions of the line."""
        at = np.searchsorted(line.first, position, side="right") - 1
        rows = before[:, at]
        rows[line.source[at], np.arange(len(at))] += position - line.first[at]
        return rows

    window = lines.lane_window[bucket]
    start = np.cumsum(piece) - piece
    whole = np.where(taken == piece, taken, taken // window * window)
    counts: Int64 = (upto(start + whole) - upto(start)).sum(axis=1)
    # Of a window that is taken in part, only its permutation says which rows come first.
    for lane in np.flatnonzero(whole < taken).tolist():
        first, count = int(start[lane] + whole[lane]), int(taken[lane] - whole[lane])
        length = min(window, int(piece[lane] - whole[lane]))
        sources = np.flatnonzero(np.diff(upto(np.array([first, first + length])), axis=1)[:, 0])
        if len(sources) == 1:
            counts[sources[0]] += count
        else:
            shuffled = lines.window_order(bucket, lane, epoch, int(whole[lane]) // window, length)[:count]
            at = np.searchsorted(line.first, first + shuffled, side="right") - 1
            counts += np.bincount(line.source[at], minlength=number)
    return counts
