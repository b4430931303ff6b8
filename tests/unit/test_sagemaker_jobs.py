"""Submitting training jobs with real boto3 against the SageMaker emulator; how they end: test_sagemaker_ends.py."""

# ruff: noqa: F811 -- fixtures are imported, and are parameters of the same names
from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sagemaker_cloud import (  # noqa: F401  fixtures
    Say,
    backend,
    cloud,
    job_of,
    names,
    place,
    script,
    send,
    shared,
    until,
)
from sagemaker_recipes import sm

from isthmus.backends.sagemaker import submission
from isthmus.backends.sagemaker.aws import Clients
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.spec import Handle
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.errors import IsthmusError, PreflightRefused, StorageError, UsageError
from isthmus.storage.rundir import RunDirectory


def test_a_job_is_submitted_followed_and_found(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    script("step 7/9  stage a  loss 0.25  1 samples/s  0 s left")
    job = job_of(cloud)
    handle = send(backend, job)
    assert handle.native == {"job_id": f"{job.run_id}-01", "region": "us-east-1"}
    lines = list(backend.logs(handle, follow=True))
    assert [line.text for line in lines][1:] == ["step 7/9  stage a  loss 0.25  1 samples/s  0 s left"]
    assert lines[0].text.endswith(f"of {job.run_id}-01")
    assert {line.node for line in lines} == {0}
    assert [line.text for line in backend.logs(handle, follow=False)] == [line.text for line in lines]
    # The cloud says that it completed, the run directory does not: that is no success.
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.exit_code) == ("failed", 1)
    run = RunDirectory(job.run_uri)
    run.event("started", attempt=1, job=f"{job.run_id}-01")
    run.event("finished", attempt=1, exit_code=0)
    assert backend.status(handle).state == "finished"
    # From another machine, by nothing but the name.
    bare = replace(handle, native={"job_id": handle.native["job_id"]})
    assert SageMakerBackend().status(bare).state == "finished"
    # All that the job needs lies where its channel points.
    channel = backend.render(job).request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    assert channel == f"{job.run_uri}/jobs/{job.run_id}-01/"
    there = run.file_names(f"jobs/{job.run_id}-01")
    assert {"recipe.yaml", "start.py"} < set(there)
    assert any(name.startswith("isthmus-") and name.endswith(".whl") for name in there)


@pytest.mark.parametrize(
    ("how", "times"),
    [("drop-before", 1), ("drop-after", 1), ("drop-after", 3), (500, 1), ("ThrottlingException", 1)],
)
def test_a_lost_answer_makes_no_second_job(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say, how: str | int, times: int
) -> None:
    job = job_of(cloud)
    backend = SageMakerBackend()  # its clients go on slowly once they were throttled
    cloud.fail_next("CreateTrainingJob", how, times)
    handle = send(backend, job)
    assert names(cloud, backend.render(job)) == 1
    assert backend.submit(backend.render(job)) == handle
    assert names(cloud, backend.render(job)) == 1


def test_a_network_that_stays_away_leaves_it_unknown(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission.time, "sleep", lambda seconds: None)
    rendered = backend.render(job_of(cloud))
    client = Clients("us-east-1")("sagemaker", attempts=1)
    asked = 0

    def cut(**_: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:  # the first look is answered; then the request comes through, and nothing after it
            cloud.fail_next("DescribeTrainingJob", "drop-before")

    client.meta.events.register("before-call.sagemaker.DescribeTrainingJob", cut)
    cloud.fail_next("CreateTrainingJob", "drop-after")
    with pytest.raises(StorageError, match="not known whether the job exists"):
        submission.submit(lambda service: client, rendered)  # type: ignore[arg-type]
    assert names(cloud, rendered) == 1
    assert backend.submit(rendered).native["job_id"] == rendered.job_id
    assert names(cloud, rendered) == 1


def test_many_launchers_at_once_make_one_job(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    rendered = backend.render(job_of(cloud))
    handles: list[Handle] = []
    threads = [
        threading.Thread(target=lambda: handles.append(SageMakerBackend().submit(rendered))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == 4
    assert all(handle == handles[0] for handle in handles)
    assert names(cloud, rendered) == 1


def test_another_runs_name_is_a_collision(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    job = job_of(cloud)
    send(backend, job)
    elsewhere = replace(job, run_uri=f"s3://example-bucket/other/{job.run_id}")
    with pytest.raises(UsageError, match="job name collision") as caught:
        backend.submit(backend.render(elsewhere))
    assert caught.value.exit_code == 2
    # Without permission to read tags the container's arguments tell the same.
    cloud.fail_next("ListTags", "AccessDeniedException", 2)
    assert backend.submit(backend.render(job)).native["job_id"] == f"{job.run_id}-01"
    with pytest.raises(UsageError, match="job name collision"):
        backend.submit(backend.render(elsewhere))


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("ResourceLimitExceeded", PreflightRefused, "over the account's quota"),
        ("CapacityError", PreflightRefused, "no capacity"),
        ("AccessDeniedException", UsageError, "no permission to create the training job"),
        ("ExpiredTokenException", UsageError, "credentials have expired"),
        ("UnrecognizedClientException", UsageError, "does not accept the credentials"),
        ("ValidationException", UsageError, "cannot create the training job"),
    ],
)
def test_refusals_are_one_line_of_the_right_kind(
    cloud: SageMakerEmulator,
    backend: SageMakerBackend,
    script: Say,
    code: str,
    kind: type[IsthmusError],
    words: str,
) -> None:
    rendered = backend.render(job_of(cloud))
    cloud.fail_next("CreateTrainingJob", code, 1)
    with pytest.raises(kind, match=words) as caught:
        backend.submit(rendered)
    assert caught.value.exit_code == (3 if kind is PreflightRefused else 2)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert names(cloud, rendered) == 0


def test_quota_and_role_as_the_service_says_them(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    cloud.quota["ml.m5.4xlarge"] = 0
    with pytest.raises(PreflightRefused, match="quota") as refused:
        backend.submit(backend.render(job_of(cloud, *sm(sku="ml.m5.4xlarge"))))
    assert refused.value.exit_code == 3
    stranger = cloud.role + "-that-nobody-made"
    with pytest.raises(UsageError, match="role") as caught:
        backend.submit(backend.render(job_of(cloud, *sm(role_arn=stranger))))
    assert "sagemaker.amazonaws.com" in (caught.value.hint or "")


def test_absent_credentials_and_region_are_one_line(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = send(backend, job_of(cloud))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="no AWS credentials were found") as caught:
        submission.describe(Clients("us-east-1")("sagemaker"), handle.native["job_id"])
    assert "sso login" in (caught.value.hint or "")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="no AWS region is known"):
        Clients()("sagemaker")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        Clients()("sagemaker")


def test_no_capacity_is_a_preemption(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    cloud.capacity["ml.m5.12xlarge"] = 0
    handle = send(backend, job_of(cloud, *sm(sku="ml.m5.12xlarge")))
    assert backend.status(handle).state == "pending"
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.exit_code) == ("preempted", 75)
    assert "CapacityError" in (status.cause or "")
