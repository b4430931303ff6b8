"""Sections of the recipe that say what is optimised: objective, optimizer, stages, EMA."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


TimestepSampling = Literal["uniform", "logit_normal", "mode", "cosmap"]
Weighting = Literal["none", "min_snr", "soft_min_snr", "p2", "cosmap", "sigma_sqrt"]
Shift = Annotated[float, Field(gt=0)] | Literal["sd3", "flux"]


def shift_at(rule: str, resolution: int) -> float:
    """Flow's timestep shift for square pictures of `resolution` pixels a side.

    Args:
        rule: sd3: sqrt(m / n), m pixels against n = 256 x 256, so resolution / 256 (Esser et al. 2024, eq. 23; n is where
            their schedule is not shifted); flux: exp(mu), mu on the line through 0.5 at 256 and 1.15 at 4096 tokens of
            16 x 16 pixels (Black Forest Labs, `flux.sampling.get_schedule`; diffusers' `calculate_shift`).
        resolution: of a stage.
    """
    if rule == "sd3":
        return resolution / 256
    tokens = (resolution / 16) ** 2
    slope = (1.15 - 0.5) / (4096 - 256)
    return math.exp(0.5 + slope * (tokens - 256))


class Objective(Section):
    """The training objective. Formulas and sources: `core/train/objective.py`."""

    prediction_type: Literal["epsilon", "v_prediction", "flow"] = "flow"
    """What the model predicts."""
    noise_schedule: Literal["scaled_linear", "linear"] = "scaled_linear"
    """Betas of epsilon and v_prediction, 1000 timesteps; flow has none."""
    timestep_sampling: TimestepSampling = "uniform"
    """Distribution of training timesteps; logit_normal, mode and cosmap: Esser et al. 2024."""
    quasi_random: bool = False
    """Spread the timesteps of a global batch evenly over their distribution (Kingma et al. 2021); false: each on its own."""
    logit_mean: float = 0.0
    """Of logit_normal."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """Of logit_normal."""
    mode_scale: float = 1.29
    """Of mode."""
    shift: Shift = 1.0
    """Timestep shift of flow: a number, or a rule that follows a stage's resolution. sd3: resolution / 256; flux: exp of a line from 0.5 at 256 px to 1.15 at 1024 px, by tokens."""
    weighting_scheme: Weighting = "none"
    """Weight of a timestep's loss. Of epsilon and v_prediction: min_snr, soft_min_snr, p2; of flow: cosmap, sigma_sqrt."""
    snr_gamma: Annotated[float, Field(gt=0)] = 5.0
    """Of min_snr and soft_min_snr: where the signal-to-noise ratio is cut."""
    p2_gamma: Annotated[float, Field(gt=0)] = 1.0
    """Of p2: the exponent."""
    noise_offset: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of a constant added to each channel's noise."""
    caption_dropout: Probability = 0.1
    """Share of samples trained on the null embedding."""

    @property
    def flow_shift(self) -> float:
        """The shift as a number.

        Raises:
            ValueError: it is a rule, and whose resolution is not known here; see :meth:`Stage.objective_over`.
        """
        if isinstance(self.shift, str):
            raise ValueError(
                f"objective.shift {self.shift} is a rule; a stage's resolution makes it a number"
            )
        return self.shift


class ObjectiveOverride(Section):
    """A stage's changes to `objective`; what is absent is inherited."""

    prediction_type: Literal["epsilon", "v_prediction", "flow"] | None = None
    """As `objective.prediction_type`."""
    noise_schedule: Literal["scaled_linear", "linear"] | None = None
    """As `objective.noise_schedule`."""
    timestep_sampling: TimestepSampling | None = None
    """As `objective.timestep_sampling`."""
    quasi_random: bool | None = None
    """As `objective.quasi_random`."""
    logit_mean: float | None = None
    """As `objective.logit_mean`."""
    logit_std: Annotated[float, Field(gt=0)] | None = None
    """As `objective.logit_std`."""
    mode_scale: float | None = None
    """As `objective.mode_scale`."""
    shift: Shift | None = None
    """As `objective.shift`."""
    weighting_scheme: Weighting | None = None
    """As `objective.weighting_scheme`."""
    snr_gamma: Annotated[float, Field(gt=0)] | None = None
    """As `objective.snr_gamma`."""
    p2_gamma: Annotated[float, Field(gt=0)] | None = None
    """As `objective.p2_gamma`."""
    noise_offset: Annotated[float, Field(ge=0)] | None = None
    """As `objective.noise_offset`."""
    caption_dropout: Probability | None = None
    """As `objective.caption_dropout`."""

    def over(self, objective: Objective) -> Objective:
        """The objective with this stage's changes."""
        return objective.model_copy(update=_changes(self))


def _no_other_8bit(value: Any) -> Any:
    if isinstance(value, str) and "8bit" in value.replace("_", "") and value != "adamw_8bit":
        raise ValueError("adamw, adamw_8bit or muon (adamw_8bit is the one with moments of 8 bits)")
    return value


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter 2019), also with moments of 8 bits (Dettmers et al. 2022), or Muon (Jordan et al. 2024)."""

    name: Annotated[Literal["adamw", "adamw_8bit", "muon"], BeforeValidator(_no_other_8bit)] = "adamw"
    """adamw_8bit: AdamW whose moments are stored as bytes, where a parameter's rows are multiples of 64; muon: orthogonalised momentum for the matrices of the model's blocks, AdamW for everything else."""
    # Not strict: YAML has no tuples. The numbers inside stay strict.
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: Beta = 0.95
    """Of muon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, times the learning rate."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """matrices: none on biases, norms and embeddings."""
    implementation: Literal["auto", "foreach", "fused"] = "auto"
    """torch's kernels of AdamW, of adamw_8bit and muon for what they leave to it; auto: fused on GPU, foreach on CPU."""


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

    def objective_over(self, objective: Objective) -> Objective:
        """The objective with this stage's changes, and its shift as a number."""
        changed = self.objective.over(objective)
        if not isinstance(changed.shift, str):
            return changed
        return changed.model_copy(update={"shift": shift_at(changed.shift, self.resolution)})

    @property
    def total_steps(self) -> int:
        """Length in optimizer steps."""
        if self.steps is not None:
            return self.steps
        assert self.samples is not None
        return self.samples // self.global_batch_size
