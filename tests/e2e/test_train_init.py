"""`model.init_from`: a run starts from an exported checkpoint, once, and says what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from training import MODELS, figures, recipe_data, rows, trained, write_recipe

from isthmus.core.models.profiles import measured_profile, profile
from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.recipe.schema import Model
from isthmus.core.sample.export import export
from isthmus.core.sample.load import load_run
from isthmus.core.train.loop import train
from isthmus.core.train.setup import set_up
from isthmus.errors import IsthmusError, RecipeError, UsageError
from isthmus.storage.rundir import RunDirectory


def recipe(data: str, **changes: Any) -> Any:
    given = {"parallel__strategy": "ddp", "compute__gpus_per_node": 1, "stages__0__steps": 4} | changes
    return resolve(parse_recipe(json.dumps(recipe_data(data, **given)), filename="r").recipe, "local")


@pytest.fixture(scope="module")
def exported(latents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of ours as diffusers has it: `transformer/` and `scheduler/`."""
    folder = tmp_path_factory.mktemp("exported")
    assert train(recipe(latents["dit"], seed=9), RunDirectory(folder / "run"), cpu=True) == "finished"
    export(str(folder / "run"), str(folder / "out"))
    return folder / "out" / "transformer"


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.engine.parameters.items()}


def test_weights_and_average_are_the_checkpoints(
    latents: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    setup = set_up(
        recipe(latents["dit"], model__init_from=str(exported)), RunDirectory(tmp_path / "run"), cpu=True
    )
    expected = load_file(exported / "diffusion_pytorch_model.safetensors")
    found = weights_of(setup)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert all(torch.equal(setup.ema.shadow[name], expected[name]) for name in found)


def test_a_pipelines_folder_and_a_uri_will_do(
    latents: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(exported, pipeline / "transformer")
    (pipeline / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    fsspec.filesystem("memory").put(str(pipeline), f"/{tmp_path.name}/weights", recursive=True)
    losses = []
    for place in (str(exported), str(pipeline), f"memory://{tmp_path.name}/weights"):
        run = RunDirectory(tmp_path / str(len(losses)))
        train(recipe(latents["dit"], model__init_from=place), run, cpu=True)
        losses.append(figures(rows(run.uri)))
    assert losses[0] == losses[1] == losses[2]
    train(recipe(latents["dit"]), RunDirectory(tmp_path / "scratch"), cpu=True)
    assert figures(rows(tmp_path / "scratch")) != losses[0]


def test_it_is_read_at_the_very_start_and_never_again(
    latents: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    place = Path(shutil.copytree(exported, tmp_path / "weights"))
    run = RunDirectory(tmp_path / "run")
    start = recipe(latents["dit"], model__init_from=str(place))
    train(start, run, cpu=True)
    whole = figures(rows(run.uri))
    run.remove_checkpoint(4)
    shutil.rmtree(place)
    train(start, run, cpu=True)
    assert figures(rows(run.uri)) == whole
    assert {row["attempt"] for row in rows(run.uri) if row["step"] > 2} == {2}
    # Without a checkpoint it is the start again, and the weights are needed.
    run.remove_checkpoint(2)
    run.remove_checkpoint(4)
    with pytest.raises(UsageError, match="no such folder"):
        train(start, run, cpu=True)


def test_without_preset_and_config_the_configuration_is_the_checkpoints(
    latents: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    place = Path(shutil.copytree(exported, tmp_path / "weights"))
    run = RunDirectory(tmp_path / "run")
    model = {"family": "dit", "init_from": str(place)}
    given = recipe(latents["dit"], model=model)
    train(given, run, cpu=True)
    same = RunDirectory(tmp_path / "same")
    train(recipe(latents["dit"], model__init_from=str(place)), same, cpu=True)
    assert figures(rows(run.uri)) == figures(rows(same.uri))
    # The run knows it from then on: to be sampled, exported and resumed.
    shutil.rmtree(place)
    assert load_run(run.uri, device="cpu").denoiser.config["num_layers"] == 2
    run.remove_checkpoint(4)
    train(given, run, cpu=True)
    # Figures are not made up before the configuration is known.
    section = Model.model_validate(model)
    assert profile(section) is None
    with pytest.raises(UsageError, match="comes with the weights"):
        measured_profile(section, resolutions=[16])
    other = Path(shutil.copytree(exported, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"caption_channels": 25}))
    given = recipe(latents["dit"], model={"family": "dit", "init_from": str(other)})
    with pytest.raises(RecipeError, match="text is 24 wide, which is not the model's caption_channels 25"):
        train(given, RunDirectory(tmp_path / "refused"), cpu=True)


def _drop_weights(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")


def _other_tensors(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.weight"] = torch.zeros(8, 32)
    tensors["strange"] = tensors.pop("proj_out.bias")
    save_file(tensors, file)


def _cut(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def _other_class(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": "SD3Transformer2DModel"}))


@pytest.mark.parametrize(
    ("spoil", "config", "says"),
    [
        (_drop_weights, {}, "holds only pickled weights"),
        (
            _other_tensors,
            {},
            r"is not this model: lacks: proj_out.bias; does not know: strange; shapes differ: proj_out.weight"
            r" \[8, 32\] instead of \[4, 32\]",
        ),
        (_cut, {}, "cannot be read"),
        (_other_class, {}, "holds a SD3Transformer2DModel, model.family dit is a PixArtTransformer2DModel"),
        (lambda folder: (folder / "config.json").unlink(), {}, "no config.json"),
        (shutil.rmtree, {}, "no such folder"),
        (lambda folder: None, {"num_layers": 3}, r"another configuration: num_layers 2 there, 3 here"),
    ],
)
def test_what_does_not_fit_is_one_line(
    latents: dict[str, str], tmp_path: Path, exported: Path, spoil: Any, config: dict[str, Any], says: str
) -> None:
    place = Path(shutil.copytree(exported, tmp_path / "weights"))
    spoil(place)
    given = recipe(latents["dit"], model__init_from=str(place), model__config=MODELS["dit"] | config)
    with pytest.raises(IsthmusError, match=says) as caught:
        train(given, RunDirectory(tmp_path / "run"), cpu=True)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_another_size_is_no_other_model(latents: dict[str, str], tmp_path: Path, exported: Path) -> None:
    given = recipe(
        latents["dit"], model__init_from=str(exported), model__config=MODELS["dit"] | {"sample_size": 16}
    )
    assert train(given, RunDirectory(tmp_path / "run"), cpu=True) == "finished"


def test_a_model_with_a_patch_mixer_is_exported_for_ourselves(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """diffusers' class would leave the mixer out and say nothing that anybody reads."""
    mixer = {"layers": 1, "width": 16, "head_width": 8}
    given = recipe(latents["dit"], model__patch_mixer=mixer)
    run = RunDirectory(tmp_path / "run")
    assert train(given, run, cpu=True) == "finished"
    written = export(run.uri, str(tmp_path / "out"))
    assert written.pipeline is None
    assert "patch mixer" in (written.note or "")
    place = str(tmp_path / "out" / "denoiser")
    averaged = load_run(run.uri, device="cpu").denoiser.state_dict()
    assert any(name.startswith("patch_mixer.blocks.0") for name in averaged)
    start = recipe(latents["dit"], model__patch_mixer=mixer, model__init_from=place)
    setup = set_up(start, RunDirectory(tmp_path / "next"), cpu=True)
    assert all(torch.equal(value, averaged[name]) for name, value in weights_of(setup).items())
    for number, other in enumerate((None, mixer | {"layers": 2})):
        apart = recipe(latents["dit"], model__patch_mixer=other, model__init_from=place)
        with pytest.raises(UsageError, match="another configuration: patch_mixer"):
            set_up(apart, RunDirectory(tmp_path / f"refused-{number}"), cpu=True)


@pytest.mark.long
def test_every_rank_starts_from_what_rank_0_read(
    latents: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    """Slow: two processes."""
    place = RunDirectory(tmp_path / "one")
    train(recipe(latents["dit"], model__init_from=str(exported)), place, cpu=True)
    changes = {"model__init_from": str(exported), "stages__0__steps": 4}
    two = trained(write_recipe(tmp_path, recipe_data(latents["dit"], **changes)), tmp_path / "two")
    for one, other in zip(rows(place.uri), two, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
