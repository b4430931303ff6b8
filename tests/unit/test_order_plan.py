"""The plan: what may be appended, and what a step then has."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UsageError, WorldSizeError
from isthmus.storage.stream import Plan, Segment, check_world_size
from isthmus.storage.stream.world_size import divisors, listed, nearest_change


def start(batch: int = 8) -> Plan:
    return Plan((Segment(0, 0, 0, batch),))


def test_a_changed_batch_size_counts_samples_on_and_a_new_stage_counts_from_zero():
    plan = start()
    plan = plan.append(plan.next_segment(10, stage=0, global_batch_size=16))
    plan = plan.append(plan.next_segment(15, stage=1, global_batch_size=4))
    assert [segment.first_sample for segment in plan.timeline] == [0, 80, 0]
    assert plan.segment_at(9).global_batch_size == 8
    assert plan.segment_at(10).sample_at(12) == 80 + 32
    assert plan.segment_at(10_000).stage == 1


def test_a_rewind_replaces_what_came_after_and_keeps_what_came_before():
    plan = start()
    plan = plan.append(plan.next_segment(10, stage=0, global_batch_size=16))
    rewound = plan.append(plan.next_segment(6, stage=0, global_batch_size=8, skipped=[(48, 80), (96, 104)]))
    assert [segment.first_step for segment in rewound.timeline] == [0, 6]
    assert rewound.segment_at(5) == plan.segment_at(5)
    # Steps 6 and 7 are the batches at samples 80 and 88; the one at 96 is skipped, too.
    assert [rewound.segment_at(step).sample_at(step) for step in (6, 7, 8, 9)] == [80, 88, 104, 112]
    assert rewound.to_json()[:2] == plan.to_json()


def test_survives_json():
    plan = start()
    plan = plan.append(plan.next_segment(6, stage=0, global_batch_size=8, skipped=[(48, 80)]))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([], "starts with a segment at step 0"),
        ([{"stage": 0, "first_step": 5, "first_sample": 0, "global_batch_size": 8}], "at step 0"),
        ([{"stage": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 0}], "not a segment"),
        ([{"stage": 0, "first_step": 0, "first_sample": 0}], "not a segment"),
        (
            [
                {"stage": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 8},
                {"stage": 0, "first_step": 4, "first_sample": 33, "global_batch_size": 8},
            ],
            "lead to 32",
        ),
        (
            [
                {"stage": 1, "first_step": 0, "first_sample": 0, "global_batch_size": 8},
                {"stage": 0, "first_step": 4, "first_sample": 0, "global_batch_size": 8},
            ],
            "goes back to stage 0",
        ),
        (
            [
                {
                    "stage": 0,
                    "first_step": 0,
                    "first_sample": 0,
                    "global_batch_size": 8,
                    "skipped": [[4, 12]],
                }
            ],
            "not whole batches",
        ),
    ],
)
def test_refuses_what_contradicts_itself(segments, says):
    with pytest.raises(UsageError, match=says):
        Plan.from_json(segments)


def test_world_sizes_that_divide_the_lanes_are_admitted_and_listed():
    for world_size in (1, 2, 3, 4, 6, 12):
        check_world_size(world_size, 12, 24)
    with pytest.raises(WorldSizeError) as raised:
        check_world_size(5, 12, 24)
    assert str(raised.value) == (
        "world size 5 does not divide data.lanes 12 (world sizes that do: 1, 2, 3, 4, 6, 12; "
        "or, in a new run, set data.lanes to 10 and global_batch_size to 20 to run on 5 ranks)"
    )


@pytest.mark.parametrize(
    ("world_size", "lanes", "batches", "says"),
    [
        # The lanes alone, where near ones divide the batch; else the rows of a lane stay what they were.
        (24, 128, [1920], "set data.lanes to 120 to run on 24 ranks"),
        (24, 128, [2048], "set data.lanes to 120 and stages.0.global_batch_size to 1920 to run on 24 ranks"),
        (256, 128, [2048], "set data.lanes to 256 to run on 256 ranks"),
        # Sixteen rows a lane of 200 lanes would be 3200: too far from 2048.
        (200, 128, [2048], "set data.lanes to 200 and stages.0.global_batch_size to 2000 to run on 200"),
        # 5280 admits 48 world sizes; 5038, nearer to 5040, admits 8.
        (11, 5040, [10080], "set data.lanes to 5280 and stages.0.global_batch_size to 10560 to run on 11"),
        (
            24,
            128,
            [2048, 1024, 768],
            "set data.lanes to 120, stages.0.global_batch_size to 1920, stages.1.global_batch_size to 960 and "
            "stages.2.global_batch_size to 720 to run on 24 ranks",
        ),
    ],
)
def test_a_world_size_that_is_refused_comes_with_the_nearest_change(world_size, lanes, batches, says):
    named = {f"stages.{number}.global_batch_size": batch for number, batch in enumerate(batches)}
    with pytest.raises(WorldSizeError) as raised:
        check_world_size(world_size, lanes, batches[0], what="stages.0.", batches=named)
    assert says in str(raised.value)
    told = {name: int(value) for name, value in re.findall(r"(\S+) to (\d+)", str(raised.value))}
    new_lanes = told["data.lanes"]
    for name, batch in named.items():  # what it says is true: the change admits this world size
        check_world_size(world_size, new_lanes, told.get(name, batch))


def test_of_many_world_sizes_those_near_by_are_shown():
    with pytest.raises(WorldSizeError) as raised:
        check_world_size(11, 5040, 10080)
    assert "1, 2, ..., 7, 8, 9, 10, 12, 14, 15, 16, ..., 2520, 5040 (60 in all)" in str(raised.value)
    for near, says in ((1, "1, 2, 3, 4, 5, 6, 7, 8, ..., 2520"), (9999, "1, 2, ..., 630, 720, ")):
        assert listed(divisors(5040), near).startswith(says)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_every_change_that_is_named_admits_the_world_size(world_size, lanes, shares):
    batches = {f"stages.{number}.global_batch_size": share * lanes for number, share in enumerate(shares)}
    if lanes % world_size == 0:
        return
    change = nearest_change(world_size, lanes, batches)
    told = {name: int(value) for name, value in re.findall(r"(\S+) to (\d+)", change)}
    for name, batch in batches.items():
        check_world_size(world_size, told.get("data.lanes", lanes), told.get(name, batch))


def test_a_batch_that_the_lanes_cannot_share_is_refused_with_both_settings():
    with pytest.raises(
        UsageError, match=r"stages\[1\].global_batch_size 1000 is not divisible by data.lanes 128"
    ):
        check_world_size(8, 128, 1000, what="stages[1].")
    for batches, says in (
        ({}, "(set stages.1.global_batch_size to 1024, or data.lanes to 125)"),
        ({"stages.0.global_batch_size": 2048}, "(set stages.1.global_batch_size to 1024)"),
    ):
        with pytest.raises(UsageError, match=re.escape(says)):
            check_world_size(8, 128, 1000, what="stages.1.", batches=batches)
