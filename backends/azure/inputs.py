"""Data as job inputs, and the recipe as the job reads it: mounts and downloads are known only in the container's command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.backends.azure.places import blob_of
from isthmus.core.recipe.encoding import Encode
from isthmus.core.recipe.hub import is_hub
from isthmus.core.recipe.schema import Recipe, Source
from isthmus.errors import UsageError

PAYLOAD = "isthmus"
"""The input with the job's own files."""
_MODES = {"mount": "ReadOnlyMount", "download": "Download"}


@dataclass(frozen=True, slots=True)
class DataInputs:
    """What `data.access` makes of a recipe's places."""

    recipe: Recipe
    """With `place:NAME` where the job gets a path."""
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name -> REST job input; empty for `stream`, which reads the store itself."""


def uri_folder(uri: str, mode: str) -> dict[str, str]:
    """A REST job input."""
    return {"jobInputType": "uri_folder", "mode": mode, "uri": uri}


def data_inputs(recipe: Recipe, default_account: str | None) -> DataInputs:
    """One input for each root of each source, `data0`, `data1` ...; held-out ones are `val0` ..., first weights `init`.

    Args:
        recipe: resolved for Azure.
        default_account: of `az://container/path`.

    Raises:
        UsageError: a place that Azure ML cannot mount.
    """
    if recipe.encode is not None:
        return _pictures(recipe, recipe.encode, default_account)
    mode = _MODES.get(recipe.data.access)
    if mode is None:
        return DataInputs(recipe)
    inputs: dict[str, dict[str, str]] = {}

    def sources(prefix: str, listed: Sequence[Source], where: str) -> list[Source]:
        count, made = 0, []
        for number, source in enumerate(listed):
            uris = [source.uri] if isinstance(source.uri, str) else list(source.uri)
            places = []
            for uri in uris:
                name = f"{prefix}{count}"
                inputs[name] = uri_folder(
                    mountable(uri, default_account, f"{where}.sources[{number}].uri"), mode
                )
                places.append(f"place:{name}")
                count += 1
            made.append(source.model_copy(update={"uri": places}))
        return made

    # The data lies on a path of the node now, by a mount or because it was downloaded before the start; what else the
    # recipe says of a cache of its own has no meaning there.
    data: dict[str, Any] = {
        "sources": sources("data", recipe.data.sources, "data"),
        "access": "mount",
        "cache_limit": None,
        "cache_directory": None,
    }
    changed: dict[str, Any] = {"data": _without_unset(recipe.data, data)}
    if recipe.validation.sources:
        held_out = sources("val", recipe.validation.sources, "validation")
        changed["validation"] = recipe.validation.model_copy(update={"sources": held_out})
    weights = recipe.model.init_from
    if isinstance(weights, str) and "://" in weights and not is_hub(weights):
        inputs["init"] = uri_folder(mountable(weights, default_account, "model.init_from"), mode)
        changed["model"] = recipe.model.model_copy(update={"init_from": "place:init"})
    return DataInputs(recipe.model_copy(update=changed), inputs)


def _pictures(recipe: Recipe, section: Encode, default_account: str | None) -> DataInputs:
    """An encode job's source as an input, and the recipe that reads it there under the names of where it is from."""
    mode, uri = _MODES.get(section.access), str(section.source)
    if mode is None or blob_of(uri, default_account) is None:  # or the lint refuses it
        return DataInputs(recipe)
    made = uri_folder(mountable(uri, default_account, "encode.source"), mode)
    moved = section.model_copy(update={"source": "place:source", "origin": uri})
    return DataInputs(recipe.model_copy(update={"encode": moved}), {"source": made})


def _without_unset(section: Any, update: dict[str, Any]) -> Any:
    """The section with these values; one that is None is as if it had never been written."""
    kept = {name: value for name, value in update.items() if value is not None}
    made = section.model_copy(update=update)
    made.model_fields_set.difference_update(set(update) - set(kept))
    return made


def mountable(uri: str, default_account: str | None, where: str) -> str:
    """The URI of a `uri_folder` input: https of a blob folder, or Azure ML's own `azureml://datastores/...`.

    Raises:
        UsageError: nothing that Azure ML mounts; among these is wasbs://, which the SDK turns into `azureml:wasbs://`.
    """
    if uri.startswith("azureml://"):
        return uri
    blob = blob_of(uri, default_account)
    if blob is None:
        raise UsageError(
            f"Azure ML cannot mount {uri}",
            where=where,
            hint="az://CONTAINER@ACCOUNT.blob.core.windows.net/PATH; data of another store: data.access: stream",
        )
    return blob.https
