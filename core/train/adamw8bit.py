"""AdamW with moments of 8 bits, whose state does not depend on how parameters are sharded.

Dettmers et al. 2022, "8-bit optimizers via block-wise quantization": a moment is stored as one byte a number, an index
into a map that is dense near zero (dynamic tree quantisation), times the largest magnitude of its block. The step itself
is AdamW in float32.

bitsandbytes has no kernel for sharded parameters. torchao's optimizer works on them, but takes its blocks from, and
decides which parameters to quantise by, what a rank happens to hold: a checkpoint of two ranks does not load on one. Here
blocks lie within the rows of the whole parameter, and FSDP2 cuts between rows: every rank has whole blocks, codes and
scales are tensors that are cut as their parameter is, and a checkpoint of them is the same bytes on any number of ranks.
The map is torchao's and bitsandbytes', value by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor

BLOCKS = (256, 128, 64)
"""Numbers that share a scale: the first that divides a row."""
MARK = "bits"
"""A parameter group's key that says whose it is."""
_EXPONENTS = 7


def block_of(shape: Sequence[int]) -> int | None:
    """The block size for a parameter of that whole shape; None where its moments stay in float32."""
    if len(shape) < 2:
        return None
    row = math.prod(shape[1:])
    return next((size for size in BLOCKS if row % size == 0), None)


class AdamW8bit(torch.optim.Optimizer):
    """For parameters for which :func:`block_of` finds one; plain tensors or DTensors cut between rows.

    Args:
        params: groups.
        lr, betas, eps, weight_decay: as of AdamW.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, MARK: 8}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                state["step"] += 1
                parts = {name: _local(value) for name, value in state.items() if name != "step"}
                if _local(weight).numel():
                    _update(_local(weight), _local(weight.grad), parts, float(state["step"]), group)


def first_state(weight: nn.Parameter) -> dict[str, Tensor]:
    """Moments of zero for a parameter: codes as it is cut, scales by blocks of its rows, and the count of steps."""
    block = block_of(weight.shape)
    assert block is not None
    scales = (weight.shape[0], math.prod(weight.shape[1:]) // block)

    def scale() -> Tensor:
        if isinstance(weight, DTensor):
            return distributed.zeros(
                *scales, dtype=torch.float32, device_mesh=weight.device_mesh, placements=weight.placements
            )
        return torch.zeros(scales, dtype=torch.float32, device=weight.device)

    def codes() -> Tensor:
        return torch.zeros_like(weight, dtype=torch.uint8, memory_format=torch.contiguous_format)

    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": codes(),
        "exp_avg_scale": scale(),
        "exp_avg_sq": codes(),
        "exp_avg_sq_scale": scale(),
    }


def quantise(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Store float32 `values` as bytes in `codes` (same shape) and `scales` [rows, blocks of a row], in place."""
    blocks = values.reshape(*scales.shape, -1)
    # Not zero, by which is divided; a block of zeros stays one of zeros.
    scales.copy_(blocks.abs().amax(-1).clamp_(min=1e-12))
    codes.copy_(_nearest((blocks / scales[..., None]).view(-1), signed).view(codes.shape))


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 values that :func:`quantise` stored."""
    found = _map(signed, codes.device).levels.index_select(0, codes.reshape(-1).int())
    return found.view(*scales.shape, -1).mul_(scales[..., None]).view(codes.shape)


def _nearest(values: Tensor, signed: bool) -> Tensor:
    """int32 indices of the levels nearest to `values` (float32 from -1 to 1): `torch.bucketize`, at a fifteenth of its time.

    A number's upper 16 bits name a cell that holds one border at most: a table gives the level below it, one comparison
    tells the side.
    """
    table = _map(signed, values.device)
    below = table.first.index_select(0, (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    return below + (values >= table.borders.index_select(0, below))


def dynamic_map(signed: bool) -> list[float]:
    """The 256 levels from -1 or 0 to 1: ever more of them within each of seven powers of ten, the smaller ones with fewer."""
    levels = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        borders = torch.linspace(0.1, 1, count + 1)
        means = ((borders[:-1] + borders[1:]) / 2.0 * 10 ** (exponent - _EXPONENTS + 1)).tolist()
        levels += [*means, *(-mean for mean in means)] if signed else means
    return sorted(levels)


@dataclass(frozen=True, slots=True)
class _Map:
    levels: Tensor
    borders: Tensor
    """Half-way to the next level; infinity behind the last."""
    first: Tensor
    """Of each pattern of a float's upper 16 bits: the level of the smallest number with it."""


@cache
def _map(signed: bool, device: torch.device) -> _Map:
    levels = torch.tensor(dynamic_map(signed), dtype=torch.float32)
    borders = (levels[1:] + levels[:-1]) / 2
    ends = torch.arange(2**16, dtype=torch.int32) << 16
    nearer, farther = ends.view(torch.float32), (ends | 0xFFFF).view(torch.float32)
    found = [
        torch.bucketize(torch.nan_to_num(end), borders, right=True, out_int32=True)
        for end in (torch.minimum(nearer, farther), torch.maximum(nearer, farther))
    ]
    if int((found[1] - found[0])[nearer.abs() <= 1].max()) > 1:
        raise RuntimeError("a cell of the table holds two borders")
    return _Map(
        levels.to(device), torch.cat([borders, torch.tensor([math.inf])]).to(device), found[0].to(device)
    )


def _update(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: float, group: dict[str, Any]
) -> None:
    """AdamW's step in float32 (Loshchilov and Hutter 2019, algorithm 2), as torch orders it."""
    beta1, beta2 = group["betas"]
    mean = dequantise(state["exp_avg"], state["exp_avg_scale"], signed=True)
    square = dequantise(state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    quantise(mean, state["exp_avg"], state["exp_avg_scale"], signed=True)
    quantise(square, state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False)
    root = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))


def _local(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part
