"""Denoising with diffusers' own schedulers, set up to match the training objective.

The trainer calls :func:`sample_latents` for its grids (every rank runs the same number of forward passes, so the
collectives of a sharded model stay in step) and ``isthmus sample`` calls it on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor], Tensor]
"""``(noisy [n, C, H, W] float32, timestep [n] float32 in 0..1000) -> prediction [n, C, H, W]``."""

PredictionType = Literal["epsilon", "v_prediction", "flow"]
NoiseSchedule = Literal["scaled_linear", "linear"]
SchedulerName = Literal["auto", "flow_match_euler", "ddim", "euler", "dpmsolver"]

TRAIN_TIMESTEPS = 1000
BETAS: dict[str, tuple[float, float]] = {"scaled_linear": (0.00085, 0.012), "linear": (0.0001, 0.02)}
"""First and last beta of each noise schedule: Stable Diffusion's (Rombach et al. 2022) and DDPM's (Ho et al. 2020)."""


def resolve_scheduler(name: str, prediction_type: str) -> str:
    """The scheduler that ``auto`` stands for, after checking that it can sample this prediction type.

    Raises:
        ValueError: flow needs ``flow_match_euler``, and only flow can use it.
    """
    if name == "auto":
        return "flow_match_euler" if prediction_type == "flow" else "ddim"
    if (name == "flow_match_euler") != (prediction_type == "flow"):
        raise ValueError(f"scheduler {name} cannot sample prediction_type {prediction_type}")
    return name


def make_scheduler(
    prediction_type: str,
    *,
    scheduler: str = "auto",
    noise_schedule: str = "scaled_linear",
    shift: float = 1.0,
) -> Any:
    """The diffusers scheduler object that inverts this training objective.

    Timesteps are spaced ``trailing``, so that sampling starts at the noisiest timestep that was trained
    (Lin et al. 2024, "Common diffusion noise schedules and sample steps are flawed").

    Args:
        prediction_type: ``epsilon``, ``v_prediction`` or ``flow``.
        scheduler: ``flow_match_euler``, ``ddim``, ``euler``, ``dpmsolver`` or ``auto``.
        noise_schedule: betas of epsilon and v_prediction; ignored by flow.
        shift: timestep shift of flow (Esser et al. 2024); ignored otherwise.
    """
    import diffusers

    name = resolve_scheduler(scheduler, prediction_type)
    if name == "flow_match_euler":
        return diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_TIMESTEPS, shift=shift)
    first, last = BETAS[noise_schedule]
    common = {
        "num_train_timesteps": TRAIN_TIMESTEPS,
        "beta_start": first,
        "beta_end": last,
        "beta_schedule": noise_schedule,
        "prediction_type": prediction_type,
        "timestep_spacing": "trailing",
        "steps_offset": 1,  # of other spacings; diffusers calls any other value outdated
    }
    if name == "ddim":
        return diffusers.DDIMScheduler(clip_sample=False, **common)
    if name == "euler":
        return diffusers.EulerDiscreteScheduler(**common)
    return diffusers.DPMSolverMultistepScheduler(**common)


def even_sigmas(family: str, steps: int) -> list[float] | None:
    """Noise levels before the shift, where the family's pipeline in diffusers sets its own; None: the scheduler's.

    `FluxPipeline` takes 1, 1 - 1/n, ..., 1/n; the flow scheduler by itself ends near its smallest trained level.
    """
    return [1 - index / steps for index in range(steps)] if family == "flux" else None


def initial_noise(
    shape: Sequence[int], seed: int, *, first: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal float32 noise of ``shape`` [n, C, H, W]; row i depends on (seed, first + i) only.

    So a sample is the same whichever batch, rank or device draws it.
    """
    rows = []
    for index in range(first, first + shape[0]):
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + index) % 2**63)
        rows.append(torch.randn(tuple(shape[1:]), generator=generator))
    return torch.stack(rows).to(device)


def guided(predict: Predict, guidance_scale: float) -> Predict:
    """Classifier-free guidance (Ho and Salimans 2022): ``null + scale * (conditional - null)``.

    Args:
        predict: is given 2n rows, the noisy latents twice; it must condition the first n on the captions and
            the last n on the null embedding.
        guidance_scale: 1 leaves ``predict`` alone, which is then given n rows, all conditional.
    """
    if guidance_scale == 1:
        return predict

    def combined(noisy: Tensor, timestep: Tensor) -> Tensor:
        both = predict(torch.cat([noisy, noisy]), torch.cat([timestep, timestep]))
        conditional, null = both.float().chunk(2)
        return null + guidance_scale * (conditional - null)

    return combined


@torch.no_grad()
def sample_latents(
    predict: Predict,
    *,
    shape: Sequence[int],
    prediction_type: str,
    scheduler: str = "auto",
    noise_schedule: str = "scaled_linear",
    shift: float = 1.0,
    steps: int = 25,
    guidance_scale: float = 4.0,
    seed: int = 0,
    first: int = 0,
    device: torch.device | str = "cpu",
    noise: Tensor | None = None,
    sigmas: Sequence[float] | None = None,
) -> Tensor:
    """Latents at the training scale, denoised from noise in ``steps`` calls of ``predict``.

    Args:
        predict: the denoiser with its conditions bound; see :func:`guided` for how many rows it is given.
            Timesteps are diffusers' own: ``1000 * sigma`` for flow, the timestep's index otherwise.
        shape: [n, C, H, W] of the result.
        prediction_type, scheduler, noise_schedule, shift: see :func:`make_scheduler`.
        steps: denoising steps, so forward passes.
        guidance_scale: 1 is no guidance.
        seed, first: noise of row i comes from (seed, first + i); see :func:`initial_noise`.
        noise: standard normal latents to start from instead.
        sigmas: of flow, the noise levels to go through, before the shift; see :func:`even_sigmas`.

    Returns:
        float32 [n, C, H, W]; divide by the autoencoder's scaling factor and add its shift before decoding.
    """
    inverse = make_scheduler(prediction_type, scheduler=scheduler, noise_schedule=noise_schedule, shift=shift)
    if sigmas is not None and prediction_type == "flow":
        inverse.set_timesteps(sigmas=list(sigmas), device=device)
    else:
        inverse.set_timesteps(steps, device=device)
    step = guided(predict, guidance_scale)
    latents = (initial_noise(shape, seed, first=first) if noise is None else noise).to(device).float()
    latents = latents * getattr(inverse, "init_noise_sigma", 1.0)
    for timestep in inverse.timesteps:
        noisy = latents
        if hasattr(inverse, "scale_model_input"):
            noisy = inverse.scale_model_input(latents, timestep)
        rows = timestep.to(device=device, dtype=torch.float32).expand(shape[0])
        prediction = step(noisy, rows).float()
        latents = inverse.step(prediction, timestep, latents, return_dict=False)[0]
    return latents
