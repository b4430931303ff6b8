"""What would go wrong, found by asking AWS. Starts nothing, writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from isthmus.backends.sagemaker import preflight_places, rules_online, submission
from isthmus.backends.sagemaker.aws import (
    Clients,
    code_of,
    is_denied,
    is_missing,
    is_passing,
    message_of,
    translate,
)
from isthmus.backends.sagemaker.lint_settings import ECR_IMAGE
from isthmus.backends.sagemaker.render import Choice, choose, render, settings_of, stopping
from isthmus.backends.spec import Finding, Job
from isthmus.errors import IsthmusError, UsageError

ATTEMPTS = 3
"""Of one question: someone waits for the answer."""
LONGEST_RUN = "Longest run time for a training job"


def preflight(job: Job, clients: Clients) -> list[Finding]:
    """The findings; when nobody knows who asks, only that one."""
    try:
        region = clients.region
        regions = _regions(clients)
    except UsageError as error:
        return [rules_online.NO_REGION.found(error.message, error.hint)]
    except IsthmusError as error:
        return [Finding.of(rules_online.CREDENTIALS.id, error)]
    if regions and region not in regions:
        from difflib import get_close_matches

        near = get_close_matches(region, regions, n=1)
        fix = f"did you mean {near[0]}?" if near else "a region of SageMaker; a newer boto3 may know it"
        return [rules_online.NO_REGION.found(f"no region {region} is known to have SageMaker", fix)]
    found: list[Finding] = []
    identity = _identity(clients, found)
    if identity is None:
        return found
    choice = replace(choose(job), region=region)
    found += _account(job, identity)
    questions: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("the role", lambda: _role(job, clients, identity)),
        ("the role's permissions", lambda: _permissions(job, clients)),
        (f"instance types of {region}", lambda: _offered(choice, clients)),
        ("quotas", lambda: _quotas(job, choice, clients)),
        ("the image", lambda: _image(job, clients)),
        ("subnets and security groups", lambda: _network(job, clients)),
        ("the job's name", lambda: _name(job, clients)),
        *preflight_places.questions(job, clients, choice),
    ]
    for what, ask in questions:
        found += answered(what, ask)
    return found


def answered(what: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one question, or the one that says why it has no answer."""
    found: list[Finding] = []
    try:
        found.extend(ask())
    except IsthmusError as error:
        found.append(Finding.of(rules_online.UNSEEN.id, error))
    except Exception as error:
        if is_denied(error):
            found.append(rules_online.NOT_PERMITTED.found(f"{what}: these credentials may not look"))
        elif is_passing(error):
            found.append(rules_online.UNSEEN.found(f"{what}: {code_of(error) or 'no connection'}"))
        else:
            translated = translate(error, f"look at {what}")
            if translated is None:
                raise
            found.append(Finding.of(rules_online.UNSEEN.id, translated))
    return found


def _regions(clients: Clients) -> set[str]:
    session = clients.session
    partitions = session.get_available_partitions()
    return {name for part in partitions for name in session.get_available_regions("sagemaker", part)}


def _identity(clients: Clients, found: list[Finding]) -> dict[str, Any] | None:
    try:
        identity: dict[str, Any] = clients("sts", attempts=ATTEMPTS).get_caller_identity()
        return identity
    except IsthmusError as error:
        found.append(Finding.of(rules_online.CREDENTIALS.id, error))
    except Exception as error:
        translated = translate(error, "ask AWS who you are")
        if translated is None:
            raise
        rule = rules_online.UNREACHABLE if is_passing(error) else rules_online.CREDENTIALS
        found.append(rule.found(translated.message, translated.hint))
    return None


def _account(job: Job, identity: dict[str, Any]) -> Iterator[Finding]:
    wanted, here = settings_of(job).account_id, str(identity["Account"])
    if wanted is not None and wanted != here:
        yield rules_online.ACCOUNT.found(f"the credentials are of account {here}, account_id is {wanted}")


def _role(job: Job, clients: Clients, identity: dict[str, Any]) -> Iterator[Finding]:
    arn = settings_of(job).role_arn or ""
    account, name = arn.split(":")[4], arn.rpartition("/")[2]
    if account != str(identity["Account"]):
        yield rules_online.ROLE_MISSING.found(
            f"role {name} is of account {account}, the credentials of {identity['Account']}",
            "a job runs as a role of its own account",
        )
        return
    try:
        role = clients("iam", attempts=ATTEMPTS).get_role(RoleName=name)["Role"]
    except Exception as error:
        if not is_missing(error):
            raise
        yield rules_online.ROLE_MISSING.found(f"there is no role {name} in account {account}")
        return
    if "sagemaker.amazonaws.com" not in str(role.get("AssumeRolePolicyDocument")):
        yield rules_online.ROLE_MISSING.found(
            f"role {name} does not trust sagemaker.amazonaws.com",
            "add sagemaker.amazonaws.com to the role's trust policy, with sts:AssumeRole",
        )


