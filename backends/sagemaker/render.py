"""The exact CreateTrainingJob request of a job. Pure and offline: no boto3, no botocore, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import isthmus
from isthmus.backends.names import SAGEMAKER_LIMIT, job_name
from isthmus.backends.sagemaker import channels, environment, metrics, skus
from isthmus.backends.sagemaker.settings import DEFAULT_IMAGE, DEFAULT_MAX_RUNTIME, SageMakerSettings
from isthmus.backends.spec import Job, Rendered
from isthmus.core.recipe.dump import dump_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.storage import filesystems

LONGEST_RUNTIME = 28 * 86400
"""Seconds; SageMaker's limit."""
START_UP = 1800
"""Seconds that SageMaker may run a job beyond `budget.max_hours`: its clock counts the start and the last checkpoint, too."""
WAIT = 86400
"""Seconds that a spot job may wait in all, where nothing else is said."""
VOLUME_GB = 100


@dataclass(frozen=True, slots=True)
class Choice:
    """What a job runs on: the offer's word before the settings'."""

    tier: str
    region: str | None
    types: tuple[str, ...]
    """Instance types; several are preferences in order, none: SageMaker has no machine with that GPU and count."""
    preferences: bool
    """Whether they came from `instance_preferences`."""


def choose(job: Job) -> Choice:
    """Tier, region and instance types of a job."""
    settings, offer = settings_of(job), job.offer
    region = (offer.region if offer else None) or settings.region
    # An offer always has a tier; one that leaves its default leaves it to the settings where these say more.
    said = offer is not None and ("tier" in offer.model_fields_set or "tier" not in settings.model_fields_set)
    tier = offer.tier if offer is not None and said else settings.tier
    if offer is not None and offer.sku:
        return Choice(tier, region, (offer.sku,), False)
    if settings.instance_preferences:
        return Choice(tier, region, tuple(settings.instance_preferences), True)
    if settings.sku:
        return Choice(tier, region, (settings.sku,), False)
    found = skus.default(job.recipe.compute)
    return Choice(tier, region, (found.name,) if found else (), False)


def settings_of(job: Job) -> SageMakerSettings:
    """The job's settings, typed."""
    assert isinstance(job.settings, SageMakerSettings)
    return job.settings


def recipe_in_job(job: Job) -> tuple[list[channels.Channel], Recipe]:
    """The data channels, and the recipe as the worker reads it."""
    return channels.inputs(job.recipe, isolated=settings_of(job).network_isolation)


