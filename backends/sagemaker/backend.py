"""The SageMaker backend: renders, submits, follows and stops training jobs. boto3 is imported by what needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from isthmus.backends.sagemaker import state, submission
from isthmus.backends.sagemaker.aws import Client, Clients, errors, is_missing
from isthmus.backends.sagemaker.logs import Tail
from isthmus.backends.sagemaker.render import choose, render, settings_of
from isthmus.backends.sagemaker.settings import SageMakerSettings
from isthmus.backends.settle import settle, settle_missing
from isthmus.backends.spec import (
    Capability,
    CloudJob,
    Finding,
    Handle,
    Job,
    LogLine,
    Metered,
    Offer,
    Rendered,
    Status,
)
from isthmus.storage.rundir import RunDirectory

_ENDED_BY_ITSELF = re.compile(
    r"is in status|already (stopped|completed|failed)|cannot be stopped", re.IGNORECASE
)


class SageMakerBackend:
    """Runs jobs as SageMaker training jobs.

    Managed spot training and `retries` start an interrupted job again by themselves, under the same name; any other
    preempted job is resubmitted by a supervisor, so that RESTARTS is not claimed.
    """

    name = "sagemaker"
    capabilities = frozenset({Capability.DETACHED, Capability.MULTI_NODE, Capability.SPOT})
    settings: type[BaseModel] = SageMakerSettings

    def __init__(self) -> None:
        self._clients: dict[str | None, Clients] = {}

    def render(self, job: Job) -> Rendered:
        """The CreateTrainingJob request."""
        return render(job)

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        """The request as JSON, or as the file of `aws sagemaker create-training-job --cli-input-yaml`."""
        from isthmus.backends.sagemaker.document import document

        return document(rendered, format)

    def lint(self, job: Job) -> list[Finding]:
        """Limits, traps, missing fields; the request against the service's own model."""
        from isthmus.backends.sagemaker.lint import lint

        return lint(job)

    def preflight(self, job: Job) -> list[Finding]:
        """Identity, role, region, quota, image, buckets, data, network."""
        from isthmus.backends.sagemaker.preflight import preflight

        return preflight(job, self._of(choose(job).region))

    def submit(self, rendered: Rendered) -> Handle:
        """Creates the training job, or finds the one that an earlier call created."""
        clients = self._of(rendered.native.get("region"))
        submission.submit(clients, rendered)
        native = {"job_id": rendered.job_id, **rendered.native, "region": clients.region}
        return Handle(backend=self.name, run_id=rendered.run_id, run_uri=rendered.run_uri, native=native)

    def status(self, handle: Handle) -> Status:
        """What SageMaker says, settled with what the run directory tells."""
        job = submission.describe(self._client(handle), _name(handle))
        # Only then: a worker tells of its end before its job is over, and the mirror's last files come at the very end.
        events = RunDirectory(handle.run_uri).events()
        if job is None:
            return settle_missing(events, cloud="SageMaker", job_id=_name(handle))
        seen = state.of(job)
        status = settle(
            seen.native,
            events,
            cause=seen.cause,
            exit_code=seen.exit_code,
            job_id=_name(handle),
            detail=seen.detail,
        )
        if seen.native == "stopped" and status.state == "preempted" and _asked(events):
            # A worker behind the checkpoint mirror cannot see the request: to it a stop is an eviction.
            return Status(state="stopped", exit_code=4, cause=status.cause, attempt=status.attempt)
        return status

    def metered(self, handle: Handle) -> Metered | None:
        """What SageMaker bills: on spot less than the time that it trained, at the price on demand."""
        job = submission.describe(self._client(handle), _name(handle))
        return None if job is None else state.metered(job)

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """The lines of all hosts, by time."""
        client, name = self._client(handle), _name(handle)

        def ended() -> bool:
            job = submission.describe(client, name)
            return job is None or str(job["TrainingJobStatus"]) in state.ENDED

        tail = Tail(self._of(handle.native.get("region"))("logs"), name, ended)
        return tail.follow() if follow else tail.so_far()

    def stop(self, handle: Handle) -> None:
        """Records stop-requested and has SageMaker stop the job: SIGTERM, and SIGKILL 120 seconds later."""
        if self.status(handle).ended:
            return
        run = RunDirectory(handle.run_uri)
        if not _asked(run.events()):
            run.event("stop-requested", by="user")
        client, name = self._client(handle), _name(handle)
        with errors("stop the job", name):
            try:
                client.stop_training_job(TrainingJobName=name)
            except Exception as error:
                if not (is_missing(error) or _ENDED_BY_ITSELF.search(str(error))):
                    raise

    def offers(self, job: Job) -> list[Offer]:
        """The machines that the job may run on, in order."""
        choice, own = choose(job), settings_of(job).usd_per_hour
        # Of several preferences nobody knows which it will be; the team's own price is what they say it costs.
        price = own if own is not None or len(choice.types) > 1 else job.usd_per_hour
        tier: Any = choice.tier
        return [
            Offer(
                backend=self.name,
                sku=name,
                region=choice.region,
                tier=tier,
                nodes=job.recipe.compute.nodes,
                usd_per_hour=price,
            )
            for name in choice.types
        ]

    def jobs(self, settings: BaseModel) -> Iterator[CloudJob]:
        """The training jobs of the region that carry our tags, the newest first."""
        assert isinstance(settings, SageMakerSettings)
        clients = self._of(settings.region)
        client = clients("sagemaker")
        for job, tags in submission.tagged(client):
            native = {"job_id": str(job["TrainingJobName"]), "region": clients.region}
            if not {"isthmus-run", "isthmus-run-uri"} <= set(tags):
                continue
            yield CloudJob(
                handle=Handle(
                    backend=self.name,
                    run_id=tags["isthmus-run"],
                    run_uri=tags["isthmus-run-uri"],
                    native=native,
                ),
                state=state.listed(job),
                created=_seconds(job.get("CreationTime")),
                attempt=int(tags["isthmus-attempt"]) if tags.get("isthmus-attempt", "").isdigit() else None,
            )

    def _of(self, region: str | None) -> Clients:
        if region not in self._clients:
            self._clients[region] = Clients(region)
        return self._clients[region]

    def _client(self, handle: Handle) -> Client:
        return self._of(handle.native.get("region"))("sagemaker")


def _name(handle: Handle) -> str:
    return str(handle.native["job_id"])


def _asked(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a stop was requested since the newest submission."""
    for event in reversed(events):
        if event["type"] == "stop-requested":
            return True
        if event["type"] == "submitted":
            return False
    return False


def _seconds(moment: Any) -> float | None:
    return moment.timestamp() if isinstance(moment, datetime) else None
