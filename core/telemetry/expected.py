"""What a run should send over the fabric: the figure behind ``monitor.fabric_gigabytes_per_s: {min: auto}``."""

from __future__ import annotations

from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Stage

GRADIENT_BYTES = 4  # reductions are fp32, whatever the precision of the passes
AUTO_SHARE = 0.5
"""`auto` alarms below this share of the expected figure. The expected figure follows the measured step time,
so a slow but working fabric never alarms; traffic that left the fabric (NCCL fell back to TCP) does."""


def expected_fabric(recipe: Recipe, stage: Stage, *, parameters: int, step_s: float) -> float | None:
    """Gigabytes (1e9) a second that a node should receive from other nodes; None on a single node.

    A ring all-reduce of S bytes over n nodes brings 2 (n-1)/n S into each node (reduce-scatter and
    all-gather, (n-1)/n each; Patarasuk and Yuan 2009; nccl-tests, PERFORMANCE.md). With P parameters,
    gradients of 4 bytes, n nodes, a micro-batches a step and weights gathered in b bytes:

    - ddp:  2 (n-1)/n 4P. Gradients are reduced once a step.
    - hsdp, shards within a node: the same; each node reduces its whole copy with the others.
    - fsdp: (n-1)/n (4P + 2 a b P). Gradients are reduce-scattered once a step; weights are gathered
      for the forward and again for the backward pass of each micro-batch.

    divided by the step time. It is a lower bound: validation, checkpoints and the norm's reductions are
    left out, and rings inside a node may cross the border more than once.

    Args:
        stage: the stage that is trained; its batch sizes give the micro-batches.
        parameters: of the denoiser.
        step_s: measured seconds of an optimizer step.
    """
    nodes = recipe.compute.nodes
    if nodes < 2 or step_s <= 0:
        return None
    ring = (nodes - 1) / nodes
    if _shards_cross_nodes(recipe):
        world_size = nodes * recipe.compute.gpus_per_node
        micro_batches = max(1, stage.global_batch_size // (world_size * stage.micro_batch_size))
        weight_bytes = 2 if recipe.parallel.precision == "bf16" else 4
        per_step = ring * parameters * (GRADIENT_BYTES + 2 * micro_batches * weight_bytes)
    else:
        per_step = 2 * ring * parameters * GRADIENT_BYTES
    return per_step / step_s / 1e9


def _shards_cross_nodes(recipe: Recipe) -> bool:
    if recipe.parallel.strategy == "hsdp":
        return (recipe.parallel.shard_size or 0) > recipe.compute.gpus_per_node
    return recipe.parallel.strategy == "fsdp"
