"""How long encoding pictures takes on a number of GPUs, and what that costs: FLOPs of the encoders over a published pace.

MosaicML's precomputing of Stable Diffusion 2's latents and text is the one published figure: 3,784 A100-hours for 790 million
pictures at 256 px and 300 million at 512 px. With the FLOPs below that is 14 % of the A100s' peak. One figure is one figure:
the interval is twice as fast to half as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe

ENCODER_FLOPS_PER_PIXEL = 4.13e6
"""Forward, of AutoencoderKL's encoder in the form that Stable Diffusion 1 to 3, SDXL and Flux use (factor 8; 34 M parameters)."""
ATTENTION_FLOPS_PER_PIXEL_SQUARED = 0.5
"""Of its one attention over all cells: 512 channels, (pixels / 64)^2 pairs, two products."""
TEXT_PARAMETERS = {
    ("clip", 768): 85e6, ("clip", 1024): 302e6, ("clip", 1280): 632e6, ("t5", 1024): 302e6, ("t5", 2048): 1.2e9,
    ("t5", 4096): 4.7e9, ("gemma", 2304): 2.0e9,
}  # fmt: skip
"""(kind, width) -> parameters without the token embeddings, which cost no FLOPs."""
UTILIZATION = 0.14
SPREAD = 2.0
PRECISION_SHARE = {"bf16": 1.0, "fp32": 0.5}
"""Of the bf16 peak: convolutions in fp32 run in TF32 where torch is left as it is, at half the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeEstimate:
    """Of a whole encoding, start-up of the machines aside."""

    pictures: int
    images_per_s: float
    """Of all GPUs."""
    hours: float
    hours_interval: tuple[float, float]
    usd: float | None
    usd_interval: tuple[float, float] | None
    basis: str


def flops_per_image(recipe: Recipe) -> float | None:
    """Of one picture at every resolution of the stages, and of its captions; None where the encoders are not known.

    An upper bound: a small picture is encoded only at the resolutions that it reaches, and equal captions of a batch once.
    """
    autoencoder = recipe.encoders.autoencoder
    if autoencoder.kind != "diffusers" or autoencoder.factor != 8:
        return None
    total = 0.0
    for resolution in {stage.resolution for stage in recipe.stages}:
        pixels = resolution * resolution
        total += ENCODER_FLOPS_PER_PIXEL * pixels + ATTENTION_FLOPS_PER_PIXEL_SQUARED * pixels * pixels
    captions = (recipe.encode.captions if recipe.encode is not None else None) or 1
    for encoder in recipe.encoders.text:
        parameters = TEXT_PARAMETERS.get((encoder.kind, encoder.width))
        if parameters is None:
            return None
        total += 2 * parameters * encoder.max_tokens * captions
    return total


def encode_estimate(
    recipe: Recipe, pictures: int, *, gpus: int, usd_per_hour: float | None
) -> EncodeEstimate | None:
    """Hours and dollars; None for encoders or machines that nobody has measured, such as CPUs.

    Args:
        recipe: with `encode`.
        pictures: of the source, about.
        gpus: of all nodes.
        usd_per_hour: of all nodes.
    """
    flops, peak = flops_per_image(recipe), PEAK_FLOPS.get(recipe.compute.gpu)
    if flops is None or peak is None or recipe.encode is None:
        return None
    share = PRECISION_SHARE[recipe.encode.precision]
    speed = UTILIZATION * share * peak * gpus / flops
    hours = pictures / speed / 3600
    interval = (hours / SPREAD, hours * SPREAD)
    return EncodeEstimate(
        pictures=pictures,
        images_per_s=speed,
        hours=hours,
        hours_interval=interval,
        usd=None if usd_per_hour is None else hours * usd_per_hour,
        usd_interval=None
        if usd_per_hour is None
        else (interval[0] * usd_per_hour, interval[1] * usd_per_hour),
        basis=f"{flops / 1e12:.3g} TFLOP a picture at {UTILIZATION * share:.0%} of the GPUs' peak (MosaicML, SD2's latents)",
    )
