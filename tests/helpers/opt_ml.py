"""SageMaker containers that others lay out: AWS's training toolkit and the SDK's driver, on hosts that are namespaces."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

TOOLKIT = ("sagemaker-training==5.1.4", "sagemaker-pytorch-training==3.0.0")
DRIVER = "sagemaker-train==1.27.0"
"""Of SageMaker's SDK 3: its wheel alone holds the scripts that it sends into containers."""


def cache() -> Path:
    """Where what tests fetch is kept between runs."""
    return Path(os.environ.get("ISTHMUS_TEST_CACHE") or Path.home() / ".cache" / "isthmus-tests")


def _fetched(name: str, *command: str) -> Path:
    """A folder that pip filled; the test is skipped where it cannot."""
    folder = cache() / name
    stamp = folder / ".complete"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *command, str(folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"{name} cannot be fetched: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        stamp.touch()
    return folder


@functools.cache
def toolkit() -> Path:
    """Packages of AWS's training toolkit: what its PyTorch images start."""
    return _fetched("sagemaker-toolkit-5.1.4", "install", *TOOLKIT, "--target")


@functools.cache
def drivers() -> Path:
    """The SDK's folder `sagemaker/train` with templates.py and container_drivers."""
    folder = _fetched("sagemaker-train-1.27.0", "download", "--no-deps", DRIVER, "--dest")
    (wheel,) = folder.glob("*.whl")
    if not (folder / "sagemaker").exists():
        shutil.unpack_archive(wheel, folder, "zip")
    return folder / "sagemaker" / "train"


def lay_out(
    place: Path,
    host: str,
    hosts: Sequence[str],
    *,
    interface: str,
    channels: Mapping[str, Path],
    hyperparameters: Mapping[str, str],
) -> Path:
    """An /opt/ml tree as SageMaker makes it for one host."""
    tree = place / host
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
        (tree / folder).mkdir(parents=True)
    kind = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "ml.m5.xlarge",
        "hosts": list(hosts),
    }
    config = {
        "resourceconfig": {
            "current_host": host,
            "current_instance_type": "ml.m5.xlarge",
            "current_group_name": "homogeneousCluster",
            "hosts": sorted(hosts),
            "instance_groups": [kind],
            "network_interface_name": interface,
        },
        "inputdataconfig": {
            name: {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            for name in channels
        },
        "hyperparameters": dict(hyperparameters),  # all values are strings
    }
    for name, content in config.items():
        (tree / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    for name, source in channels.items():
        shutil.copytree(source, tree / "input" / "data" / name)
    return tree


def can_unshare() -> bool:
    """Whether this machine lets us make mounts and networks of our own."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, check=False)
    return tried.returncode == 0


def as_host(host: str, tree: Path, command: Sequence[str], namespace: str | None = None) -> list[str]:
    """The command as a container's: `tree` is its /opt/ml, `host` its name, `namespace` its network."""
    inside = 'hostname "$1"; mount -t tmpfs none /opt; mkdir /opt/ml; mount --bind "$2" /opt/ml; shift 2; exec "$@"'
    network = ["ip", "netns", "exec", namespace] if namespace else []
    unshared = ["unshare", "--mount", "--uts", "sh", "-ec", inside, "host", host, str(tree)]
    return [*network, *unshared, *command]


@contextlib.contextmanager
def network(count: int) -> Iterator[list[str]]:
    """Network namespaces of so many hosts `algo-1`, `algo-2`, ... on one bridge; their names."""
    prefix = f"itk{os.getpid() % 100000}"
    bridge, names = f"{prefix}b", [f"{prefix}-{number}" for number in range(1, count + 1)]
    table = "127.0.0.1 localhost\n" + "".join(f"10.214.7.{n} algo-{n}\n" for n in range(1, count + 1))

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(table)
            ip("link", "add", f"{prefix}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{prefix}v{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.214.7.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for number, name in enumerate(names, 1):
            ip("link", "del", f"{prefix}v{number}", check=False)
            ip("netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        ip("link", "del", bridge, check=False)
