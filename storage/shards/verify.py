"""Checks every byte and every row of a dataset, and reports all problems, each with its place."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.errors import CorruptShard, DataError, StorageError
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.blocks import Block, Bytes
from isthmus.storage.shards.dataset import Dataset, open_dataset, read_manifest, read_side_file
from isthmus.storage.shards.fields import take
from isthmus.storage.shards.files import parse_text_file
from isthmus.storage.shards.foreign_verify import verify_foreign
from isthmus.storage.shards.index import Index, SiblingIndex
from isthmus.storage.shards.layout import Column, columns_of, finite_rows, siblings
from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.whole_reads import read_range


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    message: str
    shard: str
    """The file's name within the dataset."""
    row_group: int | None = None
    row: int | None = None
    """Within the row group."""
    column: str | None = None

    def __str__(self) -> str:
        place = [self.shard]
        for name in ("row_group", "row", "column"):
            value = getattr(self, name)
            if value is not None:
                place.append(f"{name.replace('_', ' ')} {value}")
        return f"{', '.join(place)}: {self.message}"


@dataclass(slots=True)
class VerifyReport:
    """What :func:`verify` found."""

    uri: str
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    rows: int = 0
    """Rows looked at."""
    size: int = 0
    """Bytes looked at."""
    row_groups: int = 0
    """Looked at."""
    row_groups_of: int = 0
    """That the dataset has: more than that when a sample was asked for."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class Verifier:
    """Looks at the parts of one dataset and collects what is wrong. For one thread."""

    def __init__(self, uri: str, on_problem: Callable[[Problem], None] | None, finite: bool) -> None:
        self.report = VerifyReport(uri)
        self._on_problem, self._finite = on_problem, finite
        self._buffer: Bytes = np.empty(0, np.uint8)

    def problem(self, message: str, shard: str, **place: int | str | None) -> None:
        """One more thing that is wrong."""
        found = Problem(message, shard, **place)  # type: ignore[arg-type]
        self.report.problems.append(found)
        if self._on_problem:
            self._on_problem(found)

    def side_files(self, uri: str, manifest: Manifest) -> None:
        """The files beside the shards, but for the index."""
        for name in manifest.files:
            if name == names.INDEX:
                continue
            try:
                data = read_side_file(uri, name, manifest)
                if name in (names.NULL_TEXT, names.PROMPTS):
                    text, _ = parse_text_file(manifest.spec, data)
                    for encoder, column in text.items():
                        for row in np.flatnonzero(~finite_rows(column.tokens)).tolist():
                            self.problem("not finite", name, row=row, column=f"{encoder}_tokens")
            except (DataError, ValueError) as error:
                self.problem(error.message if isinstance(error, DataError) else str(error), name)
        if names.NULL_TEXT not in manifest.files:
            self.problem("the manifest lists no null embedding", names.MANIFEST)

    def dataset(self, dataset: Dataset) -> None:
        """Everything that the index lists."""
        index, report = dataset.index, self.report
        report.row_groups = report.row_groups_of = len(index)
        if index.foreign is not None:
            report.files, report.rows, report.size = verify_foreign(
                dataset, self.problem, finite=self._finite
            )
            return
        starts = np.flatnonzero(np.diff(index.shard, prepend=-1))
        for first, end in zip(starts.tolist(), [*starts[1:].tolist(), len(index)], strict=True):
            self.shard(dataset, range(first, end), range(first, end))

    def shard(self, dataset: Dataset, blocks: range, chosen: Sequence[int]) -> None:
        """The files of one shard, and of its row groups those that are chosen.

        Args:
            blocks: all of the shard, positions in the index.
        """
        keys: dict[int, list[str]] = {}
        for sibling in siblings(dataset.spec, int(dataset.index.size_class[blocks[0]])):
            self.file(dataset, sibling, blocks, chosen, keys)
        self.report.rows += int(dataset.index.rows[list(chosen)].sum())

    def file(
        self,
        dataset: Dataset,
        sibling: str,
        blocks: range,
        chosen: Sequence[int],
        keys: dict[int, list[str]],
    ) -> None:
        """One file of a shard. `keys` holds the rows' keys by block once a sibling gave them."""
        index, ranges = dataset.index, dataset.index.sibling(sibling)
        name = index.file(blocks[0], sibling)
        bucket = dataset.spec.buckets[int(index.bucket[blocks[0]])]
        shape = None
        if sibling.endswith("px"):
            shape = dataset.manifest.latent_shapes[bucket][int(sibling.removesuffix("px"))]
        columns = columns_of(dataset.spec, sibling, shape)
        self.report.files += 1
        if not self._frame(dataset, name, ranges, blocks, columns):
            return
        for block in chosen:
            size = ranges.size(block)
            if len(self._buffer) < size:
                self._buffer = np.empty(size, np.uint8)
            row_group = int(index.row_group[block])
            into = self._buffer[:size]
            try:
                read_range(dataset, name, int(ranges.offset[block]), into, row_group)
            except (CorruptShard, StorageError) as error:
                self.problem(error.message, name, row_group=row_group)
                continue
            self.report.size += size
            self._block(dataset, name, sibling, block, columns, into, keys)

    def _frame(
        self, dataset: Dataset, name: str, ranges: SiblingIndex, blocks: range, columns: list[Column]
    ) -> bool:
        """The file's ends: its first bytes, its footer's checksum, and that the footer says what the index says."""
        told = int(ranges.file_bytes[blocks[0]])
        start = int(ranges.offset[blocks[-1]]) + ranges.size(blocks[-1])
        if told - start > 1 << 26 or told <= start:
            self.problem("the index gives its footer an impossible size", name)
            return False
        head, footer, beyond = (np.empty(size, np.uint8) for size in (4, told - start, 1))
        try:
            read_range(dataset, name, 0, head)
            read_range(dataset, name, start, footer)
        except (CorruptShard, StorageError) as error:
            self.problem(error.message, name)
            return "missing" not in error.message
        try:
            read_range(dataset, name, told, beyond)
            self.problem(f"the file is longer than the {told} bytes that the index lists", name)
        except (CorruptShard, StorageError):
            pass  # it ends where it should
        if bytes(head) != b"PAR1":
            self.problem("the file does not start like a parquet file", name)
        if zlib.crc32(footer.data) != int(ranges.footer_crc32[blocks[0]]):
            self.problem("its footer has another checksum than the index lists", name)
            return True
        try:
            # A footer can be read by itself when it is padded to a file that ends with it.
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(footer)))
        except (pa.ArrowException, OSError) as error:
            self.problem(f"its footer is unreadable: {error}", name)
            return True
        schema = metadata.schema.to_arrow_schema()
        wanted = [column.arrow() for column in columns]
        if [(f.name, f.type, f.nullable) for f in schema] != [(f.name, f.type, f.nullable) for f in wanted]:
            self.problem("its columns are not those that the manifest leads to", name)
        rows = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        if rows != dataset.index.rows[blocks.start : blocks.stop].tolist():
            self.problem("its row groups are not those that the index lists", name)
        # pyarrow's metadata and schema hold each other: gigabytes of footers, until a collector comes by.
        del metadata, schema
        gc.collect(1)
        return True

    def _block(
        self,
        dataset: Dataset,
        name: str,
        sibling: str,
        block: int,
        columns: list[Column],
        data: Bytes,
        keys: dict[int, list[str]],
    ) -> None:
        ranges, row_group = dataset.index.sibling(sibling), int(dataset.index.row_group[block])
        content = Block(int(dataset.index.rows[block]))
        at = 0
        for number, column in enumerate(columns):
            chunk = data[at : at + int(ranges.length[block, number])]
            at += len(chunk)
            if zlib.crc32(chunk.data) != int(ranges.crc32[block, number]):
                self.problem(
                    "its bytes have another checksum than the index lists",
                    name,
                    row_group=row_group,
                    column=column.name,
                )
            try:
                take(content, column, chunk)
            except ValueError as error:
                self.problem(f"unreadable: {error}", name, row_group=row_group, column=column.name)
                continue
            for row, message in self._rows(dataset, column, content):
                self.problem(message, name, row_group=row_group, row=row, column=column.name)
        mine = content.strings.get("key")
        if mine is not None and keys.setdefault(block, mine) != mine:
            row = next(row for row, (a, b) in enumerate(zip(mine, keys[block], strict=True)) if a != b)
            self.problem(
                f"it has key {mine[row]!r}, the text file {keys[block][row]!r}",
                name,
                row_group=row_group,
                row=row,
                column="key",
            )

    def _rows(self, dataset: Dataset, column: Column, content: Block) -> Iterator[tuple[int, str]]:
        if column.kind == "bytes" and self._finite:
            values = content.fixed[column.name].view(np.float16)
            for row in np.flatnonzero(~finite_rows(values)).tolist():
                yield row, "not finite"
        elif column.kind == "int32" and column.name.endswith("_length"):
            encoder = next(e for e in dataset.spec.text if column.name == f"{e.name}_length")
            length = content.numbers[column.name]
            for row in np.flatnonzero((length < 0) | (length > encoder.max_tokens)).tolist():
                yield row, f"length {length[row]} is not within 0 to {encoder.max_tokens}"
        elif column.name == "key":
            for row, key in enumerate(content.strings["key"]):
                if not key:
                    yield row, "an empty key"


