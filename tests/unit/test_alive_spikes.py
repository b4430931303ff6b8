"""Loss spikes: found by a robust score, and left out of the plan."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.recipe.alive import LossSpike
from isthmus.core.train.spikes import SpikeDetector, first_skipped, rewinds, without
from isthmus.storage.stream.plan import Plan, Segment


def calm(steps: int, seed: int = 0) -> list[float]:
    dice = random.Random(seed)
    return [dice.gauss(1.0, 0.05) for _ in range(steps)]


def test_a_spike_is_told_once_when_it_lasts() -> None:
    detector = SpikeDetector(LossSpike(window=50, lasts=3))
    losses = [*calm(60), 2.0, *calm(5, 1), 2.0, 2.1, 2.2, 2.3, 2.4, *calm(40, 2), 3.0, 3.0, 3.0]
    found = [spike for step, loss in enumerate(losses, 1) if (spike := detector.observe(step, loss))]
    assert [(spike.first, spike.last) for spike in found] == [(67, 69), (112, 114)]
    assert found[0].message.startswith("loss spike at steps 67 to 69: 2.2 against a median of 1.0")
    assert found[0].z_score > 8


def test_nothing_is_judged_before_half_a_window_and_a_slow_rise_is_no_spike() -> None:
    detector = SpikeDetector(LossSpike(window=100, lasts=1))
    assert not any(detector.observe(step, loss) for step, loss in enumerate([1.0, 50.0] * 24, 1))
    detector = SpikeDetector(LossSpike(window=100, lasts=1))
    rising = [loss * (1 + step / 400) for step, loss in enumerate(calm(600))]
    assert not any(detector.observe(step, loss) for step, loss in enumerate(rising, 1))


def test_steps_that_are_not_finite_count_and_do_not_enter_the_window() -> None:
    detector = SpikeDetector(LossSpike(window=20, lasts=2))
    for step, loss in enumerate(calm(30), 1):
        assert detector.observe(step, loss) is None
    assert detector.observe(31, math.nan, finite=False) is None
    assert detector.observe(32, math.nan, finite=False) is not None
    assert all(math.isfinite(loss) for loss in detector.losses)


def test_a_constant_loss_has_a_deviation_to_be_judged_by() -> None:
    detector = SpikeDetector(LossSpike(window=20, lasts=1), [1.0] * 20)
    assert detector.observe(21, 1.0 + 1e-6) is None
    assert detector.observe(22, 1.5) is not None


def test_a_window_from_a_checkpoint_judges_as_the_run_would_have() -> None:
    whole = SpikeDetector(LossSpike(window=30, lasts=1))
    losses = [*calm(50), 5.0]
    for step, loss in enumerate(losses[:40], 1):
        whole.observe(step, loss)
    resumed = SpikeDetector(LossSpike(window=30, lasts=1), whole.losses)
    rest = list(enumerate(losses[40:], 41))
    assert [whole.observe(*pair) for pair in rest] == [resumed.observe(*pair) for pair in rest]


TWO = Plan((Segment(0, 0, 0, 8), Segment(1, 100, 0, 16)))


def test_the_range_begins_so_many_steps_before_but_not_in_another_stage() -> None:
    assert first_skipped(TWO, 50, 10) == 41
    assert first_skipped(TWO, 3, 10) == 0
    assert first_skipped(TWO, 104, 10) == 100
    again = TWO.append(without(TWO, 110, 112))
    assert first_skipped(again, 115, 10) == 106, "a rewind is no border"


def test_a_range_is_left_out_of_the_plan() -> None:
    plan = TWO.append(without(TWO, 120, 129))
    assert plan.timeline[-1] == Segment(1, 100, 0, 16, ((320, 480),))
    assert plan.timeline[0] == TWO.timeline[0]
    assert [plan.segment_at(step).sample_at(step) for step in (119, 120)] == [304, 480]
    assert rewinds(plan) == 1
    twice = plan.append(without(plan, 120, 121))
    assert twice.timeline[-1].skipped == ((320, 512),), "what was left out before stays left out"
    assert rewinds(twice) == 2
    with pytest.raises(ValueError, match="another segment"):
        without(TWO, 99, 100)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([4, 8]),
)
def test_what_was_left_out_is_never_delivered_again(gone_back: list[tuple[int, int]], batch: int) -> None:
    """Against a list: each rewind removes the samples of its steps from what is to come."""
    plan = Plan((Segment(0, 0, 0, batch),))
    line = list(range(200))  # batches in the order of delivery
    for last, skip in gone_back:
        first = first_skipped(plan, last, skip)
        plan = plan.append(without(plan, first, last))
        del line[first : last + 1]
    for step in range(60):
        assert plan.segment_at(step).sample_at(step) == line[step] * batch
