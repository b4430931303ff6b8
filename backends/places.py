"""The places that a recipe names, on this machine; and what differs between two recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.core.recipe import Recipe, parse_recipe
from isthmus.core.recipe.dump import recipe_data
from isthmus.core.recipe.hub import is_hub
from isthmus.core.recipe.schema import Encoders
from isthmus.storage import filesystems


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """A resolved recipe whose paths on this machine hold in any working directory."""

    def absolute(uri: str) -> str:
        return str(filesystems.local_path(uri)) if filesystems.is_local(uri) else uri

    def sources(listed: Sequence[Any]) -> list[Any]:
        return [
            source.model_copy(update={"uri": [absolute(uri) for uri in uris(source)]}) for source in listed
        ]

    assert isinstance(recipe.run_directory, str)
    update: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"sources": sources(recipe.data.sources)}),
        "run_directory": absolute(recipe.run_directory),
    }
    if isinstance(recipe.model.init_from, str) and not is_hub(recipe.model.init_from):
        update["model"] = recipe.model.model_copy(update={"init_from": absolute(recipe.model.init_from)})
    if recipe.validation.sources:
        held_out = sources(recipe.validation.sources)
        update["validation"] = recipe.validation.model_copy(update={"sources": held_out})
    if recipe.encode is not None:
        section = recipe.encode
        assert isinstance(section.source, str)
        assert isinstance(section.dest, str)
        # `emoji` is the quickstart's own source, not a folder.
        source = section.source if section.source == "emoji" else absolute(section.source)
        update["encode"] = section.model_copy(update={"source": source, "dest": absolute(section.dest)})
        update["encoders"] = _with_absolute_models(recipe.encoders)
    return recipe.model_copy(update=update)


def _with_absolute_models(encoders: Encoders) -> Encoders:
    """Encoders whose model folders are found from anywhere; hub names stay."""

    def absolute(source: str) -> str:
        there = filesystems.is_local(source) and filesystems.local_path(source).is_dir()
        return str(filesystems.local_path(source)) if there else source

    autoencoder = encoders.autoencoder
    if autoencoder.kind != "patch_pca":  # whose folder is beside the shards
        autoencoder = autoencoder.model_copy(update={"source": absolute(autoencoder.source)})
    text = [one.model_copy(update={"source": absolute(one.source)}) for one in encoders.text]
    return encoders.model_copy(update={"autoencoder": autoencoder, "text": text})


def with_paths_of(recipe: Recipe, resolved_text: str) -> Recipe:
    """The recipe with the data and run directory of the one that the run was resolved to."""
    old = parse_recipe(resolved_text, filename="recipe.yaml").recipe
    update: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"sources": old.data.sources}),
        "run_directory": old.run_directory,
        "model": recipe.model.model_copy(update={"init_from": old.model.init_from}),
    }
    if old.encode is not None:
        update |= {"encode": old.encode, "encoders": old.encoders}
    if recipe.validation.sources:
        # Held-out data may change on a resume; the training data may not.
        same = len(old.validation.sources) == len(recipe.validation.sources)
        sources = old.validation.sources if same else with_absolute_paths(recipe).validation.sources
        update["validation"] = recipe.validation.model_copy(update={"sources": sources})
    return recipe.model_copy(update=update)


def uris(source: Any) -> list[str]:
    """The roots of a source, one or several."""
    return [source.uri] if isinstance(source.uri, str) else list(source.uri)


def recipe_changes(before: Recipe, now: Recipe) -> dict[str, list[Any]]:
    """Dotted field -> [before, now], for each field that differs; an absent one is None."""
    old, new = _flat(recipe_data(before)), _flat(recipe_data(now))
    return {
        path: [old.get(path), new.get(path)]
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    }


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found.update(_flat(inner, f"{path}.{key}" if path else str(key)))
    return found
