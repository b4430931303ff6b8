"""Weights, shift rules and even timesteps against diffusers, closed forms and each other."""

from __future__ import annotations

import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from isthmus.core.recipe.stages import Objective as Settings
from isthmus.core.recipe.stages import ObjectiveOverride, Stage, shift_at
from isthmus.core.train.objective import Objective
from isthmus.core.train.randomness import Draws, Randomness, spare_threads
from isthmus.errors import UsageError

SHAPE = (2, 4, 4)


def draws(count: int = 64, **more: int) -> Draws:
    return Randomness(0).draws(0, range(count), SHAPE, **more)


def snr_of(timestep: torch.Tensor) -> torch.Tensor:
    scheduler = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return compute_snr(scheduler, timestep.long())


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("scheme", ["soft_min_snr", "p2"])
def test_weights_by_snr_are_the_published_ones(prediction_type: str, scheme: str) -> None:
    settings = Settings(prediction_type=prediction_type, weighting_scheme=scheme, snr_gamma=4.0, p2_gamma=0.5)
    noised = Objective(settings).noised(torch.zeros(64, *SHAPE), draws())
    snr = snr_of(noised.timestep)
    # Of an error in x. Crowson et al. write 1 / (sigma^2 + 1 / gamma) with sigma^2 = 1 / snr.
    of_x = 1 / (1 / snr + 1 / 4.0) if scheme == "soft_min_snr" else snr / (1 + snr) ** 0.5
    expected = of_x / (snr if prediction_type == "epsilon" else snr + 1)
    assert noised.weight is not None
    torch.testing.assert_close(noised.weight, expected)


def test_a_velocitys_error_weighs_what_the_same_error_of_the_picture_does() -> None:
    latents, drawn = torch.randn(64, *SHAPE), draws()
    losses = {}
    for kind in ("epsilon", "v_prediction"):
        objective = Objective(Settings(prediction_type=kind, weighting_scheme="p2"))
        noised = objective.noised(latents, drawn)
        alpha = objective.alphas_cumprod[noised.timestep.long()].view(-1, 1, 1, 1)
        wrong = latents + 0.1  # a prediction of the picture, told as noise and as velocity
        noise = (noised.noisy - alpha.sqrt() * wrong) / (1 - alpha).sqrt()
        told = noise if kind == "epsilon" else alpha.sqrt() * noise - (1 - alpha).sqrt() * wrong
        losses[kind] = objective.losses(told, noised)
    torch.testing.assert_close(losses["epsilon"], losses["v_prediction"], rtol=2e-3, atol=0)


@pytest.mark.parametrize("scheme", ["cosmap", "sigma_sqrt"])
def test_weights_of_flow_are_those_of_diffusers(scheme: str) -> None:
    noised = Objective(Settings(weighting_scheme=scheme)).noised(torch.zeros(64, *SHAPE), draws())  # type: ignore[arg-type]
    expected = compute_loss_weighting_for_sd3(scheme, (noised.timestep / 1000).clamp(min=1e-3))
    assert noised.weight is not None
    torch.testing.assert_close(noised.weight, expected)


def test_drawing_by_cosmap_and_weighing_by_it_are_the_same_mean() -> None:
    u = (torch.arange(100_000) + 0.5) / 100_000
    drawn = Draws(*[torch.zeros(0)] * 4, u, u)
    time = Objective(Settings(timestep_sampling="cosmap")).times(drawn)
    weight = Objective(Settings(weighting_scheme="cosmap"))._flow_weight(u)
    assert weight is not None
    assert weight.mean().item() == pytest.approx(1, abs=1e-4)
    for moment in (1, 2, 3):
        assert (weight * u**moment).mean().item() == pytest.approx((time**moment).mean().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("flow", "soft_min_snr"), ("flow", "p2"), ("epsilon", "cosmap"), ("v_prediction", "sigma_sqrt")],
)
def test_a_weighting_of_another_prediction_is_refused(kind: str, scheme: str) -> None:
    with pytest.raises(UsageError, match=f"{scheme} is defined for"):
        Objective(Settings(prediction_type=kind, weighting_scheme=scheme))  # type: ignore[arg-type]


