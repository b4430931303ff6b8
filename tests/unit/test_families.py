"""diffusers' classes, built, wrapped and called the same way."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from models import build, condition
from torch import nn
from training import MODELS

from isthmus.core.models.calling import image_ids, pack, unpack
from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import (
    block_classes,
    blocks,
    build_denoiser,
    predict,
    resolved_config,
)
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Model
from isthmus.errors import UsageError


def negated(given: Condition) -> Condition:
    """The first row with the opposite text."""
    pooled = None if given.pooled is None else -given.pooled[:1]
    return Condition(-given.tokens[:1], None if given.mask is None else given.mask[:1], pooled)


@pytest.mark.parametrize("family", CLASSES)
def test_weights_come_from_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build(family, 7)
    assert torch.equal(torch.get_rng_state(), state), "building must not disturb other randomness"
    torch.manual_seed(2)
    second, other = build(family, 7), build(family, 8)
    own, same = dict(first.named_parameters()), dict(second.named_parameters())
    assert all(torch.equal(own[name], same[name]) for name in own)
    assert not all(torch.equal(weight, own[name]) for name, weight in other.named_parameters())


@pytest.mark.parametrize("family", CLASSES)
def test_prediction_has_the_latents_shape_and_depends_on_time_and_text(family: str) -> None:
    model = build(family).eval()
    noisy, given = torch.randn(2, 4, 8, 8), condition(family)
    with torch.no_grad():
        out = predict(model, family, noisy, torch.tensor([500.0, 100.0]), given)
        later = predict(model, family, noisy, torch.tensor([500.5, 100.5]), given)
        changed = given.with_null(torch.tensor([True, False]), negated(given))
        other = predict(model, family, noisy, torch.tensor([500.0, 100.0]), changed)
    assert out.shape == noisy.shape
    assert not torch.equal(out, later), "a model must see fractions of a timestep"
    assert not torch.equal(out[0], other[0])
    assert torch.equal(out[1], other[1])


@pytest.mark.parametrize("family", CLASSES)
def test_other_aspects_are_accepted(family: str) -> None:
    model = build(family).eval()
    with torch.no_grad():
        out = predict(model, family, torch.randn(2, 4, 4, 8), torch.rand(2) * 1000, condition(family))
    assert out.shape == (2, 4, 4, 8)


def test_blocks_are_the_tables() -> None:
    names = {family: {kind.__name__ for kind in block_classes(build(family))} for family in CLASSES}
    assert names == {
        "dit": {"BasicTransformerBlock"},
        "mmdit": {"JointTransformerBlock"},
        "unet": {"BasicTransformerBlock", "ResnetBlock2D"},
        "sana": {"SanaTransformerBlock"},
        "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    }
    assert len(blocks(build("dit"))) == 2


def test_an_unknown_class_falls_back_to_the_items_of_its_module_list() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.layers = nn.ModuleList([nn.Bilinear(2, 2, 2) for _ in range(3)])
            self.ends = nn.ModuleList([nn.ReLU(), nn.Identity()])

    assert block_classes(Stack()) == {nn.Bilinear}
    assert block_classes(nn.Linear(2, 2)) == set()


def test_a_predicted_variance_is_left_out() -> None:
    model = build("dit", out_channels=8).eval()
    noisy, time, given = torch.randn(2, 4, 8, 8), torch.rand(2) * 1000, condition("dit")
    with torch.no_grad():
        out = predict(model, "dit", noisy, time, given)
        raw = model(
            noisy,
            encoder_hidden_states=given.tokens,
            timestep=time,
            encoder_attention_mask=given.mask,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
    assert raw.shape[1] == 8
    assert torch.equal(out, raw[:, :4])


def test_pixart_is_told_size_and_aspect_when_it_embeds_them() -> None:
    model = build("dit", use_additional_conditions=True, attention_head_dim=24, cross_attention_dim=48).eval()
    assert resolved_config(model)["use_additional_conditions"] is True
    given = condition("dit")
    noisy, time = torch.randn(2, 4, 8, 8), torch.rand(2) * 1000

    def at(height: float, width: float) -> torch.Tensor:
        sizes = torch.tensor([[height, width, 0, 0, height, width]] * 2)
        with torch.no_grad():
            return predict(model, "dit", noisy, time, Condition(given.tokens, given.mask, None, sizes))

    assert not torch.equal(at(32, 32), at(64, 64))
    assert not torch.equal(at(32, 64), at(64, 32))


@pytest.mark.parametrize(
    "changes", [{"no_such_argument": 1}, {"out_channels": 5}, {"norm_type": "layer_norm"}]
)
def test_a_configuration_that_does_not_fit_is_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        build("dit", **changes)
    assert "\n" not in str(caught.value)
    assert "PixArtTransformer2DModel" in str(caught.value)


def test_flux_packs_as_its_pipeline_does() -> None:
    pipeline = diffusers.FluxPipeline
    latents = torch.randn(2, 4, 4, 8)
    assert torch.equal(pack(latents), pipeline._pack_latents(latents, 2, 4, 4, 8))
    assert torch.equal(unpack(pack(latents), 2, 4), latents)
    ids = pipeline._prepare_latent_image_ids(1, 2, 4, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(2, 4, torch.device("cpu")), ids)


def test_flux_is_told_the_guidance_scale_it_embeds() -> None:
    section = {"family": "flux", "config": {**MODELS["flux"], "guidance_embeds": True}}
    noisy, time, given = torch.randn(2, 4, 8, 8), torch.rand(2) * 1000, condition("flux")

    def told(**changes: float) -> torch.Tensor:
        model = build_denoiser(Model.model_validate(section | changes), 0).eval()
        with torch.no_grad():
            return predict(model, "flux", noisy, time, given)

    assert torch.equal(told(), told(guidance_embedding=1.0))
    assert not torch.equal(told(), told(guidance_embedding=3.5))


@pytest.mark.parametrize("family", CLASSES)
def test_bfloat16_tells_a_model_the_whole_timestep(family: str) -> None:
    """bfloat16 has steps of 4 near 900; a model told the time in it could not tell these apart."""
    model = build(family).eval().bfloat16()
    given = condition(family).to("cpu", torch.bfloat16)
    noisy = torch.randn(2, 4, 8, 8).bfloat16()
    with torch.no_grad():
        one = predict(model, family, noisy, torch.tensor([900.0, 100.0]), given)
        other = predict(model, family, noisy, torch.tensor([901.0, 100.0]), given)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
