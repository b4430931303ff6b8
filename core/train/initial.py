"""`model.init_from`: a new run's weights, and where the recipe names none its configuration, from a diffusers checkpoint.

Read once, at the run's very start, by rank 0, which gives the weights to the others; a run that has a committed
checkpoint never looks there again. Averaged weights start as a copy, since they are made from the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.core.encode.pretrained import locate
from isthmus.core.models.families import resolved_config
from isthmus.core.models.presets import CLASSES, config_comes_with_weights
from isthmus.core.models.profiles import arguments
from isthmus.core.recipe.checks_model import check_model
from isthmus.core.recipe.checks_tokens import check_tokens
from isthmus.core.recipe.hub import FORM, is_hub
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.agreement import on_rank_0, rank, world_size
from isthmus.core.train.hub import fetch
from isthmus.errors import RecipeError, StorageError, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

RECORD = "model.json"
"""In the run directory: the configuration that came with the weights."""
_NO_WEIGHTS = frozenset({"sample_size", "interpolation_scale", "dropout"})
"""Arguments without weights: a run may go on at another size."""
_SHOWN = 4


def settled(recipe: Recipe, run: RunDirectory) -> Recipe:
    """The recipe with its model's configuration, where that comes with `init_from`; recorded in the run.

    To be entered by all ranks.

    Raises:
        UsageError: there is no such checkpoint, or it is of another family.
        RecipeError: what it holds does not fit the rest of the recipe.
    """
    if not config_comes_with_weights(recipe.model):
        return recipe

    def settle() -> dict[str, Any]:
        known = recorded(recipe, run)
        if known is not recipe:
            return dict(known.model.config)
        folder = _denoiser_folder(recipe)
        found = _config(folder, recipe) or {}
        taken = {
            name: value for name, value in found.items() if name in arguments(CLASSES[recipe.model.family])
        }
        if not taken:
            raise UsageError("has no config.json", where=folder, hint="give model.preset or model.config")
        complete = _with(recipe, taken)
        problems = [*check_model(complete), *check_tokens(complete)]
        if problems:
            raise RecipeError([problem.line(folder) for problem in problems])
        run.write_file(RECORD, json.dumps({"config": taken, "from": folder}, indent=1).encode())
        return taken

    return _with(recipe, on_rank_0(settle))


def recorded(recipe: Recipe, run: RunDirectory) -> Recipe:
    """The recipe with the configuration that the run recorded, if it did and the recipe has none; for reading a run."""
    if not config_comes_with_weights(recipe.model):
        return recipe
    data = run.read_file(RECORD)
    return recipe if data is None else _with(recipe, json.loads(data)["config"])


def start_weights(denoiser: nn.Module, recipe: Recipe, run: RunDirectory) -> None:
    """Give a denoiser that was just built the weights of `init_from`, unless the run has a committed checkpoint.

    To be entered by all ranks.

    Raises:
        UsageError: the checkpoint is no safetensors, or of another configuration, or its tensors differ.
    """
    if recipe.model.init_from is None or on_rank_0(lambda: bool(run.checkpoints())):
        return
    own = denoiser.state_dict()
    found: dict[str, Tensor] = {}
    on_rank_0(lambda: found.update(_read(recipe, denoiser, own)))
    # One broadcast a tensor from the CPU: however many ranks, the store is read once.
    with torch.no_grad():
        for name, weight in own.items():
            if rank() == 0:
                weight.copy_(found.pop(name))
            if world_size() > 1:
                dist.broadcast(weight, 0)
    if rank() == 0:
        print(f"weights of {len(own)} tensors from {recipe.model.init_from}", flush=True)


def _read(recipe: Recipe, denoiser: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    folder = _denoiser_folder(recipe)
    config = _config(folder, recipe)
    if config is not None:
        _same_config(recipe, folder, config, resolved_config(denoiser))
    where, _ = locate(folder)
    tensors = _tensors(Path(where))
    missing = [name for name in own if name not in tensors]
    unknown = [name for name in tensors if name not in own]
    differ = [
        f"{name} {list(tensor.shape)} instead of {list(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    parts = [
        f"{what}: {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in (("lacks", missing), ("does not know", unknown), ("shapes differ", differ))
        if names
    ]
    if parts:
        raise UsageError(
            f"is not this model: {'; '.join(parts)}", where=folder, hint="a checkpoint of the recipe's model"
        )
    return tensors


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors, mapped rather than read; without the variants (`fp16`) of a name."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    plain = [file for file in files if file.name.count(".") == 1]
    tensors: dict[str, Tensor] = {}
    for file in plain or files:
        try:
            tensors.update(load_file(file))
        except Exception as error:
            raise UsageError(f"cannot be read: {' '.join(str(error).split())}", where=str(file)) from error
    return tensors


def _denoiser_folder(recipe: Recipe) -> str:
    """URI of the denoiser's own folder: the one named, or of a pipeline its part."""
    place = recipe.model.init_from
    if not isinstance(place, str):
        raise UsageError("the recipe is not resolved for a backend", where="model.init_from")
    part = "unet" if recipe.model.family == "unet" else "transformer"
    if is_hub(place):
        place = fetch(place, part)
    if filesystems.is_local(place) and not filesystems.local_path(place).is_dir():
        raise UsageError(
            "no such folder",
            where=f"model.init_from {place}",
            hint=f"a folder or URI of a diffusers checkpoint, or {FORM}",
        )
    if _json(place, "model_index.json") is None:
        return place
    return filesystems.join(place, part)


