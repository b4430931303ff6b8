"""Files that others read while they are written anew: whole, old or new, never half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name in the folder of `path` that nobody else has, to be written and then renamed or linked to `path`; what is still
    there at the end is removed.

    It is `.<name>.<process>-<chance>.tmp`: one for each call, since threads of one process write the same file, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # a read-only store refuses this too; the first error says so
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: str | bytes) -> None:
    """Puts `data`, text as UTF-8, at `path`, in place of whatever is there; the last of several writers at once has it.

    Raises:
        OSError: nothing has changed.
    """
    with temporary_beside(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
