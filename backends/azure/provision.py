"""Clusters and environments that a job names: checked, and created where the settings ask for it. Scale to zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isthmus.backends.azure.target import Target, settings_of
from isthmus.backends.spec import Job
from isthmus.errors import PreflightRefused, UsageError

if TYPE_CHECKING:
    from isthmus.backends.azure.client import AzureClient


def cluster_definition(job: Job, target: Target) -> dict[str, Any]:
    """The AmlCompute cluster of a job, JSON-able: what `ensure_compute` creates when it is not there."""
    cluster = settings_of(job).cluster
    assert target.compute is not None
    return {
        "name": target.compute,
        "size": target.sku.name,
        "tier": "low_priority" if target.interruptible else "dedicated",
        "min_nodes": cluster.min_nodes,
        "max_nodes": cluster.max_nodes or job.recipe.compute.nodes,
        "idle": int(cluster.idle),
        "region": target.region,
        "identity": cluster.identity,
        "subnet": cluster.subnet,
        "ssh": cluster.ssh,
        "nodes": job.recipe.compute.nodes,
    }


def misfits(found: Any, wanted: Mapping[str, Any]) -> list[str]:
    """What a cluster that is there cannot do for the job, in words.

    Args:
        found: the SDK's compute entity.
        wanted: a `cluster_definition`.
    """
    wrong = []
    kind = str(getattr(found, "type", "") or "").lower()
    if kind not in ("amlcompute", ""):
        return [f"is a {kind}, not an AmlCompute cluster"]
    size = str(found.size or "")
    if size.lower() != str(wanted["size"]).lower():
        wrong.append(f"has {size}, the recipe needs {wanted['size']}")
    tier = str(found.tier or "dedicated").replace("_", "").lower()
    if tier != str(wanted["tier"]).replace("_", ""):
        wrong.append(f"is {'low priority' if tier == 'lowpriority' else tier}, the offer is {wanted['tier']}")
    if int(found.max_instances or 0) < int(wanted["nodes"]):
        wrong.append(f"grows to {found.max_instances} nodes, the recipe needs {wanted['nodes']}")
    return wrong


def ensure_compute(client: AzureClient, definition: Mapping[str, Any]) -> bool:
    """Creates the cluster when it is not there; True when it was created.

    Raises:
        PreflightRefused: what is there does not fit: another size, tier, or too few nodes.
        IsthmusError: the service refuses; no quota and no such size here are PreflightRefused, too.
    """
    found = client.compute(str(definition["name"]))
    if found is not None:
        wrong = misfits(found, definition)
        if wrong:
            raise PreflightRefused(
                "; ".join(wrong),
                where=f"cluster {definition['name']}",
                hint="name another backends.azure.compute (spot_compute for low priority), or change the cluster",
            )
        return False
    client.create_compute(definition)
    return True


def ensure_environment(client: AzureClient, definition: str) -> None:
    """Registers the environment of an `environment.json`, when it is not there.

    Raises:
        UsageError: its build folder is not on this machine, and was never uploaded.
    """
    known: dict[str, Any] = json.loads(definition)
    if client.environment(known["name"], known["version"]) is not None:
        return
    if "build" in known:
        from pathlib import Path

        folder = Path(known["build"]["path"]).expanduser()
        if not folder.is_dir():
            raise UsageError(
                "no such folder", where=f"backends.azure.environment.build.path {known['build']['path']}"
            )
    client.create_environment(known)
