"""CRC-32 of a file from the CRC-32s of its pieces: what the parts of an upload, or the chunks in an index, add up to.

CRC-32 is linear: a piece contributes its own CRC times x^(8 x bytes behind it), modulo the polynomial. The arithmetic is
that of zlib's `crc32_combine` (Mark Adler), on reflected polynomials; here for whole arrays of pieces at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt = NDArray[np.uint64]
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""x^0 in reflected order."""


def _times(a: Any, b: Any) -> UInt:
    """a x b modulo the polynomial, element by element."""
    left = np.asarray(a, np.uint64)
    right = np.asarray(b, np.uint64).copy()
    product = np.zeros(np.broadcast(left, right).shape, np.uint64)
    one, polynomial = np.uint64(1), np.uint64(_POLYNOMIAL)
    for bit in range(31, -1, -1):
        product ^= right * ((left >> np.uint64(bit)) & one)
        right = (right >> one) ^ (polynomial * (right & one))
    return product


def _table() -> list[UInt]:
    power = np.asarray(1 << 30, np.uint64)  # x^1
    found = [power]
    for _ in range(63):
        power = _times(power, power)
        found.append(power)
    return found


_POWERS = _table()
"""x^(2^k)."""


def _shift(count: Any) -> UInt:
    """x^(8 x count), for bytes that lie behind a piece."""
    left = np.asarray(count, np.uint64)
    result = np.full(left.shape, _ONE, np.uint64)
    for bit in range(int(left.max(initial=0)).bit_length()):
        here = (left >> np.uint64(bit)) & np.uint64(1)
        if here.any():
            result = np.where(here.astype(bool), _times(_POWERS[bit + 3], result), result)
    return result


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces one behind the other.

    Args:
        pieces: (CRC-32, bytes) of each, in order.
    """
    listed = list(pieces)
    if not listed:
        return 0
    crcs = np.array([crc for crc, _ in listed], np.uint64)
    lengths = np.array([length for _, length in listed], np.int64)
    return int(combine_files(crcs, lengths, np.array([0]))[0])


def combine_files(crcs: Any, lengths: Any, starts: Any) -> UInt:
    """The CRC-32s of many files whose pieces lie in one array.

    Args:
        crcs: [pieces] CRC-32 of each piece.
        lengths: [pieces] bytes of each.
        starts: [files] position of each file's first piece, ascending; each file has at least one.

    Returns:
        [files]
    """
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    counts = np.diff(np.append(np.asarray(starts, np.int64), len(lengths)))
    file_ends = ends[np.asarray(starts, np.int64) + counts - 1]
    behind = np.repeat(file_ends, counts) - ends
    shares = _times(np.asarray(crcs, np.uint64), _shift(behind))
    return np.asarray(np.bitwise_xor.reduceat(shares, np.asarray(starts, np.int64)), np.uint64)
