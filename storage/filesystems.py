"""URI -> file system. A lazy registry: a scheme names the module it needs and the extra that brings it."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from isthmus.errors import IsthmusError, NotInstalled, PlaceNotFound, StorageError, UsageError
from isthmus.storage import identity
from isthmus.storage.ranges import causes, settings

FileSystem = Any
"""An `fsspec.AbstractFileSystem`; fsspec ships no types."""
_SILENT = logging.NullHandler()

SCHEMES: dict[str, tuple[str, str] | None] = {
    "file": None,
    "memory": None,
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "s3": ("s3fs", "sagemaker"),
    "http": ("aiohttp", "train"),
    "https": ("aiohttp", "train"),
}
"""Scheme -> (module, extra), or None when it needs no more than the launcher has."""


def scheme_of(uri: str) -> str:
    """The scheme of a URI, `file` for a plain path. UsageError for one that nobody here can open."""
    head, separator, _ = uri.partition("://")
    if not separator:
        return "file"
    if head not in SCHEMES:
        close = difflib.get_close_matches(head, SCHEMES, n=1)
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(
            f"no file system for {head}://",
            where=uri,
            hint=f"did you mean {close[0]}://? known: {known}" if close else f"known: a plain path, {known}",
        )
    return head


def check_installed(uri: str) -> str:
    """The scheme of a URI that can be opened here; imports nothing. Raises NotInstalled, UsageError."""
    scheme = scheme_of(uri)
    needs = SCHEMES[scheme]
    if needs is not None and importlib.util.find_spec(needs[0]) is None:
        raise NotInstalled(f"opening {scheme}:// paths", extra=needs[1], module=needs[0])
    return scheme


def filesystem(uri: str, **options: Any) -> tuple[FileSystem, str]:
    """The file system of a URI and the path within it. Endpoints and accounts come from the environment (`ranges.settings`).

    Args:
        options: further ones of the fsspec file system.

    Raises:
        NotInstalled: the scheme's package is missing; the hint names the extra.
        UsageError: an unknown scheme, or a storage account that nobody names.
    """
    scheme = check_installed(uri)
    if scheme == "file":
        import fsspec

        return fsspec.filesystem("file"), str(local_path(uri))
    import fsspec

    if scheme in settings.AZURE_SCHEMES:
        # Each try of a login is logged at length, and Python's last resort is stderr: what there is to say comes as an error.
        logging.getLogger("azure").addHandler(_SILENT)
    with storage_errors("open", uri):
        store, path = fsspec.core.url_to_fs(uri, **{**settings.options_of(uri), **_login(uri), **options})
    return store, str(path)


def _login(uri: str) -> dict[str, Any]:
    """Whom adlfs acts as, where neither a key nor a SAS opens the account: the process's one identity."""
    if urlsplit(uri).scheme not in settings.AZURE_SCHEMES:
        return {}
    account = settings.AzureAccount.of(uri)
    if account.key or account.sas or account.anonymous:
        return {}
    return {"credential": identity.AsyncIdentity(identity.shared())}


def is_local(uri: str) -> bool:
    """Whether a URI is a path on this machine."""
    return scheme_of(uri) == "file"


def local_path(uri: str) -> Path:
    """The absolute path of a local URI."""
    if not is_local(uri):
        raise UsageError("not a path on this machine", where=uri)
    return Path(uri.removeprefix("file://")).expanduser().absolute()


def make_folder(store: FileSystem, path: str, uri: str) -> None:
    """Makes a folder on this machine, with those above it.

    An object store has none. Its client is not asked: where the bucket's name is misspelt, it would create that bucket.
    """
    if SCHEMES[scheme_of(uri)] is None:
        store.makedirs(path, exist_ok=True)


def join(uri: str, *parts: str) -> str:
    """A URI below another: ``join("az://c/x/", "a", "b")`` -> ``az://c/x/a/b``."""
    head, separator, path = uri.rpartition("://")
    pieces = [path.rstrip("/") or ("/" if path.startswith("/") else ""), *(part.strip("/") for part in parts)]
    joined = "/".join(piece for piece in pieces if piece)
    return head + separator + joined.replace("//", "/")


REASONS = causes.REASONS
"""What a store's refusal means, by errno."""


@contextmanager
def storage_errors(action: str, uri: str) -> Iterator[None]:
    """Turns what a store raises while it does `action` to `uri` into one StorageError line.

    FileNotFoundError passes: whether an absent file is an error is the caller's to say; but for `write`, where it means that
    the bucket is not there: PlaceNotFound. This package's own errors pass, and what is no refusal of a store.
    """
    try:
        yield
    except FileNotFoundError as error:
        if action == "write":
            raise PlaceNotFound(uri) from error
        raise
    except IsthmusError:
        raise
    except Exception as error:
        cause = causes.cause_of(error)
        if cause is None:
            raise
        if cause.kind is causes.Kind.MISSING:
            if action == "write":
                raise PlaceNotFound(uri) from error
            raise FileNotFoundError(f"{uri}: {cause.words}") from error
        raise StorageError(f"cannot {action}: {cause.words}", where=uri, hint=cause.hint) from error
