"""A SageMaker job in a container with a loopback interface and nothing else: data by channels, the run directory by the mirror."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import figures
from two_clouds import Clouds, Laptop, open_clouds, until

from isthmus.emulators import namespaces
from isthmus.rehearsal.trainer import VARIABLE, Course
from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory, latents: dict[str, str]) -> Iterator[Clouds]:
    """With the dataset. Slow: the jobs train, in containers of their own network namespaces."""
    if lacking := namespaces.missing() or namespaces.can_mount():
        pytest.skip(f"a container without a network needs namespaces: {lacking}")
    with (
        pytest.MonkeyPatch.context() as patch,
        open_clouds(tmp_path_factory.mktemp("clouds"), patch, privileges="namespaces") as found,
    ):
        found.upload(latents["dit"])
        yield found


@pytest.mark.parametrize("access", ["mount", "download"])
def test_it_trains_without_a_network_and_comes_back_from_an_eviction(
    clouds: Clouds, tmp_path: Path, latents: dict[str, str], access: str
) -> None:
    laptop, run_id = Laptop(tmp_path), f"isolated-{access}"
    course = Course(folder=tmp_path, hold=(5,))
    clouds.image |= {"ISTHMUS_TRAINER_MODULE": "isthmus.rehearsal.trainer", VARIABLE: course.to_json()}
    changes = {
        "stages__0__steps": 12, "data__access": access, "compute__nodes": 1, "compute__gpus_per_node": 2,
        "backends__sagemaker__network_isolation": True, "backends__sagemaker__checkpoint_mirror": True,
    }  # fmt: skip
    recipe = str(clouds.recipe(tmp_path, latents["dit"], **changes))
    code, out, err = laptop.isthmus("launch", recipe, "--backend", "sagemaker", "--run-id", run_id, "--yes")
    assert code == 0, out + err
    until("training holds", course.at(5).exists)
    (host,) = clouds.sagemaker.hosts(f"{run_id}-01")
    links = Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()[2:]
    assert [line.partition(":")[0].strip() for line in links] == ["lo"]
    assert clouds.strike("sagemaker", f"{run_id}-01")
    until(
        "it is restarted",
        lambda: (
            clouds.sagemaker.state(f"{run_id}-01") == "InProgress/Training"
            and len(clouds.run("sagemaker", run_id).events("preempted")) == 1
        ),
    )
    course.struck(5).touch()
    code, out, err = laptop.isthmus("supervise", run_id, "--interval", "0.5")
    assert code == 0, out + err
    run = clouds.run("sagemaker", run_id)
    assert [event["world_size"] for event in run.events("started")] == [2, 2]
    rows = run.read_metrics("train", all_attempts=True)
    assert [row["step"] for row in rows] == list(range(1, 13)), "no step is lost or repeated"
    local = ("--set", "data.access=stream", "--set", "backends.sagemaker={}")
    code, out, err = laptop.isthmus(
        "launch", recipe, "--backend", "local", "--run-id", f"{run_id}-here", *local
    )
    assert code == 0, out + err
    here = RunDirectory(tmp_path / "runs" / f"{run_id}-here").read_metrics("train")
    assert figures(rows) == figures(here)
    code, out, err = laptop.isthmus("status", run_id, "--json")
    assert json.loads(out)["state"] == "finished", out + err
