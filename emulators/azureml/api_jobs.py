"""Jobs, and the run history that tells how they go and where their logs are."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from isthmus.emulators.azureml.api_workspace import TYPE, WORKSPACE, check_place
from isthmus.emulators.azureml.blobs import ARTIFACTS, Blobs, Place
from isthmus.emulators.azureml.checks_job import change, job_of
from isthmus.emulators.azureml.keeper import Keepers
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.web import Request, Response, Route, route
from isthmus.emulators.azureml.world import Job, World


class JobsApi:
    """Operations on command jobs."""

    def __init__(self, world: World, blobs: Blobs, keepers: Keepers, *, page: int) -> None:
        self.world, self.blobs, self.keepers, self.page = world, blobs, keepers, page

    def routes(self) -> list[Route]:
        """What it serves."""
        one = WORKSPACE + "/jobs/{name}"
        history = "/history/v1\\.0" + WORKSPACE + "/(?:experiments/{experiment}/)?runs/{name}"
        return [
            route("jobs.list", "GET", WORKSPACE + "/jobs", self.list),
            route("jobs.get", "GET", one, self.get),
            route("jobs.put", "PUT", one, self.put),
            route("jobs.delete", "DELETE", one, self.delete),
            route("jobs.cancel", "POST", one + "/cancel", self.cancel),
            route("jobs.cancelling", "GET", one + "/cancelled", self.cancelled),
            route("history.details", "GET", history + "/details", self.details, versioned=False),
            route("history.get", "GET", history, self.run, versioned=False),
        ]

    def _find(self, request: Request) -> Job:
        check_place(request, self.world)
        job = self.world.jobs.get(request.names["name"])
        if job is None:
            raise refuse("not-found", f"Not found: job {request.names['name']}")
        return job

    def describe(self, job: Job) -> dict[str, Any]:
        """A job as the service shows it."""
        studio = f"https://ml.azure.com/runs/{job.name}?wsid={self.world.path}"
        services = {
            "Studio": {"jobServiceType": "Studio", "endpoint": studio},
            **(job.properties.get("services") or {}),
        }
        return {
            "id": f"{self.world.path}/jobs/{job.name}",
            "name": job.name,
            "type": f"{TYPE}/workspaces/jobs",
            "properties": {**job.properties, "status": job.status, "services": services},
            "systemData": {"createdAt": job.created, "createdBy": "emulator", "createdByType": "User"},
        }

    def put(self, request: Request) -> Response:
        """Submits a job, or changes the tags of one that exists."""
        check_place(request, self.world)
        name = request.names["name"]
        with self.world.changed:
            job = self.world.jobs.get(name)
            if job is not None:
                change(job, request.body)
                return Response(200, self.describe(job))
            job = job_of(name, request.body, self.world, endpoint=self.blobs.endpoint)
            job.number = len(self.world.jobs)
            self.world.jobs[name] = job
            shown = self.describe(job)
        self.keepers.start(job)
        return Response(201, shown)

    def get(self, request: Request) -> Response:
        """One job."""
        with self.world.changed:
            return Response(200, self.describe(self._find(request)))

    def list(self, request: Request) -> Response:
        """A page of jobs, the newest first; `tag` is a tag's name (the service compares no values)."""
        check_place(request, self.world)
        query = request.query
        with self.world.changed:
            jobs = sorted(self.world.jobs.values(), key=lambda job: -job.number)
            kept = [
                job for job in jobs if _listed(job, query.get("listViewType", "ActiveOnly"), query.get("tag"))
            ]
            start = int(query.get("$skip") or 0)
            page = kept[start : start + self.page]
            body: dict[str, Any] = {"value": [self.describe(job) for job in page]}
        if start + self.page < len(kept):
            following = {**query, "$skip": str(start + self.page)}
            body["nextLink"] = f"{request.base}{self.world.path}/jobs?{urlencode(following)}"
        return Response(200, body)

    def delete(self, request: Request) -> Response:
        """Forgets a job that has ended."""
        with self.world.changed:
            job = self._find(request)
            if not job.over:
                raise refuse("job-exists", f"The job {job.name} is {job.status}: cancel it first")
            del self.world.jobs[job.name]
        return Response(200)

    def cancel(self, request: Request) -> Response:
        """Asks for a job's end: 202 with the place to ask when it is there."""
        job = self._find(request)
        self.keepers.demand(job, "cancel")
        link = f"{request.base}{self.world.path}/jobs/{job.name}/cancelled?api-version=2024-10-01"
        return Response(202, None, {"Location": link, "Retry-After": "1"})

    def cancelled(self, request: Request) -> Response:
        """200 when it has ended, else 202 again."""
        if self._find(request).over:
            return Response(200)
        return Response(
            202,
            None,
            {"Location": f"{request.base}{request.path}?api-version=2024-10-01", "Retry-After": "1"},
        )

    def run(self, request: Request) -> Response:
        """A run of the history."""
        job = self._find(request)
        return Response(200, self._run(job))

    def _run(self, job: Job) -> dict[str, Any]:
        error = None if job.error is None else {"error": job.error}
        return {
            "runId": job.name,
            "target": job.compute or "serverless",
            "status": job.status,
            "startTimeUtc": job.started,
            "endTimeUtc": job.ended,
            "error": error,
            "warnings": [{"source": "emulator", "message": text} for text in job.warnings],
            "tags": job.properties.get("tags") or {},
            "properties": job.properties.get("properties") or {},
        }

    def details(self, request: Request) -> Response:
        """How a run is, and where its logs are: addresses in the store that need no token."""
        job = self._find(request)
        with self.world.changed:
            names, body = list(job.log_files), self._run(job)
        prefix = f"ExperimentRun/dcid.{job.name}"
        logs = {
            name: self.blobs.sas_url(Place(ARTIFACTS, f"{prefix}/{name}"), "r", hours=24) for name in names
        }
        return Response(200, {**body, "logFiles": logs})


def _listed(job: Job, view: str, tag: str | None) -> bool:
    if tag and tag not in (job.properties.get("tags") or {}):
        return False
    return view == "All" or bool(job.properties.get("isArchived")) == (view == "ArchivedOnly")
