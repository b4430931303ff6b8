"""A trained run, ready to sample: averaged weights, autoencoder, text encoders, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isthmus.core.models.bringing import bring
from isthmus.core.models.conditioning import Condition, build_condition
from isthmus.core.models.families import build_denoiser, predict, resolved_config
from isthmus.core.models.profiles import downsampling
from isthmus.core.models.tokens import place_tokens
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Objective, Stage
from isthmus.core.sample.sampling import even_sigmas, sample_latents
from isthmus.errors import CheckpointError, DatasetNotFound, UsageError
from isthmus.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.text import TextEncoderRunner
    from isthmus.storage.shards import Dataset, TextColumn

_CELLS = 2**16
"""Latent cells denoised at once: 1024 samples of 8 x 8 cells, 4 of 128 x 128."""


@dataclass(eq=False)
class SampleableRun:
    """The denoiser of one checkpoint and what turns captions into pictures with it."""

    run: RunDirectory
    recipe: Recipe
    """Resolved, as trained."""
    step: int
    """Of the checkpoint."""
    stage: Stage
    """The stage that the checkpoint was written in; its resolution and objective are what was learned last."""
    denoiser: nn.Module
    """EMA weights, float32, evaluation mode."""
    device: torch.device
    dataset: Dataset | None
    """The first source, where it can be reached: it holds the null embedding, and a patch_pca autoencoder."""

    @cached_property
    def objective(self) -> Objective:
        """What the denoiser predicts."""
        return self.stage.objective_over(self.recipe.objective)

    @cached_property
    def autoencoder(self) -> Autoencoder:
        """Loaded when first needed."""
        from isthmus.core.encode.autoencoders import load_autoencoder

        where = self.dataset.uri if self.dataset is not None else ""
        return load_autoencoder(self.recipe.encoders.autoencoder, where, device=str(self.device))

    @cached_property
    def text_encoders(self) -> dict[str, TextEncoderRunner]:
        """By name, loaded when first needed, and checked against the fingerprints of the dataset.

        Raises:
            UsageError: an encoder is not the one that the dataset was encoded with.
        """
        from isthmus.core.encode.text import load_text_encoders

        encoders = load_text_encoders(self.recipe, device=str(self.device))
        stored = {spec.name: spec.fingerprint for spec in self.dataset.spec.text} if self.dataset else {}
        for name, encoder in encoders.items():
            if stored.get(name, encoder.fingerprint) != encoder.fingerprint:
                raise UsageError(
                    f"text encoder {name} is not the one that the training data was encoded with",
                    where=self.run.uri,
                    hint="sample with the encoder that the recipe's source named at that time",
                )
        return encoders

    def condition(self, prompts: Sequence[str], size: tuple[int, int]) -> Condition:
        """The conditioning of prompts, for pictures of ``size`` (height, width) pixels."""
        return self._condition(
            {name: encoder.encode(list(prompts)) for name, encoder in self.text_encoders.items()}, size
        )

    def null_condition(self, size: tuple[int, int]) -> Condition:
        """The one-row conditioning that caption dropout trained: the stored one, or that of an empty caption."""
        if self.dataset is not None:
            return self._condition(self.dataset.null_text, size)
        return self.condition([""], size)

    def _condition(self, text: Mapping[str, TextColumn], size: tuple[int, int]) -> Condition:
        built = build_condition(
            self.recipe.model.family,
            resolved_config(self.denoiser),
            text,
            self.recipe.encoders,
            target_size=size,
        )
        return built.to(self.device, torch.float32)

    @torch.no_grad()
    def predict(self, noisy: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The denoiser's prediction, float32; in bfloat16 inside on a GPU, when it was trained so."""
        lower = self.device.type == "cuda" and self.recipe.parallel.precision == "bf16"
        with torch.autocast("cuda", torch.bfloat16) if lower else nullcontext():
            return predict(self.denoiser, self.recipe.model.family, noisy, timestep, condition).float()

    def sample(
        self,
        prompts: Sequence[str],
        *,
        steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int = 0,
        resolution: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Pictures for prompts.

        Args:
            prompts: n captions; each occurrence of a caption gives another picture.
            steps, guidance_scale: default as in the recipe's validation.
            seed: of the initial noise, together with the prompt's position.
            resolution: pixels along a side; default the stage's.
            progress: called with (pictures done, n).

        Returns:
            float32 [n, 3, resolution, resolution] in [-1, 1], on the CPU.

        Raises:
            UsageError: the resolution does not fit the autoencoder and the model.
        """
        pixels = resolution or self.stage.resolution
        factor = self.recipe.encoders.autoencoder.factor
        config = resolved_config(self.denoiser)
        multiple = factor * downsampling(self.recipe.model.family, config)
        if pixels % multiple:
            raise UsageError(f"resolution {pixels} is not a multiple of {multiple}")
        cells = pixels // factor
        at_once = max(1, _CELLS // cells**2)
        pictures = []
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            latents = self.sample_latents(
                part, cells=cells, steps=steps, guidance_scale=guidance_scale, seed=seed, first=start
            )
            pictures.append(self.decode(latents))
            if progress is not None:
                progress(min(start + at_once, len(prompts)), len(prompts))
        return torch.cat(pictures)

    def sample_latents(
        self,
        prompts: Sequence[str],
        *,
        cells: int,
        steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int = 0,
        first: int = 0,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Latents [n, C, cells, cells] at the training scale; arguments as in :func:`sampling.sample_latents`."""
        validation = self.recipe.validation
        scale = validation.guidance_scale if guidance_scale is None else guidance_scale
        pixels = cells * self.recipe.encoders.autoencoder.factor
        condition = self.condition(prompts, (pixels, pixels))
        if scale != 1:
            null = self.null_condition((pixels, pixels)).expand(len(prompts))
            condition = Condition.cat([condition, null])
        objective = self.objective
        steps = validation.sampling_steps if steps is None else steps
        return sample_latents(
            lambda noisy, timestep: self.predict(noisy, timestep, condition),
            shape=(len(prompts), self.recipe.encoders.autoencoder.latent_channels, cells, cells),
            prediction_type=objective.prediction_type,
            scheduler=validation.scheduler,
            noise_schedule=objective.noise_schedule,
            shift=objective.flow_shift,
            steps=steps,
            guidance_scale=scale,
            seed=seed,
            first=first,
            device=self.device,
            noise=noise,
            sigmas=even_sigmas(self.recipe.model.family, steps),
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents at the training scale [n, C, h, w] -> pictures in [-1, 1], on the CPU."""
        unscaled = latents / self.autoencoder.scaling_factor + self.autoencoder.shift_factor
        # One by one: a 1024 px decode needs gigabytes.
        pictures = [self.autoencoder.decode(row[None]).float().cpu() for row in unscaled]
        return torch.cat(pictures).clamp(-1, 1)


def load_run(uri: str, *, step: int | None = None, device: str = "auto") -> SampleableRun:
    """The newest committed checkpoint of a run, or the one of ``step``, with averaged weights.

    Args:
        uri: the run directory, a path or URI.
        device: a torch device; ``auto`` is the first GPU, or the CPU.

    Raises:
        RunNotFound: no run there.
        UsageError: it has no committed checkpoint yet, or none of that step.
        CheckpointError: the checkpoint is damaged or of another model.
        DatasetNotFound: the autoencoder lies beside shards that cannot be reached.
    """
    from isthmus.core.recipe import parse_recipe
    from isthmus.core.train.checkpoint import read_state, read_weights
    from isthmus.core.train.initial import recorded

    run = RunDirectory.open(uri)
    own_code = run.read_run_json().get("code")
    if own_code:
        bring(run, own_code["sha256"])
    recipe = recorded(parse_recipe(run.read_recipe(), filename=f"{run.uri}/recipe.yaml").recipe, run)
    committed = run.checkpoints()
    if not committed:
        raise UsageError(
            "no committed checkpoint yet", where=run.uri, hint="wait for `checkpoint.every`, or stop the run"
        )
    if step is not None and step not in committed:
        raise UsageError(
            f"no committed checkpoint of step {step}",
            where=run.uri,
            hint=f"there are {', '.join(map(str, committed))}",
        )
    chosen = committed[-1] if step is None else step
    state = read_state(run.checkpoint_uri(chosen))
    weights = read_weights(run, chosen, "ema")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    denoiser = build_denoiser(recipe.model, recipe.seed)
    try:
        denoiser.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"does not fit the recipe's model: {error}", where=run.uri) from error
    stage = recipe.stages[max(state.stage, 0)]
    grid = stage.resolution // recipe.encoders.autoencoder.factor
    place_tokens(
        denoiser,
        grid // downsampling(recipe.model.family, resolved_config(denoiser)),
        stage.pos_embed_interpolation,
    )
    return SampleableRun(
        run=run,
        recipe=recipe,
        step=chosen,
        stage=stage,
        denoiser=denoiser.to(where).eval().requires_grad_(False),
        device=where,
        dataset=_dataset(recipe),
    )


def _dataset(recipe: Recipe) -> Dataset | None:
    from isthmus.storage.shards import open_dataset

    uri: Any = recipe.data.sources[0].uri
    try:
        return open_dataset(uri)
    except DatasetNotFound:
        if recipe.encoders.autoencoder.kind == "patch_pca":
            raise
        return None
