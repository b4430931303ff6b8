"""Writes the shards of a rewritten dataset, each by itself, and puts the dataset together when all are there."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.errors import CorruptShard, IsthmusError
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.blocks import Block
from isthmus.storage.shards.files import SiblingFile
from isthmus.storage.shards.index import BlockEntry, dump_table, index_table
from isthmus.storage.shards.layout import Column, columns_of, siblings
from isthmus.storage.shards.manifest import Manifest, SideFile
from isthmus.storage.shards.parts import check_there, put
from isthmus.storage.shards.rewrite_compressed import column_map, dump, write_file
from isthmus.storage.shards.rewrite_plan import Chosen, Part, Shapes, Shard
from isthmus.storage.shards.rewrite_source import Source
from isthmus.storage.shards.rewrite_work import FOLDER, Work
from isthmus.storage.shards.spec import DatasetSpec
from isthmus.storage.shards.writer import open_sibling


@dataclass(slots=True)
class Job:
    """A rewriting whose plan is made."""

    sources: Sequence[Source]
    chosen: Chosen
    spec: DatasetSpec
    shapes: Shapes
    parts: Sequence[Part]
    side_files: Mapping[str, bytes]
    """Beside the shards, but for the index: the same for all parts."""
    extras: Mapping[str, bytes]
    """Files below the root that are copied, such as a patch_pca autoencoder's."""
    about: str
    compression: str = "none"
    """Of the files; with any, they are read through a column map."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def columns(self, bucket: str, sibling: str) -> list[Column]:
        """Of a sibling, in file order."""
        shape = None
        if sibling.endswith("px"):
            shape = self.shapes[bucket][int(sibling.removesuffix("px"))]
        return columns_of(self.spec, sibling, shape)

    def index_columns(self, part: Part) -> dict[str, list[str]]:
        """Sibling -> its columns, of all that a part has, in the index's order."""
        found: dict[str, list[str]] = {}
        for bucket, size_class in sorted((b, size) for b, sizes in part.rows.items() for size in sizes):
            for sibling in siblings(self.spec, size_class):
                found[sibling] = [column.name for column in self.columns(bucket, sibling)]
        return found


def write(
    job: Job, work: Work, *, threads: int, progress: Callable[[int, int], None] | None = None
) -> list[Manifest]:
    """Writes the shards that are not done, then all datasets' manifests.

    Args:
        progress: called with the rows done and all rows.
    """
    done = work.done()
    total = sum(part.samples for part in job.parts)
    shards = [shard for part in job.parts for shard in part.shards]
    left = [s for s in shards if (s.part, s.name) not in done or work.record(s.part, s.name) is None]
    written = total - sum(shard.stop - shard.start for shard in left)

    def one(shard: Shard) -> int:
        work.commit(shard.part, shard.name, _write_shard(job, shard))
        return shard.stop - shard.start

    with ThreadPoolExecutor(threads, thread_name_prefix="isthmus-rewrite") as pool:
        futures = [pool.submit(one, shard) for shard in left]
        try:
            for future in as_completed(futures):
                written += future.result()
                if progress is not None:
                    progress(written, total)
        except BaseException:
            # Whoever still writes stops at its next row group.
            job.stopped.set()
            for future in futures:
                future.cancel()
            raise
    manifests = [_put_together(job, part, number, work) for number, part in enumerate(job.parts)]
    for part, manifest in zip(job.parts, manifests, strict=True):
        put(part.uri, names.MANIFEST, manifest.dump(), work=FOLDER)
    work.remove()
    return manifests


