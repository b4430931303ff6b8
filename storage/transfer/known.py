"""What a dataset's manifest and index vouch for: the size and CRC-32 of each of its files, without reading them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from isthmus.errors import DataError, DatasetNotFound
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.shards.dataset import open_dataset, read_side_file
from isthmus.storage.shards.index import Index
from isthmus.storage.shards.layout import FIELDS
from isthmus.storage.shards.manifest import FORMAT, MANIFEST, MAX_MANIFEST_BYTES
from isthmus.storage.transfer.crc import combine_files
from isthmus.storage.transfer.spec import Entry

_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Vouched:
    """The files of a dataset."""

    fingerprint: str = ""
    """Empty: there is no dataset."""
    files: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Name -> (size, CRC-32 or None where only the size is told)."""


def vouched_for(uri: str) -> Vouched:
    """The files that the dataset at a place vouches for; nothing when there is none.

    Raises:
        DataError: manifest or index is damaged.
        StorageError: the place cannot be read.
    """
    try:
        if not _ours(uri):
            return Vouched()
        dataset = open_dataset(uri)
    except (DatasetNotFound, FileNotFoundError):
        return Vouched()
    files: dict[str, tuple[int, int | None]] = {}
    for name, entry in dataset.manifest.files.items():
        data = read_side_file(uri, name, dataset.manifest)
        files[name] = entry.size, zlib.crc32(data)
    if dataset.index.foreign is None:
        resolutions = [f"{resolution}px" for resolution in dataset.spec.resolutions]
        texts = ["text", *(f"text{number}" for number in range(1, dataset.spec.captions))]
        fields = [FIELDS] if dataset.spec.fields else []
        for sibling in (*texts, *resolutions, *fields):
            files |= _files(dataset.index, sibling)
    files.pop(MANIFEST, None)
    return Vouched(dataset.manifest.fingerprint, files)


def check_vouched(vouched: Vouched, found: Mapping[str, Entry], uri: str) -> None:
    """That the source's files have the sizes that its manifest and index tell.

    Raises:
        DataError: one has not, or is missing from a dataset that has all others beside it.
    """
    for name, (size, _) in vouched.files.items():
        if name in found and found[name].size != size:
            raise DataError(
                f"the file has {found[name].size:,} bytes, {size:,} in the dataset's index",
                where=f"{uri}/{name}",
                hint="the source is damaged: `isthmus data verify` lists all that is wrong",
            )


def _ours(uri: str) -> bool:
    """Whether the manifest.json is one of a latent dataset: other programs have such files, too."""
    store, path = filesystem(uri)
    with (
        storage_errors("read", join(uri, MANIFEST)),
        store.open(f"{path.rstrip('/')}/{MANIFEST}", "rb") as file,
    ):
        data = bytes(file.read(MAX_MANIFEST_BYTES + 1))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        # What was ours, and is damaged, still says so.
        return FORMAT.encode() in data
    return isinstance(found, dict) and found.get("format") == FORMAT


def _files(index: Index, sibling: str) -> dict[str, tuple[int, int | None]]:
    """Of all shards that have a sibling: its file is the magic, the column chunks of its row groups, and the footer."""
    try:
        ranges = index.sibling(sibling)
    except KeyError:
        return {}
    here = np.flatnonzero(ranges.file_bytes > 0)
    if not len(here):
        return {}
    shard = index.shard[here]
    first = np.flatnonzero(np.diff(shard, prepend=-1))
    columns = len(ranges.columns)
    blocks = np.diff(np.append(first, len(here)))
    sizes = ranges.file_bytes[here[first]]
    # Of each file: one piece for the magic, `columns` for each block, one for the footer.
    count = len(here) * columns + 2 * len(first)
    lengths, crcs = np.zeros(count, np.int64), np.zeros(count, np.int64)
    starts = np.concatenate([[0], np.cumsum(blocks * columns + 2)[:-1]])
    lengths[starts], crcs[starts] = len(_MAGIC), zlib.crc32(_MAGIC)
    inner = np.ones(count, bool)
    ends = starts + blocks * columns + 1
    inner[starts] = inner[ends] = False
    lengths[inner], crcs[inner] = ranges.length[here].ravel(), ranges.crc32[here].ravel()
    before = np.add.reduceat(lengths, starts)
    lengths[ends], crcs[ends] = sizes - before, ranges.footer_crc32[here[first]]
    whole = combine_files(crcs, np.maximum(lengths, 0), starts)
    # Nothing between the chunks, or the pieces are not all of the file.
    expected = len(_MAGIC) + np.concatenate([[0], np.cumsum(ranges.length[here].sum(1))[:-1]])
    begins = np.repeat(expected[first] - len(_MAGIC), blocks)
    tight = ranges.offset[here] == expected - begins
    sound = np.logical_and.reduceat(tight, first) & (lengths[ends] > 0)
    return {
        index.file(int(here[at]), sibling): (
            int(sizes[number]),
            int(whole[number]) if sound[number] else None,
        )
        for number, at in enumerate(first)
    }
