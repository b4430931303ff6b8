"""What goes wrong between a user and a cloud, through the command line: one line, the right exit code, and no second job."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_clouds import BACKENDS, BUCKET, Clouds, Laptop, open_clouds, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory, latents: dict[str, str]) -> Iterator[Clouds]:
    """Both; in place of the trainer its stand-in. Slow: each command that asks Azure imports its SDK for seconds."""
    with (
        pytest.MonkeyPatch.context() as patch,
        open_clouds(tmp_path_factory.mktemp("clouds"), patch, privileges="processes") as found,
    ):
        found.upload(latents["dit"])
        found.image["ISTHMUS_TRAINER_MODULE"] = "isthmus.core.rehearsal"
        yield found


@pytest.fixture
def laptop(tmp_path: Path, clouds: Clouds, latents: dict[str, str]) -> Laptop:
    """In a folder with `tiny.yaml`."""
    clouds.recipe(tmp_path, latents["dit"], compute__nodes=1)
    return Laptop(tmp_path)


def launch(backend: str, run_id: str, *words: str) -> tuple[str, ...]:
    """The command line of a launch."""
    return ("launch", "tiny.yaml", "--backend", backend, "--run-id", run_id, "--yes", *words)


def one_error(err: str) -> str:
    """The one error that was printed."""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(line) < 600
    return line


@pytest.mark.parametrize("backend", BACKENDS)
def test_quota_zero(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    quota = clouds[backend].quota
    name = "LowPriority" if backend == "azure" else "ml.m5.xlarge for spot training job usage"
    before = quota[name]
    quota[name] = 0
    code, _, err = laptop.isthmus(*launch(backend, "no-quota"))
    quota[name] = before
    assert code == 3, err
    assert "quota" in one_error(err)
    assert not clouds.run(backend, "no-quota").exists()
    assert clouds.job_names(backend, "no-quota") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_expired_credentials(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    if backend == "azure":
        clouds.azure.fail_next("*", 401, 50)
    else:
        clouds.sagemaker.fail_next("GetCallerIdentity", "ExpiredToken", 5)
    code, _, err = laptop.isthmus(*launch(backend, "expired"))
    clouds[backend].faults.clear()
    assert code in (2, 3), err
    line = one_error(err)
    assert "expired" in line.lower() or "login" in (line + err).lower()
    assert ("az login" if backend == "azure" else "aws sso login") in err
    assert not clouds.run(backend, "expired").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_absent_credentials(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    nothing = dict.fromkeys(
        ("IDENTITY_ENDPOINT", "IDENTITY_HEADER") if backend == "azure"
        else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "",
    )  # fmt: skip
    code, _, err = laptop.isthmus(*launch(backend, "nobody"), **nothing)
    assert code in (1, 2, 3), err
    assert ("az login" if backend == "azure" else "aws") in err
    one_error(err)
    assert clouds.job_names(backend, "nobody") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_machine(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    sku = "Standard_D4dz_v5" if backend == "azure" else "ml.m5.xlorge"
    words = ("--set", f"backends.{backend}.sku={sku}")
    code, _, err = laptop.isthmus(*launch(backend, "no-sku", *words))
    assert code in (2, 3), err
    assert sku in one_error(err)
    assert "did you mean" in err


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_name_that_is_taken(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    code, _, err = laptop.isthmus(*launch(backend, "taken"))
    assert code == 0, err
    other = (
        "az://other@devstoreaccount1.blob.core.windows.net/x" if backend == "azure" else f"s3://{BUCKET}/x"
    )
    clouds.azure.container_uri("other")
    code, _, err = laptop.isthmus(*launch(backend, "taken", "--set", f"run_directory={other}"))
    assert code in (2, 3), err
    assert "collision" in one_error(err) or "taken-01" in err
    assert clouds.job_names(backend, "taken") == ["taken-01"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["drop-before", "drop-after"])
def test_the_network_is_lost_while_it_is_submitted(
    clouds: Clouds, laptop: Laptop, backend: str, how: str
) -> None:
    """More often than a client tries by itself: it is not known whether there is a job; supervise finds out, and there is one."""
    run_id = f"lost-{how}"
    operation = "jobs.put" if backend == "azure" else "CreateTrainingJob"
    clouds[backend].fail_next(operation, how, 12)
    code, _, err = laptop.isthmus(*launch(backend, run_id))
    if code:
        assert code == 1, err
        one_error(err)
        assert f"isthmus supervise {run_id}" in err
    clouds[backend].faults.clear()
    code, _, err = laptop.isthmus("supervise", run_id, "--interval", "0.5", "--no-log")
    assert code == 0, err
    assert clouds.job_names(backend, run_id) == [f"{run_id}-01"]
    assert len(clouds.run(backend, run_id).events("started")) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_capacity_waits_and_stop_ends_the_waiting(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    capacity = clouds[backend].capacity
    name = "Standard_D4ds_v5" if backend == "azure" else "ml.m5.xlarge"
    capacity[name] = 0
    try:
        code, _, err = laptop.isthmus(*launch(backend, "full"))
        assert code == 0, err
        code, out, err = laptop.isthmus("status", "full", "--json")
        assert code == 0, err
        assert json.loads(out)["state"] == "pending"
        code, out, err = laptop.isthmus("stop", "full")
        assert code == 0, err
        code, out, err = laptop.isthmus("supervise", "full", "--once")
        assert code == 4, out + err
        assert clouds.run(backend, "full").events("started") == []
    finally:
        del capacity[name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_following_over_lost_connections_and_ctrl_c(clouds: Clouds, laptop: Laptop, backend: str) -> None:
    clouds.image["ISTHMUS_REHEARSAL"] = json.dumps({"*": "wait"})
    process = laptop.start(*launch(backend, "followed", "--follow"))
    try:
        until("it runs", lambda: clouds.run(backend, "followed").events("note"), 120, 0.5)
        watched = (
            ("jobs.get", "history.*") if backend == "azure" else ("DescribeTrainingJob", "FilterLogEvents")
        )
        for operation in watched:
            clouds[backend].fail_next(operation, "drop-before", 3)
        shown: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: shown.extend(iter(process.stdout.readline, "")), daemon=True)
        reader.start()
        until("its log is shown", lambda: "rank 0 attempt 1: wait" in "".join(shown), 90)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(60)
        reader.join(10)
        out, err = "".join(shown), process.stderr.read() if process.stderr else ""
    finally:
        process.kill()
        del clouds.image["ISTHMUS_REHEARSAL"]
    assert process.returncode == 0, err
    assert "Traceback" not in out + err
    assert "followed goes on; stop it: isthmus stop followed" in out
    assert clouds.running(backend, "followed-01")
    assert clouds.run(backend, "followed").events("stop-requested") == []
    code, _, err = laptop.isthmus("stop", "followed")
    assert code == 0, err

    def stopped() -> bool:
        code, out, err = laptop.isthmus("status", "followed", "--json")
        assert code == 0, err
        return bool(json.loads(out)["state"] == "stopped")

    until("it is stopped", stopped, 60, 0.5)
    assert clouds.run(backend, "followed").checkpoints(), "it was told before it was ended"
