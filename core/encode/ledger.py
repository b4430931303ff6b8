"""What is done of an encoding, kept beside its shards until the dataset is whole.

`_encode/plan.json` is written first: what was asked, and how the source is cut into units. `_encode/unit-NNNNN.json` is
written when a unit's shards are closed, and makes the unit done: it tells what they hold, and what was left out. Whatever a
unit without one has left is written again, to the same bytes. The folder goes when the manifest is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.shards.parts import WORK_FOLDER as FOLDER
from isthmus.storage.shards.parts import put

PLAN = "plan.json"
_VERSION = 1


class Ledger:
    """The folder of one dataset's encoding."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._store, root = filesystem(uri)
        self._path = f"{root}/{FOLDER}"

    def plan(self) -> dict[str, Any] | None:
        """What was asked before; None when nothing was, or what is there is of another version."""
        loaded = self._read(PLAN)
        return loaded if loaded is not None and loaded.get("version") == _VERSION else None

    def begin(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Forgets what was done, and writes a plan."""
        self.remove()
        self._write(PLAN, {"version": _VERSION, **plan})
        loaded = self.plan()
        if loaded is None:
            raise DataError("the plan that was just written is not there", where=join(self.uri, FOLDER))
        return loaded

    def done(self) -> set[int]:
        """Numbers of the units that are done."""
        with storage_errors("list", self.uri):
            self._store.invalidate_cache()
            try:
                names = [str(path).rpartition("/")[2] for path in self._store.ls(self._path, detail=False)]
            except FileNotFoundError:
                return set()
        found = (name.removeprefix("unit-").removesuffix(".json") for name in names if name.endswith(".json"))
        return {int(number) for number in found if number.isdigit()}

    def commit(self, unit: int, plan: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Makes a unit done."""
        self._write(f"unit-{unit:05d}.json", {"plan": digest(plan), **record})

    def record(self, unit: int, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a unit holds; None when it is not done, or done for another plan."""
        loaded = self._read(f"unit-{unit:05d}.json")
        return loaded if loaded is not None and loaded.get("plan") == digest(plan) else None

    def remove(self) -> None:
        """Removes the folder; the plan last, so that a killed removal is known for what it is."""
        with storage_errors("remove", self.uri):
            self._store.invalidate_cache()
            try:
                paths = [str(path) for path in self._store.ls(self._path, detail=False)]
            except FileNotFoundError:
                return
            for path in sorted(paths, key=lambda path: path.endswith(PLAN)):
                try:
                    self._store.rm_file(path)
                except FileNotFoundError:
                    continue
            try:
                self._store.rmdir(self._path)
            except (OSError, NotImplementedError, ValueError):
                return  # an object store has no folders

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        put(self.uri, f"{FOLDER}/{name}", json.dumps(data, ensure_ascii=False).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        where = join(self.uri, FOLDER, name)
        with storage_errors("read", where):
            try:
                data = self._store.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
        try:
            loaded = json.loads(data)
        except ValueError:
            loaded = None
        if not isinstance(loaded, dict):
            raise DataError("not JSON", where=where, hint="remove the folder _encode, and start over")
        return loaded


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