@pytest.mark.parametrize("resolution", [256, 512, 768, 1024, 2048])
def test_shift_rules_are_those_of_sd3_and_flux(resolution: int) -> None:
    tokens = (resolution // 16) ** 2
    mu = calculate_shift(tokens)
    assert shift_at("flux", resolution) == pytest.approx(math.exp(mu))
    assert shift_at("sd3", resolution) == pytest.approx(math.sqrt(resolution**2 / 256**2))
    # The same curve in diffusers' scheduler, where Flux writes the shift as exp(mu).
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    times = np.linspace(0.01, 0.99, 9)
    shifted = Objective(Settings(shift=shift_at("flux", resolution))).shifted(torch.tensor(times))
    np.testing.assert_allclose(shifted.numpy(), scheduler.time_shift(mu, 1.0, times), rtol=1e-6)


def test_a_stage_makes_its_rule_a_number_and_a_rule_without_a_stage_is_none() -> None:
    def stage(resolution: int, **changes: object) -> Stage:
        return Stage(
            name="a", resolution=resolution, steps=1, global_batch_size=1, micro_batch_size=1,
            learning_rate=1.0, objective=ObjectiveOverride.model_validate(changes),
        )  # fmt: skip

    objective = Settings(shift="sd3")
    assert [stage(size).objective_over(objective).flow_shift for size in (256, 512, 1024)] == [1, 2, 4]
    assert stage(512, shift=3.0).objective_over(objective).flow_shift == 3.0
    assert stage(512, shift="flux").objective_over(Settings()).flow_shift == shift_at("flux", 512)
    with pytest.raises(ValueError, match="is a rule"):
        _ = objective.flow_shift


def test_even_timesteps_have_one_sample_in_each_stratum_of_the_distribution() -> None:
    for step in range(20):
        drawn = Randomness(3).draws(step, range(32), SHAPE, strata=32)
        assert sorted((drawn.uniform * 32).long().tolist()) == list(range(32))
        assert 0 <= drawn.uniform.min().item() <= drawn.uniform.max().item() < 1
        torch.testing.assert_close(torch.special.ndtr(drawn.normal), drawn.uniform, atol=1e-5, rtol=0)
    firsts = torch.cat([Randomness(3).draws(s, [0], SHAPE, strata=32).uniform for s in range(400)])
    assert abs(firsts.mean().item() - 0.5) < 0.06  # the one place of a step is uniform itself


def test_even_timesteps_lower_the_spread_of_a_steps_mean() -> None:
    def spread(**more: int) -> float:
        times = [
            Objective(Settings(timestep_sampling="logit_normal"))
            .times(Randomness(1).draws(step, range(32), (1, 1, 1), **more))
            .mean()
            for step in range(200)
        ]
        return torch.stack(times).std().item()

    assert spread(strata=32) < spread() / 10


def test_even_timesteps_do_not_depend_on_how_a_batch_is_cut() -> None:
    whole = Randomness(5).draws(7, range(16), SHAPE, strata=16)
    for positions in ([8, 9], [3, 15], list(range(8))):
        part = Randomness(5).draws(7, positions, SHAPE, strata=16)
        assert torch.equal(part.uniform, whole.uniform[positions])
        assert torch.equal(part.normal, whole.normal[positions])
    plain = Randomness(5).draws(7, range(16), SHAPE)
    for name in ("posterior", "noise", "offset", "dropout"):
        assert torch.equal(getattr(plain, name), getattr(whole, name)), name
    assert not torch.equal(plain.uniform, whole.uniform)


def test_draws_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Randomness(5).draws(7, range(13), SHAPE, strata=13)
    several = Randomness(5, threads=4)
    for _ in range(2):
        found = several.draws(7, range(13), SHAPE, strata=13)
        for name in ("posterior", "noise", "offset", "normal", "uniform", "dropout"):
            assert torch.equal(getattr(found, name), getattr(one, name)), name
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(96)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert spare_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "96")
    assert spare_threads() == 1
