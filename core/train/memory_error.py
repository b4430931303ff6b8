"""Out of memory, in one line: what the memory went to, and the smallest change that would fit.

With P parameters on n ranks to a copy (1 under ddp), a rank holds 4 P / n bytes each of weights, gradients and EMA, and
what the optimizer keeps (8 P / n for AdamW); these are measured on the rank that failed. Activations are what autograd
keeps of one image (`core/models/profiles.json`, in bf16; twice that in fp32) times the micro-batch. On a CPU the copy
that a checkpoint is written from counts too; beside a GPU it lies in the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isthmus.core.models.memory import (
    USABLE,
    Images,
    Setting,
    change_text,
    gigabytes,
    smaller_micro_batches,
    smallest_change,
)
from isthmus.errors import TrainingFailed

_CPU_SIGN = "can't allocate memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a rank holds whatever the batch."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    staging: int = 0
    """The copy that checkpoints are written from, where it lies in the same memory."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.ema + self.staging


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where memory ran out."""

    footprint: Footprint
    images: Images | None
    setting: Setting
    capacity: int
    """Bytes of the device, or of the machine's memory for each process."""
    rank: int
    world_size: int
    step: int
    stage: int
    rank_batch_size: int
    """Samples of a step on this rank: micro-batches divide it."""

    def need(self, setting: Setting) -> int | None:
        """Bytes under another setting; None when activations are not known."""
        if self.images is None:
            return None
        held = self.footprint.bytes * self.setting.shards // setting.shards
        return held + setting.micro_batch_size * self.images.each(setting.checkpointing)

    def fits(self, setting: Setting) -> bool:
        """Whether a setting's need is below what can be used."""
        need = self.need(setting)
        return need is not None and need <= USABLE * self.capacity


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a device's or the machine's way of saying that there is no memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_SIGN in str(error)


def out_of_memory(situation: Situation) -> TrainingFailed:
    """The error that says it: the arithmetic, and as its hint the smallest change that fits."""
    held, now = situation.footprint, situation.setting
    parts = [("weights", held.weights), ("gradients", held.gradients), ("optimizer", held.optimizer)]
    parts += [("EMA", held.ema), ("the copy for checkpoints", held.staging)]
    sums = " + ".join(f"{name} {gigabytes(size)}" for name, size in parts if size)
    if situation.images is None:
        message = f"{sums} = {gigabytes(held.bytes)} GB, and the activations of {now.micro_batch_size} images"
    else:
        each = situation.images.each(now.checkpointing)
        need = situation.need(now)
        assert need is not None
        message = (
            f"{sums} + activations {gigabytes(now.micro_batch_size * each)} ({now.micro_batch_size} images x "
            f"{each / 1e9:.2f}) = {gigabytes(need)} GB"
        )
    return TrainingFailed(
        f"out of memory at step {situation.step}: {message}; there are {gigabytes(situation.capacity)} GB",
        where=f"rank {situation.rank}",
        hint=_hint(situation),
    )


def _hint(situation: Situation) -> str:
    now = situation.setting
    path = f"stages.{situation.stage}.micro_batch_size"
    if situation.images is None:
        smaller = next(iter(smaller_micro_batches(now.micro_batch_size, situation.rank_batch_size)), None)
        if smaller is not None:
            return f"{path}={smaller} may fit; accumulation follows"
        return "parallel.activation_checkpointing=true, or a smaller model"
    if situation.fits(now):
        return (
            "that should fit: look for other processes on the device, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True if memory is in pieces"
        )
    other = smallest_change(
        now,
        situation.fits,
        world_size=situation.world_size,
        rank_batch_size=situation.rank_batch_size,
    )
    if other is not None:
        return f"{change_text(now, other, situation.stage)} needs {gigabytes(situation.need(other) or 0)} GB"
    return (
        "nothing in the recipe makes it fit: take a larger GPU, more of them under fsdp, or a smaller model"
    )
