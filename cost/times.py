"""Where the hours of a run go: stages, validation, checkpoints, start-up, interruptions. No price here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.models.memory import EIGHT_BIT_BYTES
from isthmus.core.models.profiles import Profile, profile
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.assumptions import BILLED_ALLOCATION, Assumptions
from isthmus.cost.measured import Measurement
from isthmus.cost.placing import Place
from isthmus.cost.spot import Interruptions, daly_interval, expected_hours, expected_interruptions

VALIDATION_EFFICIENCY = 0.5
"""Of training's share of the peak, in the small batches of a validation; ours."""
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Hours of a run at one speed and one rate of interruptions. `total_h` is what passes, `billed_h` what is paid."""

    stages_h: tuple[float, ...]
    validation_h: float
    checkpoints: float
    """How many."""
    checkpoints_h: float
    """That training stands still for them."""
    allocation_h: float
    """Until the nodes are there, the first time."""
    pull_h: float
    start_h: float
    compile_h: float
    end_h: float
    """After the last step, where it was measured: the last checkpoint and validation, and the end of the processes."""
    interruptions: float
    """Expected number of them."""
    interrupted_h: float
    """Work done twice, and restarts."""
    idle_h: float
    """Nodes that stand idle after the end; not part of `total_h`."""
    unbilled_h: float
    """Of `total_h`: while nodes are waited for, where the cloud does not bill it."""
    checkpoint_bytes: int | None
    best_interval_h: float
    """Daly's, for this rate."""
    interval_h: float
    """Between the recipe's checkpoints."""
    interruption_model: Interruptions
    work_h: float
    """Stages and validation: what interruptions strike."""

    @property
    def total_h(self) -> float:
        """From submission to the end."""
        around = self.allocation_h + self.pull_h + self.start_h + self.compile_h + self.end_h
        return around + self.work_h + self.checkpoints_h + self.interrupted_h

    @property
    def billed_h(self) -> float:
        """Of every node."""
        return self.total_h - self.unbilled_h + self.idle_h


