"""Counter-based randomness: a key of integers gives the same numbers everywhere, without any state.

The order of samples is part of the format: it must not change with a library. So only numpy's bit generator is
used, whose stream is guaranteed (Philox keyed through SeedSequence); the permutation made of it is our own,
because numpy reserves the right to change how ``Generator.permutation`` uses the bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def raw(count: int, *key: int) -> NDArray[np.uint64]:
    """`count` random 64-bit numbers of this key of non-negative integers."""
    bits = np.random.Philox(np.random.SeedSequence(list(key)))
    return np.asarray(bits.random_raw(count), np.uint64)


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(count): the ranks of random numbers."""
    return np.argsort(raw(count, *key), kind="stable")


def below(limit: int, *key: int) -> int:
    """A number in [0, limit)."""
    return int(raw(1, *key)[0]) % limit
