"""The training objective: noise a latent, say what to predict and how much an error weighs.

Formulas and where they come from:

epsilon, v_prediction
    z_t = sqrt(a_t) x + sqrt(1 - a_t) n, a_t the cumulative product of 1 - beta over 1000 steps
    (Ho et al. 2020, eq. 4; betas `linear` from the same, `scaled_linear` from Rombach et al. 2022).
    epsilon predicts n; v_prediction predicts sqrt(a_t) n - sqrt(1 - a_t) x (Salimans and Ho 2022, section 4).
flow
    z_t = (1 - t) x + t n, predicts n - x (rectified flow; Esser et al. 2024, eq. 13 and the text below it).
timestep shift (flow)
    t' = s t / (1 + (s - 1) t) (Esser et al. 2024, eq. 23).
    s may follow the resolution, see `isthmus.core.recipe.stages.shift_at`.
timestep sampling
    logit_normal: t = sigmoid(m + s n) (eq. 19); mode: t = 1 - u - s (cos^2(pi u / 2) - 1 + u) (eq. 20);
    cosmap: t = 1 - 1 / (tan(pi u / 2) + 1) (eq. 21). What diffusers' training scripts call `weighting_scheme`
    logit_normal and mode is this: they draw by these densities and weigh by 1.
quasi_random
    sample i of B draws u from stratum (i + k) mod B of B equal ones (stratified sampling; Kingma et al. 2021, appendix I.1);
    n = Phi^-1(u) for logit_normal. See `isthmus.core.train.randomness`.
weights, of the squared error of what is predicted, snr = a_t / (1 - a_t)
    With w the weight of an error in x, an error in epsilon weighs w / snr and one in v w / (snr + 1).
    min_snr: w = min(snr, gamma) (Hang et al. 2023, section 3.4);
    soft_min_snr: w = snr gamma / (snr + gamma) (Crowson et al. 2024, section 4.3: 1 / (sigma^2 + 1 / gamma));
    p2: w = snr / (1 + snr)^gamma, so 1 / (1 + snr)^gamma of epsilon (Choi et al. 2022, eq. 8, k = 1).
    Of flow, by its time before the model sees it, as diffusers' `compute_loss_weighting_for_sd3` has them:
    cosmap: 2 / (pi (1 - 2 t + 2 t^2)), the density of cosmap sampling (Esser et al. 2024, after eq. 21);
    sigma_sqrt: 1 / t^2, with t at least 1/1000.
noise offset
    n + o m with m a standard normal constant over each channel (Guttenberg 2023; SDXL trained with o = 0.05).
latents
    z = (mean + exp(logvar / 2) e - shift_factor) scaling_factor, e the posterior's noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.core.recipe.checks_objective import WEIGHTS_OF
from isthmus.core.recipe.stages import Objective as ObjectiveSettings
from isthmus.core.train.randomness import Draws
from isthmus.errors import UsageError

TIMESTEPS = 1000
"""Steps of the discrete noise schedules; also the scale on which models are told the time."""


def scale_latents(
    mean: Tensor, logvar: Tensor, noise: Tensor, *, scaling_factor: float, shift_factor: float
) -> Tensor:
    """A point of the autoencoder's posterior on the scale that is trained, float32 [b, C, H, W]."""
    latents = torch.addcmul(mean.float(), (logvar.float() * 0.5).exp_(), noise)
    if shift_factor:
        latents.sub_(shift_factor)
    return latents.mul_(scaling_factor)


@dataclass(frozen=True, slots=True)
class Noised:
    """b training samples."""

    noisy: Tensor
    """[b, C, H, W]"""
    timestep: Tensor
    """float32 [b], 0 to 1000: what the model is told."""
    target: Tensor
    """[b, C, H, W]"""
    weight: Tensor | None
    """[b], or None for 1."""


