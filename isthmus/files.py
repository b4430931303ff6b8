"""Files that others read while they are written anew: whole, old or new, never half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Puts `data` at `path`, in place of whatever is there; the last of several writers at once has it.

    Args:
        data: text is written as UTF-8.
        sync: on the disk before it is in place, so that it survives the machine.

    Raises:
        OSError: nothing has changed.
    """
    # A name for each call, not for each process: threads of one process write the same file, too.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # a read-only store refuses this too; the first error says so
            temporary.unlink(missing_ok=True)
