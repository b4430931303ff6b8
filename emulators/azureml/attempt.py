"""One attempt of a job: its nodes from boot to burial, and how it ended."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isthmus.emulators.azureml.blobs import ARTIFACTS, Blobs, Place
from isthmus.emulators.azureml.checks_resources import limits_of
from isthmus.emulators.azureml.container import (
    Ports,
    environment,
    expand,
    install,
    log_name,
    processes_per_node,
)
from isthmus.emulators.azureml.data import JobData
from isthmus.emulators.azureml.identity import Identity, Tokens
from isthmus.emulators.azureml.logs import Shipping
from isthmus.emulators.azureml.nodes import Network, Node, Process, hosts_text, make_nodes
from isthmus.emulators.azureml.places import asset, find_place, in_registry
from isthmus.emulators.azureml.rules import RULES, refuse
from isthmus.emulators.azureml.world import Job, World
from isthmus.emulators.image import Image, find_image

if TYPE_CHECKING:
    from isthmus.emulators.azureml.keeper import Options

PREEMPTED = (
    "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run has failed or restarted. "
    "Reason: Received pre-emption warning signal"
)
LOG_S = 0.4
"""How often logs go to the store."""


class End(NamedTuple):
    """How an attempt ended."""

    status: str
    code: str | None = None
    message: str | None = None
    rule: str | None = None
    taken: int = 0
    """Nodes that are no more."""


@dataclass
class _Wanted:
    """What has been asked of a running attempt."""

    cancel: str | None = None
    """Why: the status's message, "" for a plain cancellation."""
    evicted: bool = False
    killed: bool = False
    failed: bool = False
    deadlines: dict[int, float] = field(default_factory=dict)
    """When nodes that were told to end are killed."""


