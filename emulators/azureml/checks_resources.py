"""What the service checks of a job's machines: compute, count, distribution, limits, identity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from isthmus.emulators.azureml.durations import seconds_of
from isthmus.emulators.azureml.places import last_of
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.skus import Sku
from isthmus.emulators.azureml.world import World

DAY = 86_400
LIFETIME = {False: 21 * DAY, True: 7 * DAY}
"""Seconds that a job may live; on low priority less."""
TIERS = ("Null", "Spot", "Basic", "Standard", "Premium")
IDENTITIES = ("Managed", "AMLToken", "UserIdentity")


def compute_of(properties: Mapping[str, Any], world: World) -> tuple[str | None, Sku, bool, int]:
    """The cluster's name (None: serverless), its machines, whether they are low priority, and how many.

    Raises:
        Refused: the compute does not exist, or the machines are not those that the job names.
    """
    resources = properties.get("resources") or {}
    nodes = _count(resources.get("instanceCount", 1), "job-instances", "resources.instanceCount")
    _check_resources(resources)
    _check_distribution(properties.get("distribution"))
    compute, size = properties.get("computeId"), resources.get("instanceType")
    tier = (properties.get("queueSettings") or {}).get("jobTier")
    if tier is not None and tier not in TIERS:
        raise refuse("job-tier", f"queueSettings.jobTier {tier!r} is not one of {', '.join(TIERS)}")
    name = last_of(compute, "computes") if isinstance(compute, str) else None
    if name in (None, "", "serverless"):
        sku = world.sku(size, world.region) if isinstance(size, str) else None
        if sku is None:
            raise refuse(
                "serverless-instance-type", f"instance type {size!r} is not available in {world.region}"
            )
        low = tier == "Spot"
        quota = world.quota_for(sku, low_priority=low)
        if nodes * sku.vcpus > quota:
            raise refuse(
                "serverless-quota",
                f"{nodes} x {sku.name} need {nodes * sku.vcpus} vCPUs; the quota is {quota}",
            )
        return None, sku, low, nodes
    assert name is not None
    cluster = world.clusters.get(name)
    if cluster is None:
        raise refuse("job-compute", f"Unknown compute target '{name}'.")
    if tier not in (None, "Null"):
        raise refuse(
            "job-tier", "queueSettings.jobTier is for serverless compute; the priority is the cluster's"
        )
    if size and str(size).lower() != cluster.sku.key:
        raise refuse(
            "job-instance-type", f"instanceType {size} is not {cluster.sku.name}, the VM size of {name}"
        )
    if nodes > cluster.max_nodes:
        raise refuse(
            "job-instances",
            f"Requested {nodes} nodes but AzureMLCompute cluster only has {cluster.max_nodes} maximum nodes.",
        )
    return name, cluster.sku, cluster.low_priority, nodes


def _count(value: Any, rule: str, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(rule, f"{field} {value!r} is not a whole number from 1")
    return value


def _check_resources(resources: Mapping[str, Any]) -> None:
    shm = resources.get("shmSize")
    if shm is not None and not re.fullmatch(r"\d+[bBkKmMgG]", str(shm)):
        raise refuse("job-shm", f"resources.shmSize {shm!r} is not a number and one of b, k, m, g")
    if not isinstance(resources.get("dockerArgs", ""), str | None):
        raise refuse("job-docker-args", "resources.dockerArgs is not a string")


def _check_distribution(distribution: Any) -> None:
    if distribution is None:
        return
    kind = distribution.get("distributionType") if isinstance(distribution, dict) else None
    if kind != "PyTorch":
        raise refuse(
            "job-distribution", f"distributionType {kind!r} is not PyTorch (the emulator starts no other)"
        )
    count = distribution.get("processCountPerInstance")
    _count(1 if count is None else count, "job-distribution", "distribution.processCountPerInstance")


def limits_of(properties: Mapping[str, Any], *, low_priority: bool) -> float | None:
    """Seconds after which the job is cancelled, where it names any.

    Raises:
        Refused: no duration, or longer than a job may live.
    """
    text = (properties.get("limits") or {}).get("timeout")
    if text is None:
        return None
    seconds = seconds_of(text)
    if seconds is None or seconds < 1 or seconds != int(seconds):
        raise refuse("job-timeout", f"limits.timeout {text!r} is not an ISO 8601 duration of whole seconds")
    if seconds > LIFETIME[low_priority]:
        days = LIFETIME[low_priority] // DAY
        raise refuse(
            "job-lifetime", f"limits.timeout {text} is over the {days} days that a job may run on these nodes"
        )
    return seconds


def identity_of(properties: Mapping[str, Any], *, serverless: bool) -> dict[str, Any] | None:
    """The identity that the job asks for.

    Raises:
        Refused: of no known kind, or none that serverless compute knows.
    """
    identity = properties.get("identity")
    if identity is None:
        return None
    kind = identity.get("identityType") if isinstance(identity, dict) else None
    if kind not in IDENTITIES:
        raise refuse("job-identity", f"identityType {kind!r} is not one of {', '.join(IDENTITIES)}")
    named = any(identity.get(key) for key in ("clientId", "objectId", "resourceId"))
    if serverless and kind == "Managed" and not named:
        raise refuse(
            "serverless-identity", "System-assigned managed identity is not supported on serverless compute"
        )
    return dict(identity)
