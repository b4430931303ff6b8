"""Exponential moving average of the weights, on the shards that a rank holds.

The shadow is a clone of the parameters, DTensors of the same placement where those are DTensors; an update is
one `foreach` over local shards, without communication. Rebuilding shards with `DTensor.from_local` is avoided:
it gets the shape of unevenly sharded tensors wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isthmus.core.recipe.stages import EMA as EMASettings
from isthmus.core.train.weights import local


class EMA:
    """EMA of `parameters` (clean name -> parameter), float32.

    Attributes:
        updates: averaging steps since the start or the last reset; drives the warm-up of the decay.
        shadow: clean name -> averaged parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.updates = 0
        self.shadow: dict[str, Tensor] = {
            name: parameter.detach().clone().float() for name, parameter in parameters.items()
        }
        self._parameters = parameters
        self._local_shadow = [local(tensor) for tensor in self.shadow.values()]

    @torch.no_grad()
    def step(self, step: int, settings: EMASettings) -> None:
        """Take in the weights after global step `step` (1 after the first), as `settings` say."""
        if step % settings.update_every:
            return
        if step <= settings.start:
            self._copy()
            return
        self.updates += 1
        decay = min(settings.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._local_shadow, self._weights(), 1 - decay)

    def reset(self) -> None:
        """Start again from the present weights."""
        self.updates = 0
        self._copy()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged weights in place of the model's; they change back on exit, whatever happens."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _weights(self) -> list[Tensor]:
        # Asked for each time: FSDP2 may replace a parameter's local shard at the first forward pass.
        return [local(parameter) for parameter in self._parameters.values()]

    @torch.no_grad()
    def _copy(self) -> None:
        torch._foreach_copy_(self._local_shadow, self._weights())

    @torch.no_grad()
    def _swap(self) -> None:
        for shadow, weight in zip(self._local_shadow, self._weights(), strict=True):
            kept = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(kept)
