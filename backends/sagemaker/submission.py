"""Creating a training job once, whatever happens on the way, and finding it again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.backends import payload
from isthmus.backends.sagemaker.aws import Client, Clients, code_of, errors, is_denied, is_missing, is_passing
from isthmus.backends.spec import Rendered
from isthmus.errors import StorageError, UsageError

Described = Mapping[str, Any]
_TRIES = 5
_LISTED = 100
"""Jobs looked at where Search may not be used: each costs a call for its tags."""


def submit(clients: Clients, rendered: Rendered, *, pause: float = 1.0) -> None:
    """Sees to it that the job exists: looks for it first, and again whenever an answer was lost.

    Raises:
        UsageError: refused for good: credentials, permission, role, a field, a name that another job has.
        PreflightRefused: no quota or no capacity.
        StorageError: it is not known whether the job exists.
    """
    client = clients("sagemaker")
    payload.put(rendered)
    name, lost = rendered.job_id, False
    for attempt in range(_TRIES):
        try:
            if find(client, rendered):
                return
            with errors("create the training job", name):
                client.create_training_job(**rendered.request)
            return
        except (UsageError, StorageError) as error:
            cause = error.__cause__
            if cause is not None and _taken(cause):
                lost = True  # by an answer that was lost, or by another launcher: find() tells whose it is
            elif cause is not None and is_passing(cause):
                lost = True
                if attempt + 1 < _TRIES:
                    time.sleep(pause * 2**attempt)
            elif lost and cause is not None:
                # As with credentials that expired meanwhile: an earlier request may have come through.
                raise StorageError(f"it is not known whether the job exists: {error}", where=name) from cause
            else:
                raise
            last = error
    raise StorageError(
        f"it is not known whether the job exists: {last}", where=name, hint="the same again tells"
    )


def find(client: Client, rendered: Rendered) -> bool:
    """Whether this very job exists. Raises UsageError when the name is another job's."""
    job = describe(client, rendered.job_id)
    if job is None:
        return False
    if not _ours(client, job, rendered):
        raise UsageError(
            "job name collision: a training job of that name exists, and is not of this run and attempt",
            where=rendered.job_id,
            hint="choose another --run-id: SageMaker never gives a name back",
        )
    return True


def describe(client: Client, name: str) -> Described | None:
    """The job as SageMaker describes it; None when there is none. Raises UsageError, StorageError."""
    with errors("look at the training job", name):
        try:
            found: Described = client.describe_training_job(TrainingJobName=name)
        except Exception as error:
            if is_missing(error):
                return None
            raise
        return found


def tagged(client: Client) -> Iterator[tuple[Described, dict[str, str]]]:
    """Jobs with our tags, and their tags, the newest first. Raises UsageError, StorageError."""
    with errors("list the training jobs"):
        try:
            yield from _searched(client)
            return
        except Exception as error:
            if not is_denied(error):
                raise
        yield from _listed(client)


def _searched(client: Client) -> Iterator[tuple[Described, dict[str, str]]]:
    arguments: dict[str, Any] = {
        "Resource": "TrainingJob",
        "SearchExpression": {"Filters": [{"Name": "Tags.isthmus-run", "Operator": "Exists"}]},
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
        "MaxResults": 100,
    }
    while True:
        page = client.search(**arguments)
        for result in page.get("Results", ()):
            job = result["TrainingJob"]
            yield job, _tags(job.get("Tags", ()))
        if not page.get("NextToken"):
            return
        arguments["NextToken"] = page["NextToken"]


def _listed(client: Client) -> Iterator[tuple[Described, dict[str, str]]]:
    answer = client.list_training_jobs(SortBy="CreationTime", SortOrder="Descending", MaxResults=_LISTED)
    for job in answer.get("TrainingJobSummaries", ()):
        found = _tags(client.list_tags(ResourceArn=job["TrainingJobArn"]).get("Tags", ()))
        if "isthmus-run" in found:
            yield job, found


def _ours(client: Client, job: Described, rendered: Rendered) -> bool:
    """By the tags; by the container's arguments, which name run and job, where the tags may not be read."""
    with errors("read the tags of the training job", rendered.job_id):
        try:
            found = _tags(client.list_tags(ResourceArn=job["TrainingJobArn"]).get("Tags", ()))
        except Exception as error:
            if not is_denied(error):
                raise
            specification = rendered.request["AlgorithmSpecification"]
            told = job.get("AlgorithmSpecification", {}).get("ContainerArguments")
            return bool(told == specification["ContainerArguments"])
    wanted = _tags(rendered.request["Tags"])
    return all(found.get(key) == wanted[key] for key in ("isthmus-run", "isthmus-run-uri", "isthmus-attempt"))


def _taken(error: BaseException) -> bool:
    return code_of(error) == "ResourceInUse" or "already exists" in str(error)


def _tags(tags: Any) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in tags}
