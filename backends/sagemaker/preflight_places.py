"""The preflight of buckets: they are there, in the job's region, and the data fits on the disk.

Whether it is a dataset, every backend's launch looks at by itself (`isthmus.backends.preflight`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from isthmus.backends.sagemaker import rules_online, skus
from isthmus.backends.sagemaker.aws import Clients, code_of, is_denied
from isthmus.backends.sagemaker.lint import places
from isthmus.backends.sagemaker.render import VOLUME_GB, Choice, settings_of
from isthmus.backends.spec import Finding, Job

ATTEMPTS = 3
_PAGES = 200
"""Pages of a listing that a size is taken from: 200,000 objects."""

Question = tuple[str, Callable[[], Iterable[Finding]]]


def questions(job: Job, clients: Clients, choice: Choice) -> list[Question]:
    """One for each bucket, and one for the disk."""
    found: list[Question] = []
    for bucket, fields in _fields(job).items():

        def ask(bucket: str = bucket, fields: list[str] = fields) -> Iterable[Finding]:
            return _bucket(bucket, fields, str(choice.region), clients)

        found.append((f"bucket {bucket}", ask))
    section = job.recipe.encode
    if (job.recipe.data if section is None else section).access == "download":
        found.append(("the size of the data", lambda: _disk(job, choice, clients)))
    return found


def buckets(job: Job) -> list[str]:
    """`bucket/prefix` of everything that the job reads from S3."""
    return [uri.removeprefix("s3://") for _, uri in places(job.recipe) if uri.startswith("s3://")]


def _fields(job: Job) -> dict[str, list[str]]:
    """Bucket -> the recipe's fields that name it."""
    named = [*places(job.recipe), ("run_directory", job.run_uri)]
    if job.recipe.encode is not None:
        named += [(f"encode.{name}", str(getattr(job.recipe.encode, name))) for name in ("source", "dest")]
    if settings_of(job).output:
        named.append(("backends.sagemaker.output", str(settings_of(job).output)))
    found: dict[str, list[str]] = {}
    for field, uri in named:
        if uri.startswith("s3://"):
            found.setdefault(uri.removeprefix("s3://").partition("/")[0], []).append(field)
    return found


def _bucket(name: str, fields: list[str], region: str, clients: Clients) -> Iterator[Finding]:
    client = clients("s3", attempts=ATTEMPTS)
    try:
        answer = client.head_bucket(Bucket=name)
    except Exception as error:
        if code_of(error) in ("404", "NoSuchBucket"):
            yield rules_online.BUCKET.found(f"{fields[0]}: there is no bucket {name}")
            return
        if is_denied(error):
            yield rules_online.NOT_PERMITTED.found(
                f"{fields[0]}: bucket {name} is closed to these credentials; the job's role must be able to use it"
            )
            return
        raise
    where = answer.get("BucketRegion") or _location(client, name)
    if where != region:
        yield rules_online.BUCKET_REGION.found(
            f"{', '.join(fields)}: bucket {name} is in {where}, the job in {region}"
        )


def _location(client: Any, name: str) -> str:
    return str(client.get_bucket_location(Bucket=name).get("LocationConstraint") or "us-east-1")


def _disk(job: Job, choice: Choice, clients: Clients) -> Iterator[Finding]:
    client, size = clients("s3", attempts=ATTEMPTS), 0
    section = job.recipe.encode
    field = "data.access" if section is None else "encode.access"
    copied = buckets(job) if section is None else [str(section.source).removeprefix("s3://")]
    for place in copied:
        bucket, _, prefix = place.partition("/")
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix.rstrip("/") + "/" if prefix else ""
        )
        for count, page in enumerate(pages):
            size += sum(entry["Size"] for entry in page.get("Contents", ()))
            if count >= _PAGES:
                break
    for name in choice.types:
        sku = skus.find(name)
        if skus.has_local_disk(name):
            room = sku.nvme_gb if sku is not None else None
        else:
            room = settings_of(job).volume_gb or VOLUME_GB
        if room is not None and size / 1e9 > 0.95 * room:
            yield rules_online.DATA_SIZE.found(
                f"{field} is download: {size / 1e9:,.0f} GB do not fit on the {room:,} GB of {name}"
            )
