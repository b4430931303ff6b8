"""One optimizer step: forward and backward over micro-batches, clip, update, average. The hot path.

The loss is the mean over the global batch: a rank divides the sum over its samples by their number, DDP and FSDP2
average gradients over ranks, and every rank has equally many samples, so gradients equal those of one process
with the whole batch, however it is cut into ranks and micro-batches.

One small all-reduce carries the loss and what ranks must agree on; the host waits for the device once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from isthmus.core.models.conditioning import Condition, TextArrays, build_condition
from isthmus.core.models.families import predict
from isthmus.core.recipe.schema import Encoders
from isthmus.core.recipe.stages import EMA as EMASettings
from isthmus.core.train.ema import EMA
from isthmus.core.train.objective import Noised, Objective, scale_latents
from isthmus.core.train.parallel import Engine
from isthmus.core.train.randomness import Draws, Randomness
from isthmus.core.train.throughput import ExposedCommunication

if TYPE_CHECKING:
    from isthmus.core.train.stage_model import TokenMask


class Batch(Protocol):
    """A rank's part of a global batch, as the loader delivers it."""

    step: int
    latent_mean: np.ndarray[Any, Any]
    latent_logvar: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    original_size: np.ndarray[Any, Any]
    crop: np.ndarray[Any, Any]

    @property
    def text(self) -> Mapping[str, TextArrays]: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """How batches become a model's inputs; the same for the whole run."""

    family: str
    model_config: Mapping[str, Any]
    encoders: Encoders
    factor: int
    """Pixels per latent cell."""
    scaling_factor: float
    shift_factor: float
    null: Condition
    """The null embedding, one row, on the device."""

    def on(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        """The same with the null embedding on `device`."""
        return replace(self, null=self.null.to(device, dtype))

    def condition(self, batch: Batch, device: torch.device, dtype: torch.dtype) -> Condition:
        """The batch's conditioning on the device."""
        height, width = batch.latent_mean.shape[-2:]
        built = build_condition(
            self.family,
            self.model_config,
            batch.text,
            self.encoders,
            batch.original_size,
            batch.crop,
            (height * self.factor, width * self.factor),
        )
        return built.to(device, dtype)

    def latents(self, batch: Batch, draws: Draws, device: torch.device) -> torch.Tensor:
        """Latents on the training scale, float32 [b, C, H, W]."""
        return scale_latents(
            torch.from_numpy(batch.latent_mean).to(device, non_blocking=True),
            torch.from_numpy(batch.latent_logvar).to(device, non_blocking=True),
            draws.posterior,
            scaling_factor=self.scaling_factor,
            shift_factor=self.shift_factor,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's samples of a step, ready for the model."""

    noised: Noised
    condition: Condition
    keep: torch.Tensor | None = None
    """int64 [b, k]: the image tokens that are trained on, where a stage leaves some out."""

    def __len__(self) -> int:
        return len(self.condition)

    def rows(self, start: int, stop: int) -> Prepared:
        """A micro-batch, as views."""
        if start == 0 and stop >= len(self):
            return self
        noised, part = self.noised, slice(start, stop)
        return Prepared(
            Noised(
                noised.noisy[part],
                noised.timestep[part],
                noised.target[part],
                None if noised.weight is None else noised.weight[part],
            ),
            self.condition.rows(start, stop),
            None if self.keep is None else self.keep[part],
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; the same on every rank."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Global, before clipping."""
    applied: bool
    """False: something was not finite, and weights, moments and average stayed as they were."""
    signals: list[float]
    """Sums over ranks of what was passed as `signals`."""
    exposed_s: float | None = None
    """This rank's exposed communication, see `throughput.py`; None with one rank."""


class Stepper:
    """Takes training steps with a prepared model."""

    def __init__(self, engine: Engine, ema: EMA, inputs: Inputs, randomness: Randomness) -> None:
        self.engine = engine
        self.ema = ema
        self.inputs = inputs
        self.randomness = randomness
        self.token_mask: TokenMask | None = None
        self._exposed = ExposedCommunication(engine.device, engine.world_size)
        # Dropout layers draw from torch's global state, which is seeded for them alone.
        self.has_dropout_layers = any(
            isinstance(module, torch.nn.Dropout) and module.p > 0 for module in engine.model.modules()
        )

    def prepare(self, batch: Batch, objective: Objective) -> Prepared:
        """Draw for a batch, noise its latents and join its text."""
        engine = self.engine
        shape = batch.latent_mean.shape
        # Every rank has equally many samples of a global batch.
        strata = shape[0] * engine.world_size if objective.settings.quasi_random else None
        draws = self.randomness.draws(
            batch.step, batch.positions.tolist(), (shape[1], shape[2], shape[3]), strata=strata
        )
        draws = draws.to(engine.device)
        latents = self.inputs.latents(batch, draws, engine.device)
        condition = self.inputs.condition(batch, engine.device, engine.compute_dtype)
        drop = objective.dropped(draws)
        if drop is not None:
            condition = condition.with_null(drop, self.inputs.null)
        keep = None
        if self.token_mask is not None:
            keep = self.token_mask.kept(batch.step, batch.positions.tolist(), shape[2], shape[3])
            keep = keep.to(engine.device, non_blocking=True)
        return Prepared(objective.noised(latents, draws), condition, keep)

    def settle(self, batch: Batch, objective: Objective, micro_batch_size: int) -> None:
        """One pass without a step, before the first step of a process with replicas.

        DDP lays gradients into buckets anew after its first backward pass, and where a gradient lies decides in which
        order an all-reduce adds it up. Without this a resumed run's first step, and no other, would round otherwise.
        """
        if self.engine.sharded or self.engine.world_size == 1:
            return
        micro = self.prepare(batch, objective).rows(0, micro_batch_size)
        torch.autograd.backward(self._losses(objective, micro).sum())
        self.engine.optimizer.zero_grad(set_to_none=True)

    def _losses(self, objective: Objective, samples: Prepared) -> torch.Tensor:
        noised, prediction = samples.noised, self._predict(samples)
        if samples.keep is not None:
            assert self.token_mask is not None
            noised, prediction = self.token_mask.under(noised, prediction, samples.keep)
        return objective.losses(prediction, noised)

    def _predict(self, samples: Prepared) -> torch.Tensor:
        with self.engine.autocast():
            return predict(
                self.engine.model,
                self.inputs.family,
                samples.noised.noisy.to(self.engine.compute_dtype),
                samples.noised.timestep,
                samples.condition,
                samples.keep,
            )

    def step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        micro_batch_size: int,
        learning_rate: float,
        max_grad_norm: float,
        ema: EMASettings,
        signals: Callable[[], list[float]] = list,
    ) -> StepResult:
        """Do global step `batch.step`.

        Args:
            signals: asked once, late in the step, for numbers of this rank that are summed over ranks.
        """
        engine = self.engine
        prepared = self.prepare(batch, objective)
        if self.has_dropout_layers:
            self.randomness.seed_layers(batch.step, engine.rank)
        count = len(prepared)
        total = torch.zeros((), device=engine.device)
        for start in range(0, count, micro_batch_size):
            stop = min(start + micro_batch_size, count)
            micro = prepared.rows(start, stop)
            with engine.accumulating(last=stop == count):
                loss = self._losses(objective, micro).sum() / count
                if stop == count:
                    self._exposed.watch(loss)
                torch.autograd.backward(loss)
            total += loss.detach()
        self._exposed.mark()
        report = torch.tensor([0.0, *signals()]).to(engine.device, non_blocking=True)
        report[0] = total
        self._exposed.mark()
        engine.all_reduce(report)
        self._exposed.mark()
        norm = engine.clip(max_grad_norm)
        summed, *agreed, grad_norm = torch.cat([report, norm.reshape(1)]).tolist()
        mean = summed / engine.world_size
        applied = math.isfinite(mean) and math.isfinite(grad_norm)
        if applied:
            for group in engine.optimizer.param_groups:
                group["lr"] = learning_rate
            engine.optimizer.step()
            self.ema.step(batch.step + 1, ema)
        engine.optimizer.zero_grad(set_to_none=True)
        return StepResult(mean, grad_norm, applied, agreed, self._exposed.take())
