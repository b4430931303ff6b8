"""The objective against diffusers' schedulers, and the counters that its randomness comes from."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr

from isthmus.core.recipe.stages import Objective as Settings
from isthmus.core.train.objective import Objective, alphas_cumprod, scale_latents
from isthmus.core.train.randomness import VALIDATION, Draws, Randomness, mix
from isthmus.errors import UsageError

BETAS = {"scaled_linear": (0.00085, 0.012), "linear": (0.0001, 0.02)}


def draws(count: int = 8, seed: int = 0) -> Draws:
    return Randomness(seed).draws(0, range(count), (4, 6, 5))


def ddpm(schedule: str, prediction_type: str = "epsilon") -> diffusers.DDPMScheduler:
    first, last = BETAS[schedule]
    return diffusers.DDPMScheduler(
        beta_start=first, beta_end=last, beta_schedule=schedule, prediction_type=prediction_type
    )


@pytest.mark.parametrize("schedule", ["scaled_linear", "linear"])
def test_noising_and_targets_are_those_of_the_ddpm_scheduler(schedule: str) -> None:
    latents = torch.randn(8, 4, 6, 5)
    scheduler, drawn = ddpm(schedule), draws()
    for prediction_type in ("epsilon", "v_prediction"):
        objective = Objective(Settings(prediction_type=prediction_type, noise_schedule=schedule))
        noised = objective.noised(latents, drawn)
        steps = noised.timestep.long()
        assert torch.equal(steps, (drawn.uniform * 1000).long())
        torch.testing.assert_close(noised.noisy, scheduler.add_noise(latents, drawn.noise, steps))
        target = (
            drawn.noise
            if prediction_type == "epsilon"
            else scheduler.get_velocity(latents, drawn.noise, steps)
        )
        torch.testing.assert_close(noised.target, target)
    torch.testing.assert_close(alphas_cumprod(schedule), scheduler.alphas_cumprod)


def test_flow_noises_as_the_flow_scheduler_does_and_inverts_with_its_target() -> None:
    latents, drawn = torch.randn(8, 4, 6, 5), draws()
    noised = Objective(Settings()).noised(latents, drawn)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    index = torch.tensor([3, 100, 500, 900, 1, 999, 42, 7])
    at = scheduler.timesteps[index]
    fixed = Objective(Settings()).noised(latents, drawn, at / 1000)
    torch.testing.assert_close(fixed.noisy, scheduler.scale_noise(latents, at, drawn.noise))
    time = (noised.timestep / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noised.noisy - time * noised.target, latents, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [0.5, 3.0, 6.0])
def test_shift_is_the_flow_schedulers(shift: float) -> None:
    plain = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas
    shifted = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift).sigmas
    assert torch.allclose(Objective(Settings(shift=shift)).shifted(plain), shifted, atol=1e-6)


def test_logit_normal_and_mode_are_the_densities_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draws(64)
    monkeypatch.setattr(torch, "normal", lambda mean, std, **_: mean + std * drawn.normal)
    expected = compute_density_for_timestep_sampling("logit_normal", 64, logit_mean=0.3, logit_std=0.7)
    settings = Settings(timestep_sampling="logit_normal", logit_mean=0.3, logit_std=0.7)
    torch.testing.assert_close(Objective(settings).times(drawn), expected)
    monkeypatch.setattr(torch, "rand", lambda **_: drawn.uniform)
    expected = compute_density_for_timestep_sampling("mode", 64, mode_scale=1.1)
    settings = Settings(timestep_sampling="mode", mode_scale=1.1)
    torch.testing.assert_close(Objective(settings).times(drawn), expected)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_min_snr_weights_follow_diffusers_snr(prediction_type: str) -> None:
    drawn = draws(64)
    settings = Settings(prediction_type=prediction_type, weighting_scheme="min_snr", snr_gamma=4.0)
    noised = Objective(settings).noised(torch.zeros(64, 4, 6, 5), drawn)
    snr = compute_snr(ddpm("scaled_linear"), noised.timestep.long())
    clipped = torch.minimum(snr, torch.full_like(snr, 4.0))
    expected = clipped / snr if prediction_type == "epsilon" else clipped / (snr + 1)
    assert noised.weight is not None
    torch.testing.assert_close(noised.weight, expected)
    losses = Objective(settings).losses(torch.zeros_like(noised.target), noised)
    torch.testing.assert_close(losses, expected * noised.target.square().mean((1, 2, 3)))


def test_latents_are_points_of_the_posterior_on_the_training_scale() -> None:
    moments, noise = torch.randn(3, 8, 5, 5), torch.randn(3, 4, 5, 5)
    posterior = DiagonalGaussianDistribution(moments)
    found = scale_latents(
        moments[:, :4].half(), moments[:, 4:].half(), noise, scaling_factor=0.3, shift_factor=0.2
    )
    expected = (posterior.mean + posterior.std * noise - 0.2) * 0.3
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_noise_offset_adds_one_constant_to_each_channel() -> None:
    drawn, latents = draws(), torch.zeros(8, 4, 6, 5)
    settings = Settings(prediction_type="epsilon", noise_offset=0.05)
    added = Objective(settings).noised(latents, drawn).target - drawn.noise
    assert torch.allclose(added, added[:, :, :1, :1].expand_as(added), atol=1e-6)
    torch.testing.assert_close(added[:, :, :1, :1], 0.05 * drawn.offset, atol=1e-6, rtol=1e-4)


def test_captions_are_dropped_at_the_share_asked_for() -> None:
    drawn = draws(4000)
    dropped = Objective(Settings(caption_dropout=0.2)).dropped(drawn)
    assert dropped is not None
    assert abs(dropped.float().mean().item() - 0.2) < 0.02
    assert Objective(Settings(caption_dropout=0.0)).dropped(drawn) is None
    everything = Objective(Settings(caption_dropout=1.0)).dropped(drawn)
    assert everything is not None
    assert everything.all()


@pytest.mark.parametrize(
    "settings",
    [Settings(weighting_scheme="min_snr"), Settings(prediction_type="epsilon", shift=3.0)],
)
def test_settings_that_contradict_each_other_are_refused(settings: Settings) -> None:
    with pytest.raises(UsageError):
        Objective(settings)


def test_draws_depend_on_seed_step_and_position_alone() -> None:
    whole = Randomness(5).draws(7, range(16), (4, 6, 5))
    random = Randomness(5)
    random.draws(99, range(3), (4, 2, 2))
    parts = [random.draws(7, positions, (4, 6, 5)) for positions in ([8, 9], [3, 15])]
    for part, positions in zip(parts, ([8, 9], [3, 15]), strict=True):
        for name in ("posterior", "noise", "offset", "normal", "uniform", "dropout"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[positions]), name
    for other in (
        Randomness(6).draws(7, range(16), (4, 6, 5)),
        Randomness(5).draws(8, range(16), (4, 6, 5)),
        Randomness(5).draws(7, range(16, 32), (4, 6, 5)),
        Randomness(5).draws(7, range(16), (4, 6, 5), VALIDATION),
    ):
        assert not torch.isclose(other.noise, whole.noise).any(dim=(1, 2, 3)).all()
        assert not torch.equal(other.uniform, whole.uniform)


def test_draws_are_standard_and_independent() -> None:
    drawn = Randomness(1).draws(3, range(3000), (2, 4, 4))
    for name in ("posterior", "noise", "offset", "normal"):
        values = getattr(drawn, name).flatten()
        assert abs(values.mean().item()) < 4 / values.numel() ** 0.5, name
        assert abs(values.var().item() - 1) < 8 / values.numel() ** 0.5, name
    for name in ("uniform", "dropout"):
        values = getattr(drawn, name)
        assert abs(values.mean().item() - 0.5) < 0.03
        assert 0 <= values.min().item() <= values.max().item() < 1
    flat = torch.stack([drawn.noise[:, 0, 0, 0], drawn.posterior[:, 0, 0, 0], drawn.normal])
    assert (torch.corrcoef(flat) - torch.eye(3)).abs().max().item() < 0.08


def test_mix_spreads_neighbouring_counters() -> None:
    seen = {mix(seed, step, i) for seed in range(8) for step in range(50) for i in range(50)}
    assert len(seen) == 8 * 50 * 50
    assert mix(1, 2) != mix(2, 1)
