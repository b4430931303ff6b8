"""The offline lint: the recipe's places and inputs, then the rendered request against the service's own model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.backends.sagemaker import channels, lint_settings, rules, shapes, skus
from isthmus.backends.sagemaker.render import choose, recipe_in_job, render, settings_of
from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.hub import is_hub
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import NotInstalled

LONGEST_ARGUMENT = 256
MOST_CHANNELS = 20

_EXPLAINED = {
    "RoleArn": (rules.ROLE,),
    "Environment": (rules.ENVIRONMENT,),
    "Tags": (rules.TAGS, rules.RUN_DIRECTORY),
    "InputDataConfig": (rules.CHANNELS, rules.DATA_PLACE, rules.RUN_DIRECTORY),
    "OutputDataConfig.S3OutputPath": (rules.RUN_DIRECTORY,),
    "CheckpointConfig": (rules.RUN_DIRECTORY,),
    "AlgorithmSpecification.ContainerArguments": (rules.RUN_DIRECTORY,),
    "ResourceConfig": (rules.SKU_UNKNOWN, rules.SKU_NONE, rules.WARM_POOL, rules.PREFERENCES, rules.TRAINING_PLAN),
    "StoppingCondition": (rules.PENDING, rules.RUNTIME, rules.WAIT),
    "VpcConfig": (rules.VPC,),
}  # fmt: skip
"""Part of the request -> rules whose finding says the same in the recipe's own words."""


def lint(job: Job) -> list[Finding]:
    """All findings, errors of places first."""
    found = [*_places(job), *_inputs(job), *lint_settings.check(job)]
    rendered = render(job)
    found += check_request(rendered.request, told={finding.id for finding in found})
    return found


