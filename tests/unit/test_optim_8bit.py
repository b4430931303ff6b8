"""AdamW with moments of 8 bits: the paper's quantisation, AdamW's step, and a state that sharding does not touch."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from optim import WIDE, made, step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.adamw8bit import MARK, _nearest, block_of, dequantise, dynamic_map, quantise
from isthmus.core.train.checkpoint import flat_state
from isthmus.core.train.ema import EMA
from isthmus.core.train.optimizers import make_optimizer, reset_optimizer
from isthmus.core.train.weights import checksum, full
from isthmus.errors import UsageError


def test_the_map_has_the_papers_levels() -> None:
    """Dettmers et al. 2022, 1.3: of the largest power of ten 64 levels each sign (signed) or 128, halved with each below."""
    for signed in (True, False):
        levels = dynamic_map(signed)
        assert len(set(levels)) == 256
        assert levels == sorted(levels)
        assert (0.0 in levels, levels[-1]) == (True, 1.0)
        for exponent in range(7):
            low, high = 10.0 ** (exponent - 7), 10.0 ** (exponent - 6)
            inside = sum(low < level < high for level in levels)
            assert inside == 2**exponent * (1 if signed else 2), exponent
        assert min(levels) == (pytest.approx(-0.99297, abs=1e-5) if signed else 0.0)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_it_is_torchaos_map_and_rounding() -> None:
    from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap, scale_tensor

    values = torch.randn(32, 256)
    for signed in (True, False):
        assert dynamic_map(signed) == pytest.approx(create_dynamic_map(signed))
        given = values if signed else values.square()
        codes, scales = torch.zeros(32, 256, dtype=torch.uint8), torch.zeros(32, 1)
        quantise(given, codes, scales, signed=signed)
        scaled, scale = scale_tensor(given, 256)
        assert torch.equal(scale, scales[:, 0])
        expected = quantize_8bit_with_qmap(scaled, torch.tensor(create_dynamic_map(signed)))
        assert (codes != expected).sum() <= 2, "but for ties"


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_comes_back_nearly_and_a_second_time_exactly(signed: bool) -> None:
    values = torch.randn(16, 2, 64) * torch.logspace(-6, 3, 16)[:, None, None]
    values = values if signed else values.square()
    values[3, 1] = 0
    codes, scales = torch.zeros(16, 2, 64, dtype=torch.uint8), torch.zeros(16, 2)
    quantise(values, codes, scales, signed=signed)
    back = dequantise(codes, scales, signed=signed)
    largest = values.abs().amax(-1, keepdim=True)
    # Half of the widest gap between levels, of a block's largest magnitude.
    assert ((back - values).abs() <= largest * (0.0072 if signed else 0.0036) + 1e-12).all()
    assert not back[3, 1].any()
    again, same = torch.zeros_like(codes), torch.zeros_like(scales)
    quantise(back, again, same, signed=signed)
    if not signed:  # the largest magnitude is a level; a negative one is not
        assert torch.equal(dequantise(again, same, signed=signed), back)


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_finds_the_nearest_level(signed: bool) -> None:
    levels = torch.tensor(dynamic_map(signed))
    borders = (levels[1:] + levels[:-1]) / 2
    near = torch.cat([torch.nextafter(borders, borders - 1), borders, torch.nextafter(borders, borders + 1)])
    spread = torch.cat(
        [torch.logspace(-12, 0, 100_000), torch.linspace(0, 1, 100_000), torch.tensor([0.0, 1.0])]
    )
    values = torch.cat([near, levels, spread, *([-spread] if signed else [])])
    found = _nearest(values, signed)
    assert torch.equal(found, torch.bucketize(values, borders, right=True, out_int32=True))


def adamw(weight: Tensor, gradients: list[Tensor], decay: float) -> Tensor:
    """The step written out, each moment through the paper's quantisation in float64, one block after another."""
    levels = [torch.tensor(dynamic_map(signed), dtype=torch.float64) for signed in (True, False)]

    def stored(values: Tensor, signed: bool) -> Tensor:
        out = values.clone().reshape(-1, 64)
        for block in out:
            largest = block.abs().max()
            block.copy_(
                levels[0 if signed else 1][
                    (block[:, None] / largest - levels[0 if signed else 1]).abs().argmin(1)
                ]
                * largest
            )
        return out.reshape(values.shape)

    weight, mean, square = (
        weight.double().clone(),
        torch.zeros_like(weight).double(),
        torch.zeros_like(weight).double(),
    )
    for number, gradient in enumerate(gradients, 1):
        mean = 0.9 * mean + 0.1 * gradient.double()
        square = 0.999 * square + 0.001 * gradient.double() ** 2
        weight *= 1 - 1e-2 * decay
        weight -= 1e-2 * (mean / (1 - 0.9**number)) / ((square / (1 - 0.999**number)).sqrt() + 1e-8)
        mean, square = stored(mean, True), stored(square, False)
    return weight


