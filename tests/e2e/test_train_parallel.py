"""Strategies, world sizes and accumulation give the same training, and an FSDP run on a CPU is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import environment, figures, recipe_data, rows, train, trained, weights, write_recipe

from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.slow

CLOSE = 2e-5
"""Relative error of losses and gradient norms over six steps: sums are rounded in another order."""


@pytest.fixture(scope="module")
def single(latents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of one process without any strategy's wrapping."""
    folder = tmp_path_factory.mktemp("single")
    return trained(
        write_recipe(folder, recipe_data(latents["dit"], parallel__strategy="ddp")), folder / "run", 1
    )


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for figure in ("loss", "grad_norm"):
            assert one[figure] == pytest.approx(other[figure], rel=CLOSE), (one["step"], figure)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(
    latents: dict[str, str], tmp_path: Path, single: list[dict[str, Any]], strategy: str
) -> None:
    """Slow: two processes."""
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], parallel__strategy=strategy))
    assert_close(trained(recipe, tmp_path / "run"), single)


def test_hsdp_on_four_processes_trains_as_one(
    latents: dict[str, str], tmp_path: Path, single: list[dict[str, Any]]
) -> None:
    """Slow: four processes on two cores."""
    changes = {
        "parallel": {"strategy": "hsdp", "shard_size": 2, "precision": "fp32"},
        "compute__gpus_per_node": 4,
    }
    changes["stages__0__micro_batch_size"] = 2
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], **changes))
    assert_close(trained(recipe, tmp_path / "run", 4), single)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accumulation_changes_nothing_but_rounding(
    latents: dict[str, str], tmp_path: Path, single: list[dict[str, Any]], strategy: str
) -> None:
    """Slow: two processes. Four micro-batches of one sample each a rank."""
    changes = {"parallel__strategy": strategy, "stages__0__micro_batch_size": 1}
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], **changes))
    assert_close(trained(recipe, tmp_path / "run"), single)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__activation_checkpointing": True},
        {"parallel__compile": "aot_eager"},
        {"parallel__compile": "aot_eager", "parallel__activation_checkpointing": True},
    ],
    ids=["recomputed", "compiled", "both"],
)
def test_memory_and_compiler_settings_change_nothing_but_rounding(
    latents: dict[str, str], tmp_path: Path, single: list[dict[str, Any]], changes: dict[str, Any]
) -> None:
    """Slow: two processes under fsdp."""
    assert_close(
        trained(write_recipe(tmp_path, recipe_data(latents["dit"], **changes)), tmp_path / "run"), single
    )


def test_bf16_follows_fp32_and_differs(
    latents: dict[str, str], tmp_path: Path, single: list[dict[str, Any]]
) -> None:
    """Slow: two processes under fsdp."""
    recipe = write_recipe(tmp_path, recipe_data(latents["dit"], parallel__precision="bf16"))
    for one, other in zip(trained(recipe, tmp_path / "run"), single, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
        assert one["loss"] != other["loss"]


PROBE = """
import sys
import torch
from isthmus.core.models.families import build_from_config
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train import parallel
from isthmus.errors import TrainingFailed
from torch.distributed.tensor import DTensor
sys.path.insert(0, sys.argv[1])
from training import MODELS
def made(**settings):
    model = build_from_config("PixArtTransformer2DModel", MODELS["dit"], 0)
    return parallel.prepare(model, Optimizer(), Parallel(precision="fp32", **settings), cpu=True)
fsdp = made(strategy="fsdp")
assert all(isinstance(w, DTensor) for w in fsdp.parameters.values())
assert {tuple(w.device_mesh.mesh.shape) for w in fsdp.parameters.values()} == {(2,)}
whole = sum(w.numel() for w in fsdp.parameters.values())
held = sum(w.to_local().numel() for w in fsdp.parameters.values())
assert held < 0.55 * whole, (held, whole)
assert not any(isinstance(w, DTensor) for w in made(strategy="ddp").parameters.values())
parallel._force_sharding = lambda *_: None
try:
    made(strategy="fsdp")
except TrainingFailed as error:
    print("refused:", error)
else:
    print("trained something else")
"""


def test_fsdp_on_a_cpu_holds_dtensors_and_anything_else_is_refused(tmp_path: Path) -> None:
    """Slow: two processes."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    helpers = str(Path(__file__).parents[1] / "helpers")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), helpers],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused: strategy fsdp must hold DTensors") == 2


def test_validation_and_grids_leave_training_alone_and_see_the_average(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: two launches of two processes under fsdp, whose gathered weights could go stale."""
    plain = write_recipe(tmp_path, recipe_data(latents["dit"]), "plain.yaml")
    watched = recipe_data(
        latents["dit"],
        validation={
            "prompts": ["a red heart", "a blue square"], "every": 2, "loss_by_timestep": True, "samples": 6,
            "timestep_bins": 3, "sampling_steps": 3,
        },
    )  # fmt: skip
    expected = trained(plain, tmp_path / "plain")
    found = trained(write_recipe(tmp_path, watched, "watched.yaml"), tmp_path / "watched")
    assert figures(found) == figures(expected)
    assert weights(tmp_path / "watched") == weights(tmp_path / "plain")
    run = RunDirectory(tmp_path / "watched")
    assert [step for step, _ in run.samples()] == [2, 4, 6]
    for step, _ in run.samples():
        picture = run.read_file(f"samples/step-{step:08d}.png")
        assert picture is not None
        assert picture.startswith(b"\x89PNG")
    two = rows(tmp_path / "watched", "validation")
    assert [row["step"] for row in two] == [2, 4, 6]
    assert all(len(row["bins"]) == 3 and row["held_out"] is False for row in two)
    # One process over the same checkpoints measures the same: no sample is missing or counted twice.
    run.remove_checkpoint(6)
    run.remove_checkpoint(4)
    trained(write_recipe(tmp_path, watched, "watched.yaml"), tmp_path / "watched", 1)
    one = rows(tmp_path / "watched", "validation")
    for row, other in zip(one, two, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row["bins"] == pytest.approx(other["bins"], rel=1e-4)


def test_a_world_size_that_cannot_share_the_lanes_is_refused(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: three processes."""
    done = train(write_recipe(tmp_path, recipe_data(latents["dit"])), tmp_path / "run", 3)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1  # torchrun's own; the worker says 2.
    assert len(lines) == 1
    assert "world size 3 does not divide data.lanes 4" in lines[0]
