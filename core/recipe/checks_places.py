"""Backends that are named in several sections: places, offers, settings."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Place, Recipe, RunPlace

BUILT_IN = ("azure", "sagemaker", "local")


def check_places(recipe: Recipe) -> list[Problem]:
    """Misspelt backends, empty places, and offers of a backend that the data or the run directory has no place for."""
    problems = []
    places = [*_places(recipe)]
    named: list[tuple[Path, str]] = [(("backends", name), name) for name in recipe.backends]
    for path, place in places:
        if isinstance(place, dict):
            named += [((*path, name), name) for name in place]
            if not place:
                problems.append(Problem(path, "names no backend"))
    for index, offer in enumerate(recipe.compute.offers):
        path = ("compute", "offers", index, "backend")
        named.append((path, offer.backend))
        lacking = [where for where, place in places if isinstance(place, dict) and offer.backend not in place]
        if lacking:
            from isthmus.core.recipe.problems import dotted

            message = f"{offer.backend} has no place in {', '.join(dotted(where) for where in lacking)}"
            problems.append(Problem(path, message))
        if offer in recipe.compute.offers[:index]:
            problems.append(Problem(path[:-1], "is the same as an offer before it", "leave it out"))
    for path, name in named:
        guess = _misspelt(name)
        if guess:
            problems.append(Problem(path, f"`{name[:60]}` is not a backend", f"did you mean `{guess}`?"))
    return problems


def _places(recipe: Recipe) -> Iterator[tuple[Path, Place | RunPlace]]:
    for index, source in enumerate(recipe.data.sources if recipe.encode is None else ()):
        yield ("data", "sources", index, "uri"), source.uri
    for index, source in enumerate(recipe.validation.sources):
        yield ("validation", "sources", index, "uri"), source.uri
    yield ("run_directory",), recipe.run_directory
    if recipe.encode is not None:
        yield ("encode", "source"), recipe.encode.source
        yield ("encode", "dest"), recipe.encode.dest
    if recipe.model.init_from is not None:
        yield ("model", "init_from"), recipe.model.init_from


def _misspelt(name: str) -> str | None:
    """The built-in backend that was meant. Other names may be a plugin's, which a recipe cannot know."""
    if name in BUILT_IN:
        return None
    from difflib import get_close_matches

    matches = get_close_matches(name[:100].lower(), BUILT_IN, n=1, cutoff=0.85)
    return matches[0] if matches else None
