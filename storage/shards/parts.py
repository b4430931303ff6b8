"""A dataset that is written in parts, by several processes and over several attempts, and put together at the end.

A part is a run of samples with shards of its own. Its bytes depend on its samples and the settings alone, so a part
that was interrupted is written again from its start, over what it left; what it holds is told by its record, a small
JSON document that the caller keeps. :func:`assemble` makes the index, the files beside the shards and, last, the manifest
from all records: the same ones as :class:`DatasetWriter` makes when there is one part.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.storage.filesystems import filesystem, is_local, join, make_folder, storage_errors
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.files import text_file
from isthmus.storage.shards.index import BlockEntry, dump_index
from isthmus.storage.shards.layout import columns_of, siblings
from isthmus.storage.shards.manifest import Manifest, SideFile
from isthmus.storage.shards.spec import DatasetSpec, TextColumn
from isthmus.storage.shards.writer import DatasetWriter

WORK_FOLDER = "_encode"
"""Where whoever writes parts keeps their records until the manifest is there, and files lie that are half written."""
MAX_PARTS, _SHARDS_OF_A_PART = 100_000, 10_000
_SHARD = re.compile(r"part-([0-9]{5,9})\.(text[0-9]*|[0-9]+px|fields|all)\.parquet")


class PartWriter(DatasetWriter):
    """Writes one part of a dataset: :meth:`add` samples, then :meth:`seal`.

    Args:
        part: its number, of
        parts: how many there are. Shards of several parts are called `part-PPPPPSSSS`, of a single one `part-SSSSS`.
    """

    def __init__(self, uri: str, spec: DatasetSpec, part: int, parts: int, **rows: Any) -> None:
        if not 0 <= part < parts <= MAX_PARTS:
            raise UsageError(f"part {part} of {parts}: at most {MAX_PARTS} parts are numbered")
        self._part, self._parts = part, parts
        super().__init__(uri, spec, **rows)

    def _shard_name(self, number: int) -> str:
        if self._parts == 1:
            return super()._shard_name(number)
        if number >= _SHARDS_OF_A_PART:
            raise UsageError(f"a part has more than {_SHARDS_OF_A_PART} shards", hint="make smaller parts")
        return f"part-{self._part:05d}{number:04d}"

    def _start(self) -> None:
        """Removes what an interrupted attempt at this part left; other parts' shards stay."""
        with storage_errors("write", self.uri):
            make_folder(self._store, self._path, self.uri)
            own = f"part-{self._part:05d}" if self._parts > 1 else "part-"
            for path in _listed(self._store, self._path):
                name = path.rpartition("/")[2]
                if name.startswith(own) and _SHARD.fullmatch(name):
                    self._store.rm_file(path)

    def seal(self) -> dict[str, Any]:
        """Closes the part's shards and returns its record, as JSON has it."""
        for key in sorted(self._groups):
            group = self._groups[key]
            if group.rows:
                self._flush(group)
            self._close_shard(group)
        return {
            "shards": self._shards,
            "blocks": [
                [
                    b.shard, b.row_group, b.rows, b.bucket, b.size_class, b.offset,
                    [[*key, value] for key, value in b.length.items()],
                    [[*key, value] for key, value in b.crc32.items()],
                ]
                for b in self._blocks
            ],
            "footers": [[*key, *value] for key, value in sorted(self._footers.items())],
            "shapes": {
                bucket: {str(r): list(shape) for r, shape in shapes.items()}
                for bucket, shapes in self._shapes.items()
                if shapes
            },
        }  # fmt: skip


def remove_shards(uri: str) -> None:
    """Removes the shards that a writer of this package left in a place without a manifest."""
    store, path = filesystem(uri)
    with storage_errors("write", uri):
        make_folder(store, path, uri)
        if store.exists(f"{path}/{names.MANIFEST}"):
            raise UsageError("there is a dataset already", where=uri)
        for file in _listed(store, path):
            if _SHARD.fullmatch(file.rpartition("/")[2]):
                store.rm_file(file)


