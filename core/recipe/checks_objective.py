"""The objective of each stage, and the optimizer: settings that contradict each other, or that another's choice leaves unused."""

from __future__ import annotations

from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Objective

_ONLY_WITH = {
    "logit_mean": ("timestep_sampling", ("logit_normal",)),
    "logit_std": ("timestep_sampling", ("logit_normal",)),
    "mode_scale": ("timestep_sampling", ("mode",)),
    "snr_gamma": ("weighting_scheme", ("min_snr", "soft_min_snr")),
    "p2_gamma": ("weighting_scheme", ("p2",)),
    "shift": ("prediction_type", ("flow",)),
    "noise_schedule": ("prediction_type", ("epsilon", "v_prediction")),
}
"""Fields that mean something under certain values of another."""

_NOISE = ("epsilon", "v_prediction")
WEIGHTS_OF = {
    "min_snr": _NOISE,
    "soft_min_snr": _NOISE,
    "p2": _NOISE,
    "cosmap": ("flow",),
    "sigma_sqrt": ("flow",),
}
"""Weighting scheme -> prediction types that it is defined for; a scheme that is absent fits all."""


def check_objectives(recipe: Recipe) -> list[Problem]:
    """Problems of `objective`, of the stages' changes to it, and of the scheduler that has to invert them."""
    problems = []
    objectives = [stage.objective.over(recipe.objective) for stage in recipe.stages]
    for field in sorted(recipe.objective.model_fields_set):
        if not any(_means(field, objective) for objective in objectives):
            problems.append(_unused(("objective", field), field, objectives[0]))
    for index, (stage, objective) in enumerate(zip(recipe.stages, objectives, strict=True)):
        path: Path = ("stages", index, "objective")
        changes = {
            field for field in stage.objective.model_fields_set if getattr(stage.objective, field) is not None
        }
        problems += [_unused((*path, field), field, objective) for field in sorted(changes) if not _means(field, objective)]  # fmt: skip
        kinds = WEIGHTS_OF.get(objective.weighting_scheme)
        if kinds and objective.prediction_type not in kinds:
            at = (*path, "weighting_scheme") if changes & {"weighting_scheme", "prediction_type"} else ("objective", "weighting_scheme")  # fmt: skip
            message = f"{objective.weighting_scheme} is defined for {' and '.join(kinds)}, not for {objective.prediction_type}"
            problems.append(Problem(at, message, "none, or another prediction_type"))
        if (
            "shift" not in changes
            and objective.prediction_type != "flow"
            and objective.shift != 1
            and any(other.prediction_type == "flow" for other in objectives)
        ):
            message = f"inherits objective.shift {_shown(objective.shift)}, which only flow has"
            problems.append(Problem(path, message, "set shift in the stages that use flow"))
        problems += _scheduler(recipe, objective)
    if recipe.optimizer.name != "muon" and "momentum" in recipe.optimizer.model_fields_set:
        message = f"is of name muon; it is {recipe.optimizer.name}"
        problems.append(Problem(("optimizer", "momentum"), message, "leave it out"))
    # The same mistake, seen in several stages, is one problem.
    return list(dict.fromkeys(problems))


def _shown(shift: float | str) -> str:
    return shift if isinstance(shift, str) else f"{shift:g}"


def _means(field: str, objective: Objective) -> bool:
    if field not in _ONLY_WITH:
        return True
    other, values = _ONLY_WITH[field]
    return getattr(objective, other) in values


def _unused(path: Path, field: str, objective: Objective) -> Problem:
    other, values = _ONLY_WITH[field]
    message = f"is of {other} {' and '.join(values)}; it is {getattr(objective, other)}"
    return Problem(path, message, "leave it out")


def _scheduler(recipe: Recipe, objective: Objective) -> list[Problem]:
    scheduler, kind = recipe.validation.scheduler, objective.prediction_type
    if scheduler == "auto" or (scheduler == "flow_match_euler") == (kind == "flow"):
        return []
    fits = "auto or flow_match_euler" if kind == "flow" else "auto, ddim, euler or dpmsolver"
    return [Problem(("validation", "scheduler"), f"{scheduler} cannot sample prediction_type {kind}", fits)]
