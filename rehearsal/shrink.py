"""A recipe made small enough for two CPU cores and a minute, and what was changed about it, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.core.recipe import LoadedRecipe, Recipe, parse_recipe
from isthmus.core.recipe.dump import recipe_data, yaml_text
from isthmus.rehearsal.shrink_model import pixels, small_model

STEPS = 24
"""Of all stages together, unless something shall happen later."""
AFTER = 8
"""Steps that follow the last strike at least."""
EVERY = 5
"""Steps between two checkpoints."""
TOKENS = 8
LANES = 4
BATCH = 8
MICRO = 4
_LEFT_OUT = {
    "trackers": "they would show a run that is none",
    "monitor": "its thresholds are for GPUs",
    "budget": "nothing is spent",
    "on_loss_spike": "the data are random",
    "validation.prompts": "no autoencoder draws them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the emulated cloud keeps things."""

    sources: tuple[str, ...]
    """URIs of the training datasets, in the recipe's order."""
    held_out: tuple[str, ...]
    runs: str
    settings: Mapping[str, Any]
    """The backend's section."""
    offer: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The small recipe."""

    loaded: LoadedRecipe
    changes: tuple[str, ...]
    """What was changed, a line each."""

    @property
    def recipe(self) -> Recipe:
        """As the launch takes it."""
        return self.loaded.recipe

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.total_steps for stage in self.recipe.stages)


def nodes_of(recipe: Recipe) -> int:
    """Nodes of the rehearsal: two where the recipe has several."""
    return min(2, recipe.compute.nodes)


def processes_of(recipe: Recipe) -> int:
    """Processes of a node: two ranks altogether where the recipe has more than one."""
    return 1 if nodes_of(recipe) > 1 else min(2, recipe.compute.gpus_per_node)


def shrink(recipe: Recipe, place: Place, *, steps: int = STEPS) -> Small:
    """The recipe with a small model, short stages, few machines, and the emulated cloud's places.

    Raises:
        UsageError: the model cannot be made small.
        RecipeError: the small recipe is not valid; that is a mistake of ours, and the message says which field.
    """
    data = recipe_data(recipe)
    smaller = pixels(recipe)
    changes: list[str] = []
    changes += _model(recipe, data, smaller)
    changes += _stages(recipe, data, smaller, steps)
    changes += _data(recipe, data, place)
    changes += _machines(recipe, data, place)
    changes += _rhythm(recipe, data, place, steps)
    text = yaml_text(data)
    return Small(loaded=parse_recipe(text, filename="the small recipe"), changes=tuple(changes))


def _model(recipe: Recipe, data: dict[str, Any], smaller: Mapping[int, int]) -> list[str]:
    cells = min(smaller.values()) // recipe.encoders.autoencoder.factor
    section = small_model(recipe, cells)
    if section is None:
        data["model"].pop("init_from", None)
        return ["a model of your own stays as it is"]
    data["model"] = section
    found = [f"model {recipe.model.preset or recipe.model.family} -> {recipe.model.family} of a few layers"]
    if recipe.model.init_from is not None:
        found.append("model.init_from left out: begun from random weights")
    return found


def _stages(recipe: Recipe, data: dict[str, Any], smaller: Mapping[int, int], steps: int) -> list[str]:
    count = len(recipe.stages)
    lengths = [steps // count + (index < steps % count) for index in range(count)]
    for stage, section, length in zip(recipe.stages, data["stages"], lengths, strict=True):
        section.pop("samples", None)
        section.pop("validation", None)
        section["steps"] = length
        section["resolution"] = smaller[stage.resolution]
        section["global_batch_size"], section["micro_batch_size"] = BATCH, MICRO
        if "lr_warmup_steps" in section:
            section["lr_warmup_steps"] = min(stage.lr_warmup_steps, 2, length - 1)
    before = " + ".join(f"{stage.total_steps:,} x {stage.global_batch_size:,}" for stage in recipe.stages)
    after = " + ".join(f"{length} x {BATCH}" for length in lengths)
    sizes = ", ".join(f"{old} -> {new} px" for old, new in smaller.items() if old != new)
    return [f"steps x samples {before} -> {after}", *([f"pictures {sizes}"] if sizes else [])]


def _data(recipe: Recipe, data: dict[str, Any], place: Place) -> list[str]:
    section = data["data"]
    for source, uri in zip(section["sources"], place.sources, strict=True):
        source["uri"] = uri
    section |= {"lanes": LANES, "shuffle_window": 16}
    for name in ("cache_limit", "cache_directory"):
        section.pop(name, None)
    for encoder in data["encoders"]["text"]:
        encoder["max_tokens"] = min(encoder["max_tokens"], TOKENS)
    return [f"data of {len(place.sources)} source(s) -> random latents; texts cut to {TOKENS} tokens"]


def _machines(recipe: Recipe, data: dict[str, Any], place: Place) -> list[str]:
    compute, before = data["compute"], recipe.compute
    compute |= {"gpu": "none", "nodes": nodes_of(recipe), "gpus_per_node": processes_of(recipe)}
    compute["offers"] = [dict(place.offer)]
    data["backends"] = {str(place.offer["backend"]): dict(place.settings)}
    data["run_directory"] = place.runs
    parallel = data.get("parallel", {})
    found = [
        f"machines {before.nodes} x {before.gpus_per_node} x {before.gpu} -> {nodes_of(recipe)} x"
        f" {processes_of(recipe)} processes on this machine's CPU"
    ]
    if parallel.get("strategy") == "hsdp":
        parallel["strategy"] = "fsdp"
        parallel.pop("shard_size", None)
        found.append("parallel.strategy hsdp -> fsdp, for want of nodes")
    if parallel.get("compile"):
        parallel["compile"] = False
        found.append("parallel.compile left out")
    return found


def _rhythm(recipe: Recipe, data: dict[str, Any], place: Place, steps: int) -> list[str]:
    checkpoint = data.setdefault("checkpoint", {})
    checkpoint.pop("keep_every", None)
    checkpoint |= {"every": f"{EVERY} steps", "keep": 3}
    left = [name for name in ("trackers", "monitor", "budget", "on_loss_spike") if data.pop(name, None)]
    validation = recipe.validation
    data.pop("validation", None)
    if validation.prompts:
        left.append("validation.prompts")
    if validation.loss_by_timestep:
        section: dict[str, Any] = {
            "loss_by_timestep": True, "every": f"{max(2, steps // 2)} steps", "samples": 8, "timestep_bins": 2,
        }  # fmt: skip
        if place.held_out:
            section["sources"] = [{"uri": uri} for uri in place.held_out]
        data["validation"] = section
    return [f"a checkpoint every {EVERY} steps", *(f"{name} left out: {_LEFT_OUT[name]}" for name in left)]


Tier = Literal["on_demand", "spot"]
