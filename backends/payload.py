"""What a cloud job needs beside its request, in the run directory: recipe, start.py, the isthmus wheel, the user's wheels.

The cloud mounts or downloads that folder, and the container runs its `start.py` (`START`, the text of
:mod:`isthmus.backends.start`), so that any image with Python and torch does: isthmus itself comes with the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib import resources
from pathlib import Path

from isthmus.backends import wheel
from isthmus.backends.spec import Rendered
from isthmus.errors import UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

START = resources.files("isthmus.backends").joinpath("start.py").read_text(encoding="utf-8")
"""What `render` puts in `files["start.py"]`."""
_INDEX = "files.json"
"""Name -> size and hash of what lies in the folder; written last, so that a file that it names is whole."""


def folder_uri(run_uri: str, job_id: str) -> str:
    """Where a job's files lie, without a slash at the end; known before anything is there."""
    return filesystems.join(run_uri, "jobs", job_id)


def start_command(
    folder: str,
    *,
    run_uri: str,
    job_id: str,
    cluster: str,
    grace: float | None = None,
    places: Mapping[str, str] | None = None,
    python: str = "python3",
) -> list[str]:
    """The container's command, one argument an item; to be exec'ed, so that it is the container's first process.

    Args:
        folder: where the container finds the job's files; may be the cloud's own expression for a mount.
        cluster: name of the adapter (`isthmus.core.cluster`).
        grace: seconds from SIGTERM to SIGKILL, where it is not the contract's own.
        places: what `place:NAME` means in the job's recipe, where only the command line can tell.
    """
    command = [python, f"{folder.rstrip('/')}/start.py", "--run", run_uri, "--job", job_id]
    command += ["--cluster", cluster]
    if grace is not None:
        command += ["--grace", f"{grace:g}"]
    for name, path in (places or {}).items():
        command += ["--place", f"{name}={path}"]
    return command


def put(rendered: Rendered, wheels: str | Path | None = None) -> str:
    """Writes the job's files to the run directory, each only when it is not there already; returns the folder's URI.

    Args:
        rendered: its `files` are written as they are.
        wheels: a folder of wheels for what the image lacks; None: the one that `rendered.native["wheels"]` names, if any.

    Raises:
        UsageError: there is no such folder, or no wheel in it.
        StorageError: the run directory cannot be written.
    """
    run = RunDirectory(rendered.run_uri)
    place = f"jobs/{rendered.job_id}"
    there = set(run.file_names(place))
    index = _read_index(run, place) if _INDEX in there else {}
    now: dict[str, dict[str, object]] = {}
    for name, data in _files(rendered, wheels or rendered.native.get("wheels")):
        now[name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        if name not in there or index.get(name) != now[name]:
            run.write_file(f"{place}/{name}", data)
    if index != now:
        run.write_file(f"{place}/{_INDEX}", json.dumps(now, indent=1, sort_keys=True).encode())
    return folder_uri(run.uri, rendered.job_id)


def _files(rendered: Rendered, wheels: str | Path | None) -> Iterable[tuple[str, bytes]]:
    for name, text in rendered.files.items():
        yield name, text.encode()
    ours = wheel.build()
    yield ours.name, ours.data
    for path in _wheels(wheels) if wheels is not None else ():
        if path.name != ours.name:
            yield path.name, path.read_bytes()


def _wheels(folder: str | Path) -> list[Path]:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError("no such folder", where=f"wheels {folder}", hint="a folder of .whl files")
    found = sorted(path.glob("*.whl"))
    if not found:
        raise UsageError(
            "holds no wheel", where=f"wheels {folder}", hint="pip download --dest FOLDER PACKAGE fills it"
        )
    return found


def _read_index(run: RunDirectory, place: str) -> dict[str, object]:
    try:
        found = json.loads(run.read_file(f"{place}/{_INDEX}") or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
