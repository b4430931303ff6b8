"""The emulated SageMaker refuses what the service refuses, and answers boto3 as it does. Real boto3, no job of substance."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sagemaker_jobs import BUCKET, DATA, channel, described, request, spot, until_ended

pytest.importorskip("moto.server", reason="pip install 'isthmus[rehearse]'")
import boto3
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from isthmus.emulators.sagemaker import REFUSALS, SageMakerEmulator
from isthmus.errors import UsageError

Change = Callable[[dict[str, Any]], None]
WEST = "elsewhere-west"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerEmulator]:
    """One emulator for all; plain processes will do where nothing runs."""
    with (
        SageMakerEmulator(
            tmp_path_factory.mktemp("cloud"), privileges="processes", grace=1, patience=0.3, jobs_at_once=32
        ) as cloud,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**cloud.environment(), "AWS_MAX_ATTEMPTS": "1"}.items():
            patch.setenv(name, value)
        cloud.bucket(BUCKET)
        cloud.bucket(WEST, "us-west-2")
        s3 = boto3.client("s3")
        s3.put_object(Bucket=BUCKET, Key="data/a", Body=b"a")
        boto3.client("s3", "us-west-2").put_object(Bucket=WEST, Key="data/a", Body=b"a")
        iam = boto3.client("iam")
        iam.create_role(RoleName="of-somebody", AssumeRolePolicyDocument="{}")
        yield cloud


@pytest.fixture
def sagemaker(cloud: SageMakerEmulator) -> Any:
    return boto3.client("sagemaker")


@pytest.fixture
def strict(cloud: SageMakerEmulator) -> Any:
    """A client that checks nothing itself: all refusals are the server's."""
    return boto3.client("sagemaker", config=Config(parameter_validation=False))


def put(path: str, value: Any) -> Change:
    """Sets a field by its dotted path."""

    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body.setdefault(name, {})
        body[last] = value

    return change


def both(*changes: Change) -> Change:
    def change(body: dict[str, Any]) -> None:
        for one in changes:
            one(body)

    return change


