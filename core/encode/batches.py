"""Pictures grouped into batches of one shape, and the autoencoder that is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from isthmus.core.encode.buckets import BucketTable
from isthmus.core.encode.pictures import Unusable
from isthmus.core.encode.prepare import Prepared, as_tensor, prepare
from isthmus.core.encode.sources import ImageSource, Rejected

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.core.encode.patch_pca import PatchPCA

FIT_PICTURES = 10_000
"""Pictures that a patch_pca autoencoder is fitted to: the source's first ones."""
_FIT_BYTES = 2**20  # pixels that are taken into the covariance at once
_PENDING_BYTES = 256 * 2**20  # pixels that wait until their bucket has a batch


def batches(
    items: Iterator[Prepared | Rejected], batch_size: int, reject: Callable[[Rejected], None]
) -> Iterator[list[Prepared]]:
    """Pictures of one bucket and size class together, in an order that the source alone decides."""
    waiting: dict[tuple[str, int], list[Prepared]] = {}
    waiting_bytes = 0
    for item in items:
        if isinstance(item, Rejected):
            reject(item)
            continue
        kind = (item.bucket, item.size_class)
        waiting.setdefault(kind, []).append(item)
        waiting_bytes += item.bytes
        while waiting and (len(waiting.get(kind, ())) >= batch_size or waiting_bytes > _PENDING_BYTES):
            full = len(waiting.get(kind, ())) >= batch_size
            ready = waiting.pop(kind if full else max(waiting, key=lambda k: (len(waiting[k]), k)))
            waiting_bytes -= sum(other.bytes for other in ready)
            yield ready
    for kind in sorted(waiting):
        yield waiting[kind]


def fit_patch_pca(source: ImageSource, table: BucketTable, *, factor: int, latent_channels: int) -> PatchPCA:
    """The linear autoencoder of a source's pictures, each at the largest resolution that it reaches."""
    from isthmus.core.encode.patch_pca import PatchPCA

    def pictures() -> Iterator[Tensor]:
        used, alike = 0, list[NDArray[np.uint8]]()
        for record in source:
            if isinstance(record, Rejected):
                continue
            try:
                (pixels,) = prepare(record, table, largest_only=True).pixels.values()
            except Unusable:
                continue
            if alike and (pixels.shape != alike[0].shape or len(alike) * pixels.nbytes >= _FIT_BYTES):
                yield as_tensor(alike)
                alike.clear()
            alike.append(pixels)
            used += 1
            if used == FIT_PICTURES:
                break
        if alike:
            yield as_tensor(alike)

    return PatchPCA.fit(pictures(), factor=factor, latent_channels=latent_channels)
