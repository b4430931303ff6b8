"""The perceptual hashes that encoding kept with a dataset's samples, read back: no latent is read, no encoder runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isthmus.core.encode.hashes import FIELDS, Hashes, parse_hashes
from isthmus.errors import DataError
from isthmus.storage.shards.blocks import Bytes
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.fields import scan, split_page
from isthmus.storage.shards.layout import Column, page_of
from isthmus.storage.shards.rewrite_source import source_of

_DIGITS = dict(zip(FIELDS, (16, 24), strict=True))


def kept_hashes(
    dataset: Dataset, progress: Callable[[int, int], None] = lambda done, of: None
) -> Hashes | str:
    """The hashes of all rows, in the order of the index; or why there are none to go by, in words.

    Memory: 20 bytes a row.

    Raises:
        CorruptShard: a file's bytes are not those that the index lists.
        DataError: what is kept is no hash.
        StorageError: the store refuses.
    """
    named = {told.name: told.kind for told in dataset.spec.fields}
    if any(named.get(name) != "text" for name in FIELDS):
        return "none were kept when it was encoded"
    index = dataset.index
    total = int(index.rows.sum())
    found = Hashes(np.empty(total, np.uint64), np.empty((total, 12), np.uint8))
    done = 0
    for block, values in scan(source_of(dataset), list(FIELDS), _digits):
        rows = int(index.rows[block])
        digits = [_joined(values[name], _DIGITS[name]) for name in FIELDS]
        if any(part is None for part in digits):
            return "some of its rows have none, such as those of a dataset that was merged into it"
        bits, colours = (part or b"" for part in digits)
        try:
            own = parse_hashes(bits, colours)
            found.bits[done : done + rows], found.colours[done : done + rows] = own.bits, own.colours
        except ValueError:
            where = f"{dataset.uri}: {index.shard_names[int(index.shard[block])]}, row group {index.row_group[block]}"
            raise DataError(
                "a field phash or phash_colours is no hash", where=where, hint="--latents does without"
            ) from None
        done += rows
        progress(done, total)
    return found


def _digits(column: Column, chunk: Bytes, rows: int) -> bytes | None:
    """All rows' digits, one behind the other; None when one has none. No string is made of them."""
    told, values = split_page(page_of(chunk.data), rows)
    if not told.all():
        return None
    width = _DIGITS[column.name]
    if len(values) != rows * (4 + width):
        raise ValueError(f"its texts have not {width} digits each")
    words = np.frombuffer(values, np.uint8).reshape(rows, 4 + width)
    if (words[:, :4].copy().view("<u4") != width).any():
        raise ValueError(f"its texts have not {width} digits each")
    return words[:, 4:].tobytes()


def _joined(values: object, width: int) -> bytes | None:
    """The same of whatever a reader gives."""
    if isinstance(values, list):  # of files that others made
        if not all(values):
            return None
        return "".join(word if len(word) == width else "?" for word in values).encode()
    return values if isinstance(values, bytes) else None