class Objective:
    """One stage's objective on one device.

    Raises:
        UsageError: settings that contradict each other.
    """

    def __init__(self, settings: ObjectiveSettings, device: torch.device | str = "cpu") -> None:
        self.settings = settings
        self.flow = settings.prediction_type == "flow"
        kinds = WEIGHTS_OF.get(settings.weighting_scheme)
        if kinds and settings.prediction_type not in kinds:
            raise UsageError(
                f"weighting_scheme {settings.weighting_scheme} is defined for {' and '.join(kinds)}, "
                f"not for {settings.prediction_type}",
                where="objective",
            )
        if self.flow:
            self.shift = settings.flow_shift
        elif settings.shift != 1.0:
            raise UsageError("shift is of flow; epsilon and v_prediction have none", where="objective")
        if not self.flow:
            self.shift = 1.0
            self.alphas_cumprod = alphas_cumprod(settings.noise_schedule).to(device)

    def times(self, draws: Draws) -> Tensor:
        """Time in [0, 1] float32 [b] by the settings' sampling, shifted for flow."""
        settings = self.settings
        if settings.timestep_sampling == "logit_normal":
            time = torch.sigmoid(settings.logit_mean + settings.logit_std * draws.normal)
        elif settings.timestep_sampling == "mode":
            u = draws.uniform
            time = 1 - u - settings.mode_scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
        elif settings.timestep_sampling == "cosmap":
            time = 1 - 1 / (torch.tan(math.pi * draws.uniform / 2) + 1)
        else:
            time = draws.uniform
        return self.shifted(time)

    def shifted(self, time: Tensor) -> Tensor:
        """Flow's timestep shift."""
        shift = self.shift
        return time if shift == 1.0 else shift * time / (1 + (shift - 1) * time)

    def noised(self, latents: Tensor, draws: Draws, time: Tensor | None = None) -> Noised:
        """Noise latents on the training scale [b, C, H, W]; at `time` in [0, 1] [b] instead of a sampled one."""
        time = self.times(draws) if time is None else time
        noise = draws.noise
        if self.settings.noise_offset:
            noise = noise + self.settings.noise_offset * draws.offset
        if self.flow:
            return Noised(
                noisy=torch.lerp(latents, noise, time.view(-1, 1, 1, 1)),
                timestep=time * TIMESTEPS,
                target=noise - latents,
                weight=self._flow_weight(time),
            )
        index = (time * TIMESTEPS).long().clamp_(0, TIMESTEPS - 1)
        alpha = self.alphas_cumprod[index]
        signal, spread = alpha.sqrt().view(-1, 1, 1, 1), (1 - alpha).sqrt().view(-1, 1, 1, 1)
        velocity = self.settings.prediction_type == "v_prediction"
        return Noised(
            noisy=signal * latents + spread * noise,
            timestep=index.float(),
            target=signal * noise - spread * latents if velocity else noise,
            weight=self._snr_weight(alpha),
        )

    def losses(self, prediction: Tensor, noised: Noised) -> Tensor:
        """Weighted squared error, mean over a sample's values: float32 [b]."""
        error = (prediction.float() - noised.target).square().flatten(1).mean(1)
        return error if noised.weight is None else error * noised.weight

    def dropped(self, draws: Draws) -> Tensor | None:
        """Whose caption is replaced by the null embedding: bool [b], or None where none ever is."""
        share = self.settings.caption_dropout
        return None if share == 0 else draws.dropout < share

    def _flow_weight(self, time: Tensor) -> Tensor | None:
        if self.settings.weighting_scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * time + 2 * time**2))
        if self.settings.weighting_scheme == "sigma_sqrt":
            return time.clamp(min=1 / TIMESTEPS) ** -2.0
        return None

    def _snr_weight(self, alpha: Tensor) -> Tensor | None:
        settings = self.settings
        snr = alpha / (1 - alpha)
        if settings.weighting_scheme == "min_snr":
            weight = snr.clamp(max=settings.snr_gamma)
        elif settings.weighting_scheme == "soft_min_snr":
            weight = snr * settings.snr_gamma / (snr + settings.snr_gamma)
        elif settings.weighting_scheme == "p2":
            weight = snr / (1 + snr) ** settings.p2_gamma
        else:
            return None
        return weight / (snr if settings.prediction_type == "epsilon" else snr + 1)


def alphas_cumprod(schedule: str) -> Tensor:
    """Cumulative products of 1 - beta, float32 [1000]; betas from 0.00085 to 0.012 or 0.0001 to 0.02."""
    if schedule == "scaled_linear":
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, TIMESTEPS, dtype=torch.float32) ** 2
    else:
        betas = torch.linspace(0.0001, 0.02, TIMESTEPS, dtype=torch.float32)
    return torch.cumprod(1 - betas, dim=0)
