"""The moving average against a double-precision reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.core.recipe.stages import EMA as Settings
from isthmus.core.train.ema import EMA


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(5, 3)) for name in ("a", "b")}


def move(weights: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(torch.randn_like(weight))


def test_average_follows_a_double_precision_reference() -> None:
    weights = parameters()
    ema, settings = EMA(weights), Settings(decay=0.9)
    reference = {name: weight.detach().double().clone() for name, weight in weights.items()}
    for step in range(1, 101):
        move(weights)
        ema.step(step, settings)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, weight in weights.items():
            reference[name] = decay * reference[name] + (1 - decay) * weight.detach().double()
    assert ema.updates == 100
    for name in weights:
        torch.testing.assert_close(ema.shadow[name].double(), reference[name], atol=1e-5, rtol=1e-5)


def test_before_its_start_it_copies() -> None:
    weights = parameters()
    ema, settings = EMA(weights), Settings(decay=0.9, start=3)
    for step in range(1, 4):
        move(weights)
        ema.step(step, settings)
        assert torch.equal(ema.shadow["a"], weights["a"])
    assert ema.updates == 0
    move(weights)
    ema.step(4, settings)
    assert ema.updates == 1
    assert not torch.equal(ema.shadow["a"], weights["a"])


def test_updates_only_every_so_many_steps() -> None:
    weights = parameters()
    ema, settings = EMA(weights), Settings(decay=0.9, update_every=3)
    for step in range(1, 10):
        move(weights)
        ema.step(step, settings)
    assert ema.updates == 3


def test_reset_starts_again_from_the_present_weights() -> None:
    weights = parameters()
    ema = EMA(weights)
    for step in range(1, 5):
        move(weights)
        ema.step(step, Settings(decay=0.9))
    ema.reset()
    assert ema.updates == 0
    assert torch.equal(ema.shadow["b"], weights["b"])


def test_swapped_puts_the_weights_back_even_after_an_error() -> None:
    weights = parameters()
    ema = EMA(weights)
    move(weights)
    own, average = weights["a"].detach().clone(), ema.shadow["a"].clone()

    def use() -> None:
        with ema.swapped():
            assert torch.equal(weights["a"], average)
            raise KeyError("in between")

    with pytest.raises(KeyError):
        use()
    assert torch.equal(weights["a"], own)
    assert torch.equal(ema.shadow["a"], average)
