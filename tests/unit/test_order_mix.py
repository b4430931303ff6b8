"""The realised mix of sources, against rows that were dealt out and rows that were delivered."""

from __future__ import annotations

import time
from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UsageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream import Loader, Plan, Segment
from isthmus.storage.stream.lines import Lines, SourceBlocks
from isthmus.storage.stream.mix import long_run_shares, mix_of
from isthmus.storage.stream.order import Order

blocks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 17)), min_size=1, max_size=9)
repeats = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 2), Fraction(1, 3)])
source_lists = st.lists(st.tuples(blocks, repeats), min_size=1, max_size=4)


def make_lines(sources, **options) -> Lines:
    listed = [
        SourceBlocks(np.array([b for b, _ in blocks]), np.array([n for _, n in blocks]), repeat)
        for blocks, repeat in sources
    ]
    return Lines(listed, **({"seed": 0, "stage": 0} | options))


@settings(max_examples=80, deadline=None)
@given(
    source_lists,
    st.sampled_from([1, 2, 3, 6]),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_equals_the_rows_of_the_steps(sources, lanes, window, changes, one, other):
    """With changed batch sizes, skipped ranges and a second stage on the way."""
    plan, first = Plan((Segment(0, 0, 0, changes[0][0] * lanes),)), 0
    for share, steps, skips in changes:
        batch = share * lanes
        start = plan.next_segment(first, stage=0, global_batch_size=batch).first_sample
        skipped = [(start + 2 * batch, start + 5 * batch), (start + 6 * batch, start + 7 * batch)]
        plan = plan.append(
            plan.next_segment(first, stage=0, global_batch_size=batch, skipped=skipped if skips else [])
        )
        first += steps
    plan = plan.append(plan.next_segment(first, stage=1, global_batch_size=2 * lanes))
    lines = [make_lines(sources, stage=stage, lanes=lanes, window=window) for stage in (0, 1)]

    def order_of(segment: Segment) -> Order:
        return Order(lines[segment.stage], plan.stage_segments(segment))

    begin, end = sorted((one, other))
    expected: Counter[int] = Counter()
    for step in range(begin, end):
        expected.update(order_of(plan.segment_at(step)).step(step).rows.source.tolist())
    mix = mix_of(plan, order_of, begin, end)
    assert mix.rows == tuple(expected[source] for source in range(len(sources)))
    assert sum(mix.shares) == pytest.approx(1.0 if begin < end else 0.0)


@settings(max_examples=60, deadline=None)
@given(source_lists, st.sampled_from([1, 4]), st.integers(1, 3))
def test_the_long_run_shares_are_those_of_many_steps(sources, lanes, share):
    lines = make_lines(sources, lanes=lanes, window=32)
    shares = long_run_shares(lines)
    weights = [sum(rows for _, rows in listed) * repeat for listed, repeat in sources]
    assert shares == tuple(weight / sum(weights) for weight in weights)
    order, steps = Order(lines, [Segment(0, 0, 0, share * lanes)]), 3000
    mix = mix_of(Plan((Segment(0, 0, 0, share * lanes),)), lambda segment: order, 0, steps)
    assert sum(mix.rows) == steps * share * lanes
    # What a period and the buckets' phases may add or lack: a few epochs' rows, whatever the number of steps.
    slack = 20 * sum(rows for listed, _ in sources for _, rows in listed) + 20 * share * lanes
    for rows, expected in zip(mix.rows, shares, strict=True):
        assert abs(rows - float(expected) * sum(mix.rows)) <= slack


def test_equals_the_keys_that_a_loader_delivers(tmp_path):
    write_synthetic(
        str(tmp_path / "one"), 150, bucket_of=lambda n: "2:1" if n % 7 == 0 else "1:1", prefix="a"
    )
    write_synthetic(str(tmp_path / "two"), 37, prefix="b")
    write_synthetic(str(tmp_path / "three"), 24, prefix="c")
    datasets = [open_dataset(str(tmp_path / name)) for name in ("one", "two", "three")]
    plan = Plan((Segment(0, 0, 0, 16),))
    repeats = [Fraction(1), Fraction(5, 2), Fraction(1, 3)]
    loader = Loader(datasets, repeats, seed=3, lanes=4, shuffle_window=48, stages=[64], plan=plan)
    with loader:
        delivered = [Counter(key[0] for key in batch.keys) for batch in islice(loader, 90)]
    order = order_like(datasets, repeats)
    for first, stop in ((0, 1), (0, 90), (13, 57), (30, 30), (89, 90)):
        seen = sum(delivered[first:stop], Counter())
        mix = mix_of(plan, lambda segment: order, first, stop)
        assert mix.rows == (seen["a"], seen["b"], seen["c"])
    # 150 : 92.5 : 8 of 250.5
    assert [round(float(share), 3) for share in long_run_shares(order.lines)] == [0.599, 0.369, 0.032]


def order_like(datasets, repeats) -> Order:
    """The order of the loader above, made of the datasets' indexes."""
    names = sorted({name for dataset in datasets for name in dataset.spec.buckets})
    sources = []
    for dataset, repeat in zip(datasets, repeats, strict=True):
        numbers = np.array([names.index(name) for name in dataset.spec.buckets])
        sources.append(SourceBlocks(numbers[dataset.index.bucket], dataset.index.rows, repeat))
    return Order(Lines(sources, seed=3, stage=0, lanes=4, window=48), [Segment(0, 0, 0, 16)])


def test_costs_no_more_for_more_steps():
    """Three sources of together 4 million rows, 128 lanes, four buckets: a step or four epochs."""
    random = np.random.default_rng(0)
    sources = [
        SourceBlocks(random.integers(0, 4, count), np.full(count, 64, np.int64), repeat)
        for count, repeat in ((40_000, Fraction(1)), (15_000, Fraction(3, 2)), (8_000, Fraction(1, 3)))
    ]
    lines = Lines(sources, seed=0, stage=0, lanes=128, window=16384)
    plan = Plan((Segment(0, 0, 0, 1024),))
    order = Order(lines, plan.timeline)
    seconds = {}
    for steps in (10, 1000, 16_000):
        began = time.perf_counter()
        mix = mix_of(plan, lambda segment: order, 7, 7 + steps)
        seconds[steps] = time.perf_counter() - began
        assert sum(mix.rows) == steps * 1024
    assert seconds[16_000] < 5 * seconds[10] + 0.5
    expected = [float(share) for share in long_run_shares(lines)]
    assert np.allclose(mix.shares, expected, atol=0.02)


def test_refuses_what_is_no_range():
    lines = make_lines([([(0, 8)], Fraction(1))], lanes=1, window=8)
    plan = Plan((Segment(0, 0, 0, 4),))
    for first, stop in ((3, 2), (-1, 4)):
        with pytest.raises(UsageError, match="not a range"):
            mix_of(plan, lambda segment: Order(lines, plan.timeline), first, stop)
