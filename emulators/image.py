"""What stands for a container image here: an interpreter and the environment that the image would set."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An "image" of this machine: its root file system is the machine's own."""

    python: str = sys.executable
    """The interpreter that `python` and `python3` mean in the container: its folder comes first on the PATH."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the image sets (ENV); the job's own environment overrides it."""
    entrypoint: tuple[str, ...] = ("train",)
    """The image's ENTRYPOINT, for a job that names none."""

    def environment(self) -> dict[str, str]:
        """The variables that every container of this image starts with."""
        folder = Path(self.python).absolute().parent
        return {"PATH": f"{folder}:{SYSTEM_PATH}", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **self.env}


def find_image(images: Mapping[str, Image], name: str) -> Image | None:
    """The image for a name: by the name itself, else by the first pattern (`*` as in a shell) that fits; None if none does."""
    if name in images:
        return images[name]
    return next((image for pattern, image in images.items() if fnmatch.fnmatchcase(name, pattern)), None)
