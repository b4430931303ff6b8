"""Near-duplicates of a dataset, by hashes of what its latents show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.core.encode.hashes import Hashes, hashes
from isthmus.core.encode.looking import decode
from isthmus.core.encode.neighbours import MAX_DISTANCE, apart, groups
from isthmus.errors import UsageError
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.draw import draw_rows
from isthmus.storage.shards.latents import read_keys, read_means

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder

THREADS = 4
FITTED_ON = 96
"""Pictures that are decoded to find what the latents' channels show."""
ENOUGH = 0.5
"""Share of light and dark that a preview must explain."""
_DECODED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Preview:
    """Colours as a linear function of a latent's channels, cell by cell: a picture of a latent's size, without decoding it."""

    weights: NDArray[np.float32]
    """[C + 1, 3]; the last row is the constant."""
    explained: float
    """Share of the variance of light and dark, over the pictures that it was fitted to."""

    def __call__(self, latents: NDArray[np.float16]) -> NDArray[np.float32]:
        """Unscaled latents [n, C, h, w] -> colours [n, h, w, 3], about 0 to 1."""
        cells = np.moveaxis(latents, 1, 3).astype(np.float32)
        return np.asarray(cells @ self.weights[:-1] + self.weights[-1], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A row of a group."""

    key: str
    shard: str
    row_group: int
    row: int
    distance: int
    """Bits in which its hash differs from the first row's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """What was found."""

    samples: int
    """That were looked at: all that have the resolution."""
    resolution: int
    distance: int
    groups: list[NDArray[np.int64]]
    """Positions of rows among all that were looked at, in the order of the index; larger groups first."""
    hashes: Hashes
    explained: float | None
    """See `Preview`; None where every latent was decoded, or none."""
    blocks: NDArray[np.int64]
    """[blocks] that were looked at, positions in the index."""
    starts: NDArray[np.int64]
    """[blocks] position of each one's first row."""

    @property
    def surplus(self) -> int:
        """Rows that would go if one of each group stayed."""
        return sum(len(group) - 1 for group in self.groups)

    def place(self, position: int) -> tuple[int, int]:
        """The block and the row of one of the rows that were looked at."""
        number = int(np.searchsorted(self.starts, position, "right")) - 1
        return int(self.blocks[number]), position - int(self.starts[number])

    def members(self, dataset: Dataset, which: Sequence[NDArray[np.int64]]) -> Iterator[list[Member]]:
        """The rows of some groups; reads the keys of each block that they lie in, the last few hundred blocks are kept."""
        index, kept = dataset.index, dict[int, list[str]]()
        for group in which:
            found = []
            for position in group.tolist():
                block, row = self.place(position)
                if block not in kept:
                    if len(kept) >= 512:
                        kept.pop(next(iter(kept)))
                    kept[block] = read_keys(dataset, block, self.resolution)
                found.append(
                    Member(
                        key=kept[block][row],
                        shard=index.shard_names[int(index.shard[block])],
                        row_group=int(index.row_group[block]),
                        row=row,
                        distance=int(apart(self.hashes.bits[group[:1]], self.hashes.bits[[position]])[0]),
                    )
                )
            yield found


def find_duplicates(
    dataset: Dataset,
    autoencoder: Autoencoder | None,
    *,
    resolution: int,
    distance: int = 4,
    whole: bool = False,
    seed: int = 0,
    kept: Hashes | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Duplicates:
    """Groups of rows whose pictures look alike.

    Args:
        autoencoder: None: of no use where hashes are
        kept: of all rows; otherwise they are made of the latents.
        resolution: that is looked at; the smallest one costs least and tells as much.
        distance: bits of 64 in which two neighbours may differ; a group is all that are joined by neighbours.
        whole: decode every latent; otherwise a few are decoded, and the others are seen through a `Preview`.
        seed: of the few.
        progress: called with rows done and rows in all.

    Memory: about 120 bytes a row, and a few blocks.

    Raises:
        UsageError: the distance is out of range, or a preview shows too little.
        CorruptShard: a block's bytes are not those that were written.
        StorageError: the store refuses.
    """
    if not 0 <= distance <= MAX_DISTANCE:
        raise UsageError(f"--distance {distance}: from 0 to {MAX_DISTANCE} bits of 64")
    index = dataset.index
    blocks = np.flatnonzero(index.size_class >= resolution)
    counts = index.rows[blocks]
    starts, total = np.cumsum(counts) - counts, int(counts.sum())
    if kept is None:
        assert autoencoder is not None
        found, explained = _of_latents(dataset, autoencoder, blocks, total, resolution, whole, seed, progress)
    elif len(kept) != total:
        raise UsageError(
            f"hashes are kept of {len(kept)} rows, {total} have {resolution} px", where=dataset.uri
        )
    else:
        found, explained = kept, None
    return Duplicates(
        samples=total,
        resolution=resolution,
        distance=distance,
        groups=_sorted(groups(found, distance)),
        hashes=found,
        explained=explained,
        blocks=blocks,
        starts=starts,
    )


def _of_latents(
    dataset: Dataset,
    autoencoder: Autoencoder,
    blocks: NDArray[np.int64],
    total: int,
    resolution: int,
    whole: bool,
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[Hashes, float | None]:
    """Hashes of what the latents of some blocks show, and what a preview explains."""
    preview = None if whole else fit_preview(dataset, autoencoder, resolution, seed)
    if preview is not None and preview.explained < ENOUGH:
        raise UsageError(
            f"a look at the latents without decoding shows {preview.explained:.0%} of light and dark only",
            where=dataset.uri,
            hint="--decode decodes every latent",
        )
    found = Hashes(np.empty(total, np.uint64), np.empty((total, 12), np.uint8))
    done = 0
    for means in _means(dataset, blocks.tolist(), resolution):
        pictures = preview(means) if preview is not None else _decoded(autoencoder, means)
        if not np.isfinite(pictures).all():
            pictures = np.nan_to_num(pictures)  # `verify` names such rows
        own = hashes(pictures)
        found.bits[done : done + len(own)], found.colours[done : done + len(own)] = own.bits, own.colours
        done += len(own)
        progress(done, total)
    return found, None if preview is None else preview.explained


def fit_preview(dataset: Dataset, autoencoder: Autoencoder, resolution: int, seed: int = 0) -> Preview:
    """Decodes a few rows and finds the colours that the latents' channels stand for, by least squares over their cells."""
    index = dataset.index
    cells, colours = [], []
    for block, row in draw_rows(dataset, FITTED_ON, seed, index.size_class >= resolution):
        latent = read_means(dataset, block, resolution)[row : row + 1]
        picture = decode(autoencoder, latent)[0].astype(np.float32) / 255
        height, width = latent.shape[2:]
        shown = picture.reshape(height, picture.shape[0] // height, width, picture.shape[1] // width, 3)
        cells.append(np.moveaxis(latent[0], 0, 2).reshape(height * width, -1).astype(np.float32))
        colours.append(shown.mean(axis=(1, 3)).reshape(height * width, 3))
    given, wanted = np.concatenate(cells), np.concatenate(colours)
    given = np.concatenate([given, np.ones((len(given), 1), np.float32)], axis=1)
    weights = np.linalg.lstsq(given, wanted, rcond=None)[0].astype(np.float32)
    light = wanted.mean(axis=1)
    left = light - (given @ weights).mean(axis=1)
    variance = float(light.var())
    return Preview(weights, 1 - float(left.var()) / variance if variance else 1.0)


def _means(dataset: Dataset, blocks: list[int], resolution: int) -> Iterator[NDArray[np.float16]]:
    """Each block's means, read a few ahead."""
    _ = dataset._readers  # made once, before threads share them
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: list[Future[NDArray[np.float16]]] = []
        for block in blocks:
            waiting.append(pool.submit(read_means, dataset, block, resolution))
            if len(waiting) > 2 * THREADS:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _decoded(autoencoder: Autoencoder, means: NDArray[np.float16]) -> NDArray[np.float32]:
    parts = [
        decode(autoencoder, means[start : start + _DECODED_AT_ONCE])
        for start in range(0, len(means), _DECODED_AT_ONCE)
    ]
    return np.concatenate(parts).astype(np.float32) / np.float32(255)


def _sorted(first: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Groups of at least two, the largest first, then by their first row."""
    order = np.argsort(first, kind="stable")
    edges = np.flatnonzero(np.diff(first[order], prepend=-1, append=-1))
    sizes = np.diff(edges)
    chosen = np.flatnonzero(sizes > 1)
    found = [order[edges[at] : edges[at + 1]] for at in chosen.tolist()]
    return sorted(found, key=lambda group: (-len(group), int(group[0])))
