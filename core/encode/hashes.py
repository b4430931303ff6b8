"""Perceptual hashes: 64 bits of a picture's coarse light and dark, and its colours in four quarters.

The hash is pHash's: the signs of the 64 lowest frequencies of a 32 x 32 cosine transform against their median (Zauner,
"Implementation and Benchmarking of Perceptual Image Hash Functions", 2010). Enlarging, compressing and lighting up a picture
turns a few bits; another picture has about half of them different. Turned, mirrored and cut pictures are other pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIDE, BITS = 32, 64
FLAT = 2.0 / 255
"""Root mean square of light and dark below which a picture is one surface: its frequencies would be noise."""
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, slots=True)
class Hashes:
    """Of some pictures."""

    bits: NDArray[np.uint64]
    """[n]; 0 for pictures of one surface."""
    colours: NDArray[np.uint8]
    """[n, 12]: mean red, green and blue of the quarters."""

    def __len__(self) -> int:
        return len(self.bits)


def hashes(pictures: NDArray[np.float32]) -> Hashes:
    """Of pictures [n, H, W, 3] with values from 0 to 1, of any size."""
    light = pictures @ _LUMA
    coarse = _resample(light, SIDE, SIDE)
    frequencies = coarse.reshape(len(coarse), -1) @ _cosines().T
    signs = frequencies > np.median(frequencies, axis=1, keepdims=True)
    bits = np.packbits(signs, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)
    flat = coarse.reshape(len(coarse), -1).std(axis=1) < FLAT
    quarters = np.stack([_resample(pictures[..., channel], 2, 2) for channel in range(3)], -1)
    colours = (quarters.reshape(len(pictures), 12).clip(0, 1) * 255).round().astype(np.uint8)
    return Hashes(np.where(flat, np.uint64(0), bits), colours)


def _resample(values: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """[n, H, W] -> [n, height, width]: means of areas, or lines between the cells' centres where there are fewer."""
    rows, columns = _weights(values.shape[1], height), _weights(values.shape[2], width)
    return np.asarray(rows @ values @ columns.T, np.float32)


@cache
def _weights(given: int, wanted: int) -> NDArray[np.float32]:
    """[wanted, given], rows sum to 1."""
    edges = np.linspace(0, given, wanted + 1)
    if given >= wanted:
        cells = np.arange(given)
        overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        share = overlap.clip(min=0) / (given / wanted)
    else:
        centre = ((edges[1:] + edges[:-1]) / 2 - 0.5).clip(0, given - 1)
        share = (1 - np.abs(centre[:, None] - np.arange(given))).clip(min=0)
    return np.asarray(share, np.float32)


@cache
def _cosines() -> NDArray[np.float32]:
    """[64, 32 * 32]: the lowest frequencies but the mean, by the square of their distance from it."""
    at = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    waves = np.cos(np.arange(SIDE)[:, None] * at)
    order = sorted(
        ((u, v) for u in range(16) for v in range(16) if u or v), key=lambda f: (f[0] ** 2 + f[1] ** 2, f)
    )
    return np.stack([np.outer(waves[u], waves[v]).ravel() for u, v in order[:BITS]]).astype(np.float32)
