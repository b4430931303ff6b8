"""The SageMaker preflight against the emulator's account: each finding from the cloud's own answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker_recipes import make_job, sm

from isthmus.backends.preflight import look as shared_look
from isthmus.backends.sagemaker import preflight_places, rules
from isthmus.backends.sagemaker.aws import Clients
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.sagemaker.rules_online import ONLINE
from isthmus.backends.spec import Finding
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.storage.rundir import RunDirectory

ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
SD3 = "sd3-medium"
SD3_ON_S3 = ("data.sources.0.uri=s3://example-bucket/quickstart", "run_directory=s3://example-bucket/runs")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerEmulator]:
    """An account with a bucket here and one far away, an image, a VPC."""
    with SageMakerEmulator(tmp_path_factory.mktemp("cloud"), privileges="processes") as emulator:
        emulator.bucket("example-bucket")
        emulator.bucket("far-away", "eu-west-1")
        client = emulator.client("s3", "us-east-1")
        for bucket in ("example-bucket", "far-away"):
            for name in ("quickstart/manifest.json", "heldout/manifest.json"):
                client.put_object(Bucket=bucket, Key=name, Body=b"{}")
        registry = emulator.client("ecr", "us-east-1")
        registry.create_repository(repositoryName="team/train")
        manifest = {"schemaVersion": 2, "config": {"digest": "sha256:" + "0" * 64}, "layers": []}
        registry.put_image(
            repositoryName="team/train",
            imageTag="7",
            imageManifest=json.dumps(manifest),
            imageManifestMediaType=MANIFEST,
        )
        yield emulator


@pytest.fixture(scope="module")
def shared() -> SageMakerBackend:
    """Making clients takes longer than asking."""
    return SageMakerBackend()


@pytest.fixture
def backend(
    cloud: SageMakerEmulator, shared: SageMakerBackend, no_credentials: pytest.MonkeyPatch
) -> SageMakerBackend:
    for name, value in cloud.environment().items():
        no_credentials.setenv(name, value)
    return shared


def look(cloud: SageMakerEmulator, backend: SageMakerBackend, *words: str, **rest: Any) -> list[Finding]:
    role = f"backends.sagemaker.role_arn={cloud.role}"
    return backend.preflight(make_job(role, *words, **rest))


def ids(findings: list[Finding]) -> list[str]:
    return [finding.id.removeprefix("sagemaker.") for finding in findings]


def only(findings: list[Finding], rule: str) -> Finding:
    (found,) = [finding for finding in findings if finding.id == f"sagemaker.{rule}"]
    assert "\n" not in found.message
    return found


def test_a_good_job_finds_nothing(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    assert look(cloud, backend) == []
    assert look(cloud, backend, *sm(image=f"{ECR}/team/train:7")) == []
    assert not RunDirectory(make_job().run_uri).exists()
    assert cloud.jobs() == []


@pytest.mark.parametrize(
    ("words", "rest", "rule", "said", "code"),
    [
        (sm(account_id="999999999999"), {}, "account", "999999999999", 2),
        (sm(role_arn="arn:aws:iam::123456789012:role/nobody"), {}, "role-missing", "no role nobody", 3),
        (sm(role_arn="arn:aws:iam::999999999999:role/theirs"), {}, "role-missing", "of account 999999999999", 3),
        (sm(image=f"{ECR}/team/train:8"), {}, "image-missing", "team/train:8", 3),
        (sm(image=f"{ECR}/team/nothing"), {}, "image-missing", "team/nothing", 3),
        (["run_directory=s3://no-such-bucket-here/runs"], {}, "bucket", "there is no bucket no-such-bucket-here", 2),
        (["data.sources.0.uri=s3://far-away/quickstart"], {}, "bucket-region", "far-away is in eu-west-1, the job in us-east-1", 3),
        (sm(subnets=["subnet-0"], security_groups=["sg-0"]), {}, "subnets", "subnet-0", 3),
        (sm(region="us-est-1"), {}, "no-region", "us-est-1", 2),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(
    cloud: SageMakerEmulator,
    backend: SageMakerBackend,
    words: list[str],
    rest: dict[str, Any],
    rule: str,
    said: str,
    code: int,
) -> None:
    findings = look(cloud, backend, *words, **rest)
    found = [finding for finding in findings if finding.id == f"sagemaker.{rule}"]
    assert found, findings
    assert said in found[0].message
    assert found[0].level == "error"
    assert found[0].exit_code == code
    assert found[0].fix


def test_data_that_is_not_there_is_said_once(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    """By the look that every backend's launch takes; SageMaker's own asks for what only the cloud knows."""
    words = (f"backends.sagemaker.role_arn={cloud.role}", "data.sources.0.uri=s3://example-bucket/nothing")
    job = make_job(*words)
    assert backend.preflight(job) == []
    told = [finding for _, findings in shared_look(job) for finding in findings]
    said = [(one.id, one.exit_code) for one in told if "nothing" in one.message]
    assert said == [("preflight.data", 2)]


def test_the_cost_of_another_region_is_said(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    rule = only(look(cloud, backend, "data.sources.0.uri=s3://far-away/quickstart"), "bucket-region")
    assert rule.fix == "run where the data is, or copy it once: isthmus data copy"
    assert "20 USD" in next(one.why for one in ONLINE if one.id == rule.id)


def test_quotas_by_tier_and_warm_pool(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    cloud.quota["ml.p5.48xlarge for training job usage"] = 0
    cloud.quota["ml.p5.48xlarge for spot training job usage"] = 7
    found = only(look(cloud, backend, *SD3_ON_S3, recipe=SD3), "quota")
    assert "8 x ml.p5.48xlarge are over the quota of 0" in found.message
    assert found.exit_code == 3
    found = only(look(cloud, backend, *SD3_ON_S3, *sm(tier="spot"), recipe=SD3), "quota")
    assert "quota of 7 (ml.p5.48xlarge for spot training job usage" in found.message
    cloud.quota["ml.p5.48xlarge"] = 8
    assert "quota" not in ids(look(cloud, backend, *SD3_ON_S3, recipe=SD3))
    found = only(look(cloud, backend, *sm(keep_alive="1 h")), "quota")
    assert "warm pool quota of 0" in found.message


def test_one_preference_that_does_is_enough(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    cloud.quota["ml.p5e.48xlarge"] = 0
    cloud.quota["ml.p5en.48xlarge"] = 8
    words = [
        *SD3_ON_S3, "compute.gpu=h200-141gb", *sm(instance_preferences=["ml.p5e.48xlarge", "ml.p5en.48xlarge"])
    ]  # fmt: skip
    found = only(look(cloud, backend, *words, recipe=SD3), "quota")
    assert found.level == "warning"
    cloud.quota["ml.p5en.48xlarge"] = 0
    findings = look(cloud, backend, *words, recipe=SD3)
    assert [f.level for f in findings if f.id == "sagemaker.quota"] == ["error", "error"]


def test_a_role_without_a_permission(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    cloud.denied.add("s3:Put*")
    try:
        found = only(look(cloud, backend), "role-denied")
    finally:
        cloud.denied.clear()
    assert "may not: s3:PutObject on arn:aws:s3:::example-bucket/runs/" in found.message
    assert found.exit_code == 3


def test_a_role_that_does_not_trust_sagemaker(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        ],
    }
    role = cloud.client("iam", "us-east-1").create_role(
        RoleName="of-ec2", AssumeRolePolicyDocument=json.dumps(trust)
    )["Role"]["Arn"]
    found = only(look(cloud, backend, *sm(role_arn=role)), "role-missing")
    assert "does not trust sagemaker.amazonaws.com" in found.message


def test_a_region_without_the_machine(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    # As moto's table of EC2 has it.
    offered = cloud.client("ec2", "eu-west-3").describe_instance_type_offerings(
        Filters=[{"Name": "instance-type", "Values": ["p4d.24xlarge"]}]
    )["InstanceTypeOfferings"]
    assert offered == []
    words = ["compute.gpu=a100-40gb", *SD3_ON_S3, *sm(region="eu-west-3")]
    found = only(look(cloud, backend, *words, recipe=SD3), "sku-region")
    assert found.message == "eu-west-3 does not have ml.p4d.24xlarge"


def test_data_that_is_downloaded_must_fit(
    cloud: SageMakerEmulator, backend: SageMakerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["data.access=download"]
    assert "data-size" not in ids(look(cloud, backend, *words))
    cloud.client("s3", "us-east-1").put_object(
        Bucket="example-bucket", Key="quickstart/part", Body=b"x" * 2_000_000
    )
    monkeypatch.setattr(preflight_places, "VOLUME_GB", 0.001)
    found = only(look(cloud, backend, *words), "data-size")
    assert "do not fit" in found.message


def test_the_name_of_another_runs_job(cloud: SageMakerEmulator, backend: SageMakerBackend) -> None:
    job = make_job(f"backends.sagemaker.role_arn={cloud.role}", run_id="taken")
    request = {**backend.render(job).request, "Tags": []}
    request["InputDataConfig"] = [
        {
            **request["InputDataConfig"][0],
            "DataSource": {
                "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://example-bucket/quickstart/"}
            },
        }
    ]
    Clients("us-east-1")("sagemaker").create_training_job(**request)
    found = only(look(cloud, backend, run_id="taken"), "job-name")
    assert found.exit_code == 2
    assert "collision" in found.message


def test_no_credentials_and_expired_ones(
    cloud: SageMakerEmulator, backend: SageMakerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.fail_next("GetCallerIdentity", "ExpiredToken")
    (found,) = look(cloud, backend)
    assert (found.id, found.message) == ("sagemaker.credentials", "the AWS credentials have expired")
    assert found.exit_code == 2
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (found,) = look(cloud, SageMakerBackend())
    assert (found.id, found.message) == ("sagemaker.credentials", "no AWS credentials were found")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    (found,) = look(cloud, SageMakerBackend())
    assert "nobody" in found.message
    assert found.exit_code == 2


def test_no_region_at_all(
    cloud: SageMakerEmulator, backend: SageMakerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    (found,) = SageMakerBackend().preflight(
        make_job(f"backends.sagemaker.role_arn={cloud.role}", usual=False)
    )
    assert (found.id, found.exit_code) == ("sagemaker.no-region", 2)


def test_no_network(
    cloud: SageMakerEmulator, backend: SageMakerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    (found,) = look(cloud, SageMakerBackend())
    assert (found.id, found.exit_code) == ("sagemaker.unreachable", 1)


@pytest.mark.parametrize(
    ("operation", "how", "rule", "level"),
    [
        ("GetRole", "AccessDenied", "not-permitted", "note"),
        ("ListServiceQuotas", "AccessDeniedException", "not-permitted", "note"),
        ("ListServiceQuotas", "drop-before", "unseen", "warning"),
        ("DescribeInstanceTypeOfferings", "UnauthorizedOperation", "not-permitted", "note"),
    ],
)
def test_what_may_not_be_asked_is_no_error(
    cloud: SageMakerEmulator, backend: SageMakerBackend, operation: str, how: str, rule: str, level: str
) -> None:
    cloud.fail_next(operation, how, 3 if how == "drop-before" else 1)
    (found,) = look(cloud, SageMakerBackend())
    assert (found.id, found.level) == (f"sagemaker.{rule}", level)


def test_every_online_rule_is_tested() -> None:
    text = Path(__file__).read_text()
    missing = [
        rule.id for rule in rules.RULES if rule in ONLINE and f'"{rule.id.split(".", 1)[1]}"' not in text
        and f'"{rule.id}"' not in text
    ]  # fmt: skip
    assert missing == []
