"""What a recipe may change about the run that it resumes, and what it may not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from training import recipe_data

from isthmus.core.recipe import Recipe, parse_recipe
from isthmus.core.train.resuming import changes, stages_of
from isthmus.core.train.trainer_state import Identity, TrainerState
from isthmus.errors import UsageError


def recipe(*stages: tuple[str, int, int]) -> Recipe:
    made: list[dict[str, Any]] = [
        {
            "name": name, "resolution": 16, "steps": steps, "global_batch_size": batch, "micro_batch_size": 4,
            "learning_rate": 1e-3,
        }
        for name, steps, batch in stages
    ]  # fmt: skip
    return parse_recipe(json.dumps(recipe_data("data", stages=made)), filename="x").recipe


A, B, C = ("a", 4, 8), ("b", 6, 8), ("c", 5, 8)


def at(step: int, *stages: tuple[str, int, int]) -> TrainerState:
    return TrainerState(Identity("m", ("d",), 1), step=step, stages=stages)


def test_stages_are_recorded_as_the_recipe_has_them() -> None:
    assert stages_of(recipe(A, ("b", 6, 16))) == (A, ("b", 6, 16))


@pytest.mark.parametrize(
    ("step", "before", "now", "says"),
    [
        (0, (A, B), (C,), []),
        (3, (A, B), (A, B), []),
        (3, (A, B), (A,), ["stages to come: b -> none"]),
        (3, (A,), (A, C), ["stages to come: none -> c"]),
        (4, (A, B), (A, C, B), ["stages to come: b -> c, b"]),
        (4, (A,), (("a", 9, 8),), ["stages.0.steps 4 -> 9: the learning rate follows"]),
        (3, (A,), (("a", 3, 8),), ["stages.0.steps 4 -> 3"]),
        (5, (A, B), (A, ("b", 6, 16)), ["stages.1.global_batch_size 8 -> 16 from step 5 on", "learning_rate stays 0.001"]),
        (4, (A,), (("a", 4, 16), C), ["stages to come: none -> c"]),
        (3, (), (C,), []),
    ],
)  # fmt: skip
def test_what_is_allowed_is_said(
    step: int, before: tuple[Any, ...], now: tuple[Any, ...], says: list[str]
) -> None:
    lines = changes(recipe(*now), at(step, *before))
    text = "; ".join(lines)
    assert bool(lines) == bool(says)
    for part in says:
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("step", "before", "now", "says"),
    [
        (5, (A, B), (B,), "stages.0: step 5 was reached with stages a, b; now they are b"),
        (5, (A, B), (C, A, B), "stages.0: step 5 was reached with stages a, b; now they are c, a, b"),
        (5, (A, B), (A,), "stages.1: step 5 was reached with stages a, b; now they are a"),
        (5, (A, B), (("a", 5, 8), B), "stages.0: step 5 was reached with stages a, b, a of 4 steps; now it has 5"),
        (2, (A,), (C,), "stages.0: step 2 was reached with stages a; now they are c"),
        (3, (A,), (("a", 2, 8),), "stages.0.steps: the run has done 3 steps of stage a, more than the recipe's 2"),
    ],
)  # fmt: skip
def test_a_trained_stage_stays(step: int, before: tuple[Any, ...], now: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        changes(recipe(*now), at(step, *before))
    assert "new run" in str(caught.value)
    assert "\n" not in str(caught.value)
