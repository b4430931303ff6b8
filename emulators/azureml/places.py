"""URIs of inputs and outputs, and ids of assets, as a job may write them."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from isthmus.emulators.azureml.blobs import ACCOUNT, Place
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.world import World

_DATASTORE = re.compile(
    r"azureml://(?:subscriptions/[^/]+/resource[gG]roups/[^/]+/(?:providers/Microsoft\.MachineLearningServices/)?workspaces/[^/]+/)?"
    r"datastores/(?P<name>[^/]+)/paths/?(?P<path>.*)"
)
_SHORT = re.compile(r"azureml:(?!//)(?P<name>[^:@/]+)(?::(?P<version>[^:@/]+)|@(?P<label>[^:@/]+))?")
_REGISTRY = re.compile(
    r"azureml://registries/[^/]+/(?P<kind>[a-z]+)/(?P<name>[^/]+)/(?:versions|labels)/(?P<version>[^/]+)"
)


def asset(text: str, kind: str) -> tuple[str, str | None] | None:
    """Name and version of azureml:NAME:VERSION or of an ARM id ending in KIND/NAME/versions/VERSION.

    The version is None where none is named; None for what is neither form. `azureml:NAME@latest` has the version "@latest".
    """
    if match := _SHORT.fullmatch(text):
        label = f"@{match['label']}" if match["label"] else None
        return match["name"], match["version"] or label
    match = re.fullmatch(
        rf"(?:azureml:)?/subscriptions/.+/{kind}/(?P<name>[^/]+)(?:/(?:versions|labels)/(?P<version>[^/]+))?",
        text,
        re.I,
    )
    return (match["name"], match["version"]) if match else None


def in_registry(text: str) -> str | None:
    """Name and version, joined by a colon, of an asset in a shared registry; None for anything else."""
    match = _REGISTRY.fullmatch(
        text.removeprefix("azureml:") if text.startswith("azureml:azureml://") else text
    )
    return f"{match['name']}:{match['version']}" if match else None


def last_of(text: str, kind: str) -> str:
    """NAME of an ARM id that ends in KIND/NAME, or of azureml:NAME; else the text itself."""
    match = re.fullmatch(rf"/subscriptions/.+/{kind}/([^/]+)", text, re.I)
    return match[1] if match else text.removeprefix("azureml:")


def find_place(uri: str, world: World, *, endpoint: str, rule: str) -> Place | None:
    """Where a URI points in the workspace's account; None where it points to another account.

    Args:
        endpoint: the account's address here, which is taken for what Azure would call it.
        rule: id of the rule by which a URI of no known form is refused.

    Raises:
        Refused: of no known form, or a datastore or data asset that does not exist.
    """
    if match := _DATASTORE.fullmatch(uri):
        container = world.datastores.get(match["name"])
        if container is None:
            raise refuse("job-datastore", f"Could not find datastore with name: {match['name']}")
        return Place(container, match["path"].strip("/"))
    if uri.startswith(endpoint + "/"):
        container, _, path = unquote(urlsplit(uri[len(endpoint) + 1 :]).path).partition("/")
        return Place(container, path.strip("/"))
    if found := asset(uri, "data"):
        name, version = found
        versions = [v for (n, v) in world.data if n == name]
        if version == "@latest" and versions:
            version = versions[-1]
        entry = world.data.get((name, version or ""))
        if entry is None:
            raise refuse("job-datastore", f"Could not find data asset {name} of version {version}")
        return find_place(entry["properties"]["dataUri"], world, endpoint=endpoint, rule=rule)
    parts = urlsplit(uri)
    host = parts.hostname or ""
    account, _, domain = host.partition(".")
    path = unquote(parts.path).strip("/")
    if parts.scheme == "https" and domain in ("blob.core.windows.net", "dfs.core.windows.net"):
        container, _, below = path.partition("/")
        place = Place(container, below)
    elif (parts.scheme in ("wasbs", "wasb") and domain == "blob.core.windows.net" and parts.username) or (
        parts.scheme in ("abfss", "abfs") and domain == "dfs.core.windows.net" and parts.username
    ):
        place = Place(parts.username, path)
    else:
        raise refuse(rule, f"The uri {uri!r} is of no form that can be mounted, downloaded or written")
    if not place.container:
        raise refuse(rule, f"The uri {uri!r} names no container")
    return place if account == ACCOUNT else None
