"""The emulated SageMaker really runs jobs: hosts, signals, interruptions, retries, logs, what is left in S3. Real boto3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker_jobs import (
    BUCKET,
    DATA,
    channel,
    keys,
    lines,
    request,
    spot,
    statuses,
    until_ended,
    until_said,
)

pytest.importorskip("moto.server", reason="pip install 'isthmus[rehearse]'")
import boto3

from isthmus.emulators import namespaces
from isthmus.emulators.sagemaker import Image, SageMakerEmulator
from isthmus.errors import UsageError

pytestmark = [pytest.mark.faults]
TWO = {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2}
SLEEPS = "trap 'echo got TERM; exit 75' TERM; echo ready $$; while :; do sleep 0.1; done"
GRACE_S = 4.0


def fill() -> None:
    """What jobs read."""
    s3 = boto3.client("s3")
    s3.put_object(Bucket=BUCKET, Key="data/part-0", Body=b"0123456789")
    s3.put_object(Bucket=BUCKET, Key="data/deep/part-1", Body=b"b" * 100_000)
    s3.put_object(Bucket=BUCKET, Key="database/other", Body=b"a sibling")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerEmulator]:
    """One emulator with namespaces for all; grace and delays are short."""
    lacking = namespaces.missing() or namespaces.can_mount()
    if lacking:
        pytest.skip(
            f"hosts as namespaces need root on Linux, iproute2, util-linux and rclone (`make system`): {lacking}"
        )
    folder = tmp_path_factory.mktemp("cloud")
    images = {"*": Image(env={"OF_THE_IMAGE": "1"})}
    with (
        SageMakerEmulator(
            folder, images=images, privileges="namespaces", grace=GRACE_S, restart_delay=0.2
        ) as cloud,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in cloud.environment().items():
            patch.setenv(name, value)
        patch.setenv("OF_THE_LAUNCHER", "1")
        cloud.bucket(BUCKET)
        fill()
        yield cloud


@pytest.fixture
def submit(cloud: SageMakerEmulator) -> Any:
    """Submits a job of ours: name, script, changes."""

    def start(name: str, script: str, **changes: Any) -> str:
        boto3.client("sagemaker").create_training_job(**request(cloud.role, name, script, **changes))
        return name

    return start


def stop(name: str) -> None:
    boto3.client("sagemaker").stop_training_job(TrainingJobName=name)


def test_two_hosts_find_one_another_and_their_tree(cloud: SageMakerEmulator, submit: Any) -> None:
    script = """
echo pid $$ on $(cat /proc/sys/kernel/hostname) with $(ls /opt/ml/input/config | tr '\\n' ' ')
python3 - <<'PY'
import json, os, socket, time
told = json.load(open("/opt/ml/input/config/resourceconfig.json"))
print(told["hosts"], told["current_host"], told["network_interface_name"], json.load(open("/opt/ml/input/config/inputdataconfig.json")))
if told["current_host"] == "algo-1":
    server = socket.create_server(("algo-1", 7777)); link, peer = server.accept(); print("met", link.recv(9).decode())
else:
    for _ in range(100):
        try: link = socket.create_connection(("algo-1", 7777), 1); break
        except OSError: time.sleep(0.05)
    link.sendall(b"algo-2")
