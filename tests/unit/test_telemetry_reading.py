"""The row of how a run reads: sums over ranks, differences in time, and what an alarm says of the cause."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.telemetry.reading import BUCKETS, COUNTS, ReadingMeter, percentile_s
from isthmus.core.telemetry.thresholds import Alarm
from isthmus.storage.ranges.counters import Counters


class Rank:
    """A rank's counters, real ones, with the loader's own figures beside them."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.own: dict[str, Any] = {"depth": 4, "ready_steps": 2, "resident_bytes": 1000, "wait_s": 0.0}

    def stats(self) -> dict[str, Any]:
        return {**self.counters.snapshot(), **self.own}

    def read(self, count: int, seconds: float, size: int = 1_000_000) -> None:
        for _ in range(count):
            self.counters.observe(seconds)
            self.counters.add("bytes", size)
            self.counters.add("requests")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def meters(ranks: list[Rank], clock: Clock) -> list[ReadingMeter]:
    return [
        ReadingMeter(rank.stats, rank=number, world_size=len(ranks), clock=clock)
        for number, rank in enumerate(ranks)
    ]


def row_of(metered: list[ReadingMeter]) -> dict[str, Any]:
    """What rank 0 writes: the ranks' vectors summed, as the all-reduce does it."""
    vectors = [meter.take() for meter in metered]
    return metered[0].row([sum(column) for column in zip(*vectors, strict=True)])


def test_a_row_is_the_difference_of_two_moments_summed_over_the_ranks() -> None:
    ranks, clock = [Rank(), Rank()], Clock()
    ranks[0].read(5, 0.5)  # before the meter: of no row
    metered = meters(ranks, clock)
    assert not metered[0].due()
    clock.now += 15
    assert metered[0].due()
    ranks[0].read(6, 0.003)
    ranks[1].read(2, 0.9)
    ranks[1].own |= {"wait_s": 1.5, "depth": 16, "ready_steps": 0, "resident_bytes": 5000}
    row = row_of(metered)
    assert row["bytes"] == 8_000_000
    assert row["requests"] == 8
    assert row["megabytes_per_s"] == pytest.approx(8 / 15)
    assert (row["wait_s"], row["wait_rank"]) == (1.5, 1)
    assert (row["depth"], row["ready_steps"], row["resident_bytes"], row["ranks"]) == (16, 0, 5000, 2)
    assert {bucket: reads for bucket, reads in row["latency_histogram"].items() if reads} == {
        "<=4": 6,
        "<=1024": 2,
    }
    assert 0.002 < row["latency_p50_s"] <= 0.004
    assert 0.512 < row["latency_p99_s"] <= 1.024
    clock.now += 10
    after = row_of(metered)
    assert [after[name] for name in COUNTS] == [0] * len(COUNTS)
    assert after["wait_s"] == 0.0
    assert after["latency_p50_s"] is None
    assert after["seconds"] == 10


def test_the_buckets_are_those_that_the_readers_count_in() -> None:
    assert list(Counters().snapshot()["latency_histogram"]) == list(BUCKETS)  # type: ignore[arg-type]
    assert set(Counters().snapshot()) - {"latency_s", "latency_histogram"} <= set(COUNTS)


def test_percentiles_lie_within_their_bucket() -> None:
    histogram = [0] * len(BUCKETS)
    assert percentile_s(histogram, 0.5) is None
    histogram[5] = 100  # 16 to 32 ms
    assert 0.016 < percentile_s(histogram, 0.01) < percentile_s(histogram, 0.5) < percentile_s(histogram, 1)
    assert percentile_s(histogram, 1) == 0.032
    histogram[-1] = 100
    assert percentile_s(histogram, 0.99) > 65.536


def test_the_cause_of_a_wait_is_told_from_the_counters_of_its_time() -> None:
    ranks, clock = [Rank(), Rank()], Clock()
    metered = meters(ranks, clock)
    assert metered[0].cause(60) is None, "nothing was measured yet"
    ranks[0].read(1000, 0.01)
    ranks[1].counters.add("retries", 12)
    ranks[1].counters.add("throttled", 9)
    ranks[1].own["wait_s"] = 4.0
    clock.now += 15
    row_of(metered)
    assert metered[0].cause(60) == (
        "the store throttled 9 of 1,000 requests; 3 of 1,000 requests failed and were tried again; rank 1 waited longest"
    )
    clock.now += 15
    ranks[0].read(10, 0.03)
    row_of(metered)
    assert metered[0].cause(10) is None, "that was before"
    told = metered[0].cause(10, fixed_depth=2)
    assert told is not None
    assert told.startswith("data.read_depth is 2 and a block takes ")
    ranks[0].counters.add("cache_misses", 3)
    ranks[0].counters.add("cache_hits", 1)
    clock.now += 15
    row_of(metered)
    assert metered[0].cause(10) == "3 of 4 reads found no cached shard"


def test_an_alarm_says_its_cause_in_the_message_and_in_a_field() -> None:
    alarm = Alarm(
        metric="data_wait", over=False, value=7.5, bound=2.0, side="max", for_s=600, time=0.0,
        cause="the store throttled 9 of 1,000 requests",
    )  # fmt: skip
    assert alarm.message == (
        "data_wait 7.5 % is above 2 % (over 600 s): the store throttled 9 of 1,000 requests"
    )
    assert alarm.event_fields()["cause"] == "the store throttled 9 of 1,000 requests"
