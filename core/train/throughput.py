"""How fast training is and where the time goes: images a second, MFU, waits for data and for other ranks.

MFU (Chowdhery et al. 2022, appendix B) is the FLOPs that the model needs for the step's images, forward and backward,
divided by what the GPUs could do at their dense bf16 peak in the step's time, waits included. The FLOPs are counted on
the diffusers class (`core/models/profiles.json`, three forward passes where the backward cannot be counted); what
activation checkpointing computes twice is not counted, nor is validation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.core.models.denoisers import own_train_flops
from isthmus.core.models.presets import CLASSES
from isthmus.core.models.profiles import Profile, measured_profile, profile
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.stages import Stage
from isthmus.errors import IsthmusError


class ExposedCommunication:
    """Seconds of a step in which a rank waits for gradients and losses of others and computes nothing.

    Measured are two stretches: from the end of the backward pass's own work to the end of its exchange of gradients (what the
    exchange did not hide behind the backward pass), and the small all-reduce of the loss. A rank that is ahead of the others
    waits there for them, so a straggler shows here, on every rank but its own. Under fsdp and hsdp the gathers of weights during
    the passes are not in it: it is a lower bound there.

    On a GPU, events on the compute stream mark the stretches, and are read after the step's one wait for the device; on a
    CPU the clock is, as gloo makes the host wait.

    Args:
        device: that computes.
        ranks: with one, nothing is measured.
        clock: seconds, of any beginning.
    """

    def __init__(
        self, device: torch.device, ranks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cuda = device.type == "cuda"
        self._measured = ranks > 1
        self._clock = clock
        self._marks: list[Any] = []

    def watch(self, loss: Tensor) -> None:
        """Before the backward pass of a step's last micro-batch: mark the end of its own work."""
        if self._measured:
            loss.register_hook(self._when_backward_ends)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """The end of a stretch, and the beginning of the next one."""
        if not self._measured:
            return
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._clock())

    def take(self) -> float | None:
        """Seconds of the marks' first and last pair, after the device was waited for; None with one rank.

        The marks of a step: end of the backward pass's work, end of the exchange, beginning and end of the loss's all-reduce.
        """
        marks, self._marks = self._marks, []
        if len(marks) != 4:
            return None
        return self._between(marks[0], marks[1]) + self._between(marks[2], marks[3])

    def _when_backward_ends(self, _: Tensor) -> None:
        # The engine runs these in the order of their making, when all work of the pass is issued. The loss comes first, so
        # this one runs before those of DDP and FSDP2, in which the exchange is waited for.
        torch.autograd.Variable._execution_engine.queue_callback(self.mark)

    def _between(self, start: Any, end: Any) -> float:
        seconds: float = start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return max(0.0, seconds)


class Throughput:
    """Figures of a step, for the metrics row and the bar.

    Args:
        recipe: its model and GPU.
        ranks: GPUs, or processes of a CPU.
        cuda: whether it runs on GPUs; on a CPU there is no MFU.
        find_profile: what counts the model's FLOPs when they are not stored; takes seconds.
    """

    def __init__(
        self,
        recipe: Recipe,
        ranks: int,
        *,
        cuda: bool,
        find_profile: Callable[..., Profile] = measured_profile,
    ) -> None:
        self._recipe = recipe
        self._ranks = ranks
        self._peak = PEAK_FLOPS.get(recipe.compute.gpu) if cuda else None
        self._flops: Mapping[int, int] = {}
        if self._peak is not None:
            self._flops = _train_flops(recipe, find_profile)

    def figures(self, stage: Stage, latent_shape: Sequence[int], seconds: float) -> dict[str, float | None]:
        """Of a step of `stage` that took `seconds`.

        Args:
            latent_shape: [..., H, W] of the step's bucket; buckets of a resolution differ a little in size.

        Returns:
            `samples_per_s` of all ranks, `samples_per_s_per_gpu`, and `mfu` in 0 to 1: None on a CPU, and for a model whose
            FLOPs nobody could count.
        """
        rate = stage.global_batch_size / seconds
        flops = self._flops.get(stage.resolution)
        mfu = None
        # Of a stage that leaves tokens out nobody has counted the FLOPs.
        if self._peak is not None and flops and not stage.token_mask_ratio:
            pixels = math.prod(latent_shape[-2:]) * self._recipe.encoders.autoencoder.factor**2
            mfu = rate * flops * (pixels / stage.resolution**2) / (self._peak * self._ranks)
        return {"samples_per_s": rate, "samples_per_s_per_gpu": rate / self._ranks, "mfu": mfu}


def _train_flops(recipe: Recipe, find_profile: Callable[..., Profile]) -> Mapping[int, int]:
    """FLOPs of an image, forward and backward, by resolution."""
    resolutions = sorted({stage.resolution for stage in recipe.stages})
    if recipe.model.family not in CLASSES:
        return _own_train_flops(recipe, resolutions)
    known = profile(recipe.model)
    if known is None or not set(resolutions) <= set(known.train_flops):
        try:
            known = find_profile(
                recipe.model,
                resolutions=resolutions,
                factor=recipe.encoders.autoencoder.factor,
                text_tokens=sum(encoder.max_tokens for encoder in recipe.encoders.text),
            )
        except IsthmusError as error:
            print(f"warning: no MFU: {error}", flush=True)
            return {}
    return known.train_flops


def _own_train_flops(recipe: Recipe, resolutions: Sequence[int]) -> Mapping[int, int]:
    """The same as a team's own denoiser counts it; empty where it does not."""
    factor, tokens = recipe.encoders.autoencoder.factor, sum(e.max_tokens for e in recipe.encoders.text)
    cells = {resolution: resolution // factor for resolution in resolutions}
    config = recipe.model.config
    try:
        counted = {r: own_train_flops(recipe.model.family, config, c, c, tokens) for r, c in cells.items()}
    except IsthmusError as error:
        print(f"warning: no MFU: {error}", flush=True)
        return {}
    return {resolution: int(flops) for resolution, flops in counted.items() if flops is not None}


def shares(row: Mapping[str, Any]) -> str:
    """MFU, and the shares of a step's time that went elsewhere, as the bar shows them."""
    parts = []
    if row.get("mfu") is not None:
        parts.append(f"MFU {100 * row['mfu']:.1f} %")
    seconds = row["step_s"] + row.get("checkpoint_stall_s", 0.0)
    for name, field in (
        ("data", "data_wait_s"),
        ("exchange", "exposed_communication_s"),
        ("checkpoint", "checkpoint_stall_s"),
    ):
        share = 100 * (row.get(field) or 0.0) / seconds
        if share >= 1:
            parts.append(f"{name} {share:.0f} %")
    return "  ".join(parts)
