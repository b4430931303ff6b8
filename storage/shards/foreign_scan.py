"""Looks at parquet files made by others: which there are, and what their footers say."""

from __future__ import annotations

import difflib
import fnmatch
import gc
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.spec import Ranges
from isthmus.storage.shards.foreign import Decoder
from isthmus.storage.shards.foreign_arrays import (
    number_rows,
    text_rows,
    wrong_array_type,
    wrong_field_type,
    wrong_number_type,
    wrong_text_type,
)
from isthmus.storage.shards.foreign_block import Expected
from isthmus.storage.shards.foreign_footers import Footer
from isthmus.storage.shards.foreign_index import MAX_FOOTER_BYTES, wrong_name
from isthmus.storage.shards.foreign_map import ColumnMap
from isthmus.storage.shards.foreign_settings import BucketRule, bucket_of_sides
from isthmus.storage.shards.layout import MAX_ROWS_PER_GROUP

CONVERT = "`isthmus data convert` rewrites such files"
_FOOTERS_LEFT = 64
_TAIL = 1 << 16  # bytes read at first of a file's end; most footers fit


@dataclass(frozen=True, slots=True)
class File:
    """A file below one of the roots."""

    root: str
    name: str
    """Relative to the root."""
    size: int
    """Bytes."""

    @property
    def uri(self) -> str:
        """For messages."""
        return join(self.root, self.name)


@dataclass(frozen=True, slots=True)
class Group:
    """A row group with rows."""

    number: int
    rows: int
    bucket: str
    sides: tuple[int, int] | None
    """Height and width as the bucket's columns have them."""
    stored: list[int]
    """Bytes of each of the map's columns in the file."""
    decoded: list[int]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file's footer says."""

    file: File
    footer_bytes: int
    footer_crc32: int
    groups: list[Group]


def list_files(roots: Sequence[str], pattern: str) -> list[File]:
    """The files below the roots whose names fit a pattern, by name; not those whose path has a part like `_x` or `.x`.

    Raises:
        UsageError: there is none, or two roots have a file of the same name.
    """
    found: dict[str, File] = {}
    for root in roots:
        store, path = filesystem(root)
        try:
            with storage_errors("list", root):
                listed = store.find(path, detail=True)
        except FileNotFoundError:
            listed = {}
        base = path.rstrip("/") + "/"
        for at, info in sorted(listed.items()):
            name = str(at).removeprefix(base)
            hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
            if hidden or not fnmatch.fnmatchcase(name.rpartition("/")[2], pattern):
                continue
            wrong = wrong_name(name)
            if wrong:
                raise UsageError(f"the file's name {wrong}", where=join(root, name), hint="rename it")
            if name in found:
                raise UsageError(
                    f"{found[name].root} has a file {name}, too",
                    where=root,
                    hint="index them as two datasets, and list both in the recipe's data.sources",
                )
            found[name] = File(root, name, int(info["size"]))
    if not found:
        raise UsageError(f"no file named {pattern} here", where=", ".join(roots))
    return [found[name] for name in sorted(found)]


def scan_files(
    files: Sequence[File],
    columns: ColumnMap,
    bucket: BucketRule,
    *,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Scan]:
    """Reads the files' footers, several at once; in the order of `files`."""
    readers = {file.root: open_ranges(file.root) for file in files}
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="isthmus-footers") as pool:
            waiting: deque[Future[Scan]] = deque()
            left = iter(files)
            done = 0
            try:
                while True:
                    # As many as keep the threads busy, so that memory does not grow with the files.
                    while len(waiting) < 4 * threads and (file := next(left, None)) is not None:
                        waiting.append(pool.submit(_scan, readers[file.root], file, columns, bucket))
                    if not waiting:
                        break
                    yield waiting.popleft().result()
                    done += 1
                    if done % _FOOTERS_LEFT == 0:
                        # pyarrow's metadata and schema hold each other: gigabytes, until a collector comes by.
                        gc.collect(1)
                    if progress is not None:
                        progress(done, len(files))
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        for reader in readers.values():
            reader.close()


def read_footer(ranges: Ranges, file: File) -> tuple[Footer, int, int]:
    """A file's footer, its bytes and their checksum. CorruptShard when the file is no parquet file."""
    if file.size < 12:
        raise CorruptShard(f"{file.size} bytes are no parquet file", shard=file.uri)
    tail = min(file.size, _TAIL)
    data = bytes(ranges.read(file.name, file.size - tail, tail, file_bytes=file.size))
    if data[-4:] != b"PAR1":
        what = "an encrypted parquet file" if data[-4:] == b"PARE" else "no parquet file, or one cut short"
        raise CorruptShard(f"it is {what}", shard=file.uri)
    (length,) = struct.unpack("<I", data[-8:-4])
    size = length + 8
    if size > min(file.size - 4, MAX_FOOTER_BYTES):
        raise CorruptShard(f"it claims a footer of {length} bytes", shard=file.uri)
    if size > tail:
        data = bytes(ranges.read(file.name, file.size - size, size, file_bytes=file.size))
    data = data[len(data) - size :]
    return Footer(data, file.uri), size, zlib.crc32(data)


