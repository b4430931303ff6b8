"""The emulator as tests and the rehearsal use it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isthmus.emulators.azureml.api_assets import AssetsApi
from isthmus.emulators.azureml.api_computes import ComputesApi
from isthmus.emulators.azureml.api_jobs import JobsApi
from isthmus.emulators.azureml.api_workspace import WorkspaceApi
from isthmus.emulators.azureml.blobs import ARTIFACTS, Blobs, Place
from isthmus.emulators.azureml.checks_compute import cluster_of
from isthmus.emulators.azureml.data import mounts_lack
from isthmus.emulators.azureml.faults import Drop, Faults
from isthmus.emulators.azureml.identity import Identity, Tokens
from isthmus.emulators.azureml.keeper import Keepers, Options
from isthmus.emulators.azureml.nodes import Host, Privileges, choose
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.tls import make_certificate, server_context
from isthmus.emulators.azureml.web import Request, Response, Seen, Server, route
from isthmus.emulators.azureml.world import Job, Numbers, World
from isthmus.emulators.image import Image
from isthmus.errors import UsageError

SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
DATASTORES = ("workspaceblobstore", "workspaceartifactstore")


class AzureMLEmulator:
    """An Azure ML workspace on this machine, with its storage account, from construction to `close`.

    Args:
        folder: for its storage and its jobs; created where it is not there.
        images: what stands for a container image, by the environment's image; "*" for every other one.
        privileges: nodes as "namespaces" (root) or "processes"; "auto" takes what works, `privileges` says which.
        port: of the HTTPS server; 0 takes a free one.
        region: the workspace's.
        grace: seconds from a preemption's warning (SIGTERM) to SIGKILL; Azure gives 30.
        cancel_grace: seconds from a cancellation's SIGTERM to SIGKILL.
        start_delay: seconds until machines that have to be started are there.
        on_preemption: "fail" (what users report) or "requeue" (what the documentation says): the same job starts again.
        on_lost_node: how a job ends whose node died: "fail", or "not-responding" for ever.
        heartbeat: seconds until the service misses a dead node.
        token_seconds: how long tokens are good; also the attribute `tokens.lifetime`.
        page: jobs in one page of a list.

    Grace, delays and what follows a preemption can be changed later: `options`.

    Raises:
        UsageError: Azurite is missing, the folder's path has blanks, or namespaces are asked for and cannot be made.
        NotInstalled: a Python package is missing.
        StorageError: Azurite does not start.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        images: Mapping[str, Image] | None = None,
        privileges: Privileges = "auto",
        port: int = 0,
        region: str = "eastus",
        subscription: str = SUBSCRIPTION,
        resource_group: str = "isthmus",
        workspace: str = "isthmus",
        grace: float = 30.0,
        cancel_grace: float = 10.0,
        start_delay: float = 0.0,
        on_preemption: Literal["fail", "requeue"] = "fail",
        on_lost_node: Literal["fail", "not-responding"] = "fail",
        heartbeat: float = 1.0,
        token_seconds: float = 3600.0,
        page: int = 20,
    ) -> None:
        self.folder = Path(folder).absolute()
        if any(character.isspace() for character in str(self.folder)):
            raise UsageError("the emulator's folder has a blank in its path", where=str(self.folder))
        self.privileges = choose(privileges)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.world = World(subscription, resource_group, workspace, region)
        self.tokens, self.faults = Tokens(lifetime=token_seconds), Faults()
        with contextlib.ExitStack() as stack:
            chain, self.bundle = make_certificate(self.folder)
            self.blobs = Blobs(self.folder / "azurite")
            stack.callback(self.blobs.stop)
            self._datastores()
            # Tokens are asked for over plain HTTP, on loopback, as in Azure.
            secrets = Server(self._token_routes(), tokens=self.tokens, faults=self.faults)
            stack.callback(secrets.stop)
            server = Server([], port=port, tokens=self.tokens, faults=self.faults, tls=server_context(chain))
            stack.callback(server.stop)
            self.options = Options(
                folder=self.folder,
                images=images or {"*": Image()},
                isolated=self.privileges == "namespaces",
                grace=grace,
                cancel_grace=cancel_grace,
                start_delay=start_delay,
                on_preemption=on_preemption,
                on_lost_node=on_lost_node,
                heartbeat=heartbeat,
                address=secrets.address,
                ports=(self.blobs.port, secrets.port, server.port),
            )
            self.keepers = Keepers(self.world, self.blobs, self.tokens, self.options)
            stack.callback(self.keepers.stop)
            server.routes += [
                *WorkspaceApi(self.world, self.tokens).routes(),
                *ComputesApi(self.world).routes(),
                *AssetsApi(self.world, self.blobs).routes(),
                *(jobs := JobsApi(self.world, self.blobs, self.keepers, page=page)).routes(),
                route("emulator", "POST", "/emulator/{verb}", self._control, open=True),
            ]
            self._jobs_api = jobs
            self._server, self._secrets = server, secrets
            self._client_secret = self.tokens.register(Identity("the-client", any_client_id=True))
            self._stack = stack.pop_all()

    def __enter__(self) -> AzureMLEmulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the jobs, ends the servers and Azurite, unmounts. What is stored stays in the folder."""
        self._stack.close()

    def _datastores(self) -> None:
        containers = (f"azureml-blobstore-{self.world.workspace_id}", ARTIFACTS)
        for name, container in zip(DATASTORES, containers, strict=True):
            self.blobs.container(container)
            self.world.datastores[name] = container

    def _token_routes(self) -> list[Any]:
        return [r for r in WorkspaceApi(self.world, self.tokens).routes() if r.operation == "token.get"]

    @property
    def note(self) -> str:
        """What is less like the service than it could be, for lack of privileges or programs; empty: nothing."""
        lacks = []
        if self.privileges == "processes":
            lacks.append("nodes are plain processes with loopback addresses (namespaces need root)")
        if why := mounts_lack():
            lacks.append(f"mounts are read-only copies ({why})")
        return "; ".join(lacks)

    # -- for clients

    @property
    def address(self) -> str:
        """Of Azure Resource Manager and the workspace's services."""
        return self._server.address

    def environment(self) -> dict[str, str]:
        """What a client process needs in os.environ; before it imports azure.ai.ml."""
        return {
            "AZUREML_DEV_URL_MFE": self.address,
            "REQUESTS_CA_BUNDLE": str(self.bundle),
            "AZURE_SUBSCRIPTION_ID": self.world.subscription,
            "AZUREML_RESOURCE_GROUP": self.world.resource_group,
            "AZUREML_WORKSPACE": self.world.workspace,
            "IDENTITY_ENDPOINT": f"{self._secrets.address}/msi/token",
            "IDENTITY_HEADER": self._client_secret,
            "AZURE_STORAGE_CONNECTION_STRING": self.blobs.connection_string,
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def container_uri(self, name: str, path: str = "") -> str:
        """az://... of a container of the account, which is created where it is not there."""
        self.blobs.container(name)
        return f"az://{name}@{self.blobs.client.account_name}.blob.core.windows.net/{path}"

    def add_datastore(self, name: str, container: str) -> None:
        """Registers a container of the account as a datastore."""
        self.blobs.container(container)
        self.world.datastores[name] = container

    def add_compute(
        self, name: str, size: str, *, nodes: int, low_priority: bool = False, identity: bool = True
    ) -> None:
        """A cluster, without a client: from 0 to `nodes`, with a system-assigned identity or none.

        Raises:
            Refused: the service would not make it.
        """
        scale = {"minNodeCount": 0, "maxNodeCount": nodes, "nodeIdleTimeBeforeScaleDown": "PT120S"}
        priority = "LowPriority" if low_priority else "Dedicated"
        properties = {"vmSize": size, "vmPriority": priority, "scaleSettings": scale}
        body: dict[str, Any] = {"properties": {"computeType": "AmlCompute", "properties": properties}}
        if identity:
            body["identity"] = {"type": "SystemAssigned"}
        with self.world.changed:
            self.world.clusters[name] = cluster_of(name, body, self.world)

    def add_environment(self, name: str, version: str, image: str) -> None:
        """An environment of an image, without a client."""
        self.world.environments[name, version] = {"properties": {"image": image, "osType": "Linux"}}

    # -- for tests

    @property
    def quota(self) -> Numbers:
        """vCPUs by family, as vmSizes names it; "LowPriority" for the pool of all low-priority nodes. To be set."""
        return self.world.quota

    @property
    def capacity(self) -> Numbers:
        """Nodes that the region has, by VM size. To be set."""
        return self.world.capacity

    @property
    def offered(self) -> dict[str, set[str]]:
        """Regions that offer a VM size, by its name in lower case. To be changed."""
        return self.world.offered

    @property
    def requests(self) -> list[Seen]:
        """What the HTTPS server was asked."""
        return self._server.seen

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs as the service shows them, in the order of submission."""
        with self.world.changed:
            return [self._jobs_api.describe(job) for job in self.world.jobs.values()]

    def job(self, name: str) -> Job:
        """All that the service knows of a job.

        Raises:
            UsageError: it knows none of that name.
        """
        found = self.world.jobs.get(name)
        if found is None:
            known = ", ".join(self.world.jobs) or "none"
            raise UsageError("there is no such job", where=name, hint=f"known: {known}")
        return found

    def state(self, job: str) -> str:
        """Its status, as Azure ML writes it."""
        return self.job(job).status

    def wait(self, job: str, *states: str, timeout: float = 120) -> str:
        """Returns when the job is in one of the states (or has ended); the status it then has.

        Raises:
            UsageError: it is not in time.
        """
        found = self.job(job)
        deadline = time.monotonic() + timeout
        with self.world.changed:
            while found.status not in states and not found.over:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise UsageError(f"still {found.status} after {timeout:g} s", where=job)
                self.world.changed.wait(min(left, 0.5))
        return found.status

    def hosts(self, job: str) -> list[Host]:
        """Its nodes with the ids of their processes on this machine; none while it does not run."""
        return self.keepers.hosts(self.job(job))

    def log(self, job: str, name: str) -> str:
        """A log of a job as the store has it, such as user_logs/std_log_process_0.txt; empty where there is none."""
        place = Place(ARTIFACTS, f"ExperimentRun/dcid.{job}/{name}")
        if not self.blobs.is_blob(place):
            return ""
        data: bytes = self.blobs.client.get_blob_client(*place).download_blob().readall()
        return data.decode(errors="replace")

    def evict(self, job: str, node: int | None = None) -> None:
        """Takes a running job's nodes (or one) back: SIGTERM, the grace, SIGKILL, then what `on_preemption` says.

        Raises:
            UsageError: its nodes are dedicated, or it does not run.
        """
        if not self.job(job).low_priority:
            hint = "kill_node is what happens to dedicated ones"
            raise UsageError(
                "its nodes are dedicated: the service does not take them back", where=job, hint=hint
            )
        self._demand(job, "evict", node)

    def kill_node(self, job: str, node: int) -> None:
        """A machine that dies: SIGKILL of everything on it, at once.

        Raises:
            UsageError: the job does not run, or has no such node.
        """
        self._demand(job, "kill", node)

    def _demand(self, job: str, what: Literal["evict", "kill"], node: int | None) -> None:
        found = self.job(job)
        nodes = len(self.hosts(job))
        if found.status != "Running" or not nodes:
            raise UsageError(f"it is {found.status}, so it has no node that could go", where=job)
        if node is not None and not 0 <= node < nodes:
            raise UsageError(f"it has no node {node}", where=job, hint=f"its nodes are 0 to {nodes - 1}")
        self.keepers.demand(found, what, node)

    def fail_next(
        self, operation: str, kind: int | Drop, times: int = 1, *, retry_after: float | None = None
    ) -> None:
        """The next requests of an operation fail; see `Faults.add`. Names: the `operation` of what `requests` lists."""
        self.faults.add(operation, kind, times, retry_after=retry_after)

    def _control(self, request: Request) -> Response:
        """POST /emulator/<verb>: the same for another process."""
        verb, given = request.names["verb"], request.body or {}
        try:
            if verb == "evict":
                self.evict(given["job"])
            elif verb == "kill-node":
                self.kill_node(given["job"], int(given["node"]))
            elif verb == "fail-next":
                self.fail_next(given["operation"], given["how"], int(given.get("times", 1)))
            elif verb in ("quota", "capacity"):
                numbers = self.quota if verb == "quota" else self.capacity
                numbers[given["name"]] = int(given["value"])
            elif verb == "expire-tokens":
                self.expire_tokens()
            elif verb != "state":
                raise UsageError("there is no such verb", where=verb)
            return Response(200, {"state": self.state(given["job"])} if "job" in given else {})
        except (UsageError, KeyError) as error:
            raise refuse("body", str(error)) from None

    def expire_tokens(self) -> None:
        """All tokens given out so far are refused with 401 from now on."""
        self.tokens.expire_all()
