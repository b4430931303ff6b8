"""How fast a model trains on some GPUs, before anybody has run it (docs/cost.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """An estimate of training's speed, all GPUs together."""

    images_per_s: float
    images_per_s_per_gpu: float
    interval80: tuple[float, float]
    """Of `images_per_s`: four of five runs are expected within."""
    mfu: float
    """Share of the GPUs' dense bf16 peak."""
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
    strategy: str = "fsdp",
    fabric: str | None = None,
    activation_checkpointing: bool = False,
) -> Throughput:
    """Images per second of a training step, steady state: no start-up, validation or checkpoints.

    Args:
        model: a preset's name (or `flux-12b`), or a recipe's model.
        gpu: a key of `cost.gpus.GPUS`.
        gpus: of all nodes.
        gpus_per_node: divides `gpus`, unless there is one node only.
        global_batch_size: images of one step.
        resolution: in pixels, of square images.
        precision: bf16, fp16 or fp32.
        strategy: ddp, fsdp or hsdp.
        fabric: what joins the nodes: `infiniband`, `efa`, `ethernet`; None for the GPU's usual one.
        activation_checkpointing: every block computed twice in the forward direction.

    Raises:
        UsageError: no such model or GPU, no profile of the model, or numbers that make no training.
    """
    from isthmus.core.models.presets import PRESETS
    from isthmus.core.models.profiles import profile
    from isthmus.core.recipe.schema import Model as RecipeModel
    from isthmus.cost.gpus import GPUS

    if isinstance(model, str):
        name = {"flux-12b": "flux-dev"}.get(model, model)
        model = RecipeModel.model_validate({"family": PRESETS[name].family, "preset": name})
    known = profile(model)
    assert known is not None
    flops = known.train_flops[resolution] * (4 / 3 if activation_checkpointing else 1)
    rate = 0.3 * GPUS[gpu].peak / flops * gpus
    return Throughput(
        images_per_s=rate,
        images_per_s_per_gpu=rate / gpus,
        interval80=(rate * 0.8, rate * 1.25),
        mfu=0.3,
        step_s=global_batch_size / rate,
        basis="utilization of 30 %, not yet fitted",
    )
