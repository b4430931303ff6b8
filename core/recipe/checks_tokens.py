"""Fields about a transformer's image tokens: where their positions lie, how many are left out, what they pass before."""

from __future__ import annotations

from typing import Any

from isthmus.core.models.presets import CLASSES, MASKABLE, config_comes_with_weights, model_config
from isthmus.core.models.profiles import arguments
from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe

_NO_SCALE = {
    "unet": "a unet has no positional embedding",
    "mmdit": "SD3 crops a fixed table around its centre, it does not scale it",
    "flux": "Flux counts tokens (rotary positions), it has no scale",
    "sana": "this sana has no positional embedding: its config has no interpolation_scale",
}
_NO_MASK = {
    "unet": "a unet convolves over the whole grid, it has no tokens to leave out",
    "sana": "Sana's blocks convolve over the whole grid, no token can be left out",
}


def check_tokens(recipe: Recipe) -> list[Problem]:
    """Refuses `pos_embed_interpolation`, `token_mask_ratio` and `patch_mixer` where the family cannot do it, with the reason."""
    family = recipe.model.family
    problems = _mixer(recipe)
    for index, stage in enumerate(recipe.stages):
        path: Path = ("stages", index)
        if stage.pos_embed_interpolation is not None and not _scalable(recipe):
            message = _NO_SCALE.get(family, "is of isthmus's families; a team's own says in its config")
            problems.append(Problem((*path, "pos_embed_interpolation"), message, "leave it out"))
        if stage.token_mask_ratio == 0:
            continue
        if family not in MASKABLE:
            message = _NO_MASK.get(
                family, "is of isthmus's families; a team's own leaves tokens out by itself"
            )
            problems.append(Problem((*path, "token_mask_ratio"), message, "leave it out"))
        elif stage.token_mask_ratio == 1:
            message = "1 leaves no token to train on"
            problems.append(Problem((*path, "token_mask_ratio"), message, "such as 0.5 or 0.75"))
    return problems


def _mixer(recipe: Recipe) -> list[Problem]:
    family, mixer, path = recipe.model.family, recipe.model.patch_mixer, ("model", "patch_mixer")
    if mixer is None:
        return []
    if family not in MASKABLE:
        message = _NO_MASK.get(family, "is of isthmus's families; a team's own has one by itself")
        return [Problem(path, message, "leave it out")]
    problems = []
    if mixer.width % mixer.head_width:
        message = f"{mixer.head_width} does not divide width {mixer.width}"
        problems.append(Problem((*path, "head_width"), message, "such as 64"))
    if family == "flux" and mixer.width % 4:
        message = f"{mixer.width} is not a multiple of 4, the sinusoids of a row and of a column"
        problems.append(Problem((*path, "width"), message, "such as 768"))
    return problems


def _scalable(recipe: Recipe) -> bool:
    model = recipe.model
    if model.family == "dit":
        return True
    if model.family != "sana":
        return False
    if config_comes_with_weights(model):
        return True  # known when the configuration has been read
    config: dict[str, Any] = {**arguments(CLASSES["sana"]), **model_config(model)[1]}
    return config["interpolation_scale"] is not None
