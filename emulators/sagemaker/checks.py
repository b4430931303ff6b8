"""CreateTrainingJob's refusals, in the order in which a front end would find them: see `refusals` for the rules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from isthmus.emulators.sagemaker import refusals as rules
from isthmus.emulators.sagemaker.errors import ServiceError, ValidationException
from isthmus.emulators.sagemaker.permissions import Denied
from isthmus.emulators.sagemaker.requests import (
    LOCAL_STORAGE,
    checkpoint_path,
    family,
    input_mode,
    is_spot,
    split_uri,
    stopping,
    wanted_types,
)
from isthmus.emulators.sagemaker.shapes import violations

Request = dict[str, Any]
OWN_FOLDERS = (
    "/opt/ml/input",
    "/opt/ml/model",
    "/opt/ml/output",
    "/opt/ml/code",
    "/opt/ml/errors",
    "/opt/ml",
)
DAY = 86400


class Account(Protocol):
    """What the checks ask about the account."""

    denied: Denied

    def client(self, service: str, region: str) -> Any:
        """A boto3 client of a service of this emulator."""

    def has_image(self, name: str) -> bool:
        """Whether a training image exists."""


def check(request: Request, account: Account, region: str) -> None:
    """Raises the ServiceError with which the service would refuse the request; quotas and names are not checked here."""
    found = violations("CreateTrainingJob", request)
    if found:
        plural = "s" if len(found) > 1 else ""
        raise rules.SHAPE.error(f"{len(found)} validation error{plural} detected: {'; '.join(found[:10])}")
    for refused in _offline(request):
        raise refused
    for part in _not_emulated(request):
        raise ValidationException(f"emulator: {part} is not emulated")
    for look in (_role, _image, _inputs, _outputs, _vpc):
        for refused in look(request, account, region):
            raise refused


def _not_emulated(request: Request) -> Iterator[str]:
    """What the service can do and this cannot: better refused than run as something else."""
    for channel in request.get("InputDataConfig", []):
        source = channel["DataSource"].get("S3DataSource")
        if source is None:
            yield f"a data source other than S3 (channel {channel['ChannelName']})"
        elif source["S3DataType"] not in ("S3Prefix", "ManifestFile"):
            yield f"S3DataType {source['S3DataType']}"
        if input_mode(request, channel) == "Pipe":
            yield "Pipe mode"
    if "ResourceConfig" not in request:
        yield "a serverless training job"


def _offline(request: Request) -> Iterator[ServiceError]:
    for part in (_algorithm, _resources, _volume, _limits, _channels, _checkpoints, _tags):
        yield from part(request)


def _algorithm(request: Request) -> Iterator[ServiceError]:
    given = [
        name for name in ("TrainingImage", "AlgorithmName") if request["AlgorithmSpecification"].get(name)
    ]
    if len(given) != 1:
        yield rules.SOURCE.error("You must specify exactly one of TrainingImage and AlgorithmName.")


def _resources(request: Request) -> Iterator[ServiceError]:
    resources = request.get("ResourceConfig", {})
    chosen = [name for name in ("SelectedInstanceType", "SelectedInstanceCount") if name in resources]
    if chosen:
        yield rules.READ_ONLY.error(f"{chosen[0]} is read-only and cannot be specified in CreateTrainingJob.")
    if "InstancePreferences" in resources:
        others = [
            name
            for name in ("InstanceType", "InstanceGroups", "InstancePlacementConfig")
            if name in resources
        ]
        others += ["EnableManagedSpotTraining"] if is_spot(request) else []
        if others:
            yield rules.PREFERENCES.error(
                f"InstancePreferences cannot be specified together with {others[0]}."
            )
    if not all(name and count > 0 for name, count in wanted_types(request)):
        yield rules.RESOURCES.error(
            "ResourceConfig must specify InstanceType and an InstanceCount of at least 1."
        )
    if is_spot(request) and resources.get("KeepAlivePeriodInSeconds"):
        yield rules.SPOT_WARM.error(
            "KeepAlivePeriodInSeconds is not supported for managed spot training jobs."
        )


def _volume(request: Request) -> Iterator[ServiceError]:
    resources = request.get("ResourceConfig", {})
    for instance_type, _ in wanted_types(request):
        local = family(instance_type) in LOCAL_STORAGE
        if local and resources.get("VolumeKmsKeyId"):
            yield rules.VOLUME_KEY.error(
                f"VolumeKmsKeyId cannot be specified: instance type {instance_type} has local storage, "
                "which is encrypted by a hardware module on the instance."
            )
        if not local and resources.get("VolumeSizeInGB", 0) < 1:
            yield rules.VOLUME.error(f"VolumeSizeInGB must be at least 1 for instance type {instance_type}.")


def _limits(request: Request) -> Iterator[ServiceError]:
    runtime = stopping(request, "MaxRuntimeInSeconds") or 0
    wait = stopping(request, "MaxWaitTimeInSeconds")
    if runtime > 28 * DAY:
        yield rules.RUNTIME.error(f"MaxRuntimeInSeconds {runtime} exceeds the maximum of {28 * DAY}.")
    if is_spot(request) and (wait is None or wait < runtime):
        yield rules.SPOT_WAIT.error(
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
        )
    if wait is not None and not is_spot(request):
        yield rules.WAIT_WITHOUT_SPOT.error(
            "MaxWaitTimeInSeconds can be specified only when EnableManagedSpotTraining is true."
        )


def _channels(request: Request) -> Iterator[ServiceError]:
    channels = request.get("InputDataConfig", [])
    for name, times in Counter(channel["ChannelName"] for channel in channels).items():
        if times > 1:
            yield rules.CHANNELS.error(f"Duplicate channel name {name} in InputDataConfig.")
    for channel in channels:
        source = channel["DataSource"].get("S3DataSource")
        if input_mode(request, channel) == "FastFile" and (
            source is None or source["S3DataType"] != "S3Prefix"
        ):
            yield rules.FAST_FILE.error(
                f"FastFile mode supports only the S3DataType S3Prefix (channel {channel['ChannelName']})."
            )


def _checkpoints(request: Request) -> Iterator[ServiceError]:
    path = checkpoint_path(request)
    if path is not None and (
        path in OWN_FOLDERS or path.startswith(tuple(f"{own}/" for own in OWN_FOLDERS[:-1]))
    ):
        yield rules.CHECKPOINT_PATH.error(f"CheckpointConfig LocalPath {path} is reserved.")


def _tags(request: Request) -> Iterator[ServiceError]:
    yield from check_tags(request.get("Tags", []), [])


def check_tags(new: list[dict[str, str]], there: list[dict[str, str]]) -> Iterator[ServiceError]:
    """The refusals of tags that are added to those that are there."""
    keys = [tag["Key"] for tag in new]
    if len(set(keys)) < len(keys):
        yield rules.TAGS.error("Duplicate tag keys found. Please note that Tag keys are case insensitive.")
    if any(key.lower().startswith("aws:") for key in keys):
        yield rules.TAGS.error("Tag keys that begin with aws: are reserved for system use.")
    if len({*keys, *(tag["Key"] for tag in there)}) > 50:
        yield rules.TAGS.error("Too many tags: a resource can have at most 50.")


def _quietly(call: Callable[[], Any]) -> Any:
    """An answer, or None for a refusal: what does not exist and what may not be seen look alike to the service."""
    from botocore.exceptions import ClientError

    try:
        return call()
    except ClientError:
        return None


def _role(request: Request, account: Account, region: str) -> Iterator[ServiceError]:
    arn = request["RoleArn"]
    iam = account.client("iam", region)
    found = _quietly(lambda: iam.get_role(RoleName=arn.rpartition("/")[2]))
    trusts = found is not None and "sagemaker.amazonaws.com" in str(found["Role"]["AssumeRolePolicyDocument"])
    if not trusts or found["Role"]["Arn"] != arn:
        yield rules.ROLE.error(
            f"Could not assume role {arn}. Please ensure that the role exists and allows principal "
            "'sagemaker.amazonaws.com' to assume the role."
        )


def _image(request: Request, account: Account, region: str) -> Iterator[ServiceError]:
    name = request["AlgorithmSpecification"].get("TrainingImage")
    if name and (not account.has_image(name) or "ecr:BatchGetImage" in account.denied):
        yield rules.IMAGE.error(f"Requested image {name} not found.")


def in_region(bucket: str, account: Account, region: str) -> bool:
    """Whether a bucket exists and lies in the region."""
    s3 = account.client("s3", region)
    place = _quietly(lambda: s3.get_bucket_location(Bucket=bucket))
    return place is not None and (place.get("LocationConstraint") or "us-east-1") == region


def _inputs(request: Request, account: Account, region: str) -> Iterator[ServiceError]:
    for channel in request.get("InputDataConfig", []):
        source = channel["DataSource"].get("S3DataSource")
        if source is None:
            continue
        bucket, prefix = split_uri(source["S3Uri"])
        listed = in_region(bucket, account, region) and "s3:ListBucket" not in account.denied
        s3 = account.client("s3", region)
        if not listed or not s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount"):
            yield rules.INPUT.error(
                f'No S3 objects found under S3 URL "{source["S3Uri"]}" given in input data source. Please ensure that '
                f"the bucket exists in the selected region ({region}), that objects exist under that S3 prefix, and that "
                f'the role "{request["RoleArn"]}" has "s3:ListBucket" permissions on bucket "{bucket}".'
            )


def _outputs(request: Request, account: Account, region: str) -> Iterator[ServiceError]:
    places = {"OutputDataConfig": request["OutputDataConfig"]["S3OutputPath"]}
    if "CheckpointConfig" in request:
        places["CheckpointConfig"] = request["CheckpointConfig"]["S3Uri"]
    for field, uri in places.items():
        bucket, _ = split_uri(uri)
        if not in_region(bucket, account, region):
            yield rules.OUTPUT.error(
                f"The S3 bucket {bucket} in {field} does not exist in the selected region ({region}) or cannot be accessed."
            )


def _vpc(request: Request, account: Account, region: str) -> Iterator[ServiceError]:
    config = request.get("VpcConfig")
    if config is None:
        return
    ec2 = account.client("ec2", region)
    for subnet in config["Subnets"]:
        if not _quietly(functools.partial(ec2.describe_subnets, SubnetIds=[subnet])):
            yield rules.VPC.error(f"The subnet ID '{subnet}' does not exist.")
    for group in config["SecurityGroupIds"]:
        if not _quietly(functools.partial(ec2.describe_security_groups, GroupIds=[group])):
            yield rules.VPC.error(f"The security group '{group}' does not exist.")
