"""Validation during training: loss by timestep bin under the averaged weights, and sample grids.

The loss is taken at even times over a fixed set of samples with counter-seeded noise, so that two values differ by
the weights alone. Its samples are `validation.sources`, or where there are none the first steps of the training
order at another seed, and then rows say `held_out: false`. Errors are not weighted, captions not dropped.

All ranks take part in both: a sharded model needs every rank for a forward pass. A rank that was told to end says so
at the next pass, and all leave together.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from isthmus.core.models.conditioning import Condition, build_condition
from isthmus.core.models.families import predict
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.agreement import gather, on_rank_0
from isthmus.core.train.data import make_loader
from isthmus.core.train.ema import EMA
from isthmus.core.train.objective import Objective
from isthmus.core.train.parallel import Engine
from isthmus.core.train.randomness import GRID, VALIDATION, Randomness, mix
from isthmus.core.train.sources import Sources
from isthmus.core.train.step import Batch, Inputs
from isthmus.errors import IsthmusError, UsageError
from isthmus.storage.stream.plan import Plan, Segment


class Interrupted(Exception):
    """A rank was told to end."""


class Validator:
    """Validates a model in training. Every method must be entered by all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        ema: EMA,
        inputs: Inputs,
        randomness: Randomness,
        training: Sources,
        held_out: Sources | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self.recipe = recipe
        self.engine = engine
        self.ema = ema
        self.inputs = inputs
        self.randomness = randomness
        self.sources = held_out or training
        self.held_out = held_out is not None
        self.prompts_dataset = training.datasets[0]
        self._interrupted = interrupted
        self._samples: tuple[int, list[Batch]] = (-1, [])
        self._autoencoder: Any = None

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights, in evaluation mode, without gradients."""
        self.engine.model.eval()
        self.engine.reshard()
        try:
            with self.ema.swapped(), torch.no_grad():
                try:
                    yield
                finally:
                    # FSDP2 keeps some gathered parameters after a forward pass; they hold the average.
                    self.engine.reshard()
        finally:
            self.engine.model.train()

    def _leave_together(self) -> None:
        flag = torch.tensor([float(self._interrupted())], device=self.engine.device)
        if self.engine.all_reduce(flag).item():
            raise Interrupted

    def _forward(self, noisy: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        self._leave_together()
        with self.engine.autocast():
            output = predict(
                self.engine.model,
                self.inputs.family,
                noisy.to(self.engine.compute_dtype),
                timestep,
                condition,
            )
        return output.float()

    def loss(self, stage: int, objective: Objective, bins: int) -> dict[str, Any]:
        """Mean squared error over the fixed samples, overall and at each of `bins` even times.

        Raises:
            Interrupted: a rank was told to end.
        """
        engine = self.engine
        sums = torch.zeros(bins + 1, dtype=torch.float64, device="cpu")
        micro = self.recipe.stages[stage].micro_batch_size
        with self._averaged():
            for batch in self._fixed_samples(stage):
                condition = self.inputs.condition(batch, engine.device, engine.compute_dtype)
                shape = batch.latent_mean.shape
                numbers = batch.positions.tolist()
                keep = torch.tensor([number < self.recipe.validation.samples for number in numbers])
                for bin_index in range(bins):
                    draws = self.randomness.draws(bin_index, numbers, shape[1:], VALIDATION).to(engine.device)
                    latents = self.inputs.latents(batch, draws, engine.device)
                    time = torch.full((shape[0],), (bin_index + 0.5) / bins, device=engine.device)
                    noised = objective.noised(latents, draws, time)
                    for start in range(0, shape[0], micro):
                        part = slice(start, start + micro)
                        output = self._forward(
                            noised.noisy[part], noised.timestep[part], condition.rows(start, start + micro)
                        )
                        error = (output - noised.target[part]).square().flatten(1).mean(1).double().cpu()
                        sums[bin_index] += error[keep[part]].sum()
                sums[bins] += keep.sum()
        sums = engine.all_reduce(sums.to(engine.device)).cpu()
        means = (sums[:bins] / sums[bins]).tolist()
        return {"loss": sum(means) / bins, "bins": means, "held_out": self.held_out}

    def _fixed_samples(self, stage: int) -> list[Batch]:
        """This rank's part of the fixed samples at a stage's resolution; read once a stage, kept in memory."""
        if self._samples[0] == stage:
            return self._samples[1]
        recipe, engine = self.recipe, self.engine
        batch_size = recipe.data.lanes
        steps = -(-recipe.validation.samples // batch_size)
        loader = make_loader(
            recipe,
            self.sources,
            Plan((Segment(stage=0, first_step=0, first_sample=0, global_batch_size=batch_size),)),
            [recipe.stages[stage].resolution],
            rank=engine.rank,
            world_size=engine.world_size,
            start_step=0,
            seed=mix(recipe.seed, VALIDATION) % 2**31,
        )
        batches: list[Batch] = []
        try:
            for batch in loader:
                kept = deepcopy(batch)  # The loader reuses its buffers.
                kept.positions = kept.positions + batch.step * batch_size
                batches.append(kept)
                if len(batches) == steps:
                    break
        finally:
            loader.close()
        self._samples = (stage, batches)
        return batches

    def grid(self, stage: int, objective: Objective, prompts: Sequence[str], title: str) -> bytes | None:
        """A PNG of samples for `prompts`, on rank 0; None on the others, and where nothing can decode latents.

        Raises:
            Interrupted: a rank was told to end.
        """
        from isthmus.core.sample.sampling import even_sigmas, sample_latents

        engine, recipe = self.engine, self.recipe
        if not on_rank_0(lambda: self._decoder() is not None):
            return None
        share = -(-len(prompts) // engine.world_size)
        rows = [min(engine.rank * share + row, len(prompts) - 1) for row in range(share)]
        resolution = recipe.stages[stage].resolution
        size = resolution // self.inputs.factor
        condition = self._prompt_condition([prompts[row] for row in rows], resolution)
        scale = recipe.validation.guidance_scale
        null = self.inputs.null.expand(share)
        text = condition if scale == 1 else Condition.cat([condition, _with_sizes(null, condition)])
        settings = objective.settings
        with self._averaged():
            latents = sample_latents(
                lambda noisy, timestep: self._forward(noisy, timestep, text),
                shape=(share, recipe.encoders.autoencoder.latent_channels, size, size),
                prediction_type=settings.prediction_type,
                scheduler=recipe.validation.scheduler,
                noise_schedule=settings.noise_schedule,
                shift=objective.shift,
                steps=recipe.validation.sampling_steps,
                guidance_scale=scale,
                seed=mix(recipe.seed, GRID) % 2**31,
                first=engine.rank * share,
                device=engine.device,
                sigmas=even_sigmas(self.inputs.family, recipe.validation.sampling_steps),
            )
        every = gather(latents.cpu())
        if engine.rank != 0:
            return None
        return self._draw(torch.cat(every)[: len(prompts)], prompts, title)

    def _prompt_condition(self, prompts: Sequence[str], resolution: int) -> Condition:
        dataset = self.prompts_dataset
        missing = [prompt for prompt in prompts if prompt not in dataset.prompts]
        if missing:
            raise UsageError(
                f"the dataset has no embedding of validation prompt {missing[0]!r}",
                where=dataset.uri,
                hint="encode it again with the recipe's validation.prompts",
            )
        rows = [dataset.prompts.index(prompt) for prompt in prompts]
        text = {name: _rows(column, rows) for name, column in dataset.prompt_text.items()}
        built = build_condition(
            self.inputs.family,
            self.inputs.model_config,
            text,
            self.inputs.encoders,
            target_size=(resolution, resolution),
        )
        return built.to(self.engine.device, self.engine.compute_dtype)

    def _decoder(self) -> Any:
        """The autoencoder; False once it turned out that there is none."""
        if self._autoencoder is None:
            from isthmus.core.encode.autoencoders import load_autoencoder

            try:
                self._autoencoder = load_autoencoder(
                    self.recipe.encoders.autoencoder, self.prompts_dataset.uri, device=str(self.engine.device)
                )
            except IsthmusError as error:
                print(f"warning: no sample grids: {error}", flush=True)
                self._autoencoder = False
        return self._autoencoder or None

    def _draw(self, latents: Tensor, prompts: Sequence[str], title: str) -> bytes:
        from isthmus.core.sample.grids import labelled_grid

        unscaled = latents / self.inputs.scaling_factor + self.inputs.shift_factor
        pictures = []
        with torch.no_grad():
            for row in unscaled:  # One by one: a 1024 px decode needs gigabytes.
                pictures.append(self._decoder().decode(row[None].to(self.engine.device)).float().cpu())
        image = labelled_grid(torch.cat(pictures), prompts, title=title)
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()


def _rows(column: Any, rows: Sequence[int]) -> Any:
    pooled = None if column.pooled is None else column.pooled[list(rows)]
    return type(column)(column.tokens[list(rows)], column.length[list(rows)], pooled)


def _with_sizes(null: Condition, other: Condition) -> Condition:
    """The null text with the sizes of the conditional half."""
    return Condition(tokens=null.tokens, mask=null.mask, pooled=null.pooled, size_crop=other.size_crop)


def check_prompts(recipe: Recipe, stored: Mapping[str, Any] | Sequence[str]) -> None:
    """Refuse validation prompts without a stored embedding, before training starts."""
    for prompt in recipe.validation.prompts:
        if prompt not in stored:
            raise UsageError(
                f"the dataset has no embedding of validation prompt {prompt!r}",
                where="validation.prompts",
                hint="encode it again with the recipe's validation.prompts",
            )
