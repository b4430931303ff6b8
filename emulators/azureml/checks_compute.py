"""What the service checks before it makes or changes a cluster."""

from __future__ import annotations

import re
import uuid
from typing import Any

from isthmus.emulators.azureml.durations import seconds_of
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.skus import SKUS, Sku
from isthmus.emulators.azureml.world import Cluster, World

MAX_NODES = 100
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]{1,31}")
_PRIORITIES = ("Dedicated", "LowPriority")


def cluster_of(name: str, body: Any, world: World) -> Cluster:
    """The cluster that a PUT asks for.

    Raises:
        Refused: by a rule named compute-... or quota-...
    """
    if not _NAME.fullmatch(name):
        raise refuse("compute-name", f"Compute name {name!r} is invalid")
    properties = body.get("properties") if isinstance(body, dict) else None
    if not isinstance(properties, dict) or not isinstance(properties.get("properties"), dict):
        raise refuse("body", "properties.properties is required")
    if properties.get("computeType") != "AmlCompute":
        raise refuse("compute-type", f"computeType {properties.get('computeType')!r} is not AmlCompute")
    inner = properties["properties"]
    region = (
        str(properties.get("computeLocation") or body.get("location") or world.region)
        .lower()
        .replace(" ", "")
    )
    sku = _sku(inner.get("vmSize"), region, world)
    priority = inner.get("vmPriority") or "Dedicated"
    if priority not in _PRIORITIES:
        raise refuse("compute-priority", f"vmPriority {priority!r} is not one of {', '.join(_PRIORITIES)}")
    low = priority == "LowPriority"
    if low and not sku.low_priority:
        raise refuse("compute-sku-low-priority", f"VM size {sku.name} cannot be low priority")
    least, most, idle = _scale(inner.get("scaleSettings") or {}, sku)
    _check_quota(sku, world, low=low)
    cluster = Cluster(
        name=name,
        body=body,
        sku=sku,
        low_priority=low,
        min_nodes=least,
        max_nodes=most,
        idle_seconds=idle,
        location=region,
        identity=_with_ids(body.get("identity")),
        idle=least,
    )
    before = world.clusters.get(name)
    if before is not None:
        if (before.sku, before.low_priority, before.location) != (sku, low, region):
            raise refuse("compute-change", f"VM size, priority and location of {name} cannot be changed")
        cluster.busy, cluster.preempted = before.busy, before.preempted
        cluster.idle = max(before.idle, least - sum(before.busy.values()))
    return cluster


def _sku(size: Any, region: str, world: World) -> Sku:
    if not isinstance(size, str) or size.lower() not in SKUS:
        raise refuse("compute-sku-unknown", f"VM size {size!r} does not exist")
    sku = world.sku(size, region)
    if sku is None:
        raise refuse("compute-sku-region", f"VM size {size} is not supported in region {region}")
    return sku


def _scale(scale: dict[str, Any], sku: Sku) -> tuple[int, int, float]:
    least: Any = scale.get("minNodeCount") or 0
    most: Any = scale.get("maxNodeCount")
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (least, most))
    if not whole or not 0 <= least <= most or most < 1:
        raise refuse("compute-scale", f"scaleSettings from {least!r} to {most!r} nodes are invalid")
    idle = seconds_of(scale.get("nodeIdleTimeBeforeScaleDown") or "PT120S")
    if idle is None:
        raise refuse("compute-scale", "nodeIdleTimeBeforeScaleDown is not an ISO 8601 duration")
    if most > MAX_NODES:
        rule = "compute-rdma-nodes" if sku.rdma else "compute-nodes"
        raise refuse(rule, f"maxNodeCount {most} is over the limit of {MAX_NODES} nodes for {sku.name}")
    return least, most, idle


def _check_quota(sku: Sku, world: World, *, low: bool) -> None:
    quota = world.quota_for(sku, low_priority=low)
    if quota >= sku.vcpus:
        return
    pool = "total Low Priority vCPU" if low else f"{sku.family} vCPU"
    raise refuse(
        "quota-low-priority" if low else "quota-family",
        f"The specified subscription has a {pool} quota of {quota} and is insufficient for at least 1 requested managed "
        f"compute node which maps to {sku.vcpus} vCPUs",
    )


def _with_ids(identity: Any) -> dict[str, Any] | None:
    """The identity with what Azure fills in: principal and client ids."""
    if not isinstance(identity, dict) or identity.get("type") in (None, "None"):
        return None
    kind = str(identity["type"])
    # Written UserAssigned, SystemAssigned or both with a comma; older clients use the first letter in lower case.
    filled: dict[str, Any] = {
        "type": ",".join(part.strip()[:1].upper() + part.strip()[1:] for part in kind.split(","))
    }
    if "SystemAssigned" in filled["type"]:
        filled["principalId"] = filled["tenantId"] = str(uuid.uuid4())
    users = identity.get("userAssignedIdentities") or {}
    if users:
        filled["userAssignedIdentities"] = {key: identity_ids(key) for key in users}
    return filled


def identity_ids(resource_id: str) -> dict[str, str]:
    """Client and principal id of a user-assigned identity, the same for the same resource."""
    return {
        kind: str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind} {resource_id.lower()}"))
        for kind in ("clientId", "principalId")
    }
