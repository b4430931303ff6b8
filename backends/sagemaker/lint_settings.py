"""The offline lint of `backends.sagemaker` and of the machines it chooses. Imports no botocore."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator

from isthmus.backends.sagemaker import environment, rules, shapes, skus
from isthmus.backends.sagemaker.render import (
    LONGEST_RUNTIME,
    Choice,
    choose,
    render_environment,
    settings_of,
    stopping,
    tags,
)
from isthmus.backends.sagemaker.settings import DEFAULT_MAX_RUNTIME
from isthmus.backends.spec import Finding, Job
from isthmus.errors import NotInstalled

LONGEST_VALUE = 512
MOST_VARIABLES = 100
MOST_TAGS = 50
LONGEST_WARM_POOL = 21600
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+")
_TAG = re.compile(r"[\w\s.:/=+\-@]*")
_RESERVED = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|TRAINING_JOB_(NAME|ARN)|SM_.*|SAGEMAKER_.*"
    r"|ISTHMUS_(ATTEMPT|LEASE_TOKEN|GRACE_S|PARENT)"
)
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/(?P<name>.+)"
)
"""An image in a private registry."""
_TORCH = re.compile(r"pytorch(?:-training)?[:/](?:[a-z-]*:)?(\d+)\.(\d+)")
_CUDA = re.compile(r"-cu(\d{2})(\d)")
_HARMS_EFA = {"RDMAV_FORK_SAFE": ("1",), "FI_EFA_USE_HUGE_PAGE": ("1",), "FI_EFA_FORK_SAFE": ("1",)}


def check(job: Job) -> Iterator[Finding]:
    """All findings of the settings."""
    choice = choose(job)
    yield from _identity(job, choice)
    yield from _machines(job, choice)
    yield from _capacity(job, choice)
    yield from _times(job, choice)
    yield from _disks_and_network(job, choice)
    yield from _image(job, choice)
    yield from _environment(job)
    yield from _tags(job)
    budget = job.recipe.budget
    if budget.max_usd is not None and environment.usd_per_hour(job, settings_of(job)) is None:
        yield rules.PRICE.found(
            f"budget.max_usd is ${budget.max_usd:,.2f}, and the price of an hour of {job.recipe.compute.nodes} x "
            f"{' or '.join(choice.types) or 'these machines'} in {choice.region or 'its region'} is not known"
        )


def untaggable(text: str) -> str | None:
    """The first character that a tag may not hold."""
    return next((char for char in text if not _TAG.fullmatch(char)), None)


def _identity(job: Job, choice: Choice) -> Iterator[Finding]:
    role = settings_of(job).role_arn
    if role is None:
        yield rules.ROLE.found("backends.sagemaker.role_arn is not given")
    elif not _ROLE.fullmatch(role):
        yield rules.ROLE.found(f"backends.sagemaker.role_arn {role[:80]} is not the ARN of a role")
    if choice.region is None:
        yield rules.REGION.found("backends.sagemaker.region is not given: AWS_REGION or the profile decides")
        return
    with contextlib.suppress(NotInstalled):
        known = shapes.regions()
        if choice.region not in known:
            near = difflib.get_close_matches(choice.region, known, n=1)
            yield rules.REGION_UNKNOWN.found(
                f"AWS has no region {choice.region}{f' (did you mean {near[0]}?)' if near else ''}"
            )


def _machines(job: Job, choice: Choice) -> Iterator[Finding]:
    compute = job.recipe.compute
    wanted = f"{compute.gpus_per_node} x {compute.gpu}"
    if not choice.types:
        there = ", ".join(str(count) for count in skus.counts(compute.gpu)) or "none"
        yield rules.SKU_NONE.found(
            f"compute: no machine has {wanted}; with {compute.gpu} there are {there} a node"
        )
        return
    for name in choice.types:
        sku = skus.find(name)
        if sku is None:
            yield from _unknown(name)
        elif compute.gpu == "none":
            if sku.gpu != "none":
                yield rules.SKU_GPU.found(f"{name} has {sku.gpus} x {sku.gpu}, and compute.gpu is none")
        elif sku.gpus != compute.gpus_per_node:
            message = f"{name} has {sku.gpus} x {sku.gpu}, compute asks for {wanted}"
            yield (rules.PREFERENCES if choice.preferences else rules.SKU_GPU).found(message)
        elif sku.gpu != compute.gpu:
            message = f"{name} has {sku.gpus} x {sku.gpu}, compute asks for {wanted}"
            yield (rules.PREFERENCE_GPU if choice.preferences else rules.SKU_GPU).found(message)


def _unknown(name: str) -> Iterator[Finding]:
    from difflib import get_close_matches

    known = {sku.name for sku in skus.SKUS}
    with contextlib.suppress(NotInstalled):
        known |= shapes.instance_types()
    if name in known:
        yield rules.SKU_UNVERIFIED.found(f"{name}: its GPUs are not compared with compute.gpu")
        return
    near = get_close_matches(name, known, n=1)
    yield rules.SKU_UNKNOWN.found(
        f"no instance type {name[:60]}", f"did you mean {near[0]}?" if near else None
    )


def _capacity(job: Job, choice: Choice) -> Iterator[Finding]:
    settings, recipe = settings_of(job), job.recipe
    if choice.preferences:
        if choice.tier == "spot":
            yield rules.PREFERENCES.found("instance_preferences with tier spot")
        if settings.sku:
            yield rules.PREFERENCES.found(
                f"instance_preferences and sku {settings.sku}", "leave one of them out"
            )
        twice = sorted({name for name in choice.types if choice.types.count(name) > 1})
        if twice:
            yield rules.PREFERENCES.found(f"instance_preferences has {', '.join(twice)} twice")
    if (choice.tier == "reserved") != (settings.training_plan is not None):
        has = f"training_plan {settings.training_plan}" if settings.training_plan else "no training_plan"
        yield rules.TRAINING_PLAN.found(f"tier {choice.tier} with {has}")
    accelerated = recipe.compute.gpu != "none"
    if settings.max_pending is not None:
        if not 1800 <= settings.max_pending <= LONGEST_RUNTIME:
            yield rules.PENDING.found(
                f"max_pending is {settings.max_pending:g} s, allowed are 30 min to 28 d"
            )
        if not accelerated:
            yield rules.PENDING_CPU.found("max_pending with compute.gpu none")
    elif (
        accelerated
        and not choice.preferences
        and choice.tier == "on_demand"
        and len(recipe.compute.offers) < 2
    ):
        yield rules.CAPACITY.found(
            f"{recipe.compute.nodes} x {', '.join(choice.types)} is all that it can run on"
        )
    if recipe.compute.nodes > 1 and accelerated:
        slow = [name for name in choice.types if not skus.has_efa(name)]
        if slow:
            yield rules.EFA.found(
                f"compute.nodes is {recipe.compute.nodes}, and {', '.join(slow)} has no EFA"
            )


def _times(job: Job, choice: Choice) -> Iterator[Finding]:
    settings = settings_of(job)
    if settings.max_runtime is not None and settings.max_runtime > LONGEST_RUNTIME:
        yield rules.RUNTIME.found(f"max_runtime is {settings.max_runtime / 86400:g} d, 28 d are allowed")
    runtime = stopping(job, choice)["MaxRuntimeInSeconds"]
    if runtime > DEFAULT_MAX_RUNTIME:
        yield rules.RUNTIME_QUOTA.found(f"it may run for {runtime / 86400:.3g} d, more than 5 d")
    if settings.max_wait is not None:
        if choice.tier != "spot":
            yield rules.WAIT.found(f"max_wait with tier {choice.tier}", "leave max_wait out, or tier: spot")
        elif settings.max_wait < runtime:
            yield rules.WAIT.found(
                f"max_wait {settings.max_wait:g} s is below the {runtime} s that it may run"
            )
    if settings.keep_alive is not None:
        if choice.tier == "spot":
            yield rules.WARM_POOL.found("keep_alive with tier spot")
        if settings.keep_alive > LONGEST_WARM_POOL:
            yield rules.WARM_POOL.found(f"keep_alive is {settings.keep_alive:g} s, at most 6 h")
        yield rules.WARM_POOL_COST.found(f"keep_alive {settings.keep_alive:g} s: paid after the job, too")


def _disks_and_network(job: Job, choice: Choice) -> Iterator[Finding]:
    settings = settings_of(job)
    own = [name for name in choice.types if skus.has_local_disk(name)]
    if settings.volume_kms_key and own:
        yield rules.VOLUME_KEY.found(f"volume_kms_key with {', '.join(own)}")
    if settings.volume_gb and own and len(own) == len(choice.types):
        yield rules.VOLUME_SIZE.found(f"volume_gb {settings.volume_gb} with {', '.join(own)}")
    if bool(settings.subnets) != bool(settings.security_groups):
        lacks = "security_groups" if settings.subnets else "subnets"
        yield rules.VPC.found(f"backends.sagemaker.{lacks} is empty")
    if settings.encrypt_traffic and job.recipe.compute.nodes > 1:
        yield rules.ENCRYPT.found(f"encrypt_traffic with compute.nodes {job.recipe.compute.nodes}")


def _image(job: Job, choice: Choice) -> Iterator[Finding]:
    settings = settings_of(job)
    if settings.smddp:
        yield from _smddp(job, choice)
    image = settings.image
    if image is None:
        return
    private = ECR_IMAGE.fullmatch(image)
    if private and choice.region and private["region"] != choice.region:
        yield rules.IMAGE_REGION.found(f"image is in {private['region']}, the job in {choice.region}")
    if "@sha256:" not in image:
        tag = image.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield rules.IMAGE_TAG.found(f"image {image[:80]} has {'the tag latest' if tag else 'no tag'}")
    torch, cuda = _TORCH.search(image), _CUDA.search(image)
    if torch and not settings.smddp and (int(torch[1]), int(torch[2])) < (2, 13):
        yield rules.IMAGE_TORCH.found(f"image {image.rpartition('/')[2]} has torch {torch[1]}.{torch[2]}")
    blackwell = any("b200" in name or "b300" in name for name in choice.types)
    if cuda and blackwell and (int(cuda[1]), int(cuda[2])) < (12, 8):
        yield rules.IMAGE_TORCH.found(f"image has CUDA {cuda[1]}.{cuda[2]}, and {choice.types[0]} needs 12.8")


def _smddp(job: Job, choice: Choice) -> Iterator[Finding]:
    image = settings_of(job).image
    wrong = [name for name in choice.types if skus.family_of(name) not in ("p4d", "p4de")]
    if wrong:
        yield rules.SMDDP.found(f"smddp with {', '.join(wrong)}: only ml.p4d and ml.p4de have it")
    if job.recipe.compute.nodes == 1:
        yield rules.SMDDP.found("smddp with compute.nodes 1: it exchanges between nodes only")
    if image is None:
        yield rules.SMDDP.found("smddp with AWS's image of torch 2.13, which does not have it")
        return
    torch = _TORCH.search(image)
    if torch and ECR_IMAGE.fullmatch(image) and (int(torch[1]), int(torch[2])) > (2, 4):
        yield rules.SMDDP.found(f"smddp, and image has torch {torch[1]}.{torch[2]}; it is for 2.4 at most")


def _environment(job: Job) -> Iterator[Finding]:
    values = render_environment(job)
    if len(values) > MOST_VARIABLES:
        yield rules.ENVIRONMENT.found(f"environment has {len(values)} variables with ours, 100 are allowed")
    for name, value in settings_of(job).environment.items():
        where = f"environment.{name[:60]}"
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
            yield rules.ENVIRONMENT.found(
                f"{where}: not a name of letters, digits and underscores", "rename it"
            )
        elif len(name) > LONGEST_VALUE or len(value) > LONGEST_VALUE:
            longest = max(len(name), len(value))
            yield rules.ENVIRONMENT.found(f"{where} has {longest} characters, 512 are allowed")
        elif _RESERVED.fullmatch(name):
            yield rules.ENVIRONMENT_RESERVED.found(f"{where} is set by isthmus, torchrun or SageMaker")
        elif (name == "FI_PROVIDER" and value != "efa") or value in _HARMS_EFA.get(name, ()):
            yield rules.EFA_ENVIRONMENT.found(f"{where}={value[:40]}")
        elif name == "NCCL_NET" and value.lower() == "socket":
            yield rules.EFA_ENVIRONMENT.found(f"{where}={value}")


def _tags(job: Job) -> Iterator[Finding]:
    if len(tags(job)) > MOST_TAGS:
        yield rules.TAGS.found(f"tags: {len(tags(job))} with ours, 50 are allowed")
    for key, value in settings_of(job).tags.items():
        where = f"tags.{key[:60]}"
        if key.lower().startswith("aws:"):
            yield rules.TAGS.found(f"{where}: keys that begin with aws: are AWS's own")
        elif key.lower().startswith("isthmus-"):
            yield rules.TAGS.found(f"{where}: keys that begin with isthmus- are isthmus' own")
        elif not 1 <= len(key) <= 128 or len(value) > 256:
            yield rules.TAGS.found(f"{where}: a key of {len(key)} and a value of {len(value)} characters")
        elif (bad := untaggable(key + value)) is not None:
            yield rules.TAGS.found(f"{where} has {bad!r}, which a tag may not hold")
