"""The container's image as an Azure ML environment: named by its content, so that the request can name it before it exists."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from isthmus.backends.azure.settings import EnvironmentSettings
from isthmus.backends.azure.target import Workspace
from isthmus.errors import UsageError

NAME = "isthmus"
"""Of the environments that isthmus registers; their versions are hashes."""
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_VERSIONED = re.compile(
    r"(?:azureml:)?(?P<name>(?!azureml:)[A-Za-z0-9][A-Za-z0-9_.-]{0,254}):(?P<version>[A-Za-z0-9_.-]+)"
)
_REGISTRY = re.compile(
    r"azureml://registries/[A-Za-z0-9-]+/environments/[A-Za-z0-9_.-]+/versions/[A-Za-z0-9_.-]+"
)
_MOST_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class ImageEnvironment:
    """The environment of a job."""

    id: str
    """As the REST body names it: an ARM id, or a registry's."""
    short: str
    """As the YAML form names it: `azureml:NAME:VERSION`, or a registry's id."""
    definition: str | None = None
    """JSON of the environment that `submit` registers when it is missing; None: it must be there."""


def environment_of(settings: EnvironmentSettings | None, workspace: Workspace) -> ImageEnvironment:
    """The environment that the settings name.

    Raises:
        UsageError: none is named, or more than one; a registered one without its version; no such build folder.
    """
    chosen = [name for name in ("image", "build", "registered") if settings and getattr(settings, name)]
    if settings is None or len(chosen) != 1:
        raise UsageError(
            "no image is named" if not chosen else f"{' and '.join(chosen)} exclude each other",
            where="backends.azure.environment",
            hint="environment: {image: registry/name@sha256:...}, or `build`, or `registered: name:version`",
        )
    if settings.registered is not None:
        return _registered(settings.registered, workspace)
    if settings.image is not None:
        definition: dict[str, Any] = {"image": settings.image, "os_type": "linux"}
        key = json.dumps(definition, sort_keys=True).encode()
    else:
        assert settings.build is not None
        definition = {
            "build": {"path": settings.build.path, "dockerfile_path": settings.build.dockerfile},
            "os_type": "linux",
        }
        key = _content(settings.build.path, settings.build.dockerfile)
    version = sha256(key).hexdigest()[:16]
    text = json.dumps({"name": NAME, "version": version, **definition}, indent=1, sort_keys=True) + "\n"
    return ImageEnvironment(_arm_id(workspace, NAME, version), f"azureml:{NAME}:{version}", text)


def _registered(reference: str, workspace: Workspace) -> ImageEnvironment:
    if _REGISTRY.fullmatch(reference):
        return ImageEnvironment(reference, reference)
    match = _VERSIONED.fullmatch(reference)
    if match is None or match["version"] == "latest":
        raise UsageError(
            f"`{reference}` names no version",
            where="backends.azure.environment.registered",
            hint="name:version, such as acpt-train:7; the SDK takes one without, and the job is refused later",
        )
    short = f"azureml:{match['name']}:{match['version']}"
    return ImageEnvironment(_arm_id(workspace, match["name"], match["version"]), short)


def _arm_id(workspace: Workspace, name: str, version: str) -> str:
    return f"{workspace.arm_id}/environments/{name}/versions/{version}"


def _content(folder: str, dockerfile: str) -> bytes:
    """The hash of a build folder: names and bytes of its files."""
    root = Path(folder).expanduser()
    if not (root / dockerfile).is_file():
        raise UsageError(f"no {dockerfile} in it", where=f"backends.azure.environment.build.path {folder}")
    digest, total = sha256(dockerfile.encode()), 0
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.is_symlink() or ".git" in path.relative_to(root).parts:
            continue
        total += path.stat().st_size
        if total > _MOST_BYTES:
            raise UsageError(
                f"holds more than {_MOST_BYTES / 1e6:.0f} MB",
                where=f"backends.azure.environment.build.path {folder}",
                hint="a Dockerfile and small files; build large images yourself and name them by digest",
            )
        digest.update(f"\0{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.digest()
