"""Which rows go into which shard of a rewritten dataset: arithmetic over the sources' indices, no row is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.storage.shards.layout import MAX_CHUNK_BYTES, MAX_ROWS_PER_GROUP, columns_of, siblings
from isthmus.storage.shards.rewrite_source import Source
from isthmus.storage.shards.spec import DatasetSpec
from isthmus.storage.shards.writer import BLOCK_BYTES, SHARD_BYTES, balanced_row_groups

Order = Literal["bucket", "size-class", "source"]
LEFT_OUT = 255
"""The part of a row that goes nowhere."""
MAX_GROUPS = 1024
"""Of a shard whose size nobody told. Of tiny rows 1.5 GB are thousands, and a parquet footer is read whole."""
Chosen = Sequence[NDArray[np.uint8] | None]
"""For each source the part of each of its rows; None: all go into the first part."""
Shapes = Mapping[str, Mapping[int, tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large shards and blocks become. Of each pair at most one is set."""

    shard_rows: int | None = None
    shard_bytes: int | None = None
    """Of all siblings together; neither: 1.5 GB, and no more than `MAX_GROUPS` row groups."""
    group_rows: int | None = None
    """Of the most frequent bucket; rarer ones have less in proportion."""
    group_bytes: int | None = None
    """Of the text of one caption and the largest latents; neither: as the largest block of the bucket in the sources."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one bucket and size class that go into one part, in the sources' order."""

    bucket: str
    size_class: int
    source: NDArray[np.int64]
    """[pieces] which source, and"""
    block: NDArray[np.int64]
    """[pieces] which of its blocks."""
    before: NDArray[np.int64]
    """[pieces + 1] rows of the group before each piece."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard to be written: some rows of a group, one behind the other."""

    part: int
    name: str
    group: Group
    start: int
    stop: int
    rows_per_group: int


@dataclass(slots=True)
class Part:
    """One dataset to be written."""

    name: str
    uri: str
    shards: list[Shard] = field(default_factory=list)
    rows: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bucket -> size class -> samples."""

    @property
    def samples(self) -> int:
        """Of all buckets."""
        return sum(sum(by_size.values()) for by_size in self.rows.values())


def plan_part(
    part: int,
    name: str,
    uri: str,
    sources: Sequence[Source],
    chosen: Chosen,
    spec: DatasetSpec,
    shapes: Shapes,
    sizes: Sizes,
    order: Order,
) -> Part:
    """The shards of one part.

    Raises:
        UsageError: no row goes into it, or the sizes are impossible.
    """
    groups = _groups(part, sources, chosen)
    if not groups:
        told = f"part {name} would have no sample" if name else "no sample is left"
        raise UsageError(f"{told}; a dataset needs at least one", where=uri)
    result = Part(name, uri)
    for group in groups:
        result.rows.setdefault(group.bucket, {})[group.size_class] = int(group.before[-1])
    per_group = _rows_per_group(groups, sources, spec, shapes, sizes)
    drafts = []
    for group in groups:
        rows, total = per_group[group.bucket], int(group.before[-1])
        per_shard = sizes.shard_rows
        if per_shard is None:
            per_shard = max(rows, (sizes.shard_bytes or SHARD_BYTES) // sum(_bytes(group, spec, shapes)))
            if sizes.shard_bytes is None:
                per_shard = min(per_shard, rows * MAX_GROUPS)
        if per_shard < rows:
            raise UsageError(f"a shard of {per_shard} rows is smaller than a row group of {rows}")
        per_shard -= per_shard % rows
        drafts += [(group, start, min(start + per_shard, total)) for start in range(0, total, per_shard)]
    if order == "source":
        drafts.sort(key=lambda draft: _place(draft[0], draft[1]))
    elif order == "size-class":
        drafts.sort(key=lambda draft: (draft[0].size_class, draft[0].bucket, draft[1]))
    if len(drafts) > 10**9:
        raise UsageError(f"{len(drafts)} shards are more than names allow", hint="make larger shards")
    for number, (group, start, stop) in enumerate(drafts):
        result.shards.append(Shard(part, f"part-{number:05d}", group, start, stop, per_group[group.bucket]))
    return result


def _place(group: Group, row: int) -> tuple[int, int]:
    """Where the row of a group comes from."""
    piece = int(np.searchsorted(group.before, row, side="right")) - 1
    return int(group.source[piece]), int(group.block[piece])


def _groups(part: int, sources: Sequence[Source], chosen: Chosen) -> list[Group]:
    """By bucket and size class."""
    pieces: dict[tuple[str, int], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    order: dict[tuple[str, int], list[int]] = {}
    for number, (source, parts) in enumerate(zip(sources, chosen, strict=True)):
        index = source.dataset.index
        counts = index.rows
        if parts is not None:
            counts = np.add.reduceat((parts == part).astype(np.int64), source.first[:-1])
        kinds = np.unique(np.stack([index.bucket, index.size_class]), axis=1).T.tolist()
        for bucket, size_class in kinds:
            here = np.flatnonzero((index.bucket == bucket) & (index.size_class == size_class) & (counts > 0))
            if len(here):
                key = source.dataset.spec.buckets[bucket], size_class
                pieces.setdefault(key, []).append((here, counts[here]))
                order.setdefault(key, []).append(number)
    found = []
    for key in sorted(pieces):
        blocks = np.concatenate([blocks for blocks, _ in pieces[key]])
        counts = np.concatenate([counts for _, counts in pieces[key]])
        origin = np.repeat(order[key], [len(blocks) for blocks, _ in pieces[key]])
        found.append(Group(*key, origin.astype(np.int64), blocks, np.concatenate([[0], np.cumsum(counts)])))
    return found


def _bytes(group: Group, spec: DatasetSpec, shapes: Shapes) -> tuple[int, int]:
    """Bytes of a row's text, of all captions, and of its latents, at all resolutions."""
    text = sum(2 * (e.max_tokens * e.width + (e.pooled_width or 0)) for e in spec.text)
    cells = [prod(shapes[group.bucket][r]) for r in spec.resolutions_of(group.size_class)]
    return text * spec.captions, 4 * sum(cells)


