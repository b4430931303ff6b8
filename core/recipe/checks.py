"""Checks that need more than one field."""

from __future__ import annotations

from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe


def check(recipe: Recipe) -> list[Problem]:
    """All problems of a recipe whose fields are valid one by one."""
    return []