def assemble(
    uri: str,
    spec: DatasetSpec,
    records: Sequence[Mapping[str, Any]],
    *,
    null_text: Mapping[str, TextColumn],
    prompts: Sequence[str],
    prompt_text: Mapping[str, TextColumn],
    rejected: Iterable[Mapping[str, Any]],
    source: str,
) -> Manifest:
    """Puts the parts of a dataset together. May be done again, also by two processes at once: the bytes are the same.

    Args:
        records: of all parts, in order; see :class:`DatasetWriter.finish` for the others.

    Raises:
        UsageError: no part holds a sample.
        DataError: a shard that a record tells of is not there, or has another size.
    """
    blocks: list[BlockEntry] = []
    footers: dict[tuple[str, str], tuple[int, int]] = {}
    shapes: dict[str, dict[int, tuple[int, int, int]]] = {}
    rows: dict[str, dict[int, int]] = {}
    for record in records:
        for shard, group, count, bucket, size_class, offset, lengths, checksums in record["blocks"]:
            length = {(sibling, column): value for sibling, column, value in lengths}
            crc32 = {(sibling, column): value for sibling, column, value in checksums}
            blocks.append(BlockEntry(shard, group, count, bucket, size_class, offset, length, crc32))
            by_size = rows.setdefault(bucket, {})
            by_size[size_class] = by_size.get(size_class, 0) + count
        footers |= {(shard, sibling): (size, crc) for shard, sibling, size, crc in record["footers"]}
        for bucket, own in record["shapes"].items():
            shapes.setdefault(bucket, {}).update({int(r): (c, h, w) for r, (c, h, w) in own.items()})
    if not blocks:
        raise UsageError("no sample was added; a dataset needs at least one", where=uri)
    check_there(uri, footers)
    blocks.sort(key=lambda block: (block.shard, block.row_group))
    columns: dict[str, list[str]] = {}
    for bucket, size_class in sorted({(block.bucket, block.size_class) for block in blocks}):
        for sibling in siblings(spec, size_class):
            shape = shapes[bucket][int(sibling.removesuffix("px"))] if sibling.endswith("px") else None
            columns[sibling] = [column.name for column in columns_of(spec, sibling, shape)]
    lines = [dict(item) for item in rejected]
    contents = {
        names.NULL_TEXT: text_file(spec, null_text, 1, {}),
        names.PROMPTS: text_file(spec, prompt_text, len(prompts), {"prompt": list(prompts)}),
        names.REJECTED: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
        names.INDEX: dump_index(blocks, columns, footers),
    }
    manifest = Manifest(
        spec=spec,
        latent_shapes={bucket: dict(sorted(shapes[bucket].items())) for bucket in sorted(shapes)},
        samples=sum(block.rows for block in blocks),
        rows={bucket: dict(sorted(rows[bucket].items())) for bucket in sorted(rows)},
        shards=sum(int(record["shards"]) for record in records),
        blocks=len(blocks),
        size=sum(size for size, _ in footers.values()),
        rejected=len(lines),
        files={name: SideFile.of(data) for name, data in contents.items()},
        source=source,
    )
    for name, data in contents.items():
        put(uri, name, data)
    put(uri, names.MANIFEST, manifest.dump())
    return manifest


def put(uri: str, name: str, data: bytes, *, work: str = WORK_FOLDER) -> None:
    """A small file, whole or not at all, also when two processes write it at once.

    Args:
        work: the folder at `uri` where it lies until it is whole.
    """
    store, root = filesystem(uri)
    path = f"{root}/{name}"
    with storage_errors("write", join(uri, name)):
        make_folder(store, path.rpartition("/")[0], uri)
        if is_local(uri):
            half = f"{root}/{work}/{name.rpartition('/')[2]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
            for attempt in range(3):
                try:
                    store.makedirs(half.rpartition("/")[0], exist_ok=True)
                    store.pipe_file(half, data)
                    Path(half).replace(path)
                except FileNotFoundError:
                    # Another process that finishes the same dataset has just tidied up.
                    if attempt == 2:
                        raise
                else:
                    break
        else:
            store.pipe_file(path, data)


def check_there(uri: str, footers: Mapping[tuple[str, str], tuple[int, int]]) -> None:
    """DataError unless every file of shards is there with its size."""
    store, root = filesystem(uri)
    with storage_errors("read", uri):
        store.invalidate_cache()
        there = {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0)
            for entry in store.ls(root, detail=True)
        }
    for (shard, sibling), (size, _) in footers.items():
        name = f"{shard}.{sibling}.parquet"
        if there.get(name) != size:
            found = there.get(name)
            raise DataError(
                f"{name} {'is not there' if found is None else f'has {found} bytes'}; the ledger tells of {size}",
                where=uri,
                hint="start over with --restart",
            )


def _listed(store: Any, path: str) -> list[str]:
    store.invalidate_cache()
    try:
        return [str(file) for file in store.ls(path, detail=False)]
    except FileNotFoundError:
        return []  # an object store has no empty folders
