"""Where the rows of a step lie, one by one: for files whose rows may be read apart (a page cache before a disk).

A lane's shuffle window is looked up as a whole: the blocks that hold it, where in which files each row's values start,
and the rows' strings and numbers, which are read then. A step takes its rows' columns out of these tables.

Not thread-safe: one thread at a time plans.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from isthmus.errors import DataError, IsthmusError
from isthmus.storage.ranges.local import Held, LocalRanges
from isthmus.storage.ranges.many import many_reads
from isthmus.storage.shards.rows import RowReader
from isthmus.storage.shards.small import Small, SmallPlace
from isthmus.storage.stream.lines import LaneWindow, Run
from isthmus.storage.stream.order import StepPlace
from isthmus.storage.stream.stage import BlockKey, StageReader
from isthmus.storage.stream.work import Int64, Step


@dataclass(frozen=True, slots=True)
class File:
    """A file that rows are read from."""

    ranges: LocalRanges
    name: str
    size: int
    """Bytes, as the index has it."""


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """A lane's shuffle window: rows [first, end) of its line, in the order in which steps take them."""

    first: int
    end: int
    rows: Int64
    """As of `Step`."""
    keys: list[str]
    captions: list[str]
    files: frozenset[int]
    errors: dict[int, IsthmusError]
    """Rows of this table whose strings and numbers cannot be read."""


class _Draft(NamedTuple):
    """A window before it is shuffled."""

    rows: Int64
    small: dict[BlockKey, list[SmallPlace]]
    """Where the strings and numbers of its blocks lie."""
    needed: list[tuple[int, int, int]]
    """File, start and length of what its rows will be read from."""


_Kept = Small | IsthmusError


