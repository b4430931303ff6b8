"""The order against a slow simulation of its rules, and the properties that training relies on."""

from __future__ import annotations

from collections import Counter, deque
from fractions import Fraction
from itertools import chain, pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.storage.stream.lines import Lines, SourceBlocks
from isthmus.storage.stream.order import Order
from isthmus.storage.stream.plan import Plan, Segment
from isthmus.storage.stream.randomness import below, permutation

Row = tuple[int, int, int, int, int]
"""Source, block, row, epoch, appearance."""
Sources = list[tuple[list[tuple[int, int]], Fraction]]
"""For each source the (bucket, rows) of its blocks, and its repeat."""


class Simulation:
    """Deals rows to the lanes epoch by epoch and takes them off step by step; keeps no position, searches nothing."""

    def __init__(self, sources: Sources, *, seed: int, stage: int, lanes: int, window: int) -> None:
        self.sources, self.key, self.lanes = sources, (seed, stage), lanes
        self.buckets = sorted({bucket for blocks, _ in sources for bucket, _ in blocks})
        self.epochs_dealt = dict.fromkeys(self.buckets, 0)
        self.lane_rows: dict[int, list[deque[Row]]] = {
            b: [deque() for _ in range(lanes)] for b in self.buckets
        }
        period = lcm(*(repeat.denominator for _, repeat in sources))
        share = {bucket: self.rows_before(bucket, period) for bucket in self.buckets}
        self.window = {b: max(1, window * share[b] // sum(share.values()) // lanes) for b in self.buckets}

    def rows_before(self, bucket: int, epoch: int) -> int:
        return sum(
            rows * int(epoch * repeat) for blocks, repeat in self.sources for b, rows in blocks if b == bucket
        )

    def deal(self, bucket: int) -> None:
        epoch, before = self.epochs_dealt[bucket], self.rows_before(bucket, self.epochs_dealt[bucket])
        blocks = [
            (source, number, rows, appearance)
            for source, (listed, repeat) in enumerate(self.sources)
            for appearance in range(int((epoch + 1) * repeat) - int(epoch * repeat))
            for number, (b, rows) in enumerate(listed)
            if b == bucket
        ]
        line: list[Row] = []
        for at in permutation(len(blocks), *self.key, 1, bucket, epoch):
            source, number, rows, appearance = blocks[at]
            line += [(source, number, row, epoch, appearance) for row in range(rows)]
        start = 0
        for lane in range(self.lanes):
            count = (before + len(line) + lane) // self.lanes - (before + lane) // self.lanes
            piece = line[start : start + count]
            start += count
            for number, first in enumerate(range(0, count, self.window[bucket])):
                rows_together = piece[first : first + self.window[bucket]]
                shuffled = permutation(len(rows_together), *self.key, 2, bucket, epoch, lane, number)
                self.lane_rows[bucket][lane] += [rows_together[at] for at in shuffled]
        assert start == len(line)  # Hermite's identity: the lanes share the epoch out exactly
        self.epochs_dealt[bucket] += 1

    def take(self, bucket: int, batch: int) -> list[Row]:
        rows: list[Row] = []
        for lane in range(self.lanes):
            while len(self.lane_rows[bucket][lane]) < batch // self.lanes:
                self.deal(bucket)
            rows += [self.lane_rows[bucket][lane].popleft() for _ in range(batch // self.lanes)]
        return rows

    def batches(self, segments: list[tuple[int, int]]) -> list[tuple[int, list[Row]]]:
        """Bucket and rows of every batch of segments of (global batch size, batches)."""
        out: list[tuple[int, list[Row]]] = []
        taken = dict.fromkeys(self.buckets, 0)
        for ordinal, (batch, count) in enumerate(segments):
            taken_at_start = dict(taken)
            phase = {bucket: below(batch, *self.key, 3, bucket) for bucket in self.buckets}
            cycle, done = 0, 0
            while done < count:

                def steps(bucket: int, cycle: int) -> int:
                    rows = self.rows_before(bucket, cycle) - taken_at_start[bucket] + phase[bucket]  # noqa: B023
                    return max(0, rows // batch)  # noqa: B023

                listed = [b for b in self.buckets for _ in range(steps(b, cycle + 1) - steps(b, cycle))]
                for at in permutation(len(listed), *self.key, 4, ordinal, cycle)[: count - done]:
                    out.append((listed[at], self.take(listed[at], batch)))
                    taken[listed[at]] += batch
                    done += 1
                cycle += 1
        return out


blocks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 17)), min_size=1, max_size=9)
repeats = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 2), Fraction(1, 3)])
source_lists = st.lists(st.tuples(blocks, repeats), min_size=1, max_size=3)
settings_of_order = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "stage": st.integers(0, 3),
        "lanes": st.sampled_from([1, 2, 3, 4, 6]),
        "window": st.integers(1, 64),
    }
)
MANY = settings(max_examples=60, deadline=None)


