"""Sections of the recipe that say what is optimised: objective, optimizer, stages, EMA."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, le=10**12)]
Probability = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: strict and immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        # The recipe's one validator is built when the first recipe is read, not one for each class at import.
        defer_build=True,
    )


def _changes(override: Section) -> dict[str, Any]:
    written = {name: getattr(override, name) for name in override.model_fields_set}
    return {name: value for name, value in written.items() if value is not None}


class Objective(Section):
    """The training objective. Formulas and sources: `core/train/objective.py`."""

    prediction_type: Literal["epsilon", "v_prediction", "flow"] = "flow"
    """What the model predicts."""
    noise_schedule: Literal["scaled_linear", "linear"] = "scaled_linear"
    """Betas of epsilon and v_prediction, 1000 timesteps; flow has none."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution of training timesteps; logit_normal and mode: Esser et al. 2024."""
    logit_mean: float = 0.0
    """Of logit_normal."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """Of logit_normal."""
    mode_scale: float = 1.29
    """Of mode."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Timestep shift of flow; grows with the square root of the token ratio."""
    weighting_scheme: Literal["none", "min_snr"] = "none"
    """Weight of a timestep's loss; min_snr: Hang et al. 2023, of epsilon and v_prediction."""
    snr_gamma: Annotated[float, Field(gt=0)] = 5.0
    """Of min_snr."""
    noise_offset: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of a constant added to each channel's noise."""
    caption_dropout: Probability = 0.1
    """Share of samples trained on the null embedding."""


class ObjectiveOverride(Section):
    """A stage's changes to `objective`; what is absent is inherited."""

    prediction_type: Literal["epsilon", "v_prediction", "flow"] | None = None
    """As `objective.prediction_type`."""
    noise_schedule: Literal["scaled_linear", "linear"] | None = None
    """As `objective.noise_schedule`."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] | None = None
    """As `objective.timestep_sampling`."""
    logit_mean: float | None = None
    """As `objective.logit_mean`."""
    logit_std: Annotated[float, Field(gt=0)] | None = None
    """As `objective.logit_std`."""
    mode_scale: float | None = None
    """As `objective.mode_scale`."""
    shift: Annotated[float, Field(gt=0)] | None = None
    """As `objective.shift`."""
    weighting_scheme: Literal["none", "min_snr"] | None = None
    """As `objective.weighting_scheme`."""
    snr_gamma: Annotated[float, Field(gt=0)] | None = None
    """As `objective.snr_gamma`."""
    noise_offset: Annotated[float, Field(ge=0)] | None = None
    """As `objective.noise_offset`."""
    caption_dropout: Probability | None = None
    """As `objective.caption_dropout`."""

    def over(self, objective: Objective) -> Objective:
        """The objective with this stage's changes."""
        return objective.model_copy(update=_changes(self))


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter 2019), torch's implementation."""

    name: Literal["adamw"] = "adamw"
    """The only one so far."""
    # Not strict: YAML has no tuples. The numbers inside stay strict.
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the gradient's first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, times the learning rate; all parameters."""
    implementation: Literal["auto", "foreach", "fused"] = "auto"
    """torch's kernels; auto: fused on GPU, foreach on CPU."""


class EMA(Section):
    """Exponential moving average of the weights; samples and exports use it."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9999
    """After a warm-up of min(decay, (1 + n) / (10 + n))."""
    start: Annotated[int, Field(ge=0)] = 0
    """Global step from which it averages; before, it copies the weights."""
    update_every: Positive = 1
    """Steps between updates."""


class EMAOverride(Section):
    """A stage's changes to `ema`; what is absent is inherited."""

    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """As `ema.decay`."""
    start: Annotated[int, Field(ge=0)] | None = None
    """As `ema.start`."""
    update_every: Positive | None = None
    """As `ema.update_every`."""

    def over(self, ema: EMA) -> EMA:
        """The EMA with this stage's changes."""
        return ema.model_copy(update=_changes(self))


class OnEnter(Section):
    """What a stage does with the state that it inherits."""

    optimizer: Literal["keep", "reset"] = "keep"
    """keep its moments, or reset them to zero."""
    ema: Literal["keep", "reset"] = "keep"
    """keep the average, or reset it to the weights."""


class StageValidation(Section):
    """A stage's changes to `validation`; what is absent is inherited."""

    timestep_bins: Positive | None = None
    """As `validation.timestep_bins`."""
    prompts: list[str] | None = None
    """Must be among `validation.prompts`, whose embeddings are stored."""


class Stage(Section):
    """One step of progressive training."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,47}$")]
    """Shown in logs, metrics and the report; unique."""
    resolution: Positive
    """Pixels; names the shards' sibling files that are read."""
    steps: Positive | None = None
    """Length in optimizer steps; exactly one of `steps` and `samples`."""
    samples: Positive | None = None
    """Length in samples, a multiple of global_batch_size."""
    global_batch_size: Positive
    """Samples of one optimizer step over all ranks."""
    micro_batch_size: Positive
    """Samples of one forward pass on one rank; accumulation follows."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Peak, after the warm-up. Not scaled by the world size."""
    lr_scheduler: Literal["constant", "cosine", "linear", "sqrt"] = "constant"
    """After the warm-up: constant, or down to zero over the stage (sqrt: sqrt(1 - progress))."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up, in steps of this stage."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""
    objective: ObjectiveOverride = ObjectiveOverride.model_construct()
    """Changes to `objective`."""
    ema: EMAOverride = EMAOverride.model_construct()
    """Changes to `ema`."""
    on_enter: OnEnter = OnEnter.model_construct()
    """What happens to inherited state; the first stage inherits none."""
    validation: StageValidation = StageValidation.model_construct()
    """Changes to `validation`."""
    pos_embed_interpolation: Annotated[float, Field(gt=0)] | None = None
    """Scale of the positional embedding in this stage (PixArt-Sigma: 0.5 at 256, 1 at 512, 2 at 1024)."""
    token_mask_ratio: Probability = 0.0
    """Share of image tokens masked in training (MicroDiT)."""

    @property
    def total_steps(self) -> int:
        """Length in optimizer steps."""
        if self.steps is not None:
            return self.steps
        assert self.samples is not None
        return self.samples // self.global_batch_size