class Attempt:
    """See the module. Used by its keeper's thread only, but for `nodes`."""

    def __init__(
        self,
        world: World,
        blobs: Blobs,
        tokens: Tokens,
        options: Options,
        job: Job,
        folder: Path,
        scratch: Path,
        shipping: Shipping,
    ) -> None:
        self.world, self.blobs, self.tokens, self.options, self.job = world, blobs, tokens, options, job
        self.folder, self.scratch, self.shipping = folder, scratch, shipping
        self.nodes: list[Node] = []
        self.data = JobData(world, blobs, job, folder, job.warnings.append)
        self._network: Network | None = None
        self._secret: str | None = None

    # -- before

    def prepare(self) -> None:
        """Image, code, inputs, nodes with their network.

        Raises:
            Refused: what the service finds missing only now.
            StorageError: a node does not come up.
        """
        job = self.job
        image = self._image()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._secret = self._identity()
        variables = install(image, self.folder / "bin")
        self.nodes, address, port = make_nodes(
            job.name, job.nodes, self.folder, isolated=self.options.isolated, changed=self._notify
        )
        hosts_file = self.folder / "hosts"
        hosts_file.write_text(hosts_text(self.nodes))
        code, inputs = self._code(), self.data.inputs()
        for node in self.nodes:
            work = node.folder / "wd"
            shutil.copytree(code, work) if code else work.mkdir(exist_ok=True)
            for name in ("wd/outputs", "wd/logs", "home"):
                (node.folder / name).mkdir(exist_ok=True)
            temporary = self.scratch / str(node.index)
            temporary.mkdir()
            if self.options.isolated:
                # Every node calls its folders by the same names, as in Azure.
                node.binds = {node.folder: node.inside, temporary: self.scratch / "tmp"}
                temporary = self.scratch / "tmp"
                temporary.mkdir(exist_ok=True)
            ports = Ports(inputs=inputs, outputs=self.data.output_paths(node.folder, node.inside))
            image_here = {**variables, "HOME": str(node.inside / "home"), "TMPDIR": str(temporary)}
            processes = [
                self._process(node, i, image_here, ports, (address, port)) for i in range(self._each)
            ]
            node.boot(processes, hosts_file)
        self._network = Network(self.nodes, self.options.ports, self.folder / "network.log")

    @property
    def _each(self) -> int:
        return processes_per_node(self.job)

    def _notify(self) -> None:
        with self.world.changed:
            self.world.changed.notify_all()

    def _image(self) -> Image:
        text = str(self.job.properties["environmentId"])
        name: str | None = in_registry(text)
        if name is None:
            found = asset(text, "environments")
            assert found is not None
            versions = [v for n, v in self.world.environments if n == found[0]]
            version = versions[-1] if found[1] == "@latest" else str(found[1])
            properties = self.world.environments[found[0], version]["properties"]
            name = properties.get("image") or str((properties.get("build") or {}).get("contextUri"))
        image = find_image(self.options.images, name)
        if image is None:
            raise refuse("image", f"Failed to pull Docker image {name}: not found")
        return image

    def _code(self) -> Path | None:
        text = self.job.properties.get("codeId")
        if text is None:
            return None
        found = asset(str(text), "codes")
        assert found is not None
        uri = self.world.codes[found[0], found[1] or ""]["properties"]["codeUri"]
        place = find_place(uri, self.world, endpoint=self.blobs.endpoint, rule="job-code")
        folder = self.folder / "code"
        folder.mkdir()
        if place is None or not self.blobs.download(place, folder):
            raise refuse("input-missing", f"The code snapshot {uri} was not found")
        return folder

    def _identity(self) -> str:
        """The secret with which the container asks for tokens."""
        wanted = self.job.properties.get("identity") or {}
        cluster = self.world.clusters.get(self.job.compute or "")
        kind = str((cluster.identity or {}).get("type", "")) if cluster else "UserAssigned"
        managed = wanted.get("identityType") == "Managed"
        if managed and not kind:
            raise refuse("identity-missing", f"The compute {self.job.compute} has no managed identity")
        system = "SystemAssigned" in kind
        who = Identity(
            f"identity-of-{self.job.compute or 'serverless'}",
            any_client_id="UserAssigned" in kind,
            needs_client_id=managed and not system,
        )
        return self.tokens.register(who)

    def _process(
        self, node: Node, local: int, image: Mapping[str, str], ports: Ports, master: tuple[str, int]
    ) -> Process:
        rank = node.index * self._each + local
        hosts = [other.address for other in self.nodes]
        service = environment(
            self.world, self.job, node=node.index, local_rank=local, master=master, hosts=hosts, ports=ports
        )
        variables = {
            **image,
            **(self.job.properties.get("environmentVariables") or {}),
            **service,
            "MSI_ENDPOINT": f"{self.options.address}/msi/token",
            "MSI_SECRET": self._secret or "",
            "DEFAULT_IDENTITY_CLIENT_ID": str(
                (self.job.properties.get("identity") or {}).get("clientId") or "clientid"
            ),
            # Emulation only: how the account is reached that in Azure the managed identity opens.
            "AZURE_STORAGE_CONNECTION_STRING": self.blobs.connection_string,
        }
        log = node.folder / f"std_log_{local}.txt"
        self.shipping.follow(log, log_name(self.job, rank))
        command = expand(str(self.job.properties["command"]), ports)
        return Process(["/bin/sh", "-c", command], variables, node.inside / "wd", log)

    # -- while

    def run(self, closing: threading.Event) -> End:
        """From the container's start to its end."""
        if any(what == "cancel" for what, _ in self.job.demands):
            return End("Canceled")
        wanted = _Wanted()
        limit = limits_of(self.job.properties, low_priority=self.job.low_priority)
        until = None if limit is None else time.monotonic() + limit
        for node in self.nodes:
            node.tell("start")
        last_log = 0.0
        while True:
            if closing.is_set():
                return End("Canceled")
            self._take_demands(wanted)
            if until is not None and time.monotonic() > until and wanted.cancel is None:
                wanted.cancel = (
                    f"The job was cancelled: it ran longer than limits.timeout, {limit:.0f} seconds."
                )
                self._end(wanted, self.options.cancel_grace)
            self._look(wanted)
            if all(node.done for node in self.nodes):
                break
            if time.monotonic() - last_log > LOG_S:
                self.shipping.send()
                last_log = time.monotonic()
            with self.world.changed:
                if not self.job.demands:
                    self.world.changed.wait(0.1)
        if wanted.killed:
            # The service learns of a dead node only when it misses it.
            closing.wait(self.options.heartbeat)
        return self._verdict(wanted)

    def _take_demands(self, wanted: _Wanted) -> None:
        with self.world.changed:
            demands, self.job.demands = self.job.demands, []
        for what, index in demands:
            chosen = self.nodes if index is None else [self.nodes[index]]
            if what == "cancel" and wanted.cancel is None:
                wanted.cancel = ""
                self._end(wanted, self.options.cancel_grace)
            elif what == "evict" and not wanted.evicted:
                wanted.evicted = True
                self._end(wanted, self.options.grace, chosen)
            elif what == "kill":
                wanted.killed = True
                for node in chosen:
                    node.kill()

    def _end(self, wanted: _Wanted, grace: float, nodes: list[Node] | None = None) -> None:
        """SIGTERM now, SIGKILL after the grace."""
        for node in self.nodes if nodes is None else nodes:
            if not node.done and node.index not in wanted.deadlines:
                node.tell("term")
                wanted.deadlines[node.index] = time.monotonic() + grace

    def _look(self, wanted: _Wanted) -> None:
        for index, deadline in wanted.deadlines.items():
            if time.monotonic() > deadline and not self.nodes[index].done:
                self.nodes[index].kill()
        broken = any(node.lost for node in self.nodes) or any(
            code != 0 for node in self.nodes for _, code in node.exits.values()
        )
        # A job lives and dies as a whole: what is left when one process has failed or one node has gone is ended.
        gone = wanted.evicted and any(self.nodes[index].done for index in wanted.deadlines)
        if (broken or gone) and not wanted.failed:
            wanted.failed = True
            self._end(wanted, self.options.cancel_grace)

    # -- after

    def _verdict(self, wanted: _Wanted) -> End:
        finished = all(
            len(node.exits) == node.count and all(code == 0 for _, code in node.exits.values())
            for node in self.nodes
        )
        if wanted.cancel is not None:
            # What ended before the signal came has ended well.
            rule = "timed-out" if wanted.cancel else None
            return End("Canceled", "UserError" if wanted.cancel else None, wanted.cancel or None, rule)
        if finished:
            return End("Completed")
        if wanted.evicted:
            return End("Failed", RULES["preempted"].code, PREEMPTED, "preempted", taken=len(self.nodes))
        if wanted.killed:
            lost = ", ".join(node.name for node in self.nodes if node.lost)
            message = f"AzureMLCompute job failed. The node {lost} was lost."
            status = "NotResponding" if self.options.on_lost_node == "not-responding" else "Failed"
            return End(status, RULES["node-lost"].code, message, "node-lost", taken=1)
        return self._failure()

    def _failure(self) -> End:
        ended = [
            (when, code, node, local)
            for node in self.nodes
            for local, (when, code) in node.exits.items()
            if code
        ]
        if not ended:
            return End("Failed", "SystemError", "A node's container ended unseen.", "exit-code")
        _, code, node, local = min(ended, key=lambda one: one[0])
        name = log_name(self.job, node.index * self._each + local)
        how = f"exited with status code {code}" if code > 0 else f"exited because of signal {-code}"
        said = self.shipping.last_line(node.folder / f"std_log_{local}.txt")
        message = f"Execution failed. User process '/bin/sh' {how}. Please check log file '{name}' for error details."
        return End("Failed", "UserError", f"{message} Error: {said}" if said else message, "exit-code")

    def clean(self, *, send: bool) -> None:
        """Kills what is left, sends logs and outputs, unmounts."""
        for node in self.nodes:
            node.kill()
        if self._network is not None:
            self._network.stop()
        self.shipping.send()
        self.data.stop(send=send)
        if send:
            for node in self.nodes:
                for name in ("outputs", "logs"):
                    folder = node.folder / "wd" / name
                    if folder.is_dir():
                        self.blobs.upload(
                            folder, Place(ARTIFACTS, f"ExperimentRun/dcid.{self.job.name}/{name}")
                        )
        if self._secret:
            self.tokens.forget(self._secret)
