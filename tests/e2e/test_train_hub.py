"""`model.init_from: hf://...`: first weights of a commit of the hub, through its own client and a stand-in for the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import COMMIT, Hub, served
from training import figures, recipe_data, rows

from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.sample.export import export
from isthmus.core.train import hub as fetching
from isthmus.core.train.loop import train
from isthmus.errors import IsthmusError, RecipeError
from isthmus.storage.rundir import RunDirectory

PLACE = f"hf://team/pipeline@{COMMIT}"


def recipe(data: str, **changes: Any) -> Any:
    given = {"parallel__strategy": "ddp", "compute__gpus_per_node": 1, "stages__0__steps": 3} | changes
    return resolve(parse_recipe(json.dumps(recipe_data(data, **given)), filename="r").recipe, "local")


@pytest.fixture(scope="module")
def exported(latents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder with more in it than a denoiser."""
    folder = tmp_path_factory.mktemp("exported")
    assert train(recipe(latents["dit"], seed=9), RunDirectory(folder / "run"), cpu=True) == "finished"
    export(str(folder / "run"), str(folder / "out"))
    place = folder / "out"
    (place / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    (place / "whole.safetensors").write_bytes(b"a single file of gigabytes")
    (place / "vae").mkdir()
    (place / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"not asked for")
    weights = place / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    return place


@pytest.fixture
def hub(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with that pipeline, a denoiser alone, and a repository that wants a licence accepted."""
    fetching.fetch.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    alone = exported / "transformer"
    with served({"team/pipeline": exported, "team/denoiser": alone, "team/gated": alone}) as found:
        found.gated.add("team/gated")
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found
    fetching.fetch.cache_clear()


def test_a_pipelines_denoiser_is_fetched_and_nothing_else(
    latents: dict[str, str], tmp_path: Path, exported: Path, hub: Hub
) -> None:
    local = RunDirectory(tmp_path / "local")
    train(recipe(latents["dit"], model__init_from=str(exported)), local, cpu=True)
    expected = figures(rows(local.uri))
    train(recipe(latents["dit"], model__init_from=PLACE), RunDirectory(tmp_path / "run"), cpu=True)
    assert figures(rows(tmp_path / "run")) == expected
    assert hub.files() == [
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
    ]
    for number, place in enumerate((f"{PLACE}/transformer", f"hf://team/denoiser@{COMMIT}")):
        run = RunDirectory(tmp_path / str(number))
        train(recipe(latents["dit"], model__init_from=place), run, cpu=True)
        assert figures(rows(run.uri)) == expected, place


def test_the_configuration_may_be_the_hubs(latents: dict[str, str], tmp_path: Path, hub: Hub) -> None:
    run = RunDirectory(tmp_path / "run")
    train(recipe(latents["dit"], model={"family": "dit", "init_from": PLACE}), run, cpu=True)
    assert json.loads(run.read_file("model.json") or b"")["config"]["num_layers"] == 2


def test_what_is_in_the_cache_needs_no_hub(
    latents: dict[str, str], tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(latents["dit"], model__init_from=PLACE)
    train(given, RunDirectory(tmp_path / "run"), cpu=True)
    asked = len(hub.asked)
    for name, offline, broken in (("offline", "1", False), ("broken", "0", True)):
        fetching.fetch.cache_clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        hub.broken = broken
        train(given, RunDirectory(tmp_path / name), cpu=True)
        assert figures(rows(tmp_path / name)) == figures(rows(tmp_path / "run"))
    assert len(hub.asked) == asked, "a commit's files do not change"


@pytest.mark.parametrize(
    ("place", "offline", "says", "code"),
    [
        (f"hf://team/nothing@{COMMIT}", "0", "the hub has no such repository.*HF_TOKEN", 2),
        (f"hf://team/pipeline@{'f' * 40}", "0", "the hub has no such commit", 2),
        (f"hf://team/gated@{COMMIT}", "0", "wants a licence accepted.*HF_TOKEN", 2),
        (f"hf://team/pipeline@{COMMIT}/vae2", "0", "has no folder vae2 with a model", 2),
        (PLACE, "1", "HF_HUB_OFFLINE forbids to ask the hub.*HF_HOME", 1),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    latents: dict[str, str],
    tmp_path: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    offline: str,
    says: str,
    code: int,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(IsthmusError, match=says) as caught:
        train(recipe(latents["dit"], model__init_from=place), RunDirectory(tmp_path / "run"), cpu=True)
    assert "\n" not in str(caught.value)
    assert place in str(caught.value)
    assert caught.value.exit_code == code


def test_a_hub_that_cannot_be_reached_is_one_line(
    latents: dict[str, str], tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(latents["dit"], model__init_from=PLACE)
    hub.broken = True
    with pytest.raises(IsthmusError, match=r"cannot be fetched from the hub: .*503") as caught:
        train(given, RunDirectory(tmp_path / "broken"), cpu=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        IsthmusError, match=r"cannot be fetched from the hub: .*copy it to a store"
    ) as refused:
        train(given, RunDirectory(tmp_path / "refused"), cpu=True)
    assert "\n" not in str(caught.value) + str(refused.value)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("hf://team/pipeline", "names no commit, and a branch moves on"),
        ("hf://team/pipeline@main", "is no folder of a hub.*@COMMIT"),
        (f"hf://team@{COMMIT}", "is no folder of a hub"),
        (f"hf://team/pipeline@{COMMIT}/../x", "is no folder of a hub"),
        ({"local": f"hf://team/pipeline@{COMMIT[:8]}"}, "is no folder of a hub"),
    ],
)
def test_a_name_without_a_commit_is_refused_with_the_recipe(place: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        recipe("x", model__init_from=place)
    assert "model.init_from" in str(caught.value)


def test_weights_are_bits_of_the_file(exported: Path, hub: Hub) -> None:
    from safetensors.torch import load_file

    folder = Path(fetching.fetch(PLACE, "transformer")) / "transformer"
    name = "diffusion_pytorch_model.safetensors"
    found, expected = load_file(folder / name), load_file(exported / "transformer" / name)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
