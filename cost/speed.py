"""The time of one training step, from what the model takes and what the hardware gives. Formulas only.

step = (compute^p + communication^p)^(1/p) + latency x (1 + log2 GPUs)

compute = images per GPU x (FLOPs / (matmul x efficiency) + REUSE x saved activations / memory bandwidth) / speed

Matrix products run at a share of what large ones reach; everything between them is bound by memory. Gradients (and,
sharded, weights) cross NVLink within a node and the fabric between nodes, hidden behind computation the better the
shorter they are against it: p = 1 would hide nothing, a large p everything but the longer of the two. What is left
grows with the number of GPUs: kernels that are too short, and waiting for the slowest.

Works on numbers and, for the fit, on arrays of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

from isthmus.cost.gpus import Gpu

REUSE = 6.0
"""How often a byte that autograd saves crosses to or from memory, with what comes between. Chosen by cross-validation,
which tells 3 from 9 by little."""
LINK_SHARE = 0.7
"""What collectives reach of a link's data sheet."""
BYTES = 2.0
"""Of a weight or gradient on the wire."""
SHARDED_ABOVE = 5e9
"""Parameters from which weights, gradients and optimizer state of one replica are not kept on every GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step asks of one GPU, and what that GPU gives. Numbers, or arrays of one length.

    Args:
        images: per GPU and step.
        flops, activation_bytes: of one image.
        matmul, bandwidth: of the GPU, FLOP/s and bytes/s.
        communication: seconds of gradients and weights on the wire, were nothing hidden.
        doublings: 1 + log2 of the number of GPUs.
    """

    images: Any
    flops: Any
    activation_bytes: Any
    matmul: Any
    bandwidth: Any
    communication: Any
    doublings: Any


def step_seconds(work: Work, *, efficiency: Any, speed: Any, overlap: Any, latency: Any) -> tuple[Any, Any]:
    """Seconds of one step, and those in which the GPU computes.

    Args:
        efficiency: share of `matmul` that the family's products reach.
        speed: factor of the GPU type, 1 for one nobody has measured.
        overlap: the exponent p above.
        latency: seconds per doubling.
    """
    image = work.flops / (work.matmul * efficiency) + REUSE * work.activation_bytes / work.bandwidth
    compute = work.images * image / speed
    exposed = (compute**overlap + work.communication**overlap) ** (1 / overlap)
    return exposed + latency * work.doublings, compute


def communication(
    gpu: Gpu, *, parameters: int, gpus: int, gpus_per_node: int, strategy: str, network: float
) -> float:
    """Seconds that one step's collectives take when nothing hides them.

    Bandwidth-optimal collectives in two levels: what every GPU exchanges with those on the same links, and what its
    share of the node's network carries. An all-reduce moves the gradients twice; sharding gathers the weights for
    the forward and again for the backward pass, and scatters the gradients.

    Args:
        strategy: ddp, fsdp (over all GPUs) or hsdp (within a node, replicas across).
        network: bytes/s of one GPU.
    """
    if gpus == 1:
        return 0.0
    inside = min(gpus, max(gpus_per_node, gpu.domain))
    volume = BYTES * parameters
    within, across = {"ddp": (2, 2), "fsdp": (3, 3), "hsdp": (3, 2)}[strategy]
    seconds = within * volume * (inside - 1) / inside / (gpu.link * LINK_SHARE)
    islands = gpus / inside
    return seconds + across * volume / inside * (1 - 1 / islands) / (network * LINK_SHARE)


def work(
    gpu: Gpu,
    *,
    images: float,
    flops: float,
    activation_bytes: float,
    parameters: int,
    gpus: int,
    gpus_per_node: int,
    strategy: str | None = None,
    network: float | None = None,
    matmul_share: float = 1.0,
) -> Work:
    """What a step is, from the plan.

    Args:
        images: per GPU.
        strategy: None for what the published rows ran: replicas, sharded within a node where the model is large.
        network: bytes/s of one GPU; None for the GPU's usual fabric.
        matmul_share: of the GPU's bf16 rate, for another precision.
    """
    strategy = strategy or ("hsdp" if parameters > SHARDED_ABOVE else "ddp")
    network = network or next(iter(gpu.network.values()))
    return Work(
        images=images,
        flops=flops,
        activation_bytes=activation_bytes,
        matmul=gpu.matmul * matmul_share,
        bandwidth=gpu.bandwidth,
        communication=communication(
            gpu,
            parameters=parameters,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            strategy=strategy,
            network=network,
        ),
        doublings=1 + log2(gpus),
    )
