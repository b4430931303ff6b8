"""Watchdog, loss spikes and trackers: limits that contradict each other, and settings without effect."""

from __future__ import annotations

from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.units import format_seconds


def check_alive(recipe: Recipe) -> list[Problem]:
    """Problems of `watchdog`, `on_loss_spike` and `trackers`."""
    return [*_limits(recipe), *_spikes(recipe), *_trackers(recipe)]


def _limits(recipe: Recipe) -> list[Problem]:
    watchdog, wait = recipe.watchdog, recipe.data.wait_limit
    limit = watchdog.limit_s(wait)
    timeout = watchdog.collective_timeout_s(wait)
    problems = []
    if limit <= wait:
        message = (
            f"{format_seconds(limit)} is not above data.wait_limit {format_seconds(wait)}: a rank that waits for "
            "data would be ended before its loader can say what it waits for"
        )
        hint = "leave it out, raise it, or lower data.wait_limit"
        problems.append(Problem(("watchdog", "limit"), message, hint))
    if timeout <= limit:
        message = (
            f"{format_seconds(timeout)} is not above watchdog.limit {format_seconds(limit)}: ranks would give each "
            "other up before the watchdog can say which one is late"
        )
        problems.append(Problem(("watchdog", "collective_timeout"), message, "leave it out, or raise it"))
    if recipe.compute.nodes * recipe.compute.gpus_per_node == 1:
        for field in ("straggler_factor", "straggler_for", "collective_timeout"):
            if field in watchdog.model_fields_set:
                message = "has no effect: there is one rank"
                problems.append(Problem(("watchdog", field), message, "leave it out"))
    return problems


def _spikes(recipe: Recipe) -> list[Problem]:
    spike = recipe.on_loss_spike
    if spike is None or spike.action == "rewind":
        return []
    message = "is of rewind; on_loss_spike.action is alarm"
    return [
        Problem(("on_loss_spike", field), message, "leave it out")
        for field in ("skip", "max_rewinds")
        if field in spike.model_fields_set
    ]


def _trackers(recipe: Recipe) -> list[Problem]:
    problems = []
    names: list[str] = []
    for index, tracker in enumerate(recipe.trackers):
        if tracker.name in names:
            problems.append(Problem(("trackers", index), f"{tracker.name} is named twice", "leave one out"))
        names.append(tracker.name)
        if tracker.name == "tensorboard" and tracker.project is not None:
            message = "has no effect: tensorboard writes into the run directory"
            problems.append(Problem(("trackers", index, "project"), message, "leave it out"))
    return problems
