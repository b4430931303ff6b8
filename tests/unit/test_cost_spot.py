"""Spot: the formulas against their limits, against a simulation, and against each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cost.spot import (
    Interruptions,
    break_even_rate,
    daly_interval,
    expected_hours,
    expected_interruptions,
    young_interval,
)

CASE = Interruptions(per_node_hour=0.01, nodes=16, checkpoint_h=0.01, interval_h=0.25, restart_h=0.2)
rates = st.floats(0, 0.1)
hours = st.floats(0.01, 500)


def simulated(work_h: float, by: Interruptions, seed: int) -> float:
    """One run, event by event: pieces of work that count once their checkpoint is written, restarts that may fail."""
    chance = random.Random(seed)
    clock, done = 0.0, 0.0
    next_at = chance.expovariate(1 / by.mean_h)
    while done < work_h:
        piece = min(by.interval_h, work_h - done)
        if clock + piece + by.checkpoint_h <= next_at:
            clock, done = clock + piece + by.checkpoint_h, done + piece
            continue
        clock = next_at
        next_at = clock + chance.expovariate(1 / by.mean_h)
        while clock + by.restart_h > next_at:
            clock = next_at
            next_at = clock + chance.expovariate(1 / by.mean_h)
        clock += by.restart_h
    return clock


def test_a_simulation_of_runs_takes_as_long_as_expected() -> None:
    case = replace(CASE, per_node_hour=0.05)
    runs = [simulated(50, case, seed) for seed in range(300)]
    assert sum(runs) / len(runs) == pytest.approx(expected_hours(50, case), rel=0.03)


@given(work=hours, interval=st.floats(0.01, 10), nodes=st.integers(1, 64))
def test_without_interruptions_it_is_work_and_checkpoints(work: float, interval: float, nodes: int) -> None:
    none = Interruptions(per_node_hour=0, nodes=nodes, checkpoint_h=0, interval_h=interval, restart_h=5)
    assert expected_hours(work, none) == pytest.approx(work)
    assert expected_interruptions(work, none) == 0


@given(work=hours, low=rates, high=rates, nodes=st.integers(1, 64))
def test_more_interruptions_never_make_it_faster(work: float, low: float, high: float, nodes: int) -> None:
    low, high = sorted((low, high))
    few = expected_hours(work, replace(CASE, per_node_hour=low, nodes=nodes))
    many = expected_hours(work, replace(CASE, per_node_hour=high, nodes=nodes))
    assert work <= few <= many * (1 + 1e-9)


@given(rate=st.floats(1e-5, 1e-3), interval=st.floats(0.05, 1))
def test_to_first_order_it_is_restarts_and_half_an_interval(rate: float, interval: float) -> None:
    case = replace(CASE, per_node_hour=rate, nodes=1, checkpoint_h=0, interval_h=interval)
    found = expected_hours(100, case)
    linear = 100 + 100 * rate * (case.restart_h + interval / 2)
    assert found == pytest.approx(linear, rel=3 * (rate * (interval + case.restart_h)) ** 2 + 1e-9)


@settings(max_examples=50)
@given(delta=st.floats(1e-3, 0.1), mean=st.floats(1, 200))
def test_dalys_interval_is_the_best_one(delta: float, mean: float) -> None:
    case = Interruptions(
        per_node_hour=1 / mean,
        nodes=1,
        checkpoint_h=delta,
        interval_h=daly_interval(delta, mean),
        restart_h=0.1,
    )
    best = expected_hours(1000, case)
    for factor in (0.3, 0.7, 1.4, 3):
        assert best <= expected_hours(1000, replace(case, interval_h=case.interval_h * factor)) * 1.001


def test_young_and_daly_by_hand() -> None:
    # A checkpoint of 5 minutes and a day between failures: sqrt(2 x 5 x 1440) = 120 minutes.
    assert young_interval(5 / 60, 24) * 60 == pytest.approx(120)
    assert daly_interval(5 / 60, 24) * 60 == pytest.approx(
        120 * (1 + math.sqrt(5 / 2880) / 3 + 5 / 2880 / 9) - 5
    )
    assert daly_interval(1, 0.4) == 0.4
    assert daly_interval(1, math.inf) == math.inf


def test_at_the_break_even_rate_both_cost_the_same() -> None:
    rate = break_even_rate(100, spot_usd_h=200, other_usd_h=524, other_hours=101, by=CASE)
    assert rate is not None
    assert 200 * expected_hours(100, replace(CASE, per_node_hour=rate)) == pytest.approx(524 * 101, rel=1e-6)
    assert break_even_rate(100, spot_usd_h=530, other_usd_h=524, other_hours=101, by=CASE) is None


def test_what_never_ends_is_infinite_and_nonsense_is_refused() -> None:
    assert expected_hours(1, replace(CASE, per_node_hour=1e4)) == math.inf
    for change in ({"per_node_hour": -1}, {"interval_h": 0}, {"nodes": 0}, {"restart_h": math.nan}):
        with pytest.raises(ValueError, match="must"):
            replace(CASE, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        expected_hours(-1, CASE)