def times(
    recipe: Recipe,
    place: Place,
    images_per_s: Sequence[float],
    rate: float,
    assume: Assumptions,
    measured: Measurement | None = None,
) -> Times:
    """The hours of a recipe on the machines of a place.

    Args:
        recipe: on those machines (`placing.with_place`).
        images_per_s: of all GPUs, for each stage.
        rate: interruptions of one node in an hour.
        assume: filled in for the backend.
        measured: what a short run told of start-up, checkpoints and validation.
    """
    known = profile(recipe.model)
    stages = tuple(
        stage.total_steps * stage.global_batch_size / speed / _HOUR
        for stage, speed in zip(recipe.stages, images_per_s, strict=True)
    )
    if measured is not None and measured.first_validation_s is not None:
        validation = _measured_validation_h(recipe, sum(stages), measured)
    else:
        validation = sum(
            _validation_h(recipe, index, hours, speed, known)
            for index, (hours, speed) in enumerate(zip(stages, images_per_s, strict=True))
        )
    work = sum(stages) + validation
    size = checkpoint_bytes(recipe, known)
    stall = _stall_h(recipe, place, size, assume, measured)
    every = recipe.checkpoint.every
    if every.steps is not None:
        # The one at the end is one of the multiples, or one more.
        count = float(-(-_steps(recipe) // every.steps))
    else:
        count = max(1.0, sum(stages) * _HOUR / (every.seconds or 1.0))
    if measured is not None:
        # The last one is part of the end that was measured.
        count = max(0.0, count - 1)
    allocation, pull = assume.allocation_s / _HOUR, assume.image_gb / assume.pull_gb_per_s / _HOUR
    start = (measured.start_s if measured else assume.start_s) / _HOUR
    once = assume.compile_s / _HOUR if recipe.parallel.compile else 0.0
    # A measured start has compiled the first stage already.
    compiling = once * (len(recipe.stages) - (1 if measured else 0))
    loading = (size or 0) / 1e9 / (assume.store_gb_per_s * place.nodes) / _HOUR
    by = Interruptions(
        per_node_hour=rate,
        nodes=place.nodes,
        checkpoint_h=stall,
        interval_h=work / max(1.0, count),
        restart_h=allocation + pull + start + (0.0 if measured else once) + loading,
    )
    whole = expected_hours(work, by)
    count_of = expected_interruptions(work, by)
    billed_allocation = BILLED_ALLOCATION.get(place.backend, True)
    return Times(
        stages_h=stages,
        validation_h=validation,
        checkpoints=count,
        checkpoints_h=count * stall,
        allocation_h=allocation,
        pull_h=pull,
        start_h=start,
        compile_h=compiling,
        end_h=measured.end_s / _HOUR if measured else 0.0,
        interruptions=count_of,
        interrupted_h=max(0.0, whole - work - count * stall),
        idle_h=assume.idle_s / _HOUR,
        unbilled_h=0.0 if billed_allocation else allocation * (1 + count_of),
        checkpoint_bytes=size,
        best_interval_h=daly_interval(stall, by.mean_h),
        interval_h=by.interval_h,
        interruption_model=by,
        work_h=work,
    )


def checkpoint_bytes(recipe: Recipe, known: Profile | None) -> int | None:
    """Of one checkpoint: weights and EMA in fp32 and AdamW's two moments, as bytes or not, or muon's one; None of an unknown model."""
    if known is None:
        return None
    moments = {"adamw": 8.0, "adamw_8bit": EIGHT_BIT_BYTES, "muon": 4.0}[recipe.optimizer.name]
    return int((4 + 4 + moments) * known.parameters)


def row_bytes(recipe: Recipe, resolution: int) -> int:
    """Of one sample as it is read: latent mean and log-variance in fp16, tokens and pooled vectors of all text encoders."""
    autoencoder = recipe.encoders.autoencoder
    latent = 2 * 2 * autoencoder.latent_channels * (resolution // autoencoder.factor) ** 2
    text = sum(2 * (text.max_tokens * text.width + (text.pooled_width or 0)) for text in recipe.encoders.text)
    return latent + text


def _stall_h(
    recipe: Recipe, place: Place, size: int | None, assume: Assumptions, measured: Measurement | None
) -> float:
    if measured is not None and measured.checkpoint_stall_s is not None:
        return measured.checkpoint_stall_s / _HOUR
    gigabytes = (size or 0) / 1e9
    if recipe.checkpoint.asynchronous:
        # Spread evenly over the ranks, each copies its share (docs/checkpoints.md).
        ranks = place.nodes * place.gpus_per_node
        return (assume.stall_s + gigabytes / ranks / assume.host_copy_gb_per_s) / _HOUR
    return (assume.stall_s + gigabytes / place.nodes / assume.store_gb_per_s) / _HOUR


def _measured_validation_h(recipe: Recipe, hours: float, measured: Measurement) -> float:
    """Of all validations but the last one, which is part of the end that was measured."""
    every = recipe.validation.every
    if every.steps is not None:
        count = float(max(0, -(-_steps(recipe) // every.steps) - 1))
    else:
        count = hours * _HOUR / (every.seconds or 1.0)
    first = measured.first_validation_s or 0.0
    again = first if measured.validation_s is None else measured.validation_s
    return (min(count, 1.0) * first + max(0.0, count - 1) * again) / _HOUR


def _steps(recipe: Recipe) -> int:
    return sum(stage.total_steps for stage in recipe.stages)


def _validation_h(
    recipe: Recipe,
    index: int,
    hours: float,
    speed: float,
    known: Profile | None,
) -> float:
    """Of all validations of a stage; all ranks share one."""
    validation, stage = recipe.validation, recipe.stages[index]
    prompts = validation.prompts if stage.validation.prompts is None else stage.validation.prompts
    if not prompts and not validation.loss_by_timestep:
        return 0.0
    every = validation.every
    count = stage.total_steps / every.steps if every.steps else hours * _HOUR / (every.seconds or 1.0)
    bins = stage.validation.timestep_bins or validation.timestep_bins
    passes = validation.samples * bins if validation.loss_by_timestep else 0
    guided = 2 if validation.guidance_scale > 1 else 1
    ranks = recipe.compute.nodes * recipe.compute.gpus_per_node
    # Each rank draws the same number of pictures, the last ones twice.
    passes += -(-len(prompts) // ranks) * ranks * validation.sampling_steps * guided
    trained, forward = (
        (known.train_flops.get(stage.resolution), known.forward_flops.get(stage.resolution))
        if known
        else (None, None)
    )
    # A forward and backward pass are three forward passes where nobody counted them.
    ratio = trained / forward if trained and forward else 3.0
    return count * passes / (speed * ratio * VALIDATION_EFFICIENCY) / _HOUR
