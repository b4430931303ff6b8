"""What is wrong with a job for Azure ML, found offline. Every finding is of a rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from isthmus.backends.azure import egress, regions, rules, rules_data, skus
from isthmus.backends.azure.body import check_body
from isthmus.backends.azure.image import DIGEST
from isthmus.backends.azure.places import blob_of
from isthmus.backends.azure.render import render
from isthmus.backends.azure.settings import AzureSettings
from isthmus.backends.azure.target import DAY, LONGEST, Target, settings_of, target_of
from isthmus.backends.azure.variables import mount_cache
from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.hub import is_hub
from isthmus.errors import UsageError

_PER_NODE = {
    "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "NCCL_TOPO_FILE", "PYTHONPATH",
}  # fmt: skip
_RESERVED = re.compile(r"(AZUREML|AZ_BATCH|MLFLOW|ISTHMUS)_")
_GPU_NODES = 100
_TIGHT = 0.7


def lint(job: Job) -> list[Finding]:
    """All findings; the request itself is looked at only when the settings suffice for one."""
    try:
        target = target_of(job)
    except UsageError as error:
        return [*_settings_alone(job), Finding.of(rules.SETTINGS.id, error)]
    found = [*_settings_alone(job)]
    for check in _CHECKS:
        found += check(job, settings_of(job), target)
    if any(finding.level == "error" for finding in found):
        return found
    try:
        return [*found, *check_body(render(job).request)]
    except UsageError as error:
        return [*found, Finding.of(rules.SETTINGS.id, error)]


def _settings_alone(job: Job) -> Iterator[Finding]:
    settings = settings_of(job)
    for name, value in settings.environment_variables.items():
        where = f"backends.azure.environment_variables.{name}"
        if name in _PER_NODE or _RESERVED.match(name):
            yield rules.VARIABLE.found(f"{where} is set for every node by Azure ML or isthmus")
        elif not isinstance(value, str):
            yield rules.VARIABLE_TEXT.found(f"{where} is {value!r}; it is sent as a text")
        elif "${{" in value:
            yield rules.EXPRESSION.found(f"{where} is `{value[:100]}`, which Azure ML does not expand")
    for name in settings.tags:
        if name.startswith("isthmus-"):
            yield rules.TAG.found(f"backends.azure.tags.{name} is isthmus' own")
    cache = settings.environment_variables.get("DATASET_MOUNT_CACHE_SIZE")
    if cache is not None and not re.fullmatch(r"[1-9]\d*( ?[KMG]B)?", str(cache)):
        yield rules_data.CACHE_VARIABLE.found(f"DATASET_MOUNT_CACHE_SIZE is `{cache}`")
    if settings.tensorboard is not None and "tensorboard" not in _trackers(job):
        yield rules.TENSORBOARD.found("backends.azure.tensorboard is set, and `trackers` has no tensorboard")


def _trackers(job: Job) -> set[str]:
    return {str(getattr(one, "name", one)) for one in job.recipe.trackers}


def _place(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    if target.region is None:
        yield rules.REGION.found("backends.azure.region is not set")
    wanted = job.offer.region if job.offer else None
    for region in dict.fromkeys((target.region, wanted, *settings.regions)):
        if region and (told := regions.unknown(region)):
            yield rules.REGION_NAME.found(told)
    if wanted and settings.region and wanted != settings.region and wanted not in settings.regions:
        yield rules.REGION_OTHER.found(
            f"the offer is in {wanted}, backends.azure is set up for {', '.join([settings.region, *settings.regions])}"
        )
    cluster = target.compute
    if target.interruptible and cluster is not None and job.offer is not None:
        place = settings.regions.get(target.region or "")
        own = (place and place.spot_compute) or settings.spot_compute
        if own is None and settings.tier == "dedicated":
            yield rules.TIER.found(
                f"the offer is spot; cluster {cluster} is dedicated, and spot_compute is not set"
            )
    if target.interruptible and job.recipe.compute.max_restarts == 0:
        yield rules.RESTARTS.found(f"compute.max_restarts is 0 on {target.tier} machines")
    if target.interruptible and settings.grace > 30:
        yield rules.GRACE.found(f"backends.azure.grace is {settings.grace:g} s on {target.tier} machines")


def _machine(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    compute, sku = job.recipe.compute, target.sku
    if not skus.fits(sku, compute.gpu, compute.gpus_per_node):
        has = f"{sku.gpus} x {sku.gpu}" if sku.gpus else f"{sku.vcpus} vCPUs and no GPU"
        yield rules.SKU.found(
            f"{sku.name} has {has}, compute asks for {compute.gpus_per_node} x {compute.gpu}"
        )
    if sku.rdma and compute.nodes > _GPU_NODES:
        yield rules.NODES_FABRIC.found(
            f"compute.nodes is {compute.nodes}; {sku.name} clusters have at most 100"
        )
    if sku.gpus and not sku.rdma and compute.nodes > 1:
        yield rules.NO_FABRIC.found(
            f"{compute.nodes} x {sku.name} are joined by {sku.ethernet_gbps:g} Gb/s Ethernet"
        )
    if sku.rdma and not settings.memlock:
        yield rules.MEMLOCK.found(f"backends.azure.memlock is false on {sku.name}")
    if settings.shm_size > sku.memory_gib * 2**30:
        yield rules.SHM_LARGE.found(
            f"backends.azure.shm_size is {settings.shm_size / 2**30:.0f} GiB, {sku.name} has {sku.memory_gib} GiB"
        )
    for argument in settings.docker_args:
        if re.search(r"--shm-size|--ulimit[ =]memlock", argument):
            yield rules.DOCKER.found(f"backends.azure.docker_args has `{argument[:80]}`")


def _image(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    environment = settings.environment
    if environment is not None and environment.image is not None and not DIGEST.search(environment.image):
        yield rules.IMAGE_TAG.found(f"backends.azure.environment.image is `{environment.image[:120]}`")
    if environment is not None and environment.build is not None:
        yield rules.IMAGE_BUILD.found(f"backends.azure.environment.build is {environment.build.path}")
    if settings.mscclpp is not None:
        image = (environment and (environment.image or environment.registered)) or ""
        if re.search(r"mcr\.microsoft\.com/|registries/azureml/", image):
            yield rules.MSCCLPP_IMAGE.found(f"{image[:120]} has no MSCCL++ ({settings.mscclpp.library})")
        else:
            yield rules.MSCCLPP.found(
                f"{settings.mscclpp.library} is preloaded; the job ends when it is missing"
            )


def _identity(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    if settings.identity == "user":
        yield rules.IDENTITY_USER.found("backends.azure.identity is user")
    elif target.compute is None and settings.client_id is None:
        yield rules.IDENTITY_SERVERLESS.found(
            "compute is serverless, and backends.azure.client_id is not set"
        )


def _time(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    longest = LONGEST[target.interruptible]
    timeout = settings.timeout or longest
    if timeout > longest:
        rule = rules.TIMEOUT_LOW if target.interruptible else rules.TIMEOUT_LONG
        yield rule.found(
            f"backends.azure.timeout is {timeout / DAY:.3g} days; {target.tier} jobs end after {longest / DAY:g}"
        )
    hours = job.recipe.budget.max_hours
    if hours is None or hours * 3600 > timeout:
        told = f"budget.max_hours is {hours:g}" if hours is not None else "no budget.max_hours is set"
        yield rules.TIMEOUT_SHORT.found(f"a job ends after {timeout / 3600:g} hours; {told}")


def _places(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    recipe = job.recipe
    places = [
        (f"{section}.sources[{number}].uri", uri)
        for section, sources in (("data", recipe.data.sources), ("validation", recipe.validation.sources))
        for number, source in enumerate(sources)
        for uri in ([source.uri] if isinstance(source.uri, str) else list(source.uri))
    ]
    weights = recipe.model.init_from
    if isinstance(weights, str) and not is_hub(weights):
        places.append(("model.init_from", weights))
    for where, uri in places if recipe.encode is None else ():  # or backends.encoding looks at them
        yield from _data_place(where, uri, recipe.data.access, settings)
    try:
        if blob_of(job.run_uri, settings.storage_account) is None:
            yield rules_data.RUN_DIRECTORY.found(f"run_directory is {job.run_uri}")
    except UsageError as error:
        yield Finding.of(rules_data.RUN_DIRECTORY.id, error)
    if (recipe.data if recipe.encode is None else recipe.encode).access == "download":
        count = len(places) if recipe.encode is None else 1
        yield rules_data.DOWNLOAD.found(
            f"{count} root{'s are' if count > 1 else ' is'} copied to each node's {target.sku.temp_disk_gib} GiB before the start;"
            " the job reads the copy as it would a mount"
        )
    if settings.mount.cache and settings.mount.cache > target.sku.temp_disk_gib * 2**30:
        yield rules_data.CACHE.found(
            f"backends.azure.mount.cache is {mount_cache(settings, target.sku) / 1e9:.0f} GB,"
            f" {target.sku.name} has {target.sku.temp_disk_gib} GiB"
        )


def _data_place(where: str, uri: str, access: str, settings: AzureSettings) -> Iterator[Finding]:
    scheme, separator, _ = uri.partition("://")
    if scheme in ("wasb", "wasbs") and separator:
        yield rules_data.DATA_WASBS.found(f"{where} is {uri}")
        return
    if not separator or scheme == "file":
        yield rules_data.DATA_PLACE.found(f"{where} is {uri}, a path of this machine")
        return
    try:
        blob = blob_of(uri, settings.storage_account)
    except UsageError as error:
        yield Finding.of(rules_data.DATA_PLACE.id, error)
        return
    if blob is not None or (scheme == "azureml" and access != "stream"):
        return
    if access != "stream" or scheme == "azureml":
        verb = "stream" if access == "stream" else "mount"
        yield rules_data.DATA_PLACE.found(f"{where} is {uri}, which a job cannot {verb}")
    elif scheme in ("s3", "gs"):
        yield rules_data.DATA_OTHER_CLOUD.found(f"{where} is {uri}")


def _egress(job: Job, settings: AzureSettings, target: Target) -> Iterator[Finding]:
    if job.recipe.data.access == "download" or job.recipe.encode is not None:
        return
    needed = egress.need(job.recipe, settings.storage_account)
    if needed is None:
        return
    limit = egress.account_limit(target.region, settings.storage_egress_gbps)
    sums = (
        f"stage {needed.stage} reads {needed.images_per_s:.0f} images/s x {needed.bytes_per_image / 1e3:.0f} kB"
        f" = {needed.total / 1e9:.2f} GB/s"
    )
    for account, rate in needed.accounts.items():
        if rate > _TIGHT * limit:
            rule = rules_data.EGRESS if rate > limit else rules_data.EGRESS_TIGHT
            where = target.region or "a region that is not named"
            accounts = math.ceil(needed.total / (_TIGHT * limit))
            yield rule.found(
                f"{sums}, {rate / 1e9:.2f} GB/s of it from {account}; an account in {where} gives"
                f" {limit / 1e9:.2f} GB/s ({limit * 8 / 1e9:.0f} Gb/s): {accounts} accounts would do"
            )
    node = egress.ethernet(target.sku)
    if needed.node_bytes_per_s > node:
        least = math.ceil(needed.total / node)
        yield rules_data.ETHERNET.found(
            f"{sums}, {needed.node_bytes_per_s / 1e9:.2f} GB/s a node; {target.sku.name} has"
            f" {target.sku.ethernet_gbps:g} Gb/s = {node / 1e9:.2f} GB/s: that takes {least} nodes"
        )


_CHECKS: tuple[Callable[[Job, AzureSettings, Target], Iterator[Finding]], ...] = (
    _place, _machine, _image, _identity, _time, _places, _egress,
)  # fmt: skip
