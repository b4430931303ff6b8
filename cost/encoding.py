"""How long encoding pictures takes on a number of GPUs, and what that costs: FLOPs of the encoders over a published pace.

MosaicML's precomputing of Stable Diffusion 2's latents and text is the one published figure: 3,784 A100-hours for 790 million
pictures at 256 px and 300 million at 512 px. With the FLOPs below that is 14 % of the A100s' peak. One figure is one figure:
the interval is twice as fast to half as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.cost.placing import Place
    from isthmus.cost.spent import Spent

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRest:
    """What is left of an encoding, somewhere."""

    pictures: int
    hours: float
    usd: float | None
    basis: str
    """`its own pace`, or where the hours come from when it has done too little to tell."""


def encode_rest(recipe: Recipe, so_far: Spent, place: Place | None = None) -> EncodeRest:
    """The hours and dollars of the pictures that are left, by the pace of those that are done.

    Elsewhere the pace is scaled by the estimates for both, or, where nobody has measured the encoders, by the number of GPUs.

    Args:
        recipe: with `encode`, on the machines that it ran on.
        so_far: of pictures.
        place: other machines; None: the same ones, at the price of its last attempt.

    Raises:
        UsageError: too little is done to tell and nobody has measured its encoders; or they are other GPUs.
    """
    from isthmus.cost.placing import with_place

    left = max(0, so_far.total_steps - so_far.step)
    gpus = recipe.compute.nodes * recipe.compute.gpus_per_node
    here = encode_estimate(recipe, left, gpus=gpus, usd_per_hour=None)
    known = bool(so_far.hours) and so_far.share >= 0.01
    if known or not left:
        hours = so_far.hours / so_far.step * left if so_far.step else 0.0
        basis = "its own pace"
    elif here is not None:
        hours, basis = here.hours, here.basis
    else:
        raise UsageError("too little is done to tell how fast it is, and nobody has measured these encoders")
    price = so_far.attempts[-1].usd_per_hour if so_far.attempts else None
    if place is not None:
        price, there = place.usd_per_hour, place.nodes * place.gpus_per_node
        moved = encode_estimate(with_place(recipe, place), left, gpus=there, usd_per_hour=None)
        if here is not None and moved is not None and left:
            hours *= moved.hours / here.hours
        elif place.gpu == recipe.compute.gpu:
            hours *= gpus / there
        elif left:
            raise UsageError(f"nobody has measured how fast {place.gpu} runs these encoders")
    return EncodeRest(pictures=left, hours=hours, usd=None if price is None else hours * price, basis=basis)
