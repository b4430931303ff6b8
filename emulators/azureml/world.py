"""All that the emulated workspace holds, behind one lock."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from isthmus.emulators.azureml.skus import SKUS, Sku, offered_by_default

LOW_PRIORITY = "LowPriority"
"""Key of the quota of the one pool that low-priority nodes of all families share."""
DEFAULT_QUOTA = 19_200
"""vCPUs of each family: 200 nodes of 96. (A new subscription has 0 for GPUs.)"""
ENDED = frozenset({"Completed", "Failed", "Canceled", "NotResponding"})


class Numbers(MutableMapping[str, int]):
    """Numbers by name without regard to case, with a default for the rest."""

    def __init__(self, default: int) -> None:
        self.default = default
        self._values: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._values.get(name.lower(), self.default)

    def __setitem__(self, name: str, value: int) -> None:
        self._values[name.lower()] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass
class Cluster:
    """An AmlCompute. `busy` counts the nodes of each job, `idle` those that are up and wait, since when."""

    name: str
    body: dict[str, Any]
    sku: Sku
    low_priority: bool
    min_nodes: int
    max_nodes: int
    idle_seconds: float
    location: str
    identity: dict[str, Any] | None = None
    busy: dict[str, int] = field(default_factory=dict)
    idle: int = 0
    idle_since: float = 0.0
    preempted: int = 0
    allocating: bool = False
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def up(self) -> int:
        """Nodes that are there."""
        return sum(self.busy.values()) + self.idle

    def scale_down(self) -> None:
        """Lets idle nodes go whose time has come."""
        if self.idle and time.monotonic() - self.idle_since >= self.idle_seconds:
            self.idle = max(0, self.min_nodes - sum(self.busy.values()))


Demand = Literal["cancel", "evict", "kill", "timeout"]


@dataclass
class Job:
    """A job as the service knows it. `demands` are what its keeper shall do next."""

    name: str
    properties: dict[str, Any]
    low_priority: bool
    nodes: int
    compute: str | None
    """None: serverless."""
    sku: Sku
    created: str = field(default_factory=lambda: timestamp())
    status: str = "NotStarted"
    attempt: int = 0
    error: dict[str, Any] | None = None
    message: str | None = None
    started: str | None = None
    ended: str | None = None
    history: list[tuple[float, str]] = field(default_factory=list)
    demands: list[tuple[Demand, int | None]] = field(default_factory=list)
    log_files: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    number: int = 0
    private: dict[str, Any] = field(default_factory=dict)
    """The keeper's own: its hosts."""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ENDED


@dataclass
class World:
    """The workspace. Take `changed` before touching anything; it is notified at every change."""

    subscription: str
    resource_group: str
    workspace: str
    region: str
    clusters: dict[str, Cluster] = field(default_factory=dict)
    environments: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    codes: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    data: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    datastores: dict[str, str] = field(default_factory=dict)
    """Name -> container of the account."""
    jobs: dict[str, Job] = field(default_factory=dict)
    quota: Numbers = field(default_factory=lambda: Numbers(DEFAULT_QUOTA))
    capacity: Numbers = field(default_factory=lambda: Numbers(1_000_000))
    """Nodes of a VM size that the region has free."""
    offered: dict[str, set[str]] = field(default_factory=offered_by_default)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    @property
    def path(self) -> str:
        """The workspace's ARM id."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )

    @property
    def workspace_id(self) -> str:
        """The workspace's own id."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, self.path.lower()))

    def sku(self, name: str, region: str) -> Sku | None:
        """The VM size of that name, where the region offers it."""
        sku = SKUS.get(name.lower())
        return sku if sku is not None and region in self.offered.get(sku.key, ()) else None

    def cores_in_use(self, family: str, *, low_priority: bool) -> int:
        """vCPUs of running nodes: of a family, or of the whole low-priority pool."""
        count = 0
        for cluster in self.clusters.values():
            if cluster.low_priority == low_priority and (low_priority or cluster.sku.family == family):
                count += cluster.up * cluster.sku.vcpus
        for job in self.jobs.values():
            if job.compute is None and job.private.get("nodes_up") and job.low_priority == low_priority:
                count += job.nodes * job.sku.vcpus if low_priority or job.sku.family == family else 0
        return count

    def quota_for(self, sku: Sku, *, low_priority: bool) -> int:
        """vCPUs that nodes of that kind may use."""
        return self.quota[LOW_PRIORITY if low_priority else sku.family]

    def nodes_in_use(self, sku: Sku) -> int:
        """Running nodes of a VM size."""
        serverless = [j for j in self.jobs.values() if j.compute is None and j.private.get("nodes_up")]
        return sum(c.up for c in self.clusters.values() if c.sku == sku) + sum(
            j.nodes for j in serverless if j.sku == sku
        )

    def set_status(self, job: Job, status: str) -> None:
        """A job's new status, told to whoever waits."""
        with self.changed:
            job.status = status
            job.history.append((time.time(), status))
            if status == "Running" and job.started is None:
                job.started = timestamp()
            if job.over:
                job.ended = timestamp()
            self.changed.notify_all()


def timestamp(when: float | None = None) -> str:
    """Now, or seconds since 1970, as the service writes it."""
    moment = datetime.fromtimestamp(time.time() if when is None else when, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
