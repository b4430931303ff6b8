"""The patch mixer: against MicroDiT's arithmetic written out, in place before the blocks, and in training."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from models import condition
from torch import Tensor, nn
from training import recipe_data

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import (
    block_classes,
    blocks,
    build_denoiser,
    build_from_config,
    predict,
    resolved_config,
)
from isthmus.core.models.generate_profiles import TEXT_TOKENS, _activations, _flops, class_defaults
from isthmus.core.models.memory import memory_fit
from isthmus.core.models.mixer_figures import mixer_figures
from isthmus.core.models.patch_mixer import PatchMixer, PatchMixerBlock, add_patch_mixer
from isthmus.core.models.presets import MASKABLE, PRESETS
from isthmus.core.models.profiles import profile
from isthmus.core.recipe import load_recipe, parse_recipe
from isthmus.core.recipe.patch_mixer import PatchMixer as Settings
from isthmus.core.recipe.schema import Model, Recipe
from isthmus.core.train.blocks import recompute
from isthmus.core.train.stage_model import TokenMask
from isthmus.errors import RecipeError
from isthmus.rehearsal.shrink_model import small_model

SMALL = {"layers": 2, "width": 16, "head_width": 8, "mlp_ratio": 2.0}
PATCH = {"dit": 1, "mmdit": 1, "flux": 2}


def recipe(family: str = "dit", **changes: Any) -> Recipe:
    text = json.dumps(recipe_data("x", family, **({"model__patch_mixer": SMALL} | changes)))
    return parse_recipe(text, filename="r").recipe


def stirred(family: str, **changes: Any) -> nn.Module:
    """A tiny model with a mixer whose gates are open, as they are not at first."""
    model = build_denoiser(recipe(family, **changes).model, 0).eval()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for block in model.patch_mixer.blocks:
            nn.init.normal_(block.modulation.weight, std=0.3)
            nn.init.normal_(block.modulation.bias, std=0.3)
    return model


def shown(
    model: nn.Module, family: str, noisy: Tensor, keep: Tensor | None, time: float = 500.0, **other: Condition
) -> Tensor:
    given = other.get("given") or condition(family, len(noisy))
    with torch.no_grad():
        return predict(model, family, noisy, torch.full((len(noisy),), time), given, keep)


# -- MicroDiT's forward pass in float64, one sample and one head at a time


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled if weight is None else scaled * weight


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, seen: Tensor | None) -> Tensor:
    query, key = norm(query), norm(key)
    out = torch.zeros_like(query)
    size = query.shape[1] // heads
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        logits = query[:, part] @ key[:, part].T / math.sqrt(size)
        if seen is not None:
            logits[:, ~seen] = -math.inf
        weights = logits.exp() / logits.exp().sum(1, keepdim=True)
        out[:, part] = weights @ value[:, part]
    return out


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(
    w: dict[str, Tensor],
    tokens: Tensor,
    time: float,
    text: Tensor,
    seen: Tensor | None,
    pooled: Tensor | None,
) -> Tensor:
    """[n, D] of one sample: every token mixed."""
    angles = time * torch.tensor([10_000 ** (-i / 256) for i in range(256)], dtype=torch.float64)
    c = gelu(w["time.0.weight"] @ torch.cat([angles.cos(), angles.sin()]) + w["time.0.bias"])
    c = w["time.2.weight"] @ c + w["time.2.bias"]
    if pooled is not None:
        c = c + w["pooled.weight"] @ pooled + w["pooled.bias"]
    y = norm(text, w["text.0.weight"]) @ w["text.1.weight"].T
    x = norm(tokens, w["enter.0.weight"]) @ w["enter.1.weight"].T
    for layer in range(2):
        b = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"blocks.{layer}.")}
        m = (b["modulation.weight"] @ gelu(c) + b["modulation.bias"]).chunk(6)
        h = norm(x, b["norm1.weight"]) * (1 + m[1]) + m[0]
        q, k, v = (h @ part.T for part in b["qkv.weight"].chunk(3))
        x = x + m[2] * (attend(q, k, v, 2, None) @ b["out.weight"].T)
        q = norm(x, b["norm2.weight"]) @ b["text_q.weight"].T
        k, v = (y @ part.T for part in b["text_kv.weight"].chunk(2))
        x = x + attend(q, k, v, 2, seen) @ b["text_out.weight"].T
        h = norm(x, b["norm3.weight"]) * (1 + m[4]) + m[3]
        gate = h @ b["gate.weight"].T
        x = x + m[5] * ((gate / (1 + (-gate).exp()) * (h @ b["up.weight"].T)) @ b["down.weight"].T)
    return norm(x, w["leave.0.weight"]) @ w["leave.1.weight"].T


@pytest.mark.parametrize("family", ["dit", "mmdit"])
def test_it_is_microdits_arithmetic(family: str) -> None:
    mixer: Any = stirred(family).patch_mixer
    given = condition(family)
    if given.mask is not None:
        given.mask[1, 3:] = False
    tokens, times = torch.randn(2, 6, 32), torch.tensor([731.25, 12.5])
    w = {name: value.detach().double() for name, value in mixer.state_dict().items()}
    expected = [
        reference(
            w,
            tokens[i].double(),
            float(times[i]),
            given.tokens[i].double(),
            None if given.mask is None else given.mask[i],
            None if given.pooled is None else given.pooled[i].double(),
        )
        for i in range(2)
    ]
    with torch.no_grad():
        found = mixer(tokens, times, given)
        kept = mixer(tokens, times, given, torch.tensor([[0, 4], [2, 5]]))
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, torch.stack([found[0, [0, 4]], found[1, [2, 5]]]))


def test_the_feed_forward_layer_is_as_wide_as_microdits() -> None:
    # 768 x 4 x 2/3 = 2048 and 512 x 4 x 2/3 = 1365.3, in steps of 256.
    assert Settings().hidden == 2048
    assert Settings(width=512).hidden == 1536
    mixer = PatchMixer(Settings(), tokens=1024, text=1024, pooled=0, places=False, depth=28)
    # XL's mixer without its experts: 6 blocks of 3 norms, 4 + 4 maps of attention, 3 of the gated layer, the modulation.
    block = 3 * 768 + 8 * 768**2 + 3 * 768 * 2048 + 6 * 768 * 769
    assert sum(part.numel() for part in mixer.blocks.parameters()) == 6 * block


def test_at_first_only_the_text_is_let_in() -> None:
    """The authors begin with gates of zero: a token leaves as it came, but for the maps and the text."""
    model: Any = build_denoiser(recipe().model, 0)
    mixer = model.patch_mixer
    tokens = torch.randn(1, 4, 32)
    with torch.no_grad():
        one = mixer(tokens, torch.tensor([500.0]), condition("dit", 1))
        tokens[0, 3] += 1
        other = mixer(tokens, torch.tensor([500.0]), condition("dit", 1))
    assert torch.equal(one[0, :3], other[0, :3])
    assert not torch.equal(one[0, 3], other[0, 3])


@pytest.mark.parametrize("family", sorted(MASKABLE))
def test_kept_tokens_have_seen_the_others(family: str) -> None:
    """The opposite of `test_tokens.py`'s naive masking; and the time and the text are seen, too."""
    model, noisy = stirred(family), torch.randn(2, 4, 8, 8)
    mask = TokenMask(0, 0.5, PATCH[family], shared=family == "flux")
    keep = mask.kept(3, [4, 5], 8, 8)
    out = shown(model, family, noisy, keep)
    seen = out != 0
    assert 0.4 < seen.float().mean() < 0.6
    elsewhere = torch.where(seen, noisy, 10 * torch.randn_like(noisy))
    assert not torch.allclose(out, shown(model, family, elsewhere, keep))
    assert (shown(model, family, elsewhere, keep) != 0).equal(seen)
    without: Any = build_denoiser(recipe(family, model__patch_mixer=None).model, 0).eval()
    assert not torch.allclose(shown(without, family, noisy, None), shown(model, family, noisy, None))
    every = torch.arange(64 // PATCH[family] ** 2).expand(2, -1)
    torch.testing.assert_close(shown(model, family, noisy, every), shown(model, family, noisy, None))
    for hooked in (getattr(model, "pos_embed", None), getattr(model, "x_embedder", None), model.proj_out):
        assert hooked is None or not hooked._forward_hooks


def test_a_flux_is_told_places_by_its_mixer() -> None:
    """Its tokens have none of their own: without, the mixer would not tell two places apart."""
    mixer: Any = stirred("flux").patch_mixer
    tokens = torch.randn(1, 1, 32).expand(1, 6, 32)
    with torch.no_grad():
        found = mixer(tokens, torch.tensor([500.0]), condition("flux", 1), None, (2, 3))
    assert len({tuple(row.tolist()) for row in found[0]}) == 6


@pytest.mark.parametrize("family", sorted(MASKABLE))
def test_its_blocks_are_units_like_the_others_and_can_be_recomputed(family: str) -> None:
    model: Any = stirred(family).train()
    assert PatchMixerBlock in block_classes(model)
    assert sum(isinstance(part, PatchMixerBlock) for part in blocks(model)) == 2
    noisy, keep = torch.randn(2, 4, 8, 8), TokenMask(0, 0.5, PATCH[family], shared=True).kept(0, [0, 1], 8, 8)

    def gradients() -> dict[str, Tensor]:
        out = predict(model, family, noisy, torch.tensor([500.0, 100.0]), condition(family), keep)
        torch.autograd.backward(out.square().sum())
        found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        model.zero_grad()
        return found

    plain = gradients()
    assert all(bool(gradient.any()) for name, gradient in plain.items() if "patch_mixer" in name)
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    handle = model.patch_mixer.blocks[0].register_forward_pre_hook(count)
    recompute(model)
    again = gradients()
    handle.remove()
    assert runs == 2
    assert all(torch.equal(gradient, again[name]) for name, gradient in plain.items())


def test_the_model_without_it_is_the_same_and_another_model_to_a_checkpoint() -> None:
    with_mixer = build_denoiser(recipe().model, 3)
    without = build_denoiser(recipe(model__patch_mixer=None).model, 3)
    assert all(
        torch.equal(value, with_mixer.state_dict()[name]) for name, value in without.state_dict().items()
    )
    assert resolved_config(with_mixer) == resolved_config(without) | {"patch_mixer": SMALL}


@pytest.mark.parametrize("name", ["pixart-512", "sd3-medium", "flux-small"])
def test_its_figures_are_those_of_the_module(name: str) -> None:
    """Parameters exactly, FLOPs as torch counts them, memory as autograd keeps it; on the meta device."""
    kind, config = PRESETS[name], dict(PRESETS[name].config)
    full = {**class_defaults(kind.class_name), **config}
    found = []
    settings = Settings(layers=3, width=512)
    for mixer in (None, settings):
        with torch.device("meta"):
            model = build_from_config(kind.class_name, config, seed=0)
            if mixer is not None:
                add_patch_mixer(model, kind.family, mixer)
        inputs = (kind.family, full, 512 // 8, TEXT_TOKENS[kind.family])
        flops = _flops(model, *inputs)
        kept = _activations(model.to(torch.bfloat16), *inputs)
        found.append([sum(part.numel() for part in model.parameters()), *flops, *kept])
    of_mixer = [b - a for a, b in zip(*found, strict=True)]
    section = Model.model_validate(
        {"family": kind.family, "preset": name, "patch_mixer": settings.model_dump()}
    )
    figures = mixer_figures(section, full, 32 * 32, TEXT_TOKENS[kind.family])
    assert figures.parameters == of_mixer[0]
    assert figures.forward_flops == pytest.approx(of_mixer[1], rel=1e-3)
    assert figures.train_flops == pytest.approx(of_mixer[2], rel=0.03)
    assert figures.activation_bytes == pytest.approx(of_mixer[3], rel=0.03)
    assert figures.checkpointed_activation_bytes == pytest.approx(of_mixer[4], rel=0.15)
    plain, mixed = profile(Model(family=kind.family, preset=name)), profile(section)
    assert plain is not None
    assert mixed is not None
    assert mixed.parameters - plain.parameters == figures.parameters
    if 512 in plain.train_flops and plain.text_tokens == TEXT_TOKENS[kind.family]:
        assert mixed.train_flops[512] - plain.train_flops[512] == figures.train_flops


def test_a_mask_saves_nothing_of_the_mixers_memory() -> None:
    def fit(*changes: str) -> Any:
        return memory_fit(
            load_recipe("pixart-512", ["parallel.activation_checkpointing=false", *changes]).recipe, 0
        )

    plain, masked = fit(), fit("stages.0.token_mask_ratio=0.5")
    mixed = fit("model.patch_mixer.layers=4")
    both = fit("model.patch_mixer.layers=4", "stages.0.token_mask_ratio=0.5")
    assert mixed.parameters > plain.parameters
    assert mixed.activations > plain.activations > masked.activations
    assert both.activations - masked.activations == pytest.approx(
        mixed.activations - plain.activations, rel=1e-6
    )


def test_a_rehearsal_has_a_small_one() -> None:
    mixed = load_recipe("pixart-512", ["model.patch_mixer.layers=4"]).recipe
    section = small_model(mixed, 8)
    assert section is not None
    small = Model.model_validate(section).patch_mixer
    assert small is not None
    assert (small.layers, small.width) == (2, 32)


@pytest.mark.parametrize(
    ("family", "mixer", "says"),
    [
        ("unet", SMALL, "no tokens to leave out"),
        ("sana", SMALL, "convolve over the whole grid"),
        ("dit", SMALL | {"head_width": 5}, "5 does not divide width 16"),
        ("flux", SMALL | {"width": 18, "head_width": 9}, "not a multiple of 4"),
        ("dit", SMALL | {"depth": 3}, "depth"),
        ("dit", SMALL | {"layers": 0}, "must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(family: str, mixer: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        recipe(family, model__patch_mixer=mixer)
    assert "model.patch_mixer" in str(caught.value)
