"""Writes a latent dataset: shards as samples arrive, then the files beside them, the index and the manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from isthmus.errors import UsageError
from isthmus.storage.filesystems import filesystem, join, make_folder, storage_errors
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.check import check_sample
from isthmus.storage.shards.files import SiblingFile, text_file, write_whole
from isthmus.storage.shards.index import BlockEntry, dump_index, shard_file
from isthmus.storage.shards.layout import (
    CROP_COLUMNS,
    FIELDS,
    MAX_ROWS_PER_GROUP,
    SIZE_COLUMNS,
    Column,
    columns_of,
    latent_sibling,
    siblings,
    text_sibling,
)
from isthmus.storage.shards.manifest import Manifest, SideFile
from isthmus.storage.shards.spec import SCHEMA_VERSION, DatasetSpec, Sample, TextColumn

BLOCK_BYTES, SHARD_BYTES = 10_000_000, 1_500_000_000
_OUR_SHARDS = re.compile(r"part-[0-9]{5,9}\.(text[0-9]*|[0-9]+px|fields)\.parquet")


class DatasetWriter:
    """Writes one dataset; use as a context manager and call :meth:`finish`.

    The same samples in the same order with the same settings give the same bytes (of one pyarrow version).
    Without :meth:`finish` there is no manifest, and so no dataset.

    Args:
        uri: the dataset's root. Shards that an interrupted writer left there are replaced.
        spec: what the dataset holds.
        rows_per_shard: samples of one shard; about 1.5 GB of them by default, see :func:`rows_by_bytes`.
        rows_per_group: samples of a block, or one number for each bucket: see :func:`balanced_row_groups`. By default
            about 10 MB of them.

    Raises:
        UsageError: there is a dataset already.
        StorageError: the store refuses.
    """

    def __init__(
        self,
        uri: str,
        spec: DatasetSpec,
        *,
        rows_per_shard: int | None = None,
        rows_per_group: int | Mapping[str, int] | None = None,
    ) -> None:
        self.uri, self.spec = uri, spec
        block, shard = rows_by_bytes(spec)
        if rows_per_group is None:
            rows_per_group = min(block, rows_per_shard or shard)
        if rows_per_shard is None:
            largest = (
                rows_per_group if isinstance(rows_per_group, int) else max(rows_per_group.values(), default=1)
            )
            rows_per_shard = max(shard, largest)
        self._rows_per_shard = rows_per_shard
        if isinstance(rows_per_group, int):
            rows_per_group = dict.fromkeys(spec.buckets, rows_per_group)
        for bucket in spec.buckets:
            rows = rows_per_group.get(bucket, 0)
            if not 1 <= rows <= min(MAX_ROWS_PER_GROUP, rows_per_shard):
                raise UsageError(
                    f"rows_per_group of bucket {bucket} is {rows}; it must be within 1 to "
                    f"{min(MAX_ROWS_PER_GROUP, rows_per_shard)} (rows_per_shard is {rows_per_shard})"
                )
        self._rows_per_group = dict(rows_per_group)
        self._store, self._path = filesystem(uri)
        self._groups: dict[tuple[str, int], _Group] = {}
        self._shapes: dict[str, dict[int, tuple[int, int, int]]] = {}
        self._blocks: list[BlockEntry] = []
        self._footers: dict[tuple[str, str], tuple[int, int]] = {}
        self._rows: dict[str, dict[int, int]] = {}
        self._shards = 0
        self._start()

    def _start(self) -> None:
        with storage_errors("write", self.uri):
            if self._store.exists(f"{self._path}/{names.MANIFEST}"):
                raise UsageError(
                    "there is a dataset already", where=self.uri, hint="remove it, or choose another place"
                )
            make_folder(self._store, self._path, self.uri)
            try:
                there = self._store.ls(self._path, detail=False)
            except FileNotFoundError:
                there = []  # an object store has no empty folders
            for path in there:
                if _OUR_SHARDS.fullmatch(str(path).rpartition("/")[2]):
                    self._store.rm_file(path)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups.values():
            for file in group.files.values():
                file.abandon()
            group.files.clear()

    def add(self, sample: Sample) -> None:
        """Adds a sample; its arrays may be reused afterwards.

        Raises:
            DataError: a value is not finite (nothing of the sample was written).
            UsageError: a shape or a name is not that of the spec.
        """
        size_class = sample.size_class or max(sample.latents, default=0)
        check_sample(sample, size_class, self.spec, self._shapes.setdefault(sample.bucket, {}))
        group = self._groups.get((sample.bucket, size_class))
        if group is None:
            group = _Group(sample.bucket, size_class, self._rows_per_group[sample.bucket])
            for sibling in siblings(self.spec, size_class):
                group.values[sibling] = _empty(self._columns(sample.bucket, sibling), group.capacity)
            self._groups[sample.bucket, size_class] = group
        self._fill(group, sample)
        group.rows += 1
        if group.rows == group.capacity:
            self._flush(group)

    def finish(
        self,
        null_text: Mapping[str, TextColumn],
        prompts: Sequence[str] = (),
        prompt_text: Mapping[str, TextColumn] | None = None,
        rejected: Iterable[Mapping[str, Any]] = (),
        source: str = "",
    ) -> Manifest:
        """Writes what is buffered, the files beside the shards, the index and, last, the manifest.

        Args:
            null_text: the embedding of the empty caption: encoder -> one row.
            prompts: the validation prompts, and
            prompt_text: their embeddings: encoder -> one row a prompt.
            rejected: images that were refused while encoding, one JSON object each: which, and why.
            source: what the images are, and under which licence.
        """
        for key in sorted(self._groups):
            group = self._groups[key]
            if group.rows:
                self._flush(group)
            self._close_shard(group)
        if not self._blocks:
            raise UsageError("no sample was added; a dataset needs at least one", where=self.uri)
        self._blocks.sort(key=lambda block: (block.shard, block.row_group))
        columns: dict[str, list[str]] = {}
        for bucket, size_class in sorted(self._groups):
            for sibling in siblings(self.spec, size_class):
                columns[sibling] = [column.name for column in self._columns(bucket, sibling)]
        lines = [dict(item) for item in rejected]
        contents = {
            names.NULL_TEXT: text_file(self.spec, null_text, 1, {}),
            names.PROMPTS: text_file(self.spec, prompt_text or {}, len(prompts), {"prompt": list(prompts)}),
            names.REJECTED: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(),
            names.INDEX: dump_index(self._blocks, columns, self._footers),
        }
        manifest = Manifest(
            spec=self.spec,
            latent_shapes={
                bucket: dict(sorted(self._shapes[bucket].items())) for bucket in sorted(self._shapes)
            },
            samples=sum(block.rows for block in self._blocks),
            rows={bucket: dict(sorted(self._rows[bucket].items())) for bucket in sorted(self._rows)},
            shards=self._shards,
            blocks=len(self._blocks),
            size=sum(size for size, _ in self._footers.values()),
            rejected=len(lines),
            files={name: SideFile.of(data) for name, data in contents.items()},
            source=source,
        )
        for name, data in contents.items():
            write_whole(self.uri, name, data)
        write_whole(self.uri, names.MANIFEST, manifest.dump())
        return manifest

    def _columns(self, bucket: str, sibling: str) -> list[Column]:
        shape = self._shapes[bucket][int(sibling.removesuffix("px"))] if sibling.endswith("px") else None
        return columns_of(self.spec, sibling, shape)

    def _fill(self, group: _Group, sample: Sample) -> None:
        at = group.rows
        for caption in range(self.spec.captions):
            values = group.values[text_sibling(caption)]
            drawn = caption % len(sample.captions)
            values["key"][at] = sample.key
            values["caption"][at] = sample.captions[drawn]
            for encoder in self.spec.text:
                tokens, length, pooled = sample.text[drawn][encoder.name]
                stored = values[f"{encoder.name}_tokens"][at]
                stored[: len(tokens)] = tokens
                stored[len(tokens) :] = 0
                values[f"{encoder.name}_length"][at] = length
                if encoder.pooled_width is not None:
                    values[f"{encoder.name}_pooled"][at] = pooled
        values = group.values["text"]
        values["source"][at] = sample.source
        values["flipped"][at] = sample.flipped
        for name, number in zip(
            (*SIZE_COLUMNS, *CROP_COLUMNS), (*sample.original_size, *sample.crop), strict=True
        ):
            values[name][at] = number
        for resolution, (mean, logvar) in sample.latents.items():
            values = group.values[latent_sibling(resolution)]
            values["key"][at] = sample.key
            values["latent_mean"][at] = mean
            values["latent_logvar"][at] = logvar
        if self.spec.fields:
            values = group.values[FIELDS]
            values["key"][at] = sample.key
            for told in self.spec.fields:
                value = sample.fields.get(told.name)
                values[told.name][at] = (np.nan if told.kind == "number" else "") if value is None else value

    def _flush(self, group: _Group) -> None:
        """Writes the group's buffered rows as one block."""
        if not group.files:
            group.shard = self._shard_name(self._shards)
            group.shard_rows = group.row_groups = 0
            self._shards += 1
            for sibling in group.values:
                group.files[sibling] = self._open(group, sibling)
        block = BlockEntry(group.shard, group.row_groups, group.rows, group.bucket, group.size_class)
        for sibling, file in group.files.items():
            file.write({name: value[: group.rows] for name, value in group.values[sibling].items()}, block)
        self._blocks.append(block)
        by_size = self._rows.setdefault(group.bucket, {})
        by_size[group.size_class] = by_size.get(group.size_class, 0) + group.rows
        group.row_groups += 1
        group.shard_rows += group.rows
        group.rows = 0
        if group.shard_rows + group.capacity > self._rows_per_shard:
            self._close_shard(group)

    def _shard_name(self, number: int) -> str:
        return f"part-{number:05d}"

    def _close_shard(self, group: _Group) -> None:
        for sibling, file in group.files.items():
            self._footers[group.shard, sibling] = file.close()
        group.files.clear()

    def _open(self, group: _Group, sibling: str) -> SiblingFile:
        columns = self._columns(group.bucket, sibling)
        return open_sibling(
            self.uri, self.spec, group.shard, sibling, group.bucket, group.size_class, columns
        )


