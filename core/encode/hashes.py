"""Perceptual hashes: 64 bits of a picture's coarse light and dark, and its colours in four quarters.

The hash is pHash's: the signs of the 64 lowest frequencies of a 32 x 32 cosine transform against their median (Zauner,
"Implementation and Benchmarking of Perceptual Image Hash Functions", 2010). Enlarging, compressing and lighting up a picture
turns a few bits; another picture has about half of them different. Turned, mirrored and cut pictures are other pictures.

While encoding, it is taken of what the autoencoder gets at the smallest resolution, and kept (:func:`picture_fields`): in whole
numbers, so that every machine finds the same bits. What is found in latents later differs by what the autoencoder loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

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


FIELDS = ("phash", "phash_colours")
"""Of the dataset: 16 hexadecimal digits, the bits as a whole number; and 24, the quarters' colours one behind the other."""


def picture_fields(picture: Image) -> dict[str, str]:
    """The hash of an RGB picture as a dataset keeps it.

    The same as :func:`hashes` but for rounding: the means of areas are bytes, the waves whole numbers, and the rest is exact.
    """
    from PIL import Image

    if (
        min(picture.size) < SIDE
    ):  # areas of less than a pixel: of small pictures only, where time does not matter
        small = _resample_whole(np.asarray(picture, np.int64))
    else:
        small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX), np.float64)
    # Whole numbers below 2^53 all the way: floats hold them, and sums are the same in any order.
    light = small @ _LUMA_WHOLE
    waves, lowest = _whole_cosines()
    frequencies = (waves @ light @ waves.T).ravel()[lowest]
    ordered = np.sort(frequencies)
    signs = 2 * frequencies > ordered[BITS // 2 - 1] + ordered[BITS // 2]
    bits = int.from_bytes(np.packbits(signs, bitorder="little").tobytes(), "little")
    count, flat = SIDE * SIDE, light.ravel()
    if count * int(flat @ flat) - int(flat.sum()) ** 2 < (FLAT * 255_000 * count) ** 2:
        bits = 0
    halves = _HALVES @ small.reshape(SIDE, -1)  # [2, 32 * 3]
    quarters = np.asarray(_HALVES @ halves.reshape(2, SIDE, 3)).ravel()
    colours = np.floor(quarters / (count // 4) + 0.5).astype(np.uint8)
    return dict(zip(FIELDS, (f"{bits:016x}", colours.tobytes().hex()), strict=True))


def parse_hashes(bits: bytes, colours: bytes) -> Hashes:
    """Hashes out of the digits of both fields, one row behind the other. ValueError when they are no such digits."""
    found = np.frombuffer(bytes.fromhex(bits.decode("ascii")), ">u8").astype(np.uint64)
    return Hashes(
        found, np.frombuffer(bytes.fromhex(colours.decode("ascii")), np.uint8).reshape(len(found), 12)
    )


_LUMA_WHOLE = np.array([299.0, 587.0, 114.0])
_WAVE = 1 << 12
"""A cosine of 1 as a whole number; two of them, 255,000 and 32 x 32 cells multiply to less than 2^53."""
_HALVES = np.repeat(np.eye(2), SIDE // 2, axis=1)
"""[2, SIDE]: sums of both halves."""


@cache
def _whole_cosines() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The waves along one side, [w, SIDE], and which of their [w, w] products are the 64 lowest frequencies."""
    order = _lowest()
    count = 1 + max(max(pair) for pair in order)
    at = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    waves = (np.cos(np.arange(count)[:, None] * at) * _WAVE).round()
    return waves, np.array([u * count + v for u, v in order])


def _resample_whole(picture: NDArray[np.int64]) -> NDArray[np.float64]:
    """[H, W, 3] -> [SIDE, SIDE, 3], rounded: as :func:`_resample`, in whole numbers. What falls between two of them would be
    rounded up on one machine and down on another, as its sums are ordered."""
    rows, columns = (
        (_weights(given, SIDE).astype(np.float64) * _WAVE).round().astype(np.int64)
        for given in picture.shape[:2]
    )
    sums = (rows @ picture.reshape(len(picture), -1)).reshape(SIDE, -1, 3)
    sums = np.einsum("xw,ywc->yxc", columns, sums)
    weight = np.outer(rows.sum(1), columns.sum(1))[..., None]
    return np.asarray((2 * sums + weight) // (2 * weight), np.float64)


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
    return np.stack([np.outer(waves[u], waves[v]).ravel() for u, v in _lowest()]).astype(np.float32)


def _lowest() -> list[tuple[int, int]]:
    """The 64 lowest frequencies but the mean, (down, across)."""
    pairs = ((u, v) for u in range(16) for v in range(16) if u or v)
    return sorted(pairs, key=lambda f: (f[0] ** 2 + f[1] ** 2, f))[:BITS]
