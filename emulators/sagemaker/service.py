"""The operations of SageMaker that are about training jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from isthmus.emulators.sagemaker import refusals as rules
from isthmus.emulators.sagemaker.checks import Account, check, check_tags
from isthmus.emulators.sagemaker.errors import ServiceError
from isthmus.emulators.sagemaker.job import TrainingJob
from isthmus.emulators.sagemaker.listing import list_jobs, page, search
from isthmus.emulators.sagemaker.quotas import ON_DEMAND, SPOT, WARM_POOL, Quotas, name_of
from isthmus.emulators.sagemaker.requests import is_spot, wanted_types
from isthmus.emulators.sagemaker.shapes import violations
from isthmus.emulators.sagemaker.site import ACCOUNT

Request = dict[str, Any]
SAME_FOR_WARM = ("RoleArn", "VpcConfig", "EnableInterContainerTrafficEncryption", "EnableNetworkIsolation")


class Service:
    """State of all training jobs, and the answers about them.

    Args:
        start: starts a job's course; told whether it continues on a warm pool.
    """

    def __init__(self, account: Account, quotas: Quotas, start: Callable[[TrainingJob, bool], None]) -> None:
        self._account = account
        self._quotas = quotas
        self._start = start
        self._jobs: dict[tuple[str, str], TrainingJob] = {}
        self._lock = threading.RLock()
        self._operations: dict[str, Callable[[Request, str], dict[str, Any]]] = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": lambda request, region: self._named(request, region).describe(),
            "StopTrainingJob": self._stop,
            "UpdateTrainingJob": self._update,
            "ListTrainingJobs": lambda request, region: list_jobs(self.of(region), request),
            "AddTags": self._add_tags,
            "DeleteTags": self._delete_tags,
            "ListTags": self._list_tags,
        }

    def answer(self, operation: str, request: Request, region: str) -> dict[str, Any] | None:
        """The answer to an operation; None when it is not about training jobs.

        Raises:
            ServiceError: the service's refusal.
        """
        if operation == "Search":
            return search(self.of(region), request) if request.get("Resource") == "TrainingJob" else None
        if "Tags" in operation and ":training-job/" not in request.get("ResourceArn", ""):
            return None
        if operation not in self._operations:
            return None
        if operation != "CreateTrainingJob" and (found := violations(operation, request)):
            raise rules.SHAPE.error(f"{len(found)} validation error(s) detected: {'; '.join(found[:10])}")
        return self._operations[operation](request, region)

    def of(self, region: str | None = None) -> list[TrainingJob]:
        """The jobs of a region (or all), in the order in which they came."""
        with self._lock:
            return [job for (place, _), job in self._jobs.items() if region in (None, place)]

    def find(self, name: str, region: str | None = None) -> TrainingJob:
        """A job by its name. Raises ServiceError when there is none."""
        for job in reversed(self.of(region)):
            if job.name == name:
                return job
        raise rules.NOT_FOUND.error("Requested resource not found.")

    def _named(self, request: Request, region: str) -> TrainingJob:
        return self.find(request["TrainingJobName"], region)

    def _create(self, request: Request, region: str) -> dict[str, Any]:
        check(request, self._account, region)
        name = request["TrainingJobName"]
        with self._lock:
            if (region, name) in self._jobs:
                raise rules.DUPLICATE.error(
                    "Training job names must be unique within an AWS account and region, and a training job with this "
                    f"name already exists (arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{name})"
                )
            warm = self._warm(request, region)
            if warm is None:
                self._check_quota(request, region)
            arn = f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{name}"
            job = TrainingJob(request=request, arn=arn, region=region, tags=list(request.get("Tags", [])))
            job.move("Starting", "Starting the training job")
            if warm is not None and warm.warm_pool is not None:
                warm.warm_pool.reused_by = name
            self._jobs[region, name] = job
        self._start(job, warm is not None)
        return {"TrainingJobArn": arn}

    def _check_quota(self, request: Request, region: str) -> None:
        spot = is_spot(request)
        kind, count = wanted_types(request)[0]
        running = [job for job in self.of(region) if not job.over and is_spot(job.request) == spot]
        used = sum(
            n for job in running for k, n in [job.selected or wanted_types(job.request)[0]] if k == kind
        )
        self._within(name_of(kind, SPOT if spot else ON_DEMAND), used, count, rules.QUOTA)
        if request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
            kept = [
                job
                for job in self.of(region)
                if (job.pool_status() or {}).get("Status") in ("Available", "InUse")
            ]
            used = sum(n for job in kept for k, n in [wanted_types(job.request)[0]] if k == kind)
            self._within(name_of(kind, WARM_POOL), used, count, rules.WARM_QUOTA)

    def _within(self, name: str, used: int, count: int, rule: rules.Refusal) -> None:
        if used + count > self._quotas[name]:
            raise rule.error(
                f"The account-level service limit '{name}' is {self._quotas[name]} Instances, with current utilization "
                f"of {used} Instances and a request delta of {count} Instances. Please use AWS Service Quotas to request "
                "an increase for this quota. If AWS Service Quotas is not available, contact AWS support to request an "
                "increase for this quota."
            )

    def _warm(self, request: Request, region: str) -> TrainingJob | None:
        """A job whose kept instances fit: same type and count, same role, network and encryption."""
        for job in self.of(region):
            if (job.pool_status() or {}).get("Status") != "Available" or is_spot(request):
                continue
            fits = all(job.request.get(key) == request.get(key) for key in SAME_FOR_WARM)
            if fits and wanted_types(job.request) == wanted_types(request):
                return job
        return None

    def _stop(self, request: Request, region: str) -> dict[str, Any]:
        job = self._named(request, region)
        with job.lock:
            if job.status != "InProgress":
                raise rules.STOPPED_ALREADY.error(
                    f"The request was rejected because the training job is in status {job.status}."
                )
            job.stop_asked = True
            job.move("Stopping", "Stopping the training job", "Stopping")
        return {}

    def _update(self, request: Request, region: str) -> dict[str, Any]:
        job = self._named(request, region)
        keep = request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds")
        with job.lock:
            if keep is not None and job.warm_pool is not None:
                job.warm_pool.until = job.warm_pool.since + keep
            for name in ("ProfilerConfig", "RemoteDebugConfig"):
                if name in request:
                    if job.over:
                        raise ServiceError(
                            "ValidationException", f"{name} cannot be updated: the job has ended."
                        )
                    job.request[name] = {**job.request.get(name, {}), **request[name]}
        return {"TrainingJobArn": job.arn}

    def _by_arn(self, request: Request, region: str) -> TrainingJob:
        return self.find(request["ResourceArn"].rpartition("/")[2], region)

    def _add_tags(self, request: Request, region: str) -> dict[str, Any]:
        job = self._by_arn(request, region)
        with job.lock:
            for refused in check_tags(request["Tags"], job.tags):
                raise refused
            new = {tag["Key"]: tag["Value"] for tag in [*job.tags, *request["Tags"]]}
            job.tags = [{"Key": key, "Value": value} for key, value in new.items()]
            return {"Tags": job.tags}

    def _delete_tags(self, request: Request, region: str) -> dict[str, Any]:
        job = self._by_arn(request, region)
        with job.lock:
            job.tags = [tag for tag in job.tags if tag["Key"] not in request["TagKeys"]]
        return {}

    def _list_tags(self, request: Request, region: str) -> dict[str, Any]:
        return page(self._by_arn(request, region).tags, request, "Tags", 50)
