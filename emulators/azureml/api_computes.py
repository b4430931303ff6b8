"""Clusters: made, changed, listed, their nodes."""

from __future__ import annotations

import builtins
from typing import Any

from isthmus.emulators.azureml.api_workspace import PROVIDER, TYPE, WORKSPACE, check_place
from isthmus.emulators.azureml.checks_compute import cluster_of
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.web import Request, Response, Route, route
from isthmus.emulators.azureml.world import Cluster, World


class ComputesApi:
    """Operations on AmlCompute."""

    def __init__(self, world: World) -> None:
        self.world = world

    def routes(self) -> list[Route]:
        """What it serves."""
        one = WORKSPACE + "/computes/{name}"
        operation = (
            "/subscriptions/{subscription}" + PROVIDER + "/locations/{region}/computeOperationsStatus/{id}"
        )
        return [
            route("computes.list", "GET", WORKSPACE + "/computes", self.list),
            route("computes.get", "GET", one, self.get),
            route("computes.put", "PUT", one, self.put),
            route("computes.patch", "PATCH", one, self.patch),
            route("computes.delete", "DELETE", one, self.delete),
            route("computes.nodes", "POST", one + "/listNodes", self.nodes),
            route("computes.operation", "GET", operation, self.operation),
        ]

    def _find(self, request: Request) -> Cluster:
        check_place(request, self.world)
        cluster = self.world.clusters.get(request.names["name"])
        if cluster is None:
            raise refuse("not-found", f"Could not find compute {request.names['name']}")
        cluster.scale_down()
        return cluster

    def describe(self, cluster: Cluster) -> dict[str, Any]:
        """A cluster as the service shows it."""
        given = cluster.body["properties"]
        running = sum(cluster.busy.values())
        inner = {
            **given["properties"],
            "vmSize": cluster.sku.name.upper(),
            "vmPriority": "LowPriority" if cluster.low_priority else "Dedicated",
            "osType": "Linux",
            "scaleSettings": {
                "minNodeCount": cluster.min_nodes,
                "maxNodeCount": cluster.max_nodes,
                "nodeIdleTimeBeforeScaleDown": f"PT{cluster.idle_seconds:g}S",
            },
            "allocationState": "Resizing" if cluster.allocating else "Steady",
            "currentNodeCount": cluster.up,
            "targetNodeCount": cluster.up,
            "nodeStateCounts": {
                "idleNodeCount": cluster.idle,
                "runningNodeCount": running,
                "preparingNodeCount": 0,
                "unusableNodeCount": 0,
                "leavingNodeCount": 0,
                "preemptedNodeCount": cluster.preempted,
            },
            "errors": cluster.errors or None,
        }
        body = {
            "id": f"{self.world.path}/computes/{cluster.name}",
            "name": cluster.name,
            "type": f"{TYPE}/workspaces/computes",
            "location": cluster.location,
            "tags": cluster.body.get("tags") or {},
            "properties": {
                **given,
                "computeLocation": cluster.location,
                "provisioningState": "Succeeded",
                "provisioningErrors": None,
                "properties": inner,
            },
        }
        if cluster.identity:
            body["identity"] = cluster.identity
        return body

    def list(self, request: Request) -> Response:
        """All clusters."""
        check_place(request, self.world)
        with self.world.changed:
            return Response(200, {"value": [self.describe(c) for c in self.world.clusters.values()]})

    def get(self, request: Request) -> Response:
        """One cluster."""
        with self.world.changed:
            return Response(200, self.describe(self._find(request)))

    def put(self, request: Request) -> Response:
        """Makes or changes a cluster; a long-running operation that ends at once."""
        check_place(request, self.world)
        name = request.names["name"]
        with self.world.changed:
            new = name not in self.world.clusters
            self.world.clusters[name] = cluster = cluster_of(name, request.body, self.world)
            self.world.changed.notify_all()
            body = self.describe(cluster)
        where = f"/subscriptions/{self.world.subscription}/providers/{TYPE}/locations/{self.world.region}"
        link = f"{request.base}{where}/computeOperationsStatus/{name}?api-version=2022-10-01-preview"
        return Response(201 if new else 200, body, {"Azure-AsyncOperation": link})

    def patch(self, request: Request) -> Response:
        """Changes the scale settings."""
        with self.world.changed:
            cluster = self._find(request)
            wanted = ((request.body or {}).get("properties") or {}).get("properties") or {}
            given = cluster.body["properties"]
            merged = {**given["properties"], "scaleSettings": wanted.get("scaleSettings")}
            body = {**cluster.body, "properties": {**given, "properties": merged}}
            self.world.clusters[cluster.name] = changed = cluster_of(cluster.name, body, self.world)
            self.world.changed.notify_all()
            return Response(200, self.describe(changed))

    def delete(self, request: Request) -> Response:
        """Takes a cluster away that runs nothing."""
        with self.world.changed:
            cluster = self._find(request)
            if cluster.busy:
                raise refuse("compute-change", f"Compute {cluster.name} runs jobs: {', '.join(cluster.busy)}")
            del self.world.clusters[cluster.name]
        return Response(200)

    def nodes(self, request: Request) -> Response:
        """The nodes that are up."""
        with self.world.changed:
            cluster = self._find(request)
            states: builtins.list[tuple[str, str | None]]
            states = [("running", job) for job, count in cluster.busy.items() for _ in range(count)]
            states += [("idle", None)] * cluster.idle
            nodes = [
                {
                    "nodeId": f"tvmps_{index:04d}_{'p' if cluster.low_priority else 'd'}",
                    "privateIpAddress": f"10.0.0.{4 + index % 250}",
                    "port": 50000 + index,
                    "nodeState": state,
                    "runId": job,
                }
                for index, (state, job) in enumerate(states)
            ]
        return Response(200, {"nodes": nodes})

    def operation(self, request: Request) -> Response:
        """How a long-running operation stands: done."""
        return Response(200, {"status": "Succeeded"})
