"""The running isthmus as a wheel, without a build tool: what was launched is what runs in the container.

An editable installation is taken from its folders as `pyproject.toml` maps them, an installed one from the files that
its RECORD lists. The same files make the same bytes: stored, not compressed, dates fixed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import re
import stat
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isthmus
from isthmus.errors import UsageError

_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT = {"__pycache__"}


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel file."""

    name: str
    """`isthmus-<version>-py3-none-any.whl`."""
    data: bytes


def build(root: Path | None = None) -> Wheel:
    """The wheel of the running installation.

    Args:
        root: a folder with our `pyproject.toml`; None: where the running isthmus was loaded from, if it has one.

    Raises:
        UsageError: isthmus is neither a source folder nor an installed distribution.
    """
    root = root or Path(isthmus.__file__).parents[1]
    project = _project(root)
    if project is not None:
        version = _version(root)
        files = dict(_from_source(root, project))
        info = {
            "METADATA": _metadata(project["project"], version),
            "entry_points.txt": _entry_points(project["project"]),
            **_licenses(root, project["project"]),
        }
    else:
        version, files, info = _installed(root)
    # PEP 427: dashes in a version would end its field of the file's name.
    spelled = re.sub(r"[^\w.+!]+", "_", version)
    folder = f"isthmus-{spelled}.dist-info"
    info["WHEEL"] = b"Wheel-Version: 1.0\nGenerator: isthmus\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {name: files[name] for name in sorted(files)}
    content |= {f"{folder}/{name}": info[name] for name in sorted(info)}
    return Wheel(f"isthmus-{spelled}-py3-none-any.whl", _pack(content, f"{folder}/RECORD"))


def _project(root: Path) -> dict[str, Any] | None:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return project if project.get("project", {}).get("name") == "isthmus" else None


def _version(root: Path) -> str:
    found = re.search(
        r'^__version__ = "([^"]+)"', (root / "isthmus/__init__.py").read_text("utf-8"), re.MULTILINE
    )
    return found[1] if found else isthmus.__version__


def _from_source(root: Path, project: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    settings = project["tool"]["setuptools"]
    mapping: dict[str, str] = settings["package-dir"]
    data: dict[str, list[str]] = settings.get("package-data", {})
    for package in settings["packages"]:
        folder = root / _folder_of(package, mapping)
        names = [
            *folder.glob("*.py"),
            *(path for glob in data.get(package, ()) for path in folder.glob(glob)),
        ]
        for path in names:
            if path.is_file() and not _LEFT_OUT & set(path.parts):
                yield f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _folder_of(package: str, mapping: Mapping[str, str]) -> str:
    """As setuptools does: the longest mapped beginning of the name, the rest below it."""
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        start = mapping.get(".".join(parts[:length]))
        if start is not None:
            return "/".join([start, *parts[length:]])
    return "/".join([mapping.get("", "."), *parts])


def _installed(root: Path) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    for found in importlib.metadata.distributions(name="isthmus", path=[str(root)]):
        listed = [path for path in found.files or () if not _LEFT_OUT & set(path.parts)]
        files = {str(path): Path(path.locate()).read_bytes() for path in listed if path.parts[0] == "isthmus"}
        if files:
            break
    else:
        raise UsageError(
            "cannot make a wheel of isthmus: it is neither an installed package nor a source folder",
            where=str(root),
            hint="pip install it",
        )
    info = {
        "/".join(path.parts[1:]): Path(path.locate()).read_bytes()
        for path in listed
        if path.parts[0].endswith(".dist-info")
        and (path.name in ("METADATA", "entry_points.txt") or "licenses" in path.parts)
    }
    return found.version, files, info


def _metadata(project: Mapping[str, Any], version: str) -> bytes:
    lines = ["Metadata-Version: 2.4", "Name: isthmus", f"Version: {version}"]
    lines.append(f"Summary: {project['description']}")
    lines.append(f"License-Expression: {project['license']}")
    lines += [f"License-File: {name}" for name in project.get("license-files", ())]
    lines.append(f"Requires-Python: {project['requires-python']}")
    lines += [f"Requires-Dist: {text}" for text in project["dependencies"]]
    for extra, wanted in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_with_marker(text, extra)}" for text in wanted]
    return ("\n".join(lines) + "\n").encode()


def _with_marker(requirement: str, extra: str) -> str:
    wanted, _, marker = requirement.partition(";")
    condition = f'extra == "{extra}"'
    return f"{wanted.strip()}; " + (f"({marker.strip()}) and {condition}" if marker else condition)


def _entry_points(project: Mapping[str, Any]) -> bytes:
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    return "\n".join(lines).encode()


def _licenses(root: Path, project: Mapping[str, Any]) -> dict[str, bytes]:
    return {
        f"licenses/{name}": (root / name).read_bytes()
        for name in project.get("license-files", ())
        if (root / name).is_file()
    }


def _pack(content: Mapping[str, bytes], record_name: str) -> bytes:
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    buffer = io.BytesIO()
    # Stored: what a compressor makes of the same bytes differs between its versions.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((name, f"sha256={digest}", len(data)))
            archive.writestr(_entry(name), data)
        rows.writerow((record_name, "", ""))
        archive.writestr(_entry(record_name), record.getvalue())
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.create_system = 3
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry
