"""Every family trains under every strategy, and what a stage does to tokens survives resume and borders."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from training import figures, recipe_data, rows, trained, weights, write_recipe

from isthmus.core.recipe import parse_recipe, resolve
from isthmus.core.train.loop import train
from isthmus.storage.rundir import RunDirectory

STAGE = {"global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-2, "steps": 2}
TOKENS = [
    {"name": "a", "resolution": 16, "token_mask_ratio": 0.75, "pos_embed_interpolation": 0.25, **STAGE},
    {"name": "b", "resolution": 32, "token_mask_ratio": 0.25, **STAGE},
    {"name": "c", "resolution": 32, "pos_embed_interpolation": 2.0, **STAGE},
]


def alone(tmp_path: Path, data: str, name: str, family: str = "dit", **changes: Any) -> Path:
    """Train in this process."""
    given = {"parallel__strategy": "ddp", "compute__gpus_per_node": 1, "checkpoint__every": 1} | changes
    text = json.dumps(recipe_data(data, family, **given))
    place = tmp_path / name
    assert (
        train(resolve(parse_recipe(text, filename=name).recipe, "local"), RunDirectory(place), cpu=True)
        == "finished"
    )
    return place


@pytest.mark.parametrize("family", ["sana", "flux"])
def test_a_new_family_trains_and_validates(latents: dict[str, str], tmp_path: Path, family: str) -> None:
    validation = {
        "prompts": ["a red heart"],
        "every": 3,
        "sampling_steps": 2,
        "loss_by_timestep": True,
        "samples": 8,
    }
    place = alone(tmp_path, latents[family], "run", family, validation=validation)
    losses = [row["loss"] for row in rows(place)]
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)
    assert len(rows(place, "validation")) == 2
    assert (place / "samples" / "step-00000006.png").exists()


@pytest.mark.long
@pytest.mark.parametrize("family", ["sana", "flux"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_in_bf16_with_recomputing_follow_one_in_fp32(
    latents: dict[str, str], tmp_path: Path, family: str, strategy: str
) -> None:
    """Slow: two processes."""
    single = rows(alone(tmp_path, latents[family], "single", family))
    changes = {
        "parallel": {"strategy": strategy, "precision": "bf16", "activation_checkpointing": True},
        "checkpoint__every": 3,
    }
    recipe = write_recipe(tmp_path, recipe_data(latents[family], family, **changes))
    for one, other in zip(trained(recipe, tmp_path / "run"), single, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
        assert one["loss"] != other["loss"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["flux"])
def test_a_new_family_resumes_bit_for_bit_under_fsdp(
    latents: dict[str, str], tmp_path: Path, family: str
) -> None:
    """Slow: two processes, twice."""
    recipe = write_recipe(tmp_path, recipe_data(latents[family], family))
    whole = trained(recipe, tmp_path / "run")
    before = weights(tmp_path / "run")
    RunDirectory(tmp_path / "run").remove_checkpoint(6)
    RunDirectory(tmp_path / "run").remove_checkpoint(4)
    assert figures(trained(recipe, tmp_path / "run")) == figures(whole)
    assert weights(tmp_path / "run") == before


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_masks_and_positions_survive_resume_on_either_side_of_a_border(
    latents: dict[str, str], tmp_path: Path, whole: Path, step: int
) -> None:
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    run = RunDirectory(again)
    for later in range(step + 1, 7):
        run.remove_checkpoint(later)
    alone(tmp_path, latents["dit"], "again", stages=TOKENS)
    found = [row for row in rows(again) if row["step"] > step]
    assert {row["attempt"] for row in found} == {2}
    assert figures(rows(again)) == figures(rows(whole))
    assert weights(again) == weights(whole)


@pytest.fixture(scope="module")
def whole(latents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stages that mask and place tokens differently, never interrupted."""
    return alone(tmp_path_factory.mktemp("whole"), latents["dit"], "whole", stages=TOKENS)


def test_each_field_acts_in_its_own_stage_alone(latents: dict[str, str], tmp_path: Path, whole: Path) -> None:
    for number, field in [
        (0, "pos_embed_interpolation"),
        (1, "token_mask_ratio"),
        (2, "pos_embed_interpolation"),
    ]:
        stages = [dict(stage) for stage in TOKENS]
        del stages[number][field]
        place = alone(tmp_path, latents["dit"], f"{number}-{field}", stages=stages)
        same = [one == other for one, other in zip(figures(rows(place)), figures(rows(whole)), strict=True)]
        assert same[: 2 * number] == [True] * (2 * number)
        assert not any(same[2 * number :])


@pytest.mark.long
@pytest.mark.parametrize("mixer", [None, {"layers": 2, "width": 16, "head_width": 8}], ids=["naive", "mixed"])
@pytest.mark.parametrize("family", ["dit", "flux"])
def test_masked_training_is_the_same_on_two_processes(
    latents: dict[str, str], tmp_path: Path, family: str, mixer: dict[str, int] | None
) -> None:
    """Slow: two processes."""
    changes = {
        "model__patch_mixer": mixer,
        "parallel__activation_checkpointing": mixer is not None,
        "stages__0__token_mask_ratio": 0.5,
        "stages__0__resolution": 32,
        "stages__0__micro_batch_size": 2,
    }
    single = rows(alone(tmp_path, latents[family], "single", family, **changes))
    recipe = write_recipe(tmp_path, recipe_data(latents[family], family, **changes))
    for one, other in zip(trained(recipe, tmp_path / "run"), single, strict=True):
        for figure in ("loss", "grad_norm"):
            assert one[figure] == pytest.approx(other[figure], rel=2e-5)


@pytest.mark.slow
def test_a_patch_mixer_goes_on_on_another_world_size_and_under_another_strategy(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: two processes, then one. Masked at first, then with all tokens, as MicroDiT is trained."""
    stages = [stage_of(0.75, 3), stage_of(0.0, 3)]
    mixer = {"layers": 2, "width": 16, "head_width": 8}
    changes = {"stages": stages, "model__patch_mixer": mixer}
    whole = alone(tmp_path, latents["dit"], "whole", **changes)
    file = write_recipe(tmp_path, recipe_data(latents["dit"], **changes))
    trained(file, tmp_path / "run")
    RunDirectory(tmp_path / "run").remove_checkpoint(6)
    RunDirectory(tmp_path / "run").remove_checkpoint(4)
    alone(tmp_path, latents["dit"], "run", **changes)
    found = rows(tmp_path / "run")
    assert [row["attempt"] for row in found] == [1, 1, 2, 2, 2, 2]
    for one, other in zip(found, rows(whole), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)


def stage_of(ratio: float, steps: int) -> dict[str, Any]:
    """A stage of 32 px that leaves out a share of the tokens."""
    return {
        "name": f"masked-{ratio}", "resolution": 32, "steps": steps, "global_batch_size": 8, "micro_batch_size": 4,
        "learning_rate": 1e-2, "token_mask_ratio": ratio,
    }  # fmt: skip
