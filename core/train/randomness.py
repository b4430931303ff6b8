"""Counter-seeded randomness: what is random about a sample depends on (seed, step, position) alone.

Position i is the sample's place in the global batch of its step. So no rank has a random state to save: a
resumed run, and one on another world size, draw the same posterior noise, noise, timestep and caption dropout
for every sample. Draws are made on the CPU, so that a GPU run and a CPU run draw the same.

torch's CPU generator keeps 32 bits of a seed. Two samples of a long run may therefore share their noise
(of 200 million, about one in twenty does with another); they differ in everything else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1

TRAINING, VALIDATION, GRID, DROPOUT_LAYERS, STRATA, TOKEN_MASK = range(6)
"""What a draw is for; a purpose has its own stream."""


def mix(*values: int) -> int:
    """A 64-bit hash of integers (SplitMix64's finaliser, Steele et al. 2014, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of b samples, float32 on the CPU."""

    posterior: Tensor
    """Standard normal [b, C, H, W]: the point of the autoencoder's posterior."""
    noise: Tensor
    """Standard normal [b, C, H, W]."""
    offset: Tensor
    """Standard normal [b, C, 1, 1]: the constant of each channel that noise offset scales."""
    normal: Tensor
    """Standard normal [b], for logit-normal timesteps."""
    uniform: Tensor
    """Uniform in [0, 1) [b], for the other timestep samplings."""
    dropout: Tensor
    """Uniform in [0, 1) [b]; below `caption_dropout` the caption is dropped."""

    def to(self, device: torch.device) -> Draws:
        """On `device`; from pinned memory the copies do not block."""
        if device.type == "cpu":
            return self
        names = ("posterior", "noise", "offset", "normal", "uniform", "dropout")
        return Draws(**{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def rows(self, start: int, stop: int) -> Draws:
        """Samples `start` to `stop`, as views."""
        part = slice(start, stop)
        return Draws(
            self.posterior[part],
            self.noise[part],
            self.offset[part],
            self.normal[part],
            self.uniform[part],
            self.dropout[part],
        )


def spare_threads() -> int:
    """Threads to draw with beside a GPU: this process's share of the node's cores, one left to it, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, share - 1))


class Randomness:
    """Draws for samples by (seed, purpose, step, position).

    Args:
        seed: the recipe's.
        pin: make draws in page-locked memory, for copies to a GPU that do not block.
        threads: draw for so many samples at a time. A GPU waits while the host draws, a millisecond for 100,000 numbers,
            so beside one a few idle cores are worth having; what is drawn does not depend on it.
    """

    def __init__(self, seed: int, *, pin: bool = False, threads: int = 1) -> None:
        self.seed = seed
        self.pin = pin
        self._generators = [torch.Generator() for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, "draws") if threads > 1 else None

    def draws(
        self,
        step: int,
        positions: Sequence[int],
        shape: tuple[int, int, int],
        purpose: int = TRAINING,
        *,
        strata: int | None = None,
    ) -> Draws:
        """Draws of the samples at `positions` of `step`'s global batch, for latents of `shape` [C, H, W].

        Args:
            strata: the global batch size B, to spread `uniform` and `normal` evenly over it: position i draws from stratum
                (i + k) mod B of B equal ones, k a step's own shift (stratified sampling, McKay et al. 1979; Kingma et al.
                2021, appendix I.1, with one number a sample instead of one for all), and `normal` is the normal quantile
                of that. Neither depends on how the batch is cut into ranks and micro-batches.
        """
        channels, height, width = shape
        size = channels * height * width
        rows = len(positions)
        # One call for all normals of a sample: re-seeding costs less than a second call would.
        normals = torch.empty(rows, 2 * size + channels + 1, pin_memory=self.pin)
        uniforms = torch.empty(rows, 2, pin_memory=self.pin)
        key = mix(self.seed, purpose, step)

        def fill(worker: int) -> None:
            generator = self._generators[worker]
            for row in range(worker, rows, len(self._generators)):
                generator.manual_seed(mix(key, positions[row]) >> 1)
                torch.randn(normals.shape[1], generator=generator, out=normals[row])
                torch.rand(2, generator=generator, out=uniforms[row])

        if self._pool is None:
            fill(0)
        else:
            list(self._pool.map(fill, range(len(self._generators))))
        if strata is not None:
            stratum = (torch.tensor(positions) + mix(key, STRATA) % strata) % strata
            even = (stratum + uniforms[:, 0].double()) / strata
            uniforms[:, 0] = even.clamp(max=1 - 2**-24)  # float32 would round it up to 1
            normals[:, -1] = torch.special.ndtri(even.clamp(2**-53, 1 - 2**-53))
        return Draws(
            posterior=normals[:, :size].view(rows, channels, height, width),
            noise=normals[:, size : 2 * size].view(rows, channels, height, width),
            offset=normals[:, 2 * size : -1].view(rows, channels, 1, 1),
            normal=normals[:, -1],
            uniform=uniforms[:, 0],
            dropout=uniforms[:, 1],
        )

    def seed_layers(self, step: int, rank: int) -> None:
        """Seed torch's own generators, which a model with dropout layers draws from."""
        torch.manual_seed(mix(self.seed, DROPOUT_LAYERS, step, rank) >> 1)