def _permissions(job: Job, clients: Clients) -> Iterator[Finding]:
    """What the role needs for data, run directory and log; in a network-isolated job SageMaker itself needs the same."""
    arn = settings_of(job).role_arn
    bucket, _, prefix = job.run_uri.removeprefix("s3://").partition("/")
    readers = {place.partition("/")[0] for place in preflight_places.buckets(job)} | {bucket}
    asked: list[tuple[list[str], list[str]]] = [
        (
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
            [f"arn:aws:s3:::{bucket}/{prefix}/recipe.yaml"],
        ),
        (["s3:ListBucket"], [f"arn:aws:s3:::{name}" for name in sorted(readers)]),
        (["logs:CreateLogStream", "logs:PutLogEvents"], ["*"]),
    ]
    client = clients("iam", attempts=ATTEMPTS)
    denied: list[str] = []
    for actions, resources in asked:
        answer = client.simulate_principal_policy(
            PolicySourceArn=arn, ActionNames=actions, ResourceArns=resources
        )
        denied += [
            f"{result['EvalActionName']} on {result['EvalResourceName']}"
            for result in answer.get("EvaluationResults", ())
            if result.get("EvalDecision") != "allowed"
        ]
    if denied:
        yield rules_online.ROLE_DENIED.found(
            f"role {str(arn).rpartition('/')[2]} may not: {', '.join(denied)}"
        )


def _offered(choice: Choice, clients: Clients) -> Iterator[Finding]:
    names = [name.removeprefix("ml.") for name in choice.types]
    answer = clients("ec2", attempts=ATTEMPTS).describe_instance_type_offerings(
        LocationType="region", Filters=[{"Name": "instance-type", "Values": names}]
    )
    there = {offering["InstanceType"] for offering in answer["InstanceTypeOfferings"]}
    yield from _of_each(
        choice,
        {
            f"ml.{name}": rules_online.SKU_REGION.found(f"{choice.region} does not have ml.{name}")
            for name in names
            if name not in there
        },
    )


def _of_each(choice: Choice, wrong: dict[str, Finding]) -> Iterator[Finding]:
    """Of several preferences one that does is enough: then the others are warnings."""
    for finding in wrong.values():
        yield finding if len(wrong) == len(set(choice.types)) else replace(finding, level="warning")


def _quotas(job: Job, choice: Choice, clients: Clients) -> Iterator[Finding]:
    if choice.tier == "reserved":
        return  # its capacity is the plan's
    client = clients("service-quotas", attempts=ATTEMPTS)
    quotas: dict[str, float] = {}
    for page in client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"):
        quotas |= {quota["QuotaName"]: float(quota["Value"]) for quota in page["Quotas"]}
    nodes = job.recipe.compute.nodes
    usage = "spot training job usage" if choice.tier == "spot" else "training job usage"
    short = {}
    for name in choice.types:
        allowed = quotas.get(f"{name} for {usage}")
        if allowed is None:
            yield replace(
                rules_online.QUOTA.found(f"{choice.region} tells of no quota for {name} ({usage})"),
                level="warning",
            )
        elif allowed < nodes:
            short[name] = rules_online.QUOTA.found(
                f"{nodes} x {name} are over the quota of {allowed:g} ({name} for {usage}, {choice.region})"
            )
    yield from _of_each(choice, short)
    if settings_of(job).keep_alive is not None:
        for name in choice.types:
            allowed = quotas.get(f"{name} for training warm pool usage", 0.0)
            if allowed < nodes:
                yield rules_online.QUOTA.found(
                    f"keep_alive: {nodes} x {name} are over the warm pool quota of {allowed:g}"
                )
    longest, runtime = quotas.get(LONGEST_RUN), stopping(job, choice)["MaxRuntimeInSeconds"]
    if longest is not None and runtime > longest:
        yield rules_online.QUOTA.found(
            f"max_runtime {runtime} s is over the quota of {longest:g} s ({LONGEST_RUN})",
            f"--set backends.sagemaker.max_runtime='{longest:g} s', or have the quota raised",
        )


def _image(job: Job, clients: Clients) -> Iterator[Finding]:
    image = settings_of(job).image or ""
    private = ECR_IMAGE.fullmatch(image)
    if private is None:
        return  # a public registry; SageMaker will tell
    name, digest = private["name"].partition("@")[::2]
    name, tag = name.partition(":")[::2]
    wanted = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
    client = clients("ecr", region=private["region"], attempts=ATTEMPTS)
    try:
        client.describe_images(registryId=private["account"], repositoryName=name, imageIds=[wanted])
    except Exception as error:
        if code_of(error) not in ("RepositoryNotFoundException", "ImageNotFoundException"):
            raise
        yield rules_online.IMAGE_MISSING.found(f"there is no image {image}")


def _network(job: Job, clients: Clients) -> Iterator[Finding]:
    settings = settings_of(job)
    if not settings.subnets:
        return
    client = clients("ec2", attempts=ATTEMPTS)
    for ask, wanted in (
        (client.describe_subnets, {"SubnetIds": list(settings.subnets)}),
        (client.describe_security_groups, {"GroupIds": list(settings.security_groups)}),
    ):
        try:
            ask(**wanted)
        except Exception as error:
            if not code_of(error).startswith("Invalid"):
                raise
            yield rules_online.SUBNETS.found(message_of(error))


def _name(job: Job, clients: Clients) -> Iterator[Finding]:
    try:
        submission.find(clients("sagemaker", attempts=ATTEMPTS), render(job))
    except UsageError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None  # no collision, but a question without an answer
        yield rules_online.NAME.found(str(error.where) + ": " + error.message)
