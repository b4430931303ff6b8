"""What a launcher must know of a denoiser without torch: parameters, FLOPs, memory, patching.

The figures are in ``profiles.json``, made by ``python -m isthmus.core.models.generate_profiles`` from the real
classes on the meta device; a configuration that is not there is measured in a subprocess that needs ``[train]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.core.models.presets import CLASSES, config_comes_with_weights, model_config
from isthmus.errors import NotInstalled, UsageError

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Model

FILE = Path(__file__).with_name("profiles.json")
"""The stored profiles and the arguments of the diffusers classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Figures of one configuration. FLOPs count a multiply-add as two; memory is of one image, without weights.

    Args:
        class_name: of diffusers.
        config: the arguments that the figures were taken with.
        parameters: of the denoiser.
        patch_size: latent cells along one side of a token; 1 for a UNet, 2 for Flux, whose class is given tokens.
        downsampling: latent heights and widths must be multiples of this.
        latent_channels: channels of the latents it takes.
        factor: pixels per latent cell that the resolutions below are meant for.
        text_tokens: tokens of a caption that the figures were taken with.
        forward_flops: one forward pass of one square image, by resolution in pixels.
        train_flops: forward and backward pass of one image.
        activation_bytes: what autograd keeps of one image's forward pass in bf16, attention fused.
        checkpointed_activation_bytes: the same with every block recomputed: their inputs and the largest one.
    """

    class_name: str
    config: dict[str, Any]
    parameters: int
    patch_size: int
    downsampling: int
    latent_channels: int
    factor: int
    text_tokens: int
    forward_flops: dict[int, int]
    train_flops: dict[int, int]
    activation_bytes: dict[int, int]
    checkpointed_activation_bytes: dict[int, int]


def profile(model: Model) -> Profile | None:
    """The stored profile of a recipe's model; None when its configuration is not among them."""
    if model.family not in CLASSES or config_comes_with_weights(model):
        return None
    class_name, config = model_config(model)
    wanted = {**arguments(class_name), **config}
    for found in stored()["profiles"].values():
        if found["class_name"] == class_name and {**arguments(class_name), **found["config"]} == wanted:
            return _with_mixer(_profile(found), model)
    return None


def measured_profile(
    model: Model, *, resolutions: Sequence[int], factor: int = 8, text_tokens: int = 0
) -> Profile:
    """The profile of any configuration: stored, or measured in a subprocess that imports torch (some seconds).

    Args:
        model: of a recipe.
        resolutions: in pixels, multiples of factor x downsampling.
        factor: pixels per latent cell.
        text_tokens: tokens of a caption; 0 for the family's usual number.

    Raises:
        NotInstalled: it has to be measured and ``[train]`` is missing.
        UsageError: the diffusers class does not take the configuration, or the family is a team's own.
    """
    if model.family not in CLASSES:
        raise UsageError(
            f"{model.family} is no family of isthmus; its figures are unknown", where="model.family"
        )
    if config_comes_with_weights(model):
        message = "the configuration comes with the weights, so the figures are unknown before the run"
        raise UsageError(message, where="model.init_from", hint="name model.preset or model.config, too")
    known = profile(model)  # with its mixer
    if known and known.factor == factor and set(resolutions) <= set(known.train_flops):
        return known
    import subprocess
    import sys
    from importlib.util import find_spec

    for module in ("torch", "diffusers"):
        if find_spec(module) is None:
            raise NotInstalled("profiling a model of another configuration", extra="train", module=module)
    request = {
        "family": model.family,
        "config": model_config(model)[1],
        "factor": factor,
        "text_tokens": text_tokens,
        "resolutions": list(resolutions),
    }
    command = [sys.executable, "-m", "isthmus.core.models.generate_profiles", "--request"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise UsageError(f"cannot be profiled: {last[0]}", where=f"model.config of {model_config(model)[0]}")
    return _with_mixer(_profile(json.loads(done.stdout)), model)


def _with_mixer(found: Profile, model: Model) -> Profile:
    """The figures of a model with its patch mixer, which are arithmetic."""
    if model.patch_mixer is None:
        return found
    from isthmus.core.models.mixer_figures import mixer_figures

    class_name, config = model_config(model)
    full = {**arguments(class_name), **config}

    def added(figures: dict[int, int], field: str) -> dict[int, int]:
        return {
            pixels: value
            + getattr(mixer_figures(model, full, _tokens(found, pixels), found.text_tokens), field)
            for pixels, value in figures.items()
        }

    return replace(
        found,
        parameters=found.parameters + mixer_figures(model, full, 0, 0).parameters,
        forward_flops=added(found.forward_flops, "forward_flops"),
        train_flops=added(found.train_flops, "train_flops"),
        activation_bytes=added(found.activation_bytes, "activation_bytes"),
        checkpointed_activation_bytes=added(
            found.checkpointed_activation_bytes, "checkpointed_activation_bytes"
        ),
    )


def _tokens(found: Profile, pixels: int) -> int:
    return (pixels // (found.factor * found.patch_size)) ** 2


PACKED = 2
"""Latent cells along one side of a token of Flux, packed into channels before its class sees them."""


def downsampling(family: str, config: Mapping[str, Any]) -> int:
    """What latent heights and widths must be multiples of: a UNet's total down-sampling, a transformer's patch.

    Args:
        family: a family that comes with isthmus; 1 for others, which say for themselves what they take.
        config: all arguments of the class, defaults included.
    """
    if family == "unet":
        # Every down block but the last halves the size.
        return int(2 ** (len(config["block_out_channels"]) - 1))
    if family == "flux":
        return PACKED * int(config["patch_size"])
    return int(config["patch_size"]) if family in CLASSES else 1


def latent_channels(family: str, config: Mapping[str, Any]) -> int | None:
    """Channels of the latents that a model takes; None where a team's own configuration does not say.

    Args:
        family, config: as of :func:`downsampling`.
    """
    inputs = config.get("in_channels")
    if inputs is None:
        return None
    return int(inputs) // PACKED**2 if family == "flux" else int(inputs)


def arguments(class_name: str) -> dict[str, Any]:
    """Arguments of a diffusers class with their defaults; of a team's own family none are known."""
    defaults: dict[str, Any] = stored()["classes"].get(class_name, {})
    return defaults


@cache
def stored() -> dict[str, Any]:
    """The content of ``profiles.json``."""
    content: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return content


def _profile(found: Mapping[str, Any]) -> Profile:
    by_resolution = ("forward_flops", "train_flops", "activation_bytes", "checkpointed_activation_bytes")
    figures = {name: {int(pixels): value for pixels, value in found[name].items()} for name in by_resolution}
    return Profile(**{**found, **figures})
