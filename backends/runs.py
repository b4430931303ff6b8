"""Run records: what this machine launched, so that a run can be named by its id or the start of it.

The run directory holds the whole truth of a run; a record only says where it is and how to reach its job.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from isthmus.backends.spec import Handle
from isthmus.errors import RunNotFound, StorageError, UsageError
from isthmus.files import replace_file
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run that was launched from this machine."""

    id: str
    name: str
    backend: str
    run_uri: str
    created: float
    """Seconds since 1970."""
    handle: Mapping[str, Any]
    """Of the newest submission, as JSON."""

    def to_handle(self) -> Handle:
        """The handle of the newest submission."""
        return Handle.from_json(self.handle)


def state_folder() -> Path:
    """Where isthmus keeps what is this machine's own: `$XDG_STATE_HOME/isthmus`, by default under ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "isthmus"


def new_run_id(name: str, recipe_hash: str, now: datetime | None = None) -> str:
    """`<name>-<UTC time>-<short hash>`; the hash mixes the recipe's with chance, so that two launches differ."""
    from hashlib import sha256

    moment = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    short = sha256(f"{recipe_hash}{secrets.token_hex(8)}".encode()).hexdigest()[:6]
    return f"{name}-{moment}-{short}"


def check_run_id(run_id: str) -> str:
    """The id itself. Raises UsageError when it could not name a folder everywhere."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"{run_id!r} cannot be a run id", hint="lower-case letters, digits, dots, dashes and underscores"
        )
    return run_id


def save(record: Record) -> None:
    """Writes the record; an older one of the same id is replaced. Raises StorageError."""
    folder = state_folder() / "runs"
    path = folder / f"{record.id}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(record), indent=1))
    except OSError as error:
        raise StorageError(
            f"cannot write the run record: {error.strerror}",
            where=str(path),
            hint="set XDG_STATE_HOME to a folder that can be written",
        ) from error


def records() -> list[Record]:
    """All records, the newest first; an unreadable one is left out."""
    found = []
    folder = state_folder() / "runs"
    for path in folder.glob("*.json") if folder.is_dir() else []:
        try:
            found.append(Record(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda record: record.created, reverse=True)


def find(text: str) -> Record:
    """The record of a run, given its id, the unique start of its id, or its path or URI.

    Raises:
        RunNotFound: there is none; names the ones that begin alike.
    """
    known = records()
    exact = [record for record in known if record.id == text]
    if exact:
        return exact[0]
    if "/" in text or Path(text).is_dir():
        return _at(text, known)
    near = [record for record in known if record.id.startswith(text)]
    if len(near) == 1:
        return near[0]
    if near:
        names = ", ".join(record.id for record in near[:5])
        raise RunNotFound(f"{text!r} begins several runs: {names}", hint="give more of the id")
    from difflib import get_close_matches

    close = get_close_matches(text, [record.id for record in known], n=1)
    hint = f"did you mean {close[0]}?" if close else "`isthmus runs list` shows the known ones"
    raise RunNotFound(f"no run {text!r}", hint=hint)


def _at(place: str, known: list[Record]) -> Record:
    run = RunDirectory.open(place)
    for record in known:
        if _same(record.run_uri, run.uri):
            return record
    return record_of(run)


def record_of(run: RunDirectory) -> Record:
    """What a run directory itself tells. Raises RunNotFound."""
    data = run.read_run_json()
    handle = newest_handle(run, data)
    created = data.get("created")
    return Record(
        id=str(data.get("id")),
        name=str(data.get("name")),
        backend=handle.backend,
        run_uri=run.uri,
        created=float(created) if isinstance(created, int | float) else 0.0,
        handle=handle.to_json(),
    )


def newest_handle(run: RunDirectory, run_json: Mapping[str, Any]) -> Handle:
    """Of the newest submission; its `native` holds no job id when nothing was submitted yet."""
    from isthmus.backends.submission import handle_of

    newest = run.submissions().newest()
    if newest is not None:
        # The directory may have been copied since; where it is now counts.
        return replace(handle_of(newest), run_uri=run.uri)
    job_ids = run_json.get("job_ids") or []
    return Handle(
        backend=str(run_json.get("backend")),
        run_id=str(run_json.get("id")),
        run_uri=run.uri,
        native={**({"job_id": job_ids[-1]} if job_ids else {}), **(run_json.get("native") or {})},
    )


def find_current(text: str) -> Record:
    """`find`, with the handle of the newest submission, whoever made it.

    Raises:
        RunNotFound: no such run, or its directory is gone.
    """
    record = find(text)
    now = record_of(RunDirectory.open(record.run_uri))
    same = now.handle["native"].get("job_id") == record.handle["native"].get("job_id")
    # This machine's own handle may know more, such as a process.
    return record if same and now.backend == record.backend else now


def _same(one: str, other: str) -> bool:
    if filesystems.is_local(one) and filesystems.is_local(other):
        return filesystems.local_path(one).resolve() == filesystems.local_path(other).resolve()
    return one.rstrip("/") == other.rstrip("/")
