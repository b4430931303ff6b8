"""Parameters, FLOPs and activation memory of a patch mixer, as arithmetic; no torch. Tests hold it to the module itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Model

FREQUENCIES = 512
"""Sinusoids of the time, half of them cosines."""


@dataclass(frozen=True, slots=True)
class MixerFigures:
    """What a mixer adds to a model's profile, of one image; see `profiles.Profile`."""

    parameters: int
    forward_flops: int
    train_flops: int
    activation_bytes: int
    checkpointed_activation_bytes: int


def text_widths(family: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Width of the text's tokens and of the pooled vector, 0 without one, of a family that can have a mixer."""
    if family == "dit":
        return int(config["caption_channels"]), 0
    return int(config["joint_attention_dim"]), int(config["pooled_projection_dim"])


def mixer_figures(model: Model, config: Mapping[str, Any], tokens: int, text_tokens: int) -> MixerFigures:
    """The figures of `model.patch_mixer`.

    Args:
        model: of a recipe, with a mixer.
        config: all arguments of its class.
        tokens: of the image; all of them pass the mixer, whatever a stage leaves out behind it.
        text_tokens: of the caption.
    """
    mixer = model.patch_mixer
    assert mixer is not None
    w, h, n, l = mixer.width, mixer.hidden, tokens, text_tokens  # noqa: E741 - as the formulas have it
    outer = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    text, pooled = text_widths(model.family, config)
    mapped = outer != w
    # Three norms, eight square maps of attention, three of the gated layer, the modulation.
    block = 3 * w + 8 * w * w + 3 * w * h + 6 * w * (w + 1)
    ends = (FREQUENCIES + 1) * w + (w + 1) * w + text * (w + 1) + ((pooled + 1) * w if pooled else 0)
    ends += (outer * (w + 1) + w * (outer + 1)) if mapped else 0
    # Multiply-adds: maps of image tokens, of text tokens, both attentions.
    products = n * (6 * w * w + 3 * w * h) + 2 * l * w * w + 2 * n * (n + l) * w + 6 * w * w
    outside = l * text * w + (FREQUENCIES + w + pooled) * w + (2 * n * outer * w if mapped else 0)
    forward = 2 * (mixer.layers * products + outside)
    # Kept in bf16: 21 vectors of a token's width and 4 of the gated layer's in each block, keys and values of the text.
    kept = n * (21 * w + 4 * h) + 3 * l * w
    around = n * (2 * outer + w) + l * (text + w)
    return MixerFigures(
        parameters=mixer.layers * block + ends,
        forward_flops=forward,
        train_flops=3 * forward,
        activation_bytes=2 * (mixer.layers * kept + around),
        checkpointed_activation_bytes=2 * (mixer.layers * n * w + around),
    )