def check_request(request: Mapping[str, Any], told: set[str] | None = None) -> list[Finding]:
    """A request, whoever made it: what the service refuses, and what goes wrong with what it accepts.

    Args:
        told: ids of the rules that have found something already.
    """
    found = []
    known = told or set()
    try:
        for refusal in shapes.refusals(request):
            if not any(
                refusal.path.startswith(part) and known & {rule.id for rule in explaining}
                for part, explaining in _EXPLAINED.items()
            ):
                found.append(rules.REQUEST.found(f"{refusal.path}: {refusal.message}"))
    except NotInstalled:
        found.append(
            rules.MODEL_MISSING.found("botocore is not installed; lengths and patterns are unchecked")
        )
    try:
        json.dumps(request, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found.append(
            rules.REQUEST.found(
                f"half a character (a lone surrogate) in {error.object[max(0, error.start - 30) : error.start]!r}"
            )
        )
    found += [
        rules.PREFIX.found(f"{path} {uri} has no slash at its end")
        for path, uri in _prefixes(request)
        if not uri.endswith("/")
    ]
    output = request.get("OutputDataConfig", {})
    if output.get("CompressionType") != "NONE":
        found.append(
            rules.COMPRESSION.found(f"OutputDataConfig.CompressionType is {output.get('CompressionType')}")
        )
    if request.get("HyperParameters"):
        names = ", ".join(list(request["HyperParameters"])[:3])
        found.append(rules.HYPERPARAMETERS.found(f"HyperParameters: {names}"))
    return found


def _prefixes(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for channel in request.get("InputDataConfig", ()):
        source = channel.get("DataSource", {}).get("S3DataSource", {})
        if source.get("S3DataType") == "S3Prefix":
            yield f"channel {channel.get('ChannelName')}", str(source.get("S3Uri"))
    if "CheckpointConfig" in request:
        yield "CheckpointConfig.S3Uri", str(request["CheckpointConfig"].get("S3Uri"))


def places(recipe: Recipe) -> list[tuple[str, str]]:
    """(field, URI) of everything that a resolved recipe's job reads as data."""
    if recipe.encode is not None:
        return []  # its places are looked at by backends.encoding
    found = []
    for section, sources in (("data", recipe.data.sources), ("validation", recipe.validation.sources)):
        for index, source in enumerate(sources):
            uris = [source.uri] if isinstance(source.uri, str) else list(source.uri)
            found += [(f"{section}.sources.{index}.uri", uri) for uri in uris]
    if isinstance(recipe.model.init_from, str) and not is_hub(recipe.model.init_from):
        found.append(("model.init_from", recipe.model.init_from))
    return found


def _places(job: Job) -> Iterator[Finding]:
    streams = job.recipe.data.access == "stream"
    if not job.run_uri.startswith("s3://"):
        yield rules.RUN_DIRECTORY.found(f"run_directory {job.recipe.run_directory} is not on S3")
    elif len(job.run_uri) > LONGEST_ARGUMENT:
        yield rules.RUN_DIRECTORY.found(
            f"run_directory: {job.run_uri[:40]}... has {len(job.run_uri)} characters with the run's id, 256 are allowed",
            "choose a shorter prefix",
        )
    elif (bad := lint_settings.untaggable(job.run_uri)) is not None:
        yield rules.RUN_DIRECTORY.found(
            f"run_directory {job.run_uri} has {bad!r}, which the tag isthmus-run-uri may not hold",
            "use letters, digits, and _ . : / = + - @",
        )
    for field, uri in places(job.recipe):
        if uri.startswith("s3://") or (streams and uri.startswith(("https://", "http://"))):
            continue
        kind = "another cloud's" if "://" in uri else "a path of this machine"
        yield rules.DATA_PLACE.found(f"{field} {uri} is {kind}")


def _inputs(job: Job) -> Iterator[Finding]:
    settings, recipe = settings_of(job), job.recipe
    data, inside = recipe_in_job(job)
    if 1 + len(data) > MOST_CHANNELS:
        yield rules.CHANNELS.found(
            f"data.sources and validation.sources make {len(data)} channels, 19 are allowed"
        )
    section = recipe.encode
    field = "data.access" if section is None else "encode.access"
    if (recipe.data if section is None else section).access == "download":
        what = "the data" if section is None else "the pictures"
        yield rules.DOWNLOAD.found(f"{field} is download: every node copies all of {what} before it begins")
        choice = choose(job)
        own_disk = all(skus.has_local_disk(name) for name in choice.types)
        if settings.volume_gb is None and not own_disk:
            yield rules.DISK.found(f"{field} is download, and {choice.types[0]} gets a volume of 100 GB")
    if settings.network_isolation:
        yield from _isolation(job, inside)
    if settings.checkpoint_mirror:
        if recipe.compute.nodes > 1:
            yield rules.MIRROR.found(f"checkpoint_mirror with compute.nodes {recipe.compute.nodes}")
        yield rules.MIRROR_SYNC.found("checkpoint_mirror: SageMaker copies the run directory, not the job")


def _isolation(job: Job, inside: Recipe) -> Iterator[Finding]:
    settings, recipe = settings_of(job), job.recipe
    if recipe.data.access == "stream":
        yield rules.ISOLATION.found(
            "network_isolation with data.access stream: the job cannot reach its data"
        )
    if not settings.checkpoint_mirror:
        yield rules.ISOLATION.found(
            "network_isolation without checkpoint_mirror: the job cannot write its run directory"
        )
    if recipe.compute.nodes > 1:
        yield rules.ISOLATION.found(
            f"network_isolation with compute.nodes {recipe.compute.nodes}: its run directory is a mirror, for one node"
        )
    if isinstance(recipe.model.init_from, str) and is_hub(recipe.model.init_from):
        yield rules.ISOLATION.found(
            f"network_isolation, and model.init_from {recipe.model.init_from} is on a hub",
            "copy the checkpoint to S3 and name it",
        )
    autoencoder = inside.encoders.autoencoder
    if autoencoder.kind == "diffusers" and not autoencoder.source.startswith(channels.INPUT):
        yield rules.ISOLATION_HUB.found(
            f"network_isolation, and encoders.autoencoder.source {autoencoder.source} is not on S3: no sample grids"
        )