def test_a_step_is_adamws_with_stored_moments() -> None:
    layer = nn.Linear(64, 8)
    optimizer = make_optimizer(layer, Optimizer(name="adamw_8bit", weight_decay=0.1), cpu=True)
    reset_optimizer(optimizer)
    before = layer.weight.detach().clone()
    gradients = [torch.randn(8, 64, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    for gradient in gradients:
        layer.weight.grad, layer.bias.grad = gradient.clone(), torch.ones(8)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
    torch.testing.assert_close(
        layer.weight.detach().double(), adamw(before, gradients, 0.1), rtol=0, atol=2e-5
    )
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[layer.bias]["exp_avg"].dtype == torch.float32


def test_shards_and_replicas_do_the_same_and_hold_a_quarter() -> None:
    states, weights, sizes = [], [], []
    for strategy, name in (("ddp", "adamw_8bit"), ("fsdp", "adamw_8bit"), ("ddp", "adamw")):
        engine = wide(strategy=strategy, name=name, weight_decay=0.1)
        for number in range(3):
            step(engine, number)
        states.append(checksum(flat_state(engine, EMA(engine.parameters))))
        weights.append({found: full(weight.detach()) for found, weight in engine.parameters.items()})
        sizes.append(
            sum(
                full(value).nbytes
                for weight, state in engine.optimizer.state.items()
                if weight.dim() >= 2
                for value in state.values()
            )
        )
    assert states[0] == states[1] != states[2]
    assert all(torch.equal(weight, weights[1][found]) for found, weight in weights[0].items())
    assert sizes[0] < 0.35 * sizes[2]
    apart = [float((weights[0][n] - weights[2][n]).norm() / weights[2][n].norm()) for n in weights[0]]
    assert 0 < max(apart) < 0.2


def wide(**settings: Any) -> Any:
    return made("dit", **settings, config=WIDE)


def test_which_parameters_have_bytes() -> None:
    engine = wide(name="adamw_8bit", weight_decay_on="matrices")
    marked = {
        id(weight) for group in engine.optimizer.param_groups if MARK in group for weight in group["params"]
    }
    names = {name for name, weight in engine.parameters.items() if id(weight) in marked}
    assert "transformer_blocks.0.attn1.to_q.weight" in names
    assert not any(name.endswith("bias") or "table" in name or "norm" in name for name in names)
    for name, weight in engine.parameters.items():
        state = engine.optimizer.state[weight]
        assert state["exp_avg"].dtype == (torch.uint8 if name in names else torch.float32), name
        assert isinstance(state["exp_avg"], DTensor)
    assert [block_of(shape) for shape in ((64,), (3, 512), (5, 128, 1, 1), (320, 320, 3, 3), (4, 96), (7, 0))] == [
        None, 256, 128, 64, None, 256,
    ]  # fmt: skip
    assert math.prod((320, 3, 3)) % 64 == 0


def test_a_model_without_such_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="rows are multiples of 64, and Linear has none"):
        make_optimizer(nn.Linear(3, 3), Optimizer(name="adamw_8bit"), cpu=True)
