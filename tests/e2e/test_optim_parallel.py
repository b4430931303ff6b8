"""Optimizers, even timesteps and memory settings over real ranks; what is exchanged; the average in double precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from optim import WIDE
from training import MODELS, environment, figures, recipe_data, rows, trained, weights, write_recipe

from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.long

CLOSE = 2e-5
"""Relative error of losses and gradient norms over six steps: sums are rounded in another order."""

MUON_CLOSE = 2e-3
"""The same with Muon, which rounds to bfloat16 in between: a last bit of its input may become one of its output's."""

EIGHT_BIT_CLOSE = 2e-3
"""The same with moments of 8 bits, of which a last bit more or less is a level."""

HELPERS = Path(__file__).parents[1] / "helpers"


def probe(*strategies: str, ranks: int = 2) -> dict[str, dict[str, Any]]:
    """What `optim_rank.py` found, by strategy."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            str(HELPERS / "optim_rank.py"), *strategies,
        ],
        env=environment(), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [facts["strategy"] for facts in found] == list(strategies)
    return {facts["strategy"]: facts for facts in found}


def test_accumulation_reduces_once_a_step_and_the_average_is_exact_to_1e_6() -> None:
    """Slow: two processes."""
    for facts in probe("ddp", "fsdp").values():
        assert sum(facts["one"].values()) > 0
        assert facts["four"] == facts["one"], "four micro-batches must exchange no more than one"
        assert facts["drift"] <= 1e-6
        assert facts["muon"], "Muon must not depend on the sharding"


def test_accumulation_of_hsdp_reduces_once_a_step_within_and_across() -> None:
    """Slow: four processes on two cores."""
    facts = probe("hsdp", ranks=4)["hsdp"]
    assert sum(facts["one"].values()) > 0
    assert facts["four"] == facts["one"]
    assert facts["muon"]


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]], close: float) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for figure in ("loss", "grad_norm"):
            assert one[figure] == pytest.approx(other[figure], rel=close), (one["step"], figure)


def test_muon_under_fsdp_is_muon_and_its_checkpoint_goes_on_on_one_rank(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: one process, two processes, and one that goes on from theirs."""
    settings = {"optimizer": {"name": "muon", "weight_decay_on": "matrices"}}
    single = write_recipe(tmp_path, recipe_data(latents["dit"], **settings, parallel__strategy="ddp"), "1")
    double = write_recipe(tmp_path, recipe_data(latents["dit"], **settings), "2")
    expected = trained(single, tmp_path / "single", 1)
    found = trained(double, tmp_path / "double")
    compare(found, expected, MUON_CLOSE)
    run = RunDirectory(tmp_path / "double")
    run.remove_checkpoint(6)
    trained(double, tmp_path / "double", 1)
    resumed = rows(tmp_path / "double")
    assert [row["attempt"] for row in resumed] == [1, 1, 1, 1, 2, 2]
    compare(resumed, found, MUON_CLOSE)


def test_bytes_of_moments_do_not_depend_on_the_sharding(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: one process, two, and one that goes on from theirs. A level more or less of a moment is all that rounding does."""
    settings = {"optimizer": {"name": "adamw_8bit"}, "model__config": MODELS["dit"] | WIDE}
    single = write_recipe(tmp_path, recipe_data(latents["dit"], **settings, parallel__strategy="ddp"), "1")
    double = write_recipe(tmp_path, recipe_data(latents["dit"], **settings), "2")
    expected = trained(single, tmp_path / "single", 1)
    found = trained(double, tmp_path / "double")
    compare(found, expected, EIGHT_BIT_CLOSE)
    run = RunDirectory(tmp_path / "double")
    whole = weights(run.uri)
    run.remove_checkpoint(6)
    assert figures(trained(double, tmp_path / "double")) == figures(found), "bit for bit on as many ranks"
    assert weights(run.uri) == whole
    run.remove_checkpoint(6)
    trained(double, tmp_path / "double", 1)
    resumed = rows(tmp_path / "double")
    assert [row["attempt"] for row in resumed] == [1, 1, 1, 1, 3, 3]
    compare(resumed, found, EIGHT_BIT_CLOSE)
    plain = recipe_data(latents["dit"], model__config=MODELS["dit"] | WIDE, parallel__strategy="ddp")
    adamw = trained(write_recipe(tmp_path, plain, "3"), tmp_path / "adamw", 1)
    assert figures(adamw) != figures(expected)
    compare(adamw, expected, 0.1)


def test_even_timesteps_are_the_same_for_every_cut_of_the_batch(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: one process, and two with micro-batches of one sample. The settings of memory and kernels on top."""
    settings = {"objective__quasi_random": True, "parallel__strategy": "ddp"}
    expected = trained(
        write_recipe(tmp_path, recipe_data(latents["dit"], **settings), "1"), tmp_path / "one", 1
    )
    settings |= {
        "parallel__strategy": "fsdp",
        "parallel__activation_checkpointing": "selective",
        "parallel__deterministic": True,
        "parallel__compile": "aot_eager",
        "stages__0__micro_batch_size": 1,
    }
    found = trained(write_recipe(tmp_path, recipe_data(latents["dit"], **settings), "2"), tmp_path / "two")
    compare(found, expected, CLOSE)
    assert all(row["exposed_communication_s"] >= 0 for row in found)
    assert max(row["exposed_communication_s"] for row in found) > 0