def _write_shard(job: Job, shard: Shard) -> Any:
    """Writes a shard's siblings one after the other; its rows of the index."""
    group, part = shard.group, job.parts[shard.part]
    starts = range(shard.start, shard.stop, shard.rows_per_group)
    entries = [
        BlockEntry(
            shard.name, number, min(shard.rows_per_group, shard.stop - start), group.bucket, group.size_class
        )
        for number, start in enumerate(starts)
    ]
    if job.compression != "none":
        return _write_compressed(job, shard, starts)
    footers: dict[tuple[str, str], tuple[int, int]] = {}
    keys: list[bytes] = []
    for sibling in siblings(job.spec, group.size_class):
        columns = job.columns(group.bucket, sibling)
        file = open_sibling(part.uri, job.spec, shard.name, sibling, group.bucket, group.size_class, columns)
        try:
            gather = _Gather(job, shard, sibling, columns)
            for number, start in enumerate(starts):
                if job.stopped.is_set():
                    raise IsthmusError("stopped, since another shard could not be written")
                values = gather.rows(start, start + entries[number].rows)
                if len(keys) <= number:
                    keys.append(_digest(values["key"]))
                elif keys[number] != _digest(values["key"]):
                    text = _Gather(job, shard, "text", job.columns(group.bucket, "text"))
                    mine = text.rows(start, start + entries[number].rows)["key"]
                    raise gather.other_keys(mine, values["key"], start)
                file.write(values, entries[number])
        except BaseException:
            _give_up(file)
            raise
        footers[shard.name, sibling] = file.close()
    return index_table(entries, job.index_columns(part), footers)


def _digest(keys: Sequence[str]) -> bytes:
    """Of a row group's keys: a shard may have millions."""
    return hashlib.blake2b("\0".join(keys).encode(), digest_size=16).digest()


def _write_compressed(job: Job, shard: Shard, starts: range) -> Any:
    """Writes a shard's file, all siblings' columns side by side; its rows of the index."""
    group = shard.group
    columns = {s: job.columns(group.bucket, s) for s in siblings(job.spec, group.size_class)}
    gathers = {sibling: _Gather(job, shard, sibling, own) for sibling, own in columns.items()}

    def values(start: int) -> dict[str, dict[str, Any]]:
        if job.stopped.is_set():
            raise IsthmusError("stopped, since another shard could not be written")
        stop = min(start + shard.rows_per_group, shard.stop)
        found = {sibling: gather.rows(start, stop) for sibling, gather in gathers.items()}
        for sibling, gather in gathers.items():
            if found[sibling]["key"] != found["text"]["key"]:
                raise gather.other_keys(found["text"]["key"], found[sibling]["key"], start)
        return found

    return write_file(
        job.parts[shard.part].uri,
        shard.name,
        group.bucket,
        job.spec,
        job.compression,
        columns,
        [partial(values, start) for start in starts],
    )


def _give_up(file: SiblingFile) -> None:
    with contextlib.suppress(Exception):
        file.abandon()


