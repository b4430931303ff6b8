"""How fast a model trains on some GPUs, before anybody has run it (docs/cost.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cost.gpus import GPUS, Gpu
from isthmus.cost.resolutions import figure_at
from isthmus.cost.speed import step_seconds, work
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.core.models.profiles import Profile
    from isthmus.core.recipe.schema import Model

FILE = Path(__file__).with_name("data") / "efficiency.json"
"""What `cost/fit.py` found."""
QUANTILE_80 = 1.2816
"""Half-width of the central 80 % of a normal distribution, in standard deviations."""
PRECISIONS = {"bf16": 1.0, "fp16": 1.0, "fp32": 0.5}
"""Rate of matrix products against bf16's; fp32 means TF32 there."""
STRATEGIES = ("ddp", "fsdp", "hsdp")
RECOMPUTED = 4 / 3
"""Of a step's FLOPs where activations are recomputed: one more forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """An estimate of training's speed, all GPUs together."""

    images_per_s: float
    images_per_s_per_gpu: float
    interval80: tuple[float, float]
    """Of `images_per_s`: four of five runs are expected within."""
    mfu: float
    """Share of the GPUs' dense bf16 peak; what is recomputed does not count."""
    step_s: float
    """Seconds of one optimizer step."""
    basis: str
    """What the figure rests on, one line for people."""

    def to_json(self) -> dict[str, Any]:
        """As `isthmus cost throughput --json` prints it."""
        return {
            "images_per_s": self.images_per_s,
            "images_per_s_per_gpu": self.images_per_s_per_gpu,
            "interval80": list(self.interval80),
            "mfu": self.mfu,
            "step_s": self.step_s,
            "basis": self.basis,
        }


def estimate_throughput(
    *,
    model: str | Model,
    gpu: str,
    gpus: int,
    gpus_per_node: int,
    global_batch_size: int,
    resolution: int,
    precision: str = "bf16",
    strategy: str | None = None,
    fabric: str | None = None,
    activation_checkpointing: bool = False,
) -> Throughput:
    """Images per second of training, steady state: no start-up, validation or checkpoints.

    Args:
        model: a preset's name, or a recipe's model.
        gpu: a key of `cost.gpus.GPUS`.
        gpus: of all nodes. Fewer than `gpus_per_node` are one node; a last node may be partly used.
        gpus_per_node: B200s in nodes of four are taken for GB200s: nobody sells them otherwise.
        global_batch_size: images of one step.
        resolution: in pixels, of square images.
        precision: bf16, fp16 or fp32.
        strategy: ddp, fsdp or hsdp; None for ddp, or hsdp where a replica is too large for one GPU.
        fabric: what joins the nodes: `infiniband`, `efa`, `ethernet`; None for the GPU's usual one.
        activation_checkpointing: every block computed twice in the forward direction.

    Raises:
        UsageError: no such model or GPU, no figures of the model, or numbers that make no training.
    """
    chip = _gpu(gpu, gpus_per_node)
    _check(gpus, gpus_per_node, global_batch_size, precision, strategy)
    family, known = _model(model)
    flops = figure_at(known, known.train_flops, resolution)
    network = _network(chip, fabric)
    recomputed = RECOMPUTED if activation_checkpointing else 1.0
    step_work = work(
        chip,
        images=global_batch_size / gpus,
        flops=flops * recomputed,
        activation_bytes=figure_at(known, known.activation_bytes, resolution) * recomputed,
        parameters=known.parameters,
        gpus=gpus,
        gpus_per_node=min(gpus_per_node, gpus),
        strategy=strategy,
        network=network,
        matmul_share=PRECISIONS[precision],
    )
    fitted = coefficients()
    step, compute = step_seconds(
        step_work,
        efficiency=fitted["efficiency"] * fitted["families"].get(family, 1.0),
        speed=fitted["chips"].get(chip.chip, 1.0),
        overlap=fitted["overlap"],
        latency=fitted["latency_s"],
    )
    rate = global_batch_size / step
    far = exp(QUANTILE_80 * _spread(family, chip.chip, waiting=1 - compute / step))
    return Throughput(
        images_per_s=rate,
        images_per_s_per_gpu=rate / gpus,
        interval80=(rate / far, rate * far),
        mfu=rate / gpus * flops / chip.peak,
        step_s=step,
        basis=_basis(family, chip, gpus, gpus_per_node, 1 - compute / step),
    )


