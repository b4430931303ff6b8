"""Measured on the emulated clouds: through the same backends as a launch, predicted, written down, then run whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.backends.runs import find
from isthmus.core.recipe import parse_recipe
from isthmus.errors import NotInstalled
from isthmus.rehearsal.clouds import check_installed, open_cloud
from isthmus.storage import copying
from isthmus.storage.rundir import RunDirectory

STEPS = 1200
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_OTHERS = ("AWS_", "AZURE", "IDENTITY_", "MSI_", "ISTHMUS_")


@pytest.fixture(params=["sagemaker", "azure"])
def desk(
    request: pytest.FixtureRequest, latents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """An emulated cloud with the data in it, this process as its client, and a recipe for it."""
    backend = request.param
    try:
        check_installed(backend)
    except NotInstalled as missing:
        pytest.skip(str(missing))
    data = recipe_data(
        latents["dit"], stages__0__steps=STEPS, checkpoint={"every": 400, "keep": 2},
        validation={"every": 500, "loss_by_timestep": True, "samples": 16, "timestep_bins": 4},
    )  # fmt: skip
    for name in list(os.environ):
        if name.startswith(_OTHERS) and name != "ISTHMUS_TEST_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    recipe = parse_recipe(json.dumps(data), filename="tiny.yaml").recipe
    # Short: the hosts make sockets below it.
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        cloud = open_cloud(backend, recipe, Path(folder) / "cloud", VARIABLES)
        try:
            for name, value in cloud.environment().items():
                monkeypatch.setenv(name, value)
            place = cloud.place(recipe, None)
            source = copying.Tree(latents["dit"])
            items = [copying.Item(name, size) for name, size in source.sizes().items()]
            copying.copy(source, copying.Tree(place.sources[0]), items)
            data["data"]["sources"] = [{"uri": place.sources[0]}]
            data["run_directory"] = place.runs
            data["backends"] = {backend: dict(place.settings)}
            data["compute"]["offers"] = [dict(place.offer)]
            (tmp_path / "tiny.yaml").write_text(json.dumps(data))
            yield backend, tmp_path
        finally:
            cloud.close()


def isthmus(folder: Path, *words: str) -> Any:
    """What the command prints with --json; it must succeed, or be `cost` of machines without a price."""
    command = [sys.executable, "-m", "isthmus", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (2 if words[0] == "cost" else 0), done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # minutes: two jobs on an emulated cloud, one of them a thousand steps
def test_a_short_job_on_a_cloud_predicts_the_whole_one(
    desk: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    backend, folder = desk
    quiet = os.getloadavg()[0] < 0.75 * (os.cpu_count() or 1)
    (found,) = isthmus(folder, "compare", "tiny.yaml", "--measure", "--backend", backend)
    assert found["measurement"]["backend"] == backend
    assert found["measured_steps_share"] <= 0.1
    (file,) = (folder / "state" / "isthmus" / "measured").glob("*.json")
    kept = json.loads(file.read_text())
    told = isthmus(folder, "cost", "tiny.yaml", "--backend", backend)
    assert told["speed"] == "measured"
    assert told["sku"] == kept["sku"]
    launched = isthmus(folder, "launch", "tiny.yaml", "--backend", backend, "--run-id", "whole")
    subprocess.run(
        [sys.executable, "-m", "isthmus", "logs", "-f", launched["run"]],
        capture_output=True,
        cwd=folder,
        check=False,
    )
    events = RunDirectory(find("whole").run_uri).events()
    times = {event["type"]: event["time"] for event in reversed(events)}
    # The wait for machines is the cloud's, and is supposed, not measured: what runs is compared.
    took = times["finished"] - times["started"]
    waiting = sum(
        line["quantity"] or 0 for line in told["lines"] if line["name"] in ("node allocation", "image pull")
    )
    predicted = 3600 * (told["hours"] - waiting / told["nodes"])
    with capsys.disabled():
        print(
            f"\n    {backend}: predicted {predicted:.1f} s, took {took:.1f} s ({predicted / took - 1:+.1%})"
        )
    assert predicted == pytest.approx(took, rel=0.1 if quiet else 0.6)
