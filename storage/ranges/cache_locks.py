"""Locks of files that the operating system lets go of when their process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


def entries(path: str | Path) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing when it is not there."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except FileNotFoundError:
        return []


def lock(descriptor: int, patience_s: float, what: str) -> None:
    """Locks an open file, for this process alone.

    Raises:
        TimeoutError: another process kept it so long.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process held {what} for {patience_s:g} s") from None
            time.sleep(0.002)  # a lock file has no event to wait for


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def is_held(path: Path) -> bool:
    """Whether a living process has the file locked."""
    return _probe(path, remove=False)


def remove_unheld(path: Path) -> bool:
    """Removes a file that nobody has locked; whether it is gone."""
    return not _probe(path, remove=True)


def _probe(path: Path, *, remove: bool) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if remove:
            path.unlink(missing_ok=True)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
