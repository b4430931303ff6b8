"""Rewrites parquet files that others made as a dataset of our own layout: row by row, in bounded memory.

For files that cannot be read where they are (row groups of mixed shapes, or too large to be read at once), and for those
that are worth the fastest reading. Values stay as they are, to the bit where they are fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import CorruptShard, StorageError, UsageError
from isthmus.storage.filesystems import filesystem, storage_errors
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.shards.blocks import Block
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.foreign_arrays import WrongRow, field_rows, first_shape, number_rows, text_rows
from isthmus.storage.shards.foreign_block import Roles
from isthmus.storage.shards.foreign_build import latent_shape, stored_null_text
from isthmus.storage.shards.foreign_map import FieldColumn
from isthmus.storage.shards.foreign_scan import File, check_columns, list_files, read_footer
from isthmus.storage.shards.foreign_settings import ForeignSettings, Shape, bucket_of_sides
from isthmus.storage.shards.layout import CROP_COLUMNS, SIZE_COLUMNS
from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.spec import DatasetSpec, EncodedText, Sample, TextColumn
from isthmus.storage.shards.writer import DatasetWriter, balanced_row_groups, rows_by_bytes

_BATCH_ROWS = 64
_BUFFER = 1 << 20  # of a column while it is read: large row groups are never in memory at once


@dataclass(slots=True)
class _Rows:
    """Some rows of a row group that are of one bucket."""

    file: File
    row_group: int
    numbers: list[int]
    """Within the row group."""
    bucket: str
    sides: tuple[int, int] | None
    table: Any


@dataclass(slots=True)
class _Plan:
    """What the first pass finds: the buckets."""

    rows: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, dict[int, Shape]] = field(default_factory=dict)


def convert_files(
    sources: Sequence[str],
    dest: str,
    settings: ForeignSettings,
    *,
    pattern: str = "*.parquet",
    like: Dataset | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Writes a dataset of our own layout with the rows of these files, in the order of the files' names.

    Args:
        sources: the roots of the files.
        dest: where no dataset is yet.
        like: another dataset whose null embedding is taken when the settings say so.
        progress: called with the rows written and all rows.

    Raises:
        UsageError: the files are not as the settings say; names file, row group and column.
        CorruptShard: a row is not as the settings say.
        StorageError: a store refuses.
    """
    files = list_files(sources, pattern)
    plan = _plan(files, settings)
    if not plan.rows:
        raise UsageError("the files have no rows", where=", ".join(sources))
    spec = settings.spec(tuple(sorted(plan.rows)))
    block, shard = rows_by_bytes(spec)
    groups = balanced_row_groups(plan.rows, block)
    total, done = sum(plan.rows.values()), 0
    found: dict[str, TextColumn] = {}
    wanted = settings.null_text.removeprefix("key:") if settings.null_text.startswith("key:") else None
    with DatasetWriter(
        dest, spec, rows_per_group=groups, rows_per_shard=max(shard, *groups.values())
    ) as writer:
        for rows in _batches(files, settings, settings.columns.names()):
            for sample in _samples(rows, settings, spec, plan):
                writer.add(sample)
                if sample.key == wanted and not found:
                    found = _null_of(sample, spec)
            done += len(rows.numbers)
            if progress is not None:
                progress(done, total)
        if wanted is not None and not found:
            raise UsageError(f"null_text: no row has the key {wanted!r}", where=", ".join(sources))
        return writer.finish(found or stored_null_text(spec, settings, like), source=settings.about)


def _plan(files: Sequence[File], settings: ForeignSettings) -> _Plan:
    """Counts the buckets' rows, reading only the columns that tell the bucket."""
    plan = _Plan()
    for file in files:
        ranges = open_ranges(file.root)
        try:
            footer, _, _ = read_footer(ranges, file)
        finally:
            ranges.close()
        check_columns(footer, settings.columns, settings.bucket, file)
        if not settings.bucket.columns:
            rows = footer.metadata.num_rows
            if rows:
                bucket = settings.bucket.of_file(file.name)
                plan.rows[bucket] = plan.rows.get(bucket, 0) + rows
            continue
        for part in _batches([file], settings, []):
            plan.rows[part.bucket] = plan.rows.get(part.bucket, 0) + len(part.numbers)
    return plan


def _batches(files: Sequence[File], settings: ForeignSettings, columns: Sequence[str]) -> Iterator[_Rows]:
    """The rows of the files a few at a time, those of a bucket together."""
    names = list(dict.fromkeys([*columns, *settings.bucket.columns]))
    for file in files:
        store, path = filesystem(file.root)
        try:
            with storage_errors("read", file.uri), store.open(f"{path}/{file.name}", "rb") as opened:
                content = pq.ParquetFile(
                    opened, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
                )
                for number in range(content.num_row_groups):
                    at = 0
                    for batch in content.iter_batches(
                        _BATCH_ROWS, row_groups=[number], columns=names, use_threads=False
                    ):
                        yield from _by_bucket(file, number, at, pa.Table.from_batches([batch]), settings)
                        at += len(batch)
        except FileNotFoundError:
            raise CorruptShard("the file is missing", shard=file.uri) from None
        except StorageError as error:
            if isinstance(error.__cause__, pa.ArrowException):
                raise CorruptShard(f"cannot be decoded: {error.__cause__}", shard=file.uri) from None
            raise
        except pa.ArrowException as error:
            raise CorruptShard(f"cannot be decoded: {error}", shard=file.uri) from None