names = ("OF_THE_LAUNCHER", "OF_THE_IMAGE", "MINE", "TRAINING_JOB_NAME", "AWS_REGION", "DMLC_INTERFACE")
print("env", [os.environ.get(name) for name in names])
PY
printf x > /opt/ml/input/data/fast/new || echo refused; sha1sum < /opt/ml/input/data/fast/deep/part-1
cat /opt/ml/input/data/files/part-0; echo; ls /opt/ml/input/data/cut
echo "loss=1.5"; echo; echo "step 2: loss=0.25"; printf 'unfinished line'
"""
    name = submit(
        "two-hosts",
        script,
        ResourceConfig=TWO,
        Environment={"MINE": 'it\'s "ü"'},
        InputDataConfig=[
            channel("fast", DATA, "FastFile"),
            channel("files", DATA),
            channel("cut", DATA, S3DataDistributionType="ShardedByS3Key"),
        ],
    )
    answer = until_ended(name)
    assert answer["TrainingJobStatus"] == "Completed", answer.get("FailureReason")
    assert statuses(answer) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    both = {host: list(lines(name, host)) for host in ("algo-1", "algo-2")}
    for host, said in both.items():
        assert f"pid 1 on {host} with hyperparameters.json inputdataconfig.json resourceconfig.json" in said
        assert said[1].startswith(f"['algo-1', 'algo-2'] {host} eth0")
        assert "'fast': {'TrainingInputMode': 'FastFile'" in said[1]
        assert f"env [None, '1', 'it\\'s \"ü\"', '{name}', 'us-east-1', 'eth0']" in said
        assert any("Read-only file system" in line for line in said)
        assert "refused" in said
        assert "0123456789" in said
        assert said[-1] == "unfinished line"
    assert "met algo-2" in both["algo-1"]
    assert ("deep" in both["algo-1"]) != ("deep" in both["algo-2"])
    streams = boto3.client("logs").describe_log_streams(
        logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix=f"{name}/"
    )
    found = sorted(stream["logStreamName"].rpartition("-")[0] for stream in streams["logStreams"])
    assert found == [f"{name}/algo-1", f"{name}/algo-2"]
    (metric,) = answer["FinalMetricDataList"]
    assert (metric["MetricName"], metric["Value"]) == ("loss", 0.25)
    statistics = boto3.client("cloudwatch").get_metric_statistics(
        Namespace="/aws/sagemaker/TrainingJobs",
        MetricName="loss",
        Dimensions=[{"Name": "TrainingJobName", "Value": name}],
        StartTime=time.time() - 600,
        EndTime=time.time() + 600,
        Period=3600,
        Statistics=["Maximum", "SampleCount"],
    )
    assert [one["Maximum"] for one in statistics["Datapoints"]] == [1.5]


def test_a_stop_is_a_sigterm_to_the_first_process_and_then_a_kill(submit: Any) -> None:
    polite = submit("polite", SLEEPS, ResourceConfig=TWO)
    # Without a handler the first process of a container ignores SIGTERM: only the kill ends it.
    deaf = submit("deaf", "echo ready; sleep 60; true")
    until_said(polite, "ready 1", times=2)
    until_said(deaf, "ready")
    begun = time.monotonic()
    stop(polite)
    stop(deaf)
    assert statuses(until_ended(polite))[-3:] == ["Stopping", "Uploading", "Stopped"]
    assert list(lines(polite)).count("got TERM") == 2
    assert time.monotonic() - begun < GRACE_S
    assert until_ended(deaf)["TrainingJobStatus"] == "Stopped"
    assert list(lines(deaf)) == ["ready"]
    assert time.monotonic() - begun > GRACE_S


def test_a_spot_interruption_restarts_in_place_until_the_wait_is_over(
    cloud: SageMakerEmulator, submit: Any
) -> None:
    script = f"ls /opt/ml/checkpoints; echo $RANDOM > /opt/ml/checkpoints/step-$(ls /opt/ml/checkpoints | wc -l); {SLEEPS}"
    config = {"S3Uri": f"s3://{BUCKET}/mirror/"}
    name = submit("evicted", script, CheckpointConfig=config, **spot(60, 60))
    for time_round in (1, 2):
        until_said(name, "ready", times=time_round)
        cloud.evict(name)
    until_said(name, "ready", times=3)
    assert list(lines(name)).count("got TERM") == 2
    assert [line for line in lines(name) if line.startswith("step-")] == ["step-0", "step-0", "step-1"]
    stop(name)
    answer = until_ended(name)
    again = ["Interrupted", "Restarting", "Starting", "Training"]
    assert statuses(answer) == ["Starting", "Training", *again, *again, "Stopping", "Uploading", "Stopped"]
    assert answer["BillableTimeInSeconds"] <= answer["TrainingTimeInSeconds"]
    assert keys("mirror/") == ["mirror/step-0", "mirror/step-1", "mirror/step-2"]
    streams = boto3.client("logs").describe_log_streams(
        logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix=f"{name}/"
    )["logStreams"]
    assert len(streams) == 3


@pytest.mark.slow
def test_no_restart_once_the_wait_is_over(cloud: SageMakerEmulator, submit: Any) -> None:
    """Slow: waits four real seconds."""
    name = submit("short-wait", SLEEPS, **spot(4, 4))
    until_said(name, "ready")
    cloud.capacity["ml.p4d.24xlarge spot"] = 0
    try:
        cloud.evict(name)
        answer = until_ended(name)
    finally:
        del cloud.capacity["ml.p4d.24xlarge spot"]
    assert (answer["TrainingJobStatus"], answer["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")
    assert "Pending" in statuses(answer)


def test_the_runtime_covers_all_attempts(submit: Any) -> None:
    limit = {"MaxRuntimeInSeconds": 4}  # long enough for it to have its handler
    name = submit("long", SLEEPS, StoppingCondition=limit)
    answer = until_ended(name)
    assert (answer["TrainingJobStatus"], answer["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert "got TERM" in list(lines(name))


@pytest.mark.parametrize("retries", [0, 1])
def test_a_machine_that_dies_is_an_internal_error(
    cloud: SageMakerEmulator, submit: Any, retries: int
) -> None:
    changes = {"RetryStrategy": {"MaximumRetryAttempts": retries}} if retries else {}
    name = submit(f"dies-{retries}", SLEEPS, ResourceConfig=TWO, **changes)
    for attempt in range(retries + 1):
        until_said(name, "ready", times=2 * (attempt + 1))
        cloud.kill_node(name, 1)
    answer = until_ended(name)
    assert answer["TrainingJobStatus"] == "Failed"
    assert answer["FailureReason"].startswith("InternalServerError")
    assert statuses(answer).count("Training") == retries + 1
    assert "got TERM" not in list(lines(name))


def test_the_failure_reason_is_the_first_hosts_file_and_the_exit_code(submit: Any) -> None:
    script = """
