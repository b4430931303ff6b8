"""The recipe: one YAML file with everything about a training run. Imports pydantic and YAML only."""

from isthmus.core.recipe.load import LoadedRecipe, load_recipe, parse_recipe
from isthmus.core.recipe.resolving import resolve
from isthmus.core.recipe.schema import Recipe

__all__ = ["LoadedRecipe", "Recipe", "load_recipe", "parse_recipe", "resolve"]
