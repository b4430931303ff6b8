"""Every offline rule of the SageMaker lint: a recipe that trips it, and one that does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from sagemaker_recipes import make_job, sm

from isthmus.backends.sagemaker import rules, shapes
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.sagemaker.lint import check_request, lint
from isthmus.backends.sagemaker.render import render
from isthmus.backends.sagemaker.settings import SageMakerSettings
from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.schema import Offer
from isthmus.errors import NotInstalled, RecipeError

ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/team"
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/p5-in-march"
MANY = "data.sources=[{uri: [" + ", ".join(f"s3://b/d{i}" for i in range(20)) + "]}]"
SD3, SDXL, PIXART = "sd3-medium", "sdxl-progressive", "pixart-512"
ISOLATED = sm(network_isolation=True, checkpoint_mirror=True)
Words = tuple[Any, ...]


def case(*words: str, recipe: str = "quickstart", **rest: Any) -> Job:
    """A job."""
    return make_job(*words, recipe=recipe, **rest)


# Rule -> (a job that trips it, one that does not, a part of the message).
CASES: dict[str, tuple[Job, Job, str]] = {
    "request": (
        case(*sm(volume_kms_key="has a space")),
        case(*sm(volume_kms_key="key-1")),
        "ResourceConfig.VolumeKmsKeyId: 'has a space' does not match",
    ),
    "role": (case(usual=False), case(), "role_arn is not given"),
    "region": (case(usual=False), case(), "AWS_REGION"),
    "region-unknown": (
        case(*sm(region="us-esat-1")),
        case(*sm(region="cn-north-1")),
        "AWS has no region us-esat-1 (did you mean us-",
    ),
    "run-directory": (case("run_directory=./runs"), case(), "run_directory ./runs is not on S3"),
    "data-place": (case("data.sources.0.uri=./data"), case(), "data.sources.0.uri ./data is a path of this machine"),
    "channels": (case("data.access=mount", MANY), case(MANY), "21 channels"),
    "environment": (case(*sm(environment={"LONG": "x" * 513})), case(*sm(environment={"LONG": "x" * 512})), "513"),
    "environment-reserved": (case(*sm(environment={"RANK": "0"})), case(*sm(environment={"RANKS": "0"})), "RANK"),
    "efa-environment": (
        case(*sm(environment={"RDMAV_FORK_SAFE": "1"})),
        case(*sm(environment={"FI_PROVIDER": "efa"})),
        "RDMAV_FORK_SAFE=1",
    ),
    "tags": (case(*sm(tags={"aws:team": "x"})), case(*sm(tags={"team": "größe 1"})), "aws:"),
    "max-runtime": (case(*sm(max_runtime="29 d")), case(*sm(max_runtime="28 d")), "29 d"),
    "max-runtime-quota": (
        case("budget={}", *sm(max_runtime="6 d")),
        case("budget={max_hours: 2}", *sm(max_runtime="6 d")),
        "6 d",
    ),
    "max-wait": (
        case("budget={}", *sm(tier="spot", max_wait="1 h", max_runtime="2 h")),
        case("budget={}", *sm(tier="spot", max_wait="2 h", max_runtime="2 h")),
        "below the 7200 s",
    ),
    "max-pending": (
        case(*sm(max_pending="29 min"), recipe=SD3),
        case(*sm(max_pending="30 min"), recipe=SD3),
        "1740 s",
    ),
    "max-pending-cpu": (case(*sm(max_pending="1 h")), case(*sm(max_pending="1 h"), recipe=SD3), "compute.gpu none"),
    "capacity": (case("compute.offers=[]", recipe=SD3), case(recipe=SD3), "8 x ml.p5.48xlarge"),
    "warm-pool": (case(*sm(keep_alive="7 h")), case(*sm(keep_alive="6 h")), "at most 6 h"),
    "warm-pool-cost": (case(*sm(keep_alive="1 h")), case(), "paid"),
    "preferences": (
        case(*sm(instance_preferences=["ml.p4d.24xlarge"], tier="spot"), recipe=SDXL),
        case(*sm(instance_preferences=["ml.p4de.24xlarge"]), recipe=SDXL),
        "tier spot",
    ),
    "preference-gpu": (
        case(*sm(instance_preferences=["ml.p4de.24xlarge", "ml.p5.48xlarge"]), recipe=SDXL),
        case(*sm(instance_preferences=["ml.p4de.24xlarge"]), recipe=SDXL),
        "ml.p5.48xlarge has 8 x h100-80gb",
    ),
    "training-plan": (
        case(recipe=SD3, offer=Offer(backend="sagemaker", tier="reserved")),
        case(*sm(training_plan=PLAN), recipe=SD3, offer=Offer(backend="sagemaker", tier="reserved")),
        "no training_plan",
    ),
    "sku-none": (
        case("compute.gpus_per_node=2", "compute.nodes=4", recipe=SD3),
        case(recipe=SD3),
        "no machine has 2 x h100-80gb; with h100-80gb there are 1, 8 a node",
    ),
    "sku-unknown": (case(*sm(sku="ml.p4dn.24xlarge"), recipe=SDXL), case(recipe=SDXL), "ml.p4dn.24xlarge"),
    "sku-unverified": (
        case(*sm(sku="ml.g6.48xlarge"), recipe=SDXL),
        case(*sm(sku="ml.p4de.24xlarge"), recipe=SDXL),
        "ml.g6.48xlarge",
    ),
    "sku-gpu": (
        case(*sm(sku="ml.p5.4xlarge"), recipe=SD3),
        case(*sm(sku="ml.p5.48xlarge"), recipe=SD3),
        "ml.p5.4xlarge has 1 x h100-80gb, compute asks for 8 x h100-80gb",
    ),
    "volume-key": (case(*sm(volume_kms_key="key-1"), recipe=SDXL), case(*sm(volume_kms_key="key-1")), "ml.p4de"),
    "volume-size": (case(*sm(volume_gb=500), recipe=SDXL), case(*sm(volume_gb=500)), "volume_gb 500"),
    "disk": (
        case("data.access=download"),
        case("data.access=download", *sm(volume_gb=500)),
        "a volume of 100 GB",
    ),
    "download": (case(recipe=PIXART), case(recipe=SDXL), "data.access is download"),
    "vpc": (
        case(*sm(subnets=["subnet-1"])),
        case(*sm(subnets=["subnet-1"], security_groups=["sg-1"])),
        "security_groups is empty",
    ),
    "isolation": (case(*ISOLATED), case("data.access=mount", *ISOLATED), "data.access stream"),
    "isolation-hub": (
        case(*ISOLATED, recipe=PIXART),
        case(*ISOLATED, "encoders.autoencoder.source=s3://b/vae", recipe=PIXART),
        "stabilityai/sdxl-vae",
    ),
    "mirror": (
        case(*sm(checkpoint_mirror=True), recipe=SD3),
        case(*sm(checkpoint_mirror=True)),
        "compute.nodes 8",
    ),
    "mirror-sync": (case(*sm(checkpoint_mirror=True)), case(), "checkpoint_mirror"),
    "image-torch": (
        case(*sm(image=f"{ECR}/pytorch-training:2.4.1-gpu-py311-cu124-sagemaker")),
        case(*sm(image="public.ecr.aws/deep-learning-containers/pytorch:2.14-cu133-amzn2023-sagemaker")),
        "torch 2.4",
    ),
    "image-region": (
        case(*sm(image=f"{ECR}/train:7", region="eu-west-1")),
        case(*sm(image=f"{ECR}/train:7")),
        "us-east-1",
    ),
    "image-tag": (
        case(*sm(image=f"{ECR}/train:latest")),
        case(*sm(image=f"{ECR}/train@sha256:{'0' * 64}")),
        "the tag latest",
    ),
    "smddp": (
        case(*sm(smddp=True), recipe=SDXL),
        case(*sm(smddp=True, image=f"{ECR}/ours-with-smddp:3"), recipe=SDXL),
        "does not have it",
    ),
    "efa": (
        case("compute.gpu=a10g-24gb", recipe=SDXL),
        case(recipe=SDXL),
        "ml.g5.48xlarge has no EFA",
    ),
    "encrypt-traffic": (
        case(*sm(encrypt_traffic=True), recipe=SDXL),
        case(*sm(encrypt_traffic=True)),
        "compute.nodes 16",
    ),
    "price": (case(recipe=SDXL), case(recipe=SDXL, usd_per_hour=400), "the price of an hour of 16 x"),
}  # fmt: skip
REQUESTS = {"prefix-slash", "compression", "hyperparameters", "model-missing"}
"""Rules that no recipe can trip, since we write that part of the request: tested below on edited requests."""


def of(rule: str, findings: list[Finding]) -> list[Finding]:
    """Those of one rule."""
    return [finding for finding in findings if finding.id == f"sagemaker.{rule}"]


def test_every_offline_rule_is_tested() -> None:
    assert {f"sagemaker.{name}" for name in {*CASES, *REQUESTS}} == {rule.id for rule in rules.OFFLINE}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule(rule: str) -> None:
    trips, passes, words = CASES[rule]
    found = of(rule, lint(trips))
    assert found, lint(trips)
    assert any(words in finding.message for finding in found), found
    assert all("\n" not in finding.message and finding.fix for finding in found)
    assert of(rule, lint(passes)) == []


def test_what_a_rule_says_the_model_does_not_repeat() -> None:
    for trips, *_ in (
        CASES[name] for name in ("role", "environment", "tags", "max-pending", "warm-pool", "sku-unknown")
    ):
        assert of("request", lint(trips)) == []


def test_documentation_can_be_made_of_the_rules() -> None:
    assert len({rule.id for rule in rules.RULES}) == len(rules.RULES) >= 50
    for rule in rules.RULES:
        assert rule.title.endswith(".")
        assert rule.why
        assert rule.fix
        assert rule.source
        assert "\n" not in rule.title + rule.why + rule.fix
        assert rule.level != "error" or rule.exit_code in (1, 2, 3)


def test_requests_that_others_made() -> None:
    request = dict(render(case("data.access=mount")).request)
    assert check_request(request) == []
    channels = [dict(channel) for channel in request["InputDataConfig"]]
    source = channels[1]["DataSource"]["S3DataSource"]
    channels[1]["DataSource"] = {"S3DataSource": {**source, "S3Uri": "s3://b/ASHA-1"}}
    (slash,) = check_request({**request, "InputDataConfig": channels})
    assert (slash.id, slash.message) == (
        "sagemaker.prefix-slash",
        "channel data0 s3://b/ASHA-1 has no slash at its end",
    )
    (slash,) = check_request({**request, "CheckpointConfig": {"S3Uri": "s3://b/ASHA-1"}})
    assert slash.id == "sagemaker.prefix-slash"
    (packed,) = check_request({**request, "OutputDataConfig": {"S3OutputPath": "s3://b/o/"}})
    assert packed.id == "sagemaker.compression"
    (typed,) = check_request({**request, "HyperParameters": {"compile": "true"}})
    assert typed.id == "sagemaker.hyperparameters"


def test_without_botocore_the_lint_says_what_it_could_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    find = shapes.importlib.util.find_spec
    monkeypatch.setattr(
        shapes.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "botocore" else find(name, *rest),
    )
    shapes._model.cache_clear()
    try:
        assert [finding.id for finding in lint(case())] == ["sagemaker.model-missing"]
        with pytest.raises(NotInstalled):
            shapes.instance_types()
    finally:
        shapes._model.cache_clear()


# The limits of the model, each by a request that exceeds it; what botocore's own client lets pass among them.
LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"TrainingJobName": "a" * 64}, "64 characters, at most 63"),
    ({"TrainingJobName": "a_b"}, "does not match"),
    ({"Environment": {f"V{i}": "x" for i in range(101)}}, "101 entries, at most 100"),
    ({"Environment": {"V": "x" * 513}}, "513 characters, at most 512"),
    ({"Environment": {"a-b": "x"}}, "does not match"),
    ({"HyperParameters": {"a": "x" * 2501}}, "2501 characters, at most 2500"),
    ({"HyperParameters": {f"h{i}": "x" for i in range(101)}}, "101 entries, at most 100"),
    ({"Tags": [{"Key": f"k{i}", "Value": ""} for i in range(51)]}, "51 entries, at most 50"),
    ({"Tags": [{"Key": "k", "Value": "what?"}]}, "does not match"),
    ({"RetryStrategy": {"MaximumRetryAttempts": 31}}, "31, at most 30"),
    ({"StoppingCondition": {"MaxPendingTimeInSeconds": 60}}, "60, at least 1800"),
    ({"InputDataConfig": []}, "0 entries, at least 1"),
    ({"VpcConfig": {"Subnets": ["s"] * 17, "SecurityGroupIds": ["s"]}}, "17 entries, at most 16"),
    ({"NoSuchThing": 1}, "unknown to the service"),
    ({"EnableNetworkIsolation": "yes"}, "is str, not boolean"),
    ({"RoleArn": "role"}, "at least 20"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), LIMITS)
def test_limits_of_the_services_model(change: dict[str, Any], words: str) -> None:
    request = {**render(case()).request, **change}
    assert words in "; ".join(f"{found.path}: {found.message}" for found in shapes.refusals(request))


def test_deeper_limits() -> None:
    request = dict(render(case()).request)
    algorithm = {
        **request["AlgorithmSpecification"],
        "MetricDefinitions": [{"Name": "n", "Regex": "r" * 501}] * 41,
        "ContainerArguments": ["x" * 257],
    }
    resources = {
        "InstanceCount": 1,
        "KeepAlivePeriodInSeconds": 21601,
        "InstancePreferences": [{"InstanceType": "ml.p9.huge"}] * 6,
    }
    found = [
        f"{refusal.path}: {refusal.message}"
        for refusal in shapes.refusals(
            {**request, "AlgorithmSpecification": algorithm, "ResourceConfig": resources}
        )
    ]
    for words in (
        "MetricDefinitions: 41 entries, at most 40",
        "Regex: 501 characters, at most 500",
        "ContainerArguments[0]: 257 characters, at most 256",
        "KeepAlivePeriodInSeconds: 21601, at most 21600",
        "InstancePreferences: 6 entries, at most 5",
        "'ml.p9.huge' is none of the",
    ):
        assert any(words in line for line in found), (words, found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("backends.sagemaker.rol_arn=x",), "did you mean `role_arn`?"),
        (("backends.sagemaker.region=US East",), "region"),
        (("backends.sagemaker.retries=31",), "retries"),
        (("backends.sagemaker.tier=cheap",), "on_demand"),
        (("backends.sagemaker.environment={A: 1}",), "environment"),
        (("backends.sagemaker.max_runtime=soon",), "duration"),
        (("backends.sagemaker.account_id=12",), "account_id"),
    ],
)
def test_bad_settings_are_one_line(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_job(*words)
    (line,) = caught.value.problems
    assert said in line
    assert "backends.sagemaker." in line


def test_secrets_cannot_be_written_into_settings() -> None:
    key = "AKIA" + "IOSFODNN7" + "EXAMPLE"
    with pytest.raises(RecipeError) as caught:
        make_job(*sm(environment={"TEAM": key}))
    assert key not in str(caught.value)


def test_every_setting_is_used() -> None:
    """A field that no module reads would be accepted and ignored."""
    from pathlib import Path

    folder = Path(sys.modules[SageMakerSettings.__module__].__file__ or "").parent
    text = "\n".join(path.read_text() for path in folder.glob("*.py") if path.name != "settings.py")
    for name in SageMakerSettings.model_fields:
        assert f"settings.{name}" in text or f"settings_of(job).{name}" in text, name


def test_an_offer_goes_before_the_settings() -> None:
    job = case(*sm(sku="ml.p4d.24xlarge", tier="spot"), recipe=SDXL)
    offer = Offer(backend="sagemaker", region="eu-west-1", sku="ml.p4de.24xlarge", tier="on_demand")
    request = render(replace(job, offer=offer)).request
    assert request["ResourceConfig"]["InstanceType"] == "ml.p4de.24xlarge"
    assert request["EnableManagedSpotTraining"] is False
    silent = Offer(backend="sagemaker")
    assert render(replace(job, offer=silent)).request["EnableManagedSpotTraining"] is True
    (only,) = SageMakerBackend().offers(replace(job, offer=offer))
    assert (only.sku, only.region, only.tier, only.nodes) == (
        "ml.p4de.24xlarge",
        "eu-west-1",
        "on_demand",
        16,
    )
