"""A container image's Python for tests: a real virtual environment that has what we choose, made offline in a second."""

from __future__ import annotations

import csv
import importlib.metadata
import re
import site
import subprocess
import sys
import zipfile
from collections.abc import Collection
from pathlib import Path

from isthmus.backends.wheel import Wheel


def image(
    place: Path, *, without: Collection[str] = (), isthmus: Wheel | None = None, pip: bool = False
) -> Path:
    """Makes an environment; returns its python.

    Args:
        place: the environment's folder.
        without: distributions that it lacks, besides isthmus.
        isthmus: installed in it.
        pip: whether it has pip.
    """
    # ensurepip takes seconds; ours does as well.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, capture_output=True
    )
    (packages,) = (place / "lib").glob("python3*/site-packages")
    out = {plain(name) for name in ("isthmus", *without)}
    hidden = set()
    for found in importlib.metadata.distributions():
        if plain(found.metadata["Name"]) in out:
            hidden |= {
                path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")
            }
    for folder in map(Path, site.getsitepackages()):
        for path in folder.iterdir():
            skipped = path.name in hidden or path.name.startswith("__editable__")
            skipped = skipped or (not pip and path.name.startswith("pip"))
            if not skipped and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    if isthmus is not None:
        file = place / isthmus.name
        file.write_bytes(isthmus.data)
        with zipfile.ZipFile(file) as archive:
            archive.extractall(packages)
    return place / "bin" / "python"


def wheel_of(name: str, folder: Path) -> Path:
    """A wheel of a pure distribution that is installed here, for a folder of wheels; offline."""
    found = importlib.metadata.distribution(name)
    files = [path for path in found.files or () if path.parts[0] not in ("..",) and path.suffix != ".pyc"]
    spelled = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    target = folder / f"{spelled}-{found.version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path in files:
            if path.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                archive.write(str(path.locate()), str(path))
        record = next(path for path in files if path.name == "RECORD")
        rows = [
            row for row in csv.reader(record.read_text().splitlines()) if row and row[0] in archive.namelist()
        ]
        text = "".join(f"{','.join(row)}\n" for row in [*rows, [str(record), "", ""]])
        archive.writestr(str(record), text)
    return target


def plain(name: str) -> str:
    """As a package index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
