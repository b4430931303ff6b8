"""YAML text -> a checked :class:`Recipe`, or one :class:`RecipeError` that lists every problem with its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath

from isthmus.core.recipe.document import MAX_BYTES, Document, DocumentError, Path, parse
from isthmus.core.recipe.overrides import OverrideError, apply, split_override, split_path
from isthmus.core.recipe.problems import Problem, closest
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import RecipeError, UsageError

_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe and where its fields were written.

    Args:
        recipe: validated and checked.
        filename: as given to the loader.
        places: ``file:line``, or the override, of each field that was written.
    """

    recipe: Recipe
    filename: str
    places: dict[Path, str]

    def where(self, path: str | Path) -> str:
        """``file:line`` of a field path such as ``stages.0.steps``; of its section when it was not written."""
        try:
            parts = split_path(path) if isinstance(path, str) else path
        except OverrideError:
            parts = ()
        return _where(self.places, parts, self.filename)


def load_recipe(path: str | FilePath, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe from a file, or a shipped one by its name (``quickstart``).

    Args:
        path: a file, or a name that ``isthmus recipes list`` shows.
        overrides: such as ``stages.0.steps=500``.

    Raises:
        UsageError: there is no such file or recipe.
        RecipeError: lists all problems of the recipe.
    """
    filename, text = read_recipe(path)
    return parse_recipe(text, filename=filename, overrides=overrides)


def read_recipe(path: str | FilePath) -> tuple[str, str]:
    """Filename and text of a recipe file or of a shipped recipe. Raises UsageError."""
    name, file = str(path), FilePath(path)
    filename = name
    hint = "give a YAML file, or a name from `isthmus recipes list`"
    if not file.is_file() and name.replace("-", "").isalnum():
        shipped = shipped_recipes()
        guess = closest(name, shipped)
        if name in shipped:
            file, filename = shipped[name], f"{name}.yaml"
        else:
            hint = f"did you mean `{guess}`?" if guess else f"shipped recipes: {', '.join(shipped)}"
    try:
        with file.open("rb") as stream:
            raw = stream.read(4 * MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"no recipe {path}", hint=hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read recipe {path}: {reason}") from None
    try:
        return filename, raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{path}:{line}: not UTF-8 text"]) from None


def shipped_recipes() -> dict[str, FilePath]:
    """The recipes that come with the package: name -> file."""
    from isthmus import recipes

    folder = FilePath(str(recipes.__file__)).parent
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def parse_recipe(text: str, *, filename: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """A recipe from YAML text.

    Args:
        text: one YAML 1.2 document.
        filename: for error messages.
        overrides: such as ``stages.0.steps=500``; applied in order before validation.

    Raises:
        RecipeError: lists all problems, ``file:line: path.to.field: what is wrong (what is allowed)``.
    """
    from pydantic import ValidationError

    from isthmus.core.recipe.checks import check
    from isthmus.core.recipe.secrets import find_secrets, redact

    try:
        document = parse(text)
    except DocumentError as error:
        raise RecipeError([redact(f"{filename}:{error.line}: {error.message}")]) from None
    if not isinstance(document.data, dict):
        what = "is empty" if document.data is None else "must be a section with fields such as `name:`"
        raise RecipeError([f"{filename}:1: a recipe {what}"])
    places = {path: f"{filename}:{line}" for path, line in document.lines.items()}
    _override(document, places, overrides)
    problems = find_secrets(document.data)
    hidden = {problem.path for problem in problems}
    try:
        with _without_plugins():
            recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        from isthmus.core.recipe.explain import explain

        found = explain(error, Recipe, document.data)
        problems += [problem for problem in found if problem.path not in hidden]
    else:
        problems += check(recipe)
        if not problems:
            return LoadedRecipe(recipe, filename, places)
    raise RecipeError([redact(line) for line in _sorted_lines(problems, places, filename)])


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Pydantic looks for its plugins when it builds a validator, by opening the metadata of every package there is.

    That takes longer than reading a recipe, and a recipe's validator has no use for them.
    """
    with _ENVIRONMENT:  # all threads have the same one
        before = os.environ.get("PYDANTIC_DISABLE_PLUGINS")
        os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYDANTIC_DISABLE_PLUGINS"]
            else:
                os.environ["PYDANTIC_DISABLE_PLUGINS"] = before


def _override(document: Document, places: dict[Path, str], overrides: Sequence[str]) -> None:
    from isthmus.core.recipe.secrets import redact

    for override in overrides:
        # The value stays out of the place: it may be the secret that is being refused.
        place = f"--set {' '.join(override.partition('=')[0].split())[:200]}"
        try:
            path, value = split_override(override)
            apply(document.data, path, value)
        except OverrideError as error:
            raise RecipeError([redact(f"{place}: {error}")]) from None
        for stale in [known for known in places if known[: len(path)] == path]:
            del places[stale]
        for depth in range(1, len(path) + 1):
            places.setdefault(path[:depth], place)


def _where(places: dict[Path, str], path: Path, filename: str) -> str:
    for depth in range(len(path), 0, -1):
        if path[:depth] in places:
            return places[path[:depth]]
    return f"{filename}:1"


def _sorted_lines(problems: list[Problem], places: dict[Path, str], filename: str) -> list[str]:
    """In the order of the file, so that a reader can mend from top to bottom."""

    def order(problem: Problem) -> tuple[str, int]:
        file, _, line = _where(places, problem.path, filename).rpartition(":")
        return (file, int(line)) if line.isdigit() and file == filename else ("\uffff", 0)

    ordered = sorted(problems, key=order)
    return list(dict.fromkeys(problem.line(_where(places, problem.path, filename)) for problem in ordered))


__all__ = ["LoadedRecipe", "load_recipe", "parse_recipe", "read_recipe", "shipped_recipes"]
