"""What an adapter tells the worker, and how one is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from isthmus.errors import UsageError

ADAPTERS = {
    "local": "isthmus.core.cluster.local:cluster",
    "azureml": "isthmus.core.cluster.azureml:cluster",
    "sagemaker": "isthmus.core.cluster.sagemaker:cluster",
}
"""Name -> import string; a third-party backend names its own as `module:function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """This node among the hosts of the job."""

    hosts: tuple[str, ...]
    """Names or addresses of all nodes, in rank order."""
    node_rank: int
    """This node's index in `hosts`."""
    master_addr: str
    """Address of node 0, as the others reach it."""
    master_port: int | None
    """Port of the rendezvous on node 0; None lets a single node choose a free one."""
    grace: float
    """Seconds between SIGTERM and SIGKILL that this container contract gives; the worker stays within."""
    failure_file: Path | None = None
    """Where the cloud reads the cause of a failure from, when it does."""
    interface: str | None = None
    """The network interface between the nodes, where the contract names it."""

    @property
    def nodes(self) -> int:
        """How many hosts."""
        return len(self.hosts)


class ClusterAdapter(Protocol):
    """Reads the container's own files and variables; no SDK, no network."""

    def __call__(self, nodes: int, environ: Mapping[str, str]) -> Cluster:
        """This node's place among the `nodes` that the recipe asks for. Raises UsageError when they disagree."""


def find_cluster(name: str) -> ClusterAdapter:
    """The adapter of that name, or of an import string `module:function`. Raises UsageError."""
    target = ADAPTERS.get(name, name)
    module, separator, attribute = target.partition(":")
    if not separator:
        raise UsageError(f"no cluster adapter {name!r}", hint=f"known: {', '.join(sorted(ADAPTERS))}")
    try:
        return cast(ClusterAdapter, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot load cluster adapter {name!r}: {error}") from error


def failure_file(name: str, environ: Mapping[str, str]) -> Path | None:
    """Where a cloud reads the cause from when its job did not come as far as a :class:`Cluster`; None where nowhere.

    An adapter whose cloud has such a place tells it by a function `failure_file` in its module.
    """
    module = ADAPTERS.get(name, name).partition(":")[0]
    try:
        found = getattr(importlib.import_module(module), "failure_file", None)
    except (ImportError, ValueError):
        return None
    return cast(Callable[[Mapping[str, str]], Path], found)(environ) if callable(found) else None