@cache
def coefficients() -> dict[str, Any]:
    """The content of ``efficiency.json``."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def _gpu(name: str, gpus_per_node: int) -> Gpu:
    if name not in GPUS:
        raise UsageError(f"no estimate for GPU `{name}`", hint=f"known are {', '.join(GPUS)}")
    if name == "b200-180gb" and gpus_per_node == 4:
        return GPUS["gb200-186gb"]
    return GPUS[name]


def _check(gpus: int, gpus_per_node: int, batch: int, precision: str, strategy: str | None) -> None:
    for name, value in (("gpus", gpus), ("gpus per node", gpus_per_node), ("global batch size", batch)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if batch % gpus:
        hint = f"{max(1, round(batch / gpus)) * gpus} is the nearest that can be shared equally"
        raise UsageError(f"a global batch of {batch} images is no multiple of {gpus} GPUs", hint=hint)
    if precision not in PRECISIONS:
        raise UsageError(f"no estimate for precision `{precision}`", hint=f"one of {', '.join(PRECISIONS)}")
    if strategy is not None and strategy not in STRATEGIES:
        raise UsageError(f"no estimate for strategy `{strategy}`", hint=f"one of {', '.join(STRATEGIES)}")


def _model(model: str | Model) -> tuple[str, Profile]:
    """The family and the figures of a model."""
    from isthmus.core.models.presets import PRESETS
    from isthmus.core.models.profiles import profile
    from isthmus.core.recipe.schema import Model as RecipeModel

    if isinstance(model, str):
        if model not in PRESETS:
            raise UsageError(f"no estimate for model `{model}`", hint=f"known are {', '.join(PRESETS)}")
        model = RecipeModel.model_validate({"family": PRESETS[model].family, "preset": model})
    known = profile(model)
    if known is None:
        raise UsageError(
            f"no estimate for this {model.family} model: its FLOPs are not in isthmus' profiles",
            where="model",
            hint="take a preset, or measure it with a short run",
        )
    return model.family, known


def _network(gpu: Gpu, fabric: str | None) -> float | None:
    if fabric is None:
        return None
    if fabric not in gpu.network:
        raise UsageError(f"{gpu.name} on {fabric} is not known", hint=f"one of {', '.join(gpu.network)}")
    return gpu.network[fabric]


def _spread(family: str, chip: str, *, waiting: float) -> float:
    """Standard deviation of log images/s."""
    spread, seen = coefficients()["spread"], coefficients()["pairs"]
    variance = (spread["waiting"] * waiting) ** 2
    variance += (spread["chip"].get(chip) or spread["unseen_chip"]) ** 2
    if family not in coefficients()["families"]:
        variance += float(spread["unseen_family"]) ** 2
    elif chip in spread["chip"] and f"{chip} {family}" not in seen:
        variance += float(spread["unseen_pair"]) ** 2
    return sqrt(variance)


def _basis(family: str, gpu: Gpu, gpus: int, gpus_per_node: int, waiting: float) -> str:
    pairs = coefficients()["pairs"]
    seen = pairs.get(f"{gpu.chip} {family}", 0)
    of_chip = coefficients()["rows_by_chip"].get(gpu.chip, 0)
    if seen:
        what = f"fitted on {seen} published rows of a {family} on {gpu.chip}"
    elif of_chip:
        what = f"{gpu.chip} is fitted on {of_chip} published rows, none of a {family}"
    else:
        what = f"no published row of {gpu.chip}: scaled by its matmul rate and memory bandwidth"
    if family not in coefficients()["families"]:
        what += f"; no published row of any {family}"
    nodes = ceil(gpus / gpus_per_node)
    partly = (
        f", the last one partly used ({gpus} of {nodes * gpus_per_node} GPUs)" if gpus % gpus_per_node else ""
    )
    partly = partly if gpus > gpus_per_node else ""
    return (
        f"{what}; {nodes} node{'s' if nodes > 1 else ''}{partly}; {waiting:.0%} of the step is no computation"
    )