def make_lines(sources: Sources, *, seed: int = 0, stage: int = 0, lanes: int = 4, window: int = 32) -> Lines:
    listed = [
        SourceBlocks(np.array([b for b, _ in blocks]), np.array([n for _, n in blocks]), repeat)
        for blocks, repeat in sources
    ]
    return Lines(listed, seed=seed, stage=stage, lanes=lanes, window=window)


def make_order(sources: Sources, batch: int, **options: int) -> Order:
    return Order(make_lines(sources, **options), [Segment(options.get("stage", 0), 0, 0, batch)])


def rows_of(order: Order, step: int, rank: int = 0, world_size: int = 1) -> list[Row]:
    rows = order.step(step, rank, world_size).rows
    columns = (rows.source, rows.block, rows.row, rows.epoch, rows.appearance)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@MANY
@given(source_lists, settings_of_order, st.integers(1, 4), st.integers(0, 10_000))
def test_equals_the_simulation(sources, options, per_lane, far):
    batch = per_lane * options["lanes"]
    order = make_order(sources, batch, **options)
    for step, (bucket, rows) in enumerate(Simulation(sources, **options).batches([(batch, 30)])):
        assert order.step(step).bucket == bucket
        assert rows_of(order, step) == rows
    # A position that was reached by walking is the same as one that is asked for out of the blue.
    assert rows_of(order, far) == rows_of(make_order(sources, batch, **options), far)


@MANY
@given(
    source_lists,
    settings_of_order,
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=2, max_size=4),
)
def test_a_changed_batch_size_goes_on_where_the_lines_were(sources, options, changes):
    segments = [(per_lane * options["lanes"], count) for per_lane, count in changes]
    plan = Plan((Segment(options["stage"], 0, 0, segments[0][0]),))
    for (_, count), (batch, _) in pairwise(segments):
        first = plan.timeline[-1].first_step + count
        plan = plan.append(plan.next_segment(first, stage=options["stage"], global_batch_size=batch))
    order = Order(make_lines(sources, **options), plan.timeline)
    expected = Simulation(sources, **options).batches(segments)
    assert [(order.step(t).bucket, rows_of(order, t)) for t in range(len(expected))] == expected
    seen = Counter(row for _, rows in expected for row in rows)
    assert max(seen.values()) == 1


@MANY
@given(source_lists, settings_of_order, st.integers(1, 20), st.integers(0, 9), st.integers(1, 9))
def test_skipped_ranges_jump_over_samples_and_change_nothing_else(sources, options, rewind, before, length):
    batch = 2 * options["lanes"]
    stage = options["stage"]
    skipped = ((rewind + before) * batch, (rewind + before + length) * batch)
    plan = Plan((Segment(stage, 0, 0, batch),))
    plan = plan.append(plan.next_segment(rewind, stage=stage, global_batch_size=batch, skipped=[skipped]))
    order = Order(make_lines(sources, **options), plan.timeline)
    simulated = Simulation(sources, **options).batches([(batch, rewind), (batch, before + length + 10)])
    kept = simulated[: rewind + before] + simulated[rewind + before + length :]
    assert [(order.step(t).bucket, rows_of(order, t)) for t in range(len(kept))] == kept


