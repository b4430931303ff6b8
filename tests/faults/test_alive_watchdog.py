"""A rank that stalls is named by its peers: real gloo processes under the real worker, really stopped."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import environment

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.dump import dump_recipe
from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.faults

HELPERS = Path(__file__).parents[1] / "helpers"


def attempt(tmp_path: Path, stall: str, **env: str) -> tuple[int, str, RunDirectory]:
    """A worker with two ranks to its end: exit code, output, run directory."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe("quickstart").recipe))
    run = RunDirectory(tmp_path / "run")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "isthmus.core.worker", "--recipe", str(recipe), "--run", run.uri),
            *("--module", "alive_rank", "--grace", "3"),
        ],
        env=environment(ALIVE_STALL=stall, PYTHONPATH=str(HELPERS), **env),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, run


def assert_named(found: tuple[int, str, RunDirectory], kind: str, cause: str) -> str:
    """Rank 1 is named with the cause in one alarm, the ending and one line; returns the report."""
    code, output, run = found
    assert code == 75, output
    (alarm,) = run.events("alarm")
    assert (alarm["metric"], alarm["kind"], alarm["ranks"]) == ("stall", kind, [1]), output
    assert cause in alarm["message"]
    (ending,) = run.events("preempted")
    assert (ending["cause"], ending["rank"]) == (alarm["message"], 1)
    assert "Traceback" not in output
    assert output.count(f"error: {alarm['message']}; see ") == 1
    return Path(alarm["report"]).read_text()


@pytest.mark.long
def test_a_rank_that_waits_for_data_is_named_with_the_block(tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    found = attempt(tmp_path, "1:data")
    report = assert_named(found, "data", "at step 5: waiting for data, part-00001, row group 2")
    assert "* rank 1" in report
    assert "stall_in_data" in report
    assert "rank 0" in report.split("waits for others")[0]
    folder = Path(found[2].uri) / "logs/attempt1"
    recordings = {rank: pickle.loads((folder / f"flight_{rank}").read_bytes()) for rank in (0, 1)}
    # Steps of two exchanges: rank 0 is in the ninth, rank 1 has yet to come.
    assert [len(recordings[rank]["entries"]) for rank in (0, 1)] == [9, 8]
    assert recordings[0]["entries"][-1]["profiling_name"] == "gloo:all_reduce"


def test_a_stopped_rank_does_not_answer_and_is_killed(tmp_path: Path) -> None:
    report = assert_named(attempt(tmp_path, "1:stopped"), "silent", "rank 1 of 2 does not answer at step 5")
    assert "* rank 1: no answer" in report


@pytest.mark.long
def test_the_error_of_one_rank_is_every_ranks_last_word(tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    code, output, run = attempt(tmp_path, "1:fail", ALIVE_LIMIT="60")
    assert code == 1, output
    (failed,) = run.events("failed")
    assert failed["cause"] == "part-00001: cannot read: the disk is gone"
    assert failed["rank"] == 1


@pytest.mark.long
def test_a_rank_that_hangs_in_compute_is_told_from_its_peer_in_the_same_phase(tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    found = attempt(tmp_path, "1:compute")
    report = assert_named(found, "compute", "computing, in stall_in_compute (alive_rank.py:")
    assert report.index("stall_in_compute") < report.index("all_reduce"), "the one to blame comes first"


@pytest.mark.long
def test_a_rank_that_native_code_blocks_does_not_answer(tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    found = attempt(tmp_path, "1:blocked")
    assert_named(found, "silent", "or gone with the machine; last in main (alive_rank.py:")
    assert "Thread" in (Path(found[2].uri) / "logs/attempt1/stack-rank1.txt").read_text()


@pytest.mark.long
def test_the_first_rank_is_named_too(tmp_path: Path) -> None:
    """Slow: a launch of the worker. Rank 0 is the one that writes everything else."""
    code, output, run = attempt(tmp_path, "0:stopped")
    assert code == 75, output
    assert run.events("alarm")[0]["ranks"] == [0]


@pytest.mark.long
def test_where_nobody_stalls_the_watchdog_says_nothing(tmp_path: Path) -> None:
    """Slow: a launch of the worker."""
    began = time.monotonic()
    code, output, run = attempt(tmp_path, "1:none")
    assert code == 0, output
    assert not run.events("alarm")
    assert not (Path(run.uri) / "logs").exists()
    assert time.monotonic() - began < 60
