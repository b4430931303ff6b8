"""Fields of objective, optimizer and parallelism change what they say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import EPSILON, run
from optim import WIDE
from training import MODELS, rows

from isthmus.core.models.families import blocks, build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train import blocks as recomputing
from isthmus.core.train.parallel import Engine, prepare

CASES: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    ("objective__quasi_random", True, {}, ["losses"]),
    ("objective__timestep_sampling", "cosmap", {}, ["losses"]),
    ("objective__shift", "sd3", {}, ["losses"]),
    ("objective__shift", "flux", {}, ["losses"]),
    ("objective__weighting_scheme", "cosmap", {}, ["losses"]),
    ("objective__weighting_scheme", "sigma_sqrt", {}, ["losses"]),
    ("objective__weighting_scheme", "soft_min_snr", EPSILON, ["losses"]),
    ("objective__weighting_scheme", "p2", EPSILON, ["losses"]),
    ("objective__p2_gamma", 0.5, EPSILON | {"objective__weighting_scheme": "p2"}, ["losses"]),
    ("stages__0__objective", {"quasi_random": True}, {}, ["losses"]),
    ("stages__0__objective", {"shift": "flux"}, {}, ["losses"]),
    ("optimizer__name", "muon", {}, ["model"]),
    ("optimizer__name", "adamw_8bit", {"model__config": MODELS["dit"] | WIDE}, ["model"]),
    ("optimizer__momentum", 0.5, {"optimizer__name": "muon"}, ["model"]),
    ("optimizer__weight_decay_on", "matrices", {"optimizer__weight_decay": 0.5}, ["model"]),
]


@pytest.mark.parametrize(("field", "value", "given", "differs"), CASES, ids=[f"{c[0]}={c[1]}" for c in CASES])
def test_a_field_changes_what_it_says(
    latents: dict[str, str], tmp_path: Path, field: str, value: Any, given: dict[str, Any], differs: list[str]
) -> None:
    before = run(tmp_path, latents["dit"], "before", given)
    after = run(tmp_path, latents["dit"], "after", given | {field: value})
    for figure in differs:
        assert before[figure] != after[figure], figure


def engine(family: str, **parallel: Any) -> Engine:
    model = build_from_config(CLASSES[family], MODELS[family], 0)
    return prepare(model, Optimizer(), Parallel(strategy="ddp", precision="fp32", **parallel), cpu=True)


@pytest.mark.parametrize("family", ["dit", "unet", "mmdit"])
def test_selective_recomputes_every_second_block(
    latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    recomputed: list[int] = []
    original = recomputing.checkpoint

    def counted(block: Any, *inputs: Any, **more: Any) -> Any:
        recomputed.append(id(block))
        return original(block, *inputs, **more)

    monkeypatch.setattr(recomputing, "checkpoint", counted)
    every, losses = {}, {}
    for setting in (False, "selective", True):
        recomputed.clear()
        changes = {"parallel__activation_checkpointing": setting, "stages__0__steps": 2}
        losses[setting] = run(
            tmp_path, latents[family], str(setting), changes | {"model__family": family} | _of(family)
        )
        every[setting] = len(set(recomputed))
    total = len(blocks(build_from_config(CLASSES[family], MODELS[family], 0)))
    assert every[False] == 0
    assert 0 < every["selective"] < every[True]
    if family != "unet":  # a UNet's class recomputes whole sub-blocks in places
        assert every[True] == total
        assert every["selective"] == -(-total // 2)
    assert losses[False] == losses["selective"] == losses[True]


def _of(family: str) -> dict[str, Any]:
    from training import recipe_data

    found = recipe_data("", family)
    return {"model__config": found["model"]["config"], "encoders": found["encoders"]}


def test_deterministic_is_set_for_the_process_and_taken_back(latents: dict[str, str], tmp_path: Path) -> None:
    seen = []
    for wanted in (True, False):
        engine("dit", deterministic=wanted)
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))
    assert seen == [(True, True), (False, False)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    plain = run(tmp_path, latents["dit"], "plain", {})
    try:
        assert run(tmp_path, latents["dit"], "same", {"parallel__deterministic": True}) == plain
    finally:
        torch.use_deterministic_algorithms(False)


def test_validation_loss_is_of_the_average_on_fixed_samples(latents: dict[str, str], tmp_path: Path) -> None:
    watched = {"validation": {"loss_by_timestep": True, "every": 2, "samples": 8, "timestep_bins": 4}}
    one = run(tmp_path, latents["dit"], "one", watched)
    other = run(tmp_path, latents["dit"], "other", watched | {"ema__decay": 0.2})
    assert one["model"] == other["model"]
    assert one["validation"] != other["validation"]
    # Neither weights of the loss, nor dropout, nor how training draws its timesteps, changes what is measured.
    still = {"ema__decay": 0.0, "stages__0__learning_rate": 1e-30, "optimizer__weight_decay": 0.0}
    fixed = run(tmp_path, latents["dit"], "fixed", watched | still)
    changes = {
        "objective__caption_dropout": 1.0,
        "objective__quasi_random": True,
        "objective__weighting_scheme": "cosmap",
    }
    assert (
        run(tmp_path, latents["dit"], "changed", watched | still | changes)["validation"]
        == fixed["validation"]
    )


def test_rows_have_throughput_and_where_the_time_went(latents: dict[str, str], tmp_path: Path) -> None:
    run(tmp_path, latents["dit"], "run", {"checkpoint__every": 2})
    for row in rows(tmp_path / "run"):
        assert row["samples_per_s"] == pytest.approx(8 / row["step_s"])
        assert row["samples_per_s_per_gpu"] == row["samples_per_s"]
        assert row["mfu"] is None
        assert row["exposed_communication_s"] is None
        assert 0 <= row["data_wait_s"] <= row["step_s"]
        assert row["checkpoint_stall_s"] >= 0
