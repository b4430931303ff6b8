"""CRC-32 of a file from the CRC-32s of its pieces: what the parts of an upload, or the chunks in an index, add up to.

CRC-32 is linear: a piece contributes its own CRC times x^(8 x bytes behind it), modulo the polynomial. The arithmetic is
that of zlib's `crc32_combine` (Mark Adler), on reflected polynomials; here also for whole arrays of pieces at once, with numpy,
which a copy of other files than a dataset's does not load.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    UInt = NDArray[np.uint64]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""x^0 in reflected order."""


def _product(a: int, b: int) -> int:
    """a x b modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power(exponent: int) -> int:
    """x^(2^exponent)."""
    if exponent == 0:
        return 1 << 30
    half = _power(exponent - 1)
    return _product(half, half)


@cache
def _behind(count: int) -> int:
    """x^(8 x count), for a piece with so many bytes behind it."""
    result = _ONE
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            result = _product(_power(bit + 3), result)
    return result


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces one behind the other.

    Args:
        pieces: (CRC-32, bytes) of each, in order.
    """
    whole = 0
    for crc, length in pieces:
        # The parts of a file are of one length but for the last: the power is remembered.
        whole = _product(_behind(length), whole) ^ crc
    return whole


def _times(a: Any, b: Any) -> UInt:
    """a x b modulo the polynomial, element by element."""
    import numpy as np

    left = np.asarray(a, np.uint64)
    right = np.asarray(b, np.uint64).copy()
    product = np.zeros(np.broadcast(left, right).shape, np.uint64)
    one, polynomial = np.uint64(1), np.uint64(_POLYNOMIAL)
    for bit in range(31, -1, -1):
        product ^= right * ((left >> np.uint64(bit)) & one)
        right = (right >> one) ^ (polynomial * (right & one))
    return product


def _shift(count: Any) -> UInt:
    """x^(8 x count), element by element."""
    import numpy as np

    left = np.asarray(count, np.uint64)
    result = np.full(left.shape, _ONE, np.uint64)
    for bit in range(int(left.max(initial=0)).bit_length()):
        here = (left >> np.uint64(bit)) & np.uint64(1)
        if here.any():
            power = np.asarray(_power(bit + 3), np.uint64)
            result = np.where(here.astype(bool), _times(power, result), result)
    return result


def combine_files(crcs: Any, lengths: Any, starts: Any) -> UInt:
    """The CRC-32s of many files whose pieces lie in one array.

    Args:
        crcs: [pieces] CRC-32 of each piece.
        lengths: [pieces] bytes of each.
        starts: [files] position of each file's first piece, ascending; each file has at least one.

    Returns:
        [files]
    """
    import numpy as np

    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    counts = np.diff(np.append(np.asarray(starts, np.int64), len(lengths)))
    file_ends = ends[np.asarray(starts, np.int64) + counts - 1]
    behind = np.repeat(file_ends, counts) - ends
    shares = _times(np.asarray(crcs, np.uint64), _shift(behind))
    return np.asarray(np.bitwise_xor.reduceat(shares, np.asarray(starts, np.int64)), np.uint64)
