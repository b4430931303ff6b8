"""What a run was made from: the code's commit, the lock, the packages. Imports none of the packages."""

from __future__ import annotations

import platform
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

_PACKAGES = ("isthmus", "torch", "accelerate", "diffusers")
_LOCKS = ("uv.lock", "pylock.toml", "poetry.lock", "pdm.lock", "constraints.txt", "requirements.txt")


def git(folder: Path) -> dict[str, Any] | None:
    """{sha, dirty} of the repository that a folder is in, or None."""

    def ask(*words: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    sha = ask("rev-parse", "HEAD")
    if not sha:
        return None
    # Untracked files count too: a run that used one cannot be repeated from the commit.
    return {"sha": sha, "dirty": ask("status", "--porcelain") != ""}


def packages() -> dict[str, str]:
    """Versions of what is installed of the packages that make the numbers."""
    from importlib import metadata

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def lock_hash(folder: Path) -> str | None:
    """sha256 of the first lock file in a folder, with its name, or None."""
    for name in _LOCKS:
        path = folder / name
        if path.is_file():
            return f"{name}:{sha256(path.read_bytes()).hexdigest()}"
    return None


def provenance(folder: Path) -> dict[str, Any]:
    """The fields of run.json that say what a launch from `folder` was made from."""
    return {
        "git": git(folder),
        "python": platform.python_version(),
        "packages": packages(),
        "lock_hash": lock_hash(folder),
    }
