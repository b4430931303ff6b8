"""Brings a run's own code into this process: from the run directory, checked, imported, its denoisers announced."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

from isthmus.core.models.denoisers import announce, cause_of, forget_code
from isthmus.core.packaging import ENTRY, file_name, unpack
from isthmus.errors import PluginError, StorageError

_brought: dict[str, Path] = {}
"""Hash -> folder of the code that this process uses; at most one."""


class Run(Protocol):
    """What is used of a run directory."""

    uri: str

    def read_file(self, name: str) -> bytes | None: ...


def bring(run: Run, sha256: str) -> None:
    """Unpack and import the code of that hash; again in the same process it does nothing.

    The folder goes first on the module path, and is removed when the process ends.

    Raises:
        StorageError: it is not in the run directory.
        DataError: it is not what the hash says.
        PluginError: it cannot be imported, or announces nothing.
    """
    if sha256 in _brought:
        return
    data = run.read_file(file_name(sha256))
    where = f"{run.uri}/{file_name(sha256)}"
    if data is None:
        raise StorageError("the run's code is not there", where=where)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(data, sha256, folder, where=where)
    _leave()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    _brought[sha256] = folder
    name = ENTRY.removesuffix(".py")
    try:
        hook: Any = getattr(importlib.import_module(name), "isthmus_denoisers", None)
        entries = hook() if callable(hook) else None
    except Exception as error:
        _leave()
        raise PluginError(f"failed: {cause_of(error)}", where=f"code: {ENTRY}") from error
    if not isinstance(entries, (list, tuple)) or not entries:
        _leave()
        raise PluginError(
            "announces no denoiser",
            where=f"code: {ENTRY}",
            hint="a function isthmus_denoisers() that returns pairs such as ('my-dit', 'my_dit:MyDiT')",
        )
    announce(entries, f"code: {ENTRY}")


def _leave() -> None:
    """Forget other code that this process used before, as a notebook that samples two runs does."""
    for folder in _brought.values():
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[name]
    _brought.clear()
    # One that was imported from elsewhere would hide the run's.
    sys.modules.pop(ENTRY.removesuffix(".py"), None)
    forget_code()
