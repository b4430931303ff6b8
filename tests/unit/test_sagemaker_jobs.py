"""Submitting, following and stopping training jobs with real boto3 against the SageMaker emulator.

The container's `python3` is a shell script here, so that a job takes no time: what is tested is the launcher's side.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sagemaker_recipes import make_job, sm

from isthmus.backends.sagemaker import logs, state, submission
from isthmus.backends.sagemaker.aws import Clients
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.sagemaker.logs import Tail
from isthmus.backends.spec import Discovers, Handle, Job, Metered, Rendered, Status
from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.errors import IsthmusError, PreflightRefused, StorageError, UsageError
from isthmus.storage.rundir import RunDirectory

SCRIPT = """#!/bin/sh
echo "hello from $(hostname) of $TRAINING_JOB_NAME"
echo "{words}"
for i in $(seq {tenths}); do [ -e {folder}/end ] && break; sleep 0.1; done
exit {code}
"""
Say = Callable[..., None]
BEGUN = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sagemaker")


@pytest.fixture(scope="module")
def cloud(place: Path) -> Iterator[SageMakerEmulator]:
    """One account for all tests of this module; each has a run of its own."""
    image = Image(python=str(place / "bin" / "python3"))
    with SageMakerEmulator(
        place / "cloud", images={"*": image}, privileges="processes", grace=2, restart_delay=0.1, patience=0.5
    ) as emulator:
        emulator.bucket("example-bucket")
        client = emulator.client("s3", "us-east-1")
        for name in ("quickstart/manifest.json", "heldout/manifest.json"):
            client.put_object(Bucket="example-bucket", Key=name, Body=b"{}")
        yield emulator


@pytest.fixture
def script(place: Path) -> Say:
    """What the containers do from now on."""

    def say(words: str = "step 1/2  stage a  loss 0.5", code: int = 0, seconds: float = 0) -> None:
        (place / "bin").mkdir(exist_ok=True)
        (place / "end").unlink(missing_ok=True)
        path = place / "bin" / "python3"
        text = SCRIPT.format(words=words, code=code, tenths=int(10 * seconds), folder=place)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(path)

    say()
    return say


@pytest.fixture(scope="module")
def shared() -> SageMakerBackend:
    """One for all tests: making a client takes longer than most of them."""
    return SageMakerBackend()


@pytest.fixture
def backend(
    cloud: SageMakerEmulator,
    shared: SageMakerBackend,
    no_credentials: pytest.MonkeyPatch,
    monkeypatch: pytest.MonkeyPatch,
) -> SageMakerBackend:
    """With the environment of a client of the emulator."""
    for name, value in cloud.environment().items():
        no_credentials.setenv(name, value)
    monkeypatch.setattr(logs, "IDLE", 0.1)
    return shared


_runs = iter(range(1, 10_000))


def job_of(cloud: SageMakerEmulator, *words: str, attempt: int = 1) -> Job:
    """A job of a run of its own, its run directory made."""
    role = f"backends.sagemaker.role_arn={cloud.role}"
    job = make_job(role, *words, run_id=f"run-{next(_runs)}", attempt=attempt)
    RunDirectory(job.run_uri).create("", {"id": job.run_id, "recipe_hash": ""})
    return job


def send(backend: SageMakerBackend, job: Job) -> Handle:
    """As the launcher does: the event first."""
    rendered = backend.render(job)
    RunDirectory(job.run_uri).event("submitted", backend="sagemaker", job_id=rendered.job_id)
    return backend.submit(rendered)


def until(check: Callable[[], Status], wanted: Callable[[Status], bool], seconds: float = 20) -> Status:
    deadline = time.monotonic() + seconds
    while not wanted(status := check()):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def names(cloud: SageMakerEmulator, rendered: Rendered) -> int:
    """How many jobs of that name there are."""
    return sum(job["TrainingJobName"] == rendered.job_id for job in cloud.jobs())


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


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (2, "failed"), (75, "preempted")])
def test_exit_codes_of_the_container(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say, code: int, state: str
) -> None:
    script(code=code)
    handle = send(backend, job_of(cloud, *sm(retries=0)))
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.exit_code) == (state, code)


def test_the_first_cause_of_the_ranks_counts(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    script(code=1)
    job = job_of(cloud, *sm(retries=0))
    handle = send(backend, job)
    run = RunDirectory(job.run_uri)
    run.event("started", attempt=1)
    now = time.time()
    run.event("failed", cause="Connection closed by peer", exit_code=1, at=now, node=0, echo=True)
    run.event("failed", cause="rank 9: the disk is full", exit_code=1, at=now + 1, node=1)
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.cause) == ("failed", "rank 9: the disk is full")


def test_stop_is_recorded_once_and_is_final(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    script(seconds=30)
    job = job_of(cloud)
    handle = send(backend, job)
    until(lambda: backend.status(handle), lambda status: status.state == "running")
    backend.stop(handle)
    backend.stop(handle)
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.exit_code) == ("stopped", 4)
    backend.stop(handle)
    assert len(RunDirectory(job.run_uri).events("stop-requested")) == 1


def test_a_stop_behind_the_mirror_is_no_preemption(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    script(seconds=30)
    job = job_of(cloud, *sm(checkpoint_mirror=True))
    handle = send(backend, job)
    until(lambda: backend.status(handle), lambda status: status.state == "running")
    run = RunDirectory(job.run_uri)
    run.event("started", attempt=1)
    backend.stop(handle)
    run.event("preempted", attempt=1, exit_code=75)  # all that its worker can see
    status = until(lambda: backend.status(handle), lambda status: status.ended)
    assert (status.state, status.exit_code) == ("stopped", 4)


def test_an_interrupted_spot_job_is_restarting(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say, place: Path
) -> None:
    script(seconds=60)
    job = job_of(cloud, *sm(tier="spot"))
    handle = send(backend, job)
    until(lambda: backend.status(handle), lambda status: status.state == "running")
    cloud.capacity["ml.m5.xlarge spot"] = 0
    try:
        cloud.evict(handle.native["job_id"])
        status = until(lambda: backend.status(handle), lambda status: status.state != "running")
        assert status.state == "restarting"
        assert not status.ended
    finally:
        del cloud.capacity["ml.m5.xlarge spot"]
    until(lambda: backend.status(handle), lambda status: status.state == "running")
    (place / "end").touch()
    lines = list(backend.logs(handle, follow=True))
    assert sum("hello" in line.text for line in lines) == 2, "each start has a stream of its own"
    until(lambda: backend.status(handle), lambda status: status.ended)
    meter, told = (
        backend.metered(handle),
        Clients("us-east-1")("sagemaker").describe_training_job(TrainingJobName=handle.native["job_id"]),
    )
    assert meter is not None
    assert (meter.seconds, meter.billable_s) == (told["TrainingTimeInSeconds"], told["BillableTimeInSeconds"])


def test_a_job_that_never_came_to_be_is_unknown(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    job = job_of(cloud)
    RunDirectory(job.run_uri).event("submitted", backend="sagemaker", job_id=f"{job.run_id}-01")
    native = {"job_id": f"{job.run_id}-01", "region": "us-east-1"}
    handle = Handle(backend="sagemaker", run_id=job.run_id, run_uri=job.run_uri, native=native)
    assert backend.status(handle).state == "unknown"
    assert list(backend.logs(handle, follow=True)) == []
    assert backend.status(handle).missing
    assert backend.metered(handle) is None
    backend.stop(handle)
    assert backend.status(handle).state == "stopped"


@pytest.mark.parametrize(
    ("described", "meter"),
    [
        ({}, None),
        ({"TrainingTimeInSeconds": 600, "BillableTimeInSeconds": 180}, Metered(seconds=600, billable_s=180)),
        ({"TrainingTimeInSeconds": 600}, Metered(seconds=600)),
        ({"TrainingStartTime": BEGUN, "TrainingEndTime": BEGUN + timedelta(seconds=90)}, Metered(seconds=90)),
    ],
)
def test_what_is_billed_is_taken_as_far_as_it_is_told(
    described: dict[str, Any], meter: Metered | None
) -> None:
    assert state.metered(described) == meter


def test_jobs_are_found_by_tag(cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say) -> None:
    assert isinstance(backend, Discovers)
    first, second = job_of(cloud), job_of(cloud, attempt=3)
    send(backend, first)
    send(backend, second)
    foreign = {**backend.render(first).request, "TrainingJobName": "somebody-elses", "Tags": []}
    Clients("us-east-1")("sagemaker").create_training_job(**foreign)
    settings = make_job().settings
    found = list(SageMakerBackend().jobs(settings))
    assert [one.handle.run_id for one in found[:2]] == [second.run_id, first.run_id]
    assert (found[0].attempt, found[0].handle.run_uri) == (3, second.run_uri)
    assert abs((found[0].created or 0) - time.time()) < 60
    assert "somebody-elses" not in {one.handle.native["job_id"] for one in found}
    cloud.fail_next("Search", "AccessDeniedException", 1)
    again = list(SageMakerBackend().jobs(settings))
    assert [one.handle for one in again[:2]] == [one.handle for one in found[:2]]


def test_logs_of_many_hosts_come_in_order_and_survive_a_lost_network(
    cloud: SageMakerEmulator, backend: SageMakerBackend
) -> None:
    client = cloud.client("logs", "us-east-1")
    now = int(time.time() * 1000)
    expected = []
    for host in range(3):
        stream = f"many-01/algo-{host + 1}-17"
        client.create_log_stream(logGroupName=logs.GROUP, logStreamName=stream)
        events = [{"timestamp": now + 10 * i + host, "message": f"host {host} line {i}"} for i in range(50)]
        client.put_log_events(logGroupName=logs.GROUP, logStreamName=stream, logEvents=events)
        expected += [(event["timestamp"], event["message"]) for event in events]
    asked = 0
    ended = threading.Event()

    def look() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            cloud.fail_next("GetLogEvents", "drop-before", 6)
        if asked == 4:
            client.put_log_events(
                logGroupName=logs.GROUP,
                logStreamName="many-01/algo-2-17",
                logEvents=[{"timestamp": now + 5000, "message": "late\rprogress bar\nof host 1"}],
            )
            # Another start of host 1, whose clock is ahead.
            client.create_log_stream(logGroupName=logs.GROUP, logStreamName="many-01/algo-1-99")
            client.put_log_events(
                logGroupName=logs.GROUP,
                logStreamName="many-01/algo-1-99",
                logEvents=[{"timestamp": now + 60_000, "message": "again"}],
            )
            ended.set()
        return ended.is_set()

    tail = Tail(Clients("us-east-1")("logs", attempts=1), "many-01", look, idle=0.05)
    lines = list(tail.follow())
    texts = [line.text for line in lines]
    assert texts[:150] == [text for _, text in sorted(expected)]
    assert texts[150:] == ["late", "progress bar", "of host 1", "again"]
    assert [line.node for line in lines[:6]] == [0, 1, 2, 0, 1, 2]
    assert lines[0].time == pytest.approx(now / 1000)


def test_no_secret_reaches_a_message(
    cloud: SageMakerEmulator, backend: SageMakerBackend, script: Say
) -> None:
    key = "AKIA" + "IOSFODNN7" + "EXAMPLE"
    with pytest.raises(UsageError) as caught, aws_errors(key):
        pass
    assert key not in str(caught.value)
    assert "AKI..." in str(caught.value)


def aws_errors(key: str):  # type: ignore[no-untyped-def]
    """An error of AWS that quotes an access key."""
    from contextlib import contextmanager

    from botocore.exceptions import ClientError

    from isthmus.backends.sagemaker.aws import errors

    @contextmanager
    def raising() -> Iterator[None]:
        with errors("do something"):
            yield
            raise ClientError({"Error": {"Code": "Odd", "Message": f"The key {key} is odd"}}, "DoSomething")

    return raising()


def test_the_payload_is_json_all_through(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    rendered = backend.render(job_of(cloud))
    assert json.loads(rendered.to_json())["native"] == {"region": "us-east-1"}
