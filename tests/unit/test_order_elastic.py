"""Exactly once and elastic, with 128 lanes: what 1 to 128 ranks read, each from an order of its own as in a process."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest

from isthmus.storage.stream.lines import Lines, SourceBlocks
from isthmus.storage.stream.order import Order
from isthmus.storage.stream.plan import Plan, Segment

LANES = 128
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PLAN = Plan((Segment(0, 0, 0, 512),)).append(Segment(0, 30, 30 * 512, 1024))
"""The batch size changes on the way."""


def make_order() -> Order:
    """Two sources, one of them one and a half times an epoch; a large, a middling and a rare bucket."""
    random = np.random.default_rng(5)
    sources = [
        SourceBlocks(
            random.choice(3, blocks, p=[0.7, 0.25, 0.05]), random.integers(20, 65, blocks), Fraction(repeat)
        )
        for blocks, repeat in ((300, 1), (120, Fraction(3, 2)))
    ]
    return Order(Lines(sources, seed=1, stage=0, lanes=LANES, window=4096), PLAN.timeline)


@pytest.fixture(scope="module")
def epochs() -> int:
    """Enough to see a source with a fractional repeat once, and twice in an epoch."""
    return 2


@pytest.fixture(scope="module")
def steps(epochs: int) -> int:
    """Until every lane of every bucket has gone through the epochs."""
    order, step = make_order(), 0
    need = {bucket: order.lines.rows_before(bucket, epochs) + LANES for bucket in order.lines.buckets}
    while any(order.rows_taken(step)[bucket] < rows for bucket, rows in need.items()):
        step += 1
    return step


@pytest.fixture(scope="module")
def reads(steps: int) -> dict[int, list[list[tuple[int, np.ndarray, np.ndarray]]]]:
    """World size -> rank -> step -> bucket, positions, and rows as [source, block, row, epoch, appearance]."""
    out = {}
    for world_size in WORLD_SIZES:
        ranks = []
        for rank in range(world_size):
            order, mine = make_order(), []
            for step in range(steps):
                found = order.step(step, rank, world_size)
                rows = found.rows
                columns = (rows.source, rows.block, rows.row, rows.epoch, rows.appearance)
                mine.append((found.bucket, found.positions, np.stack(columns, axis=1)))
            ranks.append(mine)
        out[world_size] = ranks
    return out


def test_every_world_size_has_the_same_global_batches_at_the_same_positions(reads, steps):
    whole = reads[1][0]
    assert {len(rows) for _, _, rows in whole} == {512, 1024}
    for world_size in WORLD_SIZES:
        for step in range(steps):
            parts = [ranks[step] for ranks in reads[world_size]]
            assert {bucket for bucket, _, _ in parts} == {whole[step][0]}
            assert len({len(rows) for _, _, rows in parts}) == 1  # the ranks' batches are of one size
            positions = np.concatenate([positions for _, positions, _ in parts])
            assert np.array_equal(positions, whole[step][1])
            assert np.array_equal(np.concatenate([rows for _, _, rows in parts]), whole[step][2])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_sample_comes_once_an_appearance_of_an_epoch(reads, epochs, world_size):
    lines = make_order().lines
    seen = np.concatenate([rows for rank in reads[world_size] for _, _, rows in rank])
    assert len(np.unique(seen, axis=0)) == len(seen)
    for epoch in range(epochs):
        counted = Counter(map(tuple, seen[seen[:, 3] == epoch][:, [0, 1, 4]].tolist()))
        expected = {
            (number, block, appearance): int(rows)
            for number, source in enumerate(lines.sources)
            for block, rows in enumerate(source.rows)
            for appearance in range(source.appearances_before(epoch + 1) - source.appearances_before(epoch))
        }
        assert counted == expected  # all rows of all blocks of an epoch that is over


def test_blocks_are_shared_by_ranks_at_lane_borders_alone(reads, epochs):
    """Between two ranks lies one lane border a bucket and epoch, which cuts one block at most."""
    lines = make_order().lines
    again = {}
    for world_size in WORLD_SIZES:
        readers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, mine in enumerate(reads[world_size]):
            for bucket, _, rows in mine:
                for source, block, _, epoch, appearance in rows.tolist():
                    readers[bucket, epoch, source, block, appearance].add(rank)
        cut: Counter[tuple[int, int]] = Counter()
        for (bucket, epoch, *_), ranks in readers.items():
            assert max(ranks) - min(ranks) == len(ranks) - 1  # neighbours
            if epoch < epochs:
                cut[bucket, epoch] += len(ranks) - 1
        assert len(cut) == len(lines.buckets) * epochs
        assert max(cut.values()) <= world_size - 1 <= LANES - 1
        again[world_size] = sum(cut.values())
    print(f"\nblocks read by a further rank, in {epochs} epochs of {len(lines.buckets)} buckets: {again}")
    assert again[1] == 0
