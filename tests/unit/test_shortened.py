"""A resume never leaves a stage fewer steps than it has done."""

from __future__ import annotations

import pytest
from training import recipe_data

from isthmus.backends.shortened import check_steps_done
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import UsageError


def recipe(*steps: int) -> Recipe:
    data = recipe_data("data")
    stage = data["stages"][0]
    data["stages"] = [{**stage, "name": f"s{at}", "steps": count} for at, count in enumerate(steps)]
    return Recipe.model_validate(data)


def test_what_was_done_stays() -> None:
    check_steps_done(recipe(40, 40), recipe(40, 10), 50)
    check_steps_done(recipe(40, 40), recipe(40, 90), 80)
    check_steps_done(recipe(40, 40), recipe(20, 40), 0)
    with pytest.raises(UsageError, match="the run has done 11 steps of stage s1, more than the recipe's 10"):
        check_steps_done(recipe(40, 40), recipe(40, 10), 51)
    with pytest.raises(UsageError, match=r"stages.0.steps: the run has done 40 steps"):
        check_steps_done(recipe(40, 40), recipe(39, 40), 51)
