"""A denoiser of a few thousand parameters in place of a recipe's own, fed with the same latents and text. Pure; no torch."""

from __future__ import annotations

from typing import Any

from isthmus.core.models.presets import CLASSES, config_comes_with_weights, model_config
from isthmus.core.models.profiles import arguments, downsampling
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import UsageError

_HEADS, _HEAD = 2, 16
_WIDTH = _HEADS * _HEAD
_TRANSFORMER = {"num_layers": 2, "num_attention_heads": _HEADS, "attention_head_dim": _HEAD}
_FAMILIES: dict[str, dict[str, Any]] = {
    "dit": {**_TRANSFORMER, "cross_attention_dim": _WIDTH},
    "mmdit": {**_TRANSFORMER, "caption_projection_dim": _WIDTH},
    "sana": {
        **_TRANSFORMER, "num_cross_attention_heads": _HEADS, "cross_attention_head_dim": _HEAD,
        "cross_attention_dim": _WIDTH,
    },
    "flux": {**_TRANSFORMER, "num_layers": 1, "num_single_layers": 2, "axes_dims_rope": [4, 6, 6]},
}  # fmt: skip
"""What is changed of a transformer; what it is fed with (latent channels, text widths, patches) stays."""
_MIXER = {"width": _WIDTH, "head_width": _HEAD, "mlp_ratio": 2.0}
_WIDTHS = (16, 32, 32, 32, 32, 32, 32, 32)
"""Channels of a UNet's blocks."""


def small_model(recipe: Recipe, cells: int) -> dict[str, Any] | None:
    """The `model` section of the small recipe; None where the model is a team's own, which nobody else can shrink.

    Args:
        cells: latent cells along a side of the smallest stage.

    Raises:
        UsageError: the configuration comes with weights that are not read here.
    """
    model = recipe.model
    if model.family not in CLASSES:
        return None
    if config_comes_with_weights(model):
        raise UsageError(
            "the model's configuration comes with its weights, so a rehearsal cannot make it small",
            where="model.init_from",
            hint="name model.preset or model.config, too",
        )
    class_name, config = model_config(model)
    full = {**arguments(class_name), **config}
    small = {**config, **_changes(model.family, full)}
    if full.get("sample_size"):
        small["sample_size"] = cells
    section: dict[str, Any] = {"family": model.family, "config": small}
    if model.patch_mixer is not None:
        section["patch_mixer"] = {"layers": min(2, model.patch_mixer.layers), **_MIXER}
    if "guidance_embedding" in model.model_fields_set:
        section["guidance_embedding"] = model.guidance_embedding
    return section


def _changes(family: str, full: dict[str, Any]) -> dict[str, Any]:
    if family == "unet":
        blocks = len(full["block_out_channels"])
        changed = {
            "block_out_channels": list(_WIDTHS[:blocks]),
            "layers_per_block": 1,
            "transformer_layers_per_block": 1,
            "attention_head_dim": 8,
            "norm_num_groups": 8,
        }
        return changed if full["num_attention_heads"] is None else {**changed, "num_attention_heads": None}
    changed = dict(_FAMILIES[family])
    if family == "dit" and full["caption_channels"] is None:
        del changed["cross_attention_dim"]  # what text comes in as
    if full.get("dual_attention_layers"):
        changed["dual_attention_layers"] = [0]
    return changed


def pixels(recipe: Recipe) -> dict[int, int]:
    """Resolution of a stage -> the small one in its place: multiples that the model takes, each twice the one before."""
    factor = recipe.encoders.autoencoder.factor
    family = recipe.model.family
    wanted = sorted({stage.resolution for stage in recipe.stages})
    if family not in CLASSES:
        return {before: before for before in wanted}  # what it takes, only its own code knows
    class_name, config = model_config(recipe.model)
    multiple = factor * downsampling(family, {**arguments(class_name), **config})
    least = multiple * (2 if family == "unet" else 4)
    return {before: min(before, least << index) for index, before in enumerate(wanted)}