@MANY
@given(source_lists, settings_of_order, st.integers(1, 3))
def test_every_row_comes_once_an_appearance(sources, options, per_lane):
    batch, steps = per_lane * options["lanes"], 60
    order = make_order(sources, batch, **options)
    seen: Counter[Row] = Counter()
    lane_reach = dict.fromkeys(order.lines.buckets, 0)
    for step in range(steps):
        bucket = order.step(step).bucket
        rows = rows_of(order, step)
        assert len(rows) == batch
        assert {sources[source][0][block][0] for source, block, *_ in rows} == {bucket}
        seen.update(rows)
        lane_reach[bucket] += per_lane
    assert max(seen.values()) == 1
    for bucket, reach in lane_reach.items():
        epoch = 0
        while all(
            order.lines.lane_before(bucket, epoch + 1, lane) <= reach for lane in range(options["lanes"])
        ):
            rows = order.lines.rows_before(bucket, epoch + 1) - order.lines.rows_before(bucket, epoch)
            got = sum(
                1 for source, block, _, e, _ in seen if e == epoch and sources[source][0][block][0] == bucket
            )
            assert got == rows
            epoch += 1


@MANY
@given(source_lists, settings_of_order, st.integers(1, 3), st.integers(0, 10_000))
def test_the_global_batch_is_the_same_for_every_world_size(sources, options, per_lane, step):
    lanes = options["lanes"]
    whole = rows_of(make_order(sources, per_lane * lanes, **options), step)
    for world_size in range(1, lanes + 1):
        if lanes % world_size == 0:
            ranks = [
                make_order(sources, per_lane * lanes, **options).step(step, rank, world_size)
                for rank in range(world_size)
            ]
            assert np.concatenate([rank.positions for rank in ranks]).tolist() == list(range(len(whole)))
            order = make_order(sources, per_lane * lanes, **options)
            shares = [rows_of(order, step, rank, world_size) for rank in range(world_size)]
            assert list(chain.from_iterable(shares)) == whole


@MANY
@given(source_lists, settings_of_order)
def test_buckets_come_as_often_as_their_rows_and_small_ones_are_trained(sources, options):
    batch, steps = 2 * options["lanes"], 400
    order = make_order(sources, batch, **options)
    period = lcm(*(repeat.denominator for _, repeat in sources))
    rows = {bucket: order.lines.rows_before(bucket, period) for bucket in order.lines.buckets}
    buckets = Counter(order.step(step).bucket for step in range(steps))
    cycle = sum(rows.values()) / period / batch
    for bucket, count in rows.items():
        expected = steps * count / sum(rows.values())
        # Rounding to whole steps, the phase, and a cycle and a period that the last step cuts.
        slack = 2 + (1 + period) * (1 + cycle)
        assert abs(buckets[bucket] - expected) <= slack


def test_fractional_repeats_are_exact_over_time():
    sources: Sources = [([(0, 8)], Fraction(3, 2)), ([(0, 8)], Fraction(1, 3)), ([(0, 4)], Fraction(1))]
    order = make_order(sources, 4, lanes=2, window=16)
    seen = Counter((source, epoch) for t in range(200) for source, _, _, epoch, _ in rows_of(order, t))
    done = min(epoch for _, epoch in seen) + 12
    times = {source: sum(seen[source, epoch] for epoch in range(done)) for source in range(3)}
    assert times == {0: 8 * 18, 1: 8 * 4, 2: 4 * 12}


