"""Stages over global steps: which stage a step belongs to, its learning rate, and the plan's segments.

Global step s (0 for the first) belongs to the stage whose border lies at or before it. Everything here is a
pure function of recipe and step, so a run that crashes on either side of a border resumes into the same stage.
Only :func:`follow_plan` writes: a stage's segment, when the stage is entered.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from isthmus.core.recipe.stages import Stage
from isthmus.storage.stream.plan import Plan, Segment


def learning_rate(stage: Stage, step: int) -> float:
    """The learning rate of a stage's own step (0 for its first).

    Linear warm-up over `lr_warmup_steps`, then over the rest of the stage with p rising from 0 towards 1:
    constant 1, linear 1 - p, cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017), sqrt sqrt(1 - p).
    """
    warmup = stage.lr_warmup_steps
    if step < warmup:
        return stage.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, stage.total_steps - warmup))
    factor = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "sqrt": math.sqrt(1 - progress),
    }[stage.lr_scheduler]
    return stage.learning_rate * factor


class Schedule:
    """The stages of a recipe laid end to end."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        self.borders = (0, *accumulate(stage.total_steps for stage in stages))
        """Global step at which each stage begins, and the end of the last."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.borders[-1]

    def stage_at(self, step: int) -> int:
        """Index of the stage that does global step `step`; after the end, the last."""
        return min(bisect_right(self.borders, step) - 1, len(self.stages) - 1)

    def learning_rate(self, step: int) -> float:
        """Learning rate of global step `step`."""
        stage = self.stage_at(step)
        return learning_rate(self.stages[stage], step - self.borders[stage])


class PlanStore(Protocol):
    """Where the plan is kept: a run directory."""

    def segments(self) -> list[dict[str, Any]]: ...
    def append_segment(self, segment: Mapping[str, Any]) -> Any: ...


def follow_plan(run: PlanStore, schedule: Schedule, step: int) -> Plan:
    """The plan, with a segment appended where global step `step` needs one; to be called on one rank.

    A stage that is entered needs one, and so does a stage whose batch size is no longer the plan's. A segment
    behind `step` (a crash just after a border leaves one) stays when it is what will be entered, and is replaced
    when the recipe says otherwise by now.
    """
    recorded = run.segments()
    stage = schedule.stage_at(step)
    batch = schedule.stages[stage].global_batch_size
    if not recorded:
        first = Segment(stage=stage, first_step=step, first_sample=0, global_batch_size=batch)
        run.append_segment(first.to_json())
        return Plan((first,))
    plan = Plan.from_json(recorded)
    current = plan.segment_at(step)
    later = [segment for segment in plan.timeline if segment.first_step > step]
    expected = {
        (schedule.borders[index], index, following.global_batch_size)
        for index, following in enumerate(schedule.stages)
    }
    # A segment that leaves samples out (a loss spike was undone) begins anywhere within its stage.
    as_expected = all(
        (s.first_step, s.stage, s.global_batch_size) in expected
        or (
            s.skipped and s.stage == schedule.stage_at(s.first_step) == stage and s.global_batch_size == batch
        )
        for s in later
    )
    if (current.stage, current.global_batch_size) == (stage, batch) and as_expected:
        return plan
    needed = plan.next_segment(step, stage=stage, global_batch_size=batch)
    run.append_segment(needed.to_json())
    return plan.append(needed)


def with_stages_to_come(plan: Plan, schedule: Schedule) -> Plan:
    """The plan for a loader: also the stages that are not entered yet, so that it can read ahead of a border."""
    for index, stage in enumerate(schedule.stages):
        if index > plan.timeline[-1].stage:
            plan = plan.append(
                plan.next_segment(
                    schedule.borders[index], stage=index, global_batch_size=stage.global_batch_size
                )
            )
    return plan


def samples_before(plan: Plan, step: int) -> int:
    """Samples trained on before global step `step`."""
    total = 0
    starts = [segment.first_step for segment in plan.timeline] + [step]
    for segment, end in zip(plan.timeline, starts[1:], strict=True):
        total += max(0, min(end, step) - segment.first_step) * segment.global_batch_size
    return total
