"""``isthmus recipes check``, apart from the command group: editors and hooks run it at every save.

Typer costs as much time as reading the recipe, so a plain command line is read here; whatever is not plain
(help, a missing argument, an unknown option) goes through typer, which explains it. Both call :func:`check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.recipe import LoadedRecipe


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
    with _quick_start():
        _check(request)


def _check(request: Request) -> None:
    from isthmus.cli.output import emit
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.recipe.summary import summary, summary_text

    loaded = load_recipe(request.recipe or "", request.overrides)
    _check_sections(loaded)
    if request.backend:
        resolve(loaded.recipe, request.backend)
    found = summary(loaded.recipe)
    emit(found, as_json=request.as_json, text=lambda: f"{loaded.filename}: ok\n{summary_text(found)}")


def _check_sections(loaded: LoadedRecipe) -> None:
    """Each backend's section by the backend's own model."""
    if not loaded.recipe.backends:
        return
    from isthmus.backends.prepare import backend_settings
    from isthmus.backends.registry import get_backend

    for name in loaded.recipe.backends:
        backend_settings(get_backend(name), loaded)


@contextmanager
def _quick_start() -> Iterator[None]:
    """Two things a process that ends within a tenth of a second can do without, a fifth of its time together.

    Garbage collection, which imports set off again and again; and importlib.metadata with the email package behind
    it, which pydantic imports to look for plugins that the recipe's validator is built without.
    """
    import gc
    import sys

    name = "importlib.metadata"
    stand_in = None if name in sys.modules else _StandIn(name)
    if stand_in is not None:
        sys.modules[name] = stand_in
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


class _StandIn(ModuleType):
    """importlib.metadata, imported when something of it is used: ``entry_points`` when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name == "entry_points":
            return lambda **chosen: self._real().entry_points(**chosen)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        import sys
        from importlib import import_module

        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)
