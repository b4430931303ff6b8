"""``isthmus recipes check``, apart from the command group: editors and hooks run it at every save.

Typer costs as much time as reading the recipe, so a plain command line is read here; whatever is not plain
(help, a missing argument, an unknown option) goes through typer, which explains it. Both call :func:`check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Request:
    """The arguments of one ``isthmus recipes check``."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    backend: str = ""
    as_json: bool = False


def plain_request(arguments: Sequence[str]) -> Request | None:
    """The request of a plain ``recipes check ...`` command line; None when it is anything else."""
    if list(arguments[:2]) != ["recipes", "check"]:
        return None
    request = Request()
    rest = iter(arguments[2:])
    for argument in rest:
        name, equals, attached = argument.partition("=")
        if argument == "--json":
            request.as_json = True
        elif name in ("--set", "--backend"):
            value = attached if equals else next(rest, "-")
            if value.startswith("-"):
                return None
            if name == "--set":
                request.overrides.append(value)
            else:
                request.backend = value
        elif argument.startswith("-") or request.recipe is not None:
            return None
        else:
            request.recipe = argument
    return request if request.recipe else None


def check(request: Request) -> None:
    """Check a recipe and print what it amounts to. Raises RecipeError with all of its problems."""
    from isthmus.cli.output import emit
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.recipe.summary import summary, summary_text

    loaded = load_recipe(request.recipe or "", request.overrides)
    if request.backend:
        resolve(loaded.recipe, request.backend)
    found = summary(loaded.recipe)
    emit(found, as_json=request.as_json, text=lambda: f"{loaded.filename}: ok\n{summary_text(found)}")