def _by_bucket(file: File, row_group: int, at: int, table: Any, settings: ForeignSettings) -> Iterator[_Rows]:
    rule, count = settings.bucket, len(table)
    if not rule.columns:
        yield _Rows(file, row_group, list(range(at, at + count)), rule.of_file(file.name), None, table)
        return
    try:
        told = [
            number_rows(table.column(name), 1).tolist() if rule.sides else text_rows(table.column(name))
            for name in rule.columns
        ]
    except WrongRow as error:
        raise CorruptShard(
            str(error),
            shard=file.uri,
            row_group=row_group,
            row=at + error.row,
            column=", ".join(rule.columns),
        ) from None
    values = list(zip(*told, strict=True))
    for value in dict.fromkeys(values):
        rows = [row for row in range(count) if values[row] == value]
        bucket = bucket_of_sides(*value) if rule.sides else value[0]
        numbers = [at + row for row in rows]
        yield _Rows(file, row_group, numbers, bucket, value if rule.sides else None, table.take(rows))


def _samples(rows: _Rows, settings: ForeignSettings, spec: DatasetSpec, plan: _Plan) -> Iterator[Sample]:
    """The samples of these rows."""
    columns, where = settings.columns, f"{rows.file.uri}, row group {rows.row_group}"
    if rows.bucket not in plan.shapes:
        plan.shapes[rows.bucket] = {
            resolution: latent_shape(
                rows.bucket,
                resolution,
                first_shape(rows.table.column(latent.mean.column), latent.mean.dtype),
                rows.sides,
                settings,
                f"{where}, column {latent.mean.column}",
            )
            for resolution, latent in columns.latents.items()
        }
    about = Manifest(
        spec=spec, latent_shapes=plan.shapes, samples=0, rows={}, shards=0, blocks=0, size=0, rejected=0,
        columns=columns,
    )  # fmt: skip
    blocks: dict[tuple[int, int], Block] = {}
    for resolution in spec.resolutions:
        for caption in range(spec.captions):
            roles = Roles(about, rows.bucket, resolution, caption)
            try:
                found = roles.block(rows.table, {}, rows.file.name, rows.row_group, len(rows.numbers))
            except CorruptShard as error:
                row = None if error.row is None else rows.numbers[error.row]
                raise CorruptShard(
                    error.message,
                    shard=rows.file.name,
                    row_group=rows.row_group,
                    row=row,
                    column=error.column,
                    hint=error.hint,
                ) from None
            blocks[resolution, caption] = found
    sources = (
        [""] * len(rows.numbers)
        if columns.source is None
        else text_rows(rows.table.column(columns.source), null="")
    )
    fields = {name: _field(rows, told) for name, told in columns.fields.items()}
    first = blocks[spec.resolutions[-1], 0]
    for row, number in enumerate(rows.numbers):
        size, crop = (
            [int(first.numbers[name][row]) for name in names] for names in (SIZE_COLUMNS, CROP_COLUMNS)
        )
        yield Sample(
            # A key that is made of the row's place is that of the whole row group.
            key=first.strings["key"][row] if columns.key else f"{rows.file.name}#{rows.row_group}:{number}",
            captions=[
                blocks[spec.resolutions[-1], at].strings["caption"][row] for at in range(spec.captions)
            ],
            text=[_text(blocks[spec.resolutions[-1], at], row, spec) for at in range(spec.captions)],
            latents={
                resolution: (
                    _half(
                        blocks[resolution, 0].fixed["latent_mean"][row], plan.shapes[rows.bucket][resolution]
                    ),
                    _half(
                        blocks[resolution, 0].fixed["latent_logvar"][row],
                        plan.shapes[rows.bucket][resolution],
                    ),
                )
                for resolution in spec.resolutions
            },
            bucket=rows.bucket,
            size_class=spec.resolutions[-1],
            source=sources[row],
            original_size=(size[0], size[1]),
            crop=(crop[0], crop[1], crop[2], crop[3]),
            flipped=bool(first.numbers["flipped"][row]),
            fields={name: values[row] for name, values in fields.items()},
        )


def _field(rows: _Rows, told: FieldColumn) -> list[float | str]:
    try:
        found = field_rows(rows.table.column(told.column), told.kind)
    except WrongRow as error:
        raise CorruptShard(
            str(error),
            shard=rows.file.uri,
            row_group=rows.row_group,
            row=rows.numbers[error.row],
            column=told.column,
        ) from None
    return list(found) if isinstance(found, list) else list(found.tolist())


def _text(block: Block, row: int, spec: DatasetSpec) -> EncodedText:
    return {
        encoder.name: (
            _half(block.fixed[f"{encoder.name}_tokens"][row], (encoder.max_tokens, encoder.width)),
            int(block.numbers[f"{encoder.name}_length"][row]),
            None
            if encoder.pooled_width is None
            else _half(block.fixed[f"{encoder.name}_pooled"][row], (encoder.pooled_width,)),
        )
        for encoder in spec.text
    }


def _half(row: Any, shape: tuple[int, ...]) -> Any:
    return np.ascontiguousarray(row).view("<f2").astype(np.float16, copy=False).reshape(shape)


def _null_of(sample: Sample, spec: DatasetSpec) -> dict[str, TextColumn]:
    text = {}
    for encoder in spec.text:
        tokens, length, pooled = sample.text[0][encoder.name]
        text[encoder.name] = TextColumn(
            tokens[None].copy(), np.array([length], np.int32), None if pooled is None else pooled[None].copy()
        )
    return text
