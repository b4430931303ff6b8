"""A SageMaker training job: hosts and rank from `resourceconfig.json`, never from the host name.

Contract: the files below `/opt/ml/input/config`, as SageMaker documents them for training containers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.core.cluster.adapters import Cluster
from isthmus.errors import UsageError

GRACE = 120.0
"""Seconds that a stop or a spot interruption leaves."""
PORT = 29500


def base(environ: Mapping[str, str]) -> Path:
    """`/opt/ml`, or what SAGEMAKER_BASE_DIR says, as in AWS's own tools."""
    return Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def failure_file(environ: Mapping[str, str]) -> Path:
    """Its first 1024 characters become the job's FailureReason."""
    return base(environ) / "output" / "failure"


def cluster(nodes: int, environ: Mapping[str, str]) -> Cluster:
    """This host's place among the job's. Raises UsageError when there are others than the recipe asks for.

    MASTER_PORT names another port for the rendezvous, where several jobs share a machine.
    """
    path = base(environ) / "input" / "config" / "resourceconfig.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        hosts = tuple(str(host) for host in found["hosts"])
        rank = hosts.index(str(found["current_host"]))
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            hint="is this a SageMaker training container?",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"does not tell the hosts and this one: {error!r}", where=str(path)) from error
    if len(hosts) != nodes:
        raise UsageError(
            f"the job has {len(hosts)} hosts, the recipe asks for {nodes}",
            where=str(path),
            hint="compute.nodes is what the job must be submitted with",
        )
    interface = found.get("network_interface_name")
    return Cluster(
        hosts=hosts,
        node_rank=rank,
        master_addr=hosts[0] if nodes > 1 else "127.0.0.1",
        master_port=port_of(environ, PORT) if nodes > 1 else None,
        grace=GRACE,
        failure_file=failure_file(environ),
        interface=str(interface) if interface else None,
    )


def port_of(environ: Mapping[str, str], default: int) -> int:
    """MASTER_PORT. Raises UsageError when it is no port."""
    text = environ.get("MASTER_PORT") or str(default)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"{text!r} is no port", where="MASTER_PORT")
    return int(text)
