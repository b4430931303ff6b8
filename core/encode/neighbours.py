"""Groups of hashes that differ in few bits, among millions: only those are compared that agree in some bits exactly.

Hashes are cut into d + t bands. Two that differ in at most d bits differ in at most d bands, so they agree in t: each choice of t
bands is a key, and hashes with equal keys are compared. t grows with their number, so that few share a key by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import log2

import numpy as np
from numpy.typing import NDArray

from isthmus.core.encode.hashes import BITS, Hashes

MAX_DISTANCE = 8
COLOUR = 24
"""What a quarter's mean colour may differ by, of 255."""
_AT_ONCE = 1 << 20
"""Pairs that are compared together."""


def groups(hashes: Hashes, distance: int) -> NDArray[np.int64]:
    """For each hash the first one of its group, [n]; alone it is its own.

    Two are neighbours when at most `distance` bits and no quarter's colour differ by more than `COLOUR`; a group is all that
    are joined by neighbours. Memory: about 100 bytes a hash; ten million take a minute.
    """
    firsts, standing_for = _alike(hashes)
    parent = np.arange(len(firsts), dtype=np.int64)
    bits, colours = hashes.bits[firsts], hashes.colours[firsts]
    for key in _keys(bits, distance):
        order = np.argsort(key, kind="stable")
        key = key[order]
        # Those whose next neighbour in the order has the same key, then the next but one, until there are none.
        places = np.flatnonzero(key[:-1] == key[1:])
        step = 1
        while len(places):
            for start in range(0, len(places), _AT_ONCE):
                part = places[start : start + _AT_ONCE]
                _join(parent, *_near(bits, colours, order[part], order[part + step], distance))
            step += 1
            places = places[places + step < len(key)]
            places = places[key[places] == key[places + step]]
    roots = _find(parent, np.arange(len(parent)))
    # Numbered by the first hash of the group, in the order they were given.
    return np.asarray(firsts[roots][standing_for], np.int64)


def apart(bits: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Bits in which they differ."""
    return np.asarray(np.bitwise_count(bits ^ other), np.int64)


def _alike(hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One of each hash and rough colour, first ones first, and which of them each hash stands behind.

    A million pictures of one grey surface must not be compared each with each.
    """
    steps = np.uint64(4) * np.arange(12, dtype=np.uint64)
    rough = np.zeros(len(hashes), np.uint64)
    for column, step in zip(hashes.colours.T, steps, strict=True):  # four bits each: 255 / COLOUR is 10
        rough |= (column // np.uint8(COLOUR)).astype(np.uint64) << step
    order = np.lexsort((rough, hashes.bits))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (np.diff(hashes.bits[order]) != 0) | (np.diff(rough[order]) != 0)
    # The sort is stable: the first of each kind is the first that was given.
    firsts = order[fresh]
    rank = np.empty(len(firsts), np.int64)
    rank[np.argsort(firsts, kind="stable")] = np.arange(len(firsts))
    standing_for = np.empty(len(order), np.int64)
    standing_for[order] = rank[np.cumsum(fresh) - 1]
    return np.sort(firsts), standing_for


def _keys(bits: NDArray[np.uint64], distance: int) -> Iterator[NDArray[np.uint64]]:
    """Every choice of bands as a key, one at a time."""
    wanted = log2(max(len(bits), 2)) - 3
    together = next((t for t in (1, 2, 3) if t * BITS / (distance + t) >= wanted), 3)
    bands = distance + together
    # Neighbouring frequencies are alike: each band takes every so-many-th bit.
    masks = [
        np.bitwise_or.reduce(np.uint64(1) << np.arange(first, BITS, bands, dtype=np.uint64))
        for first in range(bands)
    ]
    for chosen in combinations(masks, together):
        yield bits & np.bitwise_or.reduce(np.array(chosen))


def _near(
    bits: NDArray[np.uint64],
    colours: NDArray[np.uint8],
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    distance: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Those of the pairs that are neighbours."""
    kept = np.bitwise_count(bits[left] ^ bits[right]) <= distance
    left, right = left[kept], right[kept]
    kept = np.abs(colours[left].astype(np.int16) - colours[right]).max(axis=1, initial=0) <= COLOUR
    return left[kept], right[kept]


def _join(parent: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Makes one group of each pair's groups; the smaller number stands for it."""
    while len(left):
        left, right = _find(parent, left), _find(parent, right)
        differ = left != right
        left, right = left[differ], right[differ]
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def _find(parent: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who stands for them."""
    found = parent[of]
    while not np.array_equal(further := parent[found], found):
        found = further
    parent[of] = found
    return found
