"""The quickstart's decisions: whose folder it is, how many steps fit, what its figures mean."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from isthmus.cli.quickstart_run import Settings, State, quickstart
from isthmus.cli.quickstart_training import Timing, steps_within, training_figures
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory


def refuse(text: str) -> None:
    raise AssertionError(f"should not have begun: {text}")


def test_steps_fit_into_the_minutes_with_a_margin_and_never_exceed_the_recipe() -> None:
    timing = Timing(seconds_per_step=0.1, steps=20)
    assert steps_within(timing, 6, 2000) == 2000
    short = steps_within(timing, 0.3, 2000)
    assert 0.3 * 60 * 0.8 < short * 0.1 < 0.3 * 60 * 0.95
    assert steps_within(timing, 0.3, 2000) == short
    with pytest.raises(UsageError, match="are 2 steps on this machine"):
        steps_within(Timing(seconds_per_step=1, steps=20), 0.05, 2000)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a quickstart's folder"):
        quickstart(Settings(folder=tmp_path), refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="not a quickstart's folder"):
        quickstart(Settings(folder=tmp_path / "thesis.tex"), refuse)


def test_two_quickstarts_do_not_share_a_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another quickstart is at work"):
            quickstart(Settings(folder=tmp_path), refuse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 4}, "of seed 4, not 0"), ({"recipe_hash": "other"}, "another recipe")],
)
def test_a_folder_of_another_seed_or_recipe_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    from isthmus.core.recipe import load_recipe
    from isthmus.core.recipe.dump import recipe_hash

    own = {"seed": 0, "recipe_hash": recipe_hash(load_recipe("quickstart", ["seed=0"]).recipe)}
    State(**(own | changes), path=tmp_path / "quickstart.json").save()
    with pytest.raises(UsageError, match=message):
        quickstart(Settings(folder=tmp_path), refuse)


def test_a_damaged_state_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "quickstart.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        quickstart(Settings(folder=tmp_path), refuse)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    from isthmus.errors import StorageError

    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        quickstart(Settings(folder=tmp_path / "new"), refuse)


@pytest.mark.parametrize(
    "arguments", [["quickstart"], ["sample", "run", "--prompt", "a heart"], ["export", "run", "out"]]
)
def test_without_torch_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    from typer.testing import CliRunner

    from isthmus.cli.app import build
    from isthmus.errors import NotInstalled

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(build(), arguments)
    assert isinstance(result.exception, NotInstalled)
    assert result.exception.exit_code == 2
    assert "isthmus[train]" in (result.exception.hint or "")
    assert not list(tmp_path.iterdir())


def test_figures_count_each_step_once_and_pauses_between_attempts_not_at_all(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    writer = run.metrics("train")
    at = 1000.0
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        at += 500  # the pause
        for step in steps:
            at += 2
            writer.write(
                {"step": step, "attempt": attempt, "time": at, "step_s": 2.0, "data_wait_s": 0.02, "samples": 64 * step}
            )  # fmt: skip
    writer.close()
    figures = training_figures(run.uri)
    assert figures == {"steps": 4, "seconds": 8.0, "samples_per_s": 32.0, "data_wait_fraction": 0.01}
