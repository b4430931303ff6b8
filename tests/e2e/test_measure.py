"""A short run predicts a whole one: really launched on this machine, predicted and written down, then really run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.storage.rundir import RunDirectory

WHOLE = 2500
"""Steps: a minute or two, most of it steps."""
CHANGES: dict[str, Any] = {
    "stages__0__steps": WHOLE,
    "stages__0__lr_warmup_steps": 100,
    "checkpoint": {"every": 500, "keep": 2},
    "validation": {"every": 1000, "loss_by_timestep": True, "samples": 16, "timestep_bins": 4},
}


class Desk:
    """A folder with the recipe, and the command in it."""

    def __init__(self, folder: Path, data: str, **changes: Any) -> None:
        self.folder = folder
        (folder / "tiny.yaml").write_text(json.dumps(recipe_data(data, **CHANGES | changes)))
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}

    def isthmus(self, *words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "isthmus", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    def json(self, *words: str) -> Any:
        code, out, err = self.isthmus(*words, "--json")
        assert code == 0, out + err
        return json.loads(out)

    def predicted(self) -> float:
        """Seconds of the whole run, as they were written down."""
        (file,) = (self.folder / "state" / "isthmus" / "measured").glob("*.json")
        return float(json.loads(file.read_text())["predicted_s"])


@pytest.mark.slow  # some two minutes: a short run, and a run twenty times as long
def test_the_whole_run_takes_as_long_as_the_short_one_predicted(
    tmp_path: Path, latents: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path, latents["dit"])
    quiet = os.getloadavg()[0] < 0.75 * (os.cpu_count() or 1)
    before = desk.isthmus("cost", "tiny.yaml", "--backend", "local")
    assert before[0] == 2
    assert "the speed of a CPU is not estimated" in before[2]
    (found,) = desk.json("compare", "tiny.yaml", "--measure", "--backend", "local")
    predicted = desk.predicted()
    assert predicted == pytest.approx(found["prediction"]["hours"] * 3600)
    # Said before the rest has run, and said again by whoever asks.
    told = desk.json("cost", "tiny.yaml", "--backend", "local")
    assert told["speed"] == "measured"
    assert told["hours"] * 3600 == pytest.approx(predicted, rel=1e-6)
    ran = desk.json("launch", "tiny.yaml", "--backend", "local", "--run-id", "whole")
    assert ran["state"] == "finished"
    events = RunDirectory(tmp_path / "runs" / "whole").events()
    times = {event["type"]: event["time"] for event in reversed(events)}
    took = times["finished"] - times["submitted"]
    with capsys.disabled():
        print(
            f"\n    predicted {predicted:.1f} s, took {took:.1f} s ({predicted / took - 1:+.1%}); "
            f"the short run {found['measurement']['seconds']:.1f} s with its start, {found['measured_steps_share']:.1%} of the "
            f"steps; machine {'quiet' if quiet else 'busy'}"
        )
    assert found["measured_steps_share"] <= 0.1
    # Beside others that come and go, one minute is no prediction of the next.
    assert predicted == pytest.approx(took, rel=0.1 if quiet else 0.6)


@pytest.mark.slow  # two starts of a trainer
def test_a_backend_that_fails_is_told_and_keeps_no_other_from_being_measured(
    tmp_path: Path, latents: dict[str, str]
) -> None:
    desk = Desk(tmp_path, latents["dit"], run_directory={"local": "runs", "azure": "az://runs/x"})
    code, out, err = desk.isthmus(
        "compare", "tiny.yaml", "--measure", "--backend", "azure,local", "--steps", "12", "--json"
    )
    azure, local = json.loads(out)
    assert code == 2
    assert azure["backend"] == "azure"
    assert "error" in azure
    assert "azure: not measured" in err
    assert local["measurement"]["stages"][0]["steps"] >= 6
    assert desk.predicted() > 0
