"""A resume that would leave a stage fewer steps than it has done is refused before anything starts."""

from __future__ import annotations

from isthmus.core.recipe.schema import Recipe
from isthmus.errors import UsageError


def check_steps_done(before: Recipe, now: Recipe, step: int) -> None:
    """That no stage gets shorter than what was done of it.

    Args:
        before: the run's recipe so far.
        now: with the changes.
        step: of the newest committed checkpoint.

    Raises:
        UsageError: names the stage's field.
    """
    begun = 0
    for index, stage in enumerate(before.stages):
        done = min(max(step - begun, 0), stage.total_steps)
        begun += stage.total_steps
        if index >= len(now.stages) or now.stages[index].name != stage.name:
            return  # other stages: the trainer says what may change of those that were trained
        if now.stages[index].total_steps < done:
            raise UsageError(
                f"the run has done {done} steps of stage {stage.name}, more than the recipe's {now.stages[index].total_steps}",
                where=f"stages.{index}.{'steps' if stage.steps is not None else 'samples'}",
                hint="give it at least as many, or start a new run",
            )