if grep -q '"current_host": "algo-2"' /opt/ml/input/config/resourceconfig.json; then
  python3 -c 'print("CUDA out of memory " + "x" * 2000)' > /opt/ml/output/failure
  echo kept > /opt/ml/output/data/why; echo lost > /opt/ml/model/weights; exit 42
fi
trap 'exit 1' TERM; while :; do sleep 0.1; done
"""
    name = submit("fails", script, ResourceConfig=TWO)
    answer = until_ended(name)
    assert answer["TrainingJobStatus"] == "Failed"
    assert answer["FailureReason"].startswith("AlgorithmError: CUDA out of memory xxx")
    assert answer["FailureReason"].endswith(", exit code: 42")
    assert len(answer["FailureReason"]) == 1024
    assert keys(f"out/{name}/") == [f"out/{name}/output/output/why"]


def test_outputs_are_packed_unless_told_otherwise(submit: Any, tmp_path: Path) -> None:
    output = {"S3OutputPath": f"s3://{BUCKET}/packed"}
    script = (
        "mkdir /opt/ml/model/deep; echo w > /opt/ml/model/deep/weights; echo o > /opt/ml/output/data/extra"
    )
    name = submit("packs", script, OutputDataConfig=output)
    answer = until_ended(name)
    assert answer["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/packed/{name}/output/model.tar.gz"
    assert keys("packed/") == [f"packed/{name}/output/{what}.tar.gz" for what in ("model", "output")]
    boto3.client("s3").download_file(BUCKET, keys("packed/")[0], str(tmp_path / "model"))
    with tarfile.open(tmp_path / "model") as archive:
        assert archive.getnames() == ["deep/weights"]


def test_checkpoints_are_restored_with_siblings_and_deletions_travel(submit: Any) -> None:
    s3 = boto3.client("s3")
    for name in ("ckpt/run-1/step-1", "ckpt/run-10/step-9"):
        s3.put_object(Bucket=BUCKET, Key=name, Body=b"c")
    # The trap: without a / at its end the prefix means run-10, too.
    config = {"S3Uri": f"s3://{BUCKET}/ckpt/run-1", "LocalPath": "/opt/ml/ours"}
    script = "cd /opt/ml/ours; find . -type f | sort; rm step-1; mkdir new; echo 2 > new/step-2; sleep 1.5"
    name = submit("mirrors", script, CheckpointConfig=config)
    assert until_ended(name)["TrainingJobStatus"] == "Completed"
    assert list(lines(name)) == ["./0/step-9", "./step-1"]
    assert "ckpt/run-1/step-1" not in keys("ckpt/")
    assert {"ckpt/run-1/new/step-2", "ckpt/run-10/step-9"} <= set(keys("ckpt/"))


def test_an_isolated_job_sees_its_peers_and_its_channels_only(submit: Any) -> None:
    script = """
