"""What a resume may change, said in one line each, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from isthmus.core.recipe.dump import recipe_hash
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Stage
from isthmus.core.train.agreement import gather, shared
from isthmus.core.train.trainer_state import TrainerState
from isthmus.errors import UsageError


def check_same_recipe(recipe: Recipe) -> None:
    """That every rank was started with the same recipe; all ranks must enter.

    Raises:
        UsageError: names the ranks whose recipe is another than rank 0's; on all ranks.
    """
    hashes = gather(recipe_hash(recipe))
    others = [str(rank) for rank, found in enumerate(hashes) if found != hashes[0]]
    if others:
        ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(others[:8])}"
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        raise shared(
            UsageError(
                f"{ranks}{more} of {len(hashes)} started with another recipe than rank 0",
                hint="the same file must reach every node",
            )
        )


def stages_of(recipe: Recipe) -> tuple[tuple[str, int, int], ...]:
    """Name, steps and global batch size of each stage, as a checkpoint records them."""
    return tuple((stage.name, stage.total_steps, stage.global_batch_size) for stage in recipe.stages)


def changes(recipe: Recipe, state: TrainerState) -> list[str]:
    """What the recipe changes about the stages of the run that it resumes, a line for each change.

    Stages that were trained stay as they were. The one that was trained last may become longer, or shorter down to
    what it has done; what comes after it is free.

    Args:
        recipe: of this start.
        state: read from the checkpoint. One without stages (an older version's) is not checked.

    Raises:
        UsageError: a trained stage was added, removed or changed; names it.
    """
    written, now = state.stages, stages_of(recipe)
    if not written or state.step == 0:
        return []
    borders = [0, *accumulate(steps for _, steps, _ in written)]
    last = next(index for index in range(len(written)) if borders[index + 1] >= min(state.step, borders[-1]))
    for index in range(last + 1):
        _check_trained(index, written, now, state.step, whole=index < last)
    done = state.step - borders[last]
    name, steps, batch = written[last]
    _, steps_now, batch_now = now[last]
    where = f"stages.{last}"
    if steps_now < done:
        raise UsageError(
            f"the run has done {done} steps of stage {name}, more than the recipe's {steps_now}",
            where=f"{where}.steps",
            hint="give it at least as many, or start a new run",
        )
    lines = []
    if steps_now != steps:
        lines.append(
            f"{where}.steps {steps} -> {steps_now}: the learning rate follows the new length from here on"
        )
    if batch_now != batch and done < steps_now:
        lines.append(_of_batch(where, recipe.stages[last], batch, state.step))
    if written[last + 1 :] != now[last + 1 :]:
        lines.append(f"stages to come: {_names(written[last + 1 :])} -> {_names(now[last + 1 :])}")
    return lines


def _check_trained(
    index: int,
    written: Sequence[tuple[str, int, int]],
    now: Sequence[tuple[str, int, int]],
    step: int,
    *,
    whole: bool,
) -> None:
    name, steps, _ = written[index]
    if index < len(now) and now[index][0] == name and (not whole or now[index][1] == steps):
        return
    trained = f"step {step} was reached with stages {_names(written)}"
    if index < len(now) and now[index][0] == name:
        trained += f", {name} of {steps} steps; now it has {now[index][1]}"
    else:
        trained += f"; now they are {_names(now)}"
    raise UsageError(
        trained,
        where=f"stages.{index}",
        hint="stages that were trained stay; add, remove or change later ones, or start a new run",
    )


def _of_batch(where: str, stage: Stage, before: int, step: int) -> str:
    return (
        f"{where}.global_batch_size {before} -> {stage.global_batch_size} from step {step} on: a step takes so many "
        f"samples, no sample is repeated or left out; learning_rate stays {stage.learning_rate:g} and "
        f"steps stay {stage.total_steps}"
    )


def _names(stages: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(name for name, _, _ in stages) or "none"
