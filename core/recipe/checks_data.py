"""How the data is read: limits that contradict each other, and cache settings without a cache."""

from __future__ import annotations

from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.units import format_seconds


def check_data(recipe: Recipe) -> list[Problem]:
    """Problems of the `data` section that are not of batches and lanes."""
    data = recipe.data
    problems = []
    if data.access != "download":
        for field in ("cache_limit", "cache_directory"):
            if getattr(data, field) is not None:
                message = f"has no effect: only download keeps a cache; data.access is {data.access}"
                problems.append(Problem(("data", field), message, "leave it out"))
    elif data.cache_directory is not None and "://" in data.cache_directory:
        message = "is a folder of the node, not a URI"
        problems.append(Problem(("data", "cache_directory"), message, "such as /local/isthmus-cache"))
    pictures = data.pictures
    if pictures.licences and pictures.licence is None:
        message = "needs data.pictures.licence, the field that names a picture's licence"
        problems.append(Problem(("data", "pictures", "licences"), message, "such as `licence: license`"))
    budget, wait = format_seconds(data.retry_budget), format_seconds(data.wait_limit)
    if data.retry_budget >= data.wait_limit:
        message = (
            f"a failing read is tried again for {budget}, but a step waits no longer than data.wait_limit"
            f" {wait}: the wait would end before the read can say what is wrong"
        )
        hint = "lower it, or raise data.wait_limit"
        problems.append(Problem(("data", "retry_budget"), message, hint))
    return problems
