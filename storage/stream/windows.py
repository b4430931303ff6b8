"""Opens the shuffle windows of a rank's lanes: which blocks are read for them, and to which batch each row goes.

A block is read when the first window that has rows of it is opened. Where memory can be filled in pieces at no cost
(`cut`), only the window's rows are read, straight into the batches; of a store a block goes straight there when all its
rows are the window's. Elsewhere the whole block is read, its rows are copied into the batches of the steps that are
planned, and the block is kept for those that are not.

Not thread-safe: one thread at a time plans and opens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.storage.stream.lines import LaneWindow, Run
from isthmus.storage.stream.order import StepPlace
from isthmus.storage.stream.stage import BlockKey, StageReader
from isthmus.storage.stream.work import Job, Kept, Read, Target

Int64 = NDArray[np.int64]

Cut = Literal["rows", "blocks", "whole"]
MIN_CUT = 4
"""A read is cut to a window's rows when these are at least one row in so many of the block's: every read also
fetches and decodes the block's strings."""


@dataclass(slots=True)
class Opening:
    """What is to be done for windows that were opened or steps that were planned."""

    work: list[Read | Kept] = field(default_factory=list)
    """To be read, in the order of need."""
    copies: list[tuple[Kept, int, Target]] = field(default_factory=list)
    """Rows of blocks that were read or queued before, and where they go."""
    dropped: list[Kept] = field(default_factory=list)
    """One entry for each row of such a block that no step will take."""

    def jobs(self) -> set[Job]:
        """The steps that get rows."""
        found = {copy[2][0] for copy in self.copies}
        for item in self.work:
            found |= item.jobs()
        return found


@dataclass(slots=True)
class _Tail:
    """Rows of a kept block beyond the windows that were opened, in the order of the line."""

    kept: Kept
    row: int
    count: int


@dataclass(slots=True)
class _Lane:
    opened: int
    """The lane's rows below this one are in windows that were opened."""
    tails: deque[_Tail] = field(default_factory=deque)
    waiting: dict[int, tuple[Kept, int]] = field(default_factory=dict)
    """Row of the lane's line -> the block row that it is, for steps that are not planned yet."""


@dataclass(slots=True)
class _BucketLine:
    """One bucket of one stage, on this rank."""

    lanes: list[_Lane]
    jobs: list[Job] = field(default_factory=list)
    """Planned and not delivered, ascending."""
    end: int = 0
    """Rows of a lane below this one have been given to steps, or skipped."""


