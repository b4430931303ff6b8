"""The Azure ML backend: renders a command job, submits it through azure-ai-ml, follows and stops it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from isthmus.backends.azure import lint
from isthmus.backends.azure.client import AzureClient, created, state_word
from isthmus.backends.azure.document import document, yaml_form
from isthmus.backends.azure.errors import Unreachable
from isthmus.backends.azure.logs import Tailer, follow
from isthmus.backends.azure.render import render
from isthmus.backends.azure.settings import AzureSettings
from isthmus.backends.azure.state import STATES, metered, status_of, stop_asked
from isthmus.backends.azure.target import Workspace, interruptible, settings_of, sku_of
from isthmus.backends.settle import settle_missing
from isthmus.backends.spec import (
    ENDED,
    Capability,
    CloudJob,
    Finding,
    Handle,
    Job,
    LogLine,
    Metered,
    Offer,
    Rendered,
    State,
    Status,
)
from isthmus.errors import IsthmusError, UsageError
from isthmus.storage.rundir import RunDirectory

_LISTED: dict[str, State] = {word: native for word, native in STATES.items() if native != "interrupted"}
"""Of a list, where nobody asks the run directories why a job ended."""
_NOTICE_S = 45.0
"""Beyond the grace: a worker looks for `stop-requested` every 15 s, finishes its step, and Azure ML takes a while to say so."""
_POLL_S = 2.0


class AzureBackend:
    """Runs jobs on Azure ML. Rendering and lint import no azure package; what asks the cloud does, when it is called."""

    name = "azure"
    capabilities = frozenset({Capability.DETACHED, Capability.MULTI_NODE, Capability.SPOT, Capability.PRICES})
    settings: type[BaseModel] = AzureSettings

    def __init__(self) -> None:
        self._clients: dict[Workspace, AzureClient] = {}

    # -- offline

    def render(self, job: Job) -> Rendered:
        """The command job's REST body. Raises UsageError when the settings do not suffice for one."""
        return render(job)

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        """The REST body as JSON, or the YAML that `az ml job create -f` takes."""
        return document(rendered, format)

    def lint(self, job: Job) -> list[Finding]:
        """Limits and traps of Azure ML, its storage and its SDK."""
        return lint.lint(job)

    def offers(self, job: Job) -> list[Offer]:
        """What the recipe's offers of azure, or the settings, come to."""
        compute, settings = job.recipe.compute, settings_of(job)
        wanted = [offer for offer in compute.offers if offer.backend == self.name]
        if not wanted:
            tier: Literal["spot", "on_demand"] = "spot" if interruptible(job) else "on_demand"
            sku = sku_of(job).name
            price = job.usd_per_hour
            return [Offer(backend=self.name, sku=sku, region=settings.region, tier=tier, nodes=compute.nodes, usd_per_hour=price)]  # fmt: skip
        found = []
        for offer in wanted:
            sku = offer.sku or sku_of(job).name
            price = job.usd_per_hour if offer == job.offer else None
            found.append(
                Offer(
                    backend=self.name,
                    sku=sku,
                    region=offer.region or settings.region,
                    tier=offer.tier,
                    nodes=compute.nodes,
                    usd_per_hour=price,
                )
            )
        return found

    # -- online

    def preflight(self, job: Job) -> list[Finding]:
        """Login, workspace, cluster, quota, region, environment and storage, each asked for. Starts nothing."""
        from isthmus.backends.azure.preflight import preflight

        return preflight(job, self._client)

    def submit(self, rendered: Rendered) -> Handle:
        """Starts the job, unless it was started before: a job of that name and of this run and attempt is the job."""
        from isthmus.backends import payload
        from isthmus.backends.azure.provision import ensure_compute, ensure_environment

        client = self._client_of(rendered.native)
        if (known := client.job(rendered.job_id)) is not None:
            return _ours(rendered, known)
        payload.put(rendered)
        if cluster := rendered.native.get("cluster"):
            ensure_compute(client, cluster)
        if definition := rendered.files.get("environment.json"):
            ensure_environment(client, definition)
        try:
            client.create_job(yaml_form(rendered, inline_environment=False))
        except (Unreachable, UsageError) as error:
            # The answer may have been lost on its way back, or another launcher was faster.
            known = _or_none(client, rendered.job_id)
            if known is None:
                raise error
            return _ours(rendered, known)
        return _handle(rendered)

    def status(self, handle: Handle) -> Status:
        """From Azure ML's state, its reason, and the run directory's events."""
        client, name = self._client_of(handle.native), str(handle.native["job_id"])
        job = client.job(name)
        events = RunDirectory(handle.run_uri).events()
        if job is None:
            return settle_missing(events, cloud=f"the workspace {client.workspace.name}", job_id=name)
        word = state_word(job)
        details: Mapping[str, Any] = {}
        if STATES.get(word) in ENDED:
            # Where it does not answer, the run directory usually knows better, and the state itself is known.
            with contextlib.suppress(IsthmusError):
                details = client.history().details(name)
        return status_of(word, details, events, name)

    def metered(self, handle: Handle) -> Metered | None:
        """From the start of its run to its end, by Azure ML's run history. What is billed it does not tell."""
        client, name = self._client_of(handle.native), str(handle.native["job_id"])
        if client.job(name) is None:
            return None
        return metered(client.history().details(name))

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """What all nodes printed; with `follow` until the job has ended, over lost connections."""
        client, name = self._client_of(handle.native), str(handle.native["job_id"])
        if client.job(name) is None:
            return
        tailer = Tailer(client.history(), name)
        if not follow:
            yield from tailer.poll(last=True)
            return
        yield from _follow(tailer, client, name)

    def stop(self, handle: Handle) -> None:
        """Records stop-requested, waits until the worker has checkpointed and ended, and cancels what has not."""
        before = self.status(handle)
        if before.ended:
            return
        client, name = self._client_of(handle.native), str(handle.native["job_id"])
        run = RunDirectory(handle.run_uri)
        if not stop_asked(run.events()):
            run.event("stop-requested", by="user")
        if before.state in ("running", "restarting"):
            deadline = time.monotonic() + self._grace(client, handle) + _NOTICE_S
            while time.monotonic() < deadline:
                if self.status(handle).ended:
                    return
                time.sleep(_POLL_S)
        client.cancel(name)
        deadline = time.monotonic() + _NOTICE_S
        while not self.status(handle).ended and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def jobs(self, settings: BaseModel) -> Iterator[CloudJob]:
        """Jobs that anybody submitted with isthmus to the workspaces of the settings, the newest first."""
        assert isinstance(settings, AzureSettings)
        for workspace in _workspaces(settings):
            for job in self._client(workspace).jobs():
                tags = job.tags or {}
                native = {"job_id": job.name, **workspace.to_json()}
                attempt = str(tags.get("isthmus-attempt", ""))
                yield CloudJob(
                    handle=Handle(
                        backend=self.name,
                        run_id=str(tags["isthmus-run"]),
                        run_uri=str(tags.get("isthmus-run-uri", "")),
                        native=native,
                    ),
                    state=_LISTED.get(state_word(job), "unknown"),
                    created=created(job),
                    attempt=int(attempt) if attempt.isdigit() else None,
                )

    # -- helpers

    def _client(self, workspace: Workspace) -> AzureClient:
        return self._clients.setdefault(workspace, AzureClient(workspace))

    def _client_of(self, native: Mapping[str, Any]) -> AzureClient:
        made = AzureClient.of(native)
        return self._clients.setdefault(made.workspace, made)

    def _grace(self, client: AzureClient, handle: Handle) -> float:
        told = handle.native.get("grace")
        if told is None:
            job = client.job(str(handle.native["job_id"]))
            told = (job.tags or {}).get("isthmus-grace") if job is not None else None
        try:
            return float(told or AzureSettings().grace)
        except ValueError:
            return float(AzureSettings().grace)


