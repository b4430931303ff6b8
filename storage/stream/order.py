"""Which rows a global step holds: a pure function of sources, seed, lanes, window, plan and step.

Every bucket has an endless line (:mod:`isthmus.storage.stream.lines`); here the steps are laid over the lines.
Step t takes B / L rows from every lane of one bucket, so the global batch does not depend on how many ranks share
the lanes. In cycle c a bucket has floor((R(c+1) - n + p) / B) - floor((R(c) - n + p) / B) steps, where n are the
rows that earlier segments of the plan took from it and p is a seeded phase in [0, B); they come in a seeded order.

The order is part of the format: a run that resumes relies on it. A test holds some steps of it as golden values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError, WorldSizeError
from isthmus.storage.stream.lines import SCHEDULE, Lines, Rows
from isthmus.storage.stream.plan import Segment
from isthmus.storage.stream.world_size import divisors, fitting_batch, listed, nearest_change


@dataclass(frozen=True, eq=False, slots=True)
class StepRows:
    """The rows of one step on one rank."""

    bucket: int
    rows: Rows
    """In the order of the lanes."""
    positions: NDArray[np.int64]
    """[rows] position of each row in the global batch."""


def check_world_size(
    world_size: int,
    lanes: int,
    global_batch_size: int,
    *,
    what: str = "",
    batches: Mapping[str, int] | None = None,
) -> None:
    """Checks world size | lanes | global batch size.

    Args:
        what: goes before `global_batch_size` in messages, such as `stages.1.`.
        batches: the batch sizes of all stages by their setting's name, which other lanes would have to divide too.

    Raises:
        WorldSizeError: the ranks cannot share the lanes; lists the world sizes that can, and the nearest change
            of lanes and batch sizes that admits this one.
        UsageError: the lanes cannot share the batch.
    """
    name = f"{what}global_batch_size"
    batches = {**(batches or {}), name: global_batch_size}
    if global_batch_size % lanes:
        raise UsageError(
            f"{name} {global_batch_size} is not divisible by data.lanes {lanes}",
            hint=fitting_batch(lanes, name, batches),
        )
    if world_size < 1:
        raise WorldSizeError(f"world size {world_size} is not at least 1")
    if lanes % world_size:
        change = nearest_change(world_size, lanes, batches)
        raise WorldSizeError(
            f"world size {world_size} does not divide data.lanes {lanes}",
            hint=f"world sizes that do: {listed(divisors(lanes), world_size)}; "
            f"or, in a new run, {change} to run on {world_size} ranks",
        )


class _Course:
    """The steps of one segment of the plan, laid over the lines."""

    def __init__(self, lines: Lines, segment: Segment, ordinal: int, taken: Mapping[int, int]) -> None:
        self.lines, self.segment, self.ordinal = lines, segment, ordinal
        self.taken = taken
        """Bucket -> rows that earlier segments took, over all lanes."""
        self.batch = segment.global_batch_size
        self._phases = {bucket: lines.phase(bucket, self.batch) for bucket in lines.buckets}
        self._cycle: tuple[int, int, int] = (0, 0, 0)
        self._schedules: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def steps_before(self, bucket: int, cycle: int) -> int:
        """Steps of a bucket in all cycles of the segment before this one."""
        rows = self.lines.rows_before(bucket, cycle) - self.taken[bucket] + self._phases[bucket]
        return max(0, rows // self.batch)

    def _total(self, cycle: int) -> int:
        return sum(self.steps_before(bucket, cycle) for bucket in self.lines.buckets)

    def _cycle_of(self, at: int) -> tuple[int, int]:
        """The cycle of the segment's batch `at`, and its place in the cycle."""
        cycle, begin, end = self._cycle
        if not begin <= at < end:
            low, high = 0, 1
            while self._total(high) <= at:
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                if self._total(middle) <= at:
                    low = middle
                else:
                    high = middle
            cycle, begin, end = self._cycle = low, self._total(low), self._total(low + 1)
        return cycle, at - begin

    def _schedule(self, cycle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The buckets of a cycle's steps, and how many steps of the same bucket precede each within the cycle."""
        if cycle not in self._schedules:
            counts = [
                self.steps_before(bucket, cycle + 1) - self.steps_before(bucket, cycle)
                for bucket in self.lines.buckets
            ]
            buckets = np.repeat(np.array(self.lines.buckets, np.int64), counts)
            buckets = buckets[self.lines.permutation(len(buckets), SCHEDULE, self.ordinal, cycle)]
            before = np.zeros(len(buckets), np.int64)
            for bucket in self.lines.buckets:
                here = np.flatnonzero(buckets == bucket)
                before[here] = np.arange(len(here))
            self._schedules = {cycle: (buckets, before)}
        return self._schedules[cycle]

    def bucket_step(self, at: int) -> tuple[int, int]:
        """The bucket of the segment's batch `at`, and how many of its batches in the segment come before."""
        cycle, within = self._cycle_of(at)
        buckets, before = self._schedule(cycle)
        bucket = int(buckets[within])
        return bucket, self.steps_before(bucket, cycle) + int(before[within])

    def taken_before(self, at: int) -> dict[int, int]:
        """Bucket -> rows taken over all lanes when the segment's batch `at` begins."""
        cycle, within = self._cycle_of(at)
        earlier = self._schedule(cycle)[0][:within]
        return {
            bucket: self.taken[bucket]
            + self.batch * (self.steps_before(bucket, cycle) + int((earlier == bucket).sum()))
            for bucket in self.lines.buckets
        }


@dataclass(frozen=True, slots=True)
class StepPlace:
    """The rows of a step, without looking them up: [start, start + share) of every lane of the bucket's line."""

    bucket: int
    start: int
    share: int


class Order:
    """The steps of one stage.

    Args:
        lines: the stage's lines.
        segments: the plan's segments of this stage that are in force, ascending.
    """

    def __init__(self, lines: Lines, segments: Sequence[Segment]) -> None:
        self.lines, self.segments = lines, tuple(segments)
        taken = dict.fromkeys(lines.buckets, 0)
        self._courses: list[_Course] = []
        for ordinal, segment in enumerate(self.segments):
            check_world_size(1, lines.lanes, segment.global_batch_size)
            if self._courses:
                before = self._courses[-1]
                taken = before.taken_before(before.segment.line_step(segment.first_step))
            self._courses.append(_Course(lines, segment, ordinal, taken))

    def step(self, step: int, rank: int = 0, world_size: int = 1) -> StepRows:
        """The rows of a global step on one rank, whose lanes are [rank L / W, (rank + 1) L / W).

        The cost does not depend on the step: an index over one epoch's blocks and one cycle's schedule.
        """
        place = self.place(step)
        check_world_size(world_size, self.lines.lanes, place.share * self.lines.lanes)
        lanes = self.lines.lanes // world_size
        parts = [
            self.lines.lane_rows(place.bucket, lane, place.start, place.start + place.share)
            for lane in range(rank * lanes, (rank + 1) * lanes)
        ]
        positions = np.arange(rank * lanes * place.share, (rank + 1) * lanes * place.share, dtype=np.int64)
        return StepRows(place.bucket, Rows.concatenate(parts), positions)

    def rows_taken(self, step: int, *, after: bool = False) -> dict[int, int]:
        """Bucket -> rows taken from its line over all lanes when a global step begins, or `after` it."""
        course = self._course(step)
        taken = course.taken_before(course.segment.line_step(step))
        if after:
            taken[self.place(step).bucket] += course.batch
        return taken

    def place(self, step: int) -> StepPlace:
        """Where the rows of a global step stand in the lanes of which bucket."""
        course = self._course(step)
        bucket, number = course.bucket_step(course.segment.line_step(step))
        share = course.batch // self.lines.lanes
        return StepPlace(bucket, course.taken[bucket] // self.lines.lanes + number * share, share)

    def _course(self, step: int) -> _Course:
        return next(course for course in reversed(self._courses) if course.segment.first_step <= step)
