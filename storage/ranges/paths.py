"""Names of files below a root."""

from __future__ import annotations

from isthmus.errors import DataError


def checked(name: str, uri: str) -> str:
    """The name itself, if it stays below the root.

    Raises:
        DataError: it is empty, absolute, or leads out of the root ('..'), or holds a backslash, a NUL or half a character.
    """
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts) or not _whole(name):
        raise DataError(f"{name!r} is no name of a file below this root", where=uri)
    return name


def _whole(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
        return False
    return True