def _follow(tailer: Tailer, client: AzureClient, name: str) -> Iterator[LogLine]:
    def ended() -> bool:
        job = client.job(name)
        return job is None or STATES.get(state_word(job)) in ENDED

    return follow(tailer, ended)


def _handle(rendered: Rendered) -> Handle:
    keep = ("subscription", "resource_group", "workspace", "region", "grace")
    native = {
        "job_id": rendered.job_id,
        **{key: rendered.native[key] for key in keep if key in rendered.native},
    }
    return Handle(backend=rendered.backend, run_id=rendered.run_id, run_uri=rendered.run_uri, native=native)


def _ours(rendered: Rendered, known: Any) -> Handle:
    """The handle of a job that is there already. Raises UsageError when it is another run's."""
    wanted = rendered.request["properties"]["tags"]
    tags = known.tags or {}
    if any(tags.get(name) != wanted[name] for name in ("isthmus-run", "isthmus-attempt", "isthmus-run-uri")):
        raise UsageError(
            "job name collision: a job of that name is not this run's",
            where=rendered.job_id,
            hint="launch with another --run-id",
        )
    return _handle(rendered)


def _or_none(client: AzureClient, name: str) -> Any | None:
    try:
        return client.job(name)
    except IsthmusError:
        return None


def _workspaces(settings: AzureSettings) -> list[Workspace]:
    found: list[Workspace] = []
    places: list[Any] = [None, *settings.regions.values()]
    for place in places:
        group = (place and place.resource_group) or settings.resource_group
        name = (place and place.workspace) or settings.workspace
        if settings.subscription and group and name:
            workspace = Workspace(subscription=settings.subscription, resource_group=group, name=name)
            if workspace not in found:
                found.append(workspace)
    if not found:
        raise UsageError(
            "no workspace is named",
            where="backends.azure",
            hint="set AZURE_SUBSCRIPTION_ID, AZUREML_RESOURCE_GROUP and AZUREML_WORKSPACE",
        )
    return found