def _scan(ranges: Ranges, file: File, columns: ColumnMap, rule: BucketRule) -> Scan:
    footer, footer_bytes, crc32 = read_footer(ranges, file)
    check_columns(footer, columns, rule, file)
    names = columns.names()
    groups = []
    for number in range(footer.metadata.num_row_groups):
        rows = footer.metadata.row_group(number).num_rows
        if not rows:
            continue
        if rows > MAX_ROWS_PER_GROUP:
            raise UsageError(
                f"row group {number} has {rows} rows; a block is read at once and has at most {MAX_ROWS_PER_GROUP}",
                where=file.uri,
                hint=CONVERT,
            )
        told, sides = _bucket(ranges, file, footer, footer_bytes, number, rows, rule)
        chunks = [footer.chunks(number, name) for name in names]
        stored = [sum(chunk.stored for chunk in parts) for parts in chunks]
        decoded = [sum(chunk.decoded for chunk in parts) for parts in chunks]
        groups.append(Group(number, rows, told, sides, stored, decoded))
    return Scan(file, footer_bytes, crc32, groups)


def check_columns(footer: Footer, columns: ColumnMap, rule: BucketRule, file: File) -> None:
    """UsageError when a column of the map is missing or of a type that cannot hold what it shall."""
    schema = {field.name: field.type for field in footer.metadata.schema.to_arrow_schema()}
    numbers = [*(columns.original_size or ()), *(columns.crop or ()), *(rule.sides or ())]
    arrays, texts = [], [columns.source, rule.column]
    for caption in columns.captions:
        texts.append(caption.caption)
        for text in caption.text.values():
            arrays += [text.tokens, text.pooled]
            numbers += [text.length] if text.length is not None else []
    for latent in columns.latents.values():
        arrays += [latent.mean, latent.logvar]
    checks: list[tuple[str | None, Callable[[Any], str | None]]] = [
        (columns.key, lambda kind: wrong_text_type(kind, key=True)),
        (columns.flipped, lambda kind: wrong_number_type(kind, flag=True)),
        *((name, wrong_text_type) for name in texts),
        *((name, wrong_number_type) for name in numbers),
        *((None if values is None else values.column, wrong_array_type) for values in arrays),
        *((told.column, partial(wrong_field_type, told=told.kind)) for told in columns.fields.values()),
    ]
    for name, wrong in checks:
        if name is None:
            continue
        if name not in schema or name not in footer.leaves:
            close = difflib.get_close_matches(name, schema, n=1)
            raise UsageError(
                f"no column {name}",
                where=file.uri,
                hint=f"did you mean {close[0]}?" if close else f"it has {', '.join(schema)}",
            )
        problem = wrong(schema[name])
        if problem:
            raise UsageError(f"column {name} {problem}; it is {schema[name]}", where=file.uri)


def _bucket(
    ranges: Ranges, file: File, footer: Footer, footer_bytes: int, number: int, rows: int, rule: BucketRule
) -> tuple[str, tuple[int, int] | None]:
    """A row group's bucket, and its sides where columns tell them."""
    if not rule.columns:
        return rule.of_file(file.name), None
    values = []
    for name in rule.columns:
        low, high = _extremes(ranges, file, footer, footer_bytes, number, rows, name, rule.sides is not None)
        if low != high:
            raise UsageError(
                f"row group {number} mixes shapes: its {name} goes from {low} to {high}",
                where=file.uri,
                hint=f"a row group must hold one bucket; {CONVERT}",
            )
        values.append(low)
    if rule.sides is None:
        return str(values[0]), None
    height, width = values
    if height < 1 or width < 1:
        raise UsageError(f"row group {number} has sides {height} x {width}", where=file.uri)
    return bucket_of_sides(height, width), (height, width)


def _extremes(
    ranges: Ranges,
    file: File,
    footer: Footer,
    footer_bytes: int,
    number: int,
    rows: int,
    name: str,
    numeric: bool,
) -> tuple[Any, Any]:
    """The least and the greatest value of a column: from the footer's statistics where they are told."""
    chunk = footer.metadata.row_group(number).column(footer.leaves[name][0])
    told = chunk.statistics if chunk.is_stats_set else None
    if told is not None and told.has_min_max and told.has_null_count and told.null_count == 0:
        low, high = told.min, told.max
        if isinstance(low, str if not numeric else int) and low == high:
            return low, high
    # Statistics of text may be cut short, and may be missing: read the column itself, which is small.
    expected = [Expected(name, "number" if numeric else "text")]
    decoder = Decoder(footer, file.name, number, rows, expected)
    decoder.fetch(ranges, file.size - footer_bytes, file.size)
    column = decoder.decode()[0].column(name)
    try:
        values = number_rows(column, 0).tolist() if numeric else text_rows(column)
    except (ValueError, pa.ArrowException) as error:
        raise UsageError(f"row group {number}, column {name}: {error}", where=file.uri) from None
    return min(values), max(values)
