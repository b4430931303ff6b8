"""The /opt/ml tree of a host: configuration files, channels, and what the container is started with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.emulators.sagemaker.bucket import download, placed
from isthmus.emulators.sagemaker.requests import GROUP, checkpoint_path, input_mode, split_uri

ML = "/opt/ml"
# Data in these is downloaded once a job starts; the rest is listed and streamed.
RCLONE = [
    "rclone",
    "mount",
    "--config",
    "/dev/null",
    "--read-only",
    "--allow-other",
    "--vfs-cache-mode",
    "off",
    "--dir-cache-time",
    "1h",
    "--poll-interval",
    "0",
    "--attr-timeout",
    "1h",
    "--no-modtime",
    "--vfs-read-chunk-size",
    "8M",
    "--vfs-read-chunk-size-limit",
    "64M",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host's folders on this machine."""

    root: Path

    @property
    def ml(self) -> Path:
        """What the container sees as /opt/ml."""
        return self.root / "ml"

    @property
    def failure(self) -> Path:
        """Where the container says why it failed."""
        return self.ml / "output" / "failure"

    def checkpoints(self, request: dict[str, Any]) -> Path | None:
        """What the container sees as CheckpointConfig.LocalPath; None when there is none."""
        path = checkpoint_path(request)
        if path is None:
            return None
        inside = path.removeprefix(f"{ML}/")
        return self.ml / inside if inside != path else self.root / "checkpoints"


def resource_config(
    request: dict[str, Any], hosts: Sequence[str], index: int, kind: str, link: str
) -> dict[str, Any]:
    """resourceconfig.json."""
    groups = request["ResourceConfig"].get("InstanceGroups")
    if not groups:
        groups = [{"InstanceGroupName": GROUP, "InstanceType": kind, "InstanceCount": len(hosts)}]
    told, start, mine = [], 0, ("", "")
    for group in groups:
        end = start + group["InstanceCount"]
        told.append(
            {
                "instance_group_name": group["InstanceGroupName"],
                "instance_type": group["InstanceType"],
                "hosts": list(hosts[start:end]),
            }
        )
        if start <= index < end:
            mine = (group["InstanceGroupName"], group["InstanceType"])
        start = end
    return {
        "current_host": hosts[index],
        "current_instance_type": mine[1],
        "current_group_name": mine[0],
        "hosts": list(hosts),
        "instance_groups": told,
        "network_interface_name": link,
    }


def lay_out(place: Place, request: dict[str, Any], resources: dict[str, Any]) -> None:
    """Makes a host's tree, without the data."""
    for folder in ("input/config", "input/data", "model", "output/data", "code"):
        (place.ml / folder).mkdir(parents=True)
    checkpoints = place.checkpoints(request)
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": input_mode(request, channel),
            "S3DistributionType": channel["DataSource"]
            .get("S3DataSource", {})
            .get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
            **({"ContentType": channel["ContentType"]} if channel.get("ContentType") else {}),
        }
        for channel in request.get("InputDataConfig", [])
    }
    config = place.ml / "input" / "config"
    hyperparameters = request.get("HyperParameters", {})
    for name, content in (
        ("resourceconfig", resources),
        ("hyperparameters", hyperparameters),
        ("inputdataconfig", channels),
    ):
        (config / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def objects(client: Any, channel: dict[str, Any], index: int, count: int) -> list[tuple[str, str, str]]:
    """What a host gets of a channel: bucket, key and place below the channel's folder."""
    source = channel["DataSource"]["S3DataSource"]
    if source["S3DataType"] == "ManifestFile":
        bucket, key = split_uri(source["S3Uri"])
        first, *rest = json.loads(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        bucket, prefix = split_uri(first["prefix"])
        found = [(bucket, f"{prefix}{name}", str(name)) for name in rest]
    else:
        found = sorted(placed(client, source["S3Uri"]), key=lambda one: one[1])
    sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
    return found[index::count] if sharded else found


def needs_copy(channel: dict[str, Any], found: list[tuple[str, str, str]]) -> bool:
    """Whether a FastFile channel cannot be mounted as one folder: sharded, or a prefix that siblings share."""
    source = channel["DataSource"]["S3DataSource"]
    _, prefix = split_uri(source["S3Uri"])
    folder = prefix if prefix.endswith("/") or not prefix else f"{prefix}/"
    if source.get("S3DataDistributionType") == "ShardedByS3Key":
        return True
    return any(not key.startswith(folder) for _, key, _ in found)


def mount_command(uri: str, endpoint: str, keys: tuple[str, str], region: str) -> list[str]:
    """A read-only FUSE mount of an S3 prefix: to the container what Fast file mode is."""
    bucket, prefix = split_uri(uri)
    remote = (
        f":s3,provider=Other,access_key_id={keys[0]},secret_access_key={keys[1]},endpoint='{endpoint}',"
        f"region={region},force_path_style=true:{bucket}/{prefix.rstrip('/')}"
    )
    return [*RCLONE, remote, "{target}"]


def copy_read_only(client: Any, found: list[tuple[str, str, str]], folder: Path) -> None:
    """Stands for a mount where none can be made: a copy that nobody should write to."""
    download(client, found, folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)


def rewritten(text: str, ml: Path) -> str:
    """For hosts without mounts: a text in which /opt/ml is where the tree really lies."""
    return text.replace(ML, str(ml))
