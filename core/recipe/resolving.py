"""A recipe for one backend: every place becomes that backend's own."""

from __future__ import annotations

from isthmus.core.recipe.encoding import for_encoding
from isthmus.core.recipe.problems import Problem, closest
from isthmus.core.recipe.schema import Place, Recipe, RunPlace, Source
from isthmus.errors import RecipeError


def resolve(recipe: Recipe, backend: str) -> Recipe:
    """The recipe with the places of one backend: sources become ``list[str]``, run_directory ``str``.

    Of an encoding's recipe what its job does not need is left out.

    Idempotent. Raises RecipeError when a place is given for each backend and has no entry for this one.
    """
    problems: list[Problem] = []
    recipe = for_encoding(recipe)

    def pick(place: Place | RunPlace, path: tuple[str | int, ...]) -> list[str]:
        if isinstance(place, dict):
            if backend not in place:
                guess = closest(backend, place)
                hint = f"did you mean `{guess}`?" if guess else f"it has {', '.join(place)}"
                problems.append(Problem((*path, backend), f"no place for backend {backend}", hint))
                return []
            chosen: str | list[str] = place[backend]
        else:
            chosen = place
        return [chosen] if isinstance(chosen, str) else list(chosen)

    def sources(section: str, listed: list[Source]) -> list[Source]:
        return [
            source.model_copy(update={"uri": pick(source.uri, (section, "sources", index, "uri"))})
            for index, source in enumerate(listed)
        ]

    update: dict[str, object] = {
        "data": recipe.data.model_copy(update={"sources": sources("data", recipe.data.sources)})
    }
    if recipe.validation.sources:
        held_out = sources("validation", recipe.validation.sources)
        update["validation"] = recipe.validation.model_copy(update={"sources": held_out})
    if recipe.model.init_from is not None:
        weights = pick(recipe.model.init_from, ("model", "init_from"))
        update["model"] = recipe.model.model_copy(update={"init_from": weights[0] if weights else None})
    if recipe.encode is not None:
        chosen = {name: pick(getattr(recipe.encode, name), ("encode", name)) for name in ("source", "dest")}
        update["encode"] = recipe.encode.model_copy(
            update={name: uris[0] for name, uris in chosen.items() if uris}
        )
    runs = pick(recipe.run_directory, ("run_directory",))
    if runs:
        update["run_directory"] = runs[0]
    if problems:
        raise RecipeError([problem.line(f"recipe {recipe.name}") for problem in problems])
    return recipe.model_copy(update=update)
