"""What is done of a rewriting, kept in DEST/_rewrite until the datasets are whole.

`plan.json` is written first: the sources' fingerprints and what was asked. A shard is done when its record is there: its rows
of the index, as an arrow file that names the plan. Whatever a shard without one has left is written again, to the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from isthmus.errors import DataError, UsageError
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.parts import WORK_FOLDER as ENCODE_FOLDER
from isthmus.storage.shards.parts import put, remove_shards

FOLDER = "_rewrite"
PLAN = "plan.json"
_KEY = b"isthmus.plan"


class Work:
    """The folder of one rewriting.

    Args:
        uri: DEST.
        plan: what is asked, as JSON; the same plan goes on where it was.
        targets: the datasets' roots: DEST itself, or places below it.
    """

    def __init__(self, uri: str, plan: Mapping[str, Any], targets: Sequence[str]) -> None:
        self.uri, self.targets = uri, targets
        self._plan = json.loads(json.dumps(plan))
        self._digest = hashlib.sha256(json.dumps(self._plan, sort_keys=True).encode()).hexdigest()
        self._store, self._root = filesystem(uri)
        self._path = f"{self._root}/{FOLDER}"

    def begin(self, *, restart: bool) -> bool:
        """Makes the place ready; whether something of the same plan was there.

        Raises:
            UsageError: there is a dataset, another rewriting or encoding, or shards of nobody.
        """
        there = self._read_plan()
        if there == self._plan and not restart:
            return True
        for target in self.targets:
            self._refuse_what_is_there(target, bare=there is None and not restart)
        if there is not None and not restart:
            differs = sorted(key for key in {**there, **self._plan} if there.get(key) != self._plan.get(key))
            raise UsageError(
                f"another rewriting was begun here ({there.get('command')}); it differs in {', '.join(differs)}",
                where=self.uri,
                hint="--restart forgets it; or choose another place",
            )
        self.remove()
        for name in (there or {}).get("parts", {}):
            if name:
                _remove(join(self.uri, str(name)))
                remove_shards(join(self.uri, str(name)))
        plan = json.dumps(self._plan, indent=1, ensure_ascii=False).encode()
        for target in self.targets:
            remove_shards(target)
            if target != self.uri:
                # So that whoever opens a part is told that it is not finished.
                put(target, f"{FOLDER}/{PLAN}", plan, work=FOLDER)
        self._put(PLAN, plan)
        return False

    def _refuse_what_is_there(self, target: str, *, bare: bool) -> None:
        store, path = filesystem(target)
        with storage_errors("read", target):
            store.invalidate_cache()
            if store.exists(f"{path}/{names.MANIFEST}"):
                raise UsageError(
                    "there is a dataset already", where=target, hint="remove it, or choose another place"
                )
            if store.exists(f"{path}/{ENCODE_FOLDER}/{PLAN}"):
                raise UsageError(
                    "an encoding was begun here and is not finished",
                    where=target,
                    hint="finish it with `isthmus data encode`, or choose another place",
                )
            try:
                found = [str(file).rpartition("/")[2] for file in store.ls(path, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                found = []
            shards = sorted(name for name in found if name.startswith("part-"))
            if bare and shards:
                raise UsageError(
                    f"there are shards of no dataset ({shards[0]})",
                    where=target,
                    hint="--restart removes them; or choose another place",
                )

    def record(self, part: int, shard: str) -> Any:
        """The index rows of a shard that is done; None of another."""
        name = self._name(part, shard)
        where = join(self.uri, FOLDER, name)
        try:
            with storage_errors("read", where):
                data = self._store.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        try:
            reader = pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=False))
            table = reader.read_all()
        except (pa.ArrowException, OSError, ValueError):
            raise DataError(
                "not a record of a shard", where=where, hint="start over with --restart"
            ) from None
        told = (table.schema.metadata or {}).get(_KEY, b"").decode()
        return table.replace_schema_metadata(None) if told == self._digest else None

    def done(self) -> set[tuple[int, str]]:
        """Part and shard of all records that are there."""
        with storage_errors("list", self.uri):
            self._store.invalidate_cache()
            try:
                found = [str(path).rpartition("/")[2] for path in self._store.ls(self._path, detail=False)]
            except FileNotFoundError:
                return set()
        pairs = (name.removesuffix(".arrow").split("-", 1) for name in found if name.endswith(".arrow"))
        return {(int(part), shard) for part, shard in pairs if part.isdigit()}

    def commit(self, part: int, shard: str, table: Any) -> None:
        """Makes a shard done."""
        table = table.replace_schema_metadata({_KEY: self._digest.encode()})
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        self._put(self._name(part, shard), sink.getvalue())

    def remove(self) -> None:
        """Removes the folder; the plan last, so that a killed removal is known for what it is."""
        for target in self.targets:
            if target != self.uri:
                _remove(target)
        _remove(self.uri)

    def _read_plan(self) -> dict[str, Any] | None:
        where = join(self.uri, FOLDER, PLAN)
        try:
            with storage_errors("read", where):
                self._store.invalidate_cache()
                data = self._store.cat_file(f"{self._path}/{PLAN}")
        except FileNotFoundError:
            return None
        try:
            loaded = json.loads(data)
        except ValueError:
            loaded = None
        if not isinstance(loaded, dict):
            raise DataError("not a plan", where=where, hint=f"remove the folder {FOLDER}, and start over")
        return loaded

    def _put(self, name: str, data: bytes) -> None:
        put(self.uri, f"{FOLDER}/{name}", data, work=FOLDER)

    @staticmethod
    def _name(part: int, shard: str) -> str:
        return f"{part:03d}-{shard}.arrow"


def _remove(uri: str) -> None:
    """Removes a folder of work. An object store has no folders, only files."""
    store, root = filesystem(uri)
    path = f"{root}/{FOLDER}"
    with storage_errors("remove", uri):
        store.invalidate_cache()
        try:
            files = [str(file) for file in store.ls(path, detail=False)]
        except FileNotFoundError:
            return
        for file in sorted(files, key=lambda file: file.endswith(PLAN)):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(file)
        with contextlib.suppress(OSError, NotImplementedError, ValueError):
            store.rmdir(path)
