"""A run's directory and its layout::

recipe.yaml                resolved, as trained
model.json                 the model's configuration, where it came with `init_from`
run.json                   id, backend, git, packages, fingerprints, ...
lease/0001.json ...        who may write; the newest counts
code/<sha256>.zip          a team's own code, as trained
submissions/0001.json ...  what was sent to a backend, put down before it was sent; 0001-answer.json: what came of it
plan/0001.json ...         the plan's segments, append-only
events/<time>-<type>.json  one small object each
metrics/<kind>/<part>.jsonl
checkpoints/step-00001000/ with COMMITTED, written last
samples/step-00001000.png  image grids
export/                    a diffusers pipeline
report.html
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import LeaseLost, RunExists, RunNotFound, StorageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import lease as leases
from isthmus.storage.rundir.lease import Lease
from isthmus.storage.rundir.metrics import MetricsWriter, last_attempt, read_rows
from isthmus.storage.rundir.patience import PatientStore
from isthmus.storage.rundir.store import Store, open_store
from isthmus.storage.rundir.submissions import Submissions

EVENT_TYPES = frozenset(
    {
        "submitted", "started", "preempted", "stop-requested", "stopped", "resumed", "alarm", "finished", "failed",
        "checkpoint-committed", "note",
    }
)  # fmt: skip
_STEP = re.compile(r"step-(\d{8,})(?:\.png)?")


class RunDirectory:
    """Reads and writes a run directory at a URI; making one touches nothing.

    Every method that writes raises StorageError, naming path and cause, when the store refuses.

    Args:
        uri: a path, or of an object store.
        patience: seconds for which an operation is tried again while the store is away or asks for fewer requests. For
            those who train: someone who waits before a terminal is told at once.
    """

    def __init__(self, uri: str | Path, *, patience: float = 0.0) -> None:
        store = open_store(str(uri))
        self._store: Store = PatientStore(store, patience) if patience else store
        self.uri = self._store.uri

    def __repr__(self) -> str:
        return f"RunDirectory({self.uri!r})"

    # -- identity

    @classmethod
    def open(cls, uri: str | Path) -> RunDirectory:
        """An existing run. Raises RunNotFound when there is none."""
        run = cls(uri)
        if not run.exists():
            raise RunNotFound("no run here", where=run.uri, hint="`isthmus runs list` shows the known ones")
        return run

    def exists(self) -> bool:
        """Whether a run was created here."""
        return self._store.read("run.json") is not None

    def create(self, recipe_text: str, run: Mapping[str, Any]) -> RunDirectory:
        """Creates the run, or opens it again when it is one of the same recipe (`recipe_hash`).

        Raises:
            RunExists: it holds a run of another recipe; nothing was changed.
        """
        if self._store.read("run.json") is None:
            # The recipe comes first, so that a run that exists has one, whenever its launcher is killed.
            self.write_recipe(recipe_text)
            if self._store.create("run.json", _dump(run)):
                if self._store.read("recipe.yaml") != recipe_text.encode():
                    self.write_recipe(recipe_text)  # of another launch, that lost
                return self
        self.check_same_recipe(str(run.get("recipe_hash")))
        if self._store.read("recipe.yaml") is None:
            self.write_recipe(recipe_text)
        return self

    def check_same_recipe(self, recipe_hash: str) -> None:
        """Raises RunExists when a run of another recipe is here."""
        if not self.exists():
            return
        known = self.read_run_json()
        if known.get("recipe_hash") != recipe_hash:
            raise RunExists(
                f"holds run {known.get('id')} of another recipe",
                where=self.uri,
                hint="choose another --run-id, or go on with that run: `isthmus resume`",
            )

    def read_run_json(self) -> dict[str, Any]:
        """run.json. Raises RunNotFound when there is none."""
        data = self._store.read("run.json")
        if data is None:
            raise RunNotFound("no run here", where=self.uri, hint="`isthmus runs list` shows the known ones")
        return self._load("run.json", data)

    def write_run_json(self, run: Mapping[str, Any]) -> None:
        """Replaces run.json."""
        self._store.write("run.json", _dump(run))

    def update_run_json(self, **fields: Any) -> None:
        """Sets some fields of run.json; dictionaries such as `packages` are merged. Only the lease's holder should."""
        run = self.read_run_json()
        for name, value in fields.items():
            old = run.get(name)
            run[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        self.write_run_json(run)

    def write_recipe(self, text: str) -> None:
        """Replaces recipe.yaml."""
        self._store.write("recipe.yaml", text.encode())

    def read_recipe(self) -> str:
        """The text of recipe.yaml. Raises RunNotFound when there is none."""
        data = self._store.read("recipe.yaml")
        if data is None:
            raise RunNotFound("no recipe.yaml here", where=self.uri)
        return data.decode()

    # -- events

    def event(self, type: str, /, **fields: Any) -> dict[str, Any]:
        """Records an event; returns it with `type` and `time` (seconds since 1970 on this machine's clock).

        Its name sorts after every event that was there before, so that the order of cause and effect survives
        clocks that disagree.
        """
        now = time.time()
        name = self.next_event(type, now)
        row = {"type": type, "time": now, **fields}
        self._store.write(name, _dump(row))
        return row

    def next_event(self, type: str, now: float | None = None) -> str:
        """The name that an event of now would get; `now` in seconds since 1970."""
        if type not in EVENT_TYPES:
            raise ValueError(f"event type {type!r} is not one of {', '.join(sorted(EVENT_TYPES))}")
        names = self._store.names("events")
        microseconds = int((time.time() if now is None else now) * 1e6)
        if names:
            microseconds = max(microseconds, int(names[-1].split("-", 1)[0]) + 1)
        return f"events/{microseconds:017d}-{type}-{secrets.token_hex(3)}.json"

    def event_once(self, name: str, fields: Mapping[str, Any]) -> bool:
        """Records the event under a name from `next_event`, unless it was recorded; whoever does, it keeps its place."""
        match = re.fullmatch(r"events/(\d+)-([a-z-]+)-[0-9a-f]+\.json", name)
        if match is None:
            raise ValueError(f"not the name of an event: {name!r}")
        return self._store.create(name, _dump({"type": match[2], "time": int(match[1]) / 1e6, **fields}))

    def submissions(self) -> Submissions:
        """What was sent to backends."""
        return Submissions(self._store)

    def events(self, type: str | None = None) -> list[dict[str, Any]]:
        """The events, or those of one type, in order."""
        found = []
        for name in self._store.names("events"):
            if type is not None and not re.fullmatch(rf"\d+-{re.escape(type)}-[0-9a-f]+\.json", name):
                continue
            event = self.read_event(name)
            if event is not None:
                found.append(event)
        return found

    def read_event(self, name: str) -> dict[str, Any] | None:
        """An event by its file's name, None when it is not there."""
        data = self._store.read(f"events/{name}")
        return None if data is None else self._load(f"events/{name}", data)

    # -- plan

    def append_segment(self, segment: Mapping[str, Any]) -> int:
        """Adds a segment to the plan; returns its number, from 1.

        The last segment again is not added twice. Raises LeaseLost when another attempt appended meanwhile.
        """
        names = self._numbered("plan")
        data = _dump(segment)
        if names and self._store.read(f"plan/{names[-1]}") == data:
            return len(names)
        name = f"plan/{len(names) + 1:04d}.json"
        if not self._store.create(name, data) and self._store.read(name) != data:
            raise LeaseLost("another attempt appended to the plan", where=f"{self.uri}/{name}")
        return len(names) + 1

    def segments(self) -> list[dict[str, Any]]:
        """The plan's segments, in order."""
        found = []
        for name in self._numbered("plan"):
            data = self._store.read(f"plan/{name}")
            if data is not None:
                found.append(self._load(f"plan/{name}", data))
        return found

    def _numbered(self, folder: str) -> list[str]:
        return sorted(self._store.names(folder), key=lambda name: (len(name), name))

    # -- metrics

    def metrics(self, kind: str, *, writer: str = "main", part_seconds: float = 15.0) -> MetricsWriter:
        """A writer of rows of that kind; `writer` tells processes that write the same kind apart."""
        return MetricsWriter(self._store, kind, writer=writer, part_seconds=part_seconds)

    def metric_kinds(self) -> list[str]:
        """Kinds that have rows."""
        return self._store.names("metrics")

    def read_metrics(self, kind: str, *, all_attempts: bool = False) -> list[dict[str, Any]]:
        """Rows of a kind. For a step that was done more than once the last attempt's row, unless all are asked for."""
        rows = read_rows(self._store, kind)
        return list(rows) if all_attempts else last_attempt(rows)

    # -- checkpoints, samples, products

    def checkpoints(self) -> list[int]:
        """Steps of the committed checkpoints, ascending; found by listing COMMITTED."""
        steps = []
        for name in self._store.names("checkpoints"):
            match = _STEP.fullmatch(name)
            if match and "COMMITTED" in self._store.names(f"checkpoints/{name}"):
                steps.append(int(match[1]))
        return sorted(steps)

    def checkpoint_uri(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return filesystems.join(self.uri, f"checkpoints/step-{step:08d}")

    def commit_checkpoint(self, step: int, manifest: Mapping[str, Any], *, token: str | None = None) -> None:
        """Writes COMMITTED: the checkpoint counts from here on.

        Args:
            manifest: files with sizes and checksums.
            token: the lease token of this attempt; when it is no longer the newest, LeaseLost and no commit.
        """
        if token is not None:
            self.check_token(token)
        self._store.write(f"checkpoints/step-{step:08d}/COMMITTED", _dump(manifest))

    def read_commit(self, step: int) -> dict[str, Any]:
        """The manifest in COMMITTED. Raises RunNotFound when that checkpoint is not committed."""
        name = f"checkpoints/step-{step:08d}/COMMITTED"
        data = self._store.read(name)
        if data is None:
            raise RunNotFound(f"no committed checkpoint of step {step}", where=self.uri)
        return self._load(name, data)

    def remove_checkpoint(self, step: int) -> None:
        """Removes a checkpoint, COMMITTED first, so that a half removed one does not count."""
        self._store.remove(f"checkpoints/step-{step:08d}/COMMITTED")
        self._store.remove(f"checkpoints/step-{step:08d}")

    def samples(self) -> list[tuple[int, str]]:
        """(step, URI) of the sample grids, by step."""
        found = [
            (int(match[1]), name) for name in self._store.names("samples") if (match := _STEP.fullmatch(name))
        ]
        return [(step, filesystems.join(self.uri, f"samples/{name}")) for step, name in sorted(found)]

    def samples_uri(self, step: int) -> str:
        """Where the sample grid (PNG) of a step is, or would be."""
        return filesystems.join(self.uri, f"samples/step-{step:08d}.png")

    def export_uri(self) -> str:
        """Where the exported pipeline is, or would be."""
        return filesystems.join(self.uri, "export")

    def report_uri(self) -> str:
        """Where the report is, or would be."""
        return filesystems.join(self.uri, "report.html")

    def write_file(self, name: str, data: bytes) -> str:
        """Writes a whole small file such as `samples/step-00001000.png` atomically; returns its URI."""
        self._store.write(name, data)
        return filesystems.join(self.uri, name)

    def create_file(self, name: str, data: bytes) -> bool:
        """Creates a small file unless there is one: then False, but for one of the very same bytes.

        A create whose answer was lost is tried again and finds its own file: bytes that nobody else writes tell it.
        """
        return self._store.create(name, data) or self._store.read(name) == data

    def read_file(self, name: str) -> bytes | None:
        """A file's bytes, or None when there is none."""
        return self._store.read(name)

    def file_names(self, folder: str) -> list[str]:
        """Names of what lies in a folder of the run, sorted; empty when there is no such folder."""
        return self._store.names(folder)

    def remove_file(self, name: str) -> None:
        """Removes a file, or a folder with all in it."""
        self._store.remove(name)

    def local_path(self, name: str = "") -> Path | None:
        """Where a file of the run is on this machine's file system; None on an object store."""
        return self._store.local_path(name)

    # -- lease

    def lease(
        self, ttl: float, owner: str, wait: float = 0.0, *, on_lost: Callable[[str], None] | None = None
    ) -> Lease:
        """Takes the right to write, renewed by a thread; a context manager that releases it.

        Args:
            ttl: seconds after which an unrenewed lease may be taken over.
            owner: for messages, such as `host:pid`.
            wait: seconds to wait for another holder.
            on_lost: called from the renewing thread, with the reason, when another attempt took over.

        Raises:
            LeaseLost: still held after `wait`; names owner and age.
        """
        return Lease(self._store, owner=owner, ttl=ttl, on_lost=on_lost).acquire(wait)

    def lease_token(self) -> str | None:
        """The newest lease's token, None when it was released or never taken."""
        holder = leases.newest(self._store)
        return None if holder is None or holder.released else holder.token

    def lease_holder(self) -> leases.Holder | None:
        """The newest lease object, whoever's and however old."""
        return leases.newest(self._store)

    def check_token(self, token: str) -> None:
        """Fencing: raises LeaseLost when `token` is not the newest lease's."""
        if self.lease_token() != token:
            holder = leases.newest(self._store)
            who = holder.describe(time.time()) if holder and not holder.released else "the lease was released"
            raise LeaseLost(f"this attempt may no longer write: {who}", where=self.uri)

    def _load(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            loaded = json.loads(data)
        except ValueError as error:
            raise StorageError(f"not valid JSON: {error}", where=f"{self.uri}/{name}") from error
        if not isinstance(loaded, dict):
            raise StorageError("not a JSON object", where=f"{self.uri}/{name}")
        return loaded


def _dump(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, default=_scalar) + "\n").encode()


def _scalar(value: Any) -> Any:
    item = getattr(value, "item", None)  # numpy and torch scalars
    return item() if callable(item) else str(value)
