"""Reading a CreateTrainingJob request: the few questions that several parts ask of it."""

from __future__ import annotations

from typing import Any

LOCAL_STORAGE = frozenset(
    [
        "g4dn",
        "g5",
        "g6",
        "g6e",
        "g7",
        "g7e",
        "p3dn",
        "p4d",
        "p4de",
        "p5",
        "p5e",
        "p5en",
        "p6-b200",
        "p6-b300",
        "p6e-gb200",
        "r5d",
        "trn1",
        "trn1n",
        "trn2",
    ]
)
"""Families whose instances bring NVMe volumes of their own."""
GROUP = "homogeneousCluster"


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key prefix of s3://bucket/prefix."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key


def family(instance_type: str) -> str:
    """The middle of ml.p4d.24xlarge."""
    return instance_type.split(".")[1] if instance_type.count(".") >= 2 else instance_type


def wanted_types(request: dict[str, Any]) -> list[tuple[str, int]]:
    """Instance types and counts that would do, the preferred first. A group's type counts once for all its instances."""
    resources = request.get("ResourceConfig", {})
    if "InstancePreferences" in resources:
        count = resources.get("InstanceCount", 1)
        return [
            (one["InstanceType"], one.get("InstanceCount", count)) for one in resources["InstancePreferences"]
        ]
    if "InstanceGroups" in resources:
        # Heterogeneous clusters: one host each, of the first group's type where a single one is asked for.
        groups = resources["InstanceGroups"]
        return [(groups[0]["InstanceType"], sum(group["InstanceCount"] for group in groups))]
    return [(resources.get("InstanceType", ""), resources.get("InstanceCount", 0))]


def is_spot(request: dict[str, Any]) -> bool:
    """Whether it is a managed spot training job."""
    return bool(request.get("EnableManagedSpotTraining"))


def stopping(request: dict[str, Any], name: str) -> int | None:
    """A limit of StoppingCondition, with the service's default for the run time: one day."""
    value = request.get("StoppingCondition", {}).get(name)
    return 86400 if value is None and name == "MaxRuntimeInSeconds" else value


def input_mode(request: dict[str, Any], channel: dict[str, Any]) -> str:
    """File, FastFile or Pipe: the channel's own, else the job's."""
    return str(channel.get("InputMode") or request["AlgorithmSpecification"]["TrainingInputMode"])


def checkpoint_path(request: dict[str, Any]) -> str | None:
    """Where checkpoints lie in the container; None when the job mirrors none."""
    config = request.get("CheckpointConfig")
    return None if config is None else (config.get("LocalPath") or "/opt/ml/checkpoints").rstrip("/")
