"""Nodes for jobs: from the cluster's idle ones or from the region, within quota and capacity, in the order of submission."""

from __future__ import annotations

import time
from typing import Any

from isthmus.emulators.azureml.rules import RULES
from isthmus.emulators.azureml.world import Cluster, Job, World


def allocate(world: World, job: Job) -> float | None:
    """Takes a job's nodes, if they can be had now.

    Returns:
        1.0 where machines had to be started, 0.0 where idle ones did; None: not now, and the cluster says why.
    """
    if job.compute is None:
        if _over_quota(world, job, job.nodes) or _no_capacity(world, job, job.nodes):
            return None
        job.private["nodes_up"] = True
        return 1.0
    cluster = world.clusters.get(job.compute)
    if cluster is None:
        return None
    cluster.scale_down()
    if any(other.number < job.number and _waits_for(other, cluster) for other in world.jobs.values()):
        return None
    busy = sum(cluster.busy.values())
    if busy + job.nodes > cluster.max_nodes:
        return None
    fresh = max(0, job.nodes - cluster.idle)
    for over in (_over_quota(world, job, fresh), _no_capacity(world, job, fresh)):
        if over is not None:
            cluster.errors = [over]
            return None
    cluster.errors = []
    cluster.idle -= job.nodes - fresh
    cluster.busy[job.name] = job.nodes
    cluster.allocating = fresh > 0
    return 1.0 if fresh else 0.0


def release(world: World, job: Job, *, taken: int = 0) -> None:
    """Gives a job's nodes back; `taken` of them are no more (preempted, dead)."""
    with world.changed:
        job.private["nodes_up"] = False
        cluster = world.clusters.get(job.compute or "")
        if cluster is not None:
            count = cluster.busy.pop(job.name, 0)
            cluster.idle = min(cluster.idle + max(0, count - taken), cluster.max_nodes)
            cluster.idle_since = time.monotonic()
            cluster.allocating = False
        world.changed.notify_all()


def _waits_for(job: Job, cluster: Cluster) -> bool:
    return job.compute == cluster.name and job.status in ("NotStarted", "Queued")


def _over_quota(world: World, job: Job, fresh: int) -> dict[str, Any] | None:
    limit = world.quota_for(job.sku, low_priority=job.low_priority)
    used = world.cores_in_use(job.sku.family, low_priority=job.low_priority)
    wanted = fresh * job.sku.vcpus
    if used + wanted <= limit:
        return None
    return _error(
        "quota-nodes",
        f"Operation results in exceeding quota limits of Core. Maximum allowed: {limit}, Current in use: {used}, "
        f"Additional requested: {wanted}.",
    )


def _no_capacity(world: World, job: Job, fresh: int) -> dict[str, Any] | None:
    free = world.capacity[job.sku.name] - world.nodes_in_use(job.sku)
    if fresh <= free:
        return None
    return _error(
        "capacity", f"Allocation failed: {fresh} of {job.sku.name} are wanted, {max(0, free)} can be had."
    )


def _error(rule: str, message: str) -> dict[str, Any]:
    return {"error": {"code": RULES[rule].code, "message": message, "details": []}}
