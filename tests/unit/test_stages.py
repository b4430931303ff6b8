"""Stages over global steps, learning rates, and the plan on either side of a border."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from isthmus.core.recipe.stages import Stage
from isthmus.core.train.stages import (
    Schedule,
    follow_plan,
    learning_rate,
    samples_before,
    with_stages_to_come,
)


def stage(**changes: Any) -> Stage:
    settings = {
        "name": "a", "resolution": 16, "steps": 10, "global_batch_size": 8, "micro_batch_size": 4,
        "learning_rate": 1.0,
    }  # fmt: skip
    return Stage.model_validate(settings | changes)


class Memory:
    """A plan store in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def segments(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.rows]

    def append_segment(self, segment: Mapping[str, Any]) -> int:
        self.rows.append(dict(segment))
        return len(self.rows)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 1 - 4 / 8, 1 - 7 / 8]),
        ("cosine", [0.5, 1, 1, 0.5, (1 + math.cos(math.pi * 7 / 8)) / 2]),
        ("sqrt", [0.5, 1, 1, math.sqrt(0.5), math.sqrt(1 / 8)]),
    ],
)
def test_learning_rates_warm_up_and_decay_over_the_stage(scheduler: str, expected: list[float]) -> None:
    settings = stage(lr_scheduler=scheduler, lr_warmup_steps=2)
    found = [learning_rate(settings, step) for step in (0, 1, 2, 6, 9)]
    assert found == pytest.approx(expected)


def test_steps_belong_to_stages_and_rates_to_their_own_steps() -> None:
    schedule = Schedule([stage(), stage(name="b", steps=None, samples=32, lr_warmup_steps=4)])
    assert schedule.borders == (0, 10, 14)
    assert [schedule.stage_at(step) for step in (0, 9, 10, 13, 14)] == [0, 0, 1, 1, 1]
    assert schedule.learning_rate(9) == 1.0
    assert schedule.learning_rate(10) == 0.25


def test_a_stage_is_entered_once_whichever_side_of_the_border_a_crash_is_on() -> None:
    schedule = Schedule([stage(), stage(name="b", global_batch_size=16)])
    store = Memory()
    assert [s.first_step for s in follow_plan(store, schedule, 0).timeline] == [0]
    assert len(follow_plan(store, schedule, 7).timeline) == 1, "resuming within a stage adds nothing"
    plan = follow_plan(store, schedule, 10)
    assert [(s.stage, s.first_step, s.global_batch_size) for s in plan.timeline] == [(0, 0, 8), (1, 10, 16)]
    # The crash came just behind the border; the newest checkpoint is before it.
    assert follow_plan(store, schedule, 8) == plan
    assert follow_plan(store, schedule, 10) == plan
    assert follow_plan(store, schedule, 12) == plan
    assert len(store.rows) == 2


def test_a_changed_batch_size_appends_and_counts_the_samples_so_far() -> None:
    store = Memory()
    follow_plan(store, Schedule([stage()]), 0)
    plan = follow_plan(store, Schedule([stage(global_batch_size=16)]), 4)
    assert [(s.first_step, s.first_sample, s.global_batch_size) for s in plan.timeline] == [
        (0, 0, 8),
        (4, 32, 16),
    ]
    assert samples_before(plan, 6) == 4 * 8 + 2 * 16


def test_a_loader_sees_the_stages_to_come_and_the_store_does_not() -> None:
    schedule = Schedule([stage(), stage(name="b", global_batch_size=16), stage(name="c")])
    store = Memory()
    plan = with_stages_to_come(follow_plan(store, schedule, 0), schedule)
    assert [(s.stage, s.first_step) for s in plan.timeline] == [(0, 0), (1, 10), (2, 20)]
    assert len(store.rows) == 1
    assert samples_before(plan, 20) == 10 * 8 + 10 * 16
