"""A root's URI -> the reader of byte ranges that suits its store."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import UsageError
from isthmus.storage.filesystems import filesystem, local_path, scheme_of
from isthmus.storage.ranges import clients, settings
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import Ranges

_DEFAULT = RetryPolicy()


def open_ranges(root_uri: str, *, policy: RetryPolicy = _DEFAULT, counters: Counters | None = None) -> Ranges:
    """The reader of the files below a root. Touches no file and no network yet.

    s3://, az://, abfs(s):// and http(s):// are read over connections of our own; by obstore, else by s3fs, adlfs and
    aiohttp through fsspec, where credentials are needed that only these find, or a web server sends us elsewhere. The
    results are the same.

    Args:
        root_uri: a folder (a plain path, file://), a prefix (s3://, az://, abfs(s)://, http(s)://), or any URI that
            `filesystems.filesystem` opens.
        policy: how long reads are tried.
        counters: where the reader counts; its own when not given.

    Raises:
        NotInstalled: the scheme's package is missing; the hint names the extra.
        UsageError: an unknown scheme, or a storage account that nobody names.
    """
    counters = counters if counters is not None else Counters()
    root_uri = root_uri.rstrip("/") or "/"
    scheme = scheme_of(root_uri)
    if scheme in {"http", "https"} and (
        "?" in root_uri or "@" in root_uri.partition("://")[2].partition("/")[0]
    ):
        raise UsageError(
            "an address with a password or a signature cannot be a root",
            where=root_uri.partition("?")[0].rpartition("@")[2],
            hint="use the store's own scheme (s3://, az://) and credentials from the environment",
        )
    if scheme == "file":
        from isthmus.storage.ranges.local import LocalRanges

        return LocalRanges(root_uri, local_path(root_uri), policy, counters)
    if scheme in clients.OBJECT_SCHEMES:
        from isthmus.storage.ranges.direct import DirectRanges

        if scheme in settings.AZURE_SCHEMES:
            settings.AzureAccount.of(root_uri)
        return DirectRanges(
            root_uri,
            policy,
            counters,
            store=_store(root_uri),
            instead=lambda: open_library(root_uri, policy=policy, counters=counters),
        )
    return open_fsspec(root_uri, policy=policy, counters=counters)


def open_library(
    root_uri: str, *, policy: RetryPolicy = _DEFAULT, counters: Counters | None = None
) -> Ranges:
    """The reader of a root by a library's client: obstore where it may be used, else fsspec's. See `open_ranges`."""
    root_uri = root_uri.rstrip("/")
    if not clients.obstore_usable():
        return open_fsspec(root_uri, policy=policy, counters=counters)
    from isthmus.storage.ranges.objects import ObjectRanges

    counters = counters if counters is not None else Counters()
    return ObjectRanges(root_uri, policy, counters, store=_store(root_uri))


def open_fsspec(root_uri: str, *, policy: RetryPolicy = _DEFAULT, counters: Counters | None = None) -> Ranges:
    """The reader of a root through fsspec, whatever is installed. See `open_ranges`."""
    from isthmus.storage.ranges.other import OtherRanges

    root_uri = root_uri.rstrip("/")
    return OtherRanges(
        root_uri,
        lambda: connect(root_uri, policy),
        policy,
        counters if counters is not None else Counters(),
        store=_store(root_uri),
    )


def _store(uri: str) -> str:
    """What throttles as one: a bucket, a container, a host."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc}"


def connect(uri: str, policy: RetryPolicy, *, retries: int = 0) -> tuple[Any, str]:
    """A file system of the caller's own, and the path in it.

    Args:
        uri: the root.
        policy: its limit on silence.
        retries: of each request by the file system itself, where that can be said to it; 0 leaves them to us.
    """
    scheme = urlsplit(uri).scheme
    options: dict[str, Any] = {}
    if scheme in clients.OBJECT_SCHEMES:
        options["skip_instance_cache"] = True
    if scheme == "s3":
        options["config_kwargs"] = {
            "retries": {"max_attempts": retries},
            "connect_timeout": min(policy.stall_s, 10.0),
            "read_timeout": policy.stall_s,
            "max_pool_connections": 64,
        }
    store, path = filesystem(uri, **options)
    if scheme == "s3":
        store.retries = 1
    if scheme in settings.AZURE_SCHEMES:
        # The Blob client would wait 15 s before it tries again, and adlfs has no option to say that it should not.
        pipeline = getattr(getattr(store, "service_client", None), "_pipeline", None)
        for step in getattr(pipeline, "_impl_policies", ()):
            if hasattr(step, "total_retries"):
                step.total_retries = retries
    return store, path
