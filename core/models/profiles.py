"""What a launcher must know of a denoiser without torch: parameters, FLOPs, memory, patching.

The figures are in ``profiles.json``, made by ``python -m isthmus.core.models.generate_profiles`` from the real
classes on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Figures of one configuration. FLOPs count a multiply-add as two.

    Args:
        class_name: of diffusers.
        config: the arguments that the figures were taken with.
        parameters: of the denoiser.
        patch_size: latent cells along one side of a token; 1 for a UNet.
        downsampling: latent heights and widths must be multiples of this.
        latent_channels: channels of the latents it takes.
        factor: pixels per latent cell that the resolutions below are meant for.
        text_tokens: tokens of a caption that the figures were taken with.
        forward_flops: one forward pass of one square image, by resolution in pixels.
        train_flops: forward and backward pass of one image.
        activation_bytes: what autograd keeps of one image's forward pass in bf16, attention fused.
        checkpointed_activation_bytes: the same with every block recomputed: block inputs and the largest block.
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
    return None


@cache
def _stored() -> tuple[Profile, ...]:
    return ()


_FILE = Path(__file__).with_name("profiles.json")