class _Gather:
    """Collects a shard's rows of one sibling out of the sources' blocks; each block is read once."""

    def __init__(self, job: Job, shard: Shard, sibling: str, columns: Sequence[Column]) -> None:
        self._job, self._group, self._part = job, shard.group, shard.part
        self._sibling, self._columns = sibling, columns
        self._piece = -1
        self._content = Block(0)
        self._picked: NDArray[np.int64] | None = None

    def rows(self, start: int, stop: int) -> dict[str, Any]:
        """Column -> the values of these rows of the group, as :class:`SiblingFile` takes them."""
        count, before = stop - start, self._group.before
        values: dict[str, Any] = {}
        for column in self._columns:
            if column.kind == "bytes":
                values[column.name] = np.empty((count, column.width or 0), np.uint8)
            elif column.kind in ("string", "text?"):
                values[column.name] = []
            else:
                kinds = {"int32": np.int32, "bool": np.bool_, "number?": np.float64}
                values[column.name] = np.empty(count, kinds[column.kind])
        at, piece = 0, int(np.searchsorted(before, start, side="right")) - 1
        while at < count:
            self._load(piece)
            low = start + at - int(before[piece])
            high = min(stop, int(before[piece + 1])) - int(before[piece])
            self._take(values, at, low, high)
            at += high - low
            piece += 1
        for column in self._columns:
            if column.kind == "bytes":
                values[column.name] = values[column.name].view("<f2").reshape(count, *column.shape)
        return values

    def _load(self, piece: int) -> None:
        if piece == self._piece:
            return
        number, block = int(self._group.source[piece]), int(self._group.block[piece])
        source, parts = self._job.sources[number], self._job.chosen[number]
        self._content = source.read(block, self._sibling)
        self._picked = None
        if parts is not None:
            own = parts[source.first[block] : source.first[block + 1]]
            picked = np.flatnonzero(own == self._part)
            self._picked = picked if len(picked) < len(own) else None
        self._piece = piece

    def _take(self, values: dict[str, Any], at: int, low: int, high: int) -> None:
        content, end = self._content, at + high - low
        rows: Any = slice(low, high) if self._picked is None else self._picked[low:high]
        for column in self._columns:
            name = column.name
            if column.kind == "bytes":
                values[name][at:end] = content.fixed[name][rows]
            elif column.kind == "text?" and name not in content.strings:
                values[name] += [""] * (high - low)  # a field of another dataset's
            elif column.kind == "number?" and name not in content.numbers:
                values[name][at:end] = np.nan
            elif column.kind in ("string", "text?"):
                told = content.strings[name]
                values[name] += told[rows] if self._picked is None else [told[row] for row in rows.tolist()]
            else:
                values[name][at:end] = content.numbers[name][rows]

    def other_keys(self, mine: Sequence[str], other: Sequence[str], start: int) -> CorruptShard:
        """The error for siblings of which one holds other samples."""
        row = next(row for row, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        piece = int(np.searchsorted(self._group.before, start + row, side="right")) - 1
        index = self._job.sources[int(self._group.source[piece])].dataset.index
        block = int(self._group.block[piece])
        return CorruptShard(
            f"it has key {other[row]!r}, the text file {mine[row]!r}",
            shard=index.file(block, self._sibling),
            row_group=int(index.row_group[block]),
            column="key",
        )


def _put_together(job: Job, part: Part, number: int, work: Work) -> Manifest:
    """Writes the files beside a part's shards; the manifest is the caller's, who waits until all parts have come so far."""
    records = [work.record(number, shard.name) for shard in part.shards]
    if any(record is None for record in records):
        raise IsthmusError(
            "the record of a shard is gone: somebody else works here",
            where=work.uri,
            hint="run the command again",
        )
    blocks = sum(record.num_rows for record in records)
    if job.compression != "none":
        index, footers = dump(records, job.spec)
    else:
        table = pa.concat_tables(records).combine_chunks()
        index, footers = dump_table(table), _footers(table, job.index_columns(part))
    check_there(part.uri, footers)
    contents = {**job.side_files, names.INDEX: index}
    manifest = Manifest(
        spec=job.spec,
        latent_shapes={
            bucket: {
                resolution: job.shapes[bucket][resolution]
                for resolution in job.spec.resolutions_of(max(part.rows[bucket]))
            }
            for bucket in sorted(part.rows)
        },
        samples=part.samples,
        rows={bucket: dict(sorted(part.rows[bucket].items())) for bucket in sorted(part.rows)},
        shards=len(part.shards),
        blocks=blocks,
        size=sum(size for size, _ in footers.values()),
        rejected=job.side_files[names.REJECTED].count(b"\n"),
        files={name: SideFile.of(data) for name, data in contents.items()},
        source=job.about,
        columns=None if job.compression == "none" else column_map(job.spec),
    )
    for name, data in {**job.extras, **contents}.items():
        put(part.uri, name, data, work=FOLDER)
    return manifest


def _footers(table: Any, columns: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], tuple[int, int]]:
    """(shard, sibling) -> size and checksum of the footer, out of the index."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    shards = table["shard"].to_pylist()
    for sibling in columns:
        sizes = table[f"{sibling}/file_bytes"].to_pylist()
        crc32 = table[f"{sibling}/footer_crc32"].to_pylist()
        for shard, size, checksum in zip(shards, sizes, crc32, strict=True):
            if size:
                found[shard, sibling] = size, checksum
    return found
