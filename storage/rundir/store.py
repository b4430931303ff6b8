"""Small objects of a run directory: atomic writes, conditional create, listing; on a file system or an object store.

Names are relative, with forward slashes. Every failure of a store becomes one :class:`StorageError` that names
the object and the cause.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import StorageError
from isthmus.files import temporary_beside
from isthmus.storage import filesystems
from isthmus.storage.ranges import causes

_ELSEWHERE = "choose another run_directory"
_HINTS = {
    errno.ENOSPC: f"free some space, or {_ELSEWHERE}",
    errno.EDQUOT: f"free some space, or {_ELSEWHERE}",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: f"check who owns it, or {_ELSEWHERE}",
    errno.EPERM: f"check who owns it, or {_ELSEWHERE}",
    errno.ENOTDIR: _ELSEWHERE,
}


_LOGINS = {
    "s3": "log in with `aws sso login`, or set AWS_PROFILE or keys of your account",
    "az": "log in with `az login`; the account needs the role Storage Blob Data Contributor",
}
_NOBODY = {
    *(
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialUnavailableError",
        "ClientAuthenticationError",
    ),
    *("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "ProfileNotFound"),
}
"""Errors of the clouds' own clients when nobody is logged in."""


def _login(error: BaseException, place: str) -> str | None:
    """How to log in, where that is what is missing."""
    how = _LOGINS.get(filesystems.scheme_of(place))
    cause = causes.cause_of(error)
    denied = cause is not None and cause.kind is causes.Kind.DENIED
    return how if denied or type(error).__name__ in _NOBODY else None


def storage_error(error: BaseException, place: str, doing: str) -> StorageError:
    """The one line for a store's refusal: what was tried, where, and why it failed."""
    number = getattr(error, "errno", None) or 0
    if isinstance(error, PermissionError) and not number:
        number = errno.EACCES
    told = causes.cause_of(error)
    if told is not None and told.kind is causes.Kind.MISSING and "://" in place:
        cause = "there is no such bucket or container"  # an absent object is no refusal
    else:
        cause = filesystems.REASONS.get(number) or str(error) or type(error).__name__
    return StorageError(
        f"cannot {doing}: {cause}",
        where=place,
        hint=_HINTS.get(number) or _login(error, place) or (told.hint if told is not None else None),
    )


class Store(Protocol):
    """What a run directory needs of the place it is in."""

    uri: str

    def read(self, name: str) -> bytes | None:
        """The object's bytes, or None when there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces the object; a reader sees the old bytes or the new ones, never a mixture."""

    def create(self, name: str, data: bytes) -> bool:
        """Creates the object, complete, unless there is one: then False. One of several callers at once wins."""

    def names(self, folder: str) -> list[str]:
        """Names of the entries of a folder, sorted, without the folder; empty when there is no such folder."""

    def remove(self, name: str) -> None:
        """Removes an object or a folder with all in it; nothing happens when there is none."""

    def local_path(self, name: str) -> Path | None:
        """Where the object is on this machine's file system, or None for an object store."""


def open_store(uri: str) -> Store:
    """The store behind a URI; nothing is read or created. Raises NotInstalled for az:// and s3:// without their extra."""
    if filesystems.is_local(uri):
        return LocalStore(filesystems.local_path(uri))
    return ObjectStore(uri)


class LocalStore:
    """A folder. Atomic by temporary file and rename, conditional by hard link."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root.expanduser()))  # noqa: PTH100 - resolve() would follow links
        self.uri = str(self.root)

    def local_path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> bytes | None:
        path = self.root / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            return None
        except OSError as error:
            raise storage_error(error, str(path), "read") from error

    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        with self._temporary(path, data) as temporary:
            temporary.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        if path.exists():
            return False
        with self._temporary(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                    raise
                return self._create_without_links(path, data)
        return True

    @staticmethod
    def _create_without_links(path: Path, data: bytes) -> bool:
        # FUSE mounts of object stores have no hard links; O_EXCL is as exclusive, though a reader may see it half
        # written for a moment.
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        return True

    @contextmanager
    def _temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        with temporary_beside(path) as temporary:  # its leading dot keeps it out of names()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
            except OSError as error:
                raise storage_error(error, str(path), "write") from error

    def names(self, folder: str) -> list[str]:
        path = self.root / folder
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, str(path), "list") from error

    def remove(self, name: str) -> None:
        import shutil

        path = self.root / name
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, str(path), "remove") from error


class ObjectStore:
    """Any other fsspec file system: an object appears whole, and `pipe_file(mode="create")` is its conditional create."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        filesystems.check_installed(self.uri)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        # When something is read or written: a dry run names places, and loads no client to do so.
        files, path = filesystems.filesystem(self.uri)
        return files, str(path).rstrip("/")

    @property
    def _files(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def local_path(self, name: str) -> None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _place(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise storage_error(error, self._place(name), "read") from error

    def write(self, name: str, data: bytes) -> None:
        try:
            self._files.pipe_file(self._path(name), data)
        except Exception as error:
            raise storage_error(error, self._place(name), "write") from error

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if _says_exists(error):
                return False
            raise storage_error(error, self._place(name), "write") from error
        return True

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        try:
            # Another process writes here too; a cached listing would hide what it did.
            self._files.invalidate_cache(path)
            entries = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise storage_error(error, self._place(folder), "list") from error
        found = {str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries}
        return sorted(name for name in found if name and not name.startswith("."))

    def remove(self, name: str) -> None:
        try:
            self._files.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise storage_error(error, self._place(name), "remove") from error


def _says_exists(error: BaseException) -> bool:
    # s3fs and adlfs hand the service's own refusal through in some versions.
    text = f"{type(error).__name__} {error}"
    words = ("PreconditionFailed", "BlobAlreadyExists", "ResourceExists", "ConditionNotMet", "(412)")
    return any(word in text for word in words)
