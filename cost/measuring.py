"""A short run of a recipe: what it does differently, and what its metrics say of the whole one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from isthmus.core.recipe.schema import Recipe
from isthmus.cost.measured import Measurement, StageSpeed, speed_key
from isthmus.cost.placing import Place
from isthmus.errors import UsageError

STEPS = 200
"""Of each stage at most, where nobody says."""
LEAST = 8
"""Steps of a stage below which nothing can be said."""
WARM_UP = 4
"""First steps of a stage: kernels are chosen, caches are cold."""
DRIFT = 0.03
"""How much a run of hours drifts from one of minutes, either way; ours."""
_SHARE = 0.05
_OUTLIER = 3.0  # times the median: a stall that is not the model's
_Z80 = 1.2816  # of the normal distribution: four of five within


def steps_of(recipe: Recipe, wanted: int | None) -> list[int]:
    """Steps of each stage that are measured: as many as asked for, never more than the stage has.

    Where nobody says, a twentieth of the stage at most, but enough to tell something.

    Raises:
        UsageError: fewer than can tell anything.
    """
    if wanted is not None and wanted < LEAST:
        raise UsageError(f"{wanted} steps tell nothing", where="--steps", hint=f"at least {LEAST}")
    found = []
    for stage in recipe.stages:
        total = stage.total_steps
        if total < LEAST:
            raise UsageError(
                f"stage {stage.name} has {total} steps: nothing is left to predict", where="--measure"
            )
        chosen = wanted if wanted is not None else max(LEAST, min(STEPS, int(_SHARE * total)))
        found.append(min(chosen, total))
    return found


def short_overrides(recipe: Recipe, steps: Sequence[int]) -> list[str]:
    """What makes a recipe the short one: its stages' lengths, with one checkpoint and one validation on the way."""
    overrides = []
    for index, (stage, count) in enumerate(zip(recipe.stages, steps, strict=True)):
        if stage.steps is not None:
            overrides.append(f"stages.{index}.steps={count}")
        else:
            overrides.append(f"stages.{index}.samples={count * stage.global_batch_size}")
        overrides.append(f"stages.{index}.lr_warmup_steps=0")
    checkpoint, validation = special_steps(sum(steps))
    overrides.append(f"checkpoint.every={checkpoint} steps")
    if validates(recipe):
        overrides.append(f"validation.every={validation} steps")
    return overrides


def special_steps(total: int) -> tuple[int, int]:
    """The steps after which the short run writes a checkpoint and validates; each once before the end, never both."""
    validation = total // 2 + 1
    return max(validation + 1, 3 * total // 4), validation


def validates(recipe: Recipe) -> bool:
    """Whether it validates at all."""
    return bool(recipe.validation.prompts) or recipe.validation.loss_by_timestep


def read(
    recipe: Recipe,
    place: Place,
    *,
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    system: Sequence[Mapping[str, Any]] = (),
    run_uri: str,
) -> Measurement:
    """What the short run says.

    Args:
        recipe: the short one.
        place: where it ran.
        rows: train metrics, of one attempt.
        events: of its run directory.
        system: metrics of the nodes' GPUs.

    Raises:
        UsageError: too few steps, or none of an event that tells when it began or ended.
    """
    if len({row["attempt"] for row in rows}) != 1:
        raise UsageError(
            "the short run was interrupted, so it measured nothing", where=run_uri, hint="measure again"
        )
    begun = _time(events, "submitted" if place.backend == "local" else "started", run_uri)
    ended = _time(events, "finished", run_uri)
    total = sum(stage.total_steps for stage in recipe.stages)
    special = special_steps(total)
    periods = _periods(rows)
    ordinary: list[StageSpeed] = []
    typical: dict[int, float] = {}
    for index, stage in enumerate(recipe.stages):
        first = min((int(row["step"]) for row in rows if row["stage"] == index), default=0)
        # A period runs from the end of one step to the end of the next, so what is done after a step is in the next one's.
        counted = [
            seconds
            for step, (at, seconds) in periods.items()
            if at == index and step >= first + WARM_UP and step - 1 not in special
        ]
        if len(counted) < 3:
            raise UsageError(
                f"stage {stage.name}: {len(counted)} steps tell nothing", where=run_uri, hint="more --steps"
            )
        typical[index] = median(counted)
        ordinary.append(_speed(index, stage.resolution, stage.global_batch_size, counted))
    extra = {
        step: max(0.0, periods[step + 1][1] - typical[periods[step + 1][0]])
        for step in special
        if step + 1 in periods
    }
    first_row, last_row = rows[0], rows[-1]
    end = max(0.0, ended - float(last_row["time"]))
    stall = extra.get(special[0])
    validation = extra.get(special[1]) if validates(recipe) else None
    return Measurement(
        key=speed_key(recipe),
        recipe=recipe.name,
        backend=place.backend,
        region=place.region,
        sku=place.sku,
        nodes=place.nodes,
        gpus_per_node=place.gpus_per_node,
        gpu=place.gpu,
        stages=tuple(ordinary),
        start_s=max(0.0, float(first_row["time"]) - begun - typical[int(first_row["stage"])]),
        checkpoint_stall_s=stall,
        first_validation_s=validation,
        # The one at the end has its samples read; whatever else the end takes is an upper bound of it.
        validation_s=None if validation is None else min(validation, end),
        end_s=end,
        seconds=ended - begun,
        time=ended,
        run_uri=run_uri,
        gpu_figures=_gpu_figures(system),
    )


def _speed(index: int, resolution: int, batch: int, seconds: Sequence[float]) -> StageSpeed:
    """Images a second from the mean period, outliers cut; the interval from the mean's error and the drift."""
    most = _OUTLIER * median(seconds)
    cut = [min(value, most) for value in seconds]
    mean = fmean(cut)
    error = _Z80 * (stdev(cut) / math.sqrt(len(cut)) if len(cut) > 1 else 0.0) / mean
    spread = math.hypot(error, DRIFT)
    rate = batch / mean
    return StageSpeed(
        stage=index,
        resolution=resolution,
        global_batch_size=batch,
        images_per_s=rate,
        low=rate / (1 + spread),
        high=rate * (1 + spread),
        steps=len(cut),
    )


def _periods(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, float]]:
    """Step -> (stage, seconds since the end of the step before)."""
    found: dict[int, tuple[int, float]] = {}
    for before, row in pairwise(rows):
        if row["step"] == before["step"] + 1 and row["stage"] == before["stage"]:
            found[int(row["step"])] = (int(row["stage"]), float(row["time"]) - float(before["time"]))
    return found


def _time(events: Sequence[Mapping[str, Any]], kind: str, run_uri: str) -> float:
    times = [float(event["time"]) for event in events if event["type"] == kind]
    if not times:
        raise UsageError(f"the short run tells no {kind}", where=run_uri)
    return times[0]


def _gpu_figures(system: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    found = {}
    for name in ("gpu_utilization", "gpu_memory"):
        values = [float(row[name]) for row in system if isinstance(row.get(name), int | float)]
        if values:
            found[name] = fmean(values)
    return found or None
