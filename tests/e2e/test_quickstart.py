"""The quickstart by its real command, interrupted with a real Ctrl-C in two places, to its end.

Slow: it starts the whole job, two training processes included, three times. The model is a tiny one and hardly
trained, so the caption match says nothing here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from isthmus.storage.rundir import RunDirectory

KEYS = {
    "run", "steps", "seconds", "samples_per_s", "data_wait_fraction", "caption_match", "heldout_caption_match",
    "shuffled_caption_match", "grid", "report",
}  # fmt: skip
STEPS = 300
SMALL = [
    "model.config.num_layers=1",
    f"stages.0.steps={STEPS}",
    "stages.0.global_batch_size=8",
    "stages.0.micro_batch_size=4",
    "checkpoint.every=40",
    "checkpoint.keep=20",
    "validation.every=1000",
    "validation.samples=16",
    "validation.timestep_bins=2",
    "validation.sampling_steps=3",
]


def command(folder: Path, *more: str) -> list[str]:
    sets = [word for setting in SMALL for word in ("--set", setting)]
    return [sys.executable, "-m", "isthmus", "quickstart", "--run-dir", str(folder), "--json", *sets, *more]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def interrupted(folder: Path, home: Path, *, after: str) -> str:
    """Presses Ctrl-C once a line begins with `after`; returns all that was printed."""
    process = subprocess.Popen(
        command(folder),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that put the tests into the background has them ignore Ctrl-C; a terminal's command does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.strip().startswith(after):
            # As a terminal does: to every process of the foreground group.
            os.killpg(process.pid, signal.SIGINT)
            break
    printed.append(process.stdout.read())
    text = "".join(printed)
    assert process.wait(timeout=60) == 75, text
    assert "Traceback" not in text
    return text


def finished(folder: Path, home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *more),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_an_interrupted_quickstart_goes_on_and_ends_with_all_that_it_promises(tmp_path: Path) -> None:
    folder, home = tmp_path / "quickstart", tmp_path / "state"

    text = interrupted(folder, home, after="1/6")
    assert "error: interrupted" in text
    assert f"isthmus quickstart --run-dir {folder}" in text
    assert not (folder / "data" / "manifest.json").exists()

    text = interrupted(folder, home, after="checkpoint of step 40")
    assert "528 samples" in text
    assert "s a step, timed over 20 real ones: 300 steps, as in the recipe" in text
    run = RunDirectory(folder / "runs" / "quickstart")
    reached = run.checkpoints()[-1]
    assert 40 <= reached < STEPS
    assert f"interrupted after the checkpoint of step {reached}" in text
    data = (folder / "data" / "manifest.json").stat().st_mtime_ns

    done = finished(folder, home)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == KEYS
    assert "done before" in done.stderr
    assert (folder / "data" / "manifest.json").stat().st_mtime_ns == data, "encoded once"
    assert not list(folder.glob("*.partial"))
    assert not (folder / "timing").exists()
    assert result["steps"] == STEPS
    rows = run.read_metrics("train", all_attempts=True)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no step twice, none left out"
    assert [row["attempt"] for row in rows] == [1] * reached + [2] * (STEPS - reached)
    assert [event["step"] for event in run.events("resumed")] == [reached]
    for name in ("caption_match", "heldout_caption_match", "shuffled_caption_match", "data_wait_fraction"):
        assert 0 <= result[name] <= 1
    assert result["samples_per_s"] > 0
    with Image.open(result["grid"]) as grid:
        assert grid.width > 600
    assert "<html" in Path(result["report"]).read_text()
    assert "tried first on 216 real pictures: 1.00" in done.stderr

    again = finished(folder, home)
    assert again.returncode == 0
    assert json.loads(again.stdout) == result
    assert "finished before" in again.stderr

    other = finished(folder, home, "--seed", "1")
    assert other.returncode == 2
    assert f"error: {folder}: holds a quickstart of seed 0, not 1" in other.stderr
    other = finished(folder, home, "--set", "optimizer.weight_decay=0.5")
    assert other.returncode == 2
    assert "holds a quickstart of another recipe" in other.stderr
