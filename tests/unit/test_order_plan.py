"""The plan: what may be appended, and what a step then has."""

from __future__ import annotations

import json

import pytest

from isthmus.errors import UsageError, WorldSizeError
from isthmus.storage.stream import Plan, Segment, check_world_size


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
        "world size 5 does not divide data.lanes 12 (world sizes that do: 1, 2, 3, 4, 6, 12)"
    )


def test_a_batch_that_the_lanes_cannot_share_is_refused_with_both_settings():
    with pytest.raises(
        UsageError, match=r"stages\[1\].global_batch_size 1000 is not divisible by data.lanes 128"
    ):
        check_world_size(8, 128, 1000, what="stages[1].")