def _block_bytes(group: Group, spec: DatasetSpec, shapes: Shapes) -> int:
    """Bytes that are read of a row at the largest resolution, with one caption."""
    text, _ = _bytes(group, spec, shapes)
    return text // spec.captions + 4 * prod(shapes[group.bucket][group.size_class])


def _rows_per_group(
    groups: Sequence[Group], sources: Sequence[Source], spec: DatasetSpec, shapes: Shapes, sizes: Sizes
) -> dict[str, int]:
    """Rows of a block by bucket."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.bucket] = counts.get(group.bucket, 0) + int(group.before[-1])
    if sizes.group_rows is None and sizes.group_bytes is None:
        found = dict.fromkeys(counts, 1)
        for source in sources:
            index = source.dataset.index
            for number, bucket in enumerate(source.dataset.spec.buckets):
                if bucket in counts and (index.bucket == number).any():
                    found[bucket] = max(found[bucket], int(index.rows[index.bucket == number].max()))
    else:
        base = sizes.group_rows
        if base is None:
            largest = max(groups, key=lambda group: int(group.before[-1]))
            told = (sizes.group_bytes or BLOCK_BYTES) // _block_bytes(largest, spec, shapes)
            base = max(1, min(told, MAX_ROWS_PER_GROUP))
        found = balanced_row_groups(counts, base)
    if sizes.shard_rows is not None and sizes.group_rows is None:
        found = {bucket: min(rows, sizes.shard_rows) for bucket, rows in found.items()}
    for group in groups:
        _check(group, found[group.bucket], spec, shapes)
    return found


def _check(group: Group, rows: int, spec: DatasetSpec, shapes: Shapes) -> None:
    if not 1 <= rows <= MAX_ROWS_PER_GROUP:
        raise UsageError(f"a row group of {rows} rows: it must be within 1 to {MAX_ROWS_PER_GROUP}")
    for sibling in siblings(spec, group.size_class):
        shape = None
        if sibling.endswith("px"):
            shape = shapes[group.bucket][int(sibling.removesuffix("px"))]
        widest = max(column.width or 0 for column in columns_of(spec, sibling, shape))
        if widest * rows > MAX_CHUNK_BYTES - 1024:
            raise UsageError(
                f"{rows} rows of {widest} bytes do not fit a column chunk of {sibling}",
                hint="make smaller row groups",
            )
