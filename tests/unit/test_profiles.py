"""The stored profiles against published figures, against the real classes, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.models import profiles
from isthmus.core.models.presets import CLASSES, PRESETS, model_config
from isthmus.core.models.profiles import arguments, downsampling, latent_channels, measured_profile, profile
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.load import shipped_recipes
from isthmus.core.recipe.schema import Model
from isthmus.errors import NotInstalled, UsageError

# Forward and backward pass of one image in TFLOP, counted independently on the meta device.
TFLOP = {
    "sd2-base": {256: 0.539, 512: 2.409},
    "sdxl": {256: 1.231, 512: 4.714, 1024: 20.23},
    "pixart-512": {256: 0.996, 512: 3.863, 1024: 19.90},
    "sd3-medium": {256: 2.525, 512: 6.318, 1024: 26.71},
}
# These two families were not counted elsewhere; the parameters are published (Xie et al. 2024; FLUX.1's model card).
PUBLISHED = {"sana-600m": 0.59e9, "sana-1600m": 1.604e9, "flux-dev": 11.9e9}
# Published: Podell et al. 2023 (2.6 B), Stable Diffusion 2 (865 M), Chen et al. 2024 (0.6 B), Esser et al. 2024 (2 B).
PARAMETERS = {"sd2-base": 0.866e9, "sdxl": 2.567e9, "pixart-512": 0.611e9, "sd3-medium": 2.028e9}

needs_diffusers = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('diffusers')")


def preset(name: str, **config: object) -> Model:
    return Model.model_validate({"family": PRESETS[name].family, "preset": name, "config": config})


@pytest.mark.parametrize("name", TFLOP)
def test_flops_and_parameters_are_the_published_ones(name: str) -> None:
    found = profile(preset(name))
    assert found is not None
    assert found.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    for resolution, expected in TFLOP[name].items():
        assert found.train_flops[resolution] / 1e12 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_sana_and_flux_are_the_published_ones(name: str) -> None:
    found = profile(preset(name))
    assert found is not None
    assert found.parameters == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_plausible(name: str) -> None:
    found = profile(preset(name))
    assert found is not None
    assert (
        found.latent_channels * (4 if found.class_name.startswith("Flux") else 1)
        == PRESETS[name].config["in_channels"]
    )
    for resolution, train in found.train_flops.items():
        # A backward pass costs about twice a forward pass; less where text is projected, which needs no gradient.
        assert 2.8 < train / found.forward_flops[resolution] <= 3
        assert found.checkpointed_activation_bytes[resolution] < found.activation_bytes[resolution] / 2
        assert found.patch_size in (1, 2)
        assert resolution % (found.factor * found.downsampling) == 0
    areas = sorted(found.train_flops)
    assert [found.train_flops[area] for area in areas] == sorted(found.train_flops.values())


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_have_a_profile_for_each_stage(name: str) -> None:
    recipe = load_recipe(name).recipe
    found = profile(recipe.model)
    assert found is not None
    assert found.factor == recipe.encoders.autoencoder.factor
    assert {stage.resolution for stage in recipe.stages} <= set(found.train_flops)
    assert (
        found.text_tokens
        == {
            "unet": recipe.encoders.text[0].max_tokens,
            "dit": recipe.encoders.text[0].max_tokens,
            "mmdit": recipe.encoders.text[0].max_tokens + recipe.encoders.text[-1].max_tokens,
        }[recipe.model.family]
    )


def test_a_config_is_found_by_what_it_means() -> None:
    sdxl = profile(preset("sdxl"))
    spelt_out = Model.model_validate(
        {"family": "unet", "config": {**PRESETS["sdxl"].config, "act_fn": "silu"}}
    )
    assert profile(spelt_out) == sdxl
    assert profile(preset("sdxl", layers_per_block=3)) is None
    assert model_config(preset("sdxl", layers_per_block=3))[1]["layers_per_block"] == 3


def test_down_sampling() -> None:
    assert downsampling("unet", arguments(CLASSES["unet"])) == 8
    assert downsampling("dit", {"patch_size": 2}) == 2
    assert downsampling("flux", arguments(CLASSES["flux"])) == 2
    assert downsampling("my-own", {"patch_size": 2}) == 1
    assert latent_channels("flux", arguments(CLASSES["flux"])) == 16
    assert latent_channels("sana", arguments(CLASSES["sana"])) == 32
    assert latent_channels("my-own", {}) is None


@needs_diffusers
def test_arguments_are_those_of_the_installed_classes() -> None:
    from isthmus.core.models.generate_profiles import class_defaults

    for class_name in CLASSES.values():
        assert class_defaults(class_name) == arguments(class_name), (
            "run isthmus.core.models.generate_profiles"
        )


@needs_diffusers
@pytest.mark.parametrize(
    ("name", "resolution"),
    [
        ("quickstart", None),
        ("sd2-base", 256),
        ("pixart-512", 256),
        ("sana-600m", 512),
        ("flux-small", 256),
    ],
)
def test_stored_figures_are_those_of_the_real_classes(name: str, resolution: int | None) -> None:
    from isthmus.core.models.generate_profiles import measure

    found = profile(preset(name))
    assert found is not None
    resolutions = [resolution] if resolution else list(found.train_flops)
    made = measure(
        PRESETS[name].family,
        dict(PRESETS[name].config),
        factor=found.factor,
        text_tokens=found.text_tokens,
        resolutions=resolutions,
    )
    assert made["parameters"] == found.parameters
    assert made["downsampling"] == found.downsampling
    for figure in ("forward_flops", "train_flops", "activation_bytes", "checkpointed_activation_bytes"):
        for pixels in resolutions:
            assert made[figure][str(pixels)] == getattr(found, figure)[pixels], f"{figure} at {pixels}"


@needs_diffusers
def test_activation_bytes_are_what_autograd_holds_in_reality() -> None:
    """The estimate on the meta device against tensors counted on the CPU, in float32 with unfused attention off."""
    import torch

    from isthmus.core.models.conditioning import Condition
    from isthmus.core.models.families import build_denoiser, predict

    model = build_denoiser(preset("quickstart"), seed=0).to(torch.bfloat16)
    found = profile(preset("quickstart"))
    assert found is not None
    held: dict[int, torch.Tensor] = {}
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    noisy = torch.randn(1, found.latent_channels, 8, 8, dtype=torch.bfloat16)
    tokens = torch.randn(1, found.text_tokens, 384, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        predict(model, "dit", noisy, torch.tensor([500.0]), Condition(tokens=tokens))
    real = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    assert real == pytest.approx(found.activation_bytes[32], rel=0.1)


@pytest.mark.slow
@needs_diffusers
def test_another_config_is_measured_in_a_subprocess() -> None:
    """Two processes that import torch and diffusers."""
    tiny = preset("quickstart", num_layers=2)
    found = measured_profile(tiny, resolutions=[32], factor=4, text_tokens=10)
    known = profile(preset("quickstart"))
    assert known is not None
    assert found.parameters < known.parameters
    assert found.train_flops[32] < known.train_flops[32]
    assert found.config["num_layers"] == 2
    with pytest.raises(UsageError, match="cannot be profiled"):
        measured_profile(preset("quickstart", num_attention_heads=5), resolutions=[32], factor=4)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="needs torch, which is not installed") as caught:
        measured_profile(preset("sdxl", layers_per_block=3), resolutions=[256])
    assert caught.value.hint == "pip install 'isthmus[train]'"
    assert measured_profile(preset("sdxl"), resolutions=[256]).parameters > 2e9


def test_profiles_and_presets_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, json; from isthmus.core.models import presets, profiles; from isthmus.core.recipe import *;"
        "r = load_recipe('sdxl-progressive').recipe; profiles.profile(r.model);"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pyarrow", "fsspec", "diffusers", "transformers"} & set(
        json.loads(done.stdout)
    )


def test_the_file_is_data_of_the_package() -> None:
    assert Path(profiles.__file__).with_name("profiles.json") == profiles.FILE
    assert set(profiles.stored()["profiles"]) == set(PRESETS)