def test_epochs_seeds_and_stages_differ():
    sources: Sources = [([(0, 16)] * 16, Fraction(1))]

    def epoch(number: int, **options: int) -> list[tuple[int, int]]:
        order = make_order(sources, 8, **options)
        return [row[1:3] for t in range(number * 32, number * 32 + 32) for row in rows_of(order, t)]

    orders = [epoch(0), epoch(1), epoch(0, seed=1), epoch(0, stage=1), epoch(0, window=64)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(a != b for at, a in enumerate(orders) for b in orders[:at])


def test_rows_are_shuffled_within_the_window():
    order = make_order([([(0, 16)] * 16, Fraction(1))], 8, lanes=2, window=128)
    rows = [row[1:3] for t in range(32) for row in rows_of(order, t)]
    neighbours = sum(a == c and b + 1 == d for (a, b), (c, d) in pairwise(rows))
    assert neighbours < len(rows) // 8


class CountingLines(Lines):
    """Counts what a position costs: permutations made, and numbers permuted."""

    def __init__(self, *args: object, **options: object) -> None:
        self.calls: list[int] = []
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def permutation(self, count: int, *key: int) -> np.ndarray:
        self.calls.append(count)
        return super().permutation(count, *key)


@pytest.mark.parametrize("epoch", [0, 1000])
def test_a_position_costs_the_same_anywhere_in_an_epoch(epoch):
    rows, batch = 64 * 2000, 64
    costs = []
    for share in (0.01, 0.5, 0.99):
        source = SourceBlocks(np.zeros(2000, np.int64), np.full(2000, 64, np.int64))
        lines = CountingLines([source], seed=0, stage=0, lanes=16, window=1024)
        Order(lines, [Segment(0, 0, 0, batch)]).step(epoch * rows // batch + int(share * rows / batch))
        costs.append(sorted(lines.calls))
    # The blocks of one epoch, one cycle's schedule, and one window for each lane: nothing that lies before.
    assert costs[0] == costs[1] == costs[2]
    assert costs[0] == [64] * 16 + [2000, 2000]


def test_golden_steps():
    """The order is part of the format: a run that resumes with another version must see the same samples."""
    sources: Sources = [([(0, 8), (1, 6), (0, 5), (1, 8)], Fraction(1)), ([(0, 7), (1, 3)], Fraction(3, 2))]
    plan = Plan((Segment(1, 0, 0, 4),))
    plan = plan.append(plan.next_segment(9, stage=1, global_batch_size=8, skipped=[(44, 60)]))
    order = Order(make_lines(sources, seed=7, stage=1, lanes=2, window=12), plan.timeline)
    assert {step: (order.step(step).bucket, rows_of(order, step)) for step in (0, 8, 9, 500)} == GOLDEN


GOLDEN: dict[int, tuple[int, list[Row]]] = {
    0: (0, [(0, 2, 0, 0, 0), (0, 2, 2, 0, 0), (1, 0, 5, 0, 0), (0, 0, 0, 0, 0)]),
    8: (0, [(1, 0, 3, 0, 0), (1, 0, 2, 0, 0), (0, 0, 5, 0, 0), (0, 0, 6, 0, 0)]),
    9: (
        0,
        [
            (1, 0, 1, 0, 0),
            (1, 0, 4, 0, 0),
            (0, 2, 1, 1, 0),
            (0, 2, 0, 1, 0),
            (0, 0, 4, 0, 0),
            (0, 0, 7, 0, 0),
            (1, 0, 0, 1, 1),
            (1, 0, 1, 1, 1),
        ],
    ),
    500: (
        1,
        [
            (0, 3, 5, 94, 0),
            (0, 3, 6, 94, 0),
            (0, 3, 7, 94, 0),
            (1, 1, 0, 94, 0),
            (0, 1, 3, 94, 0),
            (0, 1, 2, 94, 0),
            (0, 1, 4, 94, 0),
            (0, 1, 5, 94, 0),
        ],
    ),
}