class Planner:
    """Plans steps from `start_step` on.

    Args:
        place: global step -> its stage and where its rows stand.
        lanes: of this rank.
        cut: what of a source's blocks at a stage may be read straight into batches: any `rows`, or only whole `blocks`
            (of a store, where a request costs more than the rows of a neighbour), or only `whole` ones of which no row is
            left out (whose checksums are compared where they lie); None: nothing.
        lock: of the lines, whose caches others use too.
    """

    def __init__(
        self,
        place: Callable[[int], tuple[StageReader, StepPlace]],
        lanes: range,
        cut: Callable[[StageReader, int], Cut | None],
        start_step: int,
        lock: AbstractContextManager[object],
    ) -> None:
        self._place, self._lanes, self._cut, self._lock = place, lanes, cut, lock
        self.frontier = start_step
        """The next step to plan."""
        self._stage: StageReader | None = None
        self._lines: dict[int, _BucketLine] = {}
        """Of the newest stage that was planned."""
        self._old: dict[tuple[int, int], _BucketLine] = {}
        """Of stages before, until their last step is open: stage and bucket."""
        self.split_blocks = 0
        """Blocks read in more than one piece, counted at each further piece."""
        self.read_bytes_wasted = 0
        """Bytes read of rows that no step of this rank takes from this read, about."""

    def plan(self, delivered: int) -> tuple[Job, Opening]:
        """Plans the next step. Steps below `delivered` are forgotten.

        Returns the step, and what becomes of rows that were kept for steps that were not planned yet.
        """
        with self._lock:
            stage, place = self._place(self.frontier)
        done = Opening()
        if stage is not self._stage:
            self._leave(done)
            self._stage = stage
        line = self._lines.get(place.bucket)
        if line is None:
            line = self._lines[place.bucket] = _BucketLine([_Lane(-1) for _ in self._lanes])
        job = Job(
            step=self.frontier,
            stage=stage,
            bucket=place.bucket,
            start=place.start,
            share=place.share,
            layout=stage.layout(place.bucket, place.share * len(self._lanes)),
            left=place.share * len(self._lanes),
        )
        while line.jobs and line.jobs[0].step < delivered:
            line.jobs.pop(0)
        line.jobs.append(job)
        for number, lane in enumerate(line.lanes):
            if not lane.waiting:
                continue
            for row in [row for row in lane.waiting if row < place.start]:  # a range that the plan skips
                done.dropped.append(lane.waiting.pop(row)[0])
            for at in range(place.share):
                kept = lane.waiting.pop(place.start + at, None)
                if kept is not None:
                    done.copies.append((*kept, (job, number * place.share + at)))
        line.end = place.start + place.share
        self.frontier += 1
        return job, done

    def _leave(self, done: Opening) -> None:
        """The newest stage has no further step: what is kept for one is given up."""
        for bucket, line in self._lines.items():
            assert self._stage is not None
            self._old[self._stage.number, bucket] = line
            for lane in line.lanes:
                done.dropped += [kept for kept, _ in lane.waiting.values()]
                lane.waiting.clear()
            if self.is_open(line.jobs[-1]):
                _give_up_tails(line, done)
        self._lines = {}

    def _line(self, job: Job) -> tuple[_BucketLine, bool]:
        """The job's line, and whether the line has further steps."""
        if job.stage is self._stage:
            return self._lines[job.bucket], True
        return self._old[job.stage.number, job.bucket], False

    def is_open(self, job: Job) -> bool:
        """Whether all windows that the step takes rows from are open."""
        end = job.start + job.share
        return all(lane.opened >= end for lane in self._line(job)[0].lanes)

    def window_end(self, job: Job) -> int:
        """The row of a lane's line at which the last of the step's windows ends; lanes differ by a row at most."""
        with self._lock:
            return self._window(job, 0, job.start + job.share - 1)[1]

    def planned_to(self, job: Job) -> int:
        """The row of a lane's line up to which steps of the job's bucket are planned; without end if there are no more."""
        line, more = self._line(job)
        return line.end if more else 1 << 62

    def cost(self, job: Job) -> int:
        """Bytes that opening the job's windows takes: the steps' batches, and a block of each lane that may be kept."""
        end, line = self.window_end(job), self._line(job)[0]
        needing = [other for other in line.jobs if other.buffer is None and other.start < end]
        cost = sum(other.layout.bytes for other in needing)
        if not all(self._cut(job.stage, source) == "rows" for source in job.stage.sources_of(job.bucket)):
            cost += len(self._lanes) * job.stage.block_bytes(job.bucket)
        return cost

    def _window(self, job: Job, number: int, at: int) -> tuple[LaneWindow, int]:
        window = job.stage.lines.window_at(job.bucket, self._lanes[number], at)
        return window, window.first + len(window.shuffled)

    def open(self, job: Job) -> Opening:
        """Opens the windows that a step takes rows from."""
        with self._lock:
            return self._open(job)

    def _open(self, job: Job) -> Opening:
        opening = Opening()
        line, more = self._line(job)
        starts = np.array([other.start for other in line.jobs], np.int64)
        for number, lane in enumerate(line.lanes):
            first = self._window(job, number, job.start)[0].first
            if lane.opened < first:
                # The lane begins here, or jumps over rows that the plan skips: all steps before this one are open.
                for tail in lane.tails:
                    opening.dropped += [tail.kept] * tail.count
                lane.tails.clear()
                lane.opened = first
            while lane.opened < job.start + job.share:
                window, end = self._window(job, number, lane.opened)
                targets = self._targets(line, starts, number, window, more)
                self._fill(job, line, number, window, targets, opening)
                lane.opened = end
        if not more and job is line.jobs[-1]:
            _give_up_tails(line, opening)
        return opening

    def _targets(
        self, line: _BucketLine, starts: Int64, number: int, window: LaneWindow, more: bool
    ) -> list[Target | int | None]:
        """For each of the window's rows, as they lie in the line: its step and slot; the row of the lane's line
        that it will be, for a step that is not planned yet; None when no step takes it."""
        places = np.empty(len(window.shuffled), np.int64)
        places[window.shuffled] = np.arange(len(places))
        places += window.first
        which = np.searchsorted(starts, places, side="right") - 1
        targets: list[Target | int | None] = []
        jobs, end = line.jobs, line.end
        for row, at in zip(places.tolist(), which.tolist(), strict=True):
            if row >= end:
                targets.append(row if more else None)
                continue
            job = jobs[at] if at >= 0 else None
            if job is None or row >= job.start + job.share:
                targets.append(None)  # it came before the first step, or is skipped
            else:
                targets.append((job, number * job.share + row - job.start))
        return targets

    def _fill(
        self,
        job: Job,
        line: _BucketLine,
        number: int,
        window: LaneWindow,
        targets: list[Target | int | None],
        opening: Opening,
    ) -> None:
        """Finds the window's rows: in blocks that are kept, and in blocks to be read."""
        lane, at = line.lanes[number], 0
        while lane.tails and at < len(targets):
            tail = lane.tails[0]
            count = min(tail.count, len(targets) - at)
            for row, target in enumerate(targets[at : at + count], tail.row):
                self._give(tail.kept, row, target, lane, opening)
            tail.row, tail.count, at = tail.row + count, tail.count - count, at + count
            if not tail.count:
                lane.tails.popleft()
        if at == len(targets):
            return
        runs = job.stage.lines.runs(job.bucket, window.epoch, window.position + at, len(targets) - at)
        for run in runs:
            mine = targets[at : at + run.count]
            key = job.stage.key(run.source, run.block, window.epoch, run.appearance)
            rows = job.stage.block_rows(run.source, run.block)
            beyond = min(rows - run.row, window.rest - at) - run.count
            # A border of lanes or of windows lies within the block: other reads get its other rows.
            if self._may_cut(job.stage, run, rows, beyond, mine):
                self.split_blocks += run.row > 0
                if any(target is not None for target in mine):
                    into = [target if isinstance(target, tuple) else None for target in mine]
                    size = job.stage.size(key) * run.count // rows
                    self.read_bytes_wasted += size * into.count(None) // run.count
                    opening.work.append(Read(job.stage, key, run.row, into, size))
            else:
                self._keep(job.stage, key, run, beyond, mine, lane, opening)
            at += run.count

    def _may_cut(
        self, stage: StageReader, run: Run, rows: int, beyond: int, targets: list[Target | int | None]
    ) -> bool:
        how = self._cut(stage, run.source)
        if how is None or any(isinstance(target, int) for target in targets):
            return False
        if how != "rows":
            return run.count == rows and (how == "blocks" or None not in targets)
        return not beyond or run.count * MIN_CUT >= rows

    def _keep(
        self,
        stage: StageReader,
        key: BlockKey,
        run: Run,
        beyond: int,
        targets: list[Target | int | None],
        lane: _Lane,
        opening: Opening,
    ) -> None:
        wanted = sum(target is not None for target in targets) + beyond
        if not wanted:
            return
        self.split_blocks += run.row > 0
        size, rows = stage.size(key), stage.block_rows(run.source, run.block)
        kept = Kept(stage, key, size, wanted)
        self.read_bytes_wasted += size * (rows - wanted) // rows
        for row, target in enumerate(targets, run.row):
            if isinstance(target, int):
                lane.waiting[target] = (kept, row)
            elif target is not None:
                kept.copies.append((row, target))
        if beyond:
            lane.tails.append(_Tail(kept, run.row + run.count, beyond))
        opening.work.append(kept)

    @staticmethod
    def _give(kept: Kept, row: int, target: Target | int | None, lane: _Lane, opening: Opening) -> None:
        if target is None:
            opening.dropped.append(kept)
        elif isinstance(target, int):
            lane.waiting[target] = (kept, row)
        else:
            opening.copies.append((kept, row, target))


def _give_up_tails(line: _BucketLine, done: Opening) -> None:
    for lane in line.lanes:
        for tail in lane.tails:
            done.dropped += [tail.kept] * tail.count
        lane.tails.clear()