def begin(
    uri: str | Sequence[str], on_problem: Callable[[Problem], None] | None, finite: bool
) -> tuple[Verifier, Dataset | None]:
    """Checks the manifest, what lies beside the shards, and the index. No dataset: it is too damaged to be opened."""
    root = uri if isinstance(uri, str) else uri[0]
    verifier = Verifier(root, on_problem, finite)
    try:
        manifest = read_manifest(root)
    except DataError as error:
        verifier.problem(error.message, names.MANIFEST)
        return verifier, None
    verifier.side_files(root, manifest)
    try:
        dataset = open_dataset(uri)
    except DataError as error:
        verifier.problem(error.message, names.INDEX)
        return verifier, None
    return verifier, dataset


def verify(
    uri: str | list[str], *, on_problem: Callable[[Problem], None] | None = None, finite: bool = True
) -> VerifyReport:
    """Reads all of a dataset and checks every checksum, and every row's shape, dtype and finiteness.

    Args:
        uri: the dataset's root, or its roots.
        on_problem: called for each problem as it is found.
        finite: look into the rows, too; without it, checksums and layout only.

    Raises:
        DatasetNotFound: there is no manifest. All that is wrong with what is there is in the report.
    """
    verifier, dataset = begin(uri, on_problem, finite)
    if dataset is None:
        return verifier.report
    verifier.dataset(dataset)
    return verifier.report