def spotted(**limits: int) -> Change:
    return both(put("EnableManagedSpotTraining", True), put("StoppingCondition", limits))


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PREFERRED = put("ResourceConfig.InstancePreferences", [{"InstanceType": "ml.p5.48xlarge"}])
# Rule -> a change to a good request, and words of the answer.
CASES: list[tuple[str, Change, str]] = [
    ("shape", put("TrainingJobName", "under_score"), "'trainingJobName'.*regular expression"),
    ("shape", put("TrainingJobName", "n" * 64), "less than or equal to 63"),
    ("shape", put("Environment", {"A": "x" * 513}), "less than or equal to 512"),
    ("shape", put("Environment", {f"V{i}": "" for i in range(101)}), "less than or equal to 100"),
    ("shape", put("HyperParameters", {"a": "x" * 2501}), "less than or equal to 2500"),
    ("shape", put("ResourceConfig.InstanceType", "ml.p9.huge"), "enum value set"),
    ("shape", put("ResourceConfig.KeepAlivePeriodInSeconds", 21601), "less than or equal to 21600"),
    ("shape", put("StoppingCondition.MaxPendingTimeInSeconds", 60), "greater than or equal to 1800"),
    ("shape", put("RetryStrategy", {"MaximumRetryAttempts": 31}), "less than or equal to 30"),
    ("shape", put("InputDataConfig", [channel(f"c{i}") for i in range(21)]), "less than or equal to 20"),
    (
        "shape",
        put("AlgorithmSpecification.MetricDefinitions", [{"Name": "m", "Regex": "r" * 501}]),
        "less than or equal to 500",
    ),
    ("shape", put("Tags", [{"Key": "a;b", "Value": "c"}]), "regular expression"),
    ("shape", put("OutputDataConfig.CompressionType", "None"), "enum value set"),
    ("role", put("RoleArn", "arn:aws:iam::123456789012:role/nobody"), "Could not assume role"),
    ("role", put("RoleArn", "arn:aws:iam::123456789012:role/of-somebody"), "allows principal"),
    ("algorithm", put("AlgorithmSpecification.TrainingImage", ""), "exactly one"),
    ("algorithm", put("AlgorithmSpecification.AlgorithmName", "an-algorithm"), "exactly one"),
    ("input", put("InputDataConfig", [channel("a", f"s3://{BUCKET}/none/")]), "No S3 objects found"),
    ("input", put("InputDataConfig", [channel("a", "s3://no-such-bucket/a/")]), "No S3 objects found"),
    ("input", put("InputDataConfig", [channel("a", f"s3://{WEST}/data/")]), r"selected region \(us-east-1\)"),
    ("output", put("OutputDataConfig.S3OutputPath", "s3://no-such-bucket/out"), "OutputDataConfig"),
    ("output", put("CheckpointConfig", {"S3Uri": f"s3://{WEST}/x/"}), "CheckpointConfig"),
    ("channel-names", put("InputDataConfig", [channel("a"), channel("a")]), "Duplicate channel"),
    (
        "fast-file-prefix",
        put("InputDataConfig", [channel("a", mode="FastFile", S3DataType="ManifestFile")]),
        "S3Prefix",
    ),
    ("spot-wait", spotted(MaxRuntimeInSeconds=60), "MaxWaitTimeInSeconds"),
    ("spot-wait", spotted(MaxRuntimeInSeconds=60, MaxWaitTimeInSeconds=59), "MaxWaitTimeInSeconds"),
    ("wait-without-spot", put("StoppingCondition.MaxWaitTimeInSeconds", 60), "only when"),
    (
        "spot-warm-pool",
        both(
            spotted(MaxRuntimeInSeconds=1, MaxWaitTimeInSeconds=1),
            put("ResourceConfig.KeepAlivePeriodInSeconds", 60),
        ),
        "KeepAlive",
    ),
    ("runtime", put("StoppingCondition.MaxRuntimeInSeconds", 28 * 86400 + 1), "exceeds"),
    ("instance-preferences", PREFERRED, "InstanceType"),
    (
        "instance-preferences",
        both(
            put("ResourceConfig", {"InstanceCount": 1}),
            PREFERRED,
            spotted(MaxRuntimeInSeconds=1, MaxWaitTimeInSeconds=1),
        ),
        "EnableManagedSpotTraining",
    ),
    ("read-only-fields", put("ResourceConfig.SelectedInstanceType", "ml.p5.48xlarge"), "read-only"),
    ("resources", put("ResourceConfig.InstanceCount", 0), "InstanceCount"),
    ("volume", put("ResourceConfig.InstanceType", "ml.m5.large"), "VolumeSizeInGB"),
    ("volume-key", put("ResourceConfig.VolumeKmsKeyId", KEY), "local storage"),
    (
        "checkpoint-path",
        put("CheckpointConfig", {"S3Uri": f"s3://{BUCKET}/c/", "LocalPath": "/opt/ml/model"}),
        "reserved",
    ),
    ("tags", put("Tags", [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}]), "Duplicate tag"),
    ("tags", put("Tags", [{"Key": "aws:x", "Value": "1"}]), "reserved"),
    (
        "vpc",
        put("VpcConfig", {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}),
        "subnet ID 'subnet-1'",
    ),
]


