"""A job on an emulated cloud spends its budget: rank 0 checkpoints and ends it, nobody restarts it, `cost run` says what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from two_clouds import BACKENDS, Clouds, Laptop, open_clouds, until

from isthmus.rehearsal.trainer import VARIABLE, Course

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
USD = 0.9
"""The cap: at two nodes of 90 dollars an hour, eighteen seconds of running."""
MACHINES = {"azure": ("Standard_D4ds_v5", "italynorth"), "sagemaker": ("ml.m5.xlarge", "us-east-1")}


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory, latents: dict[str, str]) -> Iterator[Clouds]:
    """Both, with the dataset. Slow: the job trains, in two containers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        open_clouds(tmp_path_factory.mktemp("clouds"), patch) as found,
    ):
        found.upload(latents["dit"])
        yield found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_running_job_ends_at_its_budget(
    clouds: Clouds, tmp_path: Path, latents: dict[str, str], backend: str
) -> None:
    """At the prices of a file that only the launch was told of; nobody supervises while it runs."""
    laptop = Laptop(tmp_path)
    sku, region = MACHINES[backend]
    row = {"backend": backend, "sku": sku, "region": region, "gpu": "none", "gpus": 0, "usd_per_hour": 90}
    (tmp_path / "ours.yaml").write_text(json.dumps({"prices": [row]}))
    clouds.image |= {
        "ISTHMUS_TRAINER_MODULE": "isthmus.rehearsal.trainer",
        VARIABLE: Course(folder=tmp_path, pace=0.1).to_json(),
    }
    tier = {"azure": "dedicated", "sagemaker": "on_demand"}[backend]
    changes: dict[str, Any] = {
        "stages__0__steps": 5000, "checkpoint__every": 100_000, "budget__max_usd": USD, f"backends__{backend}__tier": tier,
    }  # fmt: skip
    recipe = str(clouds.recipe(tmp_path, latents["dit"], **changes))
    words = ("launch", recipe, "--backend", backend, "--run-id", "money", "--yes")
    code, out, err = laptop.isthmus(*words, "--prices", "ours.yaml")
    assert code == 0, out + err
    assert "price   $180.00 an hour" in out, out
    assert "at most $0.90" in out
    run = clouds.run(backend, "money")

    def status() -> dict[str, Any]:
        code, out, err = laptop.isthmus("status", "money", "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    until("it is stopped", lambda: run.events("stopped"), 240, 0.5)
    ended = until("its cloud knows, too", lambda: (told := status())["state"] == "stopped" and told, 60, 0.5)
    assert ended["exit_code"] == 4
    assert ended["cause"].startswith("budget.max_usd 0.9 reached"), ended
    (requested,) = run.events("stop-requested")
    assert requested["by"] == "budget"
    rows = run.read_metrics("train", all_attempts=True)
    assert 1 <= rows[-1]["step"] < 5000
    assert run.checkpoints() == [rows[-1]["step"]], "nothing was lost"
    # Whoever looks after it now leaves it so.
    code, out, err = laptop.isthmus("supervise", "money", "--once")
    assert code == 4, out + err
    assert clouds.job_names(backend, "money") == ["money-01"]

    code, out, err = laptop.isthmus("cost", "run", "money", "--json", "--prices", "ours.yaml")
    assert code == 0, err
    facts = json.loads(out)
    (attempt,) = facts["attempts"]
    assert (attempt["sku"], attempt["region"], attempt["usd_per_hour"]) == (sku, region, 180.0)
    assert attempt["hours_from"] == ("billed" if backend == "sagemaker" else "cloud")
    seconds = 3600 * attempt["hours"]
    if backend == "sagemaker":
        import boto3

        told = boto3.client("sagemaker", region_name=region).describe_training_job(TrainingJobName="money-01")
        assert seconds == pytest.approx(told["BillableTimeInSeconds"])
    # The cloud counts its containers' start and end, too, which rank 0 cannot.
    assert facts["usd"] == pytest.approx(attempt["hours"] * 180)
    assert facts["usd"] >= 0.9 * USD, facts
    noted = [event for event in run.events("note") if "metered_s" in event]
    assert [event["job"] for event in noted] == ["money-01"], "for those who cannot ask the cloud"
    print(
        f"{backend}: stopped after step {rows[-1]['step']}, {seconds:.0f} s of its cloud's, ${facts['usd']:.2f} for a cap of ${USD}"
    )
