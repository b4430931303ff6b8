"""Azure ML's control plane through azure-ai-ml: the one place that imports it, and only when it is asked something."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from isthmus.backends.azure.document import dump
from isthmus.backends.azure.errors import Denied, Missing, azure_errors
from isthmus.backends.azure.history import History
from isthmus.backends.azure.target import Workspace
from isthmus.errors import UsageError
from isthmus.storage import identity

T = TypeVar("T")
TAG = "isthmus-run"


class AzureClient:
    """A workspace's jobs, computes, environments and quota. Every method raises IsthmusError only.

    A call that is refused with 401 or 403 is made once more with a new credential: a token may have ended in between.

    Args:
        workspace: which.
        credential: azure-identity's; None: the process's own.
        transport: of azure-core, for tests; None: its own.
    """

    def __init__(self, workspace: Workspace, *, credential: Any = None, transport: Any = None) -> None:
        self.workspace = workspace
        self._given = credential
        self._transport = transport
        self._credential: Any = None
        self._ml: Any = None
        self._history: History | None = None

    @classmethod
    def of(cls, native: Mapping[str, Any]) -> AzureClient:
        """Of a handle; what it does not say comes from the environment.

        Raises:
            UsageError: neither says it.
        """
        variables = {
            "subscription": "AZURE_SUBSCRIPTION_ID",
            "resource_group": "AZUREML_RESOURCE_GROUP",
            "workspace": "AZUREML_WORKSPACE",
        }
        found = {name: native.get(name) or os.environ.get(variable) for name, variable in variables.items()}
        missing = [variables[name] for name, value in found.items() if not value]
        if missing:
            raise UsageError(
                "it is not known here which Azure ML workspace the job is in",
                where=str(native.get("job_id", "azure")),
                hint=f"set {', '.join(missing)}",
            )
        workspace = Workspace(
            subscription=str(found["subscription"]),
            resource_group=str(found["resource_group"]),
            name=str(found["workspace"]),
        )
        return cls(workspace)

    # -- how it calls

    def _connect(self) -> Any:
        if self._ml is None:
            with _quiet():
                from azure.ai.ml import MLClient

                more = {"transport": self._transport} if self._transport is not None else {}
                self._ml = MLClient(
                    self.credential(),
                    self.workspace.subscription,
                    self.workspace.resource_group,
                    self.workspace.name,
                    enable_telemetry=False,
                    show_progress=False,
                    **more,
                )
        return self._ml

    def credential(self) -> Any:
        """The credential, made when it is first needed."""
        if self._credential is None:
            if self._given is not None:
                self._credential = self._given
            else:
                self._credential = identity.shared()
        return self._credential

    def _forget(self) -> None:
        if self._given is None:
            identity.shared().forget()
        self._ml = self._credential = self._history = None

    def call(self, doing: str, function: Callable[[Any], T]) -> T:
        """A call of the SDK's client, with one new login on 401 and 403."""
        try:
            with azure_errors(doing), _quiet():
                return function(self._connect())
        except Denied as error:
            if isinstance(error.__cause__, identity.NoLogin):
                raise  # nobody else is found by asking again
            self._forget()
            with azure_errors(doing), _quiet():
                return function(self._connect())

    def _or_none(self, doing: str, function: Callable[[Any], T]) -> T | None:
        try:
            return self.call(doing, function)
        except Missing:
            return None

    def history(self) -> History:
        """The workspace's run history: reasons of failures, and logs."""
        if self._history is None:
            discovery = str(self.workspace_entity().discovery_url)
            self._history = History(self.workspace, discovery, self.credential, transport=self._transport)
        return self._history

    # -- what it asks and does

    def workspace_entity(self) -> Any:
        """The workspace. Raises Missing."""
        where = f"workspace {self.workspace.name}"
        return self.call(where, lambda ml: ml.workspaces.get(self.workspace.name))

    def job(self, name: str) -> Any | None:
        """A job of that name, with `status` and `tags`; None when there is none."""
        return self._or_none(f"job {name}", lambda ml: ml.jobs.get(name))

    def create_job(self, form: Mapping[str, Any]) -> Any:
        """Submits the YAML form of a job."""

        return self.call(f"submit {form['name']}", lambda ml: ml.jobs.create_or_update(load(form)))

    def cancel(self, name: str) -> None:
        """Has Azure ML end the job; one that has ended is left alone."""
        self._or_none(f"cancel {name}", lambda ml: ml.jobs.begin_cancel(name))

    def jobs(self) -> Iterator[Any]:
        """Jobs with our tag, the newest first."""
        listed = self.call(f"list the jobs of {self.workspace.name}", lambda ml: list(ml.jobs.list(tag=TAG)))
        ours = [job for job in listed if job is not None and TAG in (job.tags or {})]
        ours.sort(key=lambda job: created(job) or 0.0, reverse=True)
        yield from ours

    def compute(self, name: str) -> Any | None:
        """A compute; None when there is none."""
        return self._or_none(f"compute {name}", lambda ml: ml.compute.get(name))

    def create_compute(self, definition: Mapping[str, Any]) -> None:
        """Creates an AmlCompute cluster and waits until it is there. See `provision.cluster_definition`."""

        def create(ml: Any) -> Any:
            from azure.ai.ml.entities import (
                AmlCompute,
                IdentityConfiguration,
                ManagedIdentityConfiguration,
                NetworkSettings,
            )

            identity = IdentityConfiguration(type="system_assigned")
            if definition.get("identity"):
                identity = IdentityConfiguration(
                    type="user_assigned",
                    user_assigned_identities=[
                        ManagedIdentityConfiguration(resource_id=definition["identity"])
                    ],
                )
            # The subnet alone, as a full ARM id: together with a vnet the SDK mangles both.
            network = NetworkSettings(subnet=definition["subnet"]) if definition.get("subnet") else None
            cluster = AmlCompute(
                name=definition["name"],
                size=definition["size"],
                tier=definition["tier"],
                min_instances=definition["min_nodes"],
                max_instances=definition["max_nodes"],
                idle_time_before_scale_down=definition["idle"],
                location=definition.get("region"),
                identity=identity,
                network_settings=network,
                ssh_public_access_enabled=bool(definition.get("ssh")),
                tags={"isthmus": "created"},
            )
            return ml.compute.begin_create_or_update(cluster).result()

        self.call(f"create cluster {definition['name']}", create)

    def environment(self, name: str, version: str) -> Any | None:
        """A registered environment; None when there is none."""
        where = f"environment {name}:{version}"
        return self._or_none(where, lambda ml: ml.environments.get(name, version=version))

    def create_environment(self, definition: Mapping[str, Any]) -> None:
        """Registers an environment; a build folder is uploaded, and built at the first start."""

        def create(ml: Any) -> Any:
            from azure.ai.ml.entities import BuildContext, Environment

            build = definition.get("build")
            return ml.environments.create_or_update(
                Environment(
                    name=definition["name"],
                    version=definition["version"],
                    image=definition.get("image"),
                    build=BuildContext(**build) if build else None,
                    os_type=definition.get("os_type"),
                )
            )

        self.call(f"register environment {definition['name']}:{definition['version']}", create)

    def usages(self, region: str) -> list[dict[str, Any]]:
        """Quota of a region: name, limit and use of each family's and each pool's vCPUs."""
        listed = self.call(f"quota of {region}", lambda ml: list(ml.compute.list_usage(location=region)))
        return [vars(entry) for entry in listed]

    def sizes(self, region: str) -> list[dict[str, Any]]:
        """Machines that a region offers to Azure ML."""
        listed = self.call(f"machines of {region}", lambda ml: list(ml.compute.list_sizes(location=region)))
        return [vars(entry) for entry in listed]


def load(form: Mapping[str, Any]) -> Any:
    """The SDK's command node of a YAML form, read as `az ml job create -f` reads it."""
    with _quiet():
        from azure.ai.ml import load_job

        return load_job(io.StringIO(dump(form)))


def state_word(job: Any) -> str:
    """Azure ML's word for a job's state; the SDK gives a text or a member of an enum."""
    return str(getattr(job.status, "value", job.status) or "Unknown")


def created(job: Any) -> float | None:
    """When a job was created, in seconds since 1970."""
    at: Any = getattr(getattr(job, "creation_context", None), "created_at", None)
    return float(at.timestamp()) if hasattr(at, "timestamp") else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the SDK's warnings of experimental classes and its log lines: what it has to say comes as an error."""
    # The SDK logs each call's failure through loggers that set their own levels, and Python's last resort is stderr.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
