"""A real training whose ranks stall, drag, fail or run out of memory: the rank is named, and everybody ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import environment, recipe_data, rows, weights, write_recipe

from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.faults

HELPERS = Path(__file__).parents[1] / "helpers"


def worker(tmp_path: Path, do: str, recipe: dict[str, Any]) -> tuple[int, str, RunDirectory]:
    """A worker with two ranks to its end: exit code, output, run directory."""
    run = RunDirectory(tmp_path / "run")
    path = write_recipe(tmp_path, recipe)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "isthmus.core.worker", "--recipe", str(path), "--run", run.uri),
            *("--module", "alive_train", "--grace", "3"),
        ],
        env=environment(ALIVE_DO=do, ALIVE_NOTES=str(tmp_path), PYTHONPATH=str(HELPERS)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, run


def quick(data: str, **changes: Any) -> dict[str, Any]:
    """A recipe that gives up after seconds."""
    limits = {"data__retry_budget": "1 s", "data__wait_limit": "2 s", "watchdog__limit": "8 s"}
    return recipe_data(data, **limits | {"stages__0__steps": 20} | changes)


def test_a_rank_without_data_is_named_and_the_run_can_go_on(latents: dict[str, str], tmp_path: Path) -> None:
    code, output, run = worker(tmp_path, "data 1 5", quick(latents["dit"]))
    assert code == 75, output
    (alarm,) = run.events("alarm")
    assert (alarm["kind"], alarm["ranks"]) == ("data", [1])
    assert "at step 5: waiting for data" in alarm["message"]
    (ending,) = run.events("preempted")
    assert (ending["cause"], ending["rank"]) == (alarm["message"], 1)
    assert "Traceback" not in output
    report = Path(alarm["report"]).read_text()
    assert "rank 0" in report
    assert "waits for others" in report


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_hangs_in_compute_is_named(
    latents: dict[str, str], tmp_path: Path, strategy: str
) -> None:
    """Slow: a launch of the worker. In ddp its peer waits within the backward pass, in fsdp within the forward pass."""
    code, output, run = worker(tmp_path, "compute 1 5", quick(latents["dit"], parallel__strategy=strategy))
    assert code == 75, output
    (alarm,) = run.events("alarm")
    assert (alarm["kind"], alarm["ranks"]) == ("compute", [1])
    assert "rank 1 of 2 made no progress" in alarm["message"]
    assert "alive_train.py" in alarm["message"]


@pytest.mark.long
def test_out_of_memory_on_one_rank_is_one_line_with_the_arithmetic(
    latents: dict[str, str], tmp_path: Path
) -> None:
    """Slow: a launch of the worker."""
    recipe = quick(latents["dit"], watchdog__limit="60 s", data__wait_limit="20 s")
    code, output, run = worker(tmp_path, "memory 1 5", recipe)
    assert code == 1, output
    (failed,) = run.events("failed")
    assert failed["rank"] == 1
    assert failed["cause"].startswith("rank 1: out of memory at step 5: weights 0.0 + gradients 0.0")
    assert "micro_batch_size" in failed["cause"]
    assert "Traceback" not in output
    assert output.count("error: ") <= 2, "one line of the rank, one echo"


@pytest.mark.long
def test_what_one_rank_fails_of_is_the_last_word_of_all(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    code, output, run = worker(tmp_path, "fail 1 5", quick(latents["dit"], watchdog__limit="60 s"))
    assert code == 1, output
    (failed,) = run.events("failed")
    assert (failed["rank"], failed["cause"]) == (1, "part-00001: cannot read: the disk is gone")
    assert "lost contact" not in output


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_slow_rank_is_named_while_training_goes_on(
    latents: dict[str, str], tmp_path: Path, strategy: str
) -> None:
    """Slow: some seconds of training that drags; of four processes under hsdp."""
    recipe = quick(
        latents["dit"], parallel__strategy=strategy, stages__0__steps=60,
        watchdog={"straggler_for": "2 s", "straggler_factor": 2.0}, checkpoint__every=1000,
    )  # fmt: skip
    recipe["data"].pop("wait_limit")
    recipe["data"].pop("retry_budget")
    if strategy == "hsdp":
        recipe["parallel"]["shard_size"] = 2
        recipe["compute"]["gpus_per_node"] = 4
        recipe["stages"][0]["micro_batch_size"] = 2
    code, output, run = worker(tmp_path, "slow 1 0.1", recipe)
    assert code == 0, output
    alarms = [event for event in run.events("alarm") if event["metric"] == "straggler"]
    # Under ddp a peer waits in the exchange of gradients, under fsdp already in the forward pass; under hsdp the one that
    # shares its shards does, and the other copy's ranks wait in the exchange.
    parts = {"ddp": ("own", "host"), "fsdp": ("host",), "hsdp": ("host", "own")}[strategy]
    # On a machine that does other work as well, the other rank may have its slow seconds too.
    assert [alarm["part"] in parts for alarm in alarms if alarm["rank"] == 1] == [True], output
    found = rows(run.uri, "ranks")
    assert len(found) > 3
    assert found[-2]["host_max_rank"] == 1
    if strategy == "ddp":
        assert found[-2]["wait_max_rank"] == 0, "the fast one waits"
    assert found[-2]["block_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("where", ["removed", "appended", "loaded"])
def test_a_spike_is_undone_whatever_is_killed_meanwhile(
    latents: dict[str, str], tmp_path: Path, where: str
) -> None:
    """Slow: three launches of the worker."""
    spike = {"action": "rewind", "window": 16, "lasts": 1, "skip": 3, "z_score": 20}
    recipe = recipe_data(latents["dit"], stages__0__steps=30, checkpoint__every=4, on_loss_spike=spike)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    code, output, run = worker(whole, "poison 21", recipe)
    assert code == 0, output
    assert [segment["skipped"] for segment in run.segments()] == [[], [[18 * 8, 21 * 8]]], output
    code, output, _ = worker(broken, f"poison 21 {where}", recipe)
    assert code == 1, output
    assert (broken / f"killed-{where}").exists()
    code, output, again = worker(broken, f"poison 21 {where}", recipe)
    assert code == 0, output
    assert again.segments() == run.segments()
    losses = [[row["loss"] for row in rows(found.uri)] for found in (run, again)]
    assert losses[0] == losses[1]
    assert weights(run.uri) == weights(again.uri)
