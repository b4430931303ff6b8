"""Leaving image tokens out, and where the positions of the others lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build, condition
from torch import nn
from training import MODELS, recipe_data

from isthmus.core.models.calling import pack
from isthmus.core.models.families import build_from_config, predict
from isthmus.core.models.presets import CLASSES, MASKABLE
from isthmus.core.models.tokens import gather, kept_values, place_tokens, position_table, scatter
from isthmus.core.recipe import parse_recipe
from isthmus.core.train.stage_model import TokenMask
from isthmus.errors import RecipeError

PATCH = {"dit": 1, "mmdit": 1, "flux": 2}


def shown(model: nn.Module, family: str, noisy: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    with torch.no_grad():
        return predict(model, family, noisy, torch.tensor([500.0, 100.0]), condition(family), keep)


@pytest.mark.parametrize("family", sorted(MASKABLE))
def test_kept_tokens_do_not_see_the_others(family: str) -> None:
    model, patch = build(family).eval(), PATCH[family]
    mask = TokenMask(0, 0.5, patch, shared=family == "flux")
    keep = mask.kept(3, [4, 5], 8, 8)
    noisy = torch.randn(2, 4, 8, 8)
    hidden = scatter(gather(torch.ones(2, (8 // patch) ** 2, 4 * patch**2), keep), keep, (8 // patch) ** 2)
    seen = unpatched(hidden, patch).bool()
    out = shown(model, family, noisy, keep)
    elsewhere = torch.where(seen, noisy, 10 * torch.randn_like(noisy))
    torch.testing.assert_close(out, shown(model, family, elsewhere, keep))
    assert not out[~seen].any()
    assert out[seen].all()
    other = noisy.clone()
    other[seen] += 1
    assert not torch.equal(out, shown(model, family, other, keep))
    assert torch.equal(kept_values(out, keep, patch), gather(patched(out, patch), keep))


def patched(values: torch.Tensor, patch: int) -> torch.Tensor:
    return pack(values) if patch == 2 else values.flatten(2).transpose(1, 2)


def unpatched(tokens: torch.Tensor, patch: int) -> torch.Tensor:
    from isthmus.core.models.calling import unpack

    return unpack(tokens, 4, 4) if patch == 2 else tokens.transpose(1, 2).reshape(2, 4, 8, 8)


@pytest.mark.parametrize("family", sorted(MASKABLE))
def test_keeping_all_tokens_changes_nothing(family: str) -> None:
    model = build(family).eval()
    noisy = torch.randn(2, 4, 4, 8)
    every = torch.arange(32 // PATCH[family] ** 2).expand(2, -1)
    torch.testing.assert_close(shown(model, family, noisy, every), shown(model, family, noisy, None))
    assert not model.pos_embed._forward_hooks
    assert not model.proj_out._forward_hooks


def test_masks_follow_seed_step_and_place_and_nothing_else() -> None:
    mask = TokenMask(7, 0.75, 2, shared=False)
    whole = mask.kept(5, list(range(8)), 8, 16)
    assert whole.shape == (8, 8)  # a quarter of 4 x 8 tokens
    assert torch.equal(whole[4:], mask.kept(5, [4, 5, 6, 7], 8, 16)), "another rank, the same tokens"
    assert all(len(set(row.tolist())) == 8 and row.max() < 32 for row in whole)
    assert len({tuple(row.tolist()) for row in whole}) == 8
    assert not torch.equal(whole, mask.kept(6, list(range(8)), 8, 16))
    assert not torch.equal(whole, TokenMask(8, 0.75, 2, shared=False).kept(5, list(range(8)), 8, 16))
    shared = TokenMask(7, 0.75, 2, shared=True).kept(5, [3, 9], 8, 16)
    assert torch.equal(shared[0], shared[1])
    assert TokenMask(7, 0.999, 2, shared=False).kept(0, [0], 4, 4).shape == (1, 1)


def test_every_token_is_kept_equally_often() -> None:
    mask = TokenMask(1, 0.5, 1, shared=False)
    counts = torch.bincount(mask.kept(0, list(range(4000)), 4, 4).flatten(), minlength=16)
    assert counts.min() > 1850
    assert counts.max() < 2150


@pytest.mark.parametrize(("grid", "scale"), [(8, 0.5), (16, 1.0), (32, 2.0)])
def test_pixart_sigmas_scales_cover_one_square(grid: int, scale: float) -> None:
    """0.5 at a quarter of the size and 2 at twice it span the positions of 1, as PixArt-Sigma is trained."""
    model: Any = build("dit", sample_size=16)
    place_tokens(model, grid, scale)
    built: Any = build("dit", sample_size=grid, interpolation_scale=scale)
    noisy = torch.zeros(1, 4, grid, grid)
    torch.testing.assert_close(model.pos_embed(noisy), built.pos_embed(noisy))
    oblong = torch.zeros(1, 4, grid // 2, grid)
    torch.testing.assert_close(model.pos_embed(oblong), built.pos_embed(oblong))
    assert model.pos_embed.base_size / model.pos_embed.interpolation_scale == 16


def test_a_stage_without_a_scale_goes_back_to_the_models_own() -> None:
    model: Any = build("dit")
    noisy = torch.randn(1, 4, 8, 8)
    before = model.pos_embed(noisy)
    place_tokens(model, 8, 3.0)
    assert not torch.equal(model.pos_embed(noisy), before)
    place_tokens(model, 16, 0.5)
    place_tokens(model, 8, None)
    assert torch.equal(model.pos_embed(noisy), before)


def test_which_models_have_a_scale() -> None:
    found = {family: position_table(build(family)) is not None for family in CLASSES}
    assert found == {"unet": False, "dit": True, "mmdit": False, "sana": False, "flux": False}
    sana = build_from_config(CLASSES["sana"], {**MODELS["sana"], "interpolation_scale": 1}, 0)
    assert position_table(sana) is not None


@pytest.mark.parametrize(
    ("family", "field", "value", "says"),
    [
        ("unet", "pos_embed_interpolation", 2.0, "a unet has no positional embedding"),
        ("mmdit", "pos_embed_interpolation", 2.0, "crops a fixed table"),
        ("flux", "pos_embed_interpolation", 2.0, "rotary"),
        ("sana", "pos_embed_interpolation", 2.0, "no interpolation_scale"),
        ("unet", "token_mask_ratio", 0.5, "no tokens to leave out"),
        ("sana", "token_mask_ratio", 0.5, "convolve over the whole grid"),
        ("dit", "token_mask_ratio", 1.0, "leaves no token"),
    ],
)
def test_what_a_family_cannot_do_is_refused_with_the_reason(
    family: str, field: str, value: float, says: str
) -> None:
    import json

    text = json.dumps(recipe_data("x", family, **{f"stages__0__{field}": value}))
    with pytest.raises(RecipeError, match=says) as caught:
        parse_recipe(text, filename="r")
    assert f"stages[0].{field}" in str(caught.value)
