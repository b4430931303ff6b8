"""Optimizers over plain and sharded parameters: AdamW, also with moments of 8 bits, and Muon for the matrices of a model's blocks.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") replaces a matrix's momentum by
the nearest semi-orthogonal matrix, which needs the whole matrix. `torch.optim.Muon` given shards multiplies them through
DTensor, ten collectives a matrix, and rounds otherwise for each way of sharding (a relative 1e-2 after three steps on
two ranks). So here each matrix's momentum is gathered once and orthogonalised on every rank, the same bits as on one
process, and a rank keeps its rows. The arithmetic is torch's own. Its step is scaled by 0.2 sqrt(max(rows, columns)),
which makes it as long as AdamW's, so that one learning rate serves both (Liu et al. 2025, "Muon is scalable for LLM
training", eq. 4).

State is plain tensors, or DTensors placed as their parameter is, so a checkpoint of it loads on any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# The functions behind torch.optim.Muon; a test holds the result to that class.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from isthmus.core.models.families import blocks
from isthmus.core.recipe.stages import Optimizer as OptimizerSettings
from isthmus.core.train.adamw8bit import BLOCKS, MARK, AdamW8bit, block_of, first_state
from isthmus.errors import UsageError

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, exact on DTensors; every rank must take part in :meth:`step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight]["momentum_buffer"]
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = _orthogonal(update, group)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape))


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    whole = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    if not isinstance(update, DTensor):
        return whole
    # Every rank has the whole: it cuts its own part out, without communication.
    return distribute_tensor(
        whole.to(update.dtype), update.device_mesh, update.placements, src_data_rank=None
    )


class WithAdamW(torch.optim.Optimizer):
    """An optimizer of some parameters and AdamW of the others as one: their groups in `param_groups`, their state in `state`.

    Args:
        first: of some; its groups come first.
        adamw: of all others.
        mark: a key that the first one's groups have, and AdamW's have not.
    """

    def __init__(self, first: torch.optim.Optimizer, adamw: torch.optim.AdamW, mark: str) -> None:
        super().__init__([*first.param_groups, *adamw.param_groups], {})
        self._first, self._adamw, self._mark = first, adamw, mark

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        # Handed over each time: loading a state, which Accelerate does too, replaces groups and state.
        self._first.param_groups = [group for group in self.param_groups if self._mark in group]
        self._adamw.param_groups = [group for group in self.param_groups if self._mark not in group]
        for part in (self._first, self._adamw):
            part.state = self.state
            part.step()


def make_optimizer(model: nn.Module, settings: OptimizerSettings, *, cpu: bool) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters of a model that is not wrapped yet.

    Its learning rate is 0: the stage's schedule sets it before every step.

    Raises:
        UsageError: muon, and the model has no blocks with matrices; adamw_8bit, and no parameter has rows of whole blocks.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    muon = _block_matrices(model) if settings.name == "muon" else set()
    small = _eight_bit(model) if settings.name == "adamw_8bit" else set()
    if settings.name == "muon" and not muon:
        raise UsageError(
            f"muon is for the matrices of a model's blocks, and {type(model).__name__} has none",
            where="optimizer.name",
            hint="use adamw",
        )
    if settings.name == "adamw_8bit" and not small:
        raise UsageError(
            f"adamw_8bit is for parameters whose rows are multiples of {BLOCKS[-1]}, and {type(model).__name__} has none",
            where="optimizer.name",
            hint="use adamw",
        )
    spared = _without_decay(model) if settings.weight_decay_on == "matrices" else set()

    def groups(weights: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        decayed = [weight for weight in weights if id(weight) not in spared]
        others = [weight for weight in weights if id(weight) in spared]
        parts = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [part for part in parts if part["params"]]

    kernels = settings.implementation
    if kernels == "auto":
        kernels = "foreach" if cpu else "fused"
    adamw = torch.optim.AdamW(
        groups([weight for weight in trained.values() if id(weight) not in muon | small]),
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        foreach=kernels == "foreach",
        fused=kernels == "fused",
    )
    if small:
        some = groups([weight for weight in trained.values() if id(weight) in small])
        return WithAdamW(AdamW8bit(some, lr=0.0, betas=settings.betas, eps=settings.eps), adamw, MARK)
    if not muon:
        return adamw
    matrices = groups([weight for weight in trained.values() if id(weight) in muon])
    first = Muon(matrices, lr=0.0, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw")
    return WithAdamW(first, adamw, "momentum")


def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Forget the moments and step counts; also makes them, as a first step would, so that a checkpoint can be read in."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if MARK in group:
                optimizer.state[weight] = first_state(weight)
                continue
            zeros = torch.zeros_like(weight, memory_format=torch.preserve_format)
            if "momentum" in group:
                optimizer.state[weight] = {"momentum_buffer": zeros}
                continue
            device = weight.device if group.get("fused") else torch.device("cpu")
            optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": zeros,
                "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
            }


def _block_matrices(model: nn.Module) -> set[int]:
    """Ids of the two-dimensional weights of the blocks, embeddings left out: what Muon is for."""
    matrices = {
        id(weight)
        for block in blocks(model)
        for weight in block.parameters()
        if weight.requires_grad and weight.dim() == 2
    }
    return matrices - _embeddings(model)


def _eight_bit(model: nn.Module) -> set[int]:
    """Ids of the parameters whose moments can be bytes; not embeddings, whose gradients differ too much from row to row."""
    fitting = {id(weight) for weight in model.parameters() if weight.requires_grad and block_of(weight.shape)}
    return fitting - _embeddings(model)


def _without_decay(model: nn.Module) -> set[int]:
    vectors = {id(weight) for weight in model.parameters() if weight.dim() < 2}
    return vectors | _embeddings(model)


def _embeddings(model: nn.Module) -> set[int]:
    """Ids of embeddings: those of torch's classes, and tables that a model keeps as a parameter of its own."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, _EMBEDDINGS)}
    named = {
        id(weight)
        for name, weight in model.named_parameters()
        if any(word in name.rsplit(".", 1)[-1] for word in ("embed", "scale_shift_table", "token"))
    }
    return tables | named
