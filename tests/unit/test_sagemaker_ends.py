"""Following and stopping training jobs with real boto3 against the SageMaker emulator: causes, stops, bills, logs."""

# ruff: noqa: F811 -- fixtures are imported, and are parameters of the same names
from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sagemaker_cloud import (  # noqa: F401  fixtures
    BEGUN,
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
from sagemaker_recipes import make_job, sm

from isthmus.backends.sagemaker import logs, state
from isthmus.backends.sagemaker.aws import Clients
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.sagemaker.logs import Tail
from isthmus.backends.spec import Discovers, Handle, Metered
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory


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
    # Not only running: what it says must be there before it is evicted.
    until(
        lambda: list(backend.logs(handle, follow=False)), lambda lines: any("hello" in x.text for x in lines)
    )
    assert backend.status(handle).state == "running"
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