def render(job: Job) -> Rendered:
    """The request, and the files that it refers to."""
    from isthmus.backends.payload import START

    settings, choice = settings_of(job), choose(job)
    job_id = job_name(job.run_id, job.attempt, limit=SAGEMAKER_LIMIT)
    folder = filesystems.join(job.run_uri, "jobs", job_id)
    data, recipe = recipe_in_job(job)
    own = channels.Channel(channels.OWN, channels.prefix(folder), "File")
    efa = job.recipe.compute.nodes > 1 and any(skus.has_efa(name) for name in choice.types)
    request: dict[str, Any] = {
        "TrainingJobName": job_id,
        **({"RoleArn": settings.role_arn} if settings.role_arn else {}),
        "AlgorithmSpecification": {
            "TrainingImage": settings.image or DEFAULT_IMAGE,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python3", f"{own.path}/start.py"],
            "ContainerArguments": [
                *("--run", channels.CHECKPOINTS if settings.checkpoint_mirror else job.run_uri),
                *("--job", job_id),
                *("--cluster", "sagemaker"),
            ],
            "MetricDefinitions": metrics.definitions(efa=efa),
        },
        "InputDataConfig": [channel.request() for channel in (own, *data)],
        "OutputDataConfig": {
            "S3OutputPath": channels.prefix(settings.output or filesystems.join(job.run_uri, "output")),
            # Tens of gigabytes of weights in one tar.gz take hours to pack.
            "CompressionType": "NONE",
            **({"KmsKeyId": settings.output_kms_key} if settings.output_kms_key else {}),
        },
        "ResourceConfig": _resources(job, choice),
        "StoppingCondition": stopping(job, choice),
        "Environment": render_environment(job),
        "Tags": [{"Key": key, "Value": value} for key, value in tags(job).items()],
        "EnableManagedSpotTraining": choice.tier == "spot",
        "EnableNetworkIsolation": settings.network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_traffic,
    }
    if settings.subnets or settings.security_groups:
        request["VpcConfig"] = {
            "Subnets": list(settings.subnets),
            "SecurityGroupIds": list(settings.security_groups),
        }
    if settings.checkpoint_mirror:
        # Without the slash, a run's prefix would bring the files of its siblings, too.
        request["CheckpointConfig"] = {
            "S3Uri": channels.prefix(job.run_uri),
            "LocalPath": channels.CHECKPOINTS,
        }
    if settings.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": settings.retries}
    if job.recipe.compute.gpu != "none":
        request["InfraCheckConfig"] = {"EnableInfraCheck": settings.infra_check}
    return Rendered(
        backend=job.backend,
        run_id=job.run_id,
        run_uri=job.run_uri,
        job_id=job_id,
        request=request,
        files={"recipe.yaml": dump_recipe(recipe), "start.py": START},
        native={
            **({"region": choice.region} if choice.region else {}),
            **({"wheels": settings.wheels} if settings.wheels else {}),
        },
    )


def tags(job: Job) -> dict[str, str]:
    """The tags by which anybody finds the job again, and the team's own."""
    return {
        **settings_of(job).tags,
        "isthmus-run": job.run_id,
        "isthmus-run-uri": job.run_uri,
        "isthmus-attempt": str(job.attempt),
        "isthmus-name": job.recipe.name,
        "isthmus-version": isthmus.__version__,
    }


def render_environment(job: Job) -> dict[str, str]:
    """The variables of the container."""
    return environment.environment(job, settings_of(job), choose(job).types)


def _resources(job: Job, choice: Choice) -> dict[str, Any]:
    settings = settings_of(job)
    # Exactly one of the two ways of counting: for the job, or for each preference.
    found: dict[str, Any] = {"InstanceCount": job.recipe.compute.nodes}
    if choice.preferences:
        found["InstancePreferences"] = [{"InstanceType": name} for name in choice.types]
    elif choice.types:
        found["InstanceType"] = choice.types[0]
    if settings.volume_gb or not all(skus.has_local_disk(name) for name in choice.types):
        found["VolumeSizeInGB"] = settings.volume_gb or VOLUME_GB
    if settings.volume_kms_key:
        found["VolumeKmsKeyId"] = settings.volume_kms_key
    if settings.keep_alive is not None:
        found["KeepAlivePeriodInSeconds"] = math.ceil(settings.keep_alive)
    if settings.training_plan and choice.tier == "reserved":
        found["TrainingPlanArn"] = settings.training_plan
    return found


def stopping(job: Job, choice: Choice) -> dict[str, int]:
    """How long the job may run, wait and be pending, in seconds."""
    settings, cap = settings_of(job), job.recipe.budget.max_hours
    limits = [LONGEST_RUNTIME, settings.max_runtime or DEFAULT_MAX_RUNTIME]
    if cap is not None:
        # Rank 0 keeps the budget over all attempts and ends the run in order; this is what holds when it cannot.
        limits.append(cap * 3600 + START_UP)
    runtime = max(1, math.ceil(min(limits)))
    found = {"MaxRuntimeInSeconds": runtime}
    if choice.tier == "spot":
        found["MaxWaitTimeInSeconds"] = (
            math.ceil(settings.max_wait) if settings.max_wait is not None else runtime + WAIT
        )
    if settings.max_pending is not None:
        found["MaxPendingTimeInSeconds"] = math.ceil(settings.max_pending)
    return found
