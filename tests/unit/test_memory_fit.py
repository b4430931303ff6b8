"""Whether a stage fits into a GPU, against the arithmetic done by hand and against the error that training gives."""

from __future__ import annotations

import pytest

from isthmus.core.models.memory import GPU_BYTES, USABLE, MemoryFit, memory_fit, shards
from isthmus.core.models.profiles import profile
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe

P = 2_567_463_684
"""Parameters of SDXL's UNet."""


def fit_of(recipe: Recipe, stage: int) -> MemoryFit:
    found = memory_fit(recipe, stage)
    assert found is not None
    return found


def sdxl(*overrides: str) -> Recipe:
    return load_recipe("sdxl-progressive", overrides).recipe


def test_ddp_holds_sixteen_bytes_a_parameter_beside_the_ema_and_autocasts_copies() -> None:
    fit = fit_of(sdxl("parallel.strategy=ddp"), 0)
    assert fit.parameters == fit.gradients == fit.ema == 4 * P
    assert fit.optimizer == 8 * P
    assert fit.working == 2 * P
    known = profile(sdxl().model)
    assert fit.activations == 16 * known.checkpointed_activation_bytes[256]
    assert fit.total == 22 * P + fit.activations
    assert fit.fits
    assert fit.change is None


def test_sharding_divides_what_is_held_by_the_ranks_of_a_copy() -> None:
    hsdp, fsdp = fit_of(sdxl(), 0), fit_of(sdxl("parallel.strategy=fsdp"), 0)
    assert shards(sdxl()) == 8
    assert hsdp.parameters == 4 * P // 8
    assert fsdp.parameters == 4 * P // 128
    assert hsdp.activations == fsdp.activations
    # Some blocks are whole while they compute, not the model.
    assert 0 < fsdp.working < 2 * P


def test_the_change_that_is_named_fits_when_it_is_made() -> None:
    overrides = ["parallel.strategy=ddp", "parallel.activation_checkpointing=false"]
    fit = fit_of(sdxl(*overrides), 2)
    assert not fit.fits
    assert fit.change is not None
    again = fit_of(sdxl(*overrides, *fit.change.split(" and ")), 2)
    assert again.fits
    assert again.total <= USABLE * GPU_BYTES["a100-80gb"]


def test_what_cannot_fit_names_no_change() -> None:
    one = ["compute.nodes=1", "compute.gpus_per_node=1", "parallel.strategy=fsdp", "compute.gpu=a100-40gb"]
    fit = fit_of(sdxl(*one, "monitor={}", "data.memory_limit=16 GB"), 2)
    assert not fit.fits
    assert fit.change is None


def test_the_arithmetic_is_one_line_that_adds_up() -> None:
    fit = fit_of(sdxl("parallel.strategy=ddp"), 1)
    assert fit.arithmetic() == (
        "weights 10.3 + gradients 10.3 + optimizer 20.5 + EMA 10.3 + working copies 5.1 + activations 2.9 "
        "(16 images x 0.18) = 59.4 GB of 85.0 GB, 94 % of which can be used"
    )


def test_precision_muon_and_masked_tokens_count() -> None:
    bf16, fp32 = fit_of(sdxl(), 1), fit_of(sdxl("parallel.precision=fp32"), 1)
    muon = fit_of(sdxl("optimizer={name: muon}"), 1)
    assert fp32.activations == 2 * bf16.activations
    assert bf16.parameters < muon.optimizer < bf16.optimizer
    small = fit_of(sdxl("optimizer={name: adamw_8bit}"), 1)
    assert small.optimizer == pytest.approx(2.1 * P / 8, rel=1e-6)
    half = load_recipe("pixart-512", ["stages.0.token_mask_ratio=0.5"]).recipe
    whole, masked = fit_of(load_recipe("pixart-512").recipe, 0), fit_of(half, 0)
    assert masked.activations == pytest.approx(whole.activations / 2, rel=1e-6)


def test_a_resolution_between_the_profiles_is_interpolated_and_says_so() -> None:
    at = {pixels: fit_of(sdxl(f"stages.0.resolution={pixels}"), 0) for pixels in (512, 640, 768)}
    fits = list(at.values())
    assert [fit.estimated for fit in fits] == [False, True, False]
    assert fits[0].activations < fits[1].activations < fits[2].activations
    assert "interpolated" in fits[1].arithmetic()


def test_nothing_is_said_of_cpus_and_of_models_without_figures() -> None:
    assert memory_fit(load_recipe("quickstart").recipe, 0) is None
    assert memory_fit(sdxl("model.config={layers_per_block: 3}"), 0) is None


def test_every_gpu_of_a_recipe_has_its_memory() -> None:
    assert set(GPU_BYTES) == set(PEAK_FLOPS)
    for gpu, size in GPU_BYTES.items():
        named = int(gpu.rsplit("-", 1)[1].removesuffix("gb")) * 1e9
        assert 0.95 * named < size < 1.075 * named
