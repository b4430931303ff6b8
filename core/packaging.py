"""A team's own code, from the folder that a recipe's `code` names to every rank, by content hash.

The folder becomes one file, `code/<sha256>.zip` in the run directory, the same bytes for the same files; the job's
recipe names the hash instead of the folder. A rank reads it from there, compares the hash, and imports what it
unpacked: never the launcher's disk, and the same on every backend. The folder must hold `isthmus_plugin.py`, which
announces what is in it (:mod:`isthmus.core.plugins`).

Left out are hidden files and folders (`.git`, `.env`), what Python and its tools leave behind, and files that are
keys by their name. A link that leads out of the folder is refused, and so is a file with what looks like a credential.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from isthmus.core.recipe.secrets import credential
from isthmus.errors import DataError, UsageError

ENTRY = "isthmus_plugin.py"
"""The module that a rank imports."""
MAX_BYTES = 32 * 2**20
"""Of all files together: code and small settings, no weights and no data."""
MAX_FILES = 2000
_PREFIX = "sha256:"
_LEFT_OUT = (
    ".*", "__pycache__", "*.pyc", "*.egg-info", "node_modules", "venv",
    "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_ed25519*", "credentials", "credentials.*",
    "secrets", "secrets.*",
)  # fmt: skip
"""Names of files and folders, lower case."""
_TEXT = {".py", ".yaml", ".yml", ".json", ".toml", ".txt", ".cfg", ".ini", ".sh", ".md", ""}


@dataclass(frozen=True, slots=True)
class Package:
    """A folder of code as one file."""

    folder: str
    """As the recipe names it."""
    sha256: str
    """Of `data`, 64 hexadecimal digits."""
    data: bytes
    files: tuple[str, ...]
    """Names within, sorted."""
    left_out: tuple[str, ...]
    """Names of files and folders that were not taken."""

    @property
    def name(self) -> str:
        """Where it lies in a run directory."""
        return file_name(self.sha256)

    @property
    def reference(self) -> str:
        """What the job's recipe says instead of the folder."""
        return _PREFIX + self.sha256

    def facts(self) -> dict[str, object]:
        """For run.json."""
        return {
            "folder": self.folder,
            "sha256": self.sha256,
            "files": len(self.files),
            "bytes": len(self.data),
        }


def file_name(sha256: str) -> str:
    """A package's name in a run directory."""
    return f"code/{sha256}.zip"


def digest_of(code: str) -> str | None:
    """The hash that a job's recipe names; None when it names a folder."""
    digest = code.removeprefix(_PREFIX)
    known = code.startswith(_PREFIX) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    return digest if known else None


def pack(folder: str) -> Package:
    """The folder as a package, the same bytes wherever and whenever it is made.

    Raises:
        UsageError: there is no such folder or entry module in it, a file does not parse or holds a credential, a link
            leads out, or it is too large.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UsageError("no such folder", where=f"code {folder}", hint="a folder with an isthmus_plugin.py")
    if not (root / ENTRY).is_file():
        raise UsageError(
            f"has no {ENTRY}", where=f"code {folder}", hint="the module that announces your denoisers"
        )
    left_out: list[str] = []
    names = sorted(_names(root, left_out))
    buffer, total = io.BytesIO(), 0
    # Stored, not compressed: what a compressor makes of the same bytes differs between its versions.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            path = root / name
            total += path.stat().st_size
            if total > MAX_BYTES:
                raise _too_large(folder, root, names)
            content = path.read_bytes()
            _check(folder, name, content)
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, content)
    data = buffer.getvalue()
    return Package(
        folder=folder,
        sha256=hashlib.sha256(data).hexdigest(),
        data=data,
        files=tuple(names),
        left_out=tuple(sorted(left_out)),
    )


def unpack(data: bytes, sha256: str, target: Path, *, where: str) -> None:
    """Write a package's files below `target`, an empty folder.

    Raises:
        DataError: it is not what the hash says, or no package of ours.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(
            f"is not what the run was begun with: its hash is {found[:12]}, not {sha256[:12]}", where=where
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise DataError("is larger than a package may be", where=where)
            for entry in entries:
                name = PurePosixPath(entry.filename)
                kind = stat.S_IFMT(entry.external_attr >> 16)
                outside = (
                    name.is_absolute() or ".." in name.parts or "\\" in entry.filename or ":" in name.parts[0]
                )
                if outside or kind not in (0, stat.S_IFREG):
                    raise DataError(f"holds {entry.filename!r}, which is no file below it", where=where)
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, IndexError, NotImplementedError) as error:
        raise DataError(f"is no package: {error}", where=where) from error


def _names(root: Path, left_out: list[str]) -> Iterator[str]:
    count = 0
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        for name in [*folders, *files]:
            path = here / name
            relative = path.relative_to(root).as_posix()
            if any(fnmatch(name.lower(), pattern) for pattern in _LEFT_OUT):
                left_out.append(relative)
                if name in folders:
                    folders.remove(name)
                continue
            if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(inside)):
                raise UsageError(
                    f"{relative} is a link {'to a folder' if path.is_dir() else 'that leads out of the folder'}",
                    where=f"code {root}",
                    hint="copy what it points to",
                )
            if path.is_file():
                count += 1
                if count > MAX_FILES:
                    raise UsageError(
                        f"holds more than {MAX_FILES} files",
                        where=f"code {root}",
                        hint="a folder of code alone",
                    )
                yield relative


def _too_large(folder: str, root: Path, names: list[str]) -> UsageError:
    largest = max(names, key=lambda name: (root / name).stat().st_size)
    size = (root / largest).stat().st_size / 1e6
    return UsageError(
        f"holds more than {MAX_BYTES / 2**20:.0f} MiB; the largest file is {largest} with {size:.1f} MB",
        where=f"code {folder}",
        hint="keep data and weights elsewhere",
    )


def _check(folder: str, name: str, content: bytes) -> None:
    if Path(name).suffix not in _TEXT:
        return
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    for number, line in enumerate(text.splitlines(), 1):
        kind = credential(line)
        if kind:
            raise UsageError(
                f"looks like {kind}", where=f"{folder}/{name}:{number}", hint="code is copied into every run"
            )
    if name.endswith(".py"):
        try:
            compile(content, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            number = getattr(error, "lineno", None) or 1
            place = f"{folder}/{name}:{number}"
            raise UsageError(f"does not parse: {getattr(error, 'msg', None) or error}", where=place) from None