def open_sibling(
    uri: str,
    spec: DatasetSpec,
    shard: str,
    sibling: str,
    bucket: str,
    size_class: int,
    columns: Sequence[Column],
) -> SiblingFile:
    """One file of a shard at a dataset's root, to be written block by block."""
    store, path = filesystem(uri)
    name = shard_file(shard, sibling)
    about = {
        "schema_version": SCHEMA_VERSION,
        "sibling": sibling,
        "bucket": bucket,
        "size_class": size_class,
        "autoencoder": asdict(spec.autoencoder),
        "text": [asdict(encoder) for encoder in spec.text],
        "arrays": {
            column.name: {"shape": list(column.shape), "dtype": "float16", "byte_order": "little"}
            for column in columns
            if column.kind == "bytes"
        },
    }
    return SiblingFile(store, f"{path}/{name}", join(uri, name), sibling, columns, about)


@dataclass(slots=True)
class _Group:
    """Samples of one bucket and size class on their way into blocks."""

    bucket: str
    size_class: int
    capacity: int
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sibling -> column -> array or list of `capacity` rows."""
    rows: int = 0
    files: dict[str, SiblingFile] = field(default_factory=dict)
    """The open shard; empty between shards."""
    shard: str = ""
    shard_rows: int = 0
    row_groups: int = 0


def _empty(columns: Sequence[Column], rows: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for column in columns:
        if column.kind in ("string", "text?"):
            values[column.name] = [""] * rows
        elif column.kind == "number?":
            values[column.name] = np.full(rows, np.nan)
        else:
            kinds = {"bytes": np.float16, "int32": np.int32, "bool": np.bool_}
            values[column.name] = np.zeros((rows, *column.shape), kinds[column.kind])
    return values


def rows_by_bytes(spec: DatasetSpec) -> tuple[int, int]:
    """Rows of a block and of a shard: about 10 MB and 1.5 GB of square pictures of the largest size class.

    A block is one text sibling's row group and one latents' sibling's: two reads of 4 to 16 MB together, which is what
    object stores deliver best; more would cost memory and shuffle less.
    """
    autoencoder = spec.autoencoder
    text = sum(2 * (e.max_tokens * e.width + (e.pooled_width or 0)) for e in spec.text)
    cells = [(r // autoencoder.factor) ** 2 * autoencoder.latent_channels for r in spec.resolutions]
    block = max(1, min(BLOCK_BYTES // (text + 4 * cells[-1]), MAX_ROWS_PER_GROUP))
    return block, max(block, SHARD_BYTES // (text * spec.captions + 4 * sum(cells)))


def balanced_row_groups(counts: Mapping[str, int], rows_per_group: int, *, least: int = 4) -> dict[str, int]:
    """Smaller blocks for rare buckets, in proportion, so that a rank need not hold large blocks of all of them.

    Args:
        counts: samples of each bucket.
        rows_per_group: of the most frequent bucket.
        least: no block is smaller than this.
    """
    most = max(counts.values(), default=0)
    return {
        bucket: max(min(least, rows_per_group), round(rows_per_group * count / most))
        if most
        else rows_per_group
        for bucket, count in counts.items()
    }
