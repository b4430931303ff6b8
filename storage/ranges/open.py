"""A root's URI -> the reader of byte ranges that suits its store."""

from __future__ import annotations

from isthmus.storage.filesystems import filesystem, local_path, scheme_of
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.spec import Ranges

_DEFAULT = RetryPolicy()


def open_ranges(root_uri: str, *, policy: RetryPolicy = _DEFAULT, counters: Counters | None = None) -> Ranges:
    """The reader of the files below a root. Touches no file and no network yet.

    Args:
        root_uri: a folder (a plain path, file://), a prefix (s3://, az://, abfs(s)://, http(s)://), or any URI that
            `filesystems.filesystem` opens.
        policy: how long reads are tried.
        counters: where the reader counts; its own when not given.

    Raises:
        NotInstalled: the scheme's package is missing; the hint names the extra.
        UsageError: an unknown scheme.
    """
    counters = counters if counters is not None else Counters()
    root_uri = root_uri.rstrip("/") or "/"
    scheme = scheme_of(root_uri)
    if scheme == "file":
        from isthmus.storage.ranges.local import LocalRanges

        return LocalRanges(root_uri, local_path(root_uri), policy, counters)
    from isthmus.storage.ranges.other import OtherRanges

    store, path = filesystem(root_uri)
    return OtherRanges(
        root_uri, store, path, policy, counters, store=f"{scheme}://{path.strip('/').partition('/')[0]}"
    )