class RowPlanner:
    """Plans steps from `start_step` on.

    Args:
        place: global step -> its stage and where its rows stand.
        lanes: of this rank.
        ranges: source and file name -> what reads the file.
        lock: of the lines, whose caches others use too.
    """

    def __init__(
        self,
        place: Callable[[int], tuple[StageReader, StepPlace]],
        lanes: range,
        ranges: Callable[[int, str], LocalRanges],
        start_step: int,
        lock: AbstractContextManager[object],
    ) -> None:
        self._place, self._lanes, self._ranges, self._lock = place, lanes, ranges, lock
        self.frontier = start_step
        """The next step to plan."""
        self.files: list[File] = []
        """By number."""
        self._numbers: dict[tuple[int, str], int] = {}
        self._stage: StageReader | None = None
        self._tables: dict[int, list[deque[_Table]]] = {}
        """Bucket -> for each lane, the windows that are not used up."""
        self._small: dict[BlockKey, _Kept] = {}
        """Of the blocks that were looked up last: the next windows may begin in them."""
        self._united: tuple[list[frozenset[int]], frozenset[int]] = ([], frozenset())
        self.split_blocks = 0
        """Blocks of which windows took more than one piece, counted at each further piece."""

    def plan(self) -> Step:
        """Plans the next step; reads strings and numbers where it enters a window."""
        with self._lock:
            stage, place = self._place(self.frontier)
        if stage is not self._stage:
            self._stage = stage
            self._tables.clear()
            self._small.clear()
        lanes = self._tables.setdefault(place.bucket, [deque() for _ in self._lanes])
        first, end = place.start, place.start + place.share
        missing = []
        for number, tables in enumerate(lanes):
            while tables and tables[0].end <= first:
                tables.popleft()
            missing.append((number, tables[-1].end if tables else first))
        while missing := [(number, at) for number, at in missing if at < end]:
            found_tables = self._look_up(stage, place.bucket, missing)
            for at, ((number, _), table) in enumerate(zip(missing, found_tables, strict=True)):
                lanes[number].append(table)
                missing[at] = (number, table.end)
        layout = stage.layout(place.bucket, place.share * len(self._lanes))
        keys: list[str] = []
        captions: list[str] = []
        pieces: list[Int64] = []
        files: list[frozenset[int]] = []
        errors: list[IsthmusError] = []
        for tables in lanes:
            for table in tables:
                begin, stop = max(first, table.first) - table.first, min(end, table.end) - table.first
                if begin >= stop:
                    continue
                pieces.append(table.rows[begin:stop])
                keys += table.keys[begin:stop]
                captions += table.captions[begin:stop]
                files.append(table.files)
                if table.errors:
                    errors += [error for row, error in table.errors.items() if begin <= row < stop]
        step = Step(
            step=self.frontier,
            stage=stage,
            bucket=place.bucket,
            start=place.start,
            share=place.share,
            layout=layout,
            left=1,
            rows=np.concatenate(pieces),
            keys=keys,
            captions=captions,
            files=self._files_of(files),
            error=errors[0] if errors else None,
        )
        self.frontier += 1
        return step

    def _files_of(self, tables: list[frozenset[int]]) -> frozenset[int]:
        """The files of some tables; mostly those of the step before."""
        if self._united[0] != tables:
            self._united = tables, frozenset().union(*tables)
        return self._united[1]

    def _look_up(self, stage: StageReader, bucket: int, wanted: list[tuple[int, int]]) -> list[_Table]:
        """The windows that hold these rows of lanes."""
        lines, windows = stage.lines, []
        with self._lock:
            for number, at in wanted:
                window = lines.window_at(bucket, self._lanes[number], at)
                runs = lines.runs(bucket, window.epoch, window.position, len(window.shuffled))
                keys = [stage.key(run.source, run.block, window.epoch, run.appearance) for run in runs]
                windows.append((window, list(zip(runs, keys, strict=True))))
        drafts = [self._draft(stage, bucket, runs) for _, runs in windows]
        needed = [need for draft in drafts for need in draft.needed]
        self._small = self._read_small(stage, [draft.small for draft in drafts], needed)
        return [
            self._table(stage, bucket, window, runs, draft)
            for (window, runs), draft in zip(windows, drafts, strict=True)
        ]

    def _draft(self, stage: StageReader, bucket: int, runs: list[tuple[Run, BlockKey]]) -> _Draft:
        """Where the rows of a window lie, in the order of the line."""
        layout, count = stage.layout(bucket, 1), sum(run.count for run, _ in runs)
        columns = {name: line for line, (name, _) in enumerate(layout.columns)}
        found = np.zeros((count, 2 * len(columns) + 4 + len(layout.numbers)), np.int64)
        needed: list[tuple[int, int, int]] = []
        small: dict[BlockKey, list[SmallPlace]] = {}
        begin = 0
        for run, key in runs:
            self.split_blocks += run.row > 0
            here, rows = found[begin : begin + run.count], np.arange(run.row, run.row + run.count)
            fixed, small[key] = _reader(stage, key).places(key.block, key.caption)
            for column in fixed:
                file = self._file(key.source, column.file, column.file_bytes)
                line = columns[column.name]
                here[:, line] = column.start + column.width * rows
                here[:, len(columns) + line] = file
                needed.append((file, column.start + column.width * run.row, column.width * run.count))
            here[:, 2 * len(columns) : 2 * len(columns) + 3] = key.source, key.block, key.caption
            here[:, 2 * len(columns) + 3] = rows
            begin += run.count
        return _Draft(found, small, needed)

    def _table(
        self,
        stage: StageReader,
        bucket: int,
        window: LaneWindow,
        runs: list[tuple[Run, BlockKey]],
        draft: _Draft,
    ) -> _Table:
        """A window's table: the draft's rows as they are shuffled."""
        columns = stage.layout(bucket, 1).numbers
        numbers = draft.rows[:, -len(columns) :]
        names: list[str] = []
        captions: list[str] = []
        failed: dict[int, IsthmusError] = {}
        """By place in the line."""
        for run, key in runs:
            small, taken = self._small[key], slice(run.row, run.row + run.count)
            if isinstance(small, IsthmusError):
                failed |= dict.fromkeys(range(len(names), len(names) + run.count), small)
                names += [""] * run.count
                captions += [""] * run.count
                continue
            for line, name in enumerate(columns):
                numbers[len(names) : len(names) + run.count, line] = small.numbers[name][taken]
            names += small.keys[taken]
            captions += small.captions[taken]
        order = window.shuffled.tolist()
        return _Table(
            first=window.first,
            end=window.first + len(order),
            rows=draft.rows[window.shuffled],
            keys=[names[row] for row in order],
            captions=[captions[row] for row in order],
            files=frozenset(file for file, _, _ in draft.needed),
            errors={at: failed[row] for at, row in enumerate(order) if row in failed} if failed else {},
        )

    def _read_small(
        self,
        stage: StageReader,
        small: list[dict[BlockKey, list[SmallPlace]]],
        needed: list[tuple[int, int, int]],
    ) -> dict[BlockKey, _Kept]:
        """Strings and numbers of blocks; and the system is told of `needed`."""
        blocks: dict[BlockKey, _Kept] = {}
        places: dict[BlockKey, list[SmallPlace]] = {}
        for of_window in small:
            for key, of in of_window.items():
                kept = self._small.get(key)
                if isinstance(kept, Small):
                    blocks[key] = kept
                else:
                    places[key] = of
        stretches = [
            (self._file(key.source, place.file, place.size), place.stretch.start, place.stretch.length)
            for key, of in places.items()
            for place in of
        ]
        memory = self._read(stretches, needed)
        at = 0
        for key, of in places.items():
            reader, data = _reader(stage, key), memory[at : at + len(of)]
            at += len(of)
            whole = [piece for piece in data if piece is not None]
            try:
                # What was not read in one go is tried again, or named.
                again = len(whole) < len(of)
                blocks[key] = (
                    reader.small(key.block, key.caption) if again else reader.small_of(key.block, of, whole)
                )
            except IsthmusError as error:
                blocks[key] = error  # of the steps that need its rows
        return blocks

    def _read(
        self, stretches: list[tuple[int, int, int]], needed: list[tuple[int, int, int]]
    ) -> list[memoryview | None]:
        """The bytes of stretches (file, start, length), None where it failed; has the system read what is not in its page
        cache, `needed` included."""
        if not stretches and not needed:
            return []
        every = np.array([*stretches, *needed], np.int64)
        held: list[tuple[LocalRanges, list[Held]]] = []
        starts, lengths, count = every[:, 1], every[:, 2], len(stretches)
        memory = np.empty(int(lengths[:count].sum()) + 1, np.uint8)
        base = memory.__array_interface__["data"][0]
        try:
            descriptors = hold(self.files, frozenset(every[:, 0].tolist()), held)[every[:, 0]]
            ends = np.concatenate([starts, starts + lengths - 1])
            twice, junk = np.concatenate([descriptors, descriptors]), np.full(len(ends), base)
            with many_reads() as many:
                there = many.read(twice, junk, np.ones_like(ends), ends, wait=False) == 1
                for at in np.flatnonzero(~there.reshape(2, -1).all(axis=0)).tolist():
                    os.posix_fadvise(
                        int(descriptors[at]), int(starts[at]), int(lengths[at]), os.POSIX_FADV_WILLNEED
                    )
                offsets = np.cumsum(lengths[:count]) - lengths[:count]
                got = many.read(descriptors[:count], base + offsets, lengths[:count], starts[:count])
        except (OSError, DataError):
            return [None] * count
        finally:
            release(held)
        view = memory.data
        return [
            view[at : at + length] if done == length else None
            for at, length, done in zip(offsets.tolist(), lengths[:count].tolist(), got.tolist(), strict=True)
        ]

    def _file(self, source: int, name: str, size: int) -> int:
        """A file's number."""
        number = self._numbers.get((source, name))
        if number is None:
            number = self._numbers[source, name] = len(self.files)
            self.files.append(File(self._ranges(source, name), name, size))
        return number


def hold(files: Sequence[File], numbers: frozenset[int], held: list[tuple[LocalRanges, list[Held]]]) -> Int64:
    """Opens files until :func:`release`: file number -> descriptor. `held` is what is open, also when this raises.

    Raises:
        OSError, DataError: as `LocalRanges.hold`.
    """
    by_ranges: dict[int, list[int]] = {}
    for number in numbers:
        by_ranges.setdefault(id(files[number].ranges), []).append(number)
    descriptors = np.empty(len(files), np.int64)
    for of in by_ranges.values():
        ranges = files[of[0]].ranges
        held.append((ranges, ranges.hold([(files[number].name, files[number].size) for number in of])))
        descriptors[of] = [file.descriptor for file in held[-1][1]]
    return descriptors


def release(held: list[tuple[LocalRanges, list[Held]]]) -> None:
    """Gives files back."""
    for ranges, files in held:
        ranges.release(files)


def _reader(stage: StageReader, key: BlockKey) -> RowReader:
    reader = stage.readers[key.source]
    assert isinstance(reader, RowReader)  # no others' rows can be told apart
    return reader