def _config(folder: str, recipe: Recipe) -> dict[str, Any] | None:
    """config.json, after a look at its class; None where there is none (a team's own denoiser may have none)."""
    config = _json(folder, "config.json")
    class_name = CLASSES.get(recipe.model.family)
    if config is None:
        if class_name is None:
            return None
        raise UsageError("no config.json", where=folder, hint="a folder or URI of a diffusers checkpoint")
    if class_name is None:
        return None
    if config.get("family") == recipe.model.family and isinstance(config.get("config"), dict):
        return {**config["config"], "_class_name": class_name}  # our own export of a model with a patch mixer
    if config.get("_class_name") != class_name:
        raise UsageError(
            f"holds a {config.get('_class_name')}, model.family {recipe.model.family} is a {class_name}",
            where=folder,
        )
    return config


def _same_config(recipe: Recipe, folder: str, theirs: dict[str, Any], own: dict[str, Any]) -> None:
    known = arguments(CLASSES[recipe.model.family])
    complete = {**known, **{name: value for name, value in theirs.items() if name in known}}
    if recipe.model.family == "dit" and complete["use_additional_conditions"] is None:
        complete["use_additional_conditions"] = complete["sample_size"] == 128
    if complete.get("out_channels", 0) is None:
        complete["out_channels"] = own["out_channels"] = own["out_channels"] or own["in_channels"]
    apart = [
        f"{name} {_plain(complete[name])} there, {_plain(own[name])} here"
        for name in known
        if name not in _NO_WEIGHTS and _plain(complete[name]) != _plain(own.get(name))
    ]
    if theirs.get("patch_mixer") != own.get("patch_mixer"):
        apart.append(f"patch_mixer {theirs.get('patch_mixer')} there, {own.get('patch_mixer')} here")
    if apart:
        raise UsageError(
            f"is of another configuration: {'; '.join(apart)}",
            where=folder,
            hint="leave out model.preset and model.config to take its own",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _json(folder: str, name: str) -> dict[str, Any] | None:
    uri = filesystems.join(folder, name)
    files, path = filesystems.filesystem(uri)
    try:
        with filesystems.storage_errors("read", uri):
            loaded = json.loads(files.cat_file(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"not valid JSON: {error}", where=uri) from error
    if not isinstance(loaded, dict):
        raise StorageError("not a JSON object", where=uri)
    return loaded


def _with(recipe: Recipe, config: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})
