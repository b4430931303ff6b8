"""Out of memory, in one line: what the memory went to, and the smallest change that would fit.

With P parameters on n ranks to a copy (1 under ddp), a rank holds 4 P / n bytes each of weights, gradients and EMA, and
what the optimizer keeps (8 P / n for AdamW); these are measured on the rank that failed. Activations are what autograd
keeps of one image (`core/models/profiles.json`, in bf16; twice that in fp32) times the micro-batch. On a CPU the copy
that a checkpoint is written from counts too; beside a GPU it lies in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from isthmus.core.models.profiles import Profile
from isthmus.errors import TrainingFailed

Checkpointing = bool | Literal["selective"]
USABLE = 0.94
"""Of the memory: the rest goes to the driver, kernels' workspaces and what lies between blocks."""
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
class Setting:
    """What a recipe can change about memory."""

    micro_batch_size: int
    checkpointing: Checkpointing
    strategy: str
    shards: int
    """Ranks that share one copy of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Bytes that autograd keeps of one image's forward pass."""

    plain: int
    recomputed: int
    """With every block recomputed."""

    @classmethod
    def of(cls, profile: Profile | None, resolution: int, precision: str) -> Images | None:
        """From a model's profile; None when it has none at that resolution."""
        if profile is None or resolution not in profile.activation_bytes:
            return None
        wide = 2 if precision == "fp32" else 1
        return cls(
            plain=wide * profile.activation_bytes[resolution],
            recomputed=wide * profile.checkpointed_activation_bytes[resolution],
        )

    def each(self, checkpointing: Checkpointing) -> int:
        """Bytes of an image under a setting; selective recomputes every second block."""
        if checkpointing == "selective":
            return (self.plain + self.recomputed) // 2
        return self.recomputed if checkpointing else self.plain


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
    sums = " + ".join(f"{name} {_gb(size)}" for name, size in parts if size)
    if situation.images is None:
        message = f"{sums} = {_gb(held.bytes)} GB, and the activations of {now.micro_batch_size} images"
    else:
        each = situation.images.each(now.checkpointing)
        need = situation.need(now)
        assert need is not None
        message = (
            f"{sums} + activations {_gb(now.micro_batch_size * each)} ({now.micro_batch_size} images x "
            f"{each / 1e9:.2f}) = {_gb(need)} GB"
        )
    return TrainingFailed(
        f"out of memory at step {situation.step}: {message}; there are {_gb(situation.capacity)} GB",
        where=f"rank {situation.rank}",
        hint=_hint(situation),
    )


def _hint(situation: Situation) -> str:
    now = situation.setting
    path = f"stages.{situation.stage}.micro_batch_size"
    if situation.images is None:
        smaller = next(iter(_smaller(situation)), None)
        if smaller is not None:
            return f"{path}={smaller} may fit; accumulation follows"
        return "parallel.activation_checkpointing=true, or a smaller model"
    if situation.fits(now):
        return (
            "that should fit: look for other processes on the device, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True if memory is in pieces"
        )
    for setting in _changes(situation):
        if situation.fits(setting):
            changed = []
            if setting.micro_batch_size != now.micro_batch_size:
                changed.append(f"{path}={setting.micro_batch_size}")
            if setting.checkpointing != now.checkpointing:
                written = str(setting.checkpointing).lower()
                changed.append(f"parallel.activation_checkpointing={written}")
            if setting.strategy != now.strategy:
                changed.append(f"parallel.strategy={setting.strategy}")
            return f"{' and '.join(changed)} needs {_gb(situation.need(setting) or 0)} GB"
    return (
        "nothing in the recipe makes it fit: take a larger GPU, more of them under fsdp, or a smaller model"
    )


def _changes(situation: Situation) -> Iterator[Setting]:
    """Settings by what they cost in speed: smaller micro-batches, then recomputing, then sharding, then all of it."""
    now = situation.setting
    recomputing: list[Checkpointing] = [now.checkpointing]
    recomputing += [option for option in ("selective", True) if _more(option, now.checkpointing)]
    sharding = [now]
    if now.shards < situation.world_size:
        sharding.append(replace(now, strategy="fsdp", shards=situation.world_size))
    # A fraction of the micro-batch costs little as long as it is not tiny.
    half = [size for size in _smaller(situation) if 4 * size >= now.micro_batch_size]
    for sizes in ([now.micro_batch_size, *half], [now.micro_batch_size, *_smaller(situation)]):
        for base in sharding:
            for checkpointing in recomputing:
                for size in sizes:
                    yield replace(base, micro_batch_size=size, checkpointing=checkpointing)


def _more(option: Checkpointing, than: Checkpointing) -> bool:
    order: list[Checkpointing] = [False, "selective", True]
    return order.index(option) > order.index(than)


def _smaller(situation: Situation) -> list[int]:
    """Smaller micro-batches that divide the rank's batch, largest first."""
    share = situation.rank_batch_size
    return [size for size in range(situation.setting.micro_batch_size - 1, 0, -1) if share % size == 0]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
