"""What Azure says about a job before it is submitted. Asks only; each answer that fails is one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isthmus.backends.azure import rules_data as rules
from isthmus.backends.azure.client import AzureClient
from isthmus.backends.azure.errors import Denied, Missing, Unreachable
from isthmus.backends.azure.image import environment_of
from isthmus.backends.azure.places import Blob, blob_of
from isthmus.backends.azure.provision import cluster_definition, misfits
from isthmus.backends.azure.target import Target, Workspace, settings_of, target_of
from isthmus.backends.rules import Rule
from isthmus.backends.spec import Finding, Job
from isthmus.errors import IsthmusError
from isthmus.storage import filesystems

_STORAGE_API = "2023-05-01"


def preflight(job: Job, client_of: Callable[[Workspace], AzureClient]) -> list[Finding]:
    """The findings. Without a login or a workspace nothing else is asked.

    Args:
        client_of: gives the client of a workspace.
    """
    try:
        target = target_of(job)
    except IsthmusError as error:
        return [Finding.of("azure.settings", error)]
    client = client_of(target.workspace)
    try:
        workspace = client.workspace_entity()
    except IsthmusError as error:
        rule = (
            rules.LOGIN
            if _is_login(error)
            else rules.ASK
            if isinstance(error, Unreachable)
            else rules.WORKSPACE
        )
        # Without an answer here nothing else would get one.
        return [_of(rule, error, level="error")]
    located = str(getattr(workspace, "location", "") or "").replace(" ", "").lower()
    region = target.region or located
    checks: list[tuple[Rule, Callable[[], Iterator[Finding]]]] = [
        (rules.WORKSPACE_REGION, lambda: _workspace_region(target, located)),
        (rules.CLUSTER, lambda: _cluster(job, target, client)),
        (rules.OFFERED, lambda: _offered(target, client, region)),
        (rules.QUOTA_UNKNOWN, lambda: _quota(job, target, client, region)),
        (rules.ENVIRONMENT, lambda: _environment(job, target, client)),
        (rules.STORAGE_REGION, lambda: _storage_region(job, client, region)),
        (rules.STORAGE, lambda: _containers(job)),
    ]
    found: list[Finding] = []
    for rule, check in checks:
        try:
            found += check()
        except IsthmusError as error:
            # What could not be asked refuses nothing: the launcher may have fewer rights than the job.
            found.append(_of(rules.ASK if isinstance(error, Unreachable | Denied) else rule, error))
    return found


def _of(rule: Rule, error: IsthmusError, level: str | None = None) -> Finding:
    message = f"{error.where}: {error.message}" if error.where else error.message
    made = rule.found(message, error.hint)
    if level is None or level == made.level:
        return made
    return Finding(made.id, "error", made.message, made.fix, made.exit_code)


def _is_login(error: IsthmusError) -> bool:
    return isinstance(error, Denied) and "permission" not in error.message


def _workspace_region(target: Target, located: str) -> Iterator[Finding]:
    if target.region and located and target.region != located and target.compute is None:
        yield rules.WORKSPACE_REGION.found(
            f"workspace {target.workspace.name} is in {located}, the settings say {target.region}"
        )


def _cluster(job: Job, target: Target, client: AzureClient) -> Iterator[Finding]:
    if target.compute is None:
        return
    found = client.compute(target.compute)
    if found is None:
        if not settings_of(job).cluster.create:
            yield rules.CLUSTER.found(f"there is no cluster {target.compute} in {target.workspace.name}")
        return
    for wrong in misfits(found, cluster_definition(job, target)):
        yield rules.CLUSTER.found(f"cluster {target.compute} {wrong}")
    told = getattr(found, "provisioning_state", None)
    state = str(getattr(told, "value", told) or "")
    if state.lower() in ("failed", "deleting"):
        yield rules.CLUSTER.found(f"cluster {target.compute} is {state.lower()}")
    if int(getattr(found, "min_instances", 0) or 0) > 0:
        yield rules.CLUSTER_IDLE.found(
            f"cluster {target.compute} keeps {found.min_instances} nodes when idle"
        )


def _offered(target: Target, client: AzureClient, region: str) -> Iterator[Finding]:
    sizes = {str(_get(size, "name")).lower(): size for size in client.sizes(region)}
    size = sizes.get(target.sku.name.lower())
    if size is None:
        yield rules.OFFERED.found(f"{region} offers Azure ML no {target.sku.name}")
    elif target.interruptible and _get(size, "low_priority_capable", "lowPriorityCapable") is False:
        yield rules.OFFERED.found(f"{region} offers {target.sku.name} dedicated only, not {target.tier}")


def family_key(name: str) -> str:
    """A quota's name without what its several spellings add: `standardNDAMSv4_A100Family` and `Standard NDAMSv4_A100Family
    Cluster Dedicated vCPUs` are the same."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    key = re.sub(r"(cluster)?(dedicated|lowpriority|spot)?(regional)?vcpus$", "", key)
    return re.sub(r"family$", "", key.removeprefix("standard"))


def _quota(job: Job, target: Target, client: AzureClient, region: str) -> Iterator[Finding]:
    """A family's own for dedicated machines; one pool for all families where they are interruptible."""
    usages = client.usages(region)
    names = [(_name(usage), usage) for usage in usages]
    if target.interruptible:
        pool = [
            (name, usage) for name, usage in names if re.search(r"low.?priority|spot", name, re.IGNORECASE)
        ]
        chosen = [entry for entry in pool if "total" in entry[0].lower()] or pool
    else:
        dedicated = [
            entry for entry in names if not re.search(r"low.?priority|spot", entry[0], re.IGNORECASE)
        ]
        wanted = family_key(target.sku.family)
        chosen = [entry for entry in dedicated if family_key(entry[0]) == wanted]
    need = job.recipe.compute.nodes * target.sku.vcpus
    told = f"{job.recipe.compute.nodes} x {target.sku.name} need {need} {target.tier} vCPUs"
    if not chosen:
        what = "low-priority cores" if target.interruptible else target.sku.family
        yield rules.QUOTA_UNKNOWN.found(f"{told}; {region} lists no quota of {what}")
        return
    name, usage = chosen[0]
    limit = int(_get(usage, "limit") or 0)
    used = int(_get(usage, "current_value", "currentValue") or 0)
    if limit >= 0 and limit < need:
        yield rules.QUOTA.found(f"{told}; the quota `{name}` in {region} is {limit}")
    elif limit - used < need:
        # They may be this run's own nodes, idle since its last attempt.
        yield Finding(
            rules.QUOTA.id,
            "warning",
            f"{told}; {used} of {limit} are in use (`{name}`, {region})",
            rules.QUOTA.fix,
        )


def _name(usage: Mapping[str, Any]) -> str:
    name = _get(usage, "name")
    return str(_get(name, "value") or _get(name, "localized_value", "localizedValue") or "")


def _get(entry: Any, *names: str) -> Any:
    """A field of the SDK's entities, which are objects or dictionaries, in either spelling."""
    for name in names:
        value = entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name, None)
        if value is not None:
            return value
    return None


def _environment(job: Job, target: Target, client: AzureClient) -> Iterator[Finding]:
    environment = environment_of(settings_of(job).environment, target.workspace)
    if environment.definition is not None or environment.short.startswith("azureml://registries/"):
        return  # registered at submission; a registry's is looked up by the service
    _, name, version = environment.short.split(":")
    if client.environment(name, version) is None:
        yield rules.ENVIRONMENT.found(f"{target.workspace.name} has no environment {name}:{version}")


def _blobs(job: Job) -> dict[tuple[str, str], tuple[str, Blob]]:
    """Each container that the job reads or writes, with one of the URIs in it."""
    account = settings_of(job).storage_account
    recipe = job.recipe
    uris = [job.run_uri]
    for source in [*recipe.data.sources, *recipe.validation.sources]:
        uris += [source.uri] if isinstance(source.uri, str) else list(source.uri)
    if isinstance(recipe.model.init_from, str):
        uris.append(recipe.model.init_from)
    if recipe.encode is not None:
        uris.append(str(recipe.encode.source))  # its destination is among the data's sources
    found: dict[tuple[str, str], tuple[str, Blob]] = {}
    for uri in uris:
        blob = blob_of(uri, account)
        if blob is not None:
            found.setdefault((blob.account, blob.container), (uri, blob))
    return found


def _storage_region(job: Job, client: AzureClient, region: str) -> Iterator[Finding]:
    accounts = {account for account, _ in _blobs(job)}
    path = f"/subscriptions/{client.workspace.subscription}/providers/Microsoft.Storage/storageAccounts"
    try:
        listed = client.history().arm(f"{path}?api-version={_STORAGE_API}", "list storage accounts")
    except Missing:
        return
    where = {str(entry.get("name")): str(entry.get("location", "")) for entry in listed.get("value", [])}
    for account in sorted(accounts & set(where)):
        located = where[account].replace(" ", "").lower()
        if located and region and located != region:
            yield rules.STORAGE_REGION.found(
                f"storage account {account} is in {located}, the job in {region}"
            )


def _containers(job: Job) -> Iterator[Finding]:
    for (account, container), (uri, _) in sorted(_blobs(job).items()):
        scheme, _, rest = uri.partition("://")
        if scheme == "https":
            continue
        root = f"{scheme}://{rest.partition('/')[0]}"
        try:
            store, path = filesystems.filesystem(root)
            with filesystems.storage_errors("open", root):
                there = store.exists(path)
        except IsthmusError as error:
            yield _of(rules.STORAGE, error)
            continue
        if not there:
            yield rules.STORAGE.found(f"storage account {account} has no container {container}")
