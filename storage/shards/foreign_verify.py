"""Checks every row group of files made by others against the index and the column map."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from isthmus.errors import CorruptShard, StorageError
from isthmus.storage.filesystems import filesystem, storage_errors
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.layout import finite_rows

if TYPE_CHECKING:
    from isthmus.storage.shards.rewrite_source import ForeignSource

Report = Callable[..., None]
"""(message, shard, row_group=, row=, column=)"""


def verify_foreign(dataset: Dataset, problem: Report, *, finite: bool) -> tuple[int, int, int]:
    """Reads and decodes all files; every problem is reported with its place.

    Args:
        problem: called for each.
        finite: decode the rows and look into them; otherwise sizes and footers only.

    Returns:
        Files, rows and bytes that were looked at.
    """
    index, files = dataset.index, dataset.index.foreign
    assert files is not None
    starts = np.flatnonzero(np.diff(index.shard, prepend=-1)).tolist()
    rows = size = 0
    readers = {resolution: ForeignReader(dataset, resolution) for resolution in dataset.spec.resolutions}
    fields = fields_reader(dataset)
    for first, end in zip(starts, [*starts[1:], len(index)], strict=True):
        name = index.file(first, "")
        told = int(files.file_bytes[first])
        found = _size(dataset, name)
        if found is not None and found != told:
            problem(f"it has {found} bytes, the index lists {told}", name)
            continue
        try:
            readers[dataset.spec.resolutions[0]].footer(first)
        except (CorruptShard, StorageError) as error:
            problem(error.message, name)
            continue
        size += told
        rows += int(index.rows[first:end].sum())
        if finite:
            for block in range(first, end):
                verify_block(dataset, block, readers, problem, fields)
    return len(starts), rows, size


def _size(dataset: Dataset, name: str) -> int | None:
    """A file's bytes; None when it cannot be told, which reading it will explain."""
    uri = dataset.file_uri(name)
    store, path = filesystem(uri)
    try:
        with storage_errors("read", uri):
            return int(store.size(path))
    except (FileNotFoundError, StorageError, TypeError):
        return None


def fields_reader(dataset: Dataset) -> ForeignSource | None:
    """What reads the dataset's fields; None where it has none."""
    from isthmus.storage.shards.rewrite_source import ForeignSource

    return ForeignSource(dataset) if dataset.spec.fields else None


def verify_block(
    dataset: Dataset,
    block: int,
    readers: dict[int, ForeignReader],
    problem: Report,
    fields: ForeignSource | None = None,
) -> None:
    """Decodes one row group at every resolution that `readers` has, with every caption, and looks into its rows.

    Args:
        fields: see :func:`fields_reader`.
    """
    name, row_group = dataset.index.file(block, ""), int(dataset.index.row_group[block])
    known: set[tuple[str, int | None]] = (
        set()
    )  # what is found at one resolution is not told again at the next

    def tell(message: str, row: int | None, column: str | None) -> None:
        if (message, row) not in known:
            known.add((message, row))
            problem(message, name, row_group=row_group, row=row, column=column)

    if fields is not None:
        try:
            fields.small(block, [told.name for told in dataset.spec.fields])
        except (CorruptShard, StorageError) as error:
            tell(error.message, getattr(error, "row", None), getattr(error, "column", None))
    for resolution, reader in readers.items():
        for caption in range(dataset.spec.captions):
            try:
                content = reader.read(block, caption)
            except CorruptShard as error:
                tell(error.message, error.row, error.column)
                continue
            except StorageError as error:
                tell(error.message, None, None)
                continue
            for column, values in content.fixed.items():
                place = f"{column} at {resolution} px" if column.startswith("latent") else column
                half = np.ascontiguousarray(values).view(np.float16)
                for row in np.flatnonzero(~finite_rows(half)).tolist():
                    tell(
                        f"{place} of caption {caption} is not finite"
                        if caption
                        else f"{place} is not finite",
                        row,
                        column,
                    )
            for row, key in enumerate(content.strings["key"]):
                if not key:
                    tell("an empty key", row, "key")
