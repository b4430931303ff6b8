"""Stored latents back to pictures: some rows of a dataset, with what is stored beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isthmus.core.encode.pretrained import require_torch
from isthmus.errors import DatasetMismatch, DatasetNotFound, UsageError
from isthmus.storage.shards.blocks import block_reader
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.draw import draw_rows

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder

BESIDE = "autoencoder"
"""Folder beside the shards where a patch_pca lies unless the recipe said otherwise."""


@dataclass(frozen=True, slots=True)
class Look:
    """One row."""

    key: str
    caption: str
    source: str
    bucket: str
    size_class: int
    original_size: tuple[int, int]
    """Height and width, pixels; zeros where nobody told."""
    flipped: bool
    picture: NDArray[np.uint8]
    """[H, W, 3], decoded from the latents' mean."""


def open_autoencoder(
    dataset: Dataset, source: str | None = None, *, device: str = "auto", bf16: bool = False
) -> Autoencoder:
    """The autoencoder that a dataset's latents were made with.

    Args:
        source: where it is: a folder, a URI or a hub name; None: a patch_pca beside the shards.

    Raises:
        UsageError: nobody says where it is, or there is none.
        DatasetMismatch: it is another one.
        NotInstalled: torch or the model libraries are missing.
    """
    require_torch("decoding latents")
    from isthmus.core.encode.autoencoders import load_autoencoder
    from isthmus.core.recipe.schema import Autoencoder as Section

    told = dataset.spec.autoencoder
    named = f"kind {told.kind}, {told.latent_channels} channels, factor {told.factor}"
    if source is None:
        if told.kind != "patch_pca":
            raise UsageError(
                f"the autoencoder of the latents is not beside them ({named})",
                where=dataset.uri,
                hint="name it with --autoencoder, or a recipe that has it with --recipe",
            )
        source = BESIDE
    section = Section(
        kind="patch_pca" if told.kind == "patch_pca" else "diffusers",
        source=source,
        latent_channels=told.latent_channels,
        factor=told.factor,
    )
    try:
        found = load_autoencoder(section, dataset.uri, device=device, bf16=bf16)
    except DatasetNotFound as error:
        hint = "name it with --autoencoder: the folder beside the shards it was fitted for"
        raise UsageError(error.message, hint=hint) from None
    # Files of others may come without a fingerprint.
    if told.fingerprint and found.fingerprint != told.fingerprint:
        raise DatasetMismatch(
            f"its latents were made with another autoencoder than {source}: fingerprint {told.fingerprint[:12]}, "
            f"not {found.fingerprint[:12]}",
            where=dataset.uri,
            hint="name the one it was encoded with, by --autoencoder or --recipe",
        )
    return found


def resolution_of(dataset: Dataset, asked: int | None, *, smallest: bool = False) -> int:
    """The resolution that was asked for, or the dataset's largest (or smallest). Raises UsageError where it has none such."""
    stored = sorted({r for shapes in dataset.manifest.latent_shapes.values() for r in shapes})
    if asked is None:
        return stored[0] if smallest else stored[-1]
    if asked not in stored:
        raise UsageError(
            f"no latents at {asked} px", where=dataset.uri, hint=f"it has {', '.join(map(str, stored))}"
        )
    return asked


def looks(
    dataset: Dataset, autoencoder: Autoencoder, *, rows: int, resolution: int, seed: int = 0
) -> Iterator[Look]:
    """Some rows, drawn by the seed from all that have this resolution; one block is in memory at a time.

    Raises:
        CorruptShard: a block's bytes are not those that were written.
        StorageError: the store refuses.
    """
    places = draw_rows(dataset, rows, seed, dataset.index.size_class >= resolution)
    return look_at(dataset, autoencoder, places, resolution)


def look_at(
    dataset: Dataset, autoencoder: Autoencoder, places: Sequence[tuple[int, int]], resolution: int
) -> Iterator[Look]:
    """The rows at some (block, row); one block is in memory at a time.

    Raises:
        CorruptShard: a block's bytes are not those that were written.
        StorageError: the store refuses.
    """
    reader, index = block_reader(dataset, resolution), dataset.index
    content, last = None, -1
    for block, row in places:
        if block != last:
            content, last = reader.read(block, 0), block
        assert content is not None
        bucket = dataset.spec.buckets[int(index.bucket[block])]
        shape = dataset.manifest.latent_shapes[bucket][resolution]
        latent = content.fixed["latent_mean"][row].view(np.float16).reshape(1, *shape)
        yield Look(
            key=content.strings["key"][row],
            caption=content.strings["caption"][row],
            source=content.strings.get("source", {row: ""})[row],
            bucket=bucket,
            size_class=int(index.size_class[block]),
            original_size=(_number(content, "original_height", row), _number(content, "original_width", row)),
            flipped=bool(_number(content, "flipped", row)),
            picture=decode(autoencoder, latent)[0],
        )


def decode(autoencoder: Autoencoder, latents: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Unscaled latents [b, C, h, w] -> pictures [b, H, W, 3]."""
    import torch

    from isthmus.core.sample.grids import to_pixels

    return to_pixels(autoencoder.decode(torch.from_numpy(np.ascontiguousarray(latents)).float()))


def _number(content: Any, name: str, row: int) -> int:
    column = content.numbers.get(name)
    return 0 if column is None else int(column[row])