@pytest.mark.parametrize(("rule", "change", "words"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_request_that_the_service_refuses(
    cloud: SageMakerEmulator, strict: Any, rule: str, change: Change, words: str
) -> None:
    body = copy.deepcopy(request(cloud.role, "refused"))
    change(body)
    with pytest.raises(ClientError, match=words) as caught:
        strict.create_training_job(**body)
    (expected,) = {one.code for one in REFUSALS if one.id == rule}
    assert caught.value.response["Error"]["Code"] == expected
    with pytest.raises(ClientError, match=r"Requested resource not found\."):
        described("refused")


def test_every_rule_has_a_case_and_says_where_it_is_written() -> None:
    elsewhere = {"image", "duplicate", "quota", "warm-pool-quota", "stop-ended", "not-found"}
    assert {one.id for one in REFUSALS} == {case[0] for case in CASES} | elsewhere
    assert len({one.id for one in REFUSALS}) == len(REFUSALS)
    assert all(one.rule and one.source and one.words in ("service", "ours") for one in REFUSALS)


def test_what_is_not_emulated_is_refused(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    for body in (
        request(cloud.role, "pipe", InputDataConfig=[channel("a", mode="Pipe")]),
        request(cloud.role, "augmented", InputDataConfig=[channel("a", S3DataType="AugmentedManifestFile")]),
    ):
        with pytest.raises(ClientError, match="is not emulated"):
            sagemaker.create_training_job(**body)


def test_an_image_that_nobody_has(cloud: SageMakerEmulator, sagemaker: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cloud, "images", {"ours:*": cloud.images["*"]})
    with pytest.raises(ClientError, match=r"Requested image .* not found"):
        sagemaker.create_training_job(**request(cloud.role, "no-image"))


def test_a_role_that_may_not_list(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    cloud.denied.add("s3:List*")
    try:
        with pytest.raises(ClientError, match="s3:ListBucket"):
            sagemaker.create_training_job(
                **request(cloud.role, "blind", InputDataConfig=[channel("a", DATA)])
            )
        answer = boto3.client("iam").simulate_principal_policy(
            PolicySourceArn=cloud.role,
            ActionNames=["s3:ListBucket", "s3:GetObject"],
            ResourceArns=[f"arn:aws:s3:::{BUCKET}"],
        )
    finally:
        cloud.denied.clear()
    decisions = {one["EvalActionName"]: one["EvalDecision"] for one in answer["EvaluationResults"]}
    assert decisions == {"s3:ListBucket": "implicitDeny", "s3:GetObject": "allowed"}


def test_a_name_is_taken_for_ever(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    body = request(cloud.role, "taken")
    arn = sagemaker.create_training_job(**body)["TrainingJobArn"]
    assert arn == "arn:aws:sagemaker:us-east-1:123456789012:training-job/taken"
    until_ended("taken")
    with pytest.raises(sagemaker.exceptions.ResourceInUse, match="must be unique"):
        sagemaker.create_training_job(**body)
    with pytest.raises(ClientError, match="in status Completed"):
        sagemaker.stop_training_job(TrainingJobName="taken")


def test_a_quota_is_refused_and_can_be_read(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    name = "ml.p5.48xlarge for spot training job usage"
    cloud.quota[name] = 1
    resources = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2}
    body = request(cloud.role, "too-many", ResourceConfig=resources, **spot())
    with pytest.raises(
        sagemaker.exceptions.ResourceLimitExceeded, match=r"is 1 Instances.*request delta of 2"
    ):
        sagemaker.create_training_job(**body)
    quotas = boto3.client("service-quotas")
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    found = {one["QuotaName"]: one for page in pages for one in page["Quotas"]}
    assert found[name]["Value"] == 1.0
    assert found["ml.p5.48xlarge for training job usage"]["Value"] == 64.0
    assert found["ml.p5.48xlarge for training warm pool usage"]["Value"] == 0.0
    one = quotas.get_service_quota(ServiceCode="sagemaker", QuotaCode=found[name]["QuotaCode"])
    assert one["Quota"]["QuotaName"] == name
    with pytest.raises(quotas.exceptions.NoSuchResourceException):
        quotas.get_service_quota(ServiceCode="sagemaker", QuotaCode="L-00000000")


def test_running_jobs_count_towards_the_quota(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    cloud.quota["ml.g5.xlarge"] = 1
    resources = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}
    sagemaker.create_training_job(**request(cloud.role, "first", "sleep 60", ResourceConfig=resources))
    with pytest.raises(sagemaker.exceptions.ResourceLimitExceeded, match="utilization of 1 Instances"):
        sagemaker.create_training_job(**request(cloud.role, "second", ResourceConfig=resources))
    sagemaker.stop_training_job(TrainingJobName="first")
    until_ended("first")
    sagemaker.create_training_job(**request(cloud.role, "second", ResourceConfig=resources))


def test_a_warm_pool_needs_its_own_quota_and_is_reused(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    resources = {"InstanceType": "ml.g6.xlarge", "InstanceCount": 1, "KeepAlivePeriodInSeconds": 60}
    with pytest.raises(sagemaker.exceptions.ResourceLimitExceeded, match="warm pool usage' is 0"):
        sagemaker.create_training_job(**request(cloud.role, "cold", ResourceConfig=resources))
    cloud.quota["ml.g6.xlarge for training warm pool usage"] = 1
    sagemaker.create_training_job(**request(cloud.role, "warm-1", ResourceConfig=resources))
    assert until_ended("warm-1")["WarmPoolStatus"]["Status"] == "Available"
    sagemaker.create_training_job(**request(cloud.role, "warm-2", ResourceConfig=resources))
    assert described("warm-1")["WarmPoolStatus"] == {"Status": "Reused", "ReusedByJob": "warm-2"}
    until_ended("warm-2")
    sagemaker.update_training_job(TrainingJobName="warm-2", ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    assert described("warm-2")["WarmPoolStatus"]["Status"] == "Terminated"


def test_no_capacity(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    cloud.capacity["ml.p4de.24xlarge"] = 0
    resources = {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1}
    sagemaker.create_training_job(**request(cloud.role, "hopeless", ResourceConfig=resources))
    answer = until_ended("hopeless")
    assert answer["TrainingJobStatus"] == "Failed"
    assert answer["FailureReason"].startswith("CapacityError: Unable to provision")
    assert "Pending" in [one["Status"] for one in answer["SecondaryStatusTransitions"]]
    body = request(cloud.role, "waits", ResourceConfig=resources, **spot(1, 1))
    sagemaker.create_training_job(**body)
    assert until_ended("waits")["SecondaryStatus"] == "MaxWaitTimeExceeded"
    preferred = [{"InstanceType": "ml.p4de.24xlarge"}, {"InstanceType": "ml.p4d.24xlarge"}]
    resources = {"InstanceCount": 1, "InstancePreferences": preferred}
    sagemaker.create_training_job(**request(cloud.role, "flexible", ResourceConfig=resources))
    answer = until_ended("flexible")
    assert answer["TrainingJobStatus"] == "Completed"
    assert answer["ResourceConfig"]["SelectedInstanceType"] == "ml.p4d.24xlarge"


def test_describe_gives_back_all_that_was_asked(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    body = request(
        cloud.role,
        "echo",
        Environment={"QUOTES": 'it\'s "ü"'},
        RetryStrategy={"MaximumRetryAttempts": 3},
        InfraCheckConfig={"EnableInfraCheck": True},
        RemoteDebugConfig={"EnableRemoteDebug": True},
        ProfilerConfig={"DisableProfiler": True},
        HyperParameters={"a": "1"},
        InputDataConfig=[channel("a", DATA)],
        CheckpointConfig={"S3Uri": f"s3://{BUCKET}/c/"},
        Tags=[{"Key": "isthmus-run", "Value": "r"}],
        EnableInterContainerTrafficEncryption=True,
        **spot(),
    )
    sagemaker.create_training_job(**body)
    answer = described("echo")
    tags = body.pop("Tags")
    assert {name: answer[name] for name in body} == body
    assert sagemaker.list_tags(ResourceArn=answer["TrainingJobArn"])["Tags"] == tags
    assert "Tags" not in answer
    sagemaker.add_tags(ResourceArn=answer["TrainingJobArn"], Tags=[{"Key": "team", "Value": "t"}])
    sagemaker.delete_tags(ResourceArn=answer["TrainingJobArn"], TagKeys=["isthmus-run"])
    assert sagemaker.list_tags(ResourceArn=answer["TrainingJobArn"])["Tags"] == [
        {"Key": "team", "Value": "t"}
    ]
    more = [{"Key": f"k{i}", "Value": "v"} for i in range(50)]
    with pytest.raises(ClientError, match="at most 50"):
        sagemaker.add_tags(ResourceArn=answer["TrainingJobArn"], Tags=more)


def test_lists_are_filtered_ordered_and_paged(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    for index in range(12):
        tags = [{"Key": "isthmus-run", "Value": f"r{index % 2}"}]
        sagemaker.create_training_job(**request(cloud.role, f"listed-{index:02d}", Tags=tags))
    for index in range(12):
        until_ended(f"listed-{index:02d}")
    first = sagemaker.list_training_jobs(NameContains="LISTED-")
    assert len(first["TrainingJobSummaries"]) == 10
    pages = sagemaker.get_paginator("list_training_jobs").paginate(
        NameContains="listed-", StatusEquals="Completed"
    )
    names = [one["TrainingJobName"] for page in pages for one in page["TrainingJobSummaries"]]
    assert names == [f"listed-{index:02d}" for index in reversed(range(12))]
    ordered = sagemaker.list_training_jobs(
        NameContains="listed-", SortBy="Name", SortOrder="Ascending", MaxResults=2
    )
    assert [one["TrainingJobName"] for one in ordered["TrainingJobSummaries"]] == ["listed-00", "listed-01"]
    assert not sagemaker.list_training_jobs(CreationTimeAfter=time.time() + 60)["TrainingJobSummaries"]
    assert not sagemaker.list_training_jobs(NameContains="listed-", StatusEquals="Failed")[
        "TrainingJobSummaries"
    ]
    filters = [
        {"Name": "Tags.isthmus-run", "Operator": "Equals", "Value": "r1"},
        {"Name": "TrainingJobName", "Operator": "Contains", "Value": "listed-"},
    ]
    found = sagemaker.search(Resource="TrainingJob", SearchExpression={"Filters": filters}, MaxResults=4)
    jobs = [one["TrainingJob"] for one in found["Results"]]
    assert [job["TrainingJobName"] for job in jobs] == ["listed-11", "listed-09", "listed-07", "listed-05"]
    assert jobs[0]["Tags"] == [{"Key": "isthmus-run", "Value": "r1"}]
    assert found["NextToken"]


def test_jobs_of_another_region_are_others(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    west = boto3.client("sagemaker", "us-west-2")
    output = {"S3OutputPath": f"s3://{WEST}/out"}
    sagemaker.create_training_job(**request(cloud.role, "both-coasts"))
    with pytest.raises(ClientError, match="OutputDataConfig"):
        west.create_training_job(**request(cloud.role, "both-coasts"))
    west.create_training_job(**request(cloud.role, "both-coasts", OutputDataConfig=output))
    arn = west.describe_training_job(TrainingJobName="both-coasts")["TrainingJobArn"]
    assert arn.split(":")[3] == "us-west-2"
    while (state := west.describe_training_job(TrainingJobName="both-coasts"))[
        "TrainingJobStatus"
    ] == "InProgress":
        time.sleep(0.02)
    assert state["TrainingJobStatus"] == until_ended("both-coasts")["TrainingJobStatus"] == "Completed"


@pytest.mark.parametrize("how", ["ThrottlingException", 429, 503])
def test_throttling_passes(cloud: SageMakerEmulator, sagemaker: Any, how: str | int) -> None:
    cloud.fail_next("ListTrainingJobs", how, times=2)
    for _ in range(2):
        with pytest.raises(ClientError) as caught:
            sagemaker.list_training_jobs()
        code = caught.value.response["Error"]["Code"]
        assert code == {503: "ServiceUnavailable"}.get(how, "ThrottlingException")
    sagemaker.list_training_jobs()
    cloud.fail_next("s3:PUT", "SlowDown")
    with pytest.raises(ClientError, match="SlowDown"):
        boto3.client("s3").put_object(Bucket=BUCKET, Key="slow", Body=b"")


def test_a_connection_drops_before_or_after_the_effect(cloud: SageMakerEmulator, sagemaker: Any) -> None:
    body = request(cloud.role, "dropped")
    cloud.fail_next("CreateTrainingJob", "drop-before")
    with pytest.raises(ConnectionClosedError):
        sagemaker.create_training_job(**body)
    with pytest.raises(ClientError, match="not found"):
        described("dropped")
    cloud.fail_next("CreateTrainingJob", "drop-after")
    with pytest.raises(ConnectionClosedError):
        sagemaker.create_training_job(**body)
    assert described("dropped")["TrainingJobName"] == "dropped"
    with pytest.raises(sagemaker.exceptions.ResourceInUse):
        sagemaker.create_training_job(**body)


def test_what_a_test_asks_wrongly_is_said(cloud: SageMakerEmulator, sagemaker: Any, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no training job nothing"):
        cloud.evict("nothing")
    with pytest.raises(UsageError, match="another SageMaker emulator"):
        SageMakerEmulator(tmp_path)
    sagemaker.create_training_job(**request(cloud.role, "on-demand", "sleep 60"))
    while not cloud.hosts("on-demand"):
        time.sleep(0.02)
    with pytest.raises(UsageError, match="no spot job"):
        cloud.evict("on-demand")
    with pytest.raises(UsageError, match="hosts 0 to 0, not 1"):
        cloud.kill_node("on-demand", 1)
