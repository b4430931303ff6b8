"""Places that only a container's command line can tell: `place:NAME` in a job's recipe, as Azure ML's mounts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.core.recipe.schema import Recipe, Source
from isthmus.errors import UsageError

PREFIX = "place:"


def parse_places(options: Sequence[str]) -> dict[str, str]:
    """NAME -> PATH, of `NAME=PATH` each. Raises UsageError."""
    places: dict[str, str] = {}
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not name or not path:
            raise UsageError(f"{option!r} is not NAME=PATH", where="--place")
        if name in places:
            raise UsageError(f"{name} is given twice", where="--place")
        places[name] = path
    return places


def with_places(recipe: Recipe, places: Mapping[str, str]) -> Recipe:
    """The recipe with paths for the `place:NAME` and `place:NAME/below/it` of its data, held-out data, `init_from` and
    source of pictures.

    Raises:
        UsageError: a place has no path, or a path no place.
    """
    used: set[str] = set()

    def path_of(uri: str, field: str) -> str:
        if not uri.startswith(PREFIX):
            return uri
        name, separator, rest = uri.removeprefix(PREFIX).partition("/")
        if name not in places:
            raise UsageError(f"{uri} has no path", where=field, hint=f"--place {name}=PATH")
        used.add(name)
        return places[name].rstrip("/") + separator + rest if rest else places[name]

    def sources(listed: Sequence[Source], field: str) -> list[Source]:
        found = []
        for number, source in enumerate(listed):
            where = f"{field}.{number}.uri"
            uri: Any = source.uri
            if isinstance(uri, str):
                uri = path_of(uri, where)
            elif isinstance(uri, list):
                uri = [path_of(one, where) for one in uri]
            found.append(source.model_copy(update={"uri": uri}))
        return found

    data = recipe.data.model_copy(update={"sources": sources(recipe.data.sources, "data.sources")})
    update: dict[str, Any] = {"data": data}
    if recipe.validation.sources:
        held_out = sources(recipe.validation.sources, "validation.sources")
        update["validation"] = recipe.validation.model_copy(update={"sources": held_out})
    if isinstance(recipe.model.init_from, str):
        start = path_of(recipe.model.init_from, "model.init_from")
        update["model"] = recipe.model.model_copy(update={"init_from": start})
    if recipe.encode is not None and isinstance(recipe.encode.source, str):
        pictures = path_of(recipe.encode.source, "encode.source")
        update["encode"] = recipe.encode.model_copy(update={"source": pictures})
    unused = sorted(set(places) - used)
    if unused:
        raise UsageError(f"the recipe has no {PREFIX}{unused[0]}", where=f"--place {unused[0]}")
    return recipe.model_copy(update=update)