env | grep -c AWS_ENDPOINT; cat /opt/ml/input/data/fast/part-0; echo
python3 - <<'PY'
import glob, socket
here = next(line.split()[0] for line in open("/etc/hosts") if "algo-1" in line)
for name, place in (("peer", ("algo-2", 9)), ("store", (here.rpartition(".")[0] + ".254", 80))):
    try: socket.create_connection(place, 1)
    except OSError as error: print(name, type(error).__name__)
PY
sleep 1
"""
    name = submit(
        "isolated",
        script,
        EnableNetworkIsolation=True,
        ResourceConfig=TWO,
        InputDataConfig=[channel("fast", DATA, "FastFile")],
    )
    assert until_ended(name)["TrainingJobStatus"] == "Completed"
    said = list(lines(name, "algo-1"))
    assert said[:2] == ["0", "0123456789"]
    # A peer that does not listen refuses; the store cannot even be reached.
    assert "peer ConnectionRefusedError" in said
    assert {"store OSError", "store TimeoutError"} & set(said)


def test_several_jobs_run_at_once_on_networks_of_their_own(cloud: SageMakerEmulator, submit: Any) -> None:
    names = [submit(f"crowd-{index}", SLEEPS, ResourceConfig=TWO) for index in range(3)]
    for name in names:
        until_said(name, "ready", times=2)
    addresses = {host.address for name in names for host in cloud.hosts(name)}
    assert len(addresses) == 6
    assert all(host.alive and host.pid for name in names for host in cloud.hosts(name))
    for name in names:
        stop(name)
    for name in names:
        until_ended(name)
        assert cloud.hosts(name) == []


def test_an_entry_point_that_is_not_there_fails_the_job(cloud: SageMakerEmulator) -> None:
    body = request(cloud.role, "no-entry")
    body["AlgorithmSpecification"]["ContainerEntrypoint"] = ["/no/such/program"]
    boto3.client("sagemaker").create_training_job(**body)
    answer = until_ended("no-entry")
    assert answer["TrainingJobStatus"] == "Failed"
    assert answer["FailureReason"] == "AlgorithmError: , exit code: 127"


PROCESS = [sys.executable, "-m", "isthmus.emulators.sagemaker"]


def started(folder: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The emulator as a process, and what it says when ready."""
    import json

    command = [*PROCESS, "--folder", str(folder), "--grace", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.mark.slow
def test_nothing_is_left_of_an_emulator_that_was_killed(cloud: SageMakerEmulator, tmp_path: Path) -> None:
    """Slow: an emulator as a process of its own."""
    process, told = started(tmp_path)
    try:
        assert told["privileges"] == "namespaces"
        keywords = {"endpoint_url": told["endpoint"], "region_name": "us-east-1"}
        boto3.client("s3", **keywords).create_bucket(Bucket=BUCKET)
        boto3.client("s3", **keywords).put_object(Bucket=BUCKET, Key="data/a", Body=b"a")
        marker = f"sleep {60 + os.getpid() / 1e7}"
        body = request(
            told["role"], "orphan", f"{marker}; true", InputDataConfig=[channel("fast", DATA, "FastFile")]
        )
        sagemaker = boto3.client("sagemaker", **keywords)
        sagemaker.create_training_job(**body)
        while not running(marker):
            time.sleep(0.05)
        bridge = f"sm{namespaces.base36(process.pid)}b"
        assert any(found[0].startswith(bridge) for found in namespaces.bridges())
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while running(marker) or running(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert any(name.startswith(bridge) for name in namespaces.sweep())
    assert not any(found[0].startswith(bridge) for found in namespaces.bridges())
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def running(words: str) -> bool:
    """Whether a process has the words in its command line."""
    return subprocess.run(["pgrep", "-f", words], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
def test_without_root_hosts_are_processes_and_it_says_so(tmp_path: Path) -> None:
    """Slow: another emulator may be open in this process, so this one is a process, driven through its control address."""
    process, told = started(tmp_path, "--privileges", "processes")
    try:
        assert told["privileges"] == "processes"
        keywords = {"endpoint_url": told["endpoint"], "region_name": "us-east-1"}
        keywords |= {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        boto3.client("s3", **keywords).create_bucket(Bucket=BUCKET)
        boto3.client("s3", **keywords).put_object(Bucket=BUCKET, Key="data/part-0", Body=b"0123456789")
        script = f"cat /opt/ml/input/data/fast/part-0; echo; grep -o 'hosts.*current' $SAGEMAKER_BASE_DIR/input/config/*; {SLEEPS}"
        body = request(
            told["role"],
            "plain",
            script,
            ResourceConfig=TWO,
            InputDataConfig=[channel("fast", DATA, "FastFile")],
            **spot(),
        )
        sagemaker = boto3.client("sagemaker", **keywords)
        sagemaker.create_training_job(**body)
        # Two at once: what one binds for its rendezvous, on all addresses as torch's store does, the other must not need.
        binds = "import os,socket as s;a=s.socket();a.bind(('',int(os.environ['MASTER_PORT'])));print('bound',flush=True);input()"
        held = f'sleep 3 | {sys.executable} -c "{binds}" || [ $? = 1 ]; echo $MASTER_PORT'
        for name in ("one", "other"):
            sagemaker.create_training_job(**request(told["role"], name, held))
        until_ready(keywords, 1)
        assert asked(told["endpoint"], "state", job="plain") == "InProgress/Training"
        asked(told["endpoint"], "evict", job="plain")
        until_ready(keywords, 2)
        assert "Restarting" in statuses(sagemaker.describe_training_job(TrainingJobName="plain"))
        said = said_by(keywords, "one") + said_by(keywords, "other")
        assert said.count("bound") == 2, said
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert not running(str(tmp_path))


def asked(endpoint: str, verb: str, **content: Any) -> str:
    """The control address: what another process can do."""
    import json
    import urllib.request

    with urllib.request.urlopen(f"{endpoint}/emulator/{verb}", json.dumps(content).encode()) as answer:
        return str(json.load(answer).get("state"))


def said_by(keywords: dict[str, str], name: str) -> list[str]:
    """The log of a job that is over, or will be soon."""
    deadline = time.monotonic() + 30
    sagemaker, logs = (boto3.client(service, **keywords) for service in ("sagemaker", "logs"))
    while sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "InProgress":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    group = "/aws/sagemaker/TrainingJobs"
    found = logs.filter_log_events(logGroupName=group, logStreamNamePrefix=f"{name}/")["events"]
    return [event["message"] for event in found]


def until_ready(keywords: dict[str, str], times: int) -> None:
    logs = boto3.client("logs", **keywords)
    deadline = time.monotonic() + 20
    while True:
        events = logs.filter_log_events(
            logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix="plain/"
        )["events"]
        said = [event["message"] for event in events]
        if sum(line.startswith("ready") for line in said) == 2 * times:
            assert said.count("0123456789") == 2 * times
            return
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def test_asked_for_namespaces_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="cannot be namespaces here: not root"):
        SageMakerEmulator(tmp_path, privileges="namespaces")
