"""Sampling against what is known exactly: a Gaussian's optimal denoiser, and diffusers' own loops."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from isthmus.core.sample.sampling import (
    BETAS,
    guided,
    initial_noise,
    make_scheduler,
    resolve_scheduler,
    sample_latents,
)

MEAN, STD = 1.5, 0.4


def alphas_cumprod(noise_schedule: str) -> Tensor:
    """The training objective's own arithmetic, written out again."""
    first, last = BETAS[noise_schedule]
    if noise_schedule == "linear":
        betas = torch.linspace(first, last, 1000, dtype=torch.float64)
    else:
        betas = torch.linspace(first**0.5, last**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float()


def optimal(prediction_type: str, noise_schedule: str = "scaled_linear"):
    """The denoiser that is exactly right for data ~ N(MEAN, STD^2): E[target | noisy]."""
    cumulative = alphas_cumprod(noise_schedule)

    def predict(noisy: Tensor, timestep: Tensor) -> Tensor:
        if prediction_type == "flow":
            sigma = (timestep / 1000).view(-1, 1, 1, 1)
            data_scale, noise_scale = 1 - sigma, sigma
        else:
            bar = cumulative[timestep.round().long()].view(-1, 1, 1, 1)
            data_scale, noise_scale = bar.sqrt(), (1 - bar).sqrt()
        variance = data_scale**2 * STD**2 + noise_scale**2
        surprise = (noisy - data_scale * MEAN) / variance
        data, noise = MEAN + data_scale * STD**2 * surprise, noise_scale * surprise
        return {
            "flow": noise - data,
            "epsilon": noise,
            "v_prediction": data_scale * noise - noise_scale * data,
        }[prediction_type]

    return predict


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(
    ("prediction_type", "scheduler", "noise_schedule"),
    [
        ("flow", "auto", "scaled_linear"),
        *[
            (prediction_type, scheduler, noise_schedule)
            for prediction_type in ("epsilon", "v_prediction")
            for scheduler in ("ddim", "dpmsolver", "euler")
            for noise_schedule in ("scaled_linear", "linear")
        ],
    ],
)
def test_the_optimal_denoiser_of_a_gaussian_gives_that_gaussian(
    prediction_type, scheduler, noise_schedule, shift
):
    predict = optimal(prediction_type, noise_schedule)
    latents = sample_latents(
        predict,
        shape=(64, 4, 8, 8),
        prediction_type=prediction_type,
        scheduler=scheduler,
        noise_schedule=noise_schedule,
        shift=shift,
        steps=200,
        guidance_scale=1,
        seed=3,
    )
    assert latents.mean().item() == pytest.approx(MEAN, abs=0.05)
    assert latents.std().item() == pytest.approx(STD, rel=0.08)


@pytest.mark.parametrize("prediction_type", ["epsilon", "flow"])
def test_equals_the_loop_that_diffusers_pipelines_run(prediction_type):
    if prediction_type == "flow":
        reference = FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        reference = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            timestep_spacing="trailing",
        )
    predict, shape = optimal(prediction_type), (2, 4, 8, 8)
    reference.set_timesteps(10)
    expected = initial_noise(shape, seed=5)
    for timestep in reference.timesteps:
        conditional = predict(expected, timestep.expand(2))
        null = 0.5 * conditional
        expected = reference.step(null + 3 * (conditional - null), timestep, expected, return_dict=False)[0]

    def conditional_then_null(noisy: Tensor, timestep: Tensor) -> Tensor:
        assert len(noisy) == len(timestep) == 4
        return predict(noisy, timestep) * torch.tensor([1, 1, 0.5, 0.5]).view(-1, 1, 1, 1)

    latents = sample_latents(
        conditional_then_null,
        shape=shape,
        prediction_type=prediction_type,
        shift=3.0,
        steps=10,
        guidance_scale=3.0,
        seed=5,
    )
    torch.testing.assert_close(latents, expected)


def test_every_scheduler_calls_the_model_once_a_step():
    for prediction_type, name in [
        ("flow", "auto"),
        ("epsilon", "ddim"),
        ("epsilon", "euler"),
        ("epsilon", "dpmsolver"),
    ]:
        calls = []

        def predict(noisy, timestep, calls=calls):
            calls.append(timestep[0].item())
            return torch.zeros_like(noisy)

        sample_latents(
            predict,
            shape=(1, 1, 2, 2),
            prediction_type=prediction_type,
            scheduler=name,
            steps=7,
            guidance_scale=2,
        )
        assert len(calls) == 7
        assert calls == sorted(calls, reverse=True)
        assert calls[0] == pytest.approx(999, abs=1), "starts at the noisiest timestep that was trained"


def test_a_sample_does_not_depend_on_its_batch():
    predict = optimal("flow")
    settings = {"prediction_type": "flow", "steps": 4, "guidance_scale": 1, "seed": 11}
    together = sample_latents(predict, shape=(5, 3, 4, 4), **settings)
    alone = sample_latents(predict, shape=(1, 3, 4, 4), first=3, **settings)
    torch.testing.assert_close(together[3:4], alone)
    assert not torch.equal(initial_noise((1, 3, 4, 4), 11), initial_noise((1, 3, 4, 4), 12))


def test_guidance_extrapolates_from_null_to_conditional():
    predict = guided(lambda noisy, _: torch.cat([torch.full((2, 1), 3.0), torch.full((2, 1), 1.0)]), 4.0)
    assert predict(torch.zeros(2, 1), torch.zeros(2)).tolist() == [[9.0], [9.0]]


def test_a_scheduler_that_cannot_invert_the_objective_is_refused():
    assert resolve_scheduler("auto", "flow") == "flow_match_euler"
    assert resolve_scheduler("auto", "v_prediction") == "ddim"
    for scheduler, prediction_type in [("ddim", "flow"), ("flow_match_euler", "epsilon")]:
        with pytest.raises(ValueError, match="cannot sample"):
            make_scheduler(prediction_type, scheduler=scheduler)
