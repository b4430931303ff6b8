"""What is done to a model's blocks for memory and overlap: recomputing activations, gathering weights ahead."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from isthmus.core.models.families import blocks
from isthmus.errors import UsageError


def recompute(model: nn.Module, *, every: int = 1) -> None:
    """Let the backward pass recompute the activations of every `every`-th block, the first among them.

    Recomputing all blocks costs a third of the step's arithmetic (one forward pass more), every second one a sixth, and keeps
    about half of the activations.

    Raises:
        UsageError: the model's class has no activation checkpointing.
    """
    enable = getattr(model, "enable_gradient_checkpointing", None)
    if enable is None and blocks(model):
        # A team's own module: what its class would do, done to its blocks from outside, within FSDP2's hooks.
        for block in blocks(model)[::every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return
    if enable is None:
        raise UsageError(
            f"{type(model).__name__} has no activation checkpointing",
            where="parallel.activation_checkpointing",
        )
    kept = {id(block) for number, block in enumerate(blocks(model)) if number % every}

    def run(block: nn.Module, *inputs: Any) -> Any:
        return block(*inputs) if id(block) in kept else checkpoint(block, *inputs, use_reentrant=False)

    try:
        enable(run)
    except ValueError as error:  # diffusers' word for a class without it
        raise UsageError(
            f"{type(model).__name__} has no activation checkpointing",
            where="parallel.activation_checkpointing",
        ) from error


def prefetch_blocks(model: nn.Module) -> int:
    """Tell FSDP2 which block comes next, so that its weights are gathered while this one computes.

    By default FSDP2 issues a gather when the host reaches a block, which is ahead of the device only while the host is;
    compiled blocks with a slow launch are not. Only where the order is known: blocks that stand in a list of the model
    itself, as in transformers. A UNet's lists nest, and a gather out of order would hold memory and help nobody.

    Returns:
        Blocks that were told their successor.
    """
    told = 0
    for part in model.children():
        if not isinstance(part, nn.ModuleList):
            continue
        chain = [block for block in part if isinstance(block, FSDPModule)]
        if len(chain) != len(part):
            continue
        for block, following in pairwise(chain):
            block.set_modules_to_forward_prefetch([following])
            told += 1
    return told