def _latent_bytes(index: Index, manifest: Manifest, resolution: int) -> int:
    """Bytes that a resolution's latents take in the files."""
    if index.foreign is None or manifest.columns is None:
        return int(index.sibling(f"{resolution}px").length.sum())
    latent = manifest.columns.latents[resolution]
    wanted = [values.column for values in (latent.mean, latent.logvar) if values is not None]
    return int(index.foreign.stored[:, [index.foreign.columns.index(name) for name in wanted]].sum())


def stats(uri: str | list[str]) -> dict[str, object]:
    """Counts, sizes, buckets and encoders of a dataset, from its manifest and index, and what its fields hold; JSON-able."""
    from isthmus.storage.shards.field_stats import field_stats

    dataset = open_dataset(uri)
    manifest, spec, index = dataset.manifest, dataset.spec, dataset.index
    return {
        "uri": dataset.uri,
        "fingerprint": manifest.fingerprint,
        "samples": manifest.samples,
        "rejected": manifest.rejected,
        "source": manifest.source,
        "bytes": manifest.size,
        "shards": manifest.shards,
        "blocks": manifest.blocks,
        "rows_per_block": {"least": int(index.rows.min()), "most": int(index.rows.max())},
        "layout": "isthmus" if manifest.columns is None else "foreign",
        "columns": None if manifest.columns is None else manifest.columns.to_json(),
        "captions": spec.captions,
        "prompts": len(dataset.prompts),
        "resolutions": {
            str(resolution): {
                "samples": int(index.rows[index.size_class >= resolution].sum()),
                "bytes": _latent_bytes(index, manifest, resolution),
            }
            for resolution in spec.resolutions
            if (index.size_class >= resolution).any()
        },
        "buckets": {
            bucket: {
                "samples": sum(rows.values()),
                "size_classes": {str(size): count for size, count in rows.items()},
                "latents": {
                    str(resolution): list(shape)
                    for resolution, shape in manifest.latent_shapes[bucket].items()
                },
            }
            for bucket, rows in manifest.rows.items()
        },
        "text": {
            encoder.name: {
                "max_tokens": encoder.max_tokens,
                "width": encoder.width,
                "pooled_width": encoder.pooled_width,
                "fingerprint": encoder.fingerprint,
            }
            for encoder in spec.text
        },
        "autoencoder": {
            "kind": spec.autoencoder.kind,
            "fingerprint": spec.autoencoder.fingerprint,
            "latent_channels": spec.autoencoder.latent_channels,
            "factor": spec.autoencoder.factor,
            "scaling_factor": spec.autoencoder.scaling_factor,
            "shift_factor": spec.autoencoder.shift_factor,
        },
        "fields": field_stats(dataset) if spec.fields else {},
    }
