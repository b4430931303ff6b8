"""Rules of the SageMaker preflight: what is found by asking AWS."""

from __future__ import annotations

from isthmus.backends.rules import Rule

_API = "the service's answer"


def _rule(
    id: str, level: str, title: str, why: str, fix: str, source: str = _API, exit_code: int = 3
) -> Rule:
    return Rule(
        id=f"sagemaker.{id}",
        level=level,  # type: ignore[arg-type]
        title=title,
        why=why,
        fix=fix,
        source=source,
        exit_code=exit_code,
    )


CREDENTIALS = _rule(
    "credentials", "error", "AWS does not know who is asking.",
    "There are no credentials, or they have expired, or are of nobody.",
    "aws sso login, or AWS_PROFILE=<profile>", exit_code=2,
)  # fmt: skip
ACCOUNT = _rule(
    "account", "error", "The credentials are of another account.",
    "The job would run, and be paid, where it does not belong.",
    "choose the profile of that account, or change account_id", exit_code=2,
)  # fmt: skip
NO_REGION = _rule(
    "no-region", "error", "No region, or none of that name.",
    "Neither the recipe nor the environment says in which region the job shall run, or there is no such endpoint.",
    "--set backends.sagemaker.region=us-east-1", exit_code=2,
)  # fmt: skip
ROLE_MISSING = _rule(
    "role-missing", "error", "The execution role is not there, or SageMaker may not take it.",
    "CreateTrainingJob answers with a ValidationException when the role does not exist or does not trust "
    "sagemaker.amazonaws.com.",
    "create the role, with sagemaker.amazonaws.com in its trust policy", "IAM",
)  # fmt: skip
ROLE_DENIED = _rule(
    "role-denied", "error", "The execution role lacks a permission that the job needs.",
    "IAM's simulation denies it; the job would fail at its first read, write or log line.",
    "add the permission to the role", "IAM's policy simulator",
)  # fmt: skip
SKU_REGION = _rule(
    "sku-region", "error", "The region does not have that machine.",
    "An instance type is offered in some regions only.",
    "choose another region or sku; compute.offers lists where to go next", "EC2's instance type offerings",
)  # fmt: skip
QUOTA = _rule(
    "quota", "error", "The account's quota does not allow the job.",
    "Each instance type has a quota for training jobs, one for spot and one for warm pools; for GPUs they are 0 until they "
    "are raised, and the request fails with ResourceLimitExceeded.",
    "ask for an increase in Service Quotas; it takes days for large GPU machines", "Service Quotas of SageMaker",
)  # fmt: skip
IMAGE_MISSING = _rule(
    "image-missing", "error", "The image is not in its registry.",
    "The job would be pending, then fail: the image is pulled when the machines are there.",
    "push it, or correct backends.sagemaker.image", "Amazon ECR",
)  # fmt: skip
BUCKET = _rule(
    "bucket", "error", "A bucket is not there, or not for you.",
    "Data and run directory must exist before the job is submitted.",
    "create the bucket, or correct its name", "Amazon S3", 2,
)  # fmt: skip
BUCKET_REGION = _rule(
    "bucket-region", "error", "Data or run directory are in another region than the job.",
    "SageMaker's channels must be in the job's region, and what is read across regions is paid by the gigabyte (about 20 USD "
    "a TB within the United States and Europe), in every epoch.",
    "run where the data is, or copy it once: isthmus data copy", "botocore's model of InputDataConfig",
)  # fmt: skip
DATA_SIZE = _rule(
    "data-size", "error", "The data does not fit on a node's disk.",
    "access download copies all of it to every node.",
    "data.access: stream or mount, or a larger volume_gb", "backends/sagemaker/skus.py",
)  # fmt: skip
SUBNETS = _rule(
    "subnets", "error", "A subnet or security group is not there.",
    "The request would be refused, or the nodes could not reach one another.",
    "correct subnets and security_groups", "Amazon EC2",
)  # fmt: skip
NAME = _rule(
    "job-name", "error", "A job of that name exists, and is not this run's.",
    "Names are unique in an account and region, and are never given back.",
    "choose another --run-id", _API, 2,
)  # fmt: skip
NOT_PERMITTED = _rule(
    "not-permitted", "note", "Something could not be looked at.",
    "The credentials may not ask; the job itself does not need it.",
    "nothing, or let the launcher's role read it",
)  # fmt: skip
UNSEEN = _rule(
    "unseen", "warning", "Something could not be looked at.",
    "AWS did not answer that question, or asks for fewer requests; what it is about may be wrong.",
    "try again in a minute",
)  # fmt: skip
UNREACHABLE = _rule(
    "unreachable", "error", "AWS did not answer.",
    "The network, a proxy or a wrong endpoint is in the way, or the service asks for fewer requests.",
    "try again", exit_code=1,
)  # fmt: skip

ONLINE = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
